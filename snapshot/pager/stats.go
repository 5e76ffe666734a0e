package pager

import (
	"sync"
	"sync/atomic"
	"time"
)

// Stats count what a pager has done so far.
type Stats struct {
	// ReadFaults and WriteFaults count the faults for which vCPUs and system calls waited.
	ReadFaults, WriteFaults atomic.Uint64
	// Ensured counts the pages that Go code had to wait for.
	Ensured atomic.Uint64
	// Prefetched counts the frames, and runs of zeros, that Prefetch and Load have filled.
	Prefetched atomic.Uint64
	// PagesCopied counts the pages with content that were copied into RAM.
	PagesCopied atomic.Uint64
	// Evicted counts the pages that Evict has given back.
	Evicted atomic.Uint64
	// Frames counts the frames read and decompressed, and FramesCached those that Options.Cache had.
	Frames, FramesCached atomic.Uint64
}

// MiBTouched returns the amount of RAM filled with content from the snapshot.
func (s *Stats) MiBTouched() float64 { return float64(s.PagesCopied.Load()) * pageSize / (1 << 20) }

// Stats returns the counts. They keep changing.
func (p *Pager) Stats() *Stats { return &p.stats }

// record is the list of pages that threads or Go code waited for.
type record struct {
	mu    sync.Mutex
	pages []uint64 // never grows beyond its capacity
	first int      // how many of them were recorded before Ready
	ready bool
	exact bool // pages after Ready come alone as well
	until time.Time
}

func (r *record) init(o Options) {
	if o.RecordTime > 0 {
		r.pages = make([]uint64, 0, o.RecordPages)
	}
	r.exact = o.Hot == 0
	r.until = time.Now().Add(o.RecordTime)
}

// start begins the window. Pages that Ensure loaded before also count.
func (r *record) start(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.until = time.Now().Add(d)
}

// add records a page, and reports whether to fill it alone: with its frame there would be others, and it would not
// become known which of these the guest needs.
func (r *record) add(page uint64) (alone bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pages) == cap(r.pages) || !time.Now().Before(r.until) {
		return false
	}
	r.pages = append(r.pages, page)
	return !r.ready || r.exact
}

// Ready says that the guest has finished what it was woken for. Pages that it waited for until then come first in
// WorkingSet.
func (p *Pager) Ready() {
	p.record.mu.Lock()
	defer p.record.mu.Unlock()
	p.record.ready, p.record.first = true, len(p.record.pages)
}

// WorkingSet returns the pages to load ahead of faults next time, in the order in which they are needed: first
// those that the guest waited for before Ready, then the pages of Options.WorkingSet that are in range, then those
// that it waited for later within the recording window. It returns at most Options.RecordPages; Options.WorkingSet
// gets what the others leave. The first hot pages were needed before Ready, now or by Options.Hot. WorkingSet may be
// called at any time, even after Close.
func (p *Pager) WorkingSet() (pages []uint64, hot int) {
	p.record.mu.Lock()
	defer p.record.mu.Unlock()
	// The guest may wait for a page before its turn in the list comes.
	waited := make(map[uint64]bool, len(p.record.pages))
	for _, page := range p.record.pages {
		waited[page] = true
	}
	out := make([]uint64, 0, p.opts.RecordPages)
	out = append(out, p.record.pages[:p.record.first]...)
	hot = len(out)
	rest := p.record.pages[p.record.first:]
	for i, page := range p.opts.WorkingSet {
		if len(out)+len(rest) >= p.opts.RecordPages {
			break
		}
		if page < p.snap.Pages() && !waited[page] {
			if out = append(out, page); i < p.opts.Hot {
				hot = len(out)
			}
		}
	}
	return append(out, rest...), hot
}
