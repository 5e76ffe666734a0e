package disk

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Create makes an empty disk of size bytes, a multiple of BlockSize: one open layer in the file path.
// It is durable when Create returns.
func Create(path string, size int64) (Stack, error) {
	return hostEnv().createDisk(path, Stack{}, header{size: size}, true)
}

// Fork makes a new open top in the file path over a stack whose uppermost layer is frozen or sealed. Any number of
// other disks may share that stack. size is the new disk's size in bytes: 0 means the size of the stack below, and
// less is refused. Fork copies and syncs nothing: the file is durable after the first Flush of the disk opened
// from it.
func Fork(path string, lower Stack, size int64) (Stack, error) {
	return hostEnv().fork(path, lower, size)
}

func (e env) createDisk(path string, lower Stack, h header, durable bool) (Stack, error) {
	h.id, h.state, h.boot = newID(), StateOpen, e.boot
	l, err := e.create(path, h, durable)
	if err != nil {
		return Stack{}, err
	}
	return lower.With(path), l.close()
}

func (e env) fork(path string, lower Stack, size int64) (Stack, error) {
	if len(lower.Layers) == 0 {
		return Stack{}, fmt.Errorf("fork: %w: the stack has no layer", ErrMissingParent)
	}
	if len(lower.Layers)+1 >= MaxLayers {
		return Stack{}, fmt.Errorf("fork: %w: %d", ErrTooManyLayers, len(lower.Layers))
	}
	p, err := e.openLayer(lower.Top(), os.O_RDONLY, osfile.Shared)
	if err != nil {
		return Stack{}, fmt.Errorf("fork: %w", err)
	}
	h := p.hdr
	if err := p.close(); err != nil {
		return Stack{}, err
	}
	if h.state != StateSealed && h.state != StateFrozen {
		return Stack{}, fmt.Errorf("fork: %w: %s is %v; seal it first", ErrInUse, lower.Top(), h.state)
	}
	size = cmp.Or(size, h.size)
	if size < h.size {
		return Stack{}, fmt.Errorf("fork: %w: %d bytes are less than the %d below", ErrSize, size, h.size)
	}
	return e.createDisk(path, lower, header{size: size, parent: h.id}, false)
}

func (e env) open(s Stack, o Options) (d *Disk, err error) {
	if len(s.Layers) > MaxLayers-1 {
		return nil, fmt.Errorf("open disk: %w: %d", ErrTooManyLayers, len(s.Layers))
	}
	if len(slices.Compact(slices.Sorted(slices.Values(s.Layers)))) != len(s.Layers) {
		return nil, fmt.Errorf("open disk: %w: a file is twice in the stack", ErrMissingParent)
	}
	if len(s.Layers) == 0 {
		return nil, fmt.Errorf("open disk: %w: the stack is empty", ErrMissingParent)
	}
	d = &Disk{env: e, readOnly: o.ReadOnly, gate: newGate()}
	var ls []*layer
	defer func() {
		if err != nil {
			for _, l := range ls {
				_ = l.close() // the first error is the one to report
			}
		}
	}()
	var missing error // the error of a missing layer; harmless if it was merged into the next one
	for i, path := range s.Layers {
		last := i == len(s.Layers)-1
		l, err := e.openInStack(path, last, o.ReadOnly)
		if errors.Is(err, fs.ErrNotExist) && !last {
			missing = err
			continue
		}
		if err != nil {
			return nil, err
		}
		if n := len(ls); n > 0 && ls[n-1].hdr.id == l.hdr.id {
			// The file below already has this layer's content; only the rename of the merge is missing.
			if err := l.close(); err != nil {
				return nil, err
			}
			continue
		}
		ls = append(ls, l)
		if o.Coming != nil && l.hdr.state == StateSealed {
			l.await = o.Coming(path)
		}
		if l.hdr.state == StateFrozen && !o.ReadOnly {
			d.unsealed = append(d.unsealed, l)
		}
	}
	if err := checkChain(ls); err != nil {
		return nil, errors.Join(err, missing)
	}
	d.size = ls[len(ls)-1].hdr.size
	d.index = newIndex(d.size / BlockSize)
	d.layers.Store(&ls)
	d.named(ls...)
	for i, l := range ls {
		if err := d.load(l, source(i+1)); err != nil {
			return nil, err
		}
	}
	if o.ReadOnly {
		return d, nil
	}
	d.spare = make([]run, 0, pendingRanges+1)
	d.dirty.Store(true) // it is not known what the last owner has synced
	return d, d.recover()
}

