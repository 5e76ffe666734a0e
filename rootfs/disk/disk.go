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
	// pendingRanges is how many ranges of unflushed, newly allocated blocks a disk remembers before a write
	// flushes by itself, as a full write cache would.
	pendingRanges = 8192
	stripeCount   = 64
)

// Stack names the layers of a disk, bottom first. A snapshot need store nothing else of a disk.
type Stack struct {
	Layers []string `json:"layers,omitempty"`
}

// Top returns the path of the uppermost layer, empty if there is none.
func (s Stack) Top() string {
	if len(s.Layers) == 0 {
		return ""
	}
	return s.Layers[len(s.Layers)-1]
}

// With returns the stack with one more layer on top. It does not change the receiver.
func (s Stack) With(top string) Stack {
	return Stack{Layers: append(append([]string(nil), s.Layers...), top)}
}

// LayerInfo describes one layer.
type LayerInfo struct {
	ID     ID
	Parent ID
	Merged ID // squashed: the second layer from the top of its parts; merged: its former ID; merging: the layer above
	Path   string
	State  string // "open", "frozen", "sealed" or "merging"
	Size   int64  // of the disk, bytes
}

// Options are the options of Open. The zero value is right for a VM's disk.
type Options struct {
	// ReadOnly opens every layer for reading only; the top may be sealed.
	ReadOnly bool
	// FS has the layers, also those that are made later; nil means the host's file system. The disk takes the locks
	// of the files that it gets. So no other descriptor of the same open file may outlive the disk's.
	FS osfile.FS
	// Coming, if not nil, says of a layer below the top whether its bytes are still being written to its file, all but
	// its header and table. It returns what waits for a range of the file, or nil if all is there. An error of that is
	// the error of the read.
	Coming func(path string) func(off, n int64) error
}

// Disk is an open stack. It is safe for concurrent use. Reads and writes of different blocks do not wait for each
// other. They allocate nothing, except 8 KiB the first time that a 16 MiB region gets mixed sources.
//
// A write has three steps, because the bytes go from guest memory to the file without passing through the Disk:
//
//	f, fileOff, length, err := d.WriteExtent(off, n) // where to write the first length bytes
//	_, err = pwritev(f, guest memory, fileOff)       // exactly length bytes
//	err = d.Wrote(off, length, err)                  // now they belong to the disk
//
// Until Wrote, newly allocated blocks keep their old content, so a process killed in between has not changed them.
// After every WriteExtent that succeeds, the goroutine must call Wrote exactly once, and must not call any method
// but ReadExtent before it: sealing, and copying up a partly written block, wait until no write is under way.
//
// The returned files stay valid until Close. Stop I/O before Close.
type Disk struct {
	env      env
	size     int64
	readOnly bool
	layers   atomic.Pointer[[]*layer]    // bottom first; source n is element n-1; only ever appended to
	names    atomic.Pointer[[]layerName] // the layers that Stack returns, bottom first; changed under mu
	index    *index
	stripes  [stripeCount]sync.Mutex // each guards map and index of its chunks, see stripe
	gate     gate                    // inside: writes under way. alone: Seal, copying up, Close
	dirty    atomic.Bool             // something was written since the last flush began
	closed   atomic.Bool

	flushMu sync.Mutex // one flush at a time; before mu

	mu       sync.Mutex // guards what follows
	pending  []run      // pending blocks of the top that no flush has picked up yet
	spare    []run      // the spare buffer for pending
	unsealed []*layer   // frozen, not yet durable; oldest first
	failed   error      // the failed sync; no later flush succeeds
	prepared *layer     // the layer that Prepare made for the next Seal
}

// Open opens a stack for writing to its top layer or, with Options.ReadOnly, for reading.
//
// For writing, the top must be open: neither sealed (ErrSealed: Fork over it) nor in use by another disk
// (ErrInUse). If a process was killed while it had the top open, Open keeps what it wrote. If the host went down
// since, Open drops, block by block, what was not flushed. Open reads every layer's header and table, so its time
// grows with the number of layers and of their runs, not with the amount of data.
func Open(s Stack, o Options) (*Disk, error) {
	e := hostEnv()
	if o.FS != nil {
		e.fs = o.FS
	}
	return e.open(s, o)
}

// all returns the current layers, bottom first.
func (d *Disk) all() []*layer {
	if p := d.layers.Load(); p != nil {
		return *p
	}
	return nil
}

