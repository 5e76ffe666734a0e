package refmodel

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Question asks the rules whether a flow may be opened.
type Question struct {
	Direction netpolicy.Direction
	Protocol  netpolicy.Protocol // tcp, udp or icmp
	Peer      netip.Addr
	Port      uint16 // the destination port; 0 for icmp
	// Names are the names for which the resolver has given the guest the peer's address.
	Names []string
	// Hello is set if the client's ClientHello is known. ServerName is the name in it; empty if it has none, or no
	// valid one.
	Hello      bool
	ServerName string
}

// Answer is the rules' answer to a Question.
type Answer struct {
	Verdict netpolicy.Verdict
	Reason  netpolicy.Reason
	// Rule is the index in Policy.Rules of the rule that decided. It is -1 if none did, or if an implicit rule
	// did, which Implicit names.
	Rule     int
	Implicit string
	// Checked is set if the flow is open for its name alone, and continues only if its ClientHello has an allowed
	// name. If the Question has the ClientHello, Verdict and Reason are the final ones.
	Checked bool
	// Class is the class of the peer: floor, host, agent (another endpoint), private or public.
	Class string
}

// Ask asks the rules, including floor and defaults, but without flows and limits.
func (m *Model) Ask(q Question) Answer {
	k := m.kindOf(q.Peer)
	a := m.ask(q, k)
	a.Class = string(k)
	return a
}

func (m *Model) ask(q Question, k kind) Answer {
	if q.Protocol == netpolicy.UDP {
		return m.scan(q, k, whereUnchecked)
	}
	a := m.scan(q, k, everywhere)
	if q.Protocol != netpolicy.TCP || a.Verdict != netpolicy.Allow || a.Rule < 0 {
		return a
	}
	r := &m.policy.Rules[a.Rule]
	if !checkedAt(r, q.Port) || m.addressed(r, q, k) || m.scan(q, k, whereUnchecked).Verdict == netpolicy.Allow {
		return a
	}
	a.Checked = true
	if q.Hello && m.scan(q, k, byServerName).Verdict != netpolicy.Allow {
		a.Verdict, a.Reason = netpolicy.Reject, netpolicy.ReasonTLSName
		if q.ServerName == "" {
			a.Reason = netpolicy.ReasonTLSNoName
		}
	}
	return a
}

// matching is the condition under which a rule matches by its names.
type matching int

const (
	everywhere     matching = iota // if the address was given for one of them
	whereUnchecked                 // and they are not checked at the port
	byServerName                   // and, where they are checked, one of them is the server name
)

// checkedAt reports whether a rule's names are checked at a port.
func checkedAt(r *netpolicy.Rule, port uint16) bool {
	if len(r.TLS) == 0 {
		return port == 443
	}
	for _, c := range r.TLS {
		if c.First <= port && port <= c.Last {
			return true // CheckNowhere's range is 0 to 0, and no port is 0
		}
	}
	return false
}

// checks reports whether the policy has names that are checked.
func (m *Model) checks() bool {
	for i := range m.policy.Rules {
		r := &m.policy.Rules[i]
		if len(r.Names) > 0 && !slices.Equal(r.TLS, []netpolicy.CheckedPorts{netpolicy.CheckNowhere}) {
			return true
		}
	}
	return false
}

