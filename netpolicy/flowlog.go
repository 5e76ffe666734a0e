package netpolicy

import (
	"cmp"
	"context"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of a flow log, whatever the guest does. Beside them it has as many entries as the
// flow table of the policy.
const (
	// MaxFlowRecords and MaxDeniedRecords are how many records of flows that have ended
	// are kept for those who ask later: of flows that were allowed, and the rest.
	MaxFlowRecords   = 4096
	MaxDeniedRecords = 1024
	// MaxDeniedFlows is how many denied flows are told apart at once. What more is denied is
	// counted as lost.
	MaxDeniedFlows = 512
)

// FlowEnd is why a record was written.
type FlowEnd string

// Ends of flows.
const (
	FlowOpen     FlowEnd = "open"     // it has not ended: the record is a look at it
	FlowClosed   FlowEnd = "closed"   // TCP: both sides have, or one has reset it, and nothing came for 30 s
	FlowExpired  FlowEnd = "expired"  // nothing came for as long as it lives
	FlowReplaced FlowEnd = "replaced" // it was opened anew with the same addresses and ports
	FlowCut      FlowEnd = "cut"      // a new policy does not allow it, or the other VM is gone
	FlowEvicted  FlowEnd = "evicted"  // the flow table was full
	FlowStopped  FlowEnd = "stopped"  // the log has ended
	FlowDenied   FlowEnd = "denied"   // it was denied, and nothing more of it came for a while
	FlowRefused  FlowEnd = "refused"  // the name in its TLS hello was not allowed, and it was reset
)

// Types of records.
const (
	RecordFlow = "flow"
	RecordLost = "lost"
)

// FlowRecord is one record of a flow log, and a line of JSON: either a flow, or how much
// there is no record of. Fields are only ever added.
type FlowRecord struct {
	// Type is RecordFlow or RecordLost.
	Type string `json:"type"`
	// First and Last are when the flow's first and last packet were, by the host's clock when
	// the first was noticed. Of what was lost: since the record of that kind before, until now.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	// One of them is there, as Type says.
	*FlowInfo
	*FlowsLost

	seq uint64 // records are in this order
	at  uint64 // First, on the clock of the flow table
}

// FlowInfo is a flow in a record.
type FlowInfo struct {
	End FlowEnd `json:"end"`
	// Direction is that of the packet that opened it, or was denied.
	Direction Direction `json:"direction"`
	// Protocol is tcp, udp, icmp, icmpv6 or a number.
	Protocol string `json:"protocol"`
	// Peer is the other side; PeerPort is 0 for ICMP, and where a packet was denied before
	// its ports were looked at.
	Peer     netip.Addr `json:"peer"`
	PeerPort uint16     `json:"peer_port"`
	// Name is what the guest has last asked its resolver for to find the peer, if it has
	// opened the flow and ever has asked.
	Name string `json:"name,omitempty"`
	// ServerName is what the guest has asked for in TLS, if that was checked and it was a name.
	ServerName string `json:"server_name,omitempty"`
	// Guest is the agent's own address. GuestPort is the identifier for ICMP echo.
	Guest     netip.Addr `json:"guest"`
	GuestPort uint16     `json:"guest_port"`
	Verdict   Verdict    `json:"verdict"`
	// Reason and Rule are of the packet that opened the flow or was denied. Where the policy was
	// replaced since, Rule is the rule of the new one by which the flow goes on. It is
	// empty if none decided.
	Reason Reason `json:"reason"`
	Rule   string `json:"rule,omitempty"`
	// State is opening, established, closing (TCP), one-way, answered (UDP) or echo; empty
	// for what was denied.
	State string `json:"state,omitempty"`
	// Egress and Ingress are packets after segmentation, and bytes of frames with all headers,
	// that passed. Of a flow that was replaced or evicted, what was there when it was last
	// looked at, up to some seconds before. Of what was denied, frames and their bytes.
	Egress  Count `json:"egress"`
	Ingress Count `json:"ingress"`
}

// FlowsLost says how much has no record, since the record of this kind before.
type FlowsLost struct {
	// Flows that were opened and were gone before they were looked at.
	Flows uint64 `json:"flows"`
	// Denied are frames: there were more than are told of, or more flows than are told apart.
	Denied uint64 `json:"denied"`
	// Records that whoever reads the log came too late for.
	Records uint64 `json:"records"`
}

// FlowLog is the log of an agent's flows, since it was made. What has happened is noticed by a
// look at the flow table about once a second, and by the events that the log is given. Its methods
// may be called from any goroutine.
type FlowLog struct {
	eng   *engine
	guest netip.Addr
	six   netip.Addr
	now   func() uint64 // of the flow table

	mu      sync.Mutex // guards what follows
	flows   flowTracker
	denied  deniedTracker
	lost    FlowsLost // not told of yet
	since   time.Time // of lost
	seq     uint64
	passed  recordRing
	others  recordRing
	more    chan struct{} // closed when there are more records
	ended   bool
	failure error // why, if the flow table could not be read
	readers int
	left    chan struct{} // closed when there are no readers
}

// FlowLog begins a log of the flows of an agent. Run keeps it, and Denied has to be called for
// each event of the Link. Flows that are open already belong to it, with what they have carried
// before. It fails if the use of the network cannot be read.
func (l *Link) FlowLog(id Identity) (*FlowLog, error) { return newFlowLog(l.eng, id, ktime, coarse()) }

// newFlowLog begins at a moment on the clock of the programs, now.
func newFlowLog(e *engine, id Identity, now func() uint64, begun uint64) (*FlowLog, error) {
	opened, _, err := e.activity()
	if err != nil {
		return nil, err
	}
	return &FlowLog{
		eng: e, guest: id.Address4, six: id.Address6, now: now, more: make(chan struct{}), since: time.Now().UTC(),
		flows:  flowTracker{flows: map[flowKey]*trackedFlow{}, begun: begun, known: opened},
		denied: deniedTracker{flows: map[deniedKey]*deniedFlow{}},
		passed: recordRing{most: MaxFlowRecords}, others: recordRing{most: MaxDeniedRecords},
	}, nil
}

// Times of a flow log: how often it looks; how long at most between two looks at a table with
// flows in it of which no packet has passed; and what part of the time a look may take.
const (
	flowTick  = time.Second
	flowRest  = 10 * time.Second
	flowShare = 50
)

// Run keeps the log until the context ends. Then all flows are written that are open, and
// nobody can add to the log any more. It returns an error if the flow table could not be read.
func (g *FlowLog) Run(ctx context.Context) error {
	tick := time.NewTicker(flowTick)
	defer tick.Stop()
	var next time.Time
	for {
		select {
		case <-ctx.Done():
			return g.end()
		case <-tick.C:
		}
		begin := time.Now()
		if begin.Before(next) {
			continue
		}
		if err := g.look(false); err != nil {
			g.fail(err)
			return err
		}
		next = begin.Add(flowShare * time.Since(begin))
	}
}

// look notices what has happened. It looks at the flow table only if it has to, or is told to.
func (g *FlowLog) look(anyway bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.lookLocked(anyway)
}

func (g *FlowLog) lookLocked(anyway bool) error {
	if g.ended {
		return nil
	}
	before := g.seq
	err := g.lookAtFlows(anyway)
	g.lookAtDenied()
	g.tellLost()
	if g.seq != before {
		close(g.more)
		g.more = make(chan struct{})
	}
	return err
}

// end writes what is open.
func (g *FlowLog) end() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	err := g.lookLocked(true)
	for _, r := range g.open() {
		switch {
		case r.Verdict != Allow:
			r.End = FlowDenied
		case r.State == stateNames[stateClosing]:
			r.End = FlowClosed
		default:
			r.End = FlowStopped
		}
		g.write(r)
	}
	g.close(err)
	return err
}

