package network

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
)

// A host may get more addresses than a policy can hold. An unknown one would count as public, and be open.
func TestAttack_host_with_too_many_addresses_opens_nothing(t *testing.T) {
	n := &Network{log: slog.New(slog.DiscardHandler), agents: netip.MustParsePrefix("10.200.0.0/16"), agents6: netip.MustParsePrefix("fd64:726f:7773:2::/64")}
	p := &netpolicy.Policy{Rules: []netpolicy.Rule{{
		Name: "web", Direction: netpolicy.Egress, Verdict: netpolicy.Allow, Groups: []netpolicy.Group{netpolicy.Public},
		Protocols: []netpolicy.Protocol{netpolicy.TCP}, Ports: []netpolicy.PortRange{netpolicy.AnyPort},
	}}}
	var err error
	if n.lock, err = hostnet.Take(t.TempDir(), n.agents, "a"); err != nil {
		t.Fatal(err)
	}
	defer n.lock.Release()
	n.address = n.lock.Addr()
	var host []netip.Addr
	for a := netip.MustParseAddr("198.51.0.0"); len(host) < netpolicy.MaxHostAddresses; a = a.Next() {
		host = append(host, a)
	}
	for _, x := range []struct {
		host []netip.Addr
		rule string
	}{{host, "web"}, {append(host, netip.MustParseAddr("203.0.113.1")), ""}} {
		s, err := n.compile(p, x.host, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.RuleName(0); got != x.rule {
			t.Errorf("with %d addresses the first rule is %q, want %q", len(x.host), got, x.rule)
		}
	}
}
