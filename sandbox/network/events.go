package network

import (
	"net/netip"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/tlsname"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// uptime returns CLOCK_MONOTONIC, the clock of events.
func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

func protocolName(e netpolicy.Event) string {
	switch e.Protocol {
	case 0:
		if !e.Peer.IsValid() || e.Peer.IsUnspecified() {
			return ""
		}
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	}
	return strconv.Itoa(int(e.Protocol))
}

// event records an event of the link.
func (n *Network) event(e netpolicy.Event) {
	n.flows.Denied(e)
	n.events.add(n.netEvent(e))
}

// refused records a connection that was reset because of its TLS name.
func (n *Network) refused(r tlsname.Refusal) {
	n.flows.Refused(r.Flow, r.Reason, r.Name)
	if r.Quiet {
		return
	}
	e := r.Flow.Refusal(r.Reason)
	e.Suppressed = r.Suppressed
	ev := n.netEvent(e)
	ev.ServerName = r.Name
	// The rule is of the policy that the connection was opened under, which may have been replaced.
	ev.Rule = n.link.RuleName(e.Generation, e.Rule)
	n.events.add(ev)
}

func (n *Network) netEvent(e netpolicy.Event) spec.NetEvent {
	ev := spec.NetEvent{
		Time: time.Now().Add(e.Uptime - uptime()).UTC(), Direction: e.Direction, Verdict: e.Verdict, Reason: e.Reason,
		Rule: n.ruleName(e), Protocol: protocolName(e), PeerPort: e.PeerPort, Guest: n.guestAddress(e), GuestPort: e.GuestPort,
		EtherType: e.EtherType, Bytes: e.Bytes, Suppressed: e.Suppressed,
	}
	if e.Peer.IsValid() && !e.Peer.IsUnspecified() {
		ev.Peer, ev.Name = e.Peer, n.link.Name(e.Peer)
	}
	return ev
}

// Bounds on stored events: in the log, and in the queue of each follower.
const (
	maxEvents   = 1024
	maxFollowed = 256
)

// eventLog keeps the last events and passes new ones to its followers.
type eventLog struct {
	mu        sync.Mutex // guards what follows
	ring      []spec.NetEvent
	next      int // where the oldest is, once the ring is full
	total     uint64
	followers map[*follower]bool
}

// follower gets events as they come. Events that it is too slow for are dropped and counted.
type follower struct {
	ch   chan spec.NetEvent
	lost uint64 // guarded by the log's mutex
}

func newEventLog() *eventLog { return &eventLog{followers: map[*follower]bool{}} }

func (l *eventLog) add(e spec.NetEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total++
	if len(l.ring) < maxEvents {
		l.ring = append(l.ring, e)
	} else {
		l.ring[l.next] = e
		l.next = (l.next + 1) % maxEvents
	}
	for f := range l.followers {
		e.Lost = f.lost
		select {
		case f.ch <- e:
			f.lost = 0
		default:
			f.lost++
		}
	}
}

// recent returns the last events, the oldest first. If follow is set, it also returns a follower that gets all
// later events, and the caller must call stop.
func (l *eventLog) recent(follow bool) (events []spec.NetEvent, f *follower, stop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	events = append(append(events, l.ring[l.next:]...), l.ring[:l.next]...)
	if len(events) > 0 {
		// Older events that the ring has dropped.
		events[0].Lost = l.total - uint64(len(events))
	}
	if !follow {
		return events, nil, func() {}
	}
	f = &follower{ch: make(chan spec.NetEvent, maxFollowed)}
	l.followers[f] = true
	return events, f, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.followers, f)
	}
}

// etherIPv6 is the EtherType of IPv6 (RFC 2464, 3).
const etherIPv6 = 0x86dd

// guestAddress returns the VM's own address in the protocol of an event.
func (n *Network) guestAddress(e netpolicy.Event) netip.Addr {
	if e.EtherType == etherIPv6 && n.own6.IsValid() {
		return n.own6
	}
	return n.address
}
