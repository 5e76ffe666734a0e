package netpolicy

import (
	"cmp"
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

type flowKey = bpf.AgentFlowKey

// The states of flows are those in bpf/agent.c.
const (
	stateOpening = iota + 1
	stateEstablished
	stateClosing
	stateOneWay
	stateBothWays
	stateEcho
	stateAlias // no flow of its own
)

var stateNames = map[uint8]string{
	stateOpening: "opening", stateEstablished: "established", stateClosing: "closing", stateOneWay: "one-way",
	stateBothWays: "answered", stateEcho: "echo",
}

// flowLife is how long a flow lives after a packet, as in bpf/agent.c.
func flowLife(state uint8) time.Duration {
	switch state {
	case stateOpening:
		return 60 * time.Second
	case stateEstablished:
		return 4 * time.Hour
	case stateBothWays:
		return 180 * time.Second
	}
	return 30 * time.Second
}

// flowSlack is how long after its life a flow counts as ended. The programs' clock is behind by up
// to a tick, and a packet may be on its way through them.
const flowSlack = time.Second

// trackedFlow is a flow of the table as it was when it was last looked at.
type trackedFlow struct {
	bpf.AgentFlow
	begun time.Time // First
	name  string
	rule  string
	look  uint64
	done  bool // its record is written

	server  string // the server name of TLS, if it was checked
	refused Reason // why it was reset, if it was
}

// flowTracker has what was in the flow table at the last look, and so at most as much as that has room for.
type flowTracker struct {
	flows  map[flowKey]*trackedFlow
	reader flowReader
	begun  uint64 // when the log began
	looks  uint64
	known  uint64 // flows that were opened before the log began, or were seen
	told   uint64 // flows that were opened and not seen, as far as that was told of
	// As it was before the last look, at looked: flows ever opened, and when a packet has last passed.
	opened, active, looked uint64
	live                   int
}

// ending is how a flow has ended that is gone from the table, or is about to be forgotten.
func (t *trackedFlow) ending(otherwise FlowEnd) FlowEnd {
	switch {
	case t.Cut != 0:
		return FlowCut
	case t.State == stateClosing:
		return FlowClosed
	}
	return otherwise
}

// lookAtFlows compares the flow table with what it was. The lock is held.
func (g *FlowLog) lookAtFlows(anyway bool) error {
	f := &g.flows
	// First how many there are, so that one that is opened meanwhile is not missed.
	opened, active, err := g.eng.activity()
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
	see := func(k *flowKey, v *bpf.AgentFlow) {
		if v.State == stateAlias {
			return
		}
		t := f.flows[*k]
		if t != nil && t.look == f.looks && v.First < t.First {
			return // what the other map has is one that was opened later
		}
		if t != nil && !t.same(v) {
			if !t.done {
				end := t.ending(FlowReplaced)
				if end == FlowReplaced && v.First >= t.Seen+uint64(flowLife(t.State)) {
					end = FlowExpired
				}
				g.write(g.record(*k, t, end))
			}
			t = nil
		}
		fresh := t == nil
		if fresh {
			t = g.begin(k, v, now)
		} else if v.Gen != t.Gen || v.Rule != t.Rule {
			t.rule = g.eng.history.rule(v.Gen, int(v.Rule))
		}
		t.AgentFlow, t.look = *v, f.looks
		over := v.Cut != 0 || now >= v.Seen+uint64(flowLife(v.State)+flowSlack)
		switch {
		case t.done:
		case !over:
			live++
		case v.First < f.begun && v.Seen < f.begun-min(f.begun, uint64(flowLife(v.State))):
			t.done = true // it had ended before the log began
		default:
			t.done = true
			g.write(g.record(*k, t, t.ending(FlowExpired)))
		}
	}
	for _, m := range []*ebpf.Map{g.eng.flows, g.eng.lasting} {
		if err = f.reader.each(m, see); err != nil {
			return err
		}
	}
	for k, t := range f.flows {
		if t.look == f.looks {
			continue
		}
		// It may have been moved to a map that had been read already.
		if !t.done {
			if v, err := g.eng.flow(k); err == nil && t.same(v) {
				t.AgentFlow, t.look = *v, f.looks
				live++
				continue
			}
		}
		if !t.done {
			g.write(g.record(k, t, t.ending(FlowEvicted)))
		}
		delete(f.flows, k)
	}
	// Flows that were opened during the look are among those seen, so this may come late, and
	// never says too many.
	if gone := opened - min(opened, f.known); gone > f.told {
		g.lost.Flows += gone - f.told
		f.told = gone
	}
	f.opened, f.active, f.looked, f.live = opened, active, now, live
	return nil
}

// begin follows a flow that was not there before. The lock is held.
func (g *FlowLog) begin(k *flowKey, v *bpf.AgentFlow, now uint64) *trackedFlow {
	if v.First >= g.flows.begun {
		g.flows.known++
	}
	t := &trackedFlow{begun: wall(v.First, now), rule: g.eng.history.rule(v.Gen, int(v.Rule))}
	if v.Opener == 0 {
		t.name = g.eng.history.name(peerOf(k), v.First)
	}
	g.flows.flows[*k] = t
	return t
}

// wall is a moment of the flow table's clock, at which it is now, on the host's.
func wall(at, now uint64) time.Time { return time.Now().UTC().Add(time.Duration(at - now)) }

// same says whether what is in the table is the flow that was there before. Clocks have ticks, so
// one may be opened in the moment in which the one before it was.
func (t *trackedFlow) same(v *bpf.AgentFlow) bool {
	return v.First == t.First && v.Count[0].Packets >= t.Count[0].Packets && v.Count[1].Packets >= t.Count[1].Packets
}

func peerOf(k *flowKey) netip.Addr {
	var b [16]byte
	for i, w := range k.Peer {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	a := netip.AddrFrom16(b)
	if k.Six == 0 {
		a = a.Unmap()
	}
	return a
}

// port is a port as the programs store it, in the order of the network.
func port(p uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], p)
	return binary.BigEndian.Uint16(b[:])
}

