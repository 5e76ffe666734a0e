package pager

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// ErrBusy: another capture of the same RAM has not been closed yet.
var ErrBusy = guestmem.ErrGuarded

// Bounds of FreezeOptions.
const (
	// DefaultCopyBytes has room for 64 MiB of changed pages and for what a guest overwrites meanwhile.
	DefaultCopyBytes = 80 << 20
	MinCopyBytes     = 2 << 20
	MaxCopyBytes     = 4 << 30
	maxCopyWorkers   = 8
)

// FreezeOptions are the options of Prepare. The zero value is valid.
type FreezeOptions struct {
	// CopyBytes bounds the memory for copies of pages. 0 means DefaultCopyBytes.
	CopyBytes uint64
	// Expect is the likely number of pages in the set. Prepare commits memory for them and for a quarter more,
	// within CopyBytes. Freeze copies a set that fits while the guest is paused. It write-protects a larger one;
	// all of CopyBytes then holds pages that the guest overwrites before they have been read.
	Expect uint64
}

// Frozen is the content of a set of pages at one moment, while the guest keeps running and writes to them. It is a
// source for snapshot.Create. In order:
//
//	Prepare   while the guest runs
//	Freeze    while it and its devices are paused
//	          the guest runs again
//	NextData, ReadPages, Release   by the writer of the snapshot
//	Close     in every case; before pager, machine and memory are closed
//
// FreezeOptions.CopyBytes bounds the memory. If the guest overwrites pages faster than they are read and uses it
// up, it waits until its page has been read.
type Frozen struct {
	mem    *guestmem.Memory
	p      *Pager // nil if RAM was not restored lazily
	slots  []guestmem.Slot
	copies *copies

	// life is read-locked while pages are read, and write-locked by Freeze and Close.
	life   sync.RWMutex
	closed bool
	taken  bool

	// data has the pages that may have other content than zeros; rank[w] is how many of them precede word w.
	// Neither changes after Freeze.
	data *guestmem.PageSet
	rank []uint32
	// live has a bit for each page of data that has not been released.
	live []atomic.Uint64

	protection
}

// FreezeStats count what a Frozen has done so far.
type FreezeStats struct {
	// Protected is set if the pages were write-protected, not copied.
	Protected bool
	// Saved is how many pages the guest or the VMM overwrote before they were read, and Waited how often a writer
	// had to wait for memory.
	Saved, Waited uint64
}

// Prepare prepares a capture. p is the started pager of mem, or nil if mem has none. Prepare fails with ErrBusy
// while another Frozen of mem is open, and with ErrClosed if the pager is closed.
func Prepare(mem *guestmem.Memory, p *Pager, o FreezeOptions) (*Frozen, error) {
	if o.CopyBytes == 0 {
		o.CopyBytes = DefaultCopyBytes
	}
	o.CopyBytes = min(max(o.CopyBytes, MinCopyBytes), MaxCopyBytes, mem.Size()) &^ (pageSize - 1)
	f := &Frozen{mem: mem, p: p, slots: mem.Slots()}
	f.protection.init(f)
	if err := mem.SetGuard(f); err != nil {
		return nil, fmt.Errorf("preparing a capture of guest RAM: %w: wait until it is written, or cancel it", err)
	}
	err := f.prepare(o)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("preparing a capture of guest RAM: %w", err), f.Close())
	}
	return f, nil
}

func (f *Frozen) prepare(o FreezeOptions) (err error) {
	if f.p != nil {
		f.p.mu.Lock()
		defer f.p.mu.Unlock()
		if f.p.closed {
			return ErrClosed
		}
		f.p.frozen.Store(f)
	}
	f.copies, err = newCopies(o.CopyBytes, min(o.Expect, MaxCopyBytes/pageSize)*pageSize)
	return err
}

// Freeze captures the current content of the pages of set. The guest and its devices must be paused, and may run
// again when Freeze has returned, even if it fails. If it fails, the caller must mark the pages of the set dirty
// again. Freeze does not change or keep the set.
//
// Pages of the set that NextData leaves out are zeros.
func (f *Frozen) Freeze(set *guestmem.PageSet) error {
	f.life.Lock()
	defer f.life.Unlock()
	switch {
	case f.closed:
		return fmt.Errorf("freezing guest RAM: %w", ErrClosed)
	case f.taken:
		return fmt.Errorf("freezing guest RAM: it has been done: %w", ErrBusy)
	case set.Pages() != f.mem.Size()/pageSize:
		return fmt.Errorf("freezing guest RAM: %w: the set is for %d pages of RAM, there are %d", ErrLayout, set.Pages(), f.mem.Size()/pageSize)
	}
	if err := f.freeze(set); err != nil {
		return fmt.Errorf("freezing guest RAM: %w", err)
	}
	f.taken = true
	return nil
}

