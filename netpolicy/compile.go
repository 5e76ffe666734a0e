package netpolicy

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
)

// ErrIdentity is an endpoint or an environment for which no policy can be compiled.
var ErrIdentity = errors.New("invalid endpoint or environment")

// Spec is a policy compiled for one endpoint: what the programs on its TAP device read. It is plain, immutable
// data.
type Spec struct {
	rows  []row
	flows int
	names []string // of the rules, by their index in the table
	rules []flat
	deflt Defaults
	// tlsPort is Environment.TLSPort.
	tlsPort uint16
	ident   Identity
	class   *classes
}

// Bytes returns the size of the table.
func (s *Spec) Bytes() int { return len(s.rows) * RowSize }

// RuleName returns the name of a rule of the table, for events; an unnamed rule has its place, such as rules[3].
func (s *Spec) RuleName(i int) string {
	if i < 0 || i >= len(s.names) {
		return ""
	}
	return s.names[i]
}

// Public reports whether an address is public for the endpoint: neither of the floor, nor the host's, another
// endpoint's or private.
func (s *Spec) Public(a netip.Addr) bool { return a.IsValid() && s.class.of(a) == classPublic }

// Identity returns the identity of the endpoint that s was compiled for.
func (s *Spec) Identity() Identity { return s.ident }

// RuleNames returns the names of all rules of the table, by their index.
func (s *Spec) RuleNames() []string { return s.names }

// Flows returns how many entries the flow table has.
func (s *Spec) Flows() int { return s.flows }

// TLSPort returns Environment.TLSPort; 0 is none.
func (s *Spec) TLSPort() uint16 { return s.tlsPort }

// flat is a rule of the table.
type flat struct {
	Rule
	only []netip.Addr // if not nil, the rule's peers are these addresses of the host
}

// flatten puts the implicit rules before the policy's.
func (p *Policy) flatten(tlsPort uint16) (rules []flat, names []string) {
	gateway := []netip.Addr{TheWire.Gateway4, TheWire.Gateway6}
	if p.ChecksNames() {
		// Only connections that the programs redirect may reach the port where names are checked.
		to := []netip.Addr{TheWire.Gateway4}
		if tlsPort == 0 {
			to = []netip.Addr{} // none
		}
		rules = append(rules, flat{Rule{
			Direction: Egress, Verdict: Deny, Protocols: []Protocol{TCP}, Ports: []PortRange{{tlsPort, tlsPort}},
		}, to})
		names = append(names, "(tls names)")
	}
	if p.DNS != nil {
		rules = append(rules, flat{Rule{
			Direction: Egress, Verdict: Allow, Protocols: []Protocol{TCP, UDP}, Ports: []PortRange{{53, 53}},
		}, []netip.Addr{TheWire.Gateway4}}) // the resolver does not listen by IPv6
		names = append(names, "(resolver)")
	}
	if p.ProxyOn() {
		rules = append(rules, flat{Rule{
			Direction: Egress, Verdict: Allow, Protocols: []Protocol{TCP}, Ports: []PortRange{{ProxyPort, ProxyPort}},
		}, []netip.Addr{TheWire.Gateway4}})
		names = append(names, "(proxy)")
	}
	for _, pub := range p.Publish {
		rules = append(rules, flat{Rule{
			Direction: Ingress, Verdict: Allow, Protocols: []Protocol{pub.Protocol}, Ports: []PortRange{{pub.Port, pub.Port}},
		}, gateway})
		names = append(names, fmt.Sprintf("(published %d/%s)", pub.Port, pub.Protocol))
	}
	for i, r := range p.Rules {
		rules = append(rules, flat{Rule: r})
		names = append(names, cmp.Or(r.Name, fmt.Sprintf("rules[%d]", i)))
	}
	return rules, names
}

