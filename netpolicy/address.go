package netpolicy

import "net/netip"

// class is the class of an address, see the package comment. The zero value denies.
type class uint8

const (
	classPublic  class = iota + 1
	classPrivate       // this and the next two are not opened by group any
	classHost
	classEndpoint
	classFloor class = 15
)

func prefixes(s ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(s))
	for i, t := range s {
		out[i] = netip.MustParsePrefix(t)
	}
	return out
}

// floor are addresses that no rule opens; Wire.floor adds those of the wire.
var floor = prefixes(
	"169.254.169.254/32", "100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::254/128", "fd20:ce::254/128",
	"127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4",
	"0.0.0.0/8", "192.0.0.0/24", "192.88.99.0/24", "240.0.0.0/4",
	// All but 2000::/3 and fc00::/7. This covers loopback, link-local, multicast and mapped addresses.
	"::/3", "4000::/2", "8000::/2", "c000::/3", "e000::/4", "f000::/5", "f800::/6", "fe00::/7",
	"2001::/32", "2002::/16",
)

// private are addresses that a rule must name, on any host.
var private = prefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15", "fc00::/7")

// floor returns the addresses of the wire except the gateway's.
func (w Wire) floor() []netip.Prefix {
	var out []netip.Prefix
	four := netip.PrefixFrom(w.Gateway4, 30).Masked()
	for a := four.Addr(); four.Contains(a); a = a.Next() {
		if a != w.Gateway4 {
			out = append(out, netip.PrefixFrom(a, 32))
		}
	}
	return append(out, netip.PrefixFrom(w.Guest6, 128))
}

// inside reports whether all of p lies in one prefix of a list.
func inside(p netip.Prefix, list []netip.Prefix) bool {
	for _, q := range list {
		if q.Bits() <= p.Bits() && q.Contains(p.Addr()) {
			return true
		}
	}
	return false
}

// AllPrivate reports whether no address of a prefix is used on the Internet (RFC 1918, RFC 6598, RFC 2544, RFC
// 4193).
func AllPrivate(p netip.Prefix) bool { return inside(p, private) }

// MayBePublic reports whether an address of a prefix may be public: the prefix lies neither inside the ranges that
// are always denied, nor inside those that are private on every host.
func MayBePublic(p netip.Prefix) bool { return !inside(p, floor) && !AllPrivate(p) }

// classes finds the class of an address.
type classes struct {
	floor     []netip.Prefix
	host      map[netip.Addr]bool
	endpoints []netip.Prefix
	peers     map[netip.Addr]bool
	// private are addresses that a rule must name: those private on every host, and those on this host's links.
	private []netip.Prefix
}

func (c *classes) of(a netip.Addr) class {
	one := netip.PrefixFrom(a, a.BitLen())
	switch {
	case inside(one, c.floor):
		return classFloor
	case c.host[a]:
		return classHost
	case c.peers[a] || inside(one, c.endpoints):
		return classEndpoint
	case inside(one, c.private):
		return classPrivate
	}
	return classPublic
}

// boundaries returns all prefixes at whose edges the class may change.
func (c *classes) boundaries() []netip.Prefix {
	out := append([]netip.Prefix(nil), c.floor...)
	out = append(out, c.private...)
	out = append(out, c.endpoints...)
	for a := range c.host {
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	for a := range c.peers {
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	return out
}
