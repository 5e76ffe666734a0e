package netpolicy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Validate checks a policy. Errors wrap ErrPolicy and name the field.
func (p *Policy) Validate() error {
	if err := p.validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrPolicy, err)
	}
	return nil
}

func (p *Policy) validate() error {
	if p.Version != 0 && p.Version != 1 {
		return at("version", "%d: this program knows version 1", p.Version)
	}
	if err := cmp.Or(p.Default.Egress.validate("default.egress"), p.Default.Ingress.validate("default.ingress")); err != nil {
		return err
	}
	if n := len(p.Rules) + p.implicit(); n > MaxRules {
		return at("rules", "%d, with those of published ports and the resolver: at most %d", n, MaxRules)
	}
	var total struct{ cidrs, ports, names, tags int }
	for i := range p.Rules {
		r := &p.Rules[i]
		if err := r.validate(fmt.Sprintf("rules[%d]", i)); err != nil {
			return err
		}
		total.cidrs += len(r.CIDRs)
		total.ports += len(r.Ports) + len(r.TLS)
		total.names += len(r.Names)
		total.tags += len(r.Endpoints)
	}
	for _, l := range []struct {
		what   string
		n, max int
	}{
		{"CIDRs", total.cidrs, MaxCIDRs}, {"port ranges", total.ports, MaxPortRanges},
		{"names", total.names, MaxNames}, {"agents", total.tags, MaxTags},
	} {
		if l.n > l.max {
			return at("rules", "%d %s in all rules: at most %d", l.n, l.what, l.max)
		}
	}
	if err := p.validatePublished(); err != nil {
		return err
	}
	if total.names > 0 && p.DNS == nil {
		return at("rules", "names are matched by what the endpoint's resolver finds: add dns with its upstreams")
	}
	if d := p.DNS; d != nil {
		if len(d.Upstreams) > MaxUpstreams {
			return at("dns.upstreams", "%d: at most %d", len(d.Upstreams), MaxUpstreams)
		}
		for i, u := range d.Upstreams {
			if !u.IsValid() || u.Port() == 0 {
				return at(fmt.Sprintf("dns.upstreams[%d]", i), "no address and port, such as 192.0.2.53:53")
			}
		}
		if d.QueriesPerSecond < 0 || d.QueriesPerSecond > 100000 {
			return at("dns.queries_per_second", "%d: 1 to 100000", d.QueriesPerSecond)
		}
	}
	if err := cmp.Or(p.validateProxy(), p.Limits.Egress.validate("limits.egress"), p.Limits.Ingress.validate("limits.ingress")); err != nil {
		return err
	}
	if p.Flows != 0 && (p.Flows < MinFlows || p.Flows > MaxFlows) {
		return at("flows", "%d: %d to %d, or 0 for %d", p.Flows, MinFlows, MaxFlows, DefaultFlows)
	}
	return nil
}

// CheckTenant returns an error for what would open to a tenant of the host what belongs to the host: addresses that it
// listens at, what a name server's port would not be, and, unless private is set, the host's services and private
// networks. A policy without such parts opens public addresses, and other endpoints that let the tenant in.
func (p *Policy) CheckTenant(private bool) error {
	if p == nil {
		return nil
	}
	if len(p.Publish) > 0 {
		return at("publish", "it would take addresses and ports of the host: use the gateway")
	}
	if p.DNS != nil {
		for i, u := range p.DNS.Upstreams {
			if u.Port() != 53 {
				return at(fmt.Sprintf("dns.upstreams[%d]", i), "a name server of a tenant has port 53")
			}
		}
	}
	for i, r := range p.Rules {
		if private || r.Direction != Egress || r.Verdict != Allow {
			continue
		}
		if slices.ContainsFunc(r.Groups, func(g Group) bool { return g != Any && g != Public }) ||
			slices.ContainsFunc(r.CIDRs, func(c CIDR) bool { return AllPrivate(c.Prefix) }) {
			return at(fmt.Sprintf("rules[%d]", i), "it opens private addresses or the host")
		}
	}
	return nil
}

