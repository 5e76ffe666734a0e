package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

const (
	// pendingRanges is how many ranges of unflushed, newly allocated blocks a disk remembers before a
	// write flushes of its own accord, as a full write cache would.
	pendingRanges = 8192
	stripeCount   = 64
)

// Stack names the layers of a disk, bottom first. It is all that a snapshot has to remember of a disk.
type Stack struct {
	Layers []string `json:"layers,omitempty"`
}

// Top is the path of the uppermost layer; empty if there is none.
func (s Stack) Top() string {
	if len(s.Layers) == 0 {
		return ""
	}
	return s.Layers[len(s.Layers)-1]
}

// With is the stack with one more layer on top. The receiver is not changed.
func (s Stack) With(top string) Stack {
	return Stack{Layers: append(append([]string(nil), s.Layers...), top)}
}

// LayerInfo describes one layer.
type LayerInfo struct {
	ID     ID
	Parent ID
	Merged ID // what it was made of by squashing, or what an older version has merged into it, or was merging
	Path   string
	State  string // "open", "frozen", "sealed" or "merging"
	Size   int64  // of the disk, bytes
}

// Options change how a stack is opened. The zero value is right for a VM's disk.
type Options struct {
	// ReadOnly opens every layer for reading only; the top may be sealed.
	ReadOnly bool
}

// Disk is an open stack. It is safe for concurrent use; reads and writes of different blocks do not
// wait for each other, and neither allocates, but for 8 KiB the first time that a 16 MiB region gets
// mixed sources.
//
// A write has three steps, because the bytes go from guest memory to the file without passing here:
//
//	f, fileOff, length, err := d.WriteExtent(off, n) // where to write the first length bytes
//	_, err = pwritev(f, guest memory, fileOff)       // exactly length bytes
//	err = d.Wrote(off, length, err)                  // now they belong to the disk
//
// Until Wrote, newly allocated blocks keep their old content, so a process killed in between has
// written nothing. Every WriteExtent that succeeds must be followed by exactly one Wrote, and a
// goroutine must have called it before it calls any other method but ReadExtent: sealing, and the
// copying up of a partly written block, wait until no write is under way.
//
// The files handed out stay valid until Close. Stop I/O before Close.
type Disk struct {
	env      env
	size     int64
	readOnly bool
	layers   atomic.Pointer[[]*layer]    // bottom first; source n is element n-1; only ever appended to
	names    atomic.Pointer[[]layerName] // what Stack names, bottom first; changed under mu
	index    *index
	stripes  [stripeCount]sync.Mutex // each guards map and index of the chunks of its number
	gate     gate                    // inside: writes under way. alone: Seal, copying up, Close
	dirty    atomic.Bool             // something was written since the last flush began
	closed   atomic.Bool

	flushMu sync.Mutex // one flush at a time; before mu

	mu       sync.Mutex // guards what follows
	pending  []run      // pending blocks of the top that no flush has taken yet
	spare    []run      // the other buffer of that list
	unsealed []*layer   // frozen, not yet durable; oldest first
	failed   error      // why no flush can be promised any more
	prepared *layer     // of Prepare, for the next Seal
}

// Open opens a stack for writing to its top layer, or for reading.
//
// The top must be open, neither sealed (ErrSealed: Fork over it) nor in use by another disk
// (ErrInUse). If a process was killed while it had the top open, what it wrote is kept; if the host
// went down since, what was not flushed is dropped block by block. Opening reads every layer's header
// and table, so its time grows with the number of layers and of their runs, not with data.
func Open(s Stack, o Options) (*Disk, error) { return hostEnv().open(s, o) }

// all is the layers as of now, bottom first.
func (d *Disk) all() []*layer {
	if p := d.layers.Load(); p != nil {
		return *p
	}
	return nil
}

// top is the writable layer, and its source. Stable while the caller is inside the gate.
func (d *Disk) top() (*layer, source) {
	ls := d.all()
	return ls[len(ls)-1], source(len(ls))
}

// Size is the disk's size in bytes, a multiple of BlockSize.
func (d *Disk) Size() int64 { return d.size }

