package refmodel

import (
	"net/netip"
	"slices"

	"github.com/drowse-vm/drowse/netpolicy"
)

// kind is the class of an address.
type kind string

const (
	isFloor    kind = "floor"
	isHost     kind = "host"
	isEndpoint kind = "agent" // the endpoints that Rule's list agents can mean
	isPrivate  kind = "private"
	isPublic   kind = "public"
)

func prefixes(s ...string) (out []netip.Prefix) {
	for _, p := range s {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

func in(a netip.Addr, list []netip.Prefix) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Floor reports whether no rule can open an address.
func (m *Model) Floor(a netip.Addr) bool { return m.kindOf(a) == isFloor }

func (m *Model) kindOf(a netip.Addr) kind {
	w := netpolicy.TheWire
	switch {
	case a == m.id.Address4, a == m.id.Address6:
		return isFloor
	case a == w.Gateway4, a == w.Gateway6:
		return isHost
	case a == w.Guest6, in(a, floorRanges), !a.Is4() && !in(a, usedRanges6):
		return isFloor
	case slices.Contains(m.env.Host, a):
		return isHost
	case in(a, m.env.Endpoints), slices.ContainsFunc(m.env.Peers, func(p netpolicy.Peer) bool { return p.Address == a }):
		return isEndpoint
	case in(a, privateRanges), in(a, m.env.OnLink):
		return isPrivate
	}
	return isPublic
}

var (
	floorRanges = prefixes("172.31.255.0/30", "169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "127.0.0.0/8", "224.0.0.0/4",
		"0.0.0.0/8", "192.0.0.0/24", "192.88.99.0/24", "240.0.0.0/4",
		"2001::/32", "2002::/16", "fd00:ec2::254/128", "fd20:ce::254/128")
	usedRanges6   = prefixes("2000::/3", "fc00::/7")
	privateRanges = prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15", "fc00::/7")
)