// FieldError is an error of one field of a policy.
type FieldError struct {
	// Field is its place: "rules[2].ports[0]". Entries of lists have an index, which counts from 0.
	Field string
	Err   error
}

// Error returns the text of the cause, which names the place.
func (e *FieldError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *FieldError) Unwrap() error { return e.Err }

// FieldName returns Field: see spec.FieldOf.
func (e *FieldError) FieldName() string { return e.Field }

// at returns an error of a place.
func at(place, format string, args ...any) error {
	return &FieldError{place, fmt.Errorf("%s: %w", place, fmt.Errorf(format, args...))}
}

// implicit returns how many rules the policy has that are not in Rules: see flatten.
func (p *Policy) implicit() int {
	n := len(p.Publish)
	if p.DNS != nil {
		n++
	}
	if p.ProxyOn() {
		n++
	}
	if p.ChecksNames() {
		n++
	}
	return n
}

func (p *Policy) validatePublished() error {
	if len(p.Publish) > MaxPublished {
		return at("publish", "%d ports: at most %d", len(p.Publish), MaxPublished)
	}
	type key struct {
		listen   netip.AddrPort
		protocol Protocol
	}
	seen := map[key]bool{}
	for i, pub := range p.Publish {
		where := fmt.Sprintf("publish[%d]", i)
		switch {
		case !pub.Listen.IsValid() || pub.Listen.Port() == 0:
			return at(where+".listen", "no address and port, such as 127.0.0.1:8080")
		case pub.Port == 0:
			return at(where+".port", "1 to 65535")
		case pub.Protocol != TCP && pub.Protocol != UDP:
			return at(where+".protocol", "%q: tcp or udp", pub.Protocol)
		}
		k := key{pub.Listen, pub.Protocol}
		if seen[k] {
			return at(where+".listen", "%v is published twice", pub.Listen)
		}
		seen[k] = true
	}
	return nil
}

func (v Verdict) validate(where string) error {
	switch v {
	case "", Allow, Deny, Reject:
		return nil
	}
	return at(where, "verdict %.40q: allow, deny or reject", string(v))
}

func (r *Rule) validate(where string) error {
	if len(r.Name) > MaxRuleName || strings.ContainsFunc(r.Name, func(c rune) bool { return c < ' ' || c == 0x7f || c == '\uFFFD' }) {
		return at(where+".name", "at most %d bytes of printable text", MaxRuleName)
	}
	if r.Direction != Egress && r.Direction != Ingress {
		return at(where+".direction", "%.40q: egress or ingress", string(r.Direction))
	}
	if err := r.Verdict.validate(where + ".verdict"); err != nil {
		return err
	}
	for i, c := range r.CIDRs {
		if err := checkPrefix(c.Prefix); err != nil {
			return at(fmt.Sprintf("%s.cidrs[%d]", where, i), "%w", err)
		}
	}
	for i, g := range r.Groups {
		switch g {
		case Any, Public, Private, Host:
		case Metadata, LinkLocal, Loopback, Multicast:
			if r.Verdict == Allow {
				return at(fmt.Sprintf("%s.groups[%d]", where, i), "%s is always denied: no rule can allow it", g)
			}
		default:
			return at(fmt.Sprintf("%s.groups[%d]", where, i), "%.40q: any, public, private, host, metadata, link-local, loopback or multicast", string(g))
		}
	}
	if len(r.Names) > 0 && (r.Verdict != Allow || r.Direction != Egress) {
		return at(where+".names", "only rules that allow egress can have names: an address that was never resolved would not match")
	}
	for i, n := range r.Names {
		if err := checkName(n); err != nil {
			return at(fmt.Sprintf("%s.names[%d]", where, i), "%w", err)
		}
	}
	for i, t := range r.Endpoints {
		if err := checkTag(t); err != nil {
			return at(fmt.Sprintf("%s.agents[%d]", where, i), "%w", err)
		}
	}
	for i, pr := range r.Protocols {
		switch pr {
		case TCP, UDP, ICMP, AnyProtocol:
		default:
			return at(fmt.Sprintf("%s.protocols[%d]", where, i), "%.40q: tcp, udp, icmp or any", string(pr))
		}
	}
	if err := validatePorts(where, r.Ports); err != nil {
		return err
	}
	if len(r.TLS) > 0 && len(r.Names) == 0 {
		return at(where+".tls", "it says where names are checked, and the rule has none")
	}
	for i, c := range r.TLS {
		switch {
		case c == CheckNowhere && len(r.TLS) > 1:
			return at(fmt.Sprintf("%s.tls[%d]", where, i), "none stands alone")
		case c != CheckNowhere && (c.First == 0 || c.First > c.Last):
			return at(fmt.Sprintf("%s.tls[%d]", where, i), "%d-%d is no range of ports: they are 1 to 65535", c.First, c.Last)
		}
	}
	return nil
}