func (g *FlowLog) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.close(err)
}

// close lets nobody add to the log, and lets readers end. The lock is held.
func (g *FlowLog) close(err error) {
	if g.ended {
		return
	}
	g.ended, g.failure = true, err
	clear(g.flows.flows)
	clear(g.denied.flows)
	close(g.more)
}

// Drain waits until those who follow the log have all of it, after Run has returned, but
// no longer than most.
func (g *FlowLog) Drain(most time.Duration) {
	g.mu.Lock()
	if g.readers == 0 {
		g.mu.Unlock()
		return
	}
	if g.left == nil {
		g.left = make(chan struct{})
	}
	left := g.left
	g.mu.Unlock()
	select {
	case <-left:
	case <-time.After(most):
	}
}

// write adds a record. The lock is held, and readers are woken by whoever holds it.
func (g *FlowLog) write(r FlowRecord) {
	g.seq++
	r.seq = g.seq
	if r.Type == RecordFlow && r.Verdict == Allow {
		g.passed.add(r)
	} else {
		g.others.add(r)
	}
}

// tellLost writes what has no record, if there is anything.
func (g *FlowLog) tellLost() {
	if g.lost == (FlowsLost{}) {
		return
	}
	now := time.Now().UTC()
	lost := g.lost
	g.write(FlowRecord{Type: RecordLost, First: g.since, Last: now, FlowsLost: &lost})
	g.lost, g.since = FlowsLost{}, now
}

