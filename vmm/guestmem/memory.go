package guestmem

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// GPA is a guest physical address.
type GPA uint64

// PageSize is the granularity of residency and of dirty tracking, in bytes.
const PageSize = 4096

// The part of the 32-bit address space that is not RAM. It has the interrupt controllers, the virtio-mmio windows
// and the ranges that KVM needs for itself. RAM that does not fit below it continues at 4 GiB.
const (
	HoleStart GPA = 3 << 30
	HoleEnd   GPA = 4 << 30
)

// Limits on the size of a guest's RAM, in bytes.
const (
	MinSize = 64 << 20
	MaxSize = 16 << 30
)

// ErrRange says that an address range is not entirely inside guest RAM.
var ErrRange = errors.New("address range is not guest RAM")

// ErrSize says that a RAM size is out of bounds.
var ErrSize = errors.New("unusable guest RAM size")

// Slot is one contiguous piece of guest RAM, for KVM_SET_USER_MEMORY_REGION.
type Slot struct {
	GPA  GPA
	Size uint64
	// HVA is the slot's address in this process, to pass to the kernel (memslots, userfaultfd). Never dereference
	// it.
	HVA uintptr
	// Offset is where the slot starts in the linear numbering of RAM, which
	// skips the hole: page number Offset/PageSize is its first page.
	Offset uint64
}

// Residency makes pages present that a lazy restore has not loaded yet.
type Residency interface {
	// Ensure returns when Go code can read and write every page of [gpa, gpa+n) without a fault that this process
	// itself must answer. The range is inside one slot. Many goroutines call Ensure, on every access to guest
	// memory, so it must be cheap when nothing is missing.
	Ensure(gpa GPA, n uint64) error
	// Memory calls Discarding before it gives the pages of [gpa, gpa+n), page aligned, back to the host. They then
	// read as zeros. Once Discarding has returned, the pager must not put stale content into these pages.
	Discarding(gpa GPA, n uint64)
	// Evict gives pages back to the host that are not in keep and that a fault brings again, as they are now. Meanwhile
	// nothing else accesses guest memory. It returns how many.
	Evict(keep *PageSet) (pages uint64, err error)
}

// Guard is called before this process changes guest RAM, so that a frozen view of RAM can save what the change
// would destroy. It is not called for changes by the guest and by the kernel's I/O: userfaultfd reports those.
type Guard interface {
	// BeforeWrite returns when Go code may write to [gpa, gpa+n) without a fault that this process itself must
	// answer. Many goroutines call it after Ensure, on every write, so it must be cheap when nothing is frozen.
	BeforeWrite(gpa GPA, n uint64) error
	// BeforeDiscard returns when the guard no longer needs the content of the pages of [gpa, gpa+n). The range is
	// inside one slot. Meanwhile no other Go code accesses guest memory.
	BeforeDiscard(gpa GPA, n uint64)
}

// ErrGuarded says that the memory has another guard.
var ErrGuarded = errors.New("a frozen view of the guest's RAM is still in use")

// File is a file that the kernel can read from or write to: an [os.File], a socket, a TAP device.
type File interface {
	Fd() uintptr
}

// Range is a piece of guest RAM, for vectored I/O.
type Range struct {
	GPA GPA
	Len uint32
}

// Memory is the RAM of one guest. All methods may be called from several
// goroutines at once; Close must be the last call.
type Memory struct {
	size  uint64
	slots []Slot
	mem   []byte

	// Go code holds mu for reading while it accesses guest pages, and for writing to take pages away.
	mu        sync.RWMutex
	residency Residency
	guard     Guard
	image     *image // nil if RAM began as zeros

	// dirty has a bit for each page that this process has written.
	dirty []atomic.Uint64
}

// New reserves size bytes of guest RAM: a multiple of PageSize, between MinSize and MaxSize. The memory is private,
// anonymous and zero; the host commits pages on first touch. New fails with ErrSize when the size is out of bounds,
// and with the mmap error when the host refuses the mapping.
func New(size uint64) (*Memory, error) {
	if size < MinSize || size > MaxSize || size%PageSize != 0 {
		return nil, fmt.Errorf("reserving %d bytes of guest RAM: %w: use a multiple of %d from %d MiB to %d MiB",
			size, ErrSize, PageSize, MinSize>>20, MaxSize>>20)
	}
	mem, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("reserving %d MiB of guest RAM: mmap: %w: lower the VM's memory or free some on the host",
			size>>20, err)
	}
	m := &Memory{
		size:  size,
		mem:   mem,
		dirty: make([]atomic.Uint64, (size/PageSize+63)/64),
	}
	m.keepOut(0, size)
	low := min(size, uint64(HoleStart))
	m.slots = append(m.slots, Slot{GPA: 0, Size: low, HVA: addressOf(mem), Offset: 0})
	if size > low {
		m.slots = append(m.slots, Slot{GPA: HoleEnd, Size: size - low, HVA: addressOf(mem) + uintptr(low), Offset: low})
	}
	return m, nil
}