// ReadOnly says whether writes are refused.
func (d *Disk) ReadOnly() bool { return d.readOnly }

// Stack names the files that make up the disk now.
func (d *Disk) Stack() Stack {
	var s Stack
	if names := d.names.Load(); names != nil {
		for _, n := range *names {
			s.Layers = append(s.Layers, n.path)
		}
	}
	return s
}

// layerName is what Stack and Substitute know of a layer.
type layerName struct {
	path       string
	id, parent ID
}

// named adds layers to those that Stack names. Alone, or under mu.
func (d *Disk) named(ls ...*layer) {
	var names []layerName
	if p := d.names.Load(); p != nil {
		names = slices.Clone(*p)
	}
	for _, l := range ls {
		names = append(names, layerName{l.path, l.hdr.id, l.hdr.parent})
	}
	d.names.Store(&names)
}

func (d *Disk) check(off, n int64) error {
	if off < 0 || n <= 0 || off > d.size-n { // n <= 0 is excluded, so the subtraction cannot overflow upwards
		return fmt.Errorf("%w: %d bytes at %d of %d", ErrRange, n, off, d.size)
	}
	return nil
}

// ReadExtent resolves where the first bytes of [off, off+n) live: length of them, 0 < length <= n,
// at fileOff in f. A nil f means that they are zeros. The range need not be aligned.
func (d *Disk) ReadExtent(off, n int64) (f *os.File, fileOff, length int64, err error) {
	l, fileOff, length, err := d.resolve(off, n)
	if l == nil {
		return nil, 0, length, err
	}
	return l.os, fileOff, length, err
}

// resolve is ReadExtent, with the layer for the file.
func (d *Disk) resolve(off, n int64) (l *layer, fileOff, length int64, err error) {
	if err := d.check(off, n); err != nil {
		return nil, 0, 0, err
	}
	if d.closed.Load() {
		return nil, 0, 0, ErrClosed
	}
	first := off / BlockSize
	s := d.index.get(first)
	blocks := d.index.runLen(first, (off+n+BlockSize-1)/BlockSize, s)
	// A write by another goroutine may have changed the first block since get: it then counts as read
	// before that write.
	length = min(n, (first+max(blocks, 1))*BlockSize-off)
	if s == 0 {
		return nil, 0, length, nil
	}
	l = d.all()[s-1]
	return l, l.data + off, length, nil
}

// WriteExtent resolves where the first bytes of [off, off+n) are to be written: length of them,
// 0 < length <= n, at fileOff in f. See Disk for what must follow.
//
// A block that is written only in part, and that lies in a lower layer, is first copied up; this
// waits until no write is under way. Aligned writes never wait for each other.
func (d *Disk) WriteExtent(off, n int64) (f *os.File, fileOff, length int64, err error) {
	if d.readOnly {
		return nil, 0, 0, ErrReadOnly
	}
	if err := d.check(off, n); err != nil {
		return nil, 0, 0, err
	}
	if err := d.gate.enter(); err != nil {
		return nil, 0, 0, err
	}
	end := off + n
	first := off / BlockSize
	top, src := d.top()
	if off%BlockSize != 0 || end < (first+1)*BlockSize { // the first block is written in part
		if d.index.get(first) != src {
			if err := d.gate.leave(); err != nil {
				return nil, 0, 0, err
			}
			if err := d.copyUp(first); err != nil { // inside again, unless it failed
				return nil, 0, 0, err
			}
			top, src = d.top()
		}
	}
	if last := end / BlockSize; end%BlockSize != 0 && last != first && d.index.get(last) != src {
		end = last * BlockSize // the last block is written in part: leave it to the next call
	}
	return top.os, top.data + off, end - off, nil
}

