package link_test

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
)

// Each policy is as large as the limits allow, and then has one item more.
func TestPolicy_one_more_than_each_limit_is_refused(t *testing.T) {
	rule := Rule{Direction: Egress, Verdict: Allow, Protocols: []Protocol{TCP}, Ports: []PortRange{AnyPort}, Groups: []Group{Any}}
	cidr := func(i int) CIDR {
		return CIDR{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{45, byte(i >> 8), byte(i), 1}), 32)}
	}
	for name, c := range map[string]struct {
		most int
		make func(n int) *Policy
	}{
		"rules": {MaxRules, func(n int) *Policy {
			p := &Policy{}
			for range n {
				p.Rules = append(p.Rules, rule)
			}
			return p
		}},
		"rules and published ports": {MaxRules - 2, func(n int) *Policy {
			p := &Policy{DNS: &DNS{}, Publish: []Published{{Listen: netip.MustParseAddrPort("127.0.0.1:1"), Port: 80, Protocol: TCP}}}
			for range n {
				p.Rules = append(p.Rules, rule)
			}
			return p
		}},
		"CIDRs of two rules": {MaxCIDRs, func(n int) *Policy {
			a, b := rule, rule
			for i := range n {
				if i%2 == 0 {
					a.CIDRs = append(a.CIDRs, cidr(i))
				} else {
					b.CIDRs = append(b.CIDRs, cidr(i))
				}
			}
			return &Policy{Rules: []Rule{a, b}}
		}},
		"port ranges": {MaxPortRanges, func(n int) *Policy {
			a := rule
			a.Ports = nil
			for i := range n {
				a.Ports = append(a.Ports, PortRange{First: uint16(i + 1), Last: uint16(i + 1)})
			}
			return &Policy{Rules: []Rule{a}}
		}},
		"names": {MaxNames, func(n int) *Policy {
			a := rule
			for i := range n {
				a.Names = append(a.Names, fmt.Sprintf("n%d.example.com", i))
			}
			return &Policy{Rules: []Rule{a}, DNS: &DNS{}}
		}},
		"tags of others": {MaxTags, func(n int) *Policy {
			a := rule
			for i := range n {
				a.Endpoints = append(a.Endpoints, fmt.Sprint("tag", i))
			}
			return &Policy{Rules: []Rule{a}}
		}},
		"published ports": {MaxPublished, func(n int) *Policy {
			p := &Policy{}
			for i := range n {
				p.Publish = append(p.Publish, Published{Listen: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(8000+i)), Port: 80, Protocol: TCP})
			}
			return p
		}},
		"upstreams": {MaxUpstreams, func(n int) *Policy {
			p := &Policy{DNS: &DNS{}}
			for i := range n {
				p.DNS.Upstreams = append(p.DNS.Upstreams, netip.AddrPortFrom(netip.MustParseAddr("192.0.2.53"), uint16(53+i)))
			}
			return p
		}},
		"flows": {MaxFlows, func(n int) *Policy { return &Policy{Flows: n} }},
	} {
		if _, err := Compile(c.make(c.most), endpoint, Environment{}); err != nil {
			t.Errorf("%d %s: %v", c.most, name, err)
		}
		if _, err := Compile(c.make(c.most+1), endpoint, Environment{}); !errors.Is(err, ErrPolicy) {
			t.Errorf("%d %s: %v, want ErrPolicy", c.most+1, name, err)
		}
	}
	var peers []Peer
	for i := range MaxPeers + 1 {
		peers = append(peers, Peer{Address: netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)})})
	}
	if _, err := Compile(&Policy{}, endpoint, Environment{Peers: peers[:MaxPeers]}); err != nil {
		t.Error(err)
	}
	if _, err := Compile(&Policy{}, endpoint, Environment{Peers: peers}); !errors.Is(err, ErrIdentity) {
		t.Errorf("%d endpoints: %v, want ErrIdentity", len(peers), err)
	}
}
