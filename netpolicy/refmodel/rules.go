package refmodel

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Question is what the rules are asked: may this flow be opened?
type Question struct {
	Direction netpolicy.Direction
	Protocol  netpolicy.Protocol // tcp, udp or icmp
	Peer      netip.Addr
	Port      uint16 // the destination port; 0 for icmp
	// Names are those that the resolver has given the peer's address for.
	Names []string
}

// Answer is what the rules say.
type Answer struct {
	Verdict netpolicy.Verdict
	Reason  netpolicy.Reason
	// Rule is the index in Policy.Rules of the rule that decided. -1 is none, or an
	// implicit one, which Implicit names.
	Rule     int
	Implicit string
	// Class of the peer: floor, host, agent, private or public.
	Class string
}

// Ask asks the rules, floor and defaults, but no flows or limits.
func (m *Model) Ask(q Question) Answer {
	k := m.kindOf(q.Peer)
	a := m.ask(q, k)
	a.Class = string(k)
	return a
}

func (m *Model) ask(q Question, k kind) Answer {
	if k == isFloor {
		return Answer{Verdict: netpolicy.Deny, Reason: netpolicy.ReasonFloor, Rule: -1}
	}
	gateway := q.Peer == netpolicy.TheWire.Gateway4 || q.Peer == netpolicy.TheWire.Gateway6
	if gateway && m.policy.DNS != nil && q.Direction == netpolicy.Egress && q.Protocol != netpolicy.ICMP && q.Port == 53 {
		return Answer{Verdict: netpolicy.Allow, Reason: netpolicy.ReasonRule, Rule: -1, Implicit: "resolver"}
	}
	for _, p := range m.policy.Publish {
		if gateway && q.Direction == netpolicy.Ingress && q.Protocol == p.Protocol && q.Port == p.Port {
			return Answer{Verdict: netpolicy.Allow, Reason: netpolicy.ReasonRule, Rule: -1, Implicit: "published port"}
		}
	}
	for i := range m.policy.Rules {
		r := &m.policy.Rules[i]
		if r.Direction == q.Direction && m.peer(r, q, k) && protocol(r, q) && port(r, q) {
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

// left says whether a list that is left out matches: never for a rule that allows.
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

func (m *Model) peer(r *netpolicy.Rule, q Question, k kind) bool {
	if len(r.CIDRs)+len(r.Groups)+len(r.Names)+len(r.Agents) == 0 {
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
			for _, p := range privateRanges {
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
	if k == isAgent {
		for _, p := range m.env.Peers {
			for _, tag := range p.Tags {
				if p.Address == q.Peer && slices.Contains(r.Agents, tag) {
					return true
				}
			}
		}
	}
	if k == isPublic {
		for _, name := range q.Names {
			if slices.ContainsFunc(r.Names, func(pattern string) bool { return nameMatches(pattern, name) }) {
				return true
			}
		}
	}
	return false
}

func nameMatches(pattern, name string) bool {
	if suffix, ok := strings.CutPrefix(pattern, "*"); ok {
		return strings.HasSuffix(name, suffix) && len(name) > len(suffix)
	}
	return pattern == name
}
