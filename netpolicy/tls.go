package netpolicy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy/bpf"
)

// ErrNoFlow is a connection that no flow of the agent belongs to any more.
var ErrNoFlow = errors.New("there is no such flow")

// Checked is a flow that the rules have opened for its name, which is to be checked: its
// connection ends on the host. It is a value, and does not change.
type Checked struct {
	// Peer is who the guest believes to be connected to.
	Peer      netip.AddrPort
	GuestPort uint16
	// Rule and Generation say by which rule of which table it was open when it was found, as
	// in Event.
	Rule       int
	Generation uint32

	key   flowKey
	alias flowKey // what the host knows it by
	first uint64
	names uint32 // the number of those that it was opened for
}

// Checked finds the flow that a connection from a port of the agent's address to
// Environment.TLSPort is of. It fails with ErrNoFlow if there is none that lives.
func (l *Link) Checked(port uint16) (Checked, error) { return l.eng.checked(port, ktime()) }

// Lives says whether a flow is still the one that was found, and may carry packets by the
// policy that it was last judged by.
func (l *Link) Lives(c Checked) (bool, error) { return l.eng.lives(c, ktime()) }

// OpensName says whether the rules open a flow, now that the server name is known that its client
// has sent: a rule's names match if one of them is that name, and the peer's address was pinned
// for one of them when the flow was opened. Name is in lower case, without a final dot; empty is none. The peer's
// class is looked up anew. It is one question of the Spec that is installed.
func (l *Link) OpensName(c Checked, name string) bool { return l.eng.opensName(c, name, ktime()) }

func (e *engine) checked(port uint16, now uint64) (c Checked, err error) {
	e.mu.Lock()
	s := e.spec
	e.mu.Unlock()
	if s == nil || s.tlsPort == 0 {
		return c, fmt.Errorf("finding the flow of a checked connection: %w: names are not checked", ErrNoFlow)
	}
	c.alias = keyOf(netip.AddrPortFrom(TheWire.Gateway4, s.tlsPort), port)
	if c.key, err = e.behind(c.alias); err != nil {
		return c, err
	}
	c.Peer, c.GuestPort = netip.AddrPortFrom(peerOf(&c.key), hostOrder(c.key.PeerPort)), hostOrder(c.key.GuestPort)
	f, err := e.flow(c.key)
	if err != nil {
		return c, err
	}
	c.Rule, c.Generation, c.first, c.names = int(f.Rule), f.Gen, f.First, f.Names
	if f.Rule == noRule {
		c.Rule = -1
	}
	if !c.is(f, now) {
		return c, flowError(ebpf.ErrKeyNotExist)
	}
	return c, nil
}

// is says whether what is in the flow table is still the flow, and lives.
func (c *Checked) is(f *bpf.AgentFlow, now uint64) bool {
	return f.Via == c.alias.GuestPort && f.First == c.first && f.Cut == 0 && now < f.Seen+uint64(flowLife(f.State)+flowSlack)
}

func (e *engine) lives(c Checked, now uint64) (bool, error) {
	f, err := e.flow(c.key)
	var key flowKey
	if err == nil {
		// Without it, nothing of the host's would reach the guest.
		key, err = e.behind(c.alias)
	}
	if errors.Is(err, ErrNoFlow) {
		return false, nil
	}
	return err == nil && key == c.key && c.is(f, now), err
}

// behind is the key of the flow that an alias leads to.
func (e *engine) behind(alias flowKey) (flowKey, error) {
	var a bpf.AgentAlias
	// As the programs look for it: see find in bpf/agent.c.
	err := e.lasting.Lookup(&alias, &a)
	for _, m := range []*ebpf.Map{e.flows, e.lasting} {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = m.Lookup(&alias, &a)
		}
	}
	if err != nil {
		return flowKey{}, flowError(err)
	}
	if a.State != stateAlias {
		return flowKey{}, flowError(ebpf.ErrKeyNotExist)
	}
	return flowKey{Peer: a.Peer, PeerPort: a.PeerPort, GuestPort: a.GuestPort, Proto: unix.IPPROTO_TCP}, nil
}

func (e *engine) flow(k flowKey) (*bpf.AgentFlow, error) {
	// One that has ended may be in the other map still. The one that lasts is looked for twice: it may be moved
	// meanwhile.
	var last *bpf.AgentFlow
	for _, m := range []*ebpf.Map{e.lasting, e.flows, e.lasting} {
		var f bpf.AgentFlow
		err := m.Lookup(&k, &f)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, flowError(err)
		}
		if err == nil && (last == nil || f.First >= last.First) {
			last = &f
		}
	}
	if last == nil {
		return nil, flowError(ebpf.ErrKeyNotExist)
	}
	return last, nil
}

func flowError(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = ErrNoFlow
	}
	return fmt.Errorf("finding the flow of a checked connection: %w", err)
}

