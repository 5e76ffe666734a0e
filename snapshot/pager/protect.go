package pager

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func popcount(w uint64) uint32        { return uint32(bits.OnesCount64(w)) }
func trailingZeros(w uint64) uint64   { return uint64(bits.TrailingZeros64(w)) }
func bitOf(page uint64) (int, uint64) { return int(page / 64), 1 << (page % 64) }

// protectGap is the largest gap between pages to protect that is protected along with them. A write to a page in
// the gap costs a fault, but a call for each page costs more.
const protectGap = 16

// protection is the part of a Frozen that write-protects pages instead of copying them. Each page of data is in
// one of these states:
//
//	protected   its content is in RAM, and a write to it faults
//	saved       its content is in a slot of copies, and the guest may write to it
//	neither     it has been released
//
// lift clears the protected bit of a page, under mu, after it has lifted the protection. So a thread that finds
// the bit clear, with or without mu, may write. Pages outside data may be protected too, because they lie between
// others; they need no saving.
type protection struct {
	f *Frozen
	// active is set when pages have been write-protected.
	active    atomic.Bool
	protected []atomic.Uint64
	// areas are the pieces of RAM that are each registered in one mode. Before Linux 6.4 or so a call may not
	// cross their bounds.
	areas  []guestmem.Slot
	uffd   int // of the pager, or own
	own    bool
	stopFD int
	wg     sync.WaitGroup

	saved, waited atomic.Uint64

	mu   sync.Mutex
	cond *sync.Cond // a slot is free, or a page no longer protected
	// slotOf maps a saved page to its slot. free are slots that are free again. Slots from used on have never been
	// used.
	slotOf map[uint64]uint32
	free   []uint32
	used   uint32
	// pending are pages that the guest wants to write to but that found no slot. There are at most as many as
	// threads that touch guest memory.
	pending []uint64
	err     error
}

func (g *protection) init(f *Frozen) {
	g.f, g.uffd, g.stopFD = f, -1, -1
	g.cond = sync.NewCond(&g.mu)
}

// protectAll write-protects all pages of data.
func (f *Frozen) protectAll() error {
	g := &f.protection
	if err := g.register(); err != nil {
		return err
	}
	g.slotOf = make(map[uint64]uint32)
	g.protected = make([]atomic.Uint64, len(f.data.Words()))
	g.mu.Lock()
	defer g.mu.Unlock()
	g.active.Store(true)
	for first, end := range near(f.data, protectGap) {
		for page := first; page < end; page++ {
			w, m := bitOf(page)
			g.protected[w].Or(m)
		}
	}
	// After Quiesce all Go code asks before it writes, and earlier writes have ended.
	f.mem.Quiesce()
	for first, end := range near(f.data, protectGap) {
		err := pieces(g.areas, first, end, func(hva uintptr, _, n uint64) error { return protect(g.uffd, hva, n*pageSize) })
		if err != nil {
			return errors.Join(err, g.lift(0, f.data.Pages()))
		}
	}
	return nil
}

// register registers RAM for write protection. It uses the pager's userfaultfd if there is one, because memory can
// be registered with only one.
func (g *protection) register() (err error) {
	f := g.f
	if f.p != nil {
		g.uffd = f.p.uffd
		g.areas, err = f.p.registerProtection()
		return err
	}
	if g.uffd, err = openUserfaultfd(); err != nil {
		g.uffd = -1
		return err
	}
	g.own = true
	if g.stopFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		g.stopFD = -1
		return fmt.Errorf("eventfd: %w", err)
	}
	g.areas = f.mem.Areas()
	for _, a := range g.areas {
		if err := register(g.uffd, a.HVA, a.Size, registerWP); err != nil {
			return err
		}
	}
	g.wg.Go(func() {
		if err := readFaults(g.uffd, g.stopFD, g.fault); err != nil {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.fail(err)
		}
	})
	return nil
}