// Wrote ends the write that WriteExtent began for [off, off+n): the bytes are in the file, if err is
// nil, and become part of the disk. If err says why they could not be written, newly allocated blocks
// keep their old content, and the same error is returned, typed (ErrNoSpace, ErrIO). Any other error
// means that the write did not take effect in full, and the guest must be told so.
func (d *Disk) Wrote(off, n int64, err error) error {
	if d.readOnly {
		return ErrReadOnly
	}
	if rerr := d.check(off, n); rerr != nil {
		return errors.Join(rerr, d.gate.leave())
	}
	full := false
	if err != nil {
		err = ioError("write disk", err)
	} else {
		full, err = d.commit(off/BlockSize, (off+n+BlockSize-1)/BlockSize)
	}
	d.dirty.Store(true)
	if lerr := d.gate.leave(); lerr != nil {
		return lerr
	}
	if full && err == nil {
		err = d.Flush()
	}
	return err
}

// commit makes the blocks [b, end), whose data is in the top's file, part of the disk. It answers
// whether the list of pending blocks is full. Precondition: the caller is inside the gate.
func (d *Disk) commit(b, end int64) (full bool, err error) {
	top, src := d.top()
	for b < end {
		stop := min(end, (b/chunkBlocks+1)*chunkBlocks)
		if d.index.runLen(b, stop, src) < stop-b {
			f, err := d.commitChunk(top, src, b, stop)
			full = full || f
			if err != nil {
				return full, err
			}
		}
		b = stop
	}
	return full, nil
}

func (d *Disk) stripe(b int64) *sync.Mutex { return &d.stripes[b/chunkBlocks%stripeCount] }

func (d *Disk) commitChunk(top *layer, src source, b, stop int64) (full bool, err error) {
	m := d.stripe(b)
	m.Lock()
	defer m.Unlock()
	for b < stop {
		s := d.index.get(b)
		n := d.index.runLen(b, stop, s)
		if s != src {
			state, old := byte(blockPendingAbsent), byte(blockAbsent)
			if s == 0 {
				state, old = blockPendingZero, blockZero
			}
			if err := top.writeMap(b, n, state); err != nil {
				_ = top.writeMap(b, n, old) // a part may have been written; best effort
				return full, err
			}
			full = d.addPending(b, n) || full
			d.index.set(b, n, src)
		}
		b += n
	}
	return full, nil
}

func (d *Disk) addPending(b, n int64) (full bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := len(d.pending) - 1; i >= 0 && d.pending[i].start+d.pending[i].count == b {
		d.pending[i].count += n
	} else {
		d.pending = append(d.pending, run{start: b, count: n})
	}
	return len(d.pending) >= pendingRanges
}

// copyUp gives the top its own copy of a block that is about to be written in part. On success the
// caller is inside the gate.
func (d *Disk) copyUp(b int64) error {
	if err := d.gate.enterAlone(context.Background()); err != nil {
		return err
	}
	done := false
	defer func() { d.gate.leaveAlone(done) }()
	top, src := d.top()
	if d.index.get(b) == src { // somebody was faster
		done = true
		return nil
	}
	var buf [BlockSize]byte
	off := b * BlockSize
	l, fileOff, _, err := d.resolve(off, BlockSize)
	if err != nil {
		return err
	}
	if l != nil {
		if _, err := l.f.ReadAt(buf[:], fileOff); err != nil {
			return ioError("copy a block up from "+l.path, err)
		}
	}
	if _, err := top.f.WriteAt(buf[:], top.data+off); err != nil {
		return ioError("copy a block up to "+top.path, err)
	}
	d.dirty.Store(true)
	_, err = d.commit(b, b+1)
	done = err == nil
	return err
}

// Discard tells that the guest no longer needs [off, off+n). Whole blocks within become zeros and
// give their space in the top back; parts of blocks at the ends keep their content.
func (d *Disk) Discard(off, n int64) error {
	return d.inside(off, n, func() error {
		first, end := (off+BlockSize-1)/BlockSize, (off+n)/BlockSize
		return d.zeroBlocks(first, end)
	})
}

