package pager

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Errors of New.
var (
	// ErrNotPermitted: this process may not handle page faults that the kernel takes.
	ErrNotPermitted = errors.New("not permitted to use userfaultfd: run as root, or allow access to " +
		userfaultfdDevice + ", or set vm.unprivileged_userfaultfd=1")
	// ErrNotSupported: the kernel has no userfaultfd, or one that is too old.
	ErrNotSupported = errors.New("the kernel lacks userfaultfd: use Linux 6.1 or later with CONFIG_USERFAULTFD")
	// ErrLayout: the guest's RAM has another layout than the snapshot.
	ErrLayout = errors.New("guest RAM differs from the snapshot's")
)

// ErrNotFresh is the error of a restore whose guest RAM was touched before New.
var ErrNotFresh = errors.New("guest RAM was in use before its pager was set up: give New memory that nothing has touched")

// ErrClosed is the error of access to guest RAM after Close.
var ErrClosed = errors.New("guest RAM is gone: its pager was closed before everything was loaded")

const (
	pageSize   = guestmem.PageSize
	chunkPages = snapshot.ChunkPages
	chunkBytes = chunkPages * pageSize
	words      = chunkPages / 64

	// zeroRun is the most neighbouring pages of zeros filled at once. A run stays within an aligned group of
	// zeroRun pages.
	zeroRun = 64
	// maxRanges bounds the ranges of RAM that New registers. Each costs the kernel a mapping, and New a system
	// call.
	maxRanges = 256
	// messages is the most faults read from the kernel at once.
	messages = 8
)

// Defaults and bounds of Options.
const (
	DefaultHandlers    = 2
	MaxHandlers        = 16
	DefaultRecordPages = 16384
	MaxRecordPages     = 1 << 20
	DefaultRecordTime  = 3 * time.Second
)

// sparsePages is more than what an idle guest touches for its timers, and little of what a command needs.
const sparsePages = 256

// Options are the options of New. The zero value is valid.
type Options struct {
	// WorkingSet has the pages that LoadWorkingSet loads ahead of the faults, in this order, as WorkingSet of an
	// earlier pager returned them. The pager ignores numbers that are out of range.
	WorkingSet []uint64
	// Hot is how many pages of WorkingSet, the first ones, the guest waited for before Ready. If it is 0, no resume has
	// recorded yet what the guest needs, and this one does: it fills each page alone until the recording ends.
	Hot int
	// Cache, if not nil, is where the pager looks for a frame before it reads the snapshot. It must stay usable
	// until Close.
	Cache FrameCache
	// OnFailure, if not nil, is called when a page cannot be loaded, at most once and on its own goroutine. The VM
	// cannot continue.
	OnFailure func(error)
	// RecordPages and RecordTime bound the recording of the working set: the number of pages, and the time after
	// Start. 0 means the default. With a negative RecordTime the pager records nothing.
	RecordPages int
	RecordTime  time.Duration
	// Handlers is how many faults the pager handles at once. 0 means DefaultHandlers.
	Handlers int
}

// FrameCache holds the pages of frames that were decompressed before.
type FrameCache interface {
	// Read returns the pages of a frame, which has a page of RAM, one after the other, in buf, which has room for
	// snapshot.MaxFramePages. It returns false unless it has exactly the snapshot's content. Several goroutines may
	// call it at once.
	Read(page uint64, f *snapshot.Frame, buf []byte) ([]byte, bool)
}

// Pager fills guest RAM from a snapshot. It implements guestmem.Residency. Its
// methods may be called from several goroutines at once.
type Pager struct {
	mem   *guestmem.Memory
	snap  *snapshot.Memory
	slots []guestmem.Slot
	opts  Options

	uffd   int
	stopFD int
	// registered are the ranges of RAM that fault, in bytes of the linear numbering. inRange has a bit for each
	// chunk, set if it is in one of them.
	registered []span
	inRange    []uint64
	// chunks are created on first use.
	chunks []atomic.Pointer[chunk]

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	// frozen is the open Frozen, if any. It answers the faults of write-protected pages.
	frozen atomic.Pointer[Frozen]
	// protectable are the areas of RAM that are each registered in one mode, once all of RAM is registered for
	// write protection.
	protectable []guestmem.Slot

	failure  atomic.Pointer[error]
	loaded   atomic.Bool // only zeros are still missing
	detached atomic.Bool // and nothing is registered
	loading  atomic.Bool // LoadWorkingSet was called

	mu      sync.Mutex // guards started and closed, and wg.Add against wg.Wait
	started bool
	closed  bool

	// sparse is how many more pages come alone after Evict.
	sparse atomic.Int32

	workers sync.Pool
	record  record
	stats   Stats
}

