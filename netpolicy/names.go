package netpolicy

import (
	"net/netip"
	"slices"
	"strings"
)

// NameMatches reports whether a rule's pattern matches a name. Both are in lower case and without a final dot.
func NameMatches(pattern, name string) bool {
	if rest, wild := strings.CutPrefix(pattern, "*."); wild {
		return strings.HasSuffix(name, "."+rest) && len(name) > len(rest)+1
	}
	return name == pattern
}

// Naming returns the rules of the table with a pattern that matches name, one bit each. some reports whether any does.
func (s *Spec) Naming(name string) (rules [MaxRules / 64]uint64, some bool) {
	var b bitset
	for i := range s.rules {
		if matchesAny(s.rules[i].Names, name) {
			b.add(i)
			some = true
		}
	}
	return b, some
}

// matchesAny reports whether one of the patterns matches a name.
func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return NameMatches(p, name) })
}

// OpensName asks the rules about a flow to a peer whose address was resolved for the names in pinned, and whose
// client sent name as the server name.
func (s *Spec) OpensName(peer netip.AddrPort, pinned []string, name string) (rule int, ok bool) {
	// Names open public addresses alone, and so does the default.
	if !s.Public(peer.Addr()) {
		return -1, false
	}
	return s.Opens(peer, pinned, name)
}

// Opens asks the rules about a TCP connection to a public or private peer. It refuses peers that are the host or
// other endpoints: the host makes the connection, and such a peer would take the host for the client.
func (s *Spec) Opens(peer netip.AddrPort, pinned []string, name string) (rule int, ok bool) {
	k := s.class.of(peer.Addr())
	if k != classPublic && k != classPrivate {
		return -1, false
	}
	for i := range s.rules {
		r := &s.rules[i]
		if r.Direction != Egress || !r.has(TCP) || !r.about(peer.Port()) {
			continue
		}
		if r.addresses(peer.Addr(), k, s.class.private) || k == classPublic && r.named(peer.Port(), pinned, name) {
			return i, r.Verdict == Allow
		}
	}
	return -1, k == classPublic && s.deflt.Egress == Allow
}

// about reports whether a rule covers a port.
func (r *flat) about(port uint16) bool {
	if len(r.Ports) == 0 {
		return r.Verdict != Allow
	}
	return contains(r.Ports, port)
}

func contains(ranges []PortRange, port uint16) bool {
	return slices.ContainsFunc(ranges, func(p PortRange) bool { return p.First <= port && port <= p.Last })
}

// addresses reports whether a rule matches a public or private address by group or CIDR. private: all such ranges.
func (r *flat) addresses(a netip.Addr, k class, private []netip.Prefix) bool {
	return r.always()&(1<<k) != 0 || r.only == nil && slices.ContainsFunc(r.CIDRs, func(c CIDR) bool {
		return c.Contains(a) && (r.Verdict != Allow || k == classPublic || inside(c.Prefix, private))
	})
}

// named reports whether a rule matches by its names.
func (r *flat) named(port uint16, pinned []string, name string) bool {
	means := func(n string) bool { return matchesAny(r.Names, n) }
	return slices.ContainsFunc(pinned, means) && (!contains(r.checkedPorts(), port) || name != "" && means(name))
}
