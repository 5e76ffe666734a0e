package netpolicy

import (
	"net/netip"
	"slices"
	"strings"
)

// NameMatches says whether a name is one that a pattern of a rule means. Both are in
// lower case and without a final dot.
func NameMatches(pattern, name string) bool {
	if rest, wild := strings.CutPrefix(pattern, "*."); wild {
		return strings.HasSuffix(name, "."+rest) && len(name) > len(rest)+1
	}
	return name == pattern
}

// Naming is the rules of the table that have a pattern which means a name, as a bit for each.
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

// matchesAny says whether one of some patterns means a name.
func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return NameMatches(p, name) })
}

// OpensName asks the rules about a flow to a peer whose address was given for names, and whose
// client has sent a server name.
func (s *Spec) OpensName(peer netip.AddrPort, pinned []string, name string) (rule int, ok bool) {
	// Names open public addresses alone, and so does the default.
	if !s.Public(peer.Addr()) {
		return -1, false
	}
	return s.Opens(peer, pinned, name)
}

// Opens asks the rules about a TCP connection to a public or private peer. Those to the
// host and to other endpoints are not for it: it is the host that connects, and it would be taken
// for itself there.
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

// about says whether a rule is about a port.
func (r *flat) about(port uint16) bool {
	if len(r.Ports) == 0 {
		return r.Verdict != Allow
	}
	return contains(r.Ports, port)
}

func contains(ranges []PortRange, port uint16) bool {
	return slices.ContainsFunc(ranges, func(p PortRange) bool { return p.First <= port && port <= p.Last })
}

// addresses says whether a rule matches a public or private address for itself. private are the ranges of private ones.
func (r *flat) addresses(a netip.Addr, k class, private []netip.Prefix) bool {
	return r.always()&(1<<k) != 0 || r.only == nil && slices.ContainsFunc(r.CIDRs, func(c CIDR) bool {
		return c.Contains(a) && (r.Verdict != Allow || k == classPublic || inside(c.Prefix, private))
	})
}

// named says whether a rule matches by its names.
func (r *flat) named(port uint16, pinned []string, name string) bool {
	means := func(n string) bool { return matchesAny(r.Names, n) }
	return slices.ContainsFunc(pinned, means) && (!contains(r.checkedPorts(), port) || name != "" && means(name))
}