// WriteZeroes makes [off, off+n) read as zeros. If mayUnmap is false the range gets, or keeps, space
// in the top, so that later writes to it cannot run out of it; whole blocks are then left as
// preallocated space where the host's file system has that.
func (d *Disk) WriteZeroes(off, n int64, mayUnmap bool) error {
	if d.readOnly {
		return ErrReadOnly
	}
	if err := d.check(off, n); err != nil {
		return err
	}
	for n > 0 {
		blocks := (off+n)/BlockSize - (off+BlockSize-1)/BlockSize
		var step int64
		var err error
		switch {
		case off%BlockSize == 0 && blocks > 0 && mayUnmap:
			step, err = blocks*BlockSize, d.Discard(off, blocks*BlockSize)
		case off%BlockSize == 0 && blocks > 0:
			step, err = blocks*BlockSize, d.zeroAllocated(off, blocks*BlockSize)
		default:
			step = min(n, BlockSize-off%BlockSize)
			_, err = d.WriteAt(statePage[0][:step], off)
		}
		if err != nil {
			return err
		}
		off, n = off+step, n-step
	}
	return nil
}

// inside checks a range and runs f among the writers.
func (d *Disk) inside(off, n int64, f func() error) error {
	if d.readOnly {
		return ErrReadOnly
	}
	if err := d.check(off, n); err != nil {
		return err
	}
	if err := d.gate.enter(); err != nil {
		return err
	}
	err := f()
	return errors.Join(err, d.gate.leave())
}

// zeroBlocks masks and frees blocks. Precondition: the caller is inside the gate.
func (d *Disk) zeroBlocks(b, end int64) error {
	top, src := d.top()
	for b < end {
		stop := min(end, (b/chunkBlocks+1)*chunkBlocks)
		if d.index.runLen(b, stop, 0) == stop-b { // nothing but zeros already
			b = stop
			continue
		}
		if err := d.zeroChunk(top, src, b, stop); err != nil {
			return err
		}
		b = stop
	}
	return nil
}

func (d *Disk) zeroChunk(top *layer, src source, b, stop int64) error {
	m := d.stripe(b)
	m.Lock()
	defer m.Unlock()
	for b < stop {
		s := d.index.get(b)
		n := d.index.runLen(b, stop, s)
		if s == 0 {
			b += n
			continue
		}
		d.dirty.Store(true)
		// The hole comes first: were the map first, a failing punch would leave old data under a
		// block that says zero, for a later power loss to bring back.
		if s == src {
			if err := top.f.Fallocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, top.data+b*BlockSize, n*BlockSize); err != nil {
				return ioError("free space in "+top.path, err)
			}
		}
		if err := top.writeMap(b, n, blockZero); err != nil {
			return err
		}
		d.index.set(b, n, 0)
		b += n
	}
	return nil
}

// zeroAllocated writes zeros over whole blocks without giving up their space.
func (d *Disk) zeroAllocated(off, n int64) error {
	for n > 0 {
		_, fileOff, length, err := d.WriteExtent(off, n)
		if err != nil {
			return err
		}
		top, _ := d.top()
		werr := top.f.Fallocate(unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, fileOff, length)
		if errors.Is(werr, unix.EOPNOTSUPP) {
			werr = nil
			for done := int64(0); done < length && werr == nil; done += BlockSize {
				_, werr = top.f.WriteAt(statePage[0][:], fileOff+done)
			}
		}
		if err := d.Wrote(off, length, werr); err != nil {
			return err
		}
		off, n = off+length, n-length
	}
	return nil
}

// Flush makes everything durable whose Wrote, Discard or WriteZeroes returned before Flush was
// called, in the top and in layers sealed since the last flush. If nothing was written it costs no
// system call. An error that is ErrSyncFailed is final for this Disk; after any other, retry.
func (d *Disk) Flush() error {
	if d.readOnly {
		return nil
	}
	d.flushMu.Lock()
	defer d.flushMu.Unlock()
	return d.flush()
}

