package pager

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/test/racetest"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) {
	if code, ok := childMain(); ok {
		os.Exit(code)
	}
	goleak.VerifyTestMain(m)
}

// content fills a page with what the tests store in it: zeros if page%7 is 3, otherwise noise in every third page
// and data that compresses in the rest.
func content(page uint64, p []byte) {
	clear(p)
	if page%7 == 3 {
		return
	}
	r := rand.New(rand.NewPCG(page, 1))
	for i := 0; i < len(p); i += 8 {
		if page%3 == 0 {
			binary.LittleEndian.PutUint64(p[i:], r.Uint64())
		} else if i%16 == 0 {
			p[i] = byte(r.Uint32())
		}
	}
	p[0] = 1
}

// A part is a range of pages that have content.
type part struct{ first, end uint64 }

var smallRAM = []part{{0, 3000}, {8 * chunkPages, 8*chunkPages + 20}}

func expect(parts []part, page uint64, p []byte) {
	for _, r := range parts {
		if page >= r.first && page < r.end {
			content(page, p)
			return
		}
	}
	clear(p)
}

func newMemory(t testing.TB, size uint64) *guestmem.Memory {
	t.Helper()
	mem, err := guestmem.New(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	return mem
}

func gpaOf(t testing.TB, mem *guestmem.Memory, page uint64) guestmem.GPA {
	t.Helper()
	gpa, err := mem.FromLinear(page * pageSize)
	if err != nil {
		t.Fatal(err)
	}
	return gpa
}

// makeSnapshot writes a snapshot of size bytes of RAM with content in parts.
func makeSnapshot(t testing.TB, size uint64, parts []part) string {
	t.Helper()
	mem := newMemory(t, size)
	buf := make([]byte, pageSize)
	for _, r := range parts {
		for page := r.first; page < r.end; page++ {
			content(page, buf)
			if err := mem.Write(gpaOf(t, mem, page), buf); err != nil {
				t.Fatal(err)
			}
		}
	}
	src, err := snapshot.NewGuestSource(mem)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	return create(t, src)
}

func create(t testing.TB, src snapshot.MemorySource) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "snap")
	if _, err := snapshot.Create(context.Background(), dir, snapshot.Spec{VCPUs: 1, Memory: src}); err != nil {
		t.Fatal(err)
	}
	return dir
}

func openSnapshot(t testing.TB, dir string) *snapshot.Snapshot {
	t.Helper()
	s, err := snapshot.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func newPagerFor(t testing.TB, s *snapshot.Snapshot, opts Options) (*Pager, *guestmem.Memory) {
	t.Helper()
	mem := newMemory(t, s.Manifest().RAM())
	p, err := New(mem, s.Memory(), opts)
	skipWithout(t, err)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p, mem
}

func skipWithout(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, ErrNotPermitted) || errors.Is(err, ErrNotSupported) {
		t.Skipf("this host cannot restore lazily: %v", err)
	}
}

func restore(t testing.TB, dir string, opts Options) (*Pager, *guestmem.Memory) {
	t.Helper()
	p, mem := newPagerFor(t, openSnapshot(t, dir), opts)
	p.Start()
	go p.LoadWorkingSet()
	return p, mem
}

// toucher touches pages as the system calls of a device do: the kernel takes the fault, and no code has called
// Ensure.
type toucher struct{ f *os.File }

func newToucher(t testing.TB) *toucher {
	t.Helper()
	fd, err := unix.MemfdCreate("toucher", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "toucher")
	t.Cleanup(func() { f.Close() })
	return &toucher{f}
}

func (o *toucher) read(mem *guestmem.Memory, gpa guestmem.GPA, p []byte) error {
	if err := mem.DrainTo(gpa, len(p), o.f, 0); err != nil {
		return err
	}
	_, err := o.f.ReadAt(p, 0)
	return err
}

func (o *toucher) write(mem *guestmem.Memory, gpa guestmem.GPA, p []byte) error {
	if _, err := o.f.WriteAt(p, 0); err != nil {
		return err
	}
	return mem.FillFrom(gpa, len(p), o.f, 0)
}

func within(t testing.TB, limit time.Duration, what string, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(limit):
		t.Fatalf("%s: nothing happened for %v", what, limit)
		return nil
	}
}

