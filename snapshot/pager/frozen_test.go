package pager

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// frozenCase is RAM with content of every kind, and a view of it.
type frozenCase struct {
	mem *guestmem.Memory
	p   *Pager
	set *guestmem.PageSet
	// image is the content of RAM when it is frozen.
	image []byte
}

const frozenSize = 64 << 20

const dontWake = 1 << 1 // UFFDIO_WRITEPROTECT_MODE_DONTWAKE

func gpa(page uint64) guestmem.GPA { return guestmem.GPA(page * pageSize) }

// ramKind is the origin of RAM.
type ramKind string

const (
	booted ramKind = "booted"
	lazy   ramKind = "restored lazily"
	mapped ramKind = "mapped from an image"
)

// offHeap returns room for an image of RAM outside the heap: the race detector takes ten times as long to fill and
// to compare heap memory.
func offHeap(t *testing.T, size int) []byte {
	t.Helper()
	p, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(p); err != nil {
			t.Error(err)
		}
	})
	return p
}

// newFrozenCase makes RAM in which some pages of the set have never been touched, are zeros or were discarded.
// With a pager some have not been loaded.
func newFrozenCase(t *testing.T, kind ramKind) *frozenCase {
	t.Helper()
	c := &frozenCase{image: offHeap(t, frozenSize)}
	if kind != booted {
		for page := range uint64(frozenSize / pageSize) {
			expect(smallRAM, page, c.image[page*pageSize:][:pageSize])
		}
	}
	switch kind {
	case lazy:
		c.p, c.mem = restore(t, makeSnapshot(t, frozenSize, smallRAM), Options{})
	case mapped:
		c.mem = newMapped(t, c.image)
	default:
		c.mem = newMemory(t, frozenSize)
	}
	for page := uint64(0); page < 4000; page++ {
		if kind != booted && page%16 == 15 {
			continue // may stay unloaded
		}
		b := c.image[page*pageSize:][:pageSize]
		switch page % 4 {
		case 0:
			r := rand.New(rand.NewPCG(page, 9))
			for i := 0; i < len(b); i += 8 {
				binary.LittleEndian.PutUint64(b[i:], r.Uint64())
			}
		case 1:
			clear(b)
		case 2:
			copy(b[100:], fmt.Sprint("page ", page))
		default:
			continue
		}
		if err := c.mem.Write(gpa(page), b); err != nil {
			t.Fatal(err)
		}
	}
	const discarded = 40
	for page := uint64(800); page < 4000; page += 300 {
		clear(c.image[page*pageSize:][:discarded*pageSize])
		if err := c.mem.Discard(gpa(page), discarded*pageSize); err != nil {
			t.Fatal(err)
		}
	}
	c.set = guestmem.NewPageSet(frozenSize / pageSize)
	for page := range c.set.Pages() {
		if page < 4400 && page%50 != 7 || page > c.set.Pages()-3 {
			c.set.Add(page, page+1)
		}
	}
	return c
}

// newMapped returns RAM that is mapped from an image with the given content.
func newMapped(t *testing.T, content []byte) *guestmem.Memory {
	t.Helper()
	fd, err := unix.MemfdCreate("image", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "image")
	defer f.Close()
	err = f.Truncate(int64(len(content)))
	zero := make([]byte, pageSize)
	for at := 0; at < len(content) && err == nil; at += pageSize {
		if b := content[at:][:pageSize]; !bytes.Equal(b, zero) {
			_, err = f.WriteAt(b, int64(at))
		}
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, guestmem.ImageSeals)
	}
	if err != nil {
		t.Fatal(err)
	}
	mem, err := guestmem.NewPrivate(uint64(len(content)), f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	return mem
}