type span struct{ start, end uint64 }

// chunk is the state of 2 MiB of RAM, see the package comment.
type chunk struct {
	mu sync.Mutex
	// known is true once leaf has been read. leaf is nil if all pages are zeros. mu guards both. They do not
	// change once known is set.
	known bool
	leaf  *snapshot.Leaf
	// ahead is 1 + the frame that Prefetch decompresses without mu, and 0 if there is none. came is signalled when
	// that has ended.
	ahead   int
	came    sync.Cond
	present [words]atomic.Uint64
	zeroed  [words]atomic.Uint64
}

func bit(i int) (word int, mask uint64) { return i / 64, 1 << (i % 64) }

func (c *chunk) isPresent(i int) bool { w, m := bit(i); return c.present[w].Load()&m != 0 }
func (c *chunk) isZeroed(i int) bool  { w, m := bit(i); return c.zeroed[w].Load()&m != 0 }

// missing reports whether a fill may give page i the snapshot's content.
func (c *chunk) missing(i int) bool {
	w, m := bit(i)
	return (c.present[w].Load()|c.zeroed[w].Load())&m == 0
}

func (c *chunk) setPresent(first, n int) {
	for i := first; i < first+n; i++ {
		w, m := bit(i)
		c.present[w].Or(m)
	}
}

// await waits while Prefetch decompresses the frame of page i: to do the same beside it would take longer. c.mu is
// held.
func (c *chunk) await(i int) {
	for c.ahead > 0 {
		if f, _, ok := c.leaf.Page(i); !ok || f+1 != c.ahead {
			return
		}
		c.came.Wait()
	}
}

// A worker is what one goroutine needs to fill pages.
type worker struct {
	fill filler
	dec  *snapshot.Decoder // nil while the worker is not in use
	// raw has the pages of frame, the last that the worker has read. frame is nil if there is none.
	frame *snapshot.Frame
	raw   []byte
}

// New makes mem the RAM of the snapshot: pages get their content when they are touched. mem must be fresh from
// guestmem.New and have the layout of snap, or New fails with ErrLayout. Until Start, mem may be accessed only
// through its own methods. The snapshot must stay open until Close.
//
// New reads no pages from the snapshot. Its time depends on how many pieces of RAM are in use, and hardly on the
// size of RAM.
func New(mem *guestmem.Memory, snap *snapshot.Memory, opts Options) (*Pager, error) {
	p, err := newPager(mem, snap, opts)
	if err != nil {
		return nil, fmt.Errorf("setting up lazy restore: %w", err)
	}
	return p, nil
}

func newPager(mem *guestmem.Memory, snap *snapshot.Memory, opts Options) (*Pager, error) {
	if opts.Handlers <= 0 {
		opts.Handlers = DefaultHandlers
	}
	opts.Handlers = min(opts.Handlers, MaxHandlers)
	if opts.RecordPages <= 0 {
		opts.RecordPages = DefaultRecordPages
	}
	opts.RecordPages = min(opts.RecordPages, MaxRecordPages)
	if opts.RecordTime == 0 {
		opts.RecordTime = DefaultRecordTime
	}
	slots := mem.Slots()
	if err := sameLayout(slots, snap.Slots()); err != nil {
		return nil, err
	}
	p := &Pager{
		mem: mem, snap: snap, slots: slots, opts: opts, uffd: -1, stopFD: -1,
		chunks:  make([]atomic.Pointer[chunk], snap.Chunks()),
		inRange: make([]uint64, (snap.Chunks()+63)/64),
	}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	if err := p.setUp(); err != nil {
		p.cancel(err)
		p.closeFDs()
		return nil, err
	}
	p.record.init(opts)
	mem.SetResidency(p)
	return p, nil
}

func sameLayout(have []guestmem.Slot, want []snapshot.Slot) error {
	ok := len(have) == len(want)
	for i := 0; ok && i < len(have); i++ {
		// Chunks must not cross a slot, or a run of pages would not be
		// contiguous in this process.
		ok = have[i].GPA == want[i].GPA && have[i].Size == want[i].Size && have[i].Offset%chunkBytes == 0
	}
	if !ok {
		return fmt.Errorf("%w: it has %v, the snapshot %v", ErrLayout, have, want)
	}
	return nil
}