// registerProtection registers all of RAM for write protection, in addition to the ranges registered for missing
// pages. It returns the areas that are each registered in one mode.
func (p *Pager) registerProtection() ([]guestmem.Slot, error) {
	if p.protectable != nil {
		return p.protectable, nil
	}
	var areas []guestmem.Slot
	add := func(start, end, mode uint64) error {
		return pieces(p.slots, start/pageSize, end/pageSize, func(hva uintptr, page, n uint64) error {
			areas = append(areas, guestmem.Slot{HVA: hva, Offset: page * pageSize, Size: n * pageSize})
			return register(p.uffd, hva, n*pageSize, mode)
		})
	}
	at := uint64(0)
	for _, r := range p.registered {
		if err := add(at, r.start, registerWP); err != nil {
			return nil, err
		}
		if err := add(r.start, r.end, registerMissing|registerWP); err != nil {
			return nil, err
		}
		at = r.end
	}
	if err := add(at, p.mem.Size(), registerWP); err != nil {
		return nil, err
	}
	p.protectable = areas
	return areas, nil
}

// fault handles a message of the kernel if there is no pager.
func (g *protection) fault(b []byte) {
	hva := uintptr(binary.LittleEndian.Uint64(b[messageAddress:]))
	for _, s := range g.f.slots {
		if uint64(hva-s.HVA) < s.Size && !g.f.written((s.Offset+uint64(hva-s.HVA))/pageSize) {
			(&filler{fd: g.uffd}).wake(hva&^(pageSize-1), pageSize)
		}
	}
}

// written lets a thread continue that wants to write to a page. It does not wait: if there is no room to save the
// page, the thread sleeps until there is, or until the page has been released.
//
// It returns false if the page is no longer protected. The caller must then wake the threads that wait for it.
// Lifting the protection woke the threads that waited at that time. But a thread that found the page protected
// just before, and began to wait just after, still sleeps: the kernel checks whether the page is writable
// (userfaultfd_must_wait in fs/userfaultfd.c), and a page that must be copied first is not.
func (f *Frozen) written(page uint64) bool {
	g := &f.protection
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.active.Load() || !g.isProtected(page) {
		return false
	}
	if ok, err := g.vacate(page); err != nil {
		g.fail(err)
	} else if !ok && !slices.Contains(g.pending, page) {
		g.waited.Add(1)
		g.pending = append(g.pending, page)
	}
	return true
}

// BeforeWrite implements guestmem.Guard.
func (f *Frozen) BeforeWrite(gpa guestmem.GPA, n uint64) error {
	return f.protection.before(gpa, n)
}

// BeforeDiscard implements guestmem.Guard.
func (f *Frozen) BeforeDiscard(gpa guestmem.GPA, n uint64) {
	if err := f.protection.before(gpa, n); err != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.fail(err)
	}
}

// before returns when [gpa, gpa+n) is no longer protected. It may wait for pages to be read, which needs no lock
// of guestmem.Memory.
func (g *protection) before(gpa guestmem.GPA, n uint64) error {
	if !g.active.Load() || n == 0 {
		return nil
	}
	off, err := g.f.mem.Linear(gpa)
	if err != nil {
		return err
	}
	for page, last := off/pageSize, (off+n-1)/pageSize; page <= last; page++ {
		if g.protected[page/64].Load() == 0 {
			page |= 63
			continue
		}
		if !g.isProtected(page) {
			continue
		}
		if err := g.waitVacated(page); err != nil {
			return err
		}
	}
	return nil
}

func (g *protection) waitVacated(page uint64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for waited := false; g.isProtected(page); g.cond.Wait() {
		if ok, err := g.vacate(page); ok || err != nil {
			return err
		}
		if !waited {
			g.waited.Add(1)
			waited = true
		}
	}
	return nil
}

func (g *protection) isProtected(page uint64) bool {
	w, m := bitOf(page)
	return g.protected[w].Load()&m != 0
}