// noRule is what the programs write where no rule decided.
const noRule = 0xffff

func (g *FlowLog) record(k flowKey, t *trackedFlow, end FlowEnd) FlowRecord {
	peer := peerOf(&k)
	i := &FlowInfo{
		End: end, Direction: directions[t.Opener&1], Protocol: flowProtocol(k.Proto), Peer: peer, PeerPort: port(k.PeerPort), Name: t.name,
		Guest: g.guestAddress(peer), GuestPort: port(k.GuestPort), Verdict: Allow, Reason: ReasonRule, Rule: t.rule, State: stateNames[t.State],
		Egress:  Count{t.Count[0].Packets, t.Count[0].Bytes},
		Ingress: Count{t.Count[1].Packets, t.Count[1].Bytes},
	}
	if t.Rule == noRule {
		i.Reason = ReasonDefault
	}
	i.ServerName = t.server
	if t.refused != 0 {
		i.Verdict, i.Reason = Reject, t.refused
	}
	return FlowRecord{Type: RecordFlow, First: t.begun, Last: t.begun.Add(time.Duration(t.Seen - t.First)), FlowInfo: i, at: t.First}
}

func sortByFirst(recs []FlowRecord) {
	slices.SortStableFunc(recs, func(a, b FlowRecord) int {
		return cmp.Or(cmp.Compare(a.at, b.at), a.Peer.Compare(b.Peer), cmp.Compare(a.PeerPort, b.PeerPort), cmp.Compare(a.GuestPort, b.GuestPort))
	})
}

// activity is how many flows were ever opened, and when a packet has last passed.
func (e *engine) activity() (opened, active uint64, err error) {
	for d := range uint32(2) {
		var u bpf.AgentUsage
		if err := e.shared.usages.LookupWithFlags(e.place.slot*2+d, &u, ebpf.LookupLock); err != nil {
			return 0, 0, fmt.Errorf("reading the use of the network: %w", err)
		}
		opened += u.Opened
		active = max(active, u.Active)
	}
	return opened, active, nil
}

