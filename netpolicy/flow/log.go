package flow

import (
	"cmp"
	"context"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Bounds of a flow log, whatever the guest does. In addition it has as many entries as the flow tables of the policy.
const (
	// MaxRecords and MaxDeniedRecords are how many records of ended flows are kept for later readers: of allowed
	// flows, and all other records.
	MaxRecords       = 4096
	MaxDeniedRecords = 1024
	// MaxDeniedFlows is how many denied flows are told apart at once. Further ones count as lost.
	MaxDeniedFlows = 512
)

// Log is the log of an endpoint's flows since NewLog. It notices changes by a look at the flow table about once a
// second, and by the events that Denied gets. Its methods are safe for concurrent use.
type Log struct {
	table *Table
	guest netip.Addr
	six   netip.Addr
	now   func() uint64 // the flow table's clock

	mu      sync.Mutex // guards what follows
	flows   tracker
	denied  map[deniedKey]*deniedFlow // not yet written
	lost    netpolicy.FlowsLost       // not yet written
	since   time.Time                 // of lost
	seq     uint64
	passed  recordRing
	others  recordRing
	more    chan struct{} // closed when there are more records
	ended   bool
	failure error // set if the flow table could not be read
	readers int
	left    chan struct{} // closed when there are no readers
}

// NewLog begins a log of the flows of an endpoint at a time of the flow table's clock. Run maintains it, and the
// caller must call Denied for each event of the endpoint. The log includes flows that are already open, with what
// they have carried before. NewLog fails if it cannot read the usage of the network.
func NewLog(t *Table, id netpolicy.Identity, clock func() uint64, begun uint64) (*Log, error) {
	opened, _, err := t.activity()
	if err != nil {
		return nil, err
	}
	return &Log{
		table: t, guest: id.Address4, six: id.Address6, now: clock, more: make(chan struct{}), since: time.Now().UTC(),
		flows:  tracker{flows: map[key]*trackedFlow{}, begun: begun, known: opened},
		denied: map[deniedKey]*deniedFlow{},
		passed: recordRing{most: MaxRecords}, others: recordRing{most: MaxDeniedRecords},
	}, nil
}

// Times of a flow log: the pause between looks; the longest time between two looks at a table with flows but
// without packets; and the share of the time that a look may take, one in flowShare.
const (
	flowTick  = time.Second
	flowRest  = 10 * time.Second
	flowShare = 50
)

// Run maintains the log until the context ends. Then it writes all open flows, and the log takes no more records.
// It returns an error if it cannot read the flow table.
func (g *Log) Run(ctx context.Context) error {
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

// Look updates the log now, as Run does about once a second.
func (g *Log) Look() error { return g.look(true) }

// Size returns how many flows, denied flows and records the log has.
func (g *Log) Size() (flows, denied, records int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.flows.flows), len(g.denied), len(g.passed.recs) + len(g.others.recs)
}

// look updates the log. It reads the flow table only if it must, or always if anyway is set.
func (g *Log) look(anyway bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.lookLocked(anyway)
}

func (g *Log) lookLocked(anyway bool) error {
	if g.ended {
		return nil
	}
	before := g.seq
	err := g.lookAtFlows(anyway)
	g.lookAtDenied()
	g.writeLost()
	if g.seq != before {
		close(g.more)
		g.more = make(chan struct{})
	}
	return err
}

// end writes the open flows and closes the log.
func (g *Log) end() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	err := g.lookLocked(true)
	for _, r := range g.open() {
		switch {
		case r.Verdict != netpolicy.Allow:
			r.End = netpolicy.FlowDenied
		case r.State == stateNames[stateClosing]:
			r.End = netpolicy.FlowClosed
		default:
			r.End = netpolicy.FlowStopped
		}
		g.write(r)
	}
	g.close(err)
	return err
}

func (g *Log) fail(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.close(err)
}

// close stops further records, and lets readers end. The lock is held.
func (g *Log) close(err error) {
	if g.ended {
		return
	}
	g.ended, g.failure = true, err
	clear(g.flows.flows)
	clear(g.denied)
	close(g.more)
}

