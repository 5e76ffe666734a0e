package netpolicy_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
)

var endpoint = Identity{Address4: netip.MustParseAddr("10.200.3.7"), Address6: netip.MustParseAddr("fd77::3:7")}

func TestParse_errors_name_line_and_field(t *testing.T) {
	tests := []struct{ text, want string }{
		{"rulez: []", `line 1: "rulez": there is no such field`},
		{"rules:\n- direction: egress\n  prots: [tcp]", `line 3: "rules[0].prots": there is no such field`},
		{"Rules: []", `"Rules": there is no such field`},
		{`{"rules": [{"direction": "egress", "Verdict": "allow"}]}`, `"rules[0].Verdict": there is no such field`},
		{"rules: []\nrules: []", "line 2"},
		{`{"quota": {}, "quota": {}}`, "quota"},
		{"rules: {}", "rules: a list belongs here"},
		{"rules: [tcp]", "rules[0]: fields belong here"},
		{"rules: [null]", "rules[0]: an empty entry"},
		{"rules:\n- {direction: egress, cidrs: [null]}", "line 2: rules[0].cidrs[0]: an empty entry"},
		{"rules:\n- {direction: egress, ports: [~]}", "rules[0].ports[0]: an empty entry"},
		{"rules: [{direction: egress, cidrs: [10.0.0.1/8]}]", "write 10.0.0.0/8"},
		{"rules: [{direction: egress, cidrs: [10.0.0.0/33]}]", "rules[0].cidrs[0]"},
		{"rules: [{direction: egress, cidrs: ['::ffff:1.2.3.4']}]", "write it as IPv4"},
		{"rules: [{direction: egress, cidrs: ['fe80::1%eth0']}]", "zone"},
		{"rules: [{direction: egress, cidrs: ['']}]", "rules[0].cidrs[0]"},
		{"rules: [{direction: egress, ports: [0]}]", "rules[0].ports[0]"},
		{"rules: [{direction: egress, ports: [65536]}]", "rules[0].ports[0]"},
		{"rules: [{direction: egress, ports: [80-70]}]", "rules[0].ports[0]"},
		{"rules: [{direction: egress, ports: ['']}]", "rules[0].ports[0]"},
		{"rules: [{direction: egress, ports: ['+80']}]", "rules[0].ports[0]"},
		{"rules: [{direction: egress, ports: [-1]}]", "rules[0].ports[0]"},
		{"rules: [{direction: egress, ports: [080]}]", "rules[0].ports[0]"},
		{"rules: [{direction: out}]", "rules[0].direction"},
		{"rules: [{verdict: allow}]", "rules[0].direction"},
		{"rules: [{direction: egress, verdict: yes}]", "rules[0].verdict"},
		{"rules: [{direction: egress, verdict: true}]", "not text"},
		{"rules: [{direction: egress, verdict: pass}]", "rules[0].verdict"},
		{"rules: [{direction: egress, verdict: allow, groups: [metadata]}]", "always denied"},
		{"rules: [{direction: egress, verdict: allow, groups: [link-local]}]", "always denied"},
		{"rules: [{direction: egress, verdict: allow, groups: [loopback]}]", "always denied"},
		{"rules: [{direction: egress, verdict: allow, groups: [multicast]}]", "always denied"},
		{"rules: [{direction: egress, groups: [all]}]", "rules[0].groups[0]"},
		{"rules: [{direction: egress, groups: ['']}]", "rules[0].groups[0]"},
		{"rules: [{direction: egress, protocols: [sctp]}]", "rules[0].protocols[0]"},
		{"rules: [{direction: egress, agents: ['a b']}]", "rules[0].agents[0]"},
		{"rules: [{direction: egress, verdict: allow, names: [example.com]}]", "add dns"},
		{"dns: {}\nrules: [{direction: egress, verdict: deny, names: [example.com]}]", "only rules that allow egress"},
		{"dns: {}\nrules: [{direction: ingress, verdict: allow, names: [example.com]}]", "only rules that allow egress"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: ['*.com']}]", "rules[0].names[0]"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: ['*']}]", "rules[0].names[0]"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: [Example.com]}]", "lower case"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: [1.2.3.4]}]", "rules[0].names[0]"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: ['a..b']}]", "rules[0].names[0]"},
		{"rules: [{direction: egress, verdict: allow, groups: [any], tls: [443]}]", "rules[0].tls: it says where names are checked"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: [a.b], tls: [none, 443]}]", "rules[0].tls[0]: none stands alone"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: [a.b], tls: [0]}]", "rules[0].tls[0]"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: [a.b], tls: 443}]", "rules[0].tls: a list belongs here"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: [a.b], tls: ['']}]", "none is for names"},
		{"dns: {}\nrules: [{direction: egress, verdict: allow, names: [a.b], tls: [~]}]", "rules[0].tls[0]: an empty entry"},
		{"dns: {upstreams: [1.1.1.1]}", "upstreams"},
		{"publish: [{listen: '127.0.0.1:80', port: 80}]", "publish[0].protocol"},
		{"publish: [{listen: '127.0.0.1:80', protocol: tcp}]", "publish[0].port"},
		{"limits: {egress: {bits: {per_second: 0}}}", "limits.egress.bits.per_second"},
		{"limits: {egress: {bits: {}}}", "limits.egress.bits.per_second"},
		{"limits: {egress: {packets: {per_second: -1}}}", "limits.egress.packets.per_second"},
		{"quota: {egress_bytes: -1}", "quota.egress_bytes"},
		{"quota: {egress_bytes: ten}", "quota.egress_bytes"},
		{"flows: 1", "flows"},
		{"version: 2", "version: 2"},
		{"default: allow", "default: fields belong here"},
		{"default: {egress: permit}", "default.egress"},
		{"a: &x 1\nb: *x", "no such field"},
		{"rules: &x []\npublish: *x", "anchors"},
		{"rules: !!seq []", "tags"},
		{"rules: []\n---\nrules: []", "more than one document"},
		{"rules: [", "yaml"},
		{strings.Repeat(" ", MaxFileBytes+1), "bytes"},
		{"rules: [" + strings.Repeat("{direction: egress},", MaxRules+1) + "]", "at most 1024"},
	}
	for _, tt := range tests {
		name := tt.text
		if len(name) > 60 {
			name = name[:60]
		}
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(tt.text))
			if !errors.Is(err, ErrPolicy) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want ErrPolicy with %q", err, tt.want)
			}
		})
	}
}

