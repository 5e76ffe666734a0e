package link_test

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

const proxyRules = `
rules: [{direction: egress, verdict: allow, names: [api.example.com, "*.example.net"], protocols: [tcp], ports: [443]}]
dns: {upstreams: ["192.0.2.53:53"]}
`

// Spec.Opens judges connections on an endpoint's behalf as the model judges the endpoint's own ones. But it never
// opens the host or other endpoints.
func TestSpec_opens_beyond_the_host_what_the_model_opens(t *testing.T) {
	r := &random{Rand: rand.New(rand.NewPCG(*seedFlag, 77))}
	opened, closed := 0, 0
	for range 400 {
		r.names = r.one(2)
		r.makePolicy()
		s, err := Compile(r.policy, endpoint, r.env)
		if err != nil {
			t.Fatal(err)
		}
		m := refmodel.New(r.policy, endpoint, r.env)
		for range 60 {
			peer := r.addr().Unmap()
			if !peer.Is4() {
				continue
			}
			at := netip.AddrPortFrom(peer, r.port())
			pinned := []string{}
			for range r.IntN(3) {
				pinned = append(pinned, pick(r, "example.com", "a.example.com", "b.a.example.com", "example.org", "other.org"))
			}
			name := pick(r, "", "example.com", "a.example.com", "other.org")
			a := m.Ask(refmodel.Question{Direction: Egress, Protocol: TCP, Peer: peer, Port: at.Port(), Names: pinned, Hello: true, ServerName: name})
			want := a.Verdict == Allow && (a.Class == "public" || a.Class == "private")
			if _, got := s.Opens(at, pinned, name); got != want {
				t.Fatalf("seed %d: %v, pinned for %v, named %q: %v, the model says %+v", *seedFlag, at, pinned, name, got, a)
			}
			if want {
				opened++
			} else {
				closed++
			}
		}
	}
	if opened < 500 || closed < 500 {
		t.Errorf("%d were opened, %d not: there is nothing to compare", opened, closed)
	}
}

func TestLink_opens_what_its_policy_opens(t *testing.T) {
	ownNamespace(t)
	newTAP(t, "tap0")
	l, _ := attach(t, "tap0", proxyRules)
	peer := netip.MustParseAddrPort("93.184.216.34:443")
	opens := func(at netip.AddrPort, name string) bool {
		_, ok := l.Opens(at, name)
		return ok
	}
	if opens(peer, "api.example.com") {
		t.Error("an address that nobody has found for the name")
	}
	if err := l.Pin("api.example.com", peer.Addr(), 3600e9); err != nil {
		t.Fatal(err)
	}
	if rule, ok := l.Opens(peer, "api.example.com"); !ok || rule != "rules[0]" {
		t.Errorf("%q, %v", rule, ok)
	}
	for _, c := range []struct {
		at   string
		name string
	}{
		{"93.184.216.34:443", ""}, {"93.184.216.34:443", "evil.example"}, {"93.184.216.34:80", "api.example.com"},
		{"93.184.216.35:443", "api.example.com"}, {"169.254.169.254:443", "api.example.com"}, {"172.31.255.1:3128", ""},
		{"127.0.0.1:443", "api.example.com"}, {"10.0.0.1:443", "api.example.com"}, {"93.184.216.34:0", "api.example.com"}, {"[2001:db8::1]:443", "api.example.com"},
	} {
		if opens(netip.MustParseAddrPort(c.at), c.name) {
			t.Errorf("%s for %q is open", c.at, c.name)
		}
	}
	if err := l.Swap(compile(t, "")); err != nil {
		t.Fatal(err)
	}
	if opens(peer, "api.example.com") {
		t.Error("open by a policy that has been replaced")
	}
}
