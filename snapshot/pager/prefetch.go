package pager

import (
	"context"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Prefetch loads the pages in the list, in its order, and the other pages of their frames. Present pages cost next
// to nothing. Prefetch ignores numbers out of range. It fails with the context's error, ErrClosed, or the error
// that ended the restore. It may be called before Start.
func (p *Pager) Prefetch(ctx context.Context, pages []uint64) error {
	return p.prefetchAll(ctx, pages, true, nil)
}

// prefetchAll is Prefetch, but of the frames it loads the pages that are in only, if that is not nil. claim is that of
// prefetch.
func (p *Pager) prefetchAll(ctx context.Context, pages []uint64, claim bool, only *guestmem.PageSet) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	w, err := p.getWorker()
	if err != nil {
		return p.fail(err)
	}
	defer p.putWorker(w)
	for _, page := range pages {
		if page >= p.snap.Pages() {
			continue
		}
		if err := p.usable(ctx); err != nil {
			return err
		}
		if err := p.prefetch(page, w, claim, only); err != nil {
			return p.fail(err)
		}
	}
	return nil
}

// usable returns an error if background work must stop.
func (p *Pager) usable(ctx context.Context) error {
	switch {
	case p.ctx.Err() != nil:
		return context.Cause(p.ctx)
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return p.Err()
}

// prefetch loads the frame of a page before any thread waits for it. It decompresses without the chunk's mutex, so
// that a fault in the same chunk waits only for the copying. With claim, a fault for the same frame waits for it as
// well. Without, the fault is not held up by a thread of low priority, and prefetch's work is wasted.
func (p *Pager) prefetch(page uint64, w *worker, claim bool, only *guestmem.PageSet) error {
	c := p.chunk(page / chunkPages)
	i := int(page % chunkPages)
	if !c.missing(i) {
		return nil
	}
	c.mu.Lock()
	leaf, err := p.leafOf(c, page/chunkPages)
	if err != nil || !c.missing(i) { // the last holder of the mutex may have loaded it
		c.mu.Unlock()
		return err
	}
	var raw []byte
	frame, stored := 0, false
	if leaf != nil {
		frame, _, stored = leaf.Page(i)
	}
	if claim = claim && stored && c.ahead == 0; claim {
		c.ahead = frame + 1
	}
	c.mu.Unlock()
	if stored {
		raw, err = p.readFrame(page, leaf.Frame(frame), w)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if claim {
		c.ahead = 0
		c.came.Broadcast()
	}
	if err != nil {
		return err
	}
	if p.Err() != nil || !c.missing(i) {
		return nil
	}
	p.stats.Prefetched.Add(1)
	if stored {
		return p.install(c, page-uint64(i), frame, raw, only, w)
	}
	return p.installZeros(c, page, w)
}

// lowNice is the nice value of threads whose work nobody waits for.
const lowNice = 10

// atLowPriority runs f on a thread of low priority.
func atLowPriority(f func() error) error {
	errs := make(chan error, 1)
	go func() {
		// The goroutine never unlocks the thread, so the thread and its priority end with it.
		runtime.LockOSThread()
		_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), lowNice)
		errs <- f()
	}()
	return <-errs
}

// Load loads all of RAM at low priority, and returns when it is done. From then on guest RAM does not need the
// snapshot, and Close leaves it usable. It fails like Prefetch.
func (p *Pager) Load(ctx context.Context) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return atLowPriority(func() error { return p.load(ctx) })
}

func (p *Pager) load(ctx context.Context) error {
	w, err := p.getWorker()
	if err != nil {
		return p.fail(err)
	}
	defer p.putWorker(w)
	for n := range uint64(p.snap.Chunks()) {
		if err := p.usable(ctx); err != nil {
			return err
		}
		if !p.isRegistered(n) {
			continue
		}
		leaf, err := p.snap.Leaf(int(n))
		if err != nil {
			return p.fail(err)
		}
		for i := range chunkPages {
			if leaf == nil {
				break
			}
			if _, _, stored := leaf.Page(i); !stored {
				continue
			}
			if err := p.usable(ctx); err != nil {
				return err
			}
			if err := p.prefetch(n*chunkPages+uint64(i), w, false, nil); err != nil {
				return p.fail(err)
			}
		}
	}
	if err := p.Err(); err != nil {
		return err
	}
	p.loaded.Store(true)
	return nil
}