func (id Identity) validate(env Environment) error {
	switch {
	case !id.Address4.Is4():
		return fmt.Errorf("%w: the endpoint has no IPv4 address", ErrIdentity)
	case id.Address6 != (netip.Addr{}) && (!id.Address6.Is6() || id.Address6.Is4In6() || id.Address6.Zone() != ""):
		return fmt.Errorf("%w: %v is no IPv6 address that an endpoint can have", ErrIdentity, id.Address6)
	case len(env.OnLink) > MaxOnLink:
		return fmt.Errorf("%w: %d ranges on the host's links: at most %d", ErrIdentity, len(env.OnLink), MaxOnLink)
	case len(env.Host) > MaxHostAddresses || len(env.Endpoints) > MaxEndpointRanges || len(env.Peers) > MaxPeers:
		return fmt.Errorf("%w: %d addresses of the host, %d ranges of endpoints, %d endpoints: at most %d, %d and %d",
			ErrIdentity, len(env.Host), len(env.Endpoints), len(env.Peers), MaxHostAddresses, MaxEndpointRanges, MaxPeers)
	}
	for _, a := range []netip.Addr{id.Address4, id.Address6} {
		if a.IsValid() && inside(netip.PrefixFrom(a, a.BitLen()), floor) {
			return fmt.Errorf("%w: an endpoint cannot have the address %v", ErrIdentity, a)
		}
	}
	for _, p := range env.Endpoints {
		if err := checkPrefix(p); err != nil {
			return fmt.Errorf("%w: range of endpoints: %w", ErrIdentity, err)
		}
	}
	for _, p := range env.OnLink {
		if err := checkPrefix(p); err != nil {
			return fmt.Errorf("%w: range on the host's links: %w", ErrIdentity, err)
		}
	}
	tags := 0
	for _, p := range env.Peers {
		if !p.Address.IsValid() || p.Address.Is4In6() || p.Address.Zone() != "" {
			return fmt.Errorf("%w: the address %v of an endpoint", ErrIdentity, p.Address)
		}
		if tags += len(p.Tags); tags > 16*MaxPeers {
			return fmt.Errorf("%w: more than %d tags of endpoints", ErrIdentity, 16*MaxPeers)
		}
	}
	for _, a := range env.Host {
		if !a.IsValid() || a.Is4In6() {
			return fmt.Errorf("%w: the address %v of the host", ErrIdentity, a)
		}
	}
	return nil
}