func TestParse_errors_have_the_place_of_what_is_wrong(t *testing.T) {
	for text, want := range map[string]string{
		"version: 2": "version",
		"rules: [{direction: egress}, {direction: egress, verdict: allow, ports: [80, 0]}]": "rules[1].ports[1]",
		"rules: [{direction: egress, verdict: allow, cidrs: [10.0.0.1/8]}]":                 "rules[0].cidrs[0]",
		"rules: [{direction: egress, verdict: allow, groups: [public, metadata]}]":          "rules[0].groups[1]",
		"rules: [{direction: egress, verdict: allow, names: [a.example]}]":                  "rules",
		"rules: [{direction: out}]":                                          "rules[0].direction",
		"rules: [{direction: egress, port: 1}]":                              "rules[0].port",
		"rules: [{direction: egress}, null]":                                 "rules[1]",
		"default: {egress: permit}":                                          "default.egress",
		"proxy: {enabled: true, inject: [{secret: 1a, hosts: [a.example]}]}": "proxy.inject[0].secret",
		"limits: {ingress: {bits: {per_second: 1}}}":                         "limits.ingress.bits.per_second",
		"publish: [{listen: '127.0.0.1:80', protocol: tcp}]":                 "publish[0].port",
		strings.Repeat("x", 200) + ": 1":                                     strings.Repeat("x", 80),
		"[]":                                                                 "",
		"rules: [":                                                           "",
	} {
		_, err := Parse([]byte(text))
		var in *FieldError
		if errors.As(err, &in); err == nil || (in != nil && in.Field != want) || in == nil && want != "" {
			t.Errorf("%.80s: %+v of %v, want %q", text, in, err, want)
		}
	}
}

func TestPolicy_unmarshal_into_a_used_policy_leaves_nothing(t *testing.T) {
	for _, text := range []string{"null", "{}", `{"rules": null}`} {
		p := Policy{Default: Defaults{Egress: Allow}, Rules: []Rule{{Direction: Egress, Verdict: Allow}}}
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(p, Policy{}) {
			t.Errorf("%s: %+v is left", text, p)
		}
	}
	p := Policy{Default: Defaults{Egress: Allow}}
	if err := json.Unmarshal([]byte(`{"nonsense": 1}`), &p); err == nil || p.Default.Egress == Allow {
		t.Errorf("%v, left %+v", err, p)
	}
}

