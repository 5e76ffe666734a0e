package pager

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
)

type counters struct {
	reads, writes, late atomic.Uint64
	ensured, prefetched atomic.Uint64
	copied, zeroed      atomic.Uint64
	frames, bytesRead   atomic.Uint64
	cached              atomic.Uint64
	latency             histogram
}

// Stats say what a pager has done so far.
type Stats struct {
	// ReadFaults and WriteFaults are what vCPUs and system calls waited for.
	ReadFaults, WriteFaults uint64
	// LateFaults are those of them whose page was there when their turn came.
	LateFaults uint64
	// Ensured is how many times Go code had to wait for a page.
	Ensured uint64
	// Prefetched is how many frames Prefetch and Load have filled.
	Prefetched uint64
	// PagesCopied and PagesZeroed is what was put in place.
	PagesCopied, PagesZeroed uint64
	// Frames were read and decompressed, from BytesRead bytes.
	Frames, BytesRead uint64
	// FramesCached are those that Options.Cache had.
	FramesCached uint64
	// Resolve is the time from taking a fault from the kernel, or from the call
	// of Ensure, until the page was there.
	Resolve Latency
}

// MiBTouched is the RAM that has been filled from the snapshot.
func (s Stats) MiBTouched() float64 { return float64(s.PagesCopied) * pageSize / (1 << 20) }

// Latency sums up times. Percentiles are upper bounds, right to within 12.5%.
type Latency struct {
	Count         uint64
	P50, P90, P99 time.Duration
	Max           time.Duration
}

// Stats returns the counters.
func (p *Pager) Stats() Stats {
	c := &p.count
	return Stats{
		ReadFaults: c.reads.Load(), WriteFaults: c.writes.Load(), LateFaults: c.late.Load(),
		Ensured: c.ensured.Load(), Prefetched: c.prefetched.Load(),
		PagesCopied: c.copied.Load(), PagesZeroed: c.zeroed.Load(),
		Frames: c.frames.Load(), BytesRead: c.bytesRead.Load(), FramesCached: c.cached.Load(),
		Resolve: c.latency.summary(),
	}
}

// histogram has eight buckets for each doubling of the time in nanoseconds.
type histogram struct {
	buckets [62 * 8]atomic.Uint64
	max     atomic.Int64
}

func bucketOf(ns uint64) int {
	if ns < 8 {
		return int(ns)
	}
	shift := bits.Len64(ns) - 4
	return (shift+1)*8 + int(ns>>shift&7)
}

// bucketEnd is the largest value in bucket i.
func bucketEnd(i int) uint64 {
	if i < 8 {
		return uint64(i)
	}
	shift := i/8 - 1
	return uint64(8+i%8+1)<<shift - 1
}

func (h *histogram) add(d time.Duration) {
	d = max(d, 0)
	h.buckets[bucketOf(uint64(d))].Add(1)
	for {
		m := h.max.Load()
		if int64(d) <= m || h.max.CompareAndSwap(m, int64(d)) {
			return
		}
	}
}

func (h *histogram) summary() Latency {
	var n [len(h.buckets)]uint64
	var l Latency
	for i := range n {
		n[i] = h.buckets[i].Load()
		l.Count += n[i]
	}
	l.Max = time.Duration(h.max.Load())
	at := func(percent uint64) time.Duration {
		want, sum := (l.Count*percent+99)/100, uint64(0)
		for i := range n {
			if sum += n[i]; n[i] > 0 && sum >= want {
				return min(time.Duration(bucketEnd(i)), l.Max)
			}
		}
		return 0
	}
	l.P50, l.P90, l.P99 = at(50), at(90), at(99)
	return l
}

// record is the list of pages that were waited for.
type record struct {
	mu    sync.Mutex
	pages []uint64 // never grows beyond its capacity
	first int      // how many of them were waited for before Ready
	until time.Time
}

func (r *record) init(o Options) {
	if o.RecordTime > 0 {
		r.pages = make([]uint64, 0, o.RecordPages)
	}
	r.until = time.Now().Add(o.RecordTime)
}

// start begins the window; what Ensure needed before is in it as well.
func (r *record) start(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.until = time.Now().Add(d)
}

func (r *record) add(page uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pages) < cap(r.pages) && time.Now().Before(r.until) {
		r.pages = append(r.pages, page)
	}
}

// Ready says that the guest has done what it was first wanted for. Pages that it waited for
// until then come first in WorkingSet.
func (p *Pager) Ready() {
	p.record.mu.Lock()
	defer p.record.mu.Unlock()
	p.record.first = len(p.record.pages)
}

// WorkingSet returns the pages to load ahead of faults next time, in the order
// in which they are needed: those that were waited for before Ready, then
// Options.WorkingSet as far as it was in range, then those that were waited for within
// the recording window; at most Options.RecordPages, of which Options.WorkingSet has what
// the others leave. There is one page for each
// frame that was needed. It may be called at any time, also after Close.
func (p *Pager) WorkingSet() []uint64 {
	p.record.mu.Lock()
	defer p.record.mu.Unlock()
	// A page may be waited for before its turn in the list has come.
	waited := make(map[uint64]bool, len(p.record.pages))
	for _, page := range p.record.pages {
		waited[page] = true
	}
	out := make([]uint64, 0, p.opts.RecordPages)
	out = append(out, p.record.pages[:p.record.first]...)
	rest := p.record.pages[p.record.first:]
	for _, page := range p.opts.WorkingSet {
		if len(out)+len(rest) >= p.opts.RecordPages {
			break
		}
		if page < p.snap.Pages() && !waited[page] {
			out = append(out, page)
		}
	}
	return append(out, rest...)
}
