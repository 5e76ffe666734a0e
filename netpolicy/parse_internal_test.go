package netpolicy

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// full has each field of a policy.
const full = `
version: 1
default: {egress: deny, ingress: allow}
dns: {upstreams: ["1.1.1.1:53"], queries_per_second: 5}
rules:
- {name: web, direction: egress, verdict: allow, names: [example.com, "*.example.org"], protocols: [tcp], ports: [80, 443, 8000-8010]}
- {direction: egress, verdict: allow, cidrs: [192.0.2.0/24, "2001:db8::/32"], protocols: [any], ports: [any]}
- {direction: ingress, verdict: deny, groups: [any], agents: [blue], protocols: [udp]}
- {direction: egress, verdict: allow, names: [example.net], protocols: [tcp], ports: [443], tls: [443]}
publish: [{listen: "127.0.0.1:8080", port: 80, protocol: tcp}]
proxy: {enabled: true, inject: [{secret: key, hosts: [example.com], ports: [443], header: Authorization, prefix: "Bearer "}]}
limits: {egress: {bits: {per_second: 18446744073709551615, burst: 9}, packets: {per_second: 7}, connections: {per_second: 1}}}
quota: {egress_bytes: 12345678901234567890, ingress_bytes: 0}
flows: 100
`

func own(t testing.TB, text string) []byte {
	var p Policy
	if err := p.parse([]byte(text)); err != nil {
		t.Fatal(err)
	}
	j, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func TestPolicy_that_a_record_has_is_read_without_YAML_and_others_are_not(t *testing.T) {
	for _, c := range []struct {
		name, text string
		want       bool
	}{
		{"a full one, as it is written", string(own(t, full)), true},
		{"an empty one, as it is written", string(own(t, "{}")), true},
		{"a field is left out", `{"default": {}}`, false},
		{"other case of a field", strings.Replace(string(own(t, "{}")), `"rules"`, `"Rules"`, 1), false},
		{"a field twice", strings.Replace(string(own(t, "{}")), `"quota"`, `"rules": null, "quota"`, 1), false},
		{"an unknown field", strings.Replace(string(own(t, "{}")), `"quota"`, `"quotum": {}, "quota"`, 1), false},
		{"another order", `{"rules":null,"default":{},"limits":{"egress":{},"ingress":{}},"quota":{}}`, false},
		{"null", "null", false},
		{"an empty entry of a list", strings.Replace(string(own(t, "{}")), `"rules": null`, `"rules": [null]`, 1), false},
		{"a number in another form", strings.Replace(string(own(t, "flows: 100")), "100", "1e2", 1), false},
		{"text with a control character", strings.Replace(string(own(t, full)), "web", "w\x7fb", 1), false},
		{"two values", string(own(t, "{}")) + "{}", false},
		{"too long", string(own(t, "rules: ["+strings.Repeat("{direction: egress, verdict: allow},", 50)+"]")), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, ok := readOwn([]byte(c.text)); ok != c.want {
				t.Errorf("%v, want %v: %s", ok, c.want, c.text)
			}
		})
	}
}

// What is read without YAML is what would be read with it.
func FuzzReadOwn(f *testing.F) {
	f.Add(own(f, full))
	f.Add(own(f, "{}"))
	f.Add([]byte(`{"default":{},"rules":[{"direction":"egress"}],"limits":{"egress":{},"ingress":{}},"quota":{}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		q, ok := readOwn(text)
		if !ok {
			return
		}
		var p Policy
		if err := p.parse(text); err != nil {
			t.Fatalf("the parser refuses it: %v", err)
		}
		if !reflect.DeepEqual(p, q) {
			t.Fatalf("%+v, and by the parser %+v", q, p)
		}
	})
}