// keyOf is the key of a flow of TCP over IPv4.
func keyOf(peer netip.AddrPort, guestPort uint16) flowKey {
	k := flowKey{PeerPort: networkOrder(peer.Port()), GuestPort: networkOrder(guestPort), Proto: unix.IPPROTO_TCP}
	b := peer.Addr().As16()
	for i := range k.Peer {
		k.Peer[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return k
}

// networkOrder is a port as the programs store it, and hostOrder the other way round.
func networkOrder(p uint16) uint16 { return port(p) }

func hostOrder(p uint16) uint16 { return port(p) }

func (e *engine) opensName(c Checked, name string, now uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spec == nil {
		return false
	}
	// The names are those that the flow was opened for, which may have expired since.
	at := now
	if c.Generation == e.gen {
		at = c.first
	}
	names, ok := e.known.names[c.names]
	if !ok {
		names = e.pinnedAt(c.Peer.Addr(), at)
	}
	_, ok = e.spec.opensName(c.Peer, names, name)
	return ok
}

// opensName asks the rules about a flow to a peer whose address was given for names, and whose
// client has sent a server name.
func (s *Spec) opensName(peer netip.AddrPort, pinned []string, name string) (rule int, ok bool) {
	// Names open public addresses alone, and so does the default.
	if !s.Public(peer.Addr()) {
		return -1, false
	}
	return s.opensBeyond(peer, pinned, name)
}

// opensBeyond asks the rules about a TCP connection to a public or private peer. Those to the
// host and to other agents are not for it: it is the host that connects, and it would be taken
// for itself there.
func (s *Spec) opensBeyond(peer netip.AddrPort, pinned []string, name string) (rule int, ok bool) {
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

// Opens says whether the rules let the agent open a TCP connection over IPv4 to a peer that is neither
// the host nor an agent, and which rule has decided, as in RuleName of the Spec; empty is none. Name
// is the server name in TLS that the connection is certain to have: see OpensName. It is for what connects
// on the agent's behalf, and one question of the Spec that is installed.
func (l *Link) Opens(peer netip.AddrPort, name string) (rule string, ok bool) {
	return l.eng.opens(peer, name, ktime())
}

func (e *engine) opens(peer netip.AddrPort, name string, now uint64) (rule string, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.spec == nil || !peer.Addr().Is4() || peer.Port() == 0 {
		return "", false
	}
	i, ok := e.spec.opensBeyond(peer, e.pinnedAt(peer.Addr(), now), name)
	return e.spec.RuleName(i), ok
}

// pinnedAt are the names that an address is pinned for at a time. The lock is held.
func (e *engine) pinnedAt(a netip.Addr, at uint64) (names []string) {
	for n, until := range e.names[a] {
		if at < until {
			names = append(names, n)
		}
	}
	return names
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
	means := func(n string) bool {
		return slices.ContainsFunc(r.Names, func(p string) bool { return NameMatches(p, n) })
	}
	return slices.ContainsFunc(pinned, means) && (!contains(r.checkedPorts(), port) || name != "" && means(name))
}

// Refusal makes an event of a checked flow that was reset. It has no bytes: they have been
// counted as the guest has sent them.
func (c Checked) Refusal(reason Reason) Event {
	return Event{
		Uptime: time.Duration(ktime()), Direction: Egress, Verdict: Reject, Reason: reason, Rule: c.Rule, Generation: c.Generation,
		Peer: c.Peer.Addr(), PeerPort: c.Peer.Port(), Protocol: unix.IPPROTO_TCP, GuestPort: c.GuestPort, EtherType: unix.ETH_P_IP,
	}
}

// Named notes the server name that a checked flow has.
func (g *FlowLog) Named(c Checked, name string) { g.note(c, 0, name) }

// Refused ends a checked flow in the log: it was reset, for a reason. Name is the server name
// that was asked for, as far as it is known.
func (g *FlowLog) Refused(c Checked, reason Reason, name string) { g.note(c, reason, name) }

func (g *FlowLog) note(c Checked, reason Reason, name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return
	}
	t := g.flows.flows[c.key]
	if t == nil || t.First != c.first {
		f, err := g.eng.flow(c.key)
		// If it is gone, or another one, or the last look is not over yet, the table tells of it.
		if t != nil || err != nil || f.First != c.first || len(g.flows.flows) >= 2*MaxFlows {
			return
		}
		t = g.begin(&c.key, f, g.now())
		t.AgentFlow, t.look = *f, g.flows.looks
	} else if f, err := g.eng.flow(c.key); err == nil && t.same(f) {
		t.AgentFlow = *f
	}
	t.server = name
	if reason == 0 || t.done {
		return
	}
	t.refused, t.done = reason, true
	g.write(g.record(c.key, t, FlowRefused))
	close(g.more)
	g.more = make(chan struct{})
}