// flush is Flush. Precondition: d.flushMu is held.
func (d *Disk) flush() (err error) {
	if d.closed.Load() {
		return ErrClosed
	}
	d.mu.Lock()
	if d.failed != nil {
		defer d.mu.Unlock()
		return d.failed
	}
	if !d.dirty.Swap(false) {
		d.mu.Unlock()
		return nil
	}
	top, src := d.top()
	unsealed := d.unsealed
	taken := d.pending
	d.pending, d.spare = d.spare[:0], nil
	d.mu.Unlock()

	kept := taken // what is still pending at the end
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if err != nil {
			d.dirty.Store(true)
			if errors.Is(err, ErrSyncFailed) {
				if errors.Is(err, ErrNoSpace) {
					// What a sync has lost does not come back with space on the host.
					err = fmt.Errorf("%w: %w: %v", ErrSyncFailed, ErrIO, err)
				}
				if d.failed == nil {
					d.failed = err
				}
			}
			if now, _ := d.top(); now == top {
				d.pending = append(kept, d.pending...)
			}
			d.spare = make([]run, 0, pendingRanges+1)
			return
		}
		d.spare = taken[:0]
	}()
	for _, l := range unsealed {
		if err := d.env.seal(l); err != nil {
			return err
		}
		d.mu.Lock()
		d.unsealed = d.unsealed[1:]
		d.mu.Unlock()
	}
	if err := d.syncTop(top); err != nil {
		return err
	}
	for i, r := range taken {
		if err := d.settle(top, src, r); err != nil {
			kept = taken[i:]
			return err
		}
	}
	kept = nil
	if len(taken) > 0 {
		return d.syncTop(top)
	}
	return nil
}

// syncTop makes the file durable, and the first time its name.
func (d *Disk) syncTop(l *layer) error {
	sync := l.f.Datasync
	if l.fresh {
		sync = l.f.Sync
	}
	if err := sync(); err != nil {
		d.mu.Lock() // Seal may be about to write this layer's header as well
		l.taint()
		d.mu.Unlock()
		return ioError("sync "+l.path, fmt.Errorf("%w: %w", ErrSyncFailed, err))
	}
	if l.fresh {
		if err := d.env.fs.SyncDir(filepath.Dir(l.path)); err != nil {
			return ioError("sync directory of "+l.path, err)
		}
		l.fresh = false
	}
	return nil
}

// settle marks pending blocks, whose data is durable now, as data.
func (d *Disk) settle(top *layer, src source, r run) error {
	for b, end := r.start, r.start+r.count; b < end; {
		stop := min(end, (b/chunkBlocks+1)*chunkBlocks)
		if err := d.settleChunk(top, src, b, stop); err != nil {
			return err
		}
		b = stop
	}
	return nil
}

func (d *Disk) settleChunk(top *layer, src source, b, stop int64) error {
	m := d.stripe(b)
	m.Lock()
	defer m.Unlock()
	for b < stop {
		s := d.index.get(b)
		n := d.index.runLen(b, stop, s)
		if s == src { // else it was discarded meanwhile
			if err := top.writeMap(b, n, blockData); err != nil {
				return err
			}
		}
		b += n
	}
	return nil
}

