package flow

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/bpf"
)

// trackedFlow is a flow of the table at the last look.
type trackedFlow struct {
	bpf.EndpointFlow
	begun time.Time // when First was, by the host's clock
	name  string
	rule  string
	look  uint64
	done  bool // its record is written

	server  string           // the server name of TLS, if it was checked
	refused netpolicy.Reason // why it was reset; 0 if it was not
}

// tracker has the flows of the table at the last look, and so at most as many as the table has room for.
type tracker struct {
	flows  map[key]*trackedFlow
	reader reader
	begun  uint64 // when the log began
	looks  uint64
	known  uint64 // flows opened before the log began, or seen
	lost   uint64 // flows opened but never seen, and counted as lost
	// State before the last look, which was at looked: flows ever opened, and when the last packet passed.
	opened, active, looked uint64
	live                   int
}

// ending returns how a flow ended that is gone from the table, or is about to be forgotten.
func (t *trackedFlow) ending(otherwise netpolicy.FlowEnd) netpolicy.FlowEnd {
	switch {
	case t.Cut != 0:
		return netpolicy.FlowCut
	case t.State == stateClosing:
		return netpolicy.FlowClosed
	}
	return otherwise
}

// lookAtFlows compares the flow table with the last look. The lock is held.
func (g *Log) lookAtFlows(anyway bool) error {
	f := &g.flows
	// The count comes first, so that a flow opened meanwhile is not missed.
	opened, active, err := g.table.activity()
	if err != nil {
		return err
	}
	now := g.now()
	rested := f.live > 0 && now-f.looked >= uint64(flowRest)
	if !anyway && opened == f.opened && active == f.active && !rested {
		return nil
	}
	f.looks++
	live := 0
	see := func(k *key, v *bpf.EndpointFlow) {
		if v.State == stateAlias {
			return
		}
		t := f.flows[*k]
		if t != nil && t.look == f.looks && v.First < t.First {
			return // the flow from the other map was opened later
		}
		if t != nil && !t.same(v) {
			if !t.done {
				end := t.ending(netpolicy.FlowReplaced)
				if end == netpolicy.FlowReplaced && v.First >= t.Seen+uint64(flowLife(t.State)) {
					end = netpolicy.FlowExpired
				}
				g.write(g.record(*k, t, end))
			}
			t = nil
		}
		fresh := t == nil
		if fresh {
			t = g.begin(k, v, now)
		} else if v.Gen != t.Gen || v.Rule != t.Rule {
			t.rule = g.table.History.RuleName(v.Gen, int(v.Rule))
		}
		t.EndpointFlow, t.look = *v, f.looks
		over := v.Cut != 0 || now >= v.Seen+uint64(flowLife(v.State)+flowSlack)
		switch {
		case t.done:
		case !over:
			live++
		case v.First < f.begun && v.Seen < f.begun-min(f.begun, uint64(flowLife(v.State))):
			t.done = true // it had ended before the log began
		default:
			t.done = true
			g.write(g.record(*k, t, t.ending(netpolicy.FlowExpired)))
		}
	}
	for _, m := range []*ebpf.Map{g.table.Flows, g.table.Lasting} {
		if err = f.reader.each(m, see); err != nil {
			return err
		}
	}
	for k, t := range f.flows {
		if t.look == f.looks {
			continue
		}
		// It may have moved to a map that had already been read.
		if !t.done {
			if v, err := g.table.find(k); err == nil && t.same(v) {
				t.EndpointFlow, t.look = *v, f.looks
				live++
				continue
			}
		}
		if !t.done {
			g.write(g.record(k, t, t.ending(netpolicy.FlowEvicted)))
		}
		delete(f.flows, k)
	}
	// Flows opened during the look are already among those seen, so this count may lag, but is never too high.
	if gone := opened - min(opened, f.known); gone > f.lost {
		g.lost.Flows += gone - f.lost
		f.lost = gone
	}
	f.opened, f.active, f.looked, f.live = opened, active, now, live
	return nil
}

// begin starts to track a flow. The lock is held.
func (g *Log) begin(k *key, v *bpf.EndpointFlow, now uint64) *trackedFlow {
	if v.First >= g.flows.begun {
		g.flows.known++
	}
	t := &trackedFlow{begun: wall(v.First, now), rule: g.table.History.RuleName(v.Gen, int(v.Rule))}
	if v.Opener == 0 {
		t.name = g.table.History.NameAt(peerOf(k), v.First)
	}
	g.flows.flows[*k] = t
	return t
}

// wall converts a time of the flow table's clock, which now reads now, to the host's clock.
func wall(at, now uint64) time.Time { return time.Now().UTC().Add(time.Duration(at - now)) }