// openInStack opens one layer of a stack in the mode that its place and state require.
func (e env) openInStack(path string, top, readOnly bool) (*layer, error) {
	if top && !readOnly {
		l, err := e.openLayer(path, os.O_RDWR, osfile.Exclusive)
		if err != nil {
			return nil, err
		}
		if l.hdr.state != StateOpen {
			_ = l.close() // nothing was written
			return nil, fmt.Errorf("%s is %v: %w; fork a new top over it", path, l.hdr.state, ErrSealed)
		}
		l.fresh = true
		return l, nil
	}
	l, err := e.openLayer(path, os.O_RDONLY, osfile.Shared)
	if err != nil || readOnly || l.hdr.state == StateSealed || l.hdr.state == StateMerging {
		return l, err
	}
	// The process that was sealing this layer has died, or has not flushed yet. The first disk that flushes then
	// seals it.
	state := l.hdr.state
	if err := l.close(); err != nil {
		return nil, err
	}
	lock := osfile.Shared
	if state == StateOpen {
		lock = osfile.Exclusive
	}
	if l, err = e.openLayer(path, os.O_RDWR, lock); err != nil {
		return nil, err
	}
	l.fresh = true
	if l.hdr.state == StateOpen {
		err = l.freeze()
	}
	if err == nil {
		err = l.flock(osfile.Shared)
	}
	if err != nil {
		_ = l.close() // the first error is the one to report
		return nil, err
	}
	return l, nil
}

// checkChain returns an error unless each layer fits the one below it.
func checkChain(ls []*layer) error {
	for i, l := range ls {
		var want ID
		below := "nothing"
		if i > 0 {
			want, below = ls[i-1].hdr.id, ls[i-1].path
			if ls[i-1].hdr.size > l.hdr.size {
				return fmt.Errorf("%s: %w: smaller than %s below it", l.path, ErrCorrupt, below)
			}
		}
		if l.hdr.parent != want {
			return fmt.Errorf("%s: %w: it needs %v, and %s is %v", l.path, ErrMissingParent, l.hdr.parent, below, want)
		}
		if l.hdr.state == StateMerging && (i+1 == len(ls) || ls[i+1].hdr.id != l.hdr.merge) {
			return fmt.Errorf("%s: %w: layer %v into it, which does not lie above", l.path, ErrMerging, l.hdr.merge)
		}
	}
	return nil
}

// load adds a layer's runs to the index.
func (d *Disk) load(l *layer, s source) error {
	counts := d.env.pendingCounts(&l.hdr)
	return l.runs(func(r run) {
		switch settled(r.state, counts) {
		case blockData:
			d.index.set(r.start, r.count, s)
		case blockZero:
			d.index.set(r.start, r.count, 0)
		}
	})
}

// recover keeps or drops the top's pending blocks of its last owner, and marks the map as written by this boot.
func (d *Disk) recover() error {
	top, _ := d.top()
	counts := d.env.pendingCounts(&top.hdr)
	var werr error
	dropped := false
	err := top.mapRuns(func(r run) {
		if r.state != blockPendingAbsent && r.state != blockPendingZero {
			return
		}
		if counts {
			d.pending = append(d.pending, r)
		} else if werr == nil {
			dropped = true
			werr = top.writeMap(r.start, r.count, settled(r.state, false))
		}
	})
	if err = errors.Join(err, werr); err != nil {
		return err
	}
	if dropped {
		// Sync before the header says that pending blocks of this boot count.
		if err := top.f.Datasync(); err != nil {
			return ioError("sync "+top.path, fmt.Errorf("%w: %w", ErrSyncFailed, err))
		}
	}
	if !counts || top.hdr.boot != d.env.boot {
		h := top.hdr
		h.boot, h.flags = d.env.boot, h.flags&^flagSyncFailed
		if err := top.writeHeader(h); err != nil {
			return err
		}
	}
	if len(d.pending) >= pendingRanges {
		return d.flush()
	}
	return nil
}

// Verify checks a stack without writing to it: that every header, map and table has the right checksum and keeps
// the rules of the format, that no file is too short, and that the layers belong together. It does not read data.
// It fails with ErrInUse if the top is open for writing elsewhere.
func Verify(s Stack) error {
	d, err := hostEnv().open(s, Options{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("verify disk: %w", err)
	}
	return d.Close()
}

// Data returns how many bytes of the disk have data. It counts each block once, whichever layer has it, if it was
// written and since then neither discarded nor overwritten as a whole block of zeros. A write under way may count
// or not. Data reads the index in memory, 2 bytes a block at most.
func (d *Disk) Data() int64 {
	var blocks int64
	_ = d.index.each(func(s source, _, count int64) error {
		if s != 0 {
			blocks += count
		}
		return nil
	})
	return blocks * BlockSize
}