func TestEvery_way_of_touching_a_page_gives_the_snapshots_content(t *testing.T) {
	const size = 64 << 20
	dir := makeSnapshot(t, size, smallRAM)
	p, mem := restore(t, dir, Options{WorkingSet: []uint64{2000, 100, 1 << 40, 2999}})
	var wg sync.WaitGroup
	check := func(name string, read func(guestmem.GPA, []byte) error) {
		seed := rand.Uint64()
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, 0))
			want := make([]byte, pageSize)
			for range 4000 {
				page := r.Uint64N(3500)
				if r.Uint32N(10) == 0 {
					page = 8*chunkPages - 30 + r.Uint64N(100)
				}
				n := 1 + r.Uint64N(3)
				got := make([]byte, n*pageSize)
				if err := read(guestmem.GPA(page*pageSize), got); err != nil {
					t.Errorf("%s of page %d: %v", name, page, err)
					return
				}
				for i := range n {
					expect(smallRAM, page+i, want)
					if !bytes.Equal(got[i*pageSize:(i+1)*pageSize], want) {
						t.Errorf("%s: page %d is not what was stored", name, page+i)
						return
					}
				}
			}
		})
	}
	for range 2 {
		check("Read", mem.Read)
		o := newToucher(t)
		check("system call", func(gpa guestmem.GPA, b []byte) error { return o.read(mem, gpa, b) })
	}
	wg.Go(func() {
		if err := p.Load(context.Background()); err != nil {
			t.Errorf("Load: %v", err)
		}
	})
	wg.Wait()
	st := p.Stats()
	t.Logf("%d read faults, %d write faults", st.ReadFaults.Load(), st.WriteFaults.Load())
	want := make([]byte, pageSize)
	stored := uint64(0)
	for _, r := range smallRAM {
		for page := r.first; page < r.end; page++ {
			if content(page, want); want[0] != 0 {
				stored++
			}
		}
	}
	if st.PagesCopied.Load() != stored {
		t.Errorf("%d pages copied, want each of %d once", st.PagesCopied.Load(), stored)
	}
}

func TestWrites_stay_and_neighbours_of_the_frame_do_not_come_back(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	_, mem := restore(t, dir, Options{})
	o := newToucher(t)
	mine := bytes.Repeat([]byte{0xee}, 2*pageSize)
	for page := uint64(0); page < 3000; page += 5 {
		gpa := guestmem.GPA(page*pageSize + 100)
		var err error
		if page%2 == 0 {
			err = mem.Write(gpa, mine[:pageSize])
		} else {
			err = o.write(mem, gpa, mine[:pageSize])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	got, want := make([]byte, 5*pageSize), make([]byte, 5*pageSize)
	for page := uint64(0); page < 3000; page += 5 {
		for i := range uint64(5) {
			expect(smallRAM, page+i, want[i*pageSize:(i+1)*pageSize])
		}
		copy(want[100:], mine[:pageSize])
		if err := mem.Read(guestmem.GPA(page*pageSize), got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("pages %d to %d are wrong", page, page+4)
		}
	}
}

// Pages are evicted again and again while they are loaded ahead. All that was written stays, and all else comes back.
func TestEvicted_pages_come_back_while_others_are_loaded(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	p, mem := restore(t, dir, Options{})
	o := newToucher(t)
	changed := guestmem.NewPageSet(mem.Size() / pageSize) // as KVM's log would say
	mine := map[uint64][]byte{}
	for page := uint64(0); page < 3000; page += 7 {
		b := bytes.Repeat([]byte{byte(page) | 1}, pageSize)
		gpa := guestmem.GPA(page * pageSize)
		var err error
		switch page % 3 {
		case 0:
			err = mem.Write(gpa, b)
		case 1:
			err = o.write(mem, gpa, b)
		case 2:
			b = make([]byte, pageSize)
			err = mem.Discard(gpa, pageSize)
		}
		if err != nil {
			t.Fatal(err)
		}
		changed.Add(page, page+1)
		mine[page] = b
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	pages := make([]uint64, 3000)
	for i := range pages {
		pages[i] = uint64(i)
	}
	for range 2 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if err := p.Prefetch(ctx, pages); err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	got, want := make([]byte, pageSize), make([]byte, pageSize)
	evicted := uint64(0)
	for round := range 40 {
		n, err := mem.Evict(changed)
		if err != nil {
			t.Fatal(err)
		}
		evicted += n
		for page := uint64(round % 5); page < 3000; page += 5 {
			read := mem.Read
			if round%2 == 0 {
				read = func(gpa guestmem.GPA, b []byte) error { return o.read(mem, gpa, b) }
			}
			if err := read(guestmem.GPA(page*pageSize), got); err != nil {
				t.Fatal(err)
			}
			if expect(smallRAM, page, want); mine[page] != nil {
				copy(want, mine[page])
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("round %d: page %d is wrong", round, page)
			}
		}
	}
	stop()
	wg.Wait()
	if evicted < 10000 || p.Stats().Evicted.Load() != evicted {
		t.Errorf("%d pages were evicted, %d counted: that shows little", evicted, p.Stats().Evicted.Load())
	}
	before := committed(t, mem)
	if n, err := mem.Evict(changed); err != nil || committed(t, mem)+n != before {
		t.Errorf("%d of %d committed pages were evicted (%v), and %d are left", n, before, err, committed(t, mem))
	}
	// Once all is loaded, the snapshot may go.
	if err := p.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n, err := mem.Evict(changed); n != 0 || err != nil {
		t.Errorf("after Load %d pages were evicted: %v", n, err)
	}
}

// The test discards pages while others touch them in every way. After Discard has returned, a reader sees zeros.
// Before that, it sees the snapshot's content or zeros, and nothing in between.
func TestDiscarded_pages_are_zero_for_ever(t *testing.T) {
	const pages = 2048
	parts := []part{{0, pages}}
	dir := makeSnapshot(t, 64<<20, parts)
	p, mem := restore(t, dir, Options{})
	var gone [pages]atomic.Bool
	var stop atomic.Bool
	var wg sync.WaitGroup
	look := func(name string, read func(guestmem.GPA, []byte) error) {
		wg.Go(func() {
			got, want, zero := make([]byte, pageSize), make([]byte, pageSize), make([]byte, pageSize)
			for !stop.Load() {
				page := rand.Uint64N(pages)
				wasGone := gone[page].Load()
				if err := read(guestmem.GPA(page*pageSize), got); err != nil {
					t.Errorf("%s of page %d: %v", name, page, err)
					return
				}
				content(page, want)
				switch {
				case wasGone && !bytes.Equal(got, zero):
					t.Errorf("%s: page %d has old content after it was discarded", name, page)
					return
				case name == "Read" && !bytes.Equal(got, zero) && !bytes.Equal(got, want):
					t.Errorf("%s: page %d is neither what was stored nor zeros", name, page)
					return
				}
			}
		})
	}
	for range 2 {
		look("Read", mem.Read)
		o := newToucher(t)
		look("system call", func(gpa guestmem.GPA, b []byte) error { return o.read(mem, gpa, b) })
	}
	wg.Go(func() {
		for !stop.Load() {
			if err := p.Prefetch(context.Background(), somePages(pages)); err != nil {
				t.Errorf("Prefetch: %v", err)
				return
			}
		}
	})
	for i, page := range rand.Perm(pages) {
		n := uint64(1 + i%3)
		if page+int(n) > pages {
			n = 1
		}
		if err := mem.Discard(guestmem.GPA(page*pageSize), n*pageSize); err != nil {
			t.Fatal(err)
		}
		for k := range n {
			gone[page+int(k)].Store(true)
		}
	}
	time.Sleep(50 * time.Millisecond)
	stop.Store(true)
	wg.Wait()
}

// damage changes the byte of the memory file at off.
func damage(t testing.TB, dir string, off int64) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, snapshot.MemoryName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], off); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x10
	if _, err := f.WriteAt(b[:], off); err != nil {
		t.Fatal(err)
	}
}

