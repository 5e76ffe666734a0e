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
	isEndpoint kind = "agent" // as in Rule: those whom its list agents can mean
	isPrivate  kind = "private"
	isPublic   kind = "public"
)

func in(a netip.Addr, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(s string) bool { return netip.MustParsePrefix(s).Contains(a) })
}

func (m *Model) kindOf(a netip.Addr) kind {
	if k, ok := m.kinds[a]; ok {
		return k
	}
	k := m.findKind(a)
	if len(m.kinds) > 1<<16 {
		clear(m.kinds)
	}
	m.kinds[a] = k
	return k
}

func (m *Model) findKind(a netip.Addr) kind {
	w := netpolicy.TheWire
	switch {
	case a == m.id.Address4, a == m.id.Address6:
		return isFloor
	case a == w.Gateway4, a == w.Gateway6:
		return isHost
	case a == w.Guest6, in(a, "172.31.255.0/30"):
		return isFloor
	}
	if a.Is4() {
		if in(a, "169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "127.0.0.0/8", "224.0.0.0/4",
			"0.0.0.0/8", "192.0.0.0/24", "192.88.99.0/24", "240.0.0.0/4") {
			return isFloor
		}
	} else {
		if !in(a, "2000::/3", "fc00::/7") || in(a, "2001::/32", "2002::/16", "fd00:ec2::254/128", "fd20:ce::254/128") {
			return isFloor
		}
	}
	switch {
	case slices.Contains(m.env.Host, a):
		return isHost
	case slices.ContainsFunc(m.env.Endpoints, func(p netip.Prefix) bool { return p.Contains(a) }),
		slices.ContainsFunc(m.env.Peers, func(p netpolicy.Peer) bool { return p.Address == a }):
		return isEndpoint
	case slices.ContainsFunc(privateRanges, func(p netip.Prefix) bool { return p.Contains(a) }),
		slices.ContainsFunc(m.env.OnLink, func(p netip.Prefix) bool { return p.Contains(a) }):
		return isPrivate
	}
	return isPublic
}

var privateRanges = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("fc00::/7"),
}