func (p *Pager) setUp() (err error) {
	if p.uffd, err = openUserfaultfd(); err != nil {
		p.uffd = -1
		return err
	}
	if p.stopFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		p.stopFD = -1
		return fmt.Errorf("eventfd: %w", err)
	}
	p.registered = p.ranges()
	for _, r := range p.registered {
		hva := p.hva(r.start / pageSize)
		if err := register(p.uffd, hva, r.end-r.start, registerMissing); err != nil {
			return fmt.Errorf("RAM from %#x to %#x: %w", r.start, r.end, err)
		}
		for c := r.start / chunkBytes; c*chunkBytes < r.end; c++ {
			p.inRange[c/64] |= 1 << (c % 64)
		}
	}
	return nil
}

// ranges returns the ranges of RAM that may have content, at most maxRanges of them, none across two slots.
func (p *Pager) ranges() []span {
	var all []span
	for _, s := range p.slots {
		var rs []span
		for at := s.Offset; at < s.Offset+s.Size; at += chunkBytes {
			if p.snap.ZeroChunk(int(at / chunkBytes)) {
				continue
			}
			end := min(at+chunkBytes, s.Offset+s.Size)
			if k := len(rs); k > 0 && rs[k-1].end == at {
				rs[k-1].end = end
			} else {
				rs = append(rs, span{at, end})
			}
		}
		// Close the smallest gaps first until there are few enough.
		for gap := uint64(chunkBytes); len(rs) > maxRanges/len(p.slots); gap *= 2 {
			k := 0
			for _, r := range rs[1:] {
				if r.start-rs[k].end <= gap {
					rs[k].end = r.end
				} else {
					k++
					rs[k] = r
				}
			}
			rs = rs[:k+1]
		}
		all = append(all, rs...)
	}
	return all
}

func (p *Pager) closeFDs() {
	if p.uffd >= 0 {
		unix.Close(p.uffd)
	}
	if p.stopFD >= 0 {
		unix.Close(p.stopFD)
	}
}

// Start begins to answer faults. It does nothing if called again or after Close.
func (p *Pager) Start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.started || p.closed {
		return
	}
	p.started = true
	p.record.start(p.opts.RecordTime)
	for range p.opts.Handlers {
		p.wg.Go(p.serve)
	}
}

// LoadWorkingSet loads Options.WorkingSet, what is not hot at low priority. It returns when that is done, has failed,
// or the pager is closed. Only the first call has an effect.
func (p *Pager) LoadWorkingSet() {
	if len(p.opts.WorkingSet) == 0 || p.loading.Swap(true) {
		return
	}
	pages, hot := p.opts.WorkingSet, min(p.opts.Hot, len(p.opts.WorkingSet))
	// fail has already reported a failure, and Close needs no report.
	if hot == 0 {
		_ = p.Prefetch(p.ctx, pages)
		return
	}
	only := guestmem.NewPageSet(p.snap.Pages())
	for _, page := range pages {
		if page < only.Pages() {
			only.Add(page, page+1)
		}
	}
	if err := p.prefetchAll(p.ctx, pages[:hot], true, only); err != nil {
		return
	}
	// From here on the guest's vCPU and its caller come first.
	_ = atLowPriority(func() error { return p.prefetchAll(p.ctx, pages[hot:], false, only) })
}

// Err returns why the restore has failed, nil if it has not.
func (p *Pager) Err() error {
	if e := p.failure.Load(); e != nil {
		return *e
	}
	return nil
}

// fail records err as the reason of the failure if it is the first, and returns the recorded reason.
func (p *Pager) fail(err error) error {
	err = fmt.Errorf("restoring guest RAM: %w", err)
	if p.failure.CompareAndSwap(nil, &err) && p.opts.OnFailure != nil {
		go p.opts.OnFailure(err)
	}
	return p.Err()
}