// scan tries the rules in order.
func (m *Model) scan(q Question, k kind, by matching) Answer {
	if q.Direction == netpolicy.Egress && q.Protocol == netpolicy.TCP && q.Peer == netpolicy.TheWire.Gateway4 && q.Port == m.env.TLSPort && m.checks() {
		return Answer{Verdict: netpolicy.Deny, Reason: netpolicy.ReasonRule, Rule: -1, Implicit: "where names are checked"}
	}
	if k == isFloor {
		return Answer{Verdict: netpolicy.Deny, Reason: netpolicy.ReasonFloor, Rule: -1}
	}
	gateway := q.Peer == netpolicy.TheWire.Gateway4 || q.Peer == netpolicy.TheWire.Gateway6
	if q.Peer == netpolicy.TheWire.Gateway4 && m.policy.DNS != nil && q.Direction == netpolicy.Egress && q.Protocol != netpolicy.ICMP && q.Port == 53 {
		return Answer{Verdict: netpolicy.Allow, Reason: netpolicy.ReasonRule, Rule: -1, Implicit: "resolver"}
	}
	if q.Peer == netpolicy.TheWire.Gateway4 && m.policy.Proxy != nil && m.policy.Proxy.Enabled && q.Direction == netpolicy.Egress && q.Protocol == netpolicy.TCP && q.Port == 3128 {
		return Answer{Verdict: netpolicy.Allow, Reason: netpolicy.ReasonRule, Rule: -1, Implicit: "proxy"}
	}
	for _, p := range m.policy.Publish {
		if gateway && q.Direction == netpolicy.Ingress && q.Protocol == p.Protocol && q.Port == p.Port {
			return Answer{Verdict: netpolicy.Allow, Reason: netpolicy.ReasonRule, Rule: -1, Implicit: "published port"}
		}
	}
	for i := range m.policy.Rules {
		r := &m.policy.Rules[i]
		if r.Direction == q.Direction && (m.addressed(r, q, k) || m.named(r, q, k, by)) && protocol(r, q) && port(r, q) {
			return Answer{Verdict: verdict(r.Verdict), Reason: netpolicy.ReasonRule, Rule: i}
		}
	}
	d := m.policy.Default.Egress
	if q.Direction == netpolicy.Ingress {
		d = m.policy.Default.Ingress
	}
	d = verdict(d)
	if d == netpolicy.Allow && k != isPublic {
		d = netpolicy.Deny
	}
	return Answer{Verdict: d, Reason: netpolicy.ReasonDefault, Rule: -1}
}

func verdict(v netpolicy.Verdict) netpolicy.Verdict {
	if v == "" {
		return netpolicy.Deny
	}
	return v
}

// left reports whether a list that is left out matches: never in a rule that allows.
func left(r *netpolicy.Rule) bool { return r.Verdict != netpolicy.Allow }

func protocol(r *netpolicy.Rule, q Question) bool {
	if len(r.Protocols) == 0 {
		return left(r)
	}
	return slices.Contains(r.Protocols, q.Protocol) || slices.Contains(r.Protocols, netpolicy.AnyProtocol)
}

func port(r *netpolicy.Rule, q Question) bool {
	if q.Protocol == netpolicy.ICMP {
		return true
	}
	if len(r.Ports) == 0 {
		return left(r)
	}
	for _, p := range r.Ports {
		if p.First <= q.Port && q.Port <= p.Last {
			return true
		}
	}
	return false
}

// addressed reports whether a rule matches a peer without its names.
func (m *Model) addressed(r *netpolicy.Rule, q Question, k kind) bool {
	if len(r.CIDRs)+len(r.Groups)+len(r.Names)+len(r.Endpoints) == 0 {
		return left(r)
	}
	allow := r.Verdict == netpolicy.Allow
	for _, c := range r.CIDRs {
		if !c.Contains(q.Peer) {
			continue
		}
		if !allow || k == isPublic {
			return true
		}
		if k == isPrivate {
			for _, p := range slices.Concat(privateRanges, m.env.OnLink) {
				if p.Contains(c.Addr()) && c.Bits() >= p.Bits() {
					return true
				}
			}
		}
	}
	for _, g := range r.Groups {
		switch g {
		case netpolicy.Any:
			if !allow || k == isPublic {
				return true
			}
		case netpolicy.Public:
			if k == isPublic {
				return true
			}
		case netpolicy.Private:
			if k == isPrivate {
				return true
			}
		case netpolicy.Host:
			if k == isHost {
				return true
			}
		}
	}
	if k == isEndpoint {
		for _, p := range m.env.Peers {
			for _, tag := range p.Tags {
				if p.Address == q.Peer && slices.Contains(r.Endpoints, tag) {
					return true
				}
			}
		}
	}
	return false
}

// named reports whether a rule matches a peer by its names.
func (m *Model) named(r *netpolicy.Rule, q Question, k kind, by matching) bool {
	has := func(name string) bool {
		return slices.ContainsFunc(r.Names, func(pattern string) bool { return NameMatches(pattern, name) })
	}
	if k != isPublic || !slices.ContainsFunc(q.Names, has) {
		return false
	}
	if q.Protocol != netpolicy.ICMP && by != everywhere && checkedAt(r, q.Port) {
		return by == byServerName && q.ServerName != "" && has(q.ServerName)
	}
	return true
}

// NameMatches reports whether a rule's pattern matches a name.
func NameMatches(pattern, name string) bool {
	if suffix, ok := strings.CutPrefix(pattern, "*"); ok {
		return strings.HasSuffix(name, suffix) && len(name) > len(suffix)
	}
	return pattern == name
}