func TestA_bad_frame_stops_everybody_and_feeds_nobody(t *testing.T) {
	for _, tc := range []struct {
		name string
		harm func(t *testing.T, dir string)
		want error
	}{
		{"flipped bit", func(t *testing.T, dir string) { damage(t, dir, 70) }, snapshot.ErrCorrupt},
		{"file cut short while open", func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, snapshot.MemoryName), 64); err != nil {
				t.Fatal(err)
			}
		}, snapshot.ErrIncomplete},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := makeSnapshot(t, 64<<20, smallRAM)
			s := openSnapshot(t, dir)
			tc.harm(t, dir)
			var calls atomic.Int32
			failed := make(chan error, 2)
			p, mem := newPagerFor(t, s, Options{OnFailure: func(err error) {
				calls.Add(1)
				failed <- err
			}})
			p.Start()
			o := newToucher(t)
			buf := make([]byte, pageSize)
			err := within(t, time.Second, "reading a bad page in a system call", func() error { return o.read(mem, 0, buf) })
			if !errors.Is(err, unix.EFAULT) {
				t.Errorf("system call on a bad page: got %v, want EFAULT", err)
			}
			select {
			case err := <-failed:
				if !errors.Is(err, tc.want) {
					t.Errorf("OnFailure(%v), want %v", err, tc.want)
				}
			case <-time.After(time.Second):
				t.Error("OnFailure was not called within a second")
			}
			if err := mem.Read(0, buf); !errors.Is(err, tc.want) {
				t.Errorf("Read of a bad page: got %v, want %v", err, tc.want)
			}
			// All other pages fail as well.
			err = within(t, time.Second, "writing another page", func() error { return o.write(mem, 2000*pageSize, buf) })
			if !errors.Is(err, unix.EFAULT) {
				t.Errorf("system call on another page: got %v, want EFAULT", err)
			}
			if err := p.Load(context.Background()); !errors.Is(err, tc.want) {
				t.Errorf("Load: got %v, want %v", err, tc.want)
			}
			if err := within(t, time.Second, "Close", p.Close); err != nil {
				t.Error(err)
			}
			if n := calls.Load(); n != 1 {
				t.Errorf("OnFailure was called %d times", n)
			}
		})
	}
}