// flowReader reads a flow table, some entries at a time: its buffers are used again.
type flowReader struct {
	keys   []flowKey
	values []bpf.AgentFlow
}

// Entries that are read at once. The kernel gives whole buckets of its hash table, as many as
// have room, and fails if one has not; a bucket has one entry on average.
const (
	flowBatch     = 512
	flowBatchMost = MaxFlows
)

// each calls fn for each flow. One that stays is given once; of those that come or go meanwhile
// some are.
func (r *flowReader) each(m *ebpf.Map, fn func(*flowKey, *bpf.AgentFlow)) error {
	if r.keys == nil {
		r.keys, r.values = make([]flowKey, flowBatch), make([]bpf.AgentFlow, flowBatch)
	}
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, r.keys, r.values, nil)
		if errors.Is(err, unix.ENOSPC) && len(r.keys) < flowBatchMost {
			r.keys, r.values = make([]flowKey, 2*len(r.keys)), make([]bpf.AgentFlow, 2*len(r.values))
			continue
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("reading the flow table: %w", err)
		}
		for i := range n {
			fn(&r.keys[i], &r.values[i])
		}
		if err != nil {
			return nil
		}
	}
}

// deniedKey is what tells one denied flow from another.
type deniedKey struct {
	peer                netip.Addr
	peerPort, guestPort uint16
	proto               uint8
	dir                 Direction
	verdict             Verdict
	reason              Reason
	gen                 uint32
	rule                int
}

type deniedFlow struct {
	first, last uint64    // on the clock of the flow table
	begun       time.Time // First
	name, rule  string
	count       Count
}

// deniedTracker has the flows that were denied of late.
type deniedTracker struct {
	flows map[deniedKey]*deniedFlow
}

// A denied flow is written when nothing more of it came for deniedQuiet, or after deniedMost;
// what comes then is another record.
const (
	deniedQuiet = 10 * time.Second
	deniedMost  = time.Minute
)

// Denied adds an event of the Link to the log. What has no addresses is no flow.
func (g *FlowLog) Denied(e Event) {
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
	d := g.denied.flows[k]
	if d == nil {
		if len(g.denied.flows) >= MaxDeniedFlows {
			g.lost.Denied++
			return
		}
		d = &deniedFlow{first: at, last: at, begun: wall(at, g.now()), rule: g.eng.history.rule(e.Generation, e.Rule)}
		if e.Direction == Egress {
			d.name = g.eng.history.name(e.Peer, at)
		}
		g.denied.flows[k] = d
	}
	d.last = max(d.last, at)
	d.count.Packets++
	d.count.Bytes += uint64(e.Bytes)
}

// lookAtDenied writes what was denied and is not any more. The lock is held.
func (g *FlowLog) lookAtDenied() {
	now := g.now()
	for k, d := range g.denied.flows {
		if now < d.last+uint64(deniedQuiet) && now < d.first+uint64(deniedMost) {
			continue
		}
		g.write(g.deniedRecord(k, d, FlowDenied))
		delete(g.denied.flows, k)
	}
}

func (g *FlowLog) deniedRecord(k deniedKey, d *deniedFlow, end FlowEnd) FlowRecord {
	i := &FlowInfo{
		End: end, Direction: k.dir, Protocol: flowProtocol(k.proto), Peer: k.peer, PeerPort: k.peerPort, Name: d.name,
		Guest: g.guestAddress(k.peer), GuestPort: k.guestPort, Verdict: k.verdict, Reason: k.reason, Rule: d.rule,
	}
	if k.dir == Ingress {
		i.Ingress = d.count
	} else {
		i.Egress = d.count
	}
	return FlowRecord{Type: RecordFlow, First: d.begun, Last: d.begun.Add(time.Duration(d.last - d.first)), FlowInfo: i, at: d.first}
}
