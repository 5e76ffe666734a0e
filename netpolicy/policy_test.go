package netpolicy_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	. "github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

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
		{"version: 2", "version 2"},
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

// lists are the ways in which a list, or what contains it, can be left out.
var lists = []string{"", "%s: null", "%s: ~", "%s:", "%s: []"}

func TestPolicy_lists_left_out_never_allow(t *testing.T) {
	questions := []refmodel.Question{}
	for _, d := range []Direction{Egress, Ingress} {
		for _, p := range []Protocol{TCP, UDP, ICMP} {
			for _, a := range []string{"93.184.216.34", "10.1.2.3", "2606:4700::1", "fd00::1", "172.31.255.1"} {
				questions = append(questions, refmodel.Question{Direction: d, Protocol: p, Peer: netip.MustParseAddr(a), Port: 443})
			}
		}
	}
	never := func(t *testing.T, p *Policy) {
		t.Helper()
		for i, form := range roundTrips(t, p) {
			m := refmodel.New(form, agent, Environment{})
			for _, q := range questions {
				if a := m.Ask(q); a.Verdict == Allow {
					t.Errorf("form %d of the policy allows %+v by %s: %+v", i, q, a.Reason, form)
				}
			}
			if len(compiledAllows(t, form)) > 0 {
				t.Errorf("form %d of the policy compiles to something that allows: %v", i, compiledAllows(t, form))
			}
		}
	}
	t.Run("zero value", func(t *testing.T) { never(t, &Policy{}) })
	t.Run("zero rule", func(t *testing.T) {
		never(t, &Policy{Rules: []Rule{{Direction: Egress}, {Direction: Ingress}}})
	})
	for _, text := range []string{"", "null", "~", "{}", "[]"[:0], "# nothing", "---\n"} {
		t.Run("text "+text, func(t *testing.T) {
			p, err := Parse([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			never(t, p)
		})
	}
	full := map[string]string{"groups": "[any]", "protocols": "[any]", "ports": "[any]"}
	for field := range full {
		for _, form := range lists {
			if form != "" {
				form = fmt.Sprintf(form, field)
			}
			t.Run(field+" as "+form, func(t *testing.T) {
				lines := []string{"direction: egress", "verdict: allow"}
				for f, v := range full {
					if f != field {
						lines = append(lines, f+": "+v)
					}
				}
				if field == "ports" {
					// ICMP has none.
					lines = append(lines, "")
					for i, l := range lines {
						if strings.HasPrefix(l, "protocols") {
							lines[i] = "protocols: [tcp, udp]"
						}
					}
				}
				if form != "" {
					lines = append(lines, form)
				}
				var body strings.Builder
				sep := "- "
				for _, l := range lines {
					if l != "" {
						body.WriteString(sep + l + "\n")
						sep = "  "
					}
				}
				p, err := Parse([]byte("rules:\n" + body.String()))
				if err != nil {
					t.Fatalf("%v:\n%s", err, body.String())
				}
				never(t, p)
			})
		}
	}
	for _, form := range lists {
		for _, field := range []string{"rules", "default", "publish", "dns", "limits", "quota"} {
			if form == "%s: []" && field != "rules" && field != "publish" {
				continue
			}
			text := ""
			if form != "" {
				text = fmt.Sprintf(form, field)
			}
			t.Run("field "+text, func(t *testing.T) {
				p, err := Parse([]byte(text))
				if err != nil {
					t.Fatal(err)
				}
				never(t, p)
			})
		}
	}
	t.Run("a deny rule with nothing in it denies all", func(t *testing.T) {
		p, err := Parse([]byte("default: {egress: allow, ingress: allow}\nrules: [{direction: egress}, {direction: ingress, verdict: reject}]"))
		if err != nil {
			t.Fatal(err)
		}
		never(t, p)
	})
}

// compiledAllows asks the programs what a model answers from the policy.
func compiledAllows(t *testing.T, p *Policy) (out []string) {
	t.Helper()
	s, err := Compile(p, agent, Environment{})
	if err != nil {
		t.Fatal(err)
	}
	e := sharedEngine(t)
	if err := e.Install(s); err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"93.184.216.34", "10.1.2.3", "2606:4700::1", "fd00::1", "172.31.255.1"} {
		peer := netip.MustParseAddr(a)
		request := byte(8)
		if peer.Is6() {
			request = 128
		}
		for d, frames := range map[Direction][][]byte{
			Egress:  {sent(peer, 6, tcp(999, 443, syn)), sent(peer, 17, udp(999, 443)), sent(peer, 1, echo(request, 1))},
			Ingress: {got(peer, 6, tcp(999, 443, syn)), got(peer, 17, udp(999, 443)), got(peer, 1, echo(request, 1))},
		} {
			for i, f := range frames {
				r, err := e.Run(d, f, 0)
				if err != nil {
					t.Fatal(err)
				}
				if r.Action == 0 {
					out = append(out, fmt.Sprintf("%s %d to %s by %s", d, i, a, r.Reason))
				}
			}
		}
	}
	return out
}

// roundTrips are the policy after it was stored and read in several ways.
func roundTrips(t *testing.T, p *Policy) []*Policy {
	t.Helper()
	forms := []*Policy{p}
	for range 2 {
		last := forms[len(forms)-1]
		j, err := json.Marshal(last)
		if err != nil {
			t.Fatal(err)
		}
		y, err := yaml.Marshal(last)
		if err != nil {
			t.Fatal(err)
		}
		var a, b struct {
			P Policy `json:"p" yaml:"p"`
		}
		if err := json.Unmarshal([]byte(`{"p":`+string(j)+`}`), &a); err != nil {
			t.Fatalf("%v: %s", err, j)
		}
		if err := yaml.Unmarshal([]byte("p:\n  "+strings.ReplaceAll(string(y), "\n", "\n  ")), &b); err != nil {
			t.Fatalf("%v: %s", err, y)
		}
		c, err := Parse(j)
		if err != nil {
			t.Fatalf("%v: %s", err, j)
		}
		d, err := Parse(y)
		if err != nil {
			t.Fatalf("%v: %s", err, y)
		}
		forms = append(forms, &a.P, &b.P, c, d)
	}
	return forms
}

func TestPolicy_round_trips_keep_all(t *testing.T) {
	text := `
version: 1
default: {egress: reject, ingress: deny}
rules:
  - {name: web, direction: egress, verdict: allow, cidrs: [192.0.2.0/24, 2001:db8::1], groups: [public], names: ["*.example.com"], agents: [db], protocols: [tcp, icmp], ports: [80, 443, 8000-8080], tls: [443, 8443-8444]}
  - {direction: egress, verdict: allow, names: [example.org], protocols: [tcp], ports: [any], tls: [none]}
  - {direction: ingress, verdict: reject, groups: [any], protocols: [any], ports: [any]}
publish: [{listen: "127.0.0.1:8080", port: 80, protocol: tcp}]
dns: {upstreams: ["1.1.1.1:53"], queries_per_second: 10}
limits: {egress: {bits: {per_second: 1000000, burst: 2000000}, packets: {per_second: 5}}, ingress: {connections: {per_second: 3}}}
quota: {egress_bytes: 5, ingress_bytes: 18446744073709551615}
flows: 128
`
	p, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	for i, form := range roundTrips(t, p) {
		// Absent and empty lists are the same.
		a, _ := json.Marshal(p)
		b, _ := json.Marshal(form)
		if strings.ReplaceAll(string(a), "null", "[]") != strings.ReplaceAll(string(b), "null", "[]") {
			t.Errorf("form %d is %s, want %s", i, b, a)
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

// The schema is written by hand; its fields are those of the types.
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
		{}, {Address4: own6}, {Address4: netip.MustParseAddr("127.0.0.1")}, {Address4: netip.MustParseAddr("169.254.169.254")},
		{Address4: own4, Address6: own4}, {Address4: own4, Address6: netip.MustParseAddr("::1")}, {Address4: own4, Address6: netip.MustParseAddr("::ffff:1.2.3.4")},
	} {
		if _, err := Compile(&Policy{}, id, Environment{}); !errors.Is(err, ErrIdentity) {
			t.Errorf("%+v: %v, want ErrIdentity", id, err)
		}
	}
}

func TestCompile_the_largest_policy_fits(t *testing.T) {
	p := &Policy{DNS: &DNS{}}
	for i := range MaxRules - 1 {
		r := Rule{Direction: Egress, Verdict: Allow, Protocols: []Protocol{TCP}}
		for j := range 4 {
			n := i*4 + j
			r.CIDRs = append(r.CIDRs, CIDR{netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(20 + n%150), byte(n >> 8), byte(n), byte(i)}), 32)})
			r.Ports = append(r.Ports, PortRange{uint16(1 + n*16), uint16(9 + n*16)})
		}
		p.Rules = append(p.Rules, r)
	}
	s, err := Compile(p, agent, Environment{})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", s.Bytes())
	if err := sharedEngine(t).Install(s); err != nil {
		t.Fatal(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(hostUDP))
	f.Add([]byte(hostilePolicy))
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
		if _, err := Compile(p, agent, Environment{}); err != nil {
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
	if _, err := Compile(&Policy{}, agent, Environment{Host: all}); err != nil {
		t.Error(err)
	}
}