func (c *frozenCase) freeze(t *testing.T, o FreezeOptions) *Frozen {
	t.Helper()
	f, err := Prepare(c.mem, c.p, o)
	skipWithout(t, err)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	err = f.Freeze(c.set)
	skipWithout(t, err)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// read compares everything with the image, in pieces of up to 64 pages. Pages that are not data must have been
// zeros.
func (c *frozenCase) read(f *Frozen) error {
	seen := guestmem.NewPageSet(c.set.Pages())
	buf := make([]byte, 64*pageSize)
	for page := uint64(0); ; {
		first, end, err := f.NextData(page)
		if err != nil {
			return err
		}
		if first == end {
			break
		}
		end = min(end, first+64)
		b := buf[:(end-first)*pageSize]
		if err := f.ReadPages(first, b); err != nil {
			return err
		}
		for page = first; page < end; page, b = page+1, b[pageSize:] {
			if !c.set.Has(page) {
				return fmt.Errorf("page %d is not in the set and has data", page)
			}
			if !bytes.Equal(b[:pageSize], c.image[page*pageSize:][:pageSize]) {
				return fmt.Errorf("page %d is not as it was", page)
			}
		}
		seen.Add(first, end)
		f.Release(first, end)
	}
	for page := range c.set.Pages() {
		if c.set.Has(page) && !seen.Has(page) && !bytes.Equal(c.image[page*pageSize:][:pageSize], make([]byte, pageSize)) {
			return fmt.Errorf("page %d has content and is not among the data", page)
		}
	}
	return nil
}

// overwrite writes newContent(way) to every fourth page from page from on, in the given way.
func (c *frozenCase) overwrite(o *toucher, way uint64, from uint64) error {
	want := newContent(way)
	for page := from; page < 4400; page += 4 {
		var err error
		switch way {
		case 0:
			err = c.mem.Write(gpa(page), want)
		case 1:
			err = o.write(c.mem, gpa(page), want)
		case 2:
			err = c.mem.Zero(gpa(page), pageSize)
		case 3:
			err = c.mem.Discard(gpa(page), pageSize)
		}
		if err != nil {
			return fmt.Errorf("way %d, page %d: %w", way, page, err)
		}
	}
	return nil
}

func newContent(way uint64) []byte {
	if way >= 2 {
		return make([]byte, pageSize)
	}
	return bytes.Repeat([]byte{0xc0 + byte(way)}, pageSize)
}

func TestFrozen_pages_keep_their_content_and_writes_are_not_lost(t *testing.T) {
	for _, tc := range []struct {
		name string
		kind ramKind
		opts FreezeOptions
	}{
		{"copied", booted, FreezeOptions{Expect: 4400}},
		{"copied, restored lazily", lazy, FreezeOptions{Expect: 4400}},
		{"copied, mapped from an image", mapped, FreezeOptions{Expect: 4400}},
		{"protected for want of room", booted, FreezeOptions{Expect: 4400, CopyBytes: MinCopyBytes}},
		{"protected, more than expected", booted, FreezeOptions{}},
		{"protected, restored lazily", lazy, FreezeOptions{CopyBytes: MinCopyBytes}},
		{"protected, mapped from an image", mapped, FreezeOptions{CopyBytes: MinCopyBytes}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newFrozenCase(t, tc.kind)
			for round := range 2 {
				f := c.freeze(t, tc.opts)
				if got, want := f.Stats().Protected, tc.opts.Expect == 0 || tc.opts.CopyBytes != 0; got != want {
					t.Fatalf("protected: %v, want %v", got, want)
				}
				var wg sync.WaitGroup
				errs := make([]error, 5)
				for way := range uint64(4) {
					o := newToucher(t)
					wg.Go(func() { errs[way] = c.overwrite(o, (way+uint64(round))%4, way) })
				}
				wg.Go(func() { errs[4] = c.read(f) })
				wg.Wait()
				if err := errors.Join(append(errs, f.Close())...); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, pageSize)
				for page := range uint64(4400) {
					if err := c.mem.Read(gpa(page), got); err != nil {
						t.Fatal(err)
					}
					want := newContent((page + uint64(round)) % 4)
					if !bytes.Equal(got, want) {
						t.Fatalf("round %d: what was written to page %d while it was frozen is lost", round, page)
					}
					copy(c.image[page*pageSize:], want)
				}
			}
		})
	}
}