// Close unmaps the memory. Nothing may use m afterwards.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mem == nil {
		return nil
	}
	mem := m.mem
	m.mem, m.slots = nil, nil
	return os.NewSyscallError("munmap guest RAM", unix.Munmap(mem))
}

// Size returns the amount of RAM in bytes, without the hole.
func (m *Memory) Size() uint64 { return m.size }

// Slots returns the pieces of RAM in ascending order: one, or two when RAM
// reaches beyond HoleStart.
func (m *Memory) Slots() []Slot { return append([]Slot(nil), m.slots...) }

// SetResidency installs the pager of a lazy restore. It must be called before
// anything accesses the memory.
func (m *Memory) SetResidency(r Residency) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.residency = r
}

// Quiesce waits for all accesses by Go code that are under way when it is called. It does not wait for the kernel's
// I/O.
func (m *Memory) Quiesce() {
	m.mu.Lock()
	defer m.mu.Unlock()
}

// SetGuard installs a guard, or removes it if g is nil. It fails with ErrGuarded if there is one already. When it
// returns, all earlier writes by Go code have finished. Later ones ask the new guard; after removal, none uses the
// old one.
func (m *Memory) SetGuard(g Guard) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g != nil && m.guard != nil {
		return ErrGuarded
	}
	m.guard = g
	return nil
}

// offset translates a range to an offset in the mapping.
func (m *Memory) offset(gpa GPA, n uint64) (uint64, error) {
	for i := range m.slots {
		s := &m.slots[i]
		// No sum here can overflow.
		if gpa >= s.GPA && uint64(gpa-s.GPA) <= s.Size && n <= s.Size-uint64(gpa-s.GPA) {
			return s.Offset + uint64(gpa-s.GPA), nil
		}
	}
	return 0, ErrRange
}

// Contains reports whether [gpa, gpa+n) lies inside one piece of RAM.
func (m *Memory) Contains(gpa GPA, n uint64) bool {
	_, err := m.offset(gpa, n)
	return err == nil
}

// Linear translates a guest physical address to its position in RAM counted without the hole. Snapshots number
// pages by that position. FromLinear is the inverse.
func (m *Memory) Linear(gpa GPA) (uint64, error) { return m.offset(gpa, 1) }

// FromLinear is the inverse of Linear.
func (m *Memory) FromLinear(off uint64) (GPA, error) {
	for i := range m.slots {
		s := &m.slots[i]
		if off >= s.Offset && off-s.Offset < s.Size {
			return s.GPA + GPA(off-s.Offset), nil
		}
	}
	return 0, ErrRange
}

// Read copies guest RAM at gpa into p. It fails with ErrRange or the pager's error, and then copies nothing.
func (m *Memory) Read(gpa GPA, p []byte) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	off, err := m.resident(gpa, uint64(len(p)))
	if err != nil {
		return err
	}
	copy(p, m.mem[off:])
	return nil
}

// resident is offset for a range that Go code is about to access. The caller holds m.mu.
func (m *Memory) resident(gpa GPA, n uint64) (uint64, error) {
	off, err := m.offset(gpa, n)
	if err != nil {
		return 0, err
	}
	if m.residency != nil && n > 0 {
		if err := m.residency.Ensure(gpa, n); err != nil {
			return 0, err
		}
	}
	return off, nil
}

// ReadSet copies the pages of set in [first, end) into p, one after the other. If p is too short it fails with
// ErrRange; otherwise it fails like Read.
func (m *Memory) ReadSet(set *PageSet, first, end uint64, p []byte) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for lo, hi := set.NextBefore(first, end); lo < hi; lo, hi = set.NextBefore(hi, end) {
		for i := range m.slots {
			s := &m.slots[i]
			base := s.Offset / PageSize
			from, to := max(lo, base), min(hi, base+s.Size/PageSize)
			if from >= to {
				continue
			}
			n := (to - from) * PageSize
			off, err := m.resident(s.GPA+GPA((from-base)*PageSize), n)
			if err != nil {
				return err
			}
			if copied := copy(p, m.mem[off:off+n]); uint64(copied) != n {
				return ErrRange
			}
			p = p[n:]
		}
	}
	return nil
}