// Compile makes the table that the programs read. It is a pure function. Errors wrap ErrPolicy or ErrIdentity.
func Compile(p *Policy, id Identity, env Environment) (*Spec, error) {
	if p == nil {
		p = &Policy{}
	}
	if err := p.Validate(); err != nil {
		return nil, err
	}
	if err := id.validate(env); err != nil {
		return nil, err
	}
	rules, names := p.flatten(env.TLSPort)
	c := &compiler{rules: rules, classes: classes{
		floor: append(slices.Clone(floor), TheWire.floor()...), endpoints: slices.Clone(env.Endpoints),
		host: map[netip.Addr]bool{TheWire.Gateway4: true, TheWire.Gateway6: true}, peers: map[netip.Addr]bool{},
		private: append(slices.Clone(private), env.OnLink...),
	}, sets: map[bitset]uint32{}}
	for _, a := range []netip.Addr{id.Address4, id.Address6} {
		if a.IsValid() {
			c.classes.floor = append(c.classes.floor, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	for _, a := range env.Host {
		c.classes.host[a.WithZone("")] = true
	}
	for _, peer := range env.Peers {
		c.classes.peers[peer.Address] = true
	}
	s := &Spec{
		names: names, flows: cmp.Or(p.Flows, DefaultFlows), ident: id, class: &c.classes, rules: rules, deflt: p.Default,
		tlsPort: env.TLSPort,
	}
	c.table = make([]row, 2) // the heads are filled in below
	h := heads{names: slices.ContainsFunc(rules, func(r flat) bool { return len(r.Names) > 0 })}
	var allow, reject bitset
	for i, r := range rules {
		switch r.Verdict {
		case Allow:
			allow.add(i)
		case Reject:
			reject.add(i)
		}
	}
	h.allow, h.reject = c.set(allow), c.set(reject)
	for d, dir := range Directions {
		h.ports[d][0] = c.ports(dir, TCP)
		h.ports[d][1] = c.ports(dir, UDP)
		h.icmp[d] = c.set(c.protocol(dir, ICMP))
		h.fallback[d] = uint8(max(0, slices.Index(Verdicts[:], []Verdict{p.Default.Egress, p.Default.Ingress}[d])))
	}
	h.addr4 = c.addresses(false)
	h.addr6 = c.addresses(true)
	h.tags = c.tags()
	h.checked, h.tlsPort = c.checked(), env.TLSPort
	h.limits[0] = limitsOf(p.Limits.Egress.OrDefault(), p.Quota.EgressBytes)
	h.limits[1] = limitsOf(p.Limits.Ingress, p.Quota.IngressBytes)
	h.words = uint8((len(rules) + 63) / 64)
	h.identity = id
	h.put(c.table)
	s.rows = c.table
	return s, nil
}

// limit has the parameters of the generic cell rate algorithm: nanoseconds per unit, as a fixed-point number with
// 20 fractional bits, and the burst in nanoseconds. A mult of 0 is no limit.
type limit struct{ mult, burst uint64 }

func limitOf(r *Rate, least uint64) limit {
	if r == nil {
		return limit{}
	}
	burst := cmp.Or(r.Burst, max(r.PerSecond/10, least))
	mult := uint64(1e9) << 20 / r.PerSecond
	hi, lo := bits.Mul64(burst, mult)
	const longest = 1 << 60
	ns := hi<<44 | lo>>20
	if hi >= 1<<20 || ns > longest {
		ns = longest
	}
	return limit{mult, ns}
}

type limitSet struct {
	bits, packets, connections limit
	quota                      uint64
}

// any reports whether there is any limit or quota.
func (l *limitSet) any() bool {
	return l.bits.mult|l.packets.mult|l.connections.mult != 0 || l.quota != ^uint64(0)
}

func limitsOf(r Rates, quota *uint64) limitSet {
	l := limitSet{limitOf(r.Bits, 2<<20), limitOf(r.Packets, 128), limitOf(r.Connections, 32), ^uint64(0)}
	if quota != nil {
		l.quota = *quota
	}
	return l
}

// bitset has one bit per rule.
type bitset [MaxRules / 64]uint64

func (b *bitset) add(i int) { b[i/64] |= 1 << (i % 64) }
func (b *bitset) del(i int) { b[i/64] &^= 1 << (i % 64) }

type compiler struct {
	rules   []flat
	classes classes
	table   []row
	sets    map[bitset]uint32
}

// set puts a set of rules into the table, once, and returns its row.
func (c *compiler) set(b bitset) uint32 {
	if i, ok := c.sets[b]; ok {
		return i
	}
	i := uint32(len(c.table))
	c.sets[b] = i
	c.table = append(c.table, setRow(b))
	return i
}

// has reports whether a rule covers a protocol.
func (r *flat) has(p Protocol) bool {
	if len(r.Protocols) == 0 {
		return r.Verdict != Allow
	}
	return slices.Contains(r.Protocols, p) || slices.Contains(r.Protocols, AnyProtocol)
}

// protocol returns the set of rules for a direction and a protocol.
func (c *compiler) protocol(dir Direction, p Protocol) (b bitset) {
	for i := range c.rules {
		if c.rules[i].Direction == dir && c.rules[i].has(p) {
			b.add(i)
		}
	}
	return b
}

// change is a number, a port or an address, at which a rule begins (add 1) or ceases (add -1) to match. mask has a
// bit for each class of addresses that the change applies to.
type change struct {
	at   number
	rule int
	add  int
	mask uint8
}

// slots is the number of sets in a sweep: one for each class but the floor, and number 0 for ports.
const slots = int(classEndpoint) + 1

// ports puts the tree of ports for TCP or UDP into the table.
func (c *compiler) ports(dir Direction, p Protocol) uint32 {
	var changes []change
	for i := range c.rules {
		r := &c.rules[i]
		if r.Direction != dir || !r.has(p) {
			continue
		}
		ranges := r.Ports
		if len(ranges) == 0 && r.Verdict != Allow {
			ranges = []PortRange{AnyPort}
		}
		changes = append(changes, portChanges(i, ranges)...)
	}
	return c.ruleTree(changes, false)
}

// portChanges returns where a rule begins and ceases to match some ports.
func portChanges(rule int, ranges []PortRange) (changes []change) {
	for _, r := range ranges {
		changes = append(changes, change{number{lo: uint64(r.First)}, rule, 1, 1}, change{number{lo: uint64(r.Last) + 1}, rule, -1, 1})
	}
	return changes
}

// ruleTree puts a tree whose values are the sets of matching rules into the table.
func (c *compiler) ruleTree(changes []change, six bool) uint32 {
	var leaves []leaf
	sweep(len(c.rules), changes, func(at number, sets *[slots]bitset) {
		leaves = append(leaves, leaf{at, c.set(sets[0])})
	})
	return c.tree(leaves, six)
}

// checked puts the tree of ports at which rules' names are checked into the table; 0 is none.
func (c *compiler) checked() uint32 {
	var changes []change
	for i := range c.rules {
		changes = append(changes, portChanges(i, c.rules[i].checkedPorts())...)
	}
	if len(changes) == 0 {
		return 0
	}
	return c.ruleTree(changes, false)
}

// TagHash returns the programs' number of a tag. It is never 0, which means no tag.
func TagHash(tag string) uint64 {
	sum := sha256.Sum256([]byte(tag))
	return binary.LittleEndian.Uint64(sum[:]) | 1
}

// tags puts the tree of tags, with hashes as high halves of numbers, into the table; 0 if no rule has a tag.
func (c *compiler) tags() uint32 {
	var changes []change
	for i := range c.rules {
		for _, tag := range c.rules[i].Endpoints {
			h := TagHash(tag)
			changes = append(changes, change{number{hi: h}, i, 1, 1}, change{number{hi: h, lo: 1}, i, -1, 1})
		}
	}
	if len(changes) == 0 {
		return 0
	}
	return c.ruleTree(changes, true)
}

// sweep goes through the numbers in order. At 0 and at each change it emits the sets of rules that match from
// there on.
func sweep(rules int, changes []change, emit func(number, *[slots]bitset)) {
	slices.SortStableFunc(changes, func(a, b change) int { return a.at.compare(b.at) })
	counts := make([][slots]int, rules)
	var sets [slots]bitset
	if len(changes) == 0 || changes[0].at != (number{}) {
		emit(number{}, &sets)
	}
	for i, ch := range changes {
		for k := range slots { // none for a mask of 0, which belongs to no rule
			if ch.mask>>k&1 == 0 {
				continue
			}
			n := &counts[ch.rule][k]
			if *n += ch.add; *n > 0 {
				sets[k].add(ch.rule)
			} else {
				sets[k].del(ch.rule)
			}
		}
		if i+1 == len(changes) || changes[i+1].at != ch.at {
			emit(ch.at, &sets)
		}
	}
}

// Masks of classes.
const (
	maskPublic   = 1 << classPublic
	maskPrivate  = 1 << classPrivate
	maskHost     = 1 << classHost
	maskEndpoint = 1 << classEndpoint
	maskAll      = maskPublic | maskPrivate | maskHost | maskEndpoint
)

// always returns the classes whose addresses a rule matches unconditionally.
func (r *flat) always() (mask uint8) {
	if r.only != nil {
		return 0
	}
	if r.Verdict != Allow && len(r.CIDRs)+len(r.Groups)+len(r.Names)+len(r.Endpoints) == 0 {
		return maskAll
	}
	for _, g := range r.Groups {
		switch g {
		case Any:
			if r.Verdict != Allow {
				return maskAll
			}
			mask |= maskPublic
		case Public:
			mask |= maskPublic
		case Private:
			mask |= maskPrivate
		case Host:
			mask |= maskHost
		}
	}
	return mask
}

// addresses puts the tree of IPv4 or IPv6 addresses into the table. A value is a class and a set.
func (c *compiler) addresses(six bool) uint32 {
	var changes []change
	span := func(p netip.Prefix, rule int, mask uint8) {
		if p.Addr().Is6() != six {
			return
		}
		first, after, more := edges(p)
		changes = append(changes, change{first, rule, 1, mask})
		if more {
			changes = append(changes, change{after, rule, -1, mask})
		}
	}
	one := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if six {
		all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	for i := range c.rules {
		r := &c.rules[i]
		if mask := r.always(); mask != 0 {
			span(all, i, mask)
		}
		for _, a := range r.only {
			span(one(a), i, maskHost)
		}
		for _, cidr := range r.CIDRs {
			mask := uint8(maskAll)
			if r.Verdict == Allow {
				mask = maskPublic
				if inside(cidr.Prefix, c.classes.private) {
					mask |= maskPrivate
				}
			}
			span(cidr.Prefix, i, mask)
		}
	}
	// At these the class may change, but no rule does.
	for _, p := range append(c.classes.boundaries(), all) {
		span(p, 0, 0)
	}
	var leaves []leaf
	sweep(len(c.rules), changes, func(at number, sets *[slots]bitset) {
		k := c.classes.of(at.addr(six))
		var b bitset
		if k != classFloor {
			b = sets[k]
		}
		v := uint32(k)<<24 | c.set(b)
		if n := len(leaves); n == 0 || leaves[n-1].value != v {
			leaves = append(leaves, leaf{at, v})
		}
	})
	return c.tree(leaves, six)
}