// A writer that is faster than the reader waits, so memory stays bounded.
func TestA_writer_waits_when_there_is_no_room_for_copies(t *testing.T) {
	const room = MinCopyBytes / pageSize
	for _, kind := range []ramKind{booted, lazy, mapped} {
		for _, end := range []string{"reading", "Close"} {
			for way, name := range []string{"Write", "system call", "Zero", "Discard"} {
				t.Run(fmt.Sprintf("%s, %s, until %s", name, kind, end), func(t *testing.T) {
					c := newFrozenCase(t, kind)
					f := c.freeze(t, FreezeOptions{CopyBytes: MinCopyBytes})
					o := newToucher(t)
					done := make(chan error, 1)
					go func() { done <- c.overwrite(o, uint64(way), 0) }()
					for deadline := time.Now().Add(time.Minute); f.Stats().Waited == 0; time.Sleep(time.Millisecond) {
						select {
						case err := <-done:
							t.Fatalf("it did not wait: %v, %+v", err, f.Stats())
						default:
						}
						if time.Now().After(deadline) {
							t.Fatal("nothing happens")
						}
					}
					if st := f.Stats(); st.Saved != room {
						t.Errorf("%d copies, there is room for %d", st.Saved, room)
					}
					var err error
					if end == "Close" {
						err = f.Close()
					} else {
						err = c.read(f)
					}
					if err := errors.Join(err, <-done); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
	}
}

func TestFrozen_refuses_what_is_out_of_order(t *testing.T) {
	c := newFrozenCase(t, lazy)
	f, err := Prepare(c.mem, c.p, FreezeOptions{CopyBytes: MinCopyBytes})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.NextData(0); err == nil {
		t.Error("data before Freeze")
	}
	f.Release(0, 10)
	if _, err := Prepare(c.mem, c.p, FreezeOptions{}); !errors.Is(err, ErrBusy) {
		t.Errorf("a second view: got %v, want ErrBusy", err)
	}
	if err := f.Freeze(guestmem.NewPageSet(5)); !errors.Is(err, ErrLayout) {
		t.Errorf("a set for other RAM: got %v, want ErrLayout", err)
	}
	if err := f.Freeze(c.set); err != nil {
		t.Fatal(err)
	}
	if err := f.Freeze(c.set); !errors.Is(err, ErrBusy) {
		t.Errorf("freezing twice: got %v, want ErrBusy", err)
	}
	b := make([]byte, pageSize)
	first, _, err := f.NextData(0)
	if err != nil {
		t.Fatal(err)
	}
	f.Release(first, first+1)
	f.Release(first, first+1)
	f.Release(1<<40, 1<<41)
	if err := f.ReadPages(first, b); err == nil {
		t.Error("a page that was released can be read")
	}
	if got := f.Slots(); !slices.Equal(got, c.p.snap.Slots()) {
		t.Errorf("slots %v", got)
	}
	// The pager closes its view too.
	if err := c.p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.ReadPages(first+1, b); !errors.Is(err, ErrClosed) {
		t.Errorf("reading after Close: got %v, want ErrClosed", err)
	}
	if err := errors.Join(f.Close(), f.Close()); err != nil {
		t.Error(err)
	}
	if _, err := Prepare(c.mem, c.p, FreezeOptions{}); !errors.Is(err, ErrClosed) {
		t.Errorf("with a closed pager: got %v, want ErrClosed", err)
	}
}

// A capture may be given up half-way, by the reader or by any other party.
func TestClose_in_the_midst_of_reading_and_writing(t *testing.T) {
	for _, o := range []FreezeOptions{{Expect: 4400}, {CopyBytes: MinCopyBytes}} {
		c := newFrozenCase(t, lazy)
		f := c.freeze(t, o)
		var wg sync.WaitGroup
		began := make(chan struct{})
		errs := make([]error, 4)
		for way := range uint64(4) {
			tool := newToucher(t)
			wg.Go(func() { errs[way] = c.overwrite(tool, way, way) })
		}
		for range 2 {
			wg.Go(func() {
				b := make([]byte, 16*pageSize)
				for page := uint64(0); page < 4000; page += 16 {
					if err := f.ReadPages(page, b); errors.Is(err, ErrClosed) {
						return
					} else if err != nil && !errors.Is(err, errReleased) {
						t.Error(err)
					}
					f.Release(page, page+8)
					if page == 160 {
						began <- struct{}{}
					}
				}
			})
		}
		<-began
		<-began
		for range 2 {
			wg.Go(func() {
				if err := f.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
		for way := range uint64(4) {
			got := make([]byte, pageSize)
			if err := c.mem.Read(gpa(4000+way), got); err != nil || !bytes.Equal(got, newContent(way)) {
				t.Errorf("what was written in way %d is lost (%v)", way, err)
			}
		}
	}
}

// Untouched pages are loaded together with others. These may be anywhere in the same chunk, and another goroutine
// may load them at the same moment.
func TestFreezing_all_of_a_lazily_restored_guest_misses_nothing(t *testing.T) {
	for _, loading := range []bool{false, true} {
		c := &frozenCase{image: offHeap(t, frozenSize), set: guestmem.NewPageSet(frozenSize / pageSize)}
		for page := range uint64(frozenSize / pageSize) {
			expect(smallRAM, page, c.image[page*pageSize:][:pageSize])
		}
		c.set.Add(0, c.set.Pages())
		c.p, c.mem = restore(t, makeSnapshot(t, frozenSize, smallRAM), Options{})
		loaded := make(chan error, 1)
		if loading {
			go func() { loaded <- c.p.Load(t.Context()) }()
		} else {
			loaded <- nil
		}
		f := c.freeze(t, FreezeOptions{CopyBytes: MinCopyBytes})
		if err := errors.Join(c.read(f), f.Close(), <-loaded); err != nil {
			t.Errorf("being loaded meanwhile: %v: %v", loading, err)
		}
	}
}

// A thread may find a page protected and ask for it after the protection was lifted for another thread, which has
// not woken it. The kernel lets the thread sleep while the page is not writable. Lifting the protection does not
// make it writable.
func TestA_writer_that_asks_after_the_protection_was_lifted_is_woken(t *testing.T) {
	for _, kind := range []ramKind{booted, lazy, mapped} {
		for _, closed := range []bool{false, true} {
			if closed && kind != lazy {
				continue // closing a userfaultfd wakes all waiters
			}
			t.Run(fmt.Sprintf("%s, view closed: %v", kind, closed), func(t *testing.T) {
				c := newFrozenCase(t, kind)
				for page := uint64(0); page < 40; page += 4 {
					f := c.freeze(t, FreezeOptions{CopyBytes: MinCopyBytes})
					o := newToucher(t)
					// The handler that reads the message of the fault waits for this lock.
					f.mu.Lock()
					done := make(chan error, 1)
					go func() { done <- o.write(c.mem, gpa(page), newContent(0)) }()
					time.Sleep(5 * time.Millisecond) // by now the thread has most likely asked
					err := pieces(f.areas, page, page+1, func(hva uintptr, _, n uint64) error {
						return writeProtect(f.uffd, hva, n*pageSize, dontWake)
					})
					w, m := bitOf(page)
					f.protected[w].And(^m)
					if closed {
						f.p.frozen.Store(nil)
					}
					f.mu.Unlock()
					if err != nil {
						t.Fatal(err)
					}
					if err := <-done; err != nil {
						t.Fatal(err)
					}
					if err := f.Close(); err != nil {
						t.Fatal(err)
					}
				}
			})
		}
	}
}