// CopyPresent is Read for a caller that keeps pages in place by other means: it takes no lock and does not ask for
// residency. The caller must know that the pages are present, and that neither Discard nor Close comes in between;
// see Guard.
func (m *Memory) CopyPresent(gpa GPA, p []byte) error {
	off, err := m.offset(gpa, uint64(len(p)))
	if err != nil {
		return err
	}
	copy(p, m.mem[off:])
	return nil
}

// writable is resident for a range that Go code is about to write to. The caller holds m.mu.
func (m *Memory) writable(gpa GPA, n uint64) (uint64, error) {
	off, err := m.resident(gpa, n)
	if err == nil && m.guard != nil && n > 0 {
		err = m.guard.BeforeWrite(gpa, n)
	}
	return off, err
}

// Write copies p into guest RAM at gpa and marks the pages dirty. It fails with ErrRange or the pager's or guard's
// error, and then writes nothing.
func (m *Memory) Write(gpa GPA, p []byte) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	off, err := m.writable(gpa, uint64(len(p)))
	if err != nil {
		return err
	}
	copy(m.mem[off:], p)
	m.markDirty(off, uint64(len(p)))
	return nil
}

// Zero clears n bytes of guest RAM at gpa and marks the pages dirty.
func (m *Memory) Zero(gpa GPA, n uint64) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	off, err := m.writable(gpa, n)
	if err != nil {
		return err
	}
	clear(m.mem[off : off+n])
	m.markDirty(off, n)
	return nil
}

// FillFrom reads exactly n bytes of f at offset off straight into guest RAM. It fails with io.ErrUnexpectedEOF if
// the file ends early.
func (m *Memory) FillFrom(gpa GPA, n int, f File, off int64) error {
	rs := [1]Range{{GPA: gpa, Len: uint32(n)}}
	if n < 0 || uint64(n) > MaxSize || int(rs[0].Len) != n {
		return ErrRange
	}
	return m.transferAll(rs[:], func(iov []unix.Iovec, done int) (int, error) {
		return preadv(int(f.Fd()), iov, off+int64(done))
	}, true)
}

// DrainTo writes exactly n bytes of guest RAM to f at offset off.
func (m *Memory) DrainTo(gpa GPA, n int, f File, off int64) error {
	rs := [1]Range{{GPA: gpa, Len: uint32(n)}}
	if n < 0 || uint64(n) > MaxSize || int(rs[0].Len) != n {
		return ErrRange
	}
	return m.transferAll(rs[:], func(iov []unix.Iovec, done int) (int, error) {
		return pwritev(int(f.Fd()), iov, off+int64(done))
	}, false)
}

// PreadFull is FillFrom into several ranges.
func (m *Memory) PreadFull(rs []Range, f File, off int64) error {
	return m.transferAll(rs, func(iov []unix.Iovec, done int) (int, error) {
		return preadv(int(f.Fd()), iov, off+int64(done))
	}, true)
}

// PwriteFull is DrainTo from several ranges.
func (m *Memory) PwriteFull(rs []Range, f File, off int64) error {
	return m.transferAll(rs, func(iov []unix.Iovec, done int) (int, error) {
		return pwritev(int(f.Fd()), iov, off+int64(done))
	}, false)
}

// Preadv does one preadv(2) from f at off into at most MaxRanges ranges. It returns the number of bytes read, which
// is 0 at the end of a file.
func (m *Memory) Preadv(rs []Range, f File, off int64) (int, error) {
	return m.transferOnce(nil, rs, func(iov []unix.Iovec) (int, error) { return preadv(int(f.Fd()), iov, off) }, true)
}

// Pwritev does one pwritev2(2) of at most MaxRanges ranges to f at off, with its flags (RWF_APPEND and the like).
// It returns the number of bytes written.
func (m *Memory) Pwritev(rs []Range, f File, off int64, flags int) (int, error) {
	return m.transferOnce(nil, rs, func(iov []unix.Iovec) (int, error) { return pwritev2(int(f.Fd()), iov, off, flags) }, false)
}

// Readv does one readv(2) from fd into at most MaxRanges ranges and returns the number of bytes read, or
// unix.EAGAIN unwrapped. It marks the pages that it has read into as dirty; after other errors, the pages of all
// ranges.
func (m *Memory) Readv(fd int, rs []Range) (int, error) {
	return m.transferOnce(nil, rs, func(iov []unix.Iovec) (int, error) { return readv(fd, iov) }, true)
}