// Close ends the restore in any state and frees everything but the memory. Stop vCPUs and device I/O first: unless
// Load has finished, later access to guest RAM gets EFAULT, or ErrClosed from the methods of guestmem.Memory.
// Close closes an open Frozen. The memory must be closed after the pager.
func (p *Pager) Close() error {
	if f := p.frozen.Load(); f != nil {
		// Ignore its error: closing the descriptor lifts the protection.
		_ = f.Close()
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	p.mu.Unlock()
	p.cancel(ErrClosed)
	if err := signalEvent(p.stopFD); err != nil {
		return fmt.Errorf("stopping the pager: %w", err)
	}
	p.wg.Wait()
	var err error
	if p.loaded.Load() && p.Err() == nil {
		err = p.detach()
	} else {
		err = p.revokeAll()
	}
	p.closeFDs()
	return err
}

// detach leaves RAM to the kernel when only zeros are missing. Memory may be in use. detach must unregister the
// ranges before guestmem.Memory stops calling Ensure, or a goroutine could take a fault that no handler answers.
func (p *Pager) detach() error {
	p.detached.Store(true)
	var errs []error
	for _, r := range p.registered {
		errs = append(errs, unregister(p.uffd, p.hva(r.start/pageSize), r.end-r.start))
	}
	p.mem.SetResidency(nil)
	return errors.Join(errs...)
}

// revokeAll makes all registered RAM inaccessible.
func (p *Pager) revokeAll() error {
	if len(p.mem.Slots()) == 0 {
		return nil // unmapped: the addresses are no longer ours
	}
	// SetResidency waits until no Go code is accessing guest memory.
	p.mem.SetResidency(closedResidency{})
	var errs []error
	for _, r := range p.registered {
		errs = append(errs, revoke(p.hva(r.start/pageSize), r.end-r.start))
	}
	return errors.Join(errs...)
}

// enter makes Close wait until leave is called.
func (p *Pager) enter() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return ErrClosed
	}
	p.wg.Add(1)
	return nil
}

func (p *Pager) leave() { p.wg.Done() }