// Prepare makes the file newTop of the layer that the next Seal starts, and makes file and name durable, so that Seal
// need not while the guest stands still. newTop must not exist. The file goes with Close, or with the next Prepare, if
// no Seal takes it.
func (d *Disk) Prepare(newTop string) error {
	if d.readOnly {
		return ErrReadOnly
	}
	d.mu.Lock()
	err := d.unprepare()
	d.mu.Unlock()
	if err != nil {
		return err
	}
	l, err := d.above(newTop) // not under mu: the guest writes meanwhile
	if err != nil {
		return fmt.Errorf("prepare a layer: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.prepared = l
	return nil
}

// above makes an open layer over the top as it is now, durably.
func (d *Disk) above(path string) (*layer, error) {
	top, _ := d.top()
	return d.env.create(path, header{size: d.size, id: newID(), parent: top.hdr.id, state: StateOpen, boot: d.env.boot}, true)
}

// unprepare removes what Prepare has made. Precondition: d.mu is held, or nobody else uses the disk.
func (d *Disk) unprepare() error {
	l := d.prepared
	if l == nil {
		return nil
	}
	d.prepared = nil
	return errors.Join(l.close(), ioError("remove a layer that is not needed", d.env.fs.Remove(l.path)))
}

// Seal ends the top layer and starts a new one in the file newTop, which must not exist unless Prepare has made it. It
// waits for writes under way, and no longer: data, however much, is neither copied nor synced. What the disk holds at
// this instant is the stack as it was, which Seal describes by its uppermost layer.
//
// The sealed layer is durable once the next Flush has returned; commit a snapshot that refers to it
// only then. Other disks on this host may be forked from it at once. newTop is durable when Seal returns.
// Record the new stack ([Disk.Stack]) before the guest writes again: whoever opens the disk after a crash
// must know of newTop ([Continues] tells it by its parent if need be).
//
// On error the old top goes on as if nothing had happened.
func (d *Disk) Seal(ctx context.Context, newTop string) (LayerInfo, error) {
	return d.SealThen(ctx, newTop, nil)
}

// SealThen is Seal for a guest that is not paused: writes wait until record has returned, which is
// given the new stack to remember. It must not call methods of the disk. If record fails, the disk
// is sealed all the same, and the error is returned.
func (d *Disk) SealThen(ctx context.Context, newTop string, record func(Stack) error) (LayerInfo, error) {
	if d.readOnly {
		return LayerInfo{}, ErrReadOnly
	}
	if err := d.gate.enterAlone(ctx); err != nil {
		return LayerInfo{}, fmt.Errorf("seal: wait for writes under way: %w", err)
	}
	defer d.gate.leaveAlone(false)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed != nil {
		return LayerInfo{}, fmt.Errorf("seal: %w", d.failed)
	}
	ls := d.all()
	if len(ls) >= MaxLayers {
		return LayerInfo{}, fmt.Errorf("seal: %w: %d", ErrTooManyLayers, len(ls))
	}
	old := ls[len(ls)-1]
	l := d.prepared
	if l != nil && l.path == newTop && l.hdr.parent == old.hdr.id {
		d.prepared = nil
	} else {
		var err error
		if l, err = d.above(newTop); err != nil {
			return LayerInfo{}, fmt.Errorf("seal: %w", err)
		}
	}
	if err := old.freeze(); err != nil {
		_ = l.close()
		_ = d.env.fs.Remove(newTop) // leave no trace of what did not happen
		return LayerInfo{}, fmt.Errorf("seal: %w", err)
	}
	_ = old.flock(osfile.Shared) // from exclusive to shared it cannot fail for want of the lock
	ls = append(ls, l)
	d.layers.Store(&ls)
	d.named(l)
	d.pending = d.pending[:0] // sealing settles all that the old top has pending
	d.unsealed = append(d.unsealed, old)
	d.dirty.Store(true)
	if record != nil {
		if err := record(d.Stack()); err != nil {
			return old.info(), fmt.Errorf("seal: remember the new layer: %w", err)
		}
	}
	return old.info(), nil
}

// Close flushes and closes the disk. The files are closed even if the flush fails. A second Close
// does nothing.
func (d *Disk) Close() error { return d.shut(false) }

// CloseSealed flushes, seals the top without a new one over it, and closes the disk.
func (d *Disk) CloseSealed() error { return d.shut(true) }

func (d *Disk) shut(seal bool) error {
	if d.readOnly {
		if d.closed.Swap(true) {
			return nil
		}
		return d.closeFiles()
	}
	if err := d.gate.enterAlone(context.Background()); err != nil {
		return nil // closed before
	}
	d.flushMu.Lock()
	defer d.flushMu.Unlock()
	err := d.flush()
	if seal && err == nil {
		top, _ := d.top()
		if err = top.freeze(); err == nil {
			err = d.env.seal(top)
		}
	}
	err = errors.Join(err, d.unprepare())
	d.closed.Store(true)
	d.gate.close()
	return errors.Join(err, d.closeFiles())
}

func (d *Disk) closeFiles() error {
	var errs []error
	for _, l := range d.all() {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}

// info describes the layer.
func (l *layer) info() LayerInfo {
	return LayerInfo{ID: l.hdr.id, Parent: l.hdr.parent, Merged: l.hdr.merge, Path: l.path, State: l.hdr.state.String(), Size: l.hdr.size}
}