// Drain waits until all followers of the log have read all of it, after Run has returned, but no longer than most.
func (g *Log) Drain(most time.Duration) {
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

// write adds a record. The lock is held, and its holder must wake the readers.
func (g *Log) write(r record) {
	g.seq++
	r.order = g.seq
	if r.Type == netpolicy.RecordFlow && r.Verdict == netpolicy.Allow {
		g.passed.add(r)
	} else {
		g.others.add(r)
	}
}

// writeLost writes the count of what has no record, if there is any.
func (g *Log) writeLost() {
	if g.lost == (netpolicy.FlowsLost{}) {
		return
	}
	now := time.Now().UTC()
	lost := g.lost
	g.write(record{FlowRecord: netpolicy.FlowRecord{Type: netpolicy.RecordLost, First: g.since, Last: now, FlowsLost: &lost}})
	g.lost, g.since = netpolicy.FlowsLost{}, now
}

// record is a record with its order: the time the flow was opened while it is open, the sequence of writing afterwards.
type record struct {
	netpolicy.FlowRecord
	order uint64
}

// recordRing keeps the most recent records.
type recordRing struct {
	most  int
	recs  []record
	next  int    // index of the oldest, once the ring is full
	total uint64 // records ever added
}

func (r *recordRing) add(x record) {
	r.total++
	if len(r.recs) < r.most {
		r.recs = append(r.recs, x)
		return
	}
	r.recs[r.next] = x
	r.next = (r.next + 1) % r.most
}

// after returns at most n records after the first pos ones, and how many of them are already overwritten.
func (r *recordRing) after(pos uint64, n int) (out []record, missed uint64) {
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

// Records calls fn with the kept records, the oldest first, in batches. Then, if follow is set, it continues with
// new records until the context or the log ends; otherwise it adds the flows that are open at this moment. It
// returns the first error of fn, the context's error if the context has ended, or Run's error.
func (g *Log) Records(ctx context.Context, follow bool, fn func([]netpolicy.FlowRecord) error) error {
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

// all returns the kept records, and the open flows.
func (g *Log) all() ([]netpolicy.FlowRecord, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	err := g.lookLocked(true)
	if err = cmp.Or(err, g.failure); err != nil {
		return nil, err
	}
	var at [2]uint64
	out := g.read(&at, MaxRecords+MaxDeniedRecords)
	for _, r := range g.open() {
		out = append(out, r.FlowRecord)
	}
	return out, nil
}

// read returns up to most records for a reader at position at, which it advances. The lock is held.
func (g *Log) read(at *[2]uint64, most int) (out []netpolicy.FlowRecord) {
	var lists [2][]record
	var missed uint64
	for i, r := range []*recordRing{&g.passed, &g.others} {
		var n uint64
		lists[i], n = r.after(at[i], most)
		at[i] += n
		missed += n
	}
	if missed > 0 {
		now := time.Now().UTC()
		out = append(out, netpolicy.FlowRecord{Type: netpolicy.RecordLost, First: now, Last: now, FlowsLost: &netpolicy.FlowsLost{Records: missed}})
	}
	for n := 0; n < most && len(lists[0])+len(lists[1]) > 0; n++ {
		i := 0
		if len(lists[0]) == 0 || len(lists[1]) > 0 && lists[1][0].order < lists[0][0].order {
			i = 1
		}
		out = append(out, lists[i][0].FlowRecord)
		lists[i] = lists[i][1:]
		at[i]++
	}
	return out
}

// open returns the flows that have not ended. The lock is held.
func (g *Log) open() []record {
	var out []record
	for k, t := range g.flows.flows {
		if !t.done {
			out = append(out, g.record(k, t, netpolicy.FlowOpen))
		}
	}
	for k, d := range g.denied {
		out = append(out, g.deniedRecord(k, d, netpolicy.FlowOpen))
	}
	sortByFirst(out)
	return out
}

func (g *Log) guestAddress(peer netip.Addr) netip.Addr {
	if peer.Is6() {
		return g.six
	}
	return g.guest
}

func flowProtocol(p uint8) string {
	switch p {
	case unix.IPPROTO_TCP:
		return string(netpolicy.TCP)
	case unix.IPPROTO_UDP:
		return string(netpolicy.UDP)
	case unix.IPPROTO_ICMP:
		return string(netpolicy.ICMP)
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	}
	return strconv.Itoa(int(p))
}
