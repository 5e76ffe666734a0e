package link_test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	. "github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

// lists are the ways to leave out a list, or a field that contains it.
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
			m := refmodel.New(form, endpoint, Environment{})
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
					// ICMP has no ports.
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

// compiledAllows asks the programs what never asks the model, and returns what they allow.
func compiledAllows(t *testing.T, p *Policy) (out []string) {
	t.Helper()
	s, err := Compile(p, endpoint, Environment{})
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

// roundTrips returns the policy itself and after storing and reading it in several ways.
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

func TestCompile_the_largest_policy_fits(t *testing.T) {
	p := &Policy{DNS: &DNS{}}
	for i := range MaxRules - 1 {
		r := Rule{Direction: Egress, Verdict: Allow, Protocols: []Protocol{TCP}}
		for j := range 4 {
			n := i*4 + j
			r.CIDRs = append(r.CIDRs, CIDR{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(20 + n%150), byte(n >> 8), byte(n), byte(i)}), 32)})
			r.Ports = append(r.Ports, PortRange{First: uint16(1 + n*16), Last: uint16(9 + n*16)})
		}
		p.Rules = append(p.Rules, r)
	}
	s, err := Compile(p, endpoint, Environment{})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", s.Bytes())
	if err := sharedEngine(t).Install(s); err != nil {
		t.Fatal(err)
	}
}
