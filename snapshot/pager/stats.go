package pager

import (
	"sync"
	"sync/atomic"
	"time"
)

// Stats count what a pager has done so far.
type Stats struct {
	// ReadFaults and WriteFaults are what vCPUs and system calls waited for.
	ReadFaults, WriteFaults atomic.Uint64
	// Ensured is how many times Go code had to wait for a page.
	Ensured atomic.Uint64
	// Prefetched is how many frames Prefetch and Load have filled.
	Prefetched atomic.Uint64
	// PagesCopied is how many pages with content were put in place.
	PagesCopied atomic.Uint64
	// Frames were read and decompressed, and FramesCached are those that Options.Cache had.
	Frames, FramesCached atomic.Uint64
}

// MiBTouched is the RAM that has been filled from the snapshot.
func (s *Stats) MiBTouched() float64 { return float64(s.PagesCopied.Load()) * pageSize / (1 << 20) }

// Stats are the counts, which go on.
func (p *Pager) Stats() *Stats { return &p.stats }

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