// The hand-written schema has exactly the fields of the types.
func TestSchema_has_the_fields_of_the_types(t *testing.T) {
	type object struct {
		Properties map[string]json.RawMessage
		Items      json.RawMessage
		Ref        string `json:"$ref"`
	}
	var root struct {
		object
		Defs map[string]json.RawMessage `json:"$defs"`
	}
	if err := json.Unmarshal(Schema(), &root); err != nil {
		t.Fatal(err)
	}
	var compare func(at string, typ reflect.Type, raw json.RawMessage)
	compare = func(at string, typ reflect.Type, raw json.RawMessage) {
		var o object
		if err := json.Unmarshal(raw, &o); err != nil {
			t.Fatalf("%s: %v", at, err)
		}
		if o.Ref != "" {
			compare(at, typ, root.Defs[strings.TrimPrefix(o.Ref, "#/$defs/")])
			return
		}
		for typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
		}
		if typ.Kind() == reflect.Slice {
			compare(at+"[]", typ.Elem(), o.Items)
			return
		}
		if _, text := reflect.New(typ).Interface().(interface{ UnmarshalText([]byte) error }); text || typ.Kind() != reflect.Struct {
			return
		}
		fields := map[string]bool{}
		for i := range typ.NumField() {
			name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			if y, _, _ := strings.Cut(typ.Field(i).Tag.Get("yaml"), ","); y != name {
				t.Errorf("%s.%s is %s in YAML", at, name, y)
			}
			fields[name] = true
			sub, ok := o.Properties[name]
			if !ok {
				t.Errorf("%s.%s is not in the schema", at, name)
				continue
			}
			compare(at+"."+name, typ.Field(i).Type, sub)
		}
		for name := range o.Properties {
			if !fields[name] {
				t.Errorf("%s.%s of the schema is not in the type", at, name)
			}
		}
	}
	compare("policy", reflect.TypeFor[Policy](), Schema())
}

func TestCompile_identities_that_cannot_be(t *testing.T) {
	for _, id := range []Identity{
		{}, {Address4: endpoint.Address6}, {Address4: netip.MustParseAddr("127.0.0.1")}, {Address4: netip.MustParseAddr("169.254.169.254")},
		{Address4: endpoint.Address4, Address6: endpoint.Address4}, {Address4: endpoint.Address4, Address6: netip.MustParseAddr("::1")}, {Address4: endpoint.Address4, Address6: netip.MustParseAddr("::ffff:1.2.3.4")},
	} {
		if _, err := Compile(&Policy{}, id, Environment{}); !errors.Is(err, ErrIdentity) {
			t.Errorf("%+v: %v, want ErrIdentity", id, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("rules: [{direction: egress, verdict: allow, cidrs: [192.0.2.0/24], protocols: [udp], ports: [any]}]"))
	f.Add([]byte(`{"rules":[{"direction":"egress","verdict":"allow","groups":["any"],"protocols":["any"],"ports":["any"]}]}`))
	f.Add([]byte("limits: {egress: {bits: {per_second: 1000}}}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := Parse(text)
		if err != nil {
			if !errors.Is(err, ErrPolicy) {
				t.Fatalf("%v is no ErrPolicy", err)
			}
			return
		}
		j, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		q, err := Parse(j)
		if err != nil {
			t.Fatalf("its own JSON %s: %v", j, err)
		}
		if a, b := fmt.Sprintf("%+v", *p), fmt.Sprintf("%+v", *q); len(p.Rules) != len(q.Rules) || p.Default != q.Default {
			t.Fatalf("%s is not %s", a, b)
		}
		if _, err := Compile(p, endpoint, Environment{}); err != nil {
			t.Fatal(err)
		}
	})
}

func TestHostAddresses_are_taken_by_the_compiler(t *testing.T) {
	all, err := HostAddresses()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if a.IsLoopback() || a.IsLinkLocalUnicast() {
			t.Errorf("%v belongs to the floor", a)
		}
	}
	if _, err := Compile(&Policy{}, endpoint, Environment{Host: all}); err != nil {
		t.Error(err)
	}
}