// vacate saves a protected page if necessary, and lifts its protection. It returns false if there is no room. mu
// is held.
func (g *protection) vacate(page uint64) (bool, error) {
	if _, done := g.slotOf[page]; !done && g.f.isLive(page) {
		var slot uint32
		switch k := len(g.free); {
		case k > 0:
			slot, g.free = g.free[k-1], g.free[:k-1]
		case uint64(g.used+1)*pageSize <= g.f.copies.size():
			slot = g.used
			g.used++
		default:
			return false, nil
		}
		// The page is present, and no Discard removes it while it is protected.
		if err := g.readRAM(page, g.f.copies.pages(uint64(slot), 1)); err != nil {
			return false, err
		}
		g.slotOf[page] = slot
		g.saved.Add(1)
	}
	return true, g.lift(page, page+1)
}

func (g *protection) readRAM(page uint64, b []byte) error {
	gpa, err := g.f.mem.FromLinear(page * pageSize)
	if err != nil {
		return err
	}
	return g.f.mem.CopyPresent(gpa, b)
}

// lift lifts the protection of the protected pages of [first, end), and wakes the threads that wait for them. mu
// is held.
func (g *protection) lift(first, end uint64) error {
	for first < end {
		w := g.protected[first/64].Load() >> (first % 64)
		if w == 0 {
			first = (first/64 + 1) * 64
			continue
		}
		first += trailingZeros(w)
		if first >= end {
			break
		}
		last := first + 1
		for last < end && g.isProtected(last) {
			last++
		}
		err := pieces(g.areas, first, last, func(hva uintptr, _, n uint64) error { return unprotect(g.uffd, hva, n*pageSize) })
		if err != nil {
			return err
		}
		for ; first < last; first++ {
			w, m := bitOf(first)
			g.protected[w].And(^m)
		}
	}
	g.cond.Broadcast()
	return nil
}

// fail makes every further read fail. mu is held.
func (g *protection) fail(err error) {
	if g.err == nil {
		g.err = fmt.Errorf("guarding frozen RAM: %w", err)
	}
}

// read copies a page that is protected or saved.
func (g *protection) read(page uint64, b []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return g.err
	}
	if !g.f.isLive(page) {
		return errReleased
	}
	if slot, ok := g.slotOf[page]; ok {
		copy(b, g.f.copies.pages(uint64(slot), 1))
		return nil
	}
	if !g.isProtected(page) {
		return errReleased
	}
	return g.readRAM(page, b)
}

// release frees the pages [first, end), and lets waiting threads continue.
func (g *protection) release(first, end uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for page := first; page < end; page++ {
		w, m := bitOf(page)
		if g.f.live[w].And(^m)&m == 0 {
			continue
		}
		if slot, ok := g.slotOf[page]; ok {
			delete(g.slotOf, page)
			g.free = append(g.free, slot)
		}
	}
	if err := g.lift(first, end); err != nil {
		g.fail(err)
		return
	}
	g.cond.Broadcast() // for slots
	for len(g.pending) > 0 {
		page := g.pending[0]
		if g.isProtected(page) {
			if ok, err := g.vacate(page); err != nil {
				g.fail(err)
				return
			} else if !ok {
				return
			}
		}
		g.pending = g.pending[1:]
	}
}

// close lifts all protection.
func (g *protection) close() error {
	var errs []error
	if g.active.Load() {
		g.mu.Lock()
		if len(g.f.mem.Slots()) > 0 { // or else the addresses are no longer ours
			errs = append(errs, g.lift(0, g.f.data.Pages()))
		}
		g.fail(ErrClosed)
		g.mu.Unlock()
	}
	if !g.own {
		return errors.Join(errs...)
	}
	if g.stopFD >= 0 {
		errs = append(errs, signalEvent(g.stopFD))
		g.wg.Wait()
		errs = append(errs, unix.Close(g.stopFD))
	}
	return errors.Join(append(errs, unix.Close(g.uffd))...)
}