// Writev does one writev(2) of at most MaxRanges ranges to fd and returns the number of bytes written, or
// unix.EAGAIN unwrapped.
func (m *Memory) Writev(fd int, rs []Range) (int, error) {
	return m.transferOnce(nil, rs, func(iov []unix.Iovec) (int, error) { return writev(fd, iov) }, false)
}

// WritevAfter is Writev with head, bytes of this process, before the ranges, of which there may then be one fewer.
// Use it for bytes that were checked in a copy: the guest may have changed the original since.
func (m *Memory) WritevAfter(fd int, head []byte, rs []Range) (int, error) {
	return m.transferOnce(head, rs, func(iov []unix.Iovec) (int, error) { return writev(fd, iov) }, false)
}

// LoadUint16 reads a little-endian word that the guest may be writing, without tearing. gpa must be a multiple of
// 2, or LoadUint16 fails with ErrRange.
func (m *Memory) LoadUint16(gpa GPA) (uint16, error) {
	if gpa%2 != 0 {
		return 0, ErrRange
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	off, err := m.resident(gpa, 2)
	if err != nil {
		return 0, err
	}
	return loadUint16(m.mem, off), nil
}

// StoreUint16 writes a little-endian word that the guest may be reading, without tearing and after all earlier
// writes. gpa must be a multiple of 2, or StoreUint16 fails with ErrRange.
func (m *Memory) StoreUint16(gpa GPA, v uint16) error {
	if gpa%2 != 0 {
		return ErrRange
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	off, err := m.writable(gpa, 2)
	if err != nil {
		return err
	}
	storeUint16(m.mem, off, v)
	m.markDirty(off, 2)
	return nil
}

// Discard gives the whole pages inside [gpa, gpa+n) back to the host; they read
// as zeros from then on. The balloon uses it.
func (m *Memory) Discard(gpa GPA, n uint64) error {
	first := (uint64(gpa) + PageSize - 1) &^ (PageSize - 1)
	if n > MaxSize || first < uint64(gpa) {
		return ErrRange
	}
	last := (uint64(gpa) + n) &^ (PageSize - 1)
	if last <= first {
		if !m.Contains(gpa, n) {
			return ErrRange
		}
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, err := m.offset(gpa, n); err != nil {
		return err
	}
	off, err := m.offset(GPA(first), last-first)
	if err != nil {
		return err
	}
	if m.guard != nil {
		m.guard.BeforeDiscard(GPA(first), last-first)
	}
	if m.residency != nil {
		m.residency.Discarding(GPA(first), last-first)
	}
	m.markDirty(off, last-first)
	return m.discard(off, last-first)
}

// Evict has the residency give back pages that neither the guest nor this process has changed. changed has those that
// the guest has changed, and KVM on its behalf, since the residency was set. The machine must be paused with its
// devices, whose system calls access guest memory at any time. Without a residency Evict does nothing.
func (m *Memory) Evict(changed *PageSet) (pages uint64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.residency == nil || m.guard != nil {
		return 0, nil
	}
	keep := changed.Clone()
	for i := range m.dirty {
		keep.words[i] |= m.dirty[i].Load()
	}
	return m.residency.Evict(keep)
}

func (m *Memory) markDirty(off, n uint64) {
	if n == 0 {
		return
	}
	for page := off / PageSize; page <= (off+n-1)/PageSize; page++ {
		w, bit := &m.dirty[page/64], uint64(1)<<(page%64)
		if w.Load()&bit == 0 {
			w.Or(bit)
		}
	}
}

// DrainDirty is TakeDirty, but adds the pages to a set for this RAM.
func (m *Memory) DrainDirty(into *PageSet) {
	for i := range m.dirty {
		if m.dirty[i].Load() != 0 {
			into.words[i] |= m.dirty[i].Swap(0)
		}
	}
}

// MarkDirty marks the pages of a set as written by this process.
func (m *Memory) MarkDirty(set *PageSet) {
	for i, w := range set.words[:min(len(set.words), len(m.dirty))] {
		if w != 0 {
			m.dirty[i].Or(w)
		}
	}
}

// TakeDirty calls f with the linear page number of every page that this process has written since the last call,
// and clears the marks. The guest's own writes are in KVM's dirty log. Call it while devices are paused.
func (m *Memory) TakeDirty(f func(page uint64)) {
	for i := range m.dirty {
		for w := m.dirty[i].Swap(0); w != 0; w &= w - 1 {
			f(uint64(i)*64 + uint64(bits.TrailingZeros64(w)))
		}
	}
}
