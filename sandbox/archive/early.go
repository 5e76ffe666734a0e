package archive

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/state"
)

const (
	// maxEarly is how many bytes of a head are read before anybody asks for them, and earlyWhole up to how many bytes of a
	// file that is all of it.
	maxEarly   = 8 << 20
	earlyWhole = frameSize
)

// early is a store of which parts are on their way. A wake asks for the beginnings and ends of files one after the
// other, where headers, tables and roots are: read at once, they take one round trip together.
type early struct {
	blob.Store
	mu    sync.Mutex // guards parts
	parts map[string][]*part
}

// part is a part of an object that somebody will ask for.
type part struct {
	off, size int64
	left      int64 // bytes that nobody has asked for
	done      chan struct{}
	body      []byte
	err       error
}

// readEarly begins to read what a wake asks for first. It leaves out the files whose numbers are in have: they are
// here. The indexes have been read.
func (a *Arrival) readEarly(have map[int]bool) {
	e := &early{Store: a.store, parts: map[string][]*part{}}
	total := int64(0)
	read := func(key string, off, size int64) {
		if total += size; total > maxEarly {
			return
		}
		p := &part{off: off, size: size, left: size, done: make(chan struct{})}
		e.parts[key] = append(e.parts[key], p)
		a.begin(func() {
			defer close(p.done)
			select {
			case a.line.early <- struct{}{}:
				defer func() { <-a.line.early }()
			case <-a.ctx.Done():
				p.err = context.Cause(a.ctx)
				return
			}
			ctx, cancel := context.WithTimeoutCause(a.ctx, readTime, errSlowStore)
			defer cancel()
			body := make([]byte, size)
			if p.err = e.Store.ReadAt(ctx, key, body, off); p.err == nil {
				p.body = body
			}
		})
	}
	for i := range a.head.m.Files {
		f, x := &a.head.m.Files[i], a.head.indexes[i]
		if x == nil || len(x.packs) == 0 || have[i] || f.Extra && f.Name == state.SystemFile { // most hosts have that one
			continue
		}
		key := a.head.m.file(i)
		if n := x.stored(); n <= earlyWhole && len(x.packs) == 1 {
			read(key+"/0", 0, n)
			continue
		}
		var first, last *frame
		for k := range x.frames {
			if x.frames[k].stored == 0 {
				continue
			}
			if last = &x.frames[k]; first == nil {
				first = last
			}
		}
		read(fmt.Sprintf("%s/%d", key, first.pack), int64(first.off), int64(first.stored))
		if last != first {
			read(fmt.Sprintf("%s/%d", key, last.pack), int64(last.off), int64(last.stored))
		}
	}
	a.store = e
}

// ReadAt implements blob.Store.
func (e *early) ReadAt(ctx context.Context, key string, b []byte, off int64) error {
	if p := e.find(key, int64(len(b)), off); p != nil {
		select {
		case <-p.done:
			if p.err == nil {
				copy(b, p.body[off-p.off:])
				e.use(key, p, int64(len(b)))
				return nil
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return e.Store.ReadAt(ctx, key, b, off)
}

func (e *early) find(key string, n, off int64) *part {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.parts[key] {
		if p.off <= off && off+n <= p.off+p.size {
			return p
		}
	}
	return nil
}

// use forgets a part that has been asked for.
func (e *early) use(key string, p *part, n int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p.left -= n; p.left <= 0 {
		e.parts[key] = slices.DeleteFunc(e.parts[key], func(have *part) bool { return have == p })
	}
}