func signalEvent(fd int) error {
	for {
		_, err := unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// closedResidency keeps Go code away from memory that is not accessible.
type closedResidency struct{}

func (closedResidency) Ensure(guestmem.GPA, uint64) error { return ErrClosed }
func (closedResidency) Discarding(guestmem.GPA, uint64)   {}

func (closedResidency) Evict(*guestmem.PageSet) (uint64, error) { return 0, nil }

// hva returns the address of a page in this process.
func (p *Pager) hva(page uint64) uintptr {
	off := page * pageSize
	for i := range p.slots {
		if s := &p.slots[i]; off-s.Offset < s.Size {
			return s.HVA + uintptr(off-s.Offset)
		}
	}
	return 0
}

// pageAt is the inverse of hva.
func (p *Pager) pageAt(hva uintptr) (uint64, bool) {
	for i := range p.slots {
		if s := &p.slots[i]; uint64(hva-s.HVA) < s.Size {
			return (s.Offset + uint64(hva-s.HVA)) / pageSize, true
		}
	}
	return 0, false
}

func (p *Pager) linear(gpa guestmem.GPA) (uint64, bool) {
	for i := range p.slots {
		if s := &p.slots[i]; uint64(gpa-s.GPA) < s.Size {
			return s.Offset + uint64(gpa-s.GPA), true
		}
	}
	return 0, false
}

func (p *Pager) isRegistered(chunk uint64) bool { return p.inRange[chunk/64]>>(chunk%64)&1 != 0 }

// chunk returns the state of a chunk.
func (p *Pager) chunk(n uint64) *chunk {
	if c := p.chunks[n].Load(); c != nil {
		return c
	}
	c := new(chunk)
	c.came.L = &c.mu
	if !p.isRegistered(n) {
		// The kernel fills these with zeros itself.
		c.known = true
		for i := range c.present {
			c.present[i].Store(^uint64(0))
		}
	}
	if !p.chunks[n].CompareAndSwap(nil, c) {
		c = p.chunks[n].Load()
	}
	return c
}

// leafOf returns the index of chunk n. c.mu is held.
func (p *Pager) leafOf(c *chunk, n uint64) (*snapshot.Leaf, error) {
	if c.known {
		return c.leaf, nil
	}
	l, err := p.snap.Leaf(int(n))
	if err != nil {
		return nil, err
	}
	c.leaf, c.known = l, true
	return l, nil
}

// getWorker returns a worker; putWorker takes it back.
func (p *Pager) getWorker() (*worker, error) {
	d, err := snapshot.NewDecoder()
	if err != nil {
		return nil, err
	}
	w, ok := p.workers.Get().(*worker)
	if !ok {
		w = &worker{fill: filler{fd: p.uffd}}
	}
	w.dec = d
	return w, nil
}

// putWorker releases the decoder for any pager to use.
func (p *Pager) putWorker(w *worker) {
	if w.dec != nil {
		w.dec.Release()
		w.dec, w.frame, w.raw = nil, nil, nil
	}
	p.workers.Put(w)
}

// Ensure implements guestmem.Residency. The caller must hold off Discard until it has finished with the range, as
// the methods of guestmem.Memory do.
func (p *Pager) Ensure(gpa guestmem.GPA, n uint64) error {
	off, ok := p.linear(gpa)
	if !ok || n == 0 {
		return nil // guestmem.Memory has checked the range
	}
	for page, last := off/pageSize, (off+n-1)/pageSize; page <= last; page++ {
		if c := p.chunks[page/chunkPages].Load(); c != nil && c.isPresent(int(page%chunkPages)) {
			continue
		}
		if err := p.ensurePage(page); err != nil {
			return err
		}
	}
	return nil
}

func (p *Pager) ensurePage(page uint64) error {
	w, err := p.getWorker()
	if err != nil {
		return p.fail(err)
	}
	defer p.putWorker(w)
	c := p.chunk(page / chunkPages)
	i := int(page % chunkPages)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.await(i)
	if c.isPresent(i) {
		return nil
	}
	// Err must be checked under the mutex: see refuse.
	if err := p.Err(); err != nil {
		return err
	}
	if c.isZeroed(i) {
		if err = w.fill.zero(p.hva(page), pageSize); err == nil {
			c.setPresent(i, 1)
		}
	} else {
		err = p.fill(c, page, p.comesAlone(page), w)
	}
	if err != nil {
		if p.detached.Load() && errors.Is(err, unix.ENOENT) {
			return nil // no longer registered: the kernel fills it with zeros
		}
		return p.fail(err)
	}
	p.stats.Ensured.Add(1)
	return nil
}

// comesAlone records a page that somebody waits for, and reports whether to fill it without the others of its frame.
func (p *Pager) comesAlone(page uint64) bool {
	alone := p.record.add(page)
	return p.sparse.Load() > 0 && p.sparse.Add(-1) >= 0 || alone
}

// Discarding implements guestmem.Residency.
func (p *Pager) Discarding(gpa guestmem.GPA, n uint64) {
	off, ok := p.linear(gpa)
	if !ok || n == 0 {
		return
	}
	for page, last := off/pageSize, (off+n-1)/pageSize; page <= last; {
		next := min((page/chunkPages+1)*chunkPages, last+1)
		if p.isRegistered(page / chunkPages) {
			c := p.chunk(page / chunkPages)
			c.mu.Lock()
			for ; page < next; page++ {
				w, m := bit(int(page % chunkPages))
				c.zeroed[w].Or(m)
				c.present[w].And(^m)
			}
			c.mu.Unlock()
		}
		page = next
	}
}

// Evict implements guestmem.Residency: it gives back pages that were filled with content of the snapshot and are not
// in keep. The next sparsePages pages come back without the others of their frames, which an idle guest does not need.
// It does nothing once Load has loaded all, since RAM does not need the snapshot then.
func (p *Pager) Evict(keep *guestmem.PageSet) (pages uint64, err error) {
	if err := p.enter(); err != nil {
		return 0, err
	}
	defer p.leave()
	p.sparse.Store(sparsePages)
	for n := range p.chunks {
		c := p.chunks[n].Load()
		if c == nil || p.loaded.Load() || p.Err() != nil {
			continue
		}
		evicted, err := p.evictChunk(c, uint64(n)*chunkPages, keep)
		if pages += evicted; err != nil {
			return pages, err
		}
	}
	p.stats.Evicted.Add(pages)
	return pages, nil
}

// evictChunk is Evict for the chunk that begins with page base. It holds c.mu until the pages are gone: a fill that
// came before would leave a present bit without a page.
func (p *Pager) evictChunk(c *chunk, base uint64, keep *guestmem.PageSet) (pages uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaf == nil {
		return 0, nil
	}
	evictable := func(i int) bool {
		if !c.isPresent(i) || c.isZeroed(i) || keep.Has(base+uint64(i)) {
			return false
		}
		_, _, stored := c.leaf.Page(i)
		return stored // zeros take no memory
	}
	for i := 0; i < chunkPages; i++ {
		first := i
		for i < chunkPages && evictable(i) {
			i++
		}
		if i == first {
			continue
		}
		if err := drop(p.hva(base+uint64(first)), uint64(i-first)*pageSize); err != nil {
			return pages, err
		}
		for k := first; k < i; k++ {
			w, m := bit(k)
			c.present[w].And(^m)
		}
		pages += uint64(i - first)
	}
	return pages, nil
}

// fill gives page its content from the snapshot, and unless it is to come alone the other missing pages of its frame.
// c.mu is held, and page is missing.
func (p *Pager) fill(c *chunk, page uint64, alone bool, w *worker) error {
	i := int(page % chunkPages)
	leaf, err := p.leafOf(c, page/chunkPages)
	if err != nil {
		return err
	}
	if leaf != nil {
		if frame, slot, ok := leaf.Page(i); ok {
			raw, err := p.readFrame(page, leaf.Frame(frame), w)
			if err != nil {
				return err
			}
			if alone {
				return p.installRun(c, page-uint64(i), i, raw[slot*pageSize:][:pageSize], w)
			}
			return p.install(c, page-uint64(i), frame, raw, nil, w)
		}
	}
	return p.installZeros(c, page, w)
}

// readFrame returns the pages of the frame that has a page, from the cache if it has them.
func (p *Pager) readFrame(page uint64, f *snapshot.Frame, w *worker) ([]byte, error) {
	if w.frame == f {
		return w.raw, nil
	}
	w.frame = nil
	if p.opts.Cache != nil {
		if raw, ok := p.opts.Cache.Read(page, f, w.dec.Buffer()); ok && len(raw) == f.Pages()*pageSize {
			p.stats.FramesCached.Add(1)
			w.frame, w.raw = f, raw
			return raw, nil
		}
	}
	p.stats.Frames.Add(1)
	raw, err := p.snap.ReadFrame(f, w.dec)
	if err == nil {
		w.frame, w.raw = f, raw
	}
	return raw, err
}

// install copies the pages of a frame that are still missing into RAM, or those of them that are in only. base is the
// first page of the chunk. c.mu is held.
func (p *Pager) install(c *chunk, base uint64, frame int, raw []byte, only *guestmem.PageSet, w *worker) error {
	end := c.leaf.Frame(frame).Pages()
	wanted := func(i int) bool { return c.missing(i) && (only == nil || only.Has(base+uint64(i))) }
	for i := 0; i < chunkPages; {
		f, slot, ok := c.leaf.Page(i)
		if !ok || f != frame || !wanted(i) {
			i++
			continue
		}
		// Copy pages that are neighbours in RAM and in the frame together.
		n := 1
		for i+n < chunkPages && slot+n < end && wanted(i+n) {
			if f, s, ok := c.leaf.Page(i + n); !ok || f != frame || s != slot+n {
				break
			}
			n++
		}
		if err := p.installRun(c, base, i, raw[slot*pageSize:(slot+n)*pageSize], w); err != nil {
			return err
		}
		i += n
	}
	return nil
}

// installRun copies neighbouring pages from page i of the chunk on, which begins with page base and holds none of them.
func (p *Pager) installRun(c *chunk, base uint64, i int, raw []byte, w *worker) error {
	n := len(raw) / pageSize
	// Count first, because the waiting threads run again before the system call returns.
	p.stats.PagesCopied.Add(uint64(n))
	if err := w.fill.copy(p.hva(base+uint64(i)), raw); err != nil {
		return err
	}
	c.setPresent(i, n)
	return nil
}

// installZeros fills page and the missing zero pages around it. c.mu is held.
func (p *Pager) installZeros(c *chunk, page uint64, w *worker) error {
	at := int(page % chunkPages)
	lo, hi := at, at+1
	fits := func(i int) bool {
		if !c.missing(i) || page-uint64(at)+uint64(i) >= p.snap.Pages() {
			return false
		}
		if c.leaf == nil {
			return true
		}
		_, _, stored := c.leaf.Page(i)
		return !stored
	}
	for lo > at&^(zeroRun-1) && fits(lo-1) {
		lo--
	}
	for hi < at&^(zeroRun-1)+zeroRun && fits(hi) {
		hi++
	}
	if err := w.fill.zero(p.hva(page)-uintptr(at-lo)*pageSize, uint64(hi-lo)*pageSize); err != nil {
		return err
	}
	c.setPresent(lo, hi-lo)
	return nil
}