// recordRing keeps the last records.
type recordRing struct {
	most  int
	recs  []FlowRecord
	next  int    // where the oldest is, once it is full
	total uint64 // ever
}

func (r *recordRing) add(x FlowRecord) {
	r.total++
	if len(r.recs) < r.most {
		r.recs = append(r.recs, x)
		return
	}
	r.recs[r.next] = x
	r.next = (r.next + 1) % r.most
}

// after is at most n records after the first pos ones, and how many there are no more.
func (r *recordRing) after(pos uint64, n int) (out []FlowRecord, missed uint64) {
	oldest := r.total - uint64(len(r.recs))
	if pos < oldest {
		missed = oldest - pos
		pos = oldest
	}
	for ; pos < r.total && len(out) < n; pos++ {
		out = append(out, r.recs[(r.next+int(pos-oldest))%len(r.recs)])
	}
	return out, missed
}

// readBatch is how many records a reader gets at once.
const readBatch = 256

// Records calls fn with the records that are kept, the oldest first, some at a time. Then it
// goes on with those that come, if follow is set, until the context or the log ends; else with
// what is open at this moment. It returns what fn returns, if that is an error, the context's error
// if that has ended, and Run's.
func (g *FlowLog) Records(ctx context.Context, follow bool, fn func([]FlowRecord) error) error {
	g.mu.Lock()
	g.readers++
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.readers--; g.readers == 0 && g.left != nil {
			close(g.left)
			g.left = nil
		}
	}()
	if !follow {
		recs, err := g.all()
		if err != nil {
			return err
		}
		for len(recs) > 0 && ctx.Err() == nil {
			n := min(len(recs), readBatch)
			if err := fn(recs[:n]); err != nil {
				return err
			}
			recs = recs[n:]
		}
		return ctx.Err()
	}
	var at [2]uint64
	for ctx.Err() == nil {
		g.mu.Lock()
		recs := g.read(&at, readBatch)
		more, ended, failure := g.more, g.ended, g.failure
		g.mu.Unlock()
		switch {
		case len(recs) > 0:
			if err := fn(recs); err != nil {
				return err
			}
		case ended:
			return failure
		default:
			select {
			case <-ctx.Done():
			case <-more:
			}
		}
	}
	return ctx.Err()
}

// all is what is kept, and what is open.
func (g *FlowLog) all() ([]FlowRecord, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	err := g.lookLocked(true)
	if err = cmp.Or(err, g.failure); err != nil {
		return nil, err
	}
	var at [2]uint64
	return append(g.read(&at, MaxFlowRecords+MaxDeniedRecords), g.open()...), nil
}

// read is at most most of the records that come next for a reader who has had at. The lock is held.
func (g *FlowLog) read(at *[2]uint64, most int) (out []FlowRecord) {
	var lists [2][]FlowRecord
	var missed uint64
	for i, r := range []*recordRing{&g.passed, &g.others} {
		var n uint64
		lists[i], n = r.after(at[i], most)
		at[i] += n
		missed += n
	}
	if missed > 0 {
		now := time.Now().UTC()
		out = append(out, FlowRecord{Type: RecordLost, First: now, Last: now, FlowsLost: &FlowsLost{Records: missed}})
	}
	for n := 0; n < most && len(lists[0])+len(lists[1]) > 0; n++ {
		i := 0
		if len(lists[0]) == 0 || len(lists[1]) > 0 && lists[1][0].seq < lists[0][0].seq {
			i = 1
		}
		out = append(out, lists[i][0])
		lists[i] = lists[i][1:]
		at[i]++
	}
	return out
}

// open is what has not ended. The lock is held.
func (g *FlowLog) open() []FlowRecord {
	var out []FlowRecord
	for k, t := range g.flows.flows {
		if !t.done {
			out = append(out, g.record(k, t, FlowOpen))
		}
	}
	for k, d := range g.denied.flows {
		out = append(out, g.deniedRecord(k, d, FlowOpen))
	}
	sortByFirst(out)
	return out
}

func (g *FlowLog) guestAddress(peer netip.Addr) netip.Addr {
	if peer.Is6() {
		return g.six
	}
	return g.guest
}

func flowProtocol(p uint8) string {
	switch p {
	case unix.IPPROTO_TCP:
		return string(TCP)
	case unix.IPPROTO_UDP:
		return string(UDP)
	case unix.IPPROTO_ICMP:
		return string(ICMP)
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	}
	return strconv.Itoa(int(p))
}