func (f *Frozen) freeze(set *guestmem.PageSet) (err error) {
	if n := set.Len(); n*pageSize <= f.copies.ready {
		// Asking the kernel which pages are zeros is not worth it: the reader sees that.
		f.data = set.Clone()
	} else if err := f.loadMissing(set); err != nil {
		return err
	} else if f.data, err = inUse(f.slots, set); err != nil {
		return err
	} else if backed := f.mem.Backed(); backed != nil {
		// The content of pages that the host has not committed is in the image.
		for i, w := range backed.Words() {
			f.data.Words()[i] |= w & set.Words()[i]
		}
	}
	n := uint32(0)
	f.rank = make([]uint32, len(f.data.Words()))
	f.live = make([]atomic.Uint64, len(f.data.Words()))
	for i, w := range f.data.Words() {
		f.rank[i] = n
		n += popcount(w)
		if w != 0 {
			f.live[i].Store(w)
		}
	}
	if uint64(n)*pageSize <= f.copies.ready {
		return f.copyAll(n)
	}
	return f.protectAll()
}

// loadMissing loads the pages of the set that the pager has not filled. There are few: a changed page is present
// or was given to the balloon. The pager fills no page of the set afterwards, so the page map then says which of
// them are in use.
func (f *Frozen) loadMissing(set *guestmem.PageSet) error {
	if f.p == nil || f.p.loaded.Load() {
		return nil // only zeros are missing
	}
	b := make([]byte, 1)
	for i, w := range set.Words() {
		n := uint64(i) * 64 / chunkPages
		if w == 0 || !f.p.isRegistered(n) {
			continue
		}
		c, k := f.p.chunk(n), i%words
		for rest := w &^ (c.present[k].Load() | c.zeroed[k].Load()); rest != 0; rest &= rest - 1 {
			gpa, err := f.mem.FromLinear((uint64(i)*64 + trailingZeros(rest)) * pageSize)
			if err != nil {
				return err
			}
			if err := f.mem.Read(gpa, b); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyShard is the number of pages of RAM that a goroutine takes at once.
const copyShard = chunkPages

// copyAll copies the n pages of data, on several processors if that is worth it.
func (f *Frozen) copyAll(n uint32) error {
	var next atomic.Uint64
	var failure atomic.Pointer[error]
	work := func() {
		for failure.Load() == nil {
			first := next.Add(copyShard) - copyShard
			if first >= f.data.Pages() {
				return
			}
			// ReadSet writes only the copies of this shard's pages.
			if err := f.mem.ReadSet(f.data, first, first+copyShard, f.copies.from(uint64(f.rank[first/64]))); err != nil {
				failure.Store(&err)
				return
			}
		}
	}
	const worthIt = 128 // pages
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), maxCopyWorkers, int(n)/worthIt) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	if err := failure.Load(); err != nil {
		return *err
	}
	return nil
}

// rankOf returns the position of a page among those of data.
func (f *Frozen) rankOf(page uint64) uint64 {
	return uint64(f.rank[page/64] + popcount(f.data.Words()[page/64]&(1<<(page%64)-1)))
}

func (f *Frozen) isLive(page uint64) bool { return f.live[page/64].Load()>>(page%64)&1 != 0 }

// Slots implements snapshot.MemorySource.
func (f *Frozen) Slots() []snapshot.Slot { return snapshot.LayoutOf(f.mem) }

// NextData implements snapshot.MemorySource.
func (f *Frozen) NextData(page uint64) (first, end uint64, err error) {
	f.life.RLock()
	defer f.life.RUnlock()
	if err := f.readable(); err != nil {
		return 0, 0, err
	}
	first, end = f.data.Next(page)
	return first, end, nil
}

func (f *Frozen) readable() error {
	switch {
	case f.closed:
		return fmt.Errorf("reading frozen RAM: %w", ErrClosed)
	case !f.taken:
		return errors.New("reading frozen RAM: nothing has been frozen yet")
	}
	return nil
}

// ReadPages implements snapshot.MemorySource. Pages that NextData leaves out read as zeros. Reading a released
// page fails.
func (f *Frozen) ReadPages(page uint64, b []byte) error {
	f.life.RLock()
	defer f.life.RUnlock()
	if err := f.readable(); err != nil {
		return err
	}
	for ; len(b) >= pageSize; b, page = b[pageSize:], page+1 {
		if !f.data.Has(page) {
			clear(b[:pageSize])
			continue
		}
		if err := f.readPage(page, b[:pageSize]); err != nil {
			return fmt.Errorf("reading frozen page %d: %w", page, err)
		}
	}
	return nil
}

func (f *Frozen) readPage(page uint64, b []byte) error {
	if f.active.Load() {
		return f.protection.read(page, b)
	}
	if !f.isLive(page) {
		return errReleased
	}
	copy(b, f.copies.pages(f.rankOf(page), 1))
	return nil
}

var errReleased = errors.New("it has been released")

// Release says that the pages [first, end) have been read for the last time. It frees their memory, and the guest
// may write to them freely. Several goroutines may call it at once.
func (f *Frozen) Release(first, end uint64) {
	f.life.RLock()
	defer f.life.RUnlock()
	if f.readable() != nil {
		return
	}
	if end = min(end, f.data.Pages()); first >= end {
		return
	}
	if f.active.Load() {
		f.protection.release(first, end)
		return
	}
	for page := first; page < end; page++ {
		if m := uint64(1) << (page % 64); f.live[page/64].And(^m)&m != 0 {
			f.copies.drop(f.rankOf(page))
		}
	}
}

// Stats returns the counts so far.
func (f *Frozen) Stats() FreezeStats {
	return FreezeStats{Protected: f.active.Load(), Saved: f.saved.Load(), Waited: f.waited.Load()}
}

// Close lifts all protection and frees all memory, even that of pages not read yet. It may be called at any time
// and more than once.
func (f *Frozen) Close() error {
	f.life.Lock()
	defer f.life.Unlock()
	if f.closed {
		return nil
	}
	f.closed = true
	err := f.protection.close()
	if f.p != nil {
		f.p.frozen.CompareAndSwap(f, nil)
	}
	// SetGuard waits until no Go code is calling f any more.
	return errors.Join(err, f.mem.SetGuard(nil), f.copies.close())
}

// copies is memory for copies of guest pages.
type copies struct {
	mapping []byte
	mem     []byte // the part of mapping from the first multiple of hugePage on
	// ready is how many bytes are committed. Committing them in the pause would take longer than copying: zeroing
	// a huge page can take milliseconds if the host is itself a guest.
	ready uint64
	// dropped counts the pages in each block of hugePage that are no longer needed.
	dropped []atomic.Uint32
}

const (
	hugePage  = 2 << 20
	blockSize = hugePage / pageSize
)

// newCopies reserves size bytes and commits the expected number of them and some more.
func newCopies(size, expect uint64) (*copies, error) {
	size = (size + hugePage - 1) &^ (hugePage - 1)
	m, err := unix.Mmap(-1, 0, int(size)+hugePage, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("reserving %d MiB for copies: mmap: %w", size>>20, err)
	}
	skip := -uint64(address(m)) % hugePage
	c := &copies{mapping: m, mem: m[skip : skip+size], dropped: make([]atomic.Uint32, size/hugePage)}
	c.ready = min((expect+expect/4+hugePage)&^(hugePage-1), size)
	ready, rest := c.mem[:c.ready], c.mem[c.ready:]
	// Guest RAM must not end up in a child process or in a core dump. Huge pages are committed faster, but are not
	// required.
	_ = unix.Madvise(c.mem, unix.MADV_DONTFORK)
	_ = unix.Madvise(c.mem, unix.MADV_DONTDUMP)
	_ = unix.Madvise(ready, unix.MADV_HUGEPAGE)
	if len(rest) > 0 {
		// Pages of rest are committed one by one, while a vCPU waits.
		_ = unix.Madvise(rest, unix.MADV_NOHUGEPAGE)
	}
	if err := unix.Madvise(ready, unix.MADV_POPULATE_WRITE); err != nil {
		clear(ready) // Linux before 5.14
	}
	return c, nil
}

func (c *copies) size() uint64 { return uint64(len(c.mem)) }

// pages returns the memory of n pages.
func (c *copies) pages(first, n uint64) []byte {
	return c.mem[first*pageSize : (first+n)*pageSize]
}

// from returns the memory of a page and of all that follow.
func (c *copies) from(page uint64) []byte { return c.mem[page*pageSize:] }

// drop marks a page as no longer needed. It frees the block of hugePage that the page is in once all its pages are
// dropped.
func (c *copies) drop(page uint64) {
	if b := page / blockSize; c.dropped[b].Add(1) == blockSize {
		_ = unix.Madvise(c.mem[b*hugePage:(b+1)*hugePage], unix.MADV_DONTNEED)
	}
}

func (c *copies) close() error {
	if c == nil {
		return nil
	}
	return os.NewSyscallError("munmap copies", unix.Munmap(c.mapping))
}
