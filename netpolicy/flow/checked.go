package flow

import (
	"errors"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
)

// ErrNoFlow means that a connection belongs to no live flow of the endpoint.
var ErrNoFlow = errors.New("there is no such flow")

// Checked is a flow that the rules opened for a name that must be checked: its connection ends on the host. It is
// an immutable value.
type Checked struct {
	// Peer is the peer that the guest believes it is connected to.
	Peer      netip.AddrPort
	GuestPort uint16
	// Rule and Generation identify the rule, and the table, that kept the flow open when it was found, as in Event.
	Rule       int
	Generation uint32
	// Opened is when the flow was opened, by Coarse. NameSet is the number of the set of its peer's names then; 0
	// is none.
	Opened  uint64
	NameSet uint32
	// Ref is for those who pass a flow on: what the other side calls it by. The zero value has none.
	Ref uint64

	key   key
	alias key // the key by which the host knows it
}

// Checked finds the flow of a connection from a port of the endpoint's address to the port where names are
// checked. It fails with ErrNoFlow if no such flow lives.
func (t *Table) Checked(at netip.AddrPort, from uint16, now uint64) (c Checked, err error) {
	c.alias = keyOf(at, from)
	if c.key, err = t.behind(c.alias); err != nil {
		return c, err
	}
	c.Peer, c.GuestPort = netip.AddrPortFrom(peerOf(&c.key), port(c.key.PeerPort)), port(c.key.GuestPort)
	f, err := t.find(c.key)
	if err != nil {
		return c, err
	}
	c.Rule, c.Generation, c.Opened, c.NameSet = int(f.Rule), f.Gen, f.First, f.NameSet
	if f.Rule == noRule {
		c.Rule = -1
	}
	if !c.is(f, now) {
		return c, flowError(ebpf.ErrKeyNotExist)
	}
	return c, nil
}

// is reports whether an entry of the flow table is still the flow, and lives.
func (c *Checked) is(f *bpf.EndpointFlow, now uint64) bool {
	return f.Via == c.alias.GuestPort && f.First == c.Opened && f.Cut == 0 && now < f.Seen+uint64(flowLife(f.State)+flowSlack)
}

// Lives reports whether c is still the same flow, and may carry packets by the policy that last judged it.
func (t *Table) Lives(c Checked, now uint64) (bool, error) {
	f, err := t.find(c.key)
	var behind key
	if err == nil {
		// Without the alias, no packet of the host's would reach the guest.
		behind, err = t.behind(c.alias)
	}
	if errors.Is(err, ErrNoFlow) {
		return false, nil
	}
	return err == nil && behind == c.key && c.is(f, now), err
}

// Refusal makes an event of a checked flow that was reset. It has no bytes: the programs counted them when the
// guest sent them.
func (c Checked) Refusal(reason netpolicy.Reason) netpolicy.Event {
	return netpolicy.Event{
		Uptime: time.Duration(Now()), Direction: netpolicy.Egress, Verdict: netpolicy.Reject, Reason: reason, Rule: c.Rule, Generation: c.Generation,
		Peer: c.Peer.Addr(), PeerPort: c.Peer.Port(), Protocol: unix.IPPROTO_TCP, GuestPort: c.GuestPort, EtherType: unix.ETH_P_IP,
	}
}

// Named records the server name of a checked flow.
func (g *Log) Named(c Checked, name string) { g.note(c, 0, name) }

// Refused ends a checked flow in the log: it was reset, for a reason. name is the server name that the client
// asked for, as far as it is known.
func (g *Log) Refused(c Checked, reason netpolicy.Reason, name string) { g.note(c, reason, name) }

func (g *Log) note(c Checked, reason netpolicy.Reason, name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return
	}
	t := g.flows.flows[c.key]
	if t == nil || t.First != c.Opened {
		f, err := g.table.find(c.key)
		// The next look reports a flow that is gone, replaced, or not yet seen since the last look ended.
		if t != nil || err != nil || f.First != c.Opened || len(g.flows.flows) >= 2*netpolicy.MaxFlows {
			return
		}
		t = g.begin(&c.key, f, g.now())
		t.EndpointFlow, t.look = *f, g.flows.looks
	} else if f, err := g.table.find(c.key); err == nil && t.same(f) {
		t.EndpointFlow = *f
	}
	t.server = name
	if reason == 0 || t.done {
		return
	}
	t.refused, t.done = reason, true
	g.write(g.record(c.key, t, netpolicy.FlowRefused))
	close(g.more)
	g.more = make(chan struct{})
}