func TestClose_frees_those_who_wait_and_feeds_them_nothing(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	p, mem := newPagerFor(t, openSnapshot(t, dir), Options{})
	// The pager is not started, so nothing answers.
	const waiters = 4
	errs := make(chan error, waiters)
	for i := range waiters {
		o := newToucher(t)
		go func() { errs <- o.read(mem, guestmem.GPA(i*100*pageSize), make([]byte, pageSize)) }()
	}
	time.Sleep(100 * time.Millisecond)
	if err := within(t, time.Second, "Close", p.Close); err != nil {
		t.Fatal(err)
	}
	for range waiters {
		err := within(t, time.Second, "a system call that waited for a page", func() error { return <-errs })
		if !errors.Is(err, unix.EFAULT) {
			t.Errorf("it got %v, want EFAULT", err)
		}
	}
	if err := mem.Read(0, make([]byte, 1)); !errors.Is(err, ErrClosed) {
		t.Errorf("Read after Close: got %v, want ErrClosed", err)
	}
	if err := p.Prefetch(context.Background(), []uint64{1}); !errors.Is(err, ErrClosed) {
		t.Errorf("Prefetch after Close: got %v, want ErrClosed", err)
	}
	if err := p.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestAfter_load_the_pager_can_be_closed_while_memory_is_in_use(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	s := openSnapshot(t, dir)
	p, mem := newPagerFor(t, s, Options{})
	p.Start()
	if err := p.Load(context.Background()); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	for i := range 2 {
		o := newToucher(t)
		wg.Go(func() {
			got, want := make([]byte, pageSize), make([]byte, pageSize)
			for n := 0; !stop.Load() || n < 100; n++ {
				page := rand.Uint64N(16384)
				read := mem.Read
				if i == 0 {
					read = func(gpa guestmem.GPA, b []byte) error { return o.read(mem, gpa, b) }
				}
				if err := read(guestmem.GPA(page*pageSize), got); err != nil {
					t.Errorf("page %d: %v", page, err)
					return
				}
				expect(smallRAM, page, want)
				if !bytes.Equal(got, want) {
					t.Errorf("page %d is not what was stored", page)
					return
				}
			}
		})
	}
	time.Sleep(10 * time.Millisecond)
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	stop.Store(true)
	wg.Wait()
}

func TestThe_recorded_working_set_spares_the_next_resume_its_faults(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	touch := func(mem *guestmem.Memory) {
		o := newToucher(t)
		for _, page := range rand.Perm(60) {
			if err := o.read(mem, guestmem.GPA(page*50*pageSize), make([]byte, 10)); err != nil {
				t.Fatal(err)
			}
		}
	}
	p, mem := restore(t, dir, Options{})
	touch(mem)
	set, _ := p.WorkingSet()
	first := p.Stats()
	if len(set) == 0 || uint64(len(set)) > first.ReadFaults.Load() {
		t.Fatalf("%d pages recorded of %d faults", len(set), first.ReadFaults.Load())
	}
	p2, mem2 := newPagerFor(t, openSnapshot(t, dir), Options{})
	if err := p2.Prefetch(context.Background(), set); err != nil {
		t.Fatal(err)
	}
	p2.Start()
	touch(mem2)
	second := p2.Stats()
	t.Logf("%d faults, then %d; %d pages recorded", first.ReadFaults.Load(), second.ReadFaults.Load(), len(set))
	if second.ReadFaults.Load() != 0 {
		t.Errorf("%d faults in spite of the working set", second.ReadFaults.Load())
	}
	p3, mem3 := restore(t, dir, Options{RecordPages: 5})
	touch(mem3)
	if pages, _ := p3.WorkingSet(); len(pages) != 5 {
		t.Errorf("%d pages recorded, the bound is 5", len(pages))
	}
	p4, mem4 := restore(t, dir, Options{RecordTime: -1})
	touch(mem4)
	if pages, _ := p4.WorkingSet(); len(pages) != 0 {
		t.Errorf("%d pages recorded, want none", len(pages))
	}
	// The next list has what was replayed, unless new pages need the room.
	p5, mem5 := newPagerFor(t, openSnapshot(t, dir), Options{WorkingSet: []uint64{0, 1 << 50, 100, 2990}, RecordPages: 3})
	for _, page := range []uint64{2000, 100} {
		if err := mem5.Read(guestmem.GPA(page*pageSize), make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	if got, hot := p5.WorkingSet(); hot != 0 || !slices.Equal(got, []uint64{0, 2000, 100}) {
		t.Errorf("working set %v, %d of them hot", got, hot)
	}
	// Pages that were waited for before the guest was ready come first.
	p6, mem6 := newPagerFor(t, openSnapshot(t, dir), Options{WorkingSet: []uint64{0, 100, 2990}, Hot: 2, RecordPages: 5})
	for i, page := range []uint64{2000, 100, 1000} {
		if i == 2 {
			p6.Ready()
		}
		if err := mem6.Read(guestmem.GPA(page*pageSize), make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	if got, hot := p6.WorkingSet(); hot != 3 || !slices.Equal(got, []uint64{2000, 100, 0, 2990, 1000}) {
		t.Errorf("working set %v, %d of them hot", got, hot)
	}
}

// With its frame a page would bring others, and the next resume would not know that the guest needs these.
func TestA_page_comes_alone_before_Ready_and_with_its_frame_after_it(t *testing.T) {
	p, mem := newPagerFor(t, openSnapshot(t, makeSnapshot(t, 64<<20, smallRAM)), Options{WorkingSet: []uint64{100}, Hot: 1})
	for _, step := range []struct {
		page uint64
		what string
		want func(copied uint64) bool
	}{
		{2000, "the first page", func(n uint64) bool { return n == 1 }},
		{2001, "its neighbour", func(n uint64) bool { return n == 1 }},
		{2002, "another neighbour, after Ready", func(n uint64) bool { return n > 1 }},
	} {
		if step.page == 2002 {
			p.Ready()
		}
		before := p.Stats().PagesCopied.Load()
		if err := mem.Read(guestmem.GPA(step.page*pageSize), make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if n := p.Stats().PagesCopied.Load() - before; !step.want(n) {
			t.Errorf("%s: %d pages copied", step.what, n)
		}
	}
	if pages, hot := p.WorkingSet(); hot != 3 || !slices.Equal(pages, []uint64{2000, 2001, 100, 2002}) {
		t.Errorf("working set %v, %d of them hot", pages, hot)
	}
}

func TestNeighbours_that_come_alone_are_decompressed_once(t *testing.T) {
	p, mem := restore(t, makeSnapshot(t, 64<<20, smallRAM), Options{Handlers: 1})
	o := newToucher(t)
	for page := range uint64(2) {
		if err := o.read(mem, guestmem.GPA((2000+page)*pageSize), make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	if pages, frames := p.Stats().PagesCopied.Load(), p.Stats().Frames.Load(); pages != 2 || frames != 1 {
		t.Errorf("%d pages copied of %d frames, want 2 of 1", pages, frames)
	}
}

func TestThe_first_resume_fills_each_page_alone_and_the_next_one_loads_only_these(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	want := []uint64{2000, 2001, 2007, 1000}
	p, mem := newPagerFor(t, openSnapshot(t, dir), Options{})
	for i, page := range want {
		if i == 1 {
			p.Ready()
		}
		if err := mem.Read(guestmem.GPA(page*pageSize), make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	if n := p.Stats().PagesCopied.Load(); n != 4 {
		t.Errorf("%d pages copied, want 4", n)
	}
	pages, hot := p.WorkingSet()
	if hot != 1 || !slices.Equal(pages, want) {
		t.Fatalf("working set %v, %d of them hot", pages, hot)
	}
	p2, mem2 := newPagerFor(t, openSnapshot(t, dir), Options{WorkingSet: pages, Hot: hot})
	p2.LoadWorkingSet()
	if n := p2.Stats().PagesCopied.Load(); n != 4 {
		t.Errorf("%d pages loaded ahead, want 4", n)
	}
	p2.Ready()
	for _, page := range append(want, 2002, 3000) {
		if err := mem2.Read(guestmem.GPA(page*pageSize), make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	if n := p2.Stats().Ensured.Load(); n != 2 {
		t.Errorf("%d pages were waited for, want the two that are new", n)
	}
}

func committed(t testing.TB, mem *guestmem.Memory) uint64 {
	t.Helper()
	pm, err := snapshot.OpenPagemap()
	if err != nil {
		t.Fatal(err)
	}
	defer pm.Close()
	var n uint64
	for page := uint64(0); ; {
		first, end, err := pm.NextData(mem.Slots(), page)
		if err != nil {
			t.Fatal(err)
		}
		if first == end {
			return n
		}
		n, page = n+end-first, end
	}
}

// tellsZeros reports whether the kernel has a page of zeros and tells it from committed pages. The latter takes
// PAGEMAP_SCAN (Linux 6.7).
func tellsZeros(t testing.TB) bool {
	t.Helper()
	mem := newMemory(t, guestmem.MinSize)
	if err := mem.Read(0, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return committed(t, mem) == 0
}

func TestA_snapshot_of_a_lazy_machine_does_not_load_it(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	p, mem := restore(t, dir, Options{})
	mine := bytes.Repeat([]byte{7}, pageSize)
	changed := map[uint64][]byte{}
	for _, page := range []uint64{5, 700, 3000, 5000, 8*chunkPages + 19, 16383} {
		if err := mem.Write(gpaOf(t, mem, page), mine); err != nil {
			t.Fatal(err)
		}
		changed[page] = mine
	}
	for _, page := range []uint64{6, 1500, 1501, 9000} {
		if err := mem.Discard(gpaOf(t, mem, page), pageSize); err != nil {
			t.Fatal(err)
		}
		changed[page] = make([]byte, pageSize)
	}
	// A page that was given away is used again.
	o := newToucher(t)
	if err := mem.Discard(gpaOf(t, mem, 1600), pageSize); err != nil {
		t.Fatal(err)
	}
	if err := o.write(mem, gpaOf(t, mem, 1600), mine); err != nil {
		t.Fatal(err)
	}
	changed[1600] = mine

	before := committed(t, mem)
	src, err := p.Source()
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dir2 := create(t, src)
	if after := committed(t, mem); after != before {
		t.Errorf("%d pages were committed before the snapshot, %d after it", before, after)
	}
	s2 := openSnapshot(t, dir2)
	if err := s2.Verify(context.Background()); err != nil {
		t.Fatal(err)
	}
	d, err := snapshot.NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	got, want := make([]byte, pageSize), make([]byte, pageSize)
	for page := uint64(0); page < s2.Memory().Pages(); page++ {
		if err := s2.Memory().ReadPage(page, got, d); err != nil {
			t.Fatal(err)
		}
		if c, ok := changed[page]; ok {
			copy(want, c)
		} else {
			expect(smallRAM, page, want)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("page %d of the second snapshot is wrong", page)
		}
	}
}

func TestA_snapshot_while_everything_is_being_loaded_misses_nothing(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	p, _ := restore(t, dir, Options{})
	src, err := p.Source()
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	s2 := openSnapshot(t, create(t, &loadingSource{Source: src, t: t}))
	d, err := snapshot.NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	got, want := make([]byte, pageSize), make([]byte, pageSize)
	for page := uint64(0); page < 9*chunkPages; page++ {
		if err := s2.Memory().ReadPage(page, got, d); err != nil {
			t.Fatal(err)
		}
		if expect(smallRAM, page, want); !bytes.Equal(got, want) {
			t.Fatalf("page %d of the second snapshot is wrong", page)
		}
	}
}

// loadingSource loads everything after the first question, which is the worst moment.
type loadingSource struct {
	*Source
	t    *testing.T
	once sync.Once
}

func (s *loadingSource) NextData(page uint64) (uint64, uint64, error) {
	first, end, err := s.Source.NextData(page)
	s.once.Do(func() {
		if err := s.p.Load(context.Background()); err != nil {
			s.t.Error(err)
		}
	})
	return first, end, err
}

func TestRAM_of_another_layout_is_refused(t *testing.T) {
	s := openSnapshot(t, makeSnapshot(t, 64<<20, smallRAM))
	mem := newMemory(t, 128<<20)
	if _, err := New(mem, s.Memory(), Options{}); !errors.Is(err, ErrLayout) {
		t.Errorf("got %v, want ErrLayout", err)
	}
}

func TestRAM_that_was_in_use_before_is_noticed(t *testing.T) {
	s := openSnapshot(t, makeSnapshot(t, 64<<20, smallRAM))
	mem := newMemory(t, 64<<20)
	if err := mem.Write(0, []byte{9}); err != nil {
		t.Fatal(err)
	}
	p, err := New(mem, s.Memory(), Options{Hot: 1})
	skipWithout(t, err)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	p.Start()
	p.Ready() // page 1 comes with the rest of its frame
	if err := mem.Read(pageSize, make([]byte, 1)); !errors.Is(err, ErrNotFresh) {
		t.Errorf("got %v, want ErrNotFresh", err)
	}
}

func somePages(below uint64) []uint64 {
	out := make([]uint64, 64)
	for i := range out {
		out[i] = rand.Uint64N(below)
	}
	return out
}

// The signals that the Go runtime sends do not interrupt a system call that waits for a page. It does not fail
// with EFAULT and does not transfer less.
func TestA_signal_to_a_waiting_system_call_does_no_harm(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	for _, name := range []string{"read", "write"} {
		t.Run(name, func(t *testing.T) {
			p, mem := newPagerFor(t, openSnapshot(t, dir), Options{})
			o := newToucher(t)
			got := make([]byte, 3*pageSize)
			tid, done := make(chan int, 1), make(chan error, 1)
			go func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				tid <- unix.Gettid()
				if name == "read" {
					done <- o.read(mem, 100, got)
				} else {
					done <- o.write(mem, 100, got)
				}
			}()
			id := <-tid
			time.Sleep(50 * time.Millisecond)
			for range 5 {
				if err := unix.Tgkill(os.Getpid(), id, unix.SIGURG); err != nil {
					t.Fatal(err)
				}
				select {
				case err := <-done:
					t.Fatalf("the system call ended without its page: %v", err)
				case <-time.After(20 * time.Millisecond):
				}
			}
			p.Start()
			if err := within(t, time.Second, name, func() error { return <-done }); err != nil {
				t.Fatal(err)
			}
			if err := mem.Read(100, got); err != nil {
				t.Fatal(err)
			}
			want := make([]byte, 4*pageSize)
			if name == "read" {
				for i := range uint64(4) {
					expect(smallRAM, i, want[i*pageSize:(i+1)*pageSize])
				}
			}
			if !bytes.Equal(got, want[100:100+len(got)]) {
				t.Error("wrong bytes")
			}
		})
	}
}

func TestA_fault_allocates_nothing(t *testing.T) {
	const pages = 8 * chunkPages
	dir := makeSnapshot(t, 64<<20, []part{{0, pages}})
	p, mem := restore(t, dir, Options{})
	o := newToucher(t)
	b := make([]byte, 1)
	// The first fault in each chunk reads the chunk's leaf.
	for c := range uint64(8) {
		if err := o.read(mem, guestmem.GPA(c*chunkBytes), b); err != nil {
			t.Fatal(err)
		}
	}
	before := p.Stats().ReadFaults.Load()
	page := uint64(0)
	n := testing.AllocsPerRun(400, func() {
		page += 19 // more than a frame
		if page >= pages {
			page %= pages
		}
		if err := o.f.Truncate(0); err != nil {
			t.Fatal(err)
		}
		if err := mem.DrainTo(guestmem.GPA(page*pageSize), 1, o.f, 0); err != nil {
			t.Fatal(err)
		}
	})
	faults := p.Stats().ReadFaults.Load() - before
	t.Logf("%v allocations for each touch, %d faults", n, faults)
	if faults < 150 {
		t.Error("there were hardly any faults")
	}
	most := 0.0
	if racetest.Enabled {
		most = 2 // it takes a quarter away of what is put into pools
	}
	if n > most {
		t.Errorf("%v allocations for each touch", n)
	}
}

// The test takes deltas of a machine that was restored lazily. Their source gives pages that were written, given
// away and never loaded, and the pager reads frames and leaves of several files.
func TestDeltas_of_a_restored_machine_are_restored_in_their_turn(t *testing.T) {
	dir := makeSnapshot(t, 64<<20, smallRAM)
	changed := map[uint64][]byte{} // against the first snapshot
	for round := range uint64(4) {
		base := openSnapshot(t, dir)
		p, mem := newPagerFor(t, base, Options{})
		p.Start()
		dirty := guestmem.NewPageSet(base.Memory().Pages())
		for page := 3 * round; page < 4000; page += 211 {
			b := bytes.Repeat([]byte{byte(round + 1), byte(page)}, pageSize/2)
			if err := mem.Write(gpaOf(t, mem, page), b); err != nil {
				t.Fatal(err)
			}
			changed[page] = b
			dirty.Add(page, page+1)
		}
		for _, page := range []uint64{6 + round, 1500 + round, 9000} {
			if err := mem.Discard(gpaOf(t, mem, page), pageSize); err != nil {
				t.Fatal(err)
			}
			changed[page] = make([]byte, pageSize)
			dirty.Add(page, page+1)
		}
		src, err := p.Source()
		if err != nil {
			t.Fatal(err)
		}
		// A page may be in the set without having changed, even without having been loaded.
		dirty.Add(2000, 2003)
		dirty.Add(12000, 12003)
		before := committed(t, mem)
		dir = filepath.Join(t.TempDir(), "snap")
		info, err := snapshot.Create(context.Background(), dir, snapshot.Spec{VCPUs: 1, Memory: src, Base: base, Changed: dirty})
		if err != nil {
			t.Fatal(err)
		}
		if n := len(info.Manifest.Memory.Files); n != int(round)+2 {
			t.Errorf("snapshot %d has %d files", round+1, n)
		}
		if after := committed(t, mem); after != before && tellsZeros(t) {
			t.Errorf("%d pages were committed before the snapshot, %d after it", before, after)
		}
		src.Close()
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	p, mem := restore(t, dir, Options{})
	got, want := make([]byte, pageSize), make([]byte, pageSize)
	for page := range openSnapshot(t, dir).Memory().Pages() {
		if err := mem.Read(gpaOf(t, mem, page), got); err != nil {
			t.Fatal(err)
		}
		if c, ok := changed[page]; ok {
			copy(want, c)
		} else {
			expect(smallRAM, page, want)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("page %d is wrong", page)
		}
	}
	if err := p.Err(); err != nil {
		t.Error(err)
	}
}

// someFrames is a cache that has about every other frame. Every fifth answer has one page too few.
type someFrames struct {
	mem  *snapshot.Memory
	asks atomic.Uint64
}

func (c *someFrames) Read(_ uint64, f *snapshot.Frame, buf []byte) ([]byte, bool) {
	switch n := c.asks.Add(1); {
	case n%5 == 0:
		return buf[:pageSize*(f.Pages()-1)], true
	case n%2 == 0:
		return nil, false
	}
	d, err := snapshot.NewDecoder()
	if err != nil {
		return nil, false
	}
	defer d.Release()
	raw, err := c.mem.ReadFrame(f, d)
	return buf[:copy(buf, raw)], err == nil
}

func TestWorking_set_is_loaded_when_that_is_wanted_and_once(t *testing.T) {
	p, _ := newPagerFor(t, openSnapshot(t, makeSnapshot(t, 64<<20, smallRAM)), Options{WorkingSet: []uint64{2000, 100, 1 << 40}})
	p.Start()
	time.Sleep(20 * time.Millisecond)
	if st := p.Stats(); st.Prefetched.Load() != 0 {
		t.Errorf("%d frames were loaded before anybody wanted them", st.Prefetched.Load())
	}
	for range 2 {
		p.LoadWorkingSet()
		if st := p.Stats(); st.Prefetched.Load() != 2 || st.Frames.Load() != 2 {
			t.Errorf("%d loads of %d frames, want 2 of 2", st.Prefetched.Load(), st.Frames.Load())
		}
	}
	closed, _ := newPagerFor(t, openSnapshot(t, makeSnapshot(t, 64<<20, smallRAM)), Options{WorkingSet: []uint64{2000}})
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	closed.LoadWorkingSet()
	if st := closed.Stats(); st.Prefetched.Load() != 0 {
		t.Error("a closed pager has loaded something")
	}
}

func TestWith_a_cache_that_has_some_frames_all_pages_are_right(t *testing.T) {
	s := openSnapshot(t, makeSnapshot(t, 64<<20, smallRAM))
	cache := &someFrames{mem: s.Memory()}
	p, mem := newPagerFor(t, s, Options{Cache: cache, WorkingSet: []uint64{2000, 100, 2999}})
	p.Start()
	go p.LoadWorkingSet()
	o := newToucher(t)
	got, want := make([]byte, pageSize), make([]byte, pageSize)
	for page := range mem.Size() / pageSize {
		if page > 3100 && page%64 != 0 {
			continue // zeros: the pager asks no cache for them
		}
		read := mem.Read
		if page%2 == 0 {
			read = func(gpa guestmem.GPA, b []byte) error { return o.read(mem, gpa, b) }
		}
		if err := read(gpaOf(t, mem, page), got); err != nil {
			t.Fatal(err)
		}
		expect(smallRAM, page, want)
		if !bytes.Equal(got, want) {
			t.Fatalf("page %d is wrong", page)
		}
	}
	st := p.Stats()
	if st.FramesCached.Load() == 0 || st.Frames.Load() == 0 || st.FramesCached.Load()+st.Frames.Load() != cache.asks.Load() {
		t.Errorf("%d frames of the cache and %d of the snapshot, the cache was asked for %d", st.FramesCached.Load(), st.Frames.Load(), cache.asks.Load())
	}
}

// A snapshot is made of data of the snapshot before, whatever a cache has.
func TestA_source_does_not_ask_a_cache(t *testing.T) {
	s := openSnapshot(t, makeSnapshot(t, 64<<20, smallRAM))
	cache := &someFrames{mem: s.Memory()}
	p, _ := newPagerFor(t, s, Options{Cache: cache})
	p.Start()
	src, err := p.Source()
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	got, want := make([]byte, pageSize), make([]byte, pageSize)
	for page := range uint64(64) {
		if err := src.ReadPages(page, got); err != nil {
			t.Fatal(err)
		}
		if expect(smallRAM, page, want); !bytes.Equal(got, want) {
			t.Errorf("page %d is wrong", page)
		}
	}
	if n := cache.asks.Load(); n != 0 {
		t.Errorf("the cache was asked %d times", n)
	}
}

// heldFrames is a cache without frames, whose first question waits until it is released.
type heldFrames struct {
	asked, release chan struct{}
	later          atomic.Bool
}

func (h *heldFrames) Read(uint64, *snapshot.Frame, []byte) ([]byte, bool) {
	if !h.later.Swap(true) {
		close(h.asked)
		<-h.release
	}
	return nil, false
}

func TestA_fault_waits_for_the_frame_that_is_being_loaded_ahead(t *testing.T) {
	const page = 100
	s := openSnapshot(t, makeSnapshot(t, 64<<20, smallRAM))
	leaf, err := s.Memory().Leaf(0)
	if err != nil {
		t.Fatal(err)
	}
	frame, _, _ := leaf.Page(page)
	other := uint64(page)
	for f, stored := frame, true; f == frame || !stored; f, _, stored = leaf.Page(int(other)) {
		other++
	}
	cache := &heldFrames{asked: make(chan struct{}), release: make(chan struct{})}
	p, mem := newPagerFor(t, s, Options{Cache: cache, WorkingSet: []uint64{page}})
	p.Start()
	loaded := make(chan struct{})
	go func() {
		defer close(loaded)
		p.LoadWorkingSet()
	}()
	<-cache.asked
	// Another frame of the chunk does not wait.
	got, want := make([]byte, pageSize), make([]byte, pageSize)
	read := func(page uint64) error { return mem.Read(gpaOf(t, mem, page), got) }
	if err := read(other); err != nil {
		t.Fatal(err)
	}
	if expect(smallRAM, other, want); !bytes.Equal(got, want) {
		t.Errorf("page %d is wrong", other)
	}
	touched := make(chan error, 1)
	o := newToucher(t)
	go func() { touched <- o.read(mem, gpaOf(t, mem, page), got) }()
	for p.Stats().ReadFaults.Load() == 0 { // then a handler has the fault
		time.Sleep(time.Millisecond)
	}
	select {
	case err := <-touched:
		t.Fatalf("the page came before its frame: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	close(cache.release)
	if err := <-touched; err != nil {
		t.Fatal(err)
	}
	<-loaded
	if expect(smallRAM, page, want); !bytes.Equal(got, want) {
		t.Errorf("page %d is wrong", page)
	}
	if n := p.Stats().Frames.Load(); n != 2 {
		t.Errorf("%d frames were decompressed, want one each of both", n)
	}
}