// top returns the writable layer and its source. They are stable while the caller is inside the gate.
func (d *Disk) top() (*layer, source) {
	ls := d.all()
	return ls[len(ls)-1], source(len(ls))
}

// Size returns the disk's size in bytes, a multiple of BlockSize.
func (d *Disk) Size() int64 { return d.size }

// Statfs describes the file system of the top layer.
func (d *Disk) Statfs() (st unix.Statfs_t, err error) {
	ls := d.all()
	f := ls[len(ls)-1].os
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Fstatfs(int(f.Fd()), &st)
	}
	return st, ioError("look for space", os.NewSyscallError("fstatfs", err))
}

// Allocated returns what the files of the layers take on the host, in bytes: st_blocks of stat(2). Layers that are
// being written do not count.
func (d *Disk) Allocated() (sum int64, err error) {
	for _, l := range d.all() {
		if l.await != nil {
			continue
		}
		var st unix.Stat_t
		for err = unix.EINTR; errors.Is(err, unix.EINTR); {
			err = unix.Fstat(int(l.os.Fd()), &st)
		}
		if err != nil {
			return 0, ioError("look at what it takes", os.NewSyscallError("fstat", err))
		}
		sum += st.Blocks * 512
	}
	return sum, nil
}

// ReadOnly reports whether the disk refuses writes.
func (d *Disk) ReadOnly() bool { return d.readOnly }

// Stack returns the files that make up the disk now.
func (d *Disk) Stack() Stack {
	var s Stack
	if names := d.names.Load(); names != nil {
		for _, n := range *names {
			s.Layers = append(s.Layers, n.path)
		}
	}
	return s
}

// layerName is a layer as Stack and Substitute see it.
type layerName struct {
	path       string
	id, parent ID
}

// named adds layers to those that Stack returns. Precondition: d.mu is held, or no other goroutine uses the disk.
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

// ReadExtent returns where the first length bytes of [off, off+n) are: at fileOff in f, 0 < length <= n. A nil f
// means that they are zeros. The range need not be aligned.
func (d *Disk) ReadExtent(off, n int64) (f *os.File, fileOff, length int64, err error) {
	l, fileOff, length, err := d.resolve(off, n)
	if l == nil {
		return nil, 0, length, err
	}
	return l.os, fileOff, length, err
}

// resolve is ReadExtent, but returns the layer instead of its file.
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
	// A write by another goroutine may have changed the first block since get. The read then counts as before that
	// write.
	length = min(n, (first+max(blocks, 1))*BlockSize-off)
	if s == 0 {
		return nil, 0, length, nil
	}
	l = d.all()[s-1]
	if l.await != nil {
		if err := l.await(l.data+off, length); err != nil {
			return nil, 0, 0, fmt.Errorf("waiting for %s: %w", l.path, err)
		}
	}
	return l, l.data + off, length, nil
}