func validatePorts(where string, ranges []PortRange) error {
	for i, r := range ranges {
		if r.First == 0 || r.First > r.Last {
			return at(fmt.Sprintf("%s.ports[%d]", where, i), "%d-%d is no range of ports: they are 1 to 65535", r.First, r.Last)
		}
	}
	return nil
}

// checkName checks that DNS can have a name (RFC 1035, 2.3.4), in lower case and without a final dot, or "*."
// before one with at least two labels.
func checkName(name string) error {
	n, wild := strings.CutPrefix(name, "*.")
	if _, err := netip.ParseAddr(n); !ValidName(n) || wild && !strings.Contains(n, ".") || err == nil {
		return fmt.Errorf("%.80q is not a name like example.com or *.example.com, in lower case", name)
	}
	return nil
}

// ValidName reports whether DNS can have a name (RFC 1035, 2.3.4), in lower case and without a final dot. It
// accepts IPv4 addresses, too.
func ValidName(name string) bool {
	for l := range strings.SplitSeq(name, ".") {
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' || strings.Trim(l, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return len(name) <= 253
}

// CheckTags checks that an endpoint can have these tags. Errors wrap ErrPolicy.
func CheckTags(tags []string) error {
	if len(tags) > MaxOwnTags {
		return fmt.Errorf("%w: %d tags: an endpoint has at most %d", ErrPolicy, len(tags), MaxOwnTags)
	}
	for i, t := range tags {
		if err := checkTag(t); err != nil {
			return fmt.Errorf("%w: %w", ErrPolicy, err)
		}
		if slices.Contains(tags[:i], t) {
			return fmt.Errorf("%w: tag %q: it is there twice", ErrPolicy, t)
		}
	}
	return nil
}

func checkTag(tag string) error {
	if tag == "" || len(tag) > MaxTag || strings.Trim(tag, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:=/") != "" {
		return fmt.Errorf("tag %.80q: 1 to %d letters, digits and -_.:=/", tag, MaxTag)
	}
	return nil
}

func (r Rates) validate(where string) error {
	for _, l := range []struct {
		what     string
		r        *Rate
		min, max uint64
		burst    uint64
	}{
		// One frame after segmentation offload must fit into a burst.
		{"bits", r.Bits, 1000, 1e12, 1 << 20},
		{"packets", r.Packets, 1, 1e9, 64},
		{"connections", r.Connections, 1, 1e6, 1},
	} {
		switch {
		case l.r == nil:
		case l.r.PerSecond < l.min || l.r.PerSecond > l.max:
			return at(fmt.Sprintf("%s.%s.per_second", where, l.what), "%d: %d to %d, or leave %s out", l.r.PerSecond, l.min, l.max, l.what)
		case l.r.Burst != 0 && (l.r.Burst < l.burst || l.r.Burst > 1e12):
			return at(fmt.Sprintf("%s.%s.burst", where, l.what), "%d: %d to 1e12, or 0", l.r.Burst, l.burst)
		}
	}
	return nil
}
