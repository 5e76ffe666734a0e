package link_test

import (
	"errors"
	"net/netip"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
)

// A host of many services has many addresses. None of them is public to a guest. More addresses than the limit make
// Compile fail, so that nothing is open.
func TestAttack_host_address_beyond_the_256th_passes_as_public(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	p := &Policy{Default: Defaults{Egress: Allow}, Rules: []Rule{
		{Direction: Egress, Verdict: Allow, Groups: []Group{Public}, Protocols: []Protocol{AnyProtocol}, Ports: []PortRange{AnyPort}},
	}}
	var env Environment
	for a, b := netip.MustParseAddr("198.51.0.0"), netip.MustParseAddr("2001:db8:7::"); len(env.Host) < MaxHostAddresses; a, b = a.Next().Next(), b.Next().Next() {
		env.Host = append(env.Host, a, b) // with gaps, so that each takes a separate place in the tree
	}
	s, err := Compile(p, endpoint, env)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Install(s); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(env.Host); i += 37 {
		a := env.Host[i]
		for _, x := range []struct {
			a    netip.Addr
			want Verdict
		}{{a, Deny}, {a.Next(), Allow}} {
			if r, err := e.Run(Egress, sent(x.a, 17, udp(4000, 443)), 0); err != nil || r.Verdict != x.want {
				t.Fatalf("address %d, %v: %s by %s, %v; want %s", i, x.a, r.Verdict, r.Reason, err, x.want)
			}
		}
	}
	if s, err := Compile(p, endpoint, Environment{Host: append(env.Host, netip.MustParseAddr("203.0.113.1"))}); !errors.Is(err, ErrIdentity) {
		t.Errorf("one address too many: %v, %v", s, err)
	}
}