// WriteExtent returns where to write the first length bytes of [off, off+n): at fileOff in f, 0 < length <= n. See
// Disk for what must follow.
//
// WriteExtent first copies up a block that is written only in part and is not in the top. That waits until no
// write is under way. Aligned writes never wait for each other.
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
			if err := d.copyUp(first); err != nil { // inside the gate again, unless it failed
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

// Wrote ends the write that WriteExtent began for [off, off+n). err is the result of writing the file. If it is
// nil, the bytes become part of the disk. If not, newly allocated blocks keep their old content, and Wrote returns
// err wrapped as ErrNoSpace or ErrIO. Any error of Wrote means that the write did not take effect in full or
// cannot become durable, and the device must report it to the guest.
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

// commit makes the blocks [b, end), whose data is in the top's file, part of the disk. It reports whether the list
// of pending blocks is full. Precondition: the caller is inside the gate.
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

// copyUp copies a block that will be written in part to the top. On success the caller is inside the gate.
func (d *Disk) copyUp(b int64) error {
	if err := d.gate.enterAlone(context.Background()); err != nil {
		return err
	}
	done := false
	defer func() { d.gate.leaveAlone(done) }()
	top, src := d.top()
	if d.index.get(b) == src { // another goroutine was faster
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

// Discard says that the guest no longer needs [off, off+n). Whole blocks within become zeros, and their space in
// the top is freed. Parts of blocks at the ends keep their content.
func (d *Disk) Discard(off, n int64) error {
	return d.inside(off, n, func() error {
		first, end := (off+BlockSize-1)/BlockSize, (off+n)/BlockSize
		return d.zeroBlocks(first, end)
	})
}

// WriteZeroes makes [off, off+n) read as zeros. If mayUnmap is false, the range has space in the top afterwards,
// so that later writes to it cannot run out of space. Whole blocks are then preallocated space if the host's file
// system supports that.
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

// zeroBlocks makes blocks zeros and frees their space. Precondition: the caller is inside the gate.
func (d *Disk) zeroBlocks(b, end int64) error {
	top, src := d.top()
	for b < end {
		stop := min(end, (b/chunkBlocks+1)*chunkBlocks)
		if d.index.runLen(b, stop, 0) == stop-b { // all zeros already
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
	changed := false
	defer func() {
		// After the work: a flush beside it, of a capture, must leave the next flush something to do.
		if changed {
			d.dirty.Store(true)
		}
	}()
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
		changed = true
		// Punch the hole first. If the map came first and the punch failed, old data would stay under a block
		// marked zero, and a later power loss could bring it back.
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

// zeroAllocated writes zeros over whole blocks and keeps their space allocated.
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

// Flush makes every write durable whose Wrote, Discard or WriteZeroes returned before Flush was called, in the top
// and in layers sealed since the last flush. If nothing was written, it makes no system call. ErrSyncFailed is
// final for this Disk. After any other error the caller may retry.
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
					// More space on the host does not bring back what a sync has lost.
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

// syncTop makes the top's file durable and, the first time, its name.
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

// settle marks pending blocks as data, now that their data is durable.
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
		if s == src { // otherwise it was discarded meanwhile
			if err := top.writeMap(b, n, blockData); err != nil {
				return err
			}
		}
		b += n
	}
	return nil
}

// Prepare creates the file newTop for the layer that the next Seal starts, and makes file and name durable, so
// that Seal need not do it while the guest is paused. newTop must not exist. If no Seal uses the file, Close or
// the next Prepare removes it.
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

// above makes a durable open layer over the current top.
func (d *Disk) above(path string) (*layer, error) {
	top, _ := d.top()
	return d.env.create(path, header{size: d.size, id: newID(), parent: top.hdr.id, state: StateOpen, boot: d.env.boot}, true)
}

// unprepare removes what Prepare has made. Precondition: d.mu is held, or no other goroutine uses the disk.
func (d *Disk) unprepare() error {
	l := d.prepared
	if l == nil {
		return nil
	}
	d.prepared = nil
	return errors.Join(l.close(), ioError("remove a layer that is not needed", d.env.fs.Remove(l.path)))
}

// Seal ends the top layer and starts a new one in the file newTop, which must not exist unless Prepare has made
// it. It waits only for writes under way: it neither copies nor syncs data. The old stack is then the disk's
// content at this instant. Seal describes it by its uppermost layer.
//
// The sealed layer is durable once the next Flush has returned; commit a snapshot that refers to it only then.
// Other disks on this host may be forked from it at once. newTop is durable when Seal returns. Record the new
// stack ([Disk.Stack]) before the guest writes again: opening the disk after a crash requires newTop ([Continues]
// recognizes it by its parent if necessary).
//
// If Seal fails, the old top stays in use as before.
func (d *Disk) Seal(ctx context.Context, newTop string) (LayerInfo, error) {
	return d.SealThen(ctx, newTop, nil)
}

// SealThen is Seal for a guest that is not paused. It calls record with the new stack, and writes wait until
// record has returned. record must not call methods of the disk. If record fails, the disk is still sealed, and
// SealThen returns the error.
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
	if len(ls)+1 >= MaxLayers { // Open would refuse the stack
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
		_ = d.env.fs.Remove(newTop) // leave no trace of the failed Seal
		return LayerInfo{}, fmt.Errorf("seal: %w", err)
	}
	_ = old.flock(osfile.Shared) // changing from exclusive to shared cannot fail with ErrInUse
	ls = append(ls, l)
	d.layers.Store(&ls)
	d.named(l)
	d.pending = d.pending[:0] // sealing settles all pending blocks of the old top
	d.unsealed = append(d.unsealed, old)
	d.dirty.Store(true)
	if record != nil {
		if err := record(d.Stack()); err != nil {
			return old.info(), fmt.Errorf("seal: remember the new layer: %w", err)
		}
	}
	return old.info(), nil
}

// Close flushes and closes the disk. It closes the files even if the flush fails. A second Close does nothing.
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