// same reports whether an entry of the table is still the tracked flow. The clock has ticks, so its successor may
// have the same First; packet counts then tell them apart.
func (t *trackedFlow) same(v *bpf.EndpointFlow) bool {
	return v.First == t.First && v.Count[0].Packets >= t.Count[0].Packets && v.Count[1].Packets >= t.Count[1].Packets
}

func (g *Log) record(k key, t *trackedFlow, end netpolicy.FlowEnd) record {
	peer := peerOf(&k)
	i := &netpolicy.FlowInfo{
		End: end, Direction: netpolicy.Directions[t.Opener&1], Protocol: flowProtocol(k.Proto), Peer: peer, PeerPort: port(k.PeerPort), Name: t.name,
		Guest: g.guestAddress(peer), GuestPort: port(k.GuestPort), Verdict: netpolicy.Allow, Reason: netpolicy.ReasonRule, Rule: t.rule, State: stateNames[t.State],
		Egress:  netpolicy.Count{Packets: t.Count[0].Packets, Bytes: t.Count[0].Bytes},
		Ingress: netpolicy.Count{Packets: t.Count[1].Packets, Bytes: t.Count[1].Bytes},
	}
	if t.Rule == noRule {
		i.Reason = netpolicy.ReasonDefault
	}
	i.ServerName = t.server
	if t.refused != 0 {
		i.Verdict, i.Reason = netpolicy.Reject, t.refused
	}
	return record{netpolicy.FlowRecord{Type: netpolicy.RecordFlow, First: t.begun, Last: t.begun.Add(time.Duration(t.Seen - t.First)), FlowInfo: i}, t.First}
}

func sortByFirst(recs []record) {
	slices.SortStableFunc(recs, func(a, b record) int {
		return cmp.Or(cmp.Compare(a.order, b.order), a.Peer.Compare(b.Peer), cmp.Compare(a.PeerPort, b.PeerPort), cmp.Compare(a.GuestPort, b.GuestPort))
	})
}

// deniedKey distinguishes denied flows.
type deniedKey struct {
	peer                netip.Addr
	peerPort, guestPort uint16
	proto               uint8
	dir                 netpolicy.Direction
	verdict             netpolicy.Verdict
	reason              netpolicy.Reason
	gen                 uint32
	rule                int
}

type deniedFlow struct {
	first, last uint64    // on the clock of the flow table
	begun       time.Time // when first was, by the host's clock
	name, rule  string
	count       netpolicy.Count
}

// A denied flow is written after deniedQuiet without a packet, or after deniedMost. Later packets start another record.
const (
	deniedQuiet = 10 * time.Second
	deniedMost  = time.Minute
)

// Denied adds an event of the Link to the log. An event without addresses is not a flow.
func (g *Log) Denied(e netpolicy.Event) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return
	}
	g.lost.Denied += uint64(e.Suppressed)
	if !e.Peer.IsValid() || e.Peer == netip.IPv6Unspecified() {
		return
	}
	k := deniedKey{e.Peer, e.PeerPort, e.GuestPort, e.Protocol, e.Direction, e.Verdict, e.Reason, e.Generation, e.Rule}
	at := uint64(e.Uptime)
	d := g.denied[k]
	if d == nil {
		if len(g.denied) >= MaxDeniedFlows {
			g.lost.Denied++
			return
		}
		d = &deniedFlow{first: at, last: at, begun: wall(at, g.now()), rule: g.table.History.RuleName(e.Generation, e.Rule)}
		if e.Direction == netpolicy.Egress {
			d.name = g.table.History.NameAt(e.Peer, at)
		}
		g.denied[k] = d
	}
	d.last = max(d.last, at)
	d.count.Packets++
	d.count.Bytes += uint64(e.Bytes)
}

// lookAtDenied writes and forgets denied flows that are over. The lock is held.
func (g *Log) lookAtDenied() {
	now := g.now()
	for k, d := range g.denied {
		if now < d.last+uint64(deniedQuiet) && now < d.first+uint64(deniedMost) {
			continue
		}
		g.write(g.deniedRecord(k, d, netpolicy.FlowDenied))
		delete(g.denied, k)
	}
}

func (g *Log) deniedRecord(k deniedKey, d *deniedFlow, end netpolicy.FlowEnd) record {
	i := &netpolicy.FlowInfo{
		End: end, Direction: k.dir, Protocol: flowProtocol(k.proto), Peer: k.peer, PeerPort: k.peerPort, Name: d.name,
		Guest: g.guestAddress(k.peer), GuestPort: k.guestPort, Verdict: k.verdict, Reason: k.reason, Rule: d.rule,
	}
	if k.dir == netpolicy.Ingress {
		i.Ingress = d.count
	} else {
		i.Egress = d.count
	}
	return record{netpolicy.FlowRecord{Type: netpolicy.RecordFlow, First: d.begun, Last: d.begun.Add(time.Duration(d.last - d.first)), FlowInfo: i}, d.first}
}
