package snapshot

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/racetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// ram models a machine's RAM, and the tests compare snapshots with it. It is also a MemorySource that counts how
// often each page is read and released.
type ram struct {
	slots []Slot
	pages map[uint64][]byte // the nonzero pages

	mu       sync.Mutex
	read     map[uint64]int
	released map[uint64]int
}

func newRAM(slots ...Slot) *ram {
	return &ram{slots: slots, pages: map[uint64][]byte{}, read: map[uint64]int{}, released: map[uint64]int{}}
}

func (r *ram) Slots() []Slot { return slices.Clone(r.slots) }

func (r *ram) total() uint64 { return pagesOf(r.slots) }

func (r *ram) NextData(page uint64) (first, end uint64, err error) {
	next := r.total()
	for p := range r.pages {
		if p >= page && p < next {
			next = p
		}
	}
	if next == r.total() {
		return page, page, nil
	}
	for end = next + 1; r.pages[end] != nil; end++ {
	}
	return next, end, nil
}

func (r *ram) ReadPages(page uint64, p []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for ; len(p) > 0; p, page = p[guestmem.PageSize:], page+1 {
		r.read[page]++
		clear(p[:guestmem.PageSize])
		copy(p, r.pages[page])
	}
	return nil
}

func (r *ram) Release(first, end uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for ; first < end; first++ {
		r.released[first]++
	}
}

// clone returns the same RAM at this instant, with no page counted as read.
func (r *ram) clone() *ram {
	c := newRAM(r.slots...)
	c.pages = maps.Clone(r.pages)
	return c
}

// set gives a page one of a few kinds of content: zeros, text or noise.
func (r *ram) set(page uint64, rnd *rand.Rand) {
	if rnd.IntN(4) == 0 {
		delete(r.pages, page)
		return
	}
	p := make([]byte, guestmem.PageSize)
	fillPage(p, rnd.Uint64(), rnd.IntN(4) == 0)
	r.pages[page] = p
}

// dirty changes pages as a guest might. It returns the set of pages that may have changed, and a few more.
func (r *ram) dirty(rnd *rand.Rand) *guestmem.PageSet {
	s := guestmem.NewPageSet(r.total())
	for range rnd.IntN(4) {
		first := rnd.Uint64N(r.total())
		n := 1 + rnd.Uint64N([]uint64{1, 3, 40, 700}[rnd.IntN(4)])
		s.Add(first, first+n)
		for p := first; p < min(first+n, r.total()); p++ {
			if rnd.IntN(8) > 0 {
				r.set(p, rnd)
			}
		}
	}
	if rnd.IntN(3) == 0 { // scattered pages
		for p := rnd.Uint64N(200); p < r.total(); p += 1 + rnd.Uint64N(400) {
			s.Add(p, p+1)
			r.set(p, rnd)
		}
	}
	if rnd.IntN(6) == 0 { // the guest gives back a chunk
		first := rnd.Uint64N(r.total()) &^ (ChunkPages - 1)
		s.Add(first, first+ChunkPages)
		for p := first; p < min(first+ChunkPages, r.total()); p++ {
			delete(r.pages, p)
		}
	}
	return s
}

// noSync is the machine's file system without waiting for the disk. It is for tests that write many snapshots and
// do not cut the power.
type noSync struct{ osfile.FS }

var fast = noSync{osfile.OS}

type noSyncFile struct{ osfile.File }

func (noSyncFile) Sync() error { return nil }

func (noSync) SyncDir(string) error { return nil }

func (n noSync) OpenFile(name string, flag int, perm fs.FileMode) (osfile.File, error) {
	f, err := n.FS.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return noSyncFile{f}, nil
}

// fastDir returns a temporary directory in memory, if there is one with room. It is for tests that make many small
// files and need no disk.
func fastDir(t testing.TB) string {
	t.Helper()
	const shm, room = "/dev/shm", 512 << 20
	if free, err := osfile.OS.Free(shm); err != nil || free < room {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(shm, "drowse-snapshot-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func (r *ram) spec() Spec {
	return Spec{VCPUs: 1, Memory: r, FS: fast, Payloads: []Payload{{Name: "vcpu0", Kind: "vcpu", Version: 1, Data: []byte("regs")}}}
}

// open opens a snapshot and closes it when the test ends.
func open(t testing.TB, dir string) *Snapshot {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// compare reads every page and reports how RAM in the snapshot in dir differs from r.
func (r *ram) compare(dir string) error {
	s, err := Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	return r.compareOpen(s)
}

func (r *ram) compareOpen(s *Snapshot) error {
	d, err := NewDecoder()
	if err != nil {
		return err
	}
	defer d.Release()
	m := s.Memory()
	if !slices.Equal(m.Slots(), r.slots) {
		return fmt.Errorf("slots %v", m.Slots())
	}
	n := 0
	for c := range m.Chunks() {
		l, err := m.Leaf(c)
		if err != nil {
			return err
		}
		if l == nil {
			continue
		}
		frames := make([][]byte, l.NumFrames())
		for i := range frames {
			b, err := m.ReadFrame(l.Frame(i), d)
			if err != nil {
				return err
			}
			frames[i] = bytes.Clone(b)
		}
		for i := range ChunkPages {
			page := uint64(c)*ChunkPages + uint64(i)
			frame, slot, ok := l.Page(i)
			if !ok {
				continue
			}
			n++
			if got := frames[frame][slot*guestmem.PageSize:][:guestmem.PageSize]; !bytes.Equal(got, r.pages[page]) {
				return fmt.Errorf("page %d differs", page)
			}
		}
	}
	if n != len(r.pages) {
		return fmt.Errorf("%d pages that are not zeros, want %d", n, len(r.pages))
	}
	return nil
}

// delta writes a delta and compares it with r.
func (r *ram) delta(t testing.TB, dir string, base *Snapshot, changed *guestmem.PageSet) *Info {
	t.Helper()
	spec := r.spec()
	spec.Base, spec.Changed = base, changed
	info, err := Create(context.Background(), dir, spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.compare(dir); err != nil {
		t.Fatalf("%s: %v", dir, err)
	}
	return info
}

// checkHot checks that hot pages are stored as they are, without others beside them.
func checkHot(t *testing.T, s *Snapshot, hot ...uint64) {
	t.Helper()
	for c := range s.Memory().Chunks() {
		l, err := s.Memory().Leaf(c)
		if err != nil {
			t.Fatal(err)
		}
		if l == nil {
			continue
		}
		for i := range ChunkPages {
			frame, _, ok := l.Page(i)
			if !ok {
				continue
			}
			page := uint64(c)*ChunkPages + uint64(i)
			if raw := l.Frame(frame).codec == codecRaw; raw != slices.Contains(hot, page) {
				t.Errorf("page %d: stored as it is: %v", page, raw)
			}
		}
	}
}

func TestHot_pages_are_stored_as_they_are_in_frames_of_their_own(t *testing.T) {
	parent := t.TempDir()
	r := newRAM(Slot{GPA: 0, Size: 3 * ChunkPages * guestmem.PageSize})
	for page := range uint64(ChunkPages + 100) {
		r.pages[page] = bytes.Repeat([]byte{byte(page), byte(page >> 8), 1, 2}, guestmem.PageSize/4)
	}
	first := filepath.Join(parent, "first")
	spec := r.spec()
	spec.Hot = []uint64{7, 5, 5, ChunkPages, 1200, 1 << 40} // one twice, one of zeros, one out of range
	if _, err := Create(t.Context(), first, spec); err != nil {
		t.Fatal(err)
	}
	base := open(t, first)
	checkHot(t, base, 5, 7, ChunkPages)

	// A delta finds hot pages changed, unchanged and hot before, unchanged and compressed before. The guest runs on
	// meanwhile, so a page that is not among the changed ones must not come from its RAM.
	next := r.clone()
	changed := guestmem.NewPageSet(r.total())
	changed.Add(7, 9)
	next.pages[7] = bytes.Repeat([]byte("7777"), guestmem.PageSize/4)
	next.pages[8] = bytes.Repeat([]byte("8888"), guestmem.PageSize/4)
	spec = next.spec()
	spec.Base, spec.Changed = base, changed
	spec.Hot = []uint64{7, 5, 100, ChunkPages + 1}
	second := filepath.Join(parent, "second")
	if _, err := Create(t.Context(), second, spec); err != nil {
		t.Fatal(err)
	}
	if err := next.compare(second); err != nil {
		t.Error(err)
	}
	hot := append(spec.Hot, ChunkPages) // that of the first snapshot stays
	checkHot(t, open(t, second), hot...)
	for page := range next.read {
		if page != 7 && page != 8 {
			t.Errorf("page %d, which has not changed, was read from the guest", page)
		}
	}
	// Nothing changes, and all hot pages are where they should be.
	third := filepath.Join(parent, "third")
	spec.Base, spec.Changed, spec.Memory = open(t, second), guestmem.NewPageSet(r.total()), next.clone()
	info, err := Create(t.Context(), third, spec)
	if err != nil {
		t.Fatal(err)
	}
	if own := info.Manifest.Memory.Files[len(info.Manifest.Memory.Files)-1]; own.StoredPages != 0 {
		t.Errorf("%d pages were stored again", own.StoredPages)
	}
	// Compaction keeps them.
	if _, err := Compact(t.Context(), third); err != nil {
		t.Fatal(err)
	}
	checkHot(t, open(t, third), hot...)
	if err := next.compare(third); err != nil {
		t.Error(err)
	}
}

func TestPages_beyond_the_bound_are_not_hot(t *testing.T) {
	r := newRAM(Slot{GPA: 0, Size: 4 * ChunkPages * guestmem.PageSize})
	spec := r.spec()
	for page := range uint64(MaxHot + 2) {
		r.pages[page] = bytes.Repeat([]byte{byte(page), 1}, guestmem.PageSize/2)
		spec.Hot = append(spec.Hot, page)
	}
	dir := filepath.Join(t.TempDir(), "a")
	if _, err := Create(t.Context(), dir, spec); err != nil {
		t.Fatal(err)
	}
	checkHot(t, open(t, dir), spec.Hot[:MaxHot]...)
}

var chainSeeds = flag.Int("snapshot.chains", 0, "how many random chains of snapshots to write; 0: a number that takes seconds")

// The test makes random chains of deltas with forks, compaction and removal, with one and with two memory slots.
// Every snapshot must equal RAM at its instant, to the byte.
func TestEvery_snapshot_of_a_chain_has_the_RAM_of_its_instant(t *testing.T) {
	n := *chainSeeds
	if n == 0 {
		n = racetest.Cases(1000, 50)
	}
	parent := fastDir(t)
	for seed := range n {
		dir := filepath.Join(parent, fmt.Sprint(seed))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		depth := 4
		if seed%50 == 0 {
			depth = 64
		}
		runChain(t, dir, uint64(seed), depth)
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
}

type instant struct {
	dir string
	ram *ram
}

func runChain(t *testing.T, parent string, seed uint64, depth int) {
	t.Helper()
	fail := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("seed %d: "+format, append([]any{seed}, args...)...)
	}
	rnd := rand.New(rand.NewPCG(seed, 1))
	slots := []Slot{{GPA: 0, Size: (1 + rnd.Uint64N(1600)) * guestmem.PageSize}}
	if seed%2 == 1 {
		slots = append(slots, Slot{GPA: 4 << 30, Size: (1 + rnd.Uint64N(800)) * guestmem.PageSize})
	}
	r := newRAM(slots...)
	r.dirty(rnd)
	var all []instant
	for i := range depth {
		spec := r.spec()
		spec.maxFiles = []int{1, 2, 3, 8, deltaFiles}[rnd.IntN(5)]
		spec.Writers = 1 + rnd.IntN(3)
		if rnd.IntN(2) == 0 {
			for range rnd.IntN(200) {
				spec.Hot = append(spec.Hot, rnd.Uint64N(r.total()+50))
			}
		}
		next := r.clone()
		changed := guestmem.NewPageSet(r.total())
		var base *Snapshot
		if i > 0 {
			// Sometimes the chain forks: an older snapshot is the base of two.
			from := all[len(all)-1]
			if rnd.IntN(5) == 0 {
				from = all[rnd.IntN(len(all))]
			}
			next = from.ram.clone()
			changed = next.dirty(rnd)
			var err error
			if base, err = Open(from.dir); err != nil {
				fail("%v", err)
			}
			spec.Base, spec.Changed = base, changed
		}
		spec.Memory = next
		dir := filepath.Join(parent, fmt.Sprint(i))
		if base != nil && rnd.IntN(12) == 0 {
			// The test compacts or removes the base while the delta is written.
			if rnd.IntN(2) == 0 {
				if _, err := compact(context.Background(), base.Dir(), fast); err != nil {
					fail("compacting the base: %v", err)
				}
			} else {
				if err := os.RemoveAll(base.Dir()); err != nil {
					fail("%v", err)
				}
				all = slices.DeleteFunc(all, func(in instant) bool { return in.dir == base.Dir() })
			}
		}
		info, err := Create(context.Background(), dir, spec)
		if err != nil {
			fail("%v", err)
		}
		if base != nil {
			if err := next.readOnce(changed); err != nil {
				fail("snapshot %d: %v", i, err)
			}
			base.Close()
		}
		if n := len(info.Manifest.Memory.Files); n > spec.maxFiles {
			fail("snapshot %d has %d files, at most %d are allowed", i, n, spec.maxFiles)
		}
		all = append(all, instant{dir, next})
		if err := checkDir(dir, info.Manifest); err != nil {
			fail("snapshot %d: %v", i, err)
		}
		if rnd.IntN(10) == 0 {
			if _, err := compact(context.Background(), dir, fast); err != nil {
				fail("compacting snapshot %d: %v", i, err)
			}
		}
		if rnd.IntN(10) == 0 && len(all) > 2 {
			k := rnd.IntN(len(all))
			if err := os.RemoveAll(all[k].dir); err != nil {
				fail("%v", err)
			}
			all = slices.Delete(all, k, k+1)
		}
	}
	for _, in := range all {
		if err := in.ram.compare(in.dir); err != nil {
			fail("%s: %v", in.dir, err)
		}
		if err := Verify(context.Background(), in.dir); err != nil {
			fail("%v", err)
		}
	}
	left, err := os.ReadDir(parent)
	if err != nil || len(left) != len(all) {
		fail("%d snapshots, and %v is there (%v)", len(all), left, err)
	}
}

// readOnce checks that exactly the changed pages were read and released, once each.
func (r *ram) readOnce(changed *guestmem.PageSet) error {
	for p := range r.total() {
		want := 0
		if changed.Has(p) {
			want = 1
		}
		if r.read[p] != want || r.released[p] != want {
			return fmt.Errorf("page %d was read %d times and released %d times, want %d", p, r.read[p], r.released[p], want)
		}
	}
	return nil
}

// checkDir checks that the directory has what the manifest says and no more.
func checkDir(dir string, m *Manifest) error {
	want := []string{ManifestName}
	for _, f := range m.Memory.Files {
		want = append(want, f.Name)
	}
	slices.Sort(want)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("the directory has %v, want %v", got, want)
	}
	return nil
}

// smallRAM returns RAM with a few nonzero pages in each of the given number of chunks.
func smallRAM(chunks uint64, rnd *rand.Rand) *ram {
	r := newRAM(Slot{Size: chunks * ChunkPages * guestmem.PageSize})
	for p := uint64(0); p < r.total(); p += 20 {
		r.set(p, rnd)
	}
	return r
}

func TestA_delta_is_refused_before_anything_is_written(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	r := smallRAM(4, rnd)
	dir := filepath.Join(t.TempDir(), "base")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	base := open(t, dir)
	closed, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	for _, tc := range []struct {
		name  string
		dir   string
		spoil func(*Spec)
		want  error
	}{
		{"onto its own base", dir, func(*Spec) {}, ErrExists},
		{"into its own base", filepath.Join(dir, "x"), func(*Spec) {}, ErrBase},
		{"with the id of its base", "", func(s *Spec) { s.ID = base.Manifest().ID }, ErrBase},
		{"base of another size", "", func(s *Spec) { s.Memory = smallRAM(5, rnd) }, ErrBase},
		{"base with a hole", "", func(s *Spec) {
			s.Memory = newRAM(Slot{Size: 2 * ChunkPages * guestmem.PageSize}, Slot{GPA: 4 << 30, Size: 2 * ChunkPages * guestmem.PageSize})
		}, ErrBase},
		{"closed base", "", func(s *Spec) { s.Base = closed }, ErrBase},
		{"no set of changed pages", "", func(s *Spec) { s.Changed = nil }, ErrSpec},
		{"set of changed pages of other RAM", "", func(s *Spec) { s.Changed = guestmem.NewPageSet(7) }, ErrSpec},
		{"set of changed pages without a base", "", func(s *Spec) { s.Base = nil }, ErrSpec},
	} {
		t.Run(tc.name, func(t *testing.T) {
			spec := r.spec()
			spec.Base, spec.Changed = base, guestmem.NewPageSet(r.total())
			spec.FS = &failFS{FS: osfile.OS, n: 1, err: errors.New("something was written")}
			tc.spoil(&spec)
			target := tc.dir
			if target == "" {
				target = filepath.Join(t.TempDir(), "snap")
			}
			if _, err := Create(context.Background(), target, spec); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
		})
	}
	if err := r.compare(dir); err != nil {
		t.Error(err)
	}
}

// writeFactor limits what a thousand small deltas may write. It is in bytes for each byte that they would have
// written without carrying anything over.
const writeFactor = 3.0

// A long chain writes only a small factor more than the deltas themselves, has few files, and is whole at its end.
func TestA_thousand_deltas_write_little_more_than_their_own_bytes(t *testing.T) {
	depth, limits := racetest.Cases(1000, 200), []int{deltaFiles}
	// 256 pages, for deltas of 1 MiB, take minutes.
	pages := uint64(32)
	if n := os.Getenv("DROWSE_TEST_DELTA_PAGES"); n != "" {
		if _, err := fmt.Sscan(n, &pages); err != nil {
			t.Fatal(err)
		}
		limits = []int{8, 16, deltaFiles, 64}
	}
	for _, limit := range limits {
		for _, run := range []uint64{1, 16} {
			t.Run(fmt.Sprintf("%d files, %d pages in a row", limit, run), func(t *testing.T) {
				longChain(t, depth, pages, run, limit)
			})
		}
	}
}

// longChain writes deltas of run pages of noise. RAM is so large that most pages stay the same. This is the worst
// case: nothing that was written becomes needless.
func longChain(t *testing.T, depth int, pages, run uint64, limit int) {
	rnd := rand.New(rand.NewPCG(5, uint64(limit)))
	r := newRAM(Slot{Size: uint64(depth) * pages * 2 * guestmem.PageSize})
	parent := t.TempDir()
	dir := filepath.Join(parent, "0")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	var carried, written, largest int64
	most := 0
	for i := range depth {
		base, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		changed := guestmem.NewPageSet(r.total())
		for range pages / run {
			first := rnd.Uint64N(r.total()/run) * run
			changed.Add(first, first+run)
			for p := first; p < first+run; p++ {
				b := make([]byte, guestmem.PageSize)
				fillPage(b, rnd.Uint64(), true)
				r.pages[p] = b
			}
		}
		next := filepath.Join(parent, fmt.Sprint(i+1))
		spec := r.spec()
		spec.Base, spec.Changed, spec.maxFiles = base, changed, limit
		info, err := Create(context.Background(), next, spec)
		if err != nil {
			t.Fatal(err)
		}
		base.Close()
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		dir = next
		carried += info.CarriedBytes
		written += info.SizeBytes
		largest = max(largest, info.CarriedBytes)
		most = max(most, len(info.Manifest.Memory.Files))
	}
	factor := float64(written) / float64(written-carried)
	t.Logf("%d deltas of %d KiB: %.1f MiB written, %.2f times the %.1f MiB of their own; %d files at most; at most %.1f MiB carried at once",
		depth, pages*4, float64(written)/(1<<20), factor, float64(written-carried)/(1<<20), most, float64(largest)/(1<<20))
	if factor > writeFactor || most > limit {
		t.Errorf("%.2f times their own bytes in %d files, at most %.1f in %d are allowed", factor, most, writeFactor, limit)
	}
	if carried == 0 {
		t.Error("nothing was carried over")
	}
	if err := r.compare(dir); err != nil {
		t.Fatal(err)
	}
	if err := Verify(context.Background(), dir); err != nil {
		t.Fatal(err)
	}
	if got := open(t, dir).Manifest().Depth; got != uint32(depth) {
		t.Errorf("depth %d, want %d", got, depth)
	}
}

// counting counts the reads of a file.
type counting struct {
	f interface {
		ReadAt(p []byte, off int64) (int, error)
	}
	calls *atomic.Int64
}

func (c counting) ReadAt(p []byte, off int64) (int, error) {
	c.calls.Add(1)
	return c.f.ReadAt(p, off)
}

// reads replaces the files of a snapshot by ones that count reads.
func reads(s *Snapshot) (calls *atomic.Int64) {
	calls = new(atomic.Int64)
	for i := range s.memory.files {
		f := &s.memory.files[i]
		f.r = counting{f.r, calls}
	}
	return calls
}

func TestA_page_at_any_depth_costs_one_leaf_and_one_frame(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 9))
	r := smallRAM(4, rnd)
	parent := t.TempDir()
	dir := filepath.Join(parent, "0")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		changed := guestmem.NewPageSet(r.total())
		p := rnd.Uint64N(r.total())
		changed.Add(p, p+1)
		r.set(p, rnd)
		base := open(t, dir)
		dir = filepath.Join(parent, fmt.Sprint(i+1))
		r.delta(t, dir, base, changed)
	}
	d, err := NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	got := make([]byte, guestmem.PageSize)
	for page := range r.pages {
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		calls := reads(s)
		if err := s.Memory().ReadPage(page, got, d); err != nil || !bytes.Equal(got, r.pages[page]) {
			t.Fatalf("page %d: %v", page, err)
		}
		s.Close()
		if n := calls.Load(); n != 2 {
			t.Errorf("page %d took %d reads, want a leaf and a frame", page, n)
		}
	}
}

// The work of a delta grows with what has changed.
func TestA_delta_reads_only_leaves_of_chunks_that_have_changed(t *testing.T) {
	rnd := rand.New(rand.NewPCG(2, 9))
	r := smallRAM(64, rnd)
	dir := filepath.Join(t.TempDir(), "base")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	base := open(t, dir)
	calls := reads(base)
	changed := guestmem.NewPageSet(r.total())
	for _, c := range []uint64{3, 17, 40} {
		p := c*ChunkPages + 5
		changed.Add(p, p+2)
		r.pages[p] = bytes.Repeat([]byte("x"), guestmem.PageSize)
	}
	info := r.delta(t, dir+"-delta", base, changed)
	if n := calls.Load(); n != 3 {
		t.Errorf("%d pieces of the base were read, want 3 leaves", n)
	}
	if own := info.Manifest.Memory.Files[1]; own.Pages != 3 {
		t.Errorf("%d pages in the new file, want 3", own.Pages)
	}
}

func TestOne_changed_page_in_each_chunk_is_stored_alone(t *testing.T) {
	r := newRAM(Slot{Size: 64 * ChunkPages * guestmem.PageSize})
	for p := uint64(0); p < r.total(); p++ {
		if p%ChunkPages < 64 {
			r.pages[p] = bytes.Repeat([]byte(fmt.Sprint(p, " ")), guestmem.PageSize)[:guestmem.PageSize]
		}
	}
	dir := filepath.Join(t.TempDir(), "base")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	changed := guestmem.NewPageSet(r.total())
	for p := uint64(9); p < r.total(); p += ChunkPages {
		changed.Add(p, p+1)
		r.pages[p] = bytes.Repeat([]byte("some text"), 456)[:guestmem.PageSize]
	}
	info := r.delta(t, dir+"-delta", open(t, dir), changed)
	own := info.Manifest.Memory.Files[1]
	t.Logf("64 pages: %d bytes of frames, %d of leaves, %d in all", own.FrameBytes, own.LeafBytes, info.SizeBytes)
	if own.Pages != 64 || own.FrameBytes > 64*200 {
		t.Errorf("%d pages in %d bytes: neighbours were stored again", own.Pages, own.FrameBytes)
	}
}

// A pager may run while the snapshot is replaced. Open must meet the old snapshot or the new one.
func TestOpen_and_compact_do_not_disturb_each_other(t *testing.T) {
	r := smallRAM(4, rand.New(rand.NewPCG(4, 6)))
	parent := t.TempDir()
	dir := filepath.Join(parent, "snap")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	opens := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		var err error
		for range opens {
			// This is what Compact does when it has work.
			other := filepath.Join(parent, "other")
			if err == nil {
				err = errors.Join(os.CopyFS(other, os.DirFS(dir)), osfile.OS.Exchange(dir, other), os.RemoveAll(other))
			}
		}
		done <- err
	}()
	for range 300 {
		opens <- struct{}{}
		s, err := Open(dir)
		if err != nil {
			t.Error(err)
			break
		}
		if err := r.compareOpen(s); err != nil {
			t.Error(err)
		}
		s.Close()
	}
	close(opens)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestVerify_of_no_snapshot_says_so(t *testing.T) {
	if err := Verify(context.Background(), filepath.Join(t.TempDir(), "x")); !errors.Is(err, ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

func TestA_delta_without_changes_is_the_root_alone(t *testing.T) {
	r := smallRAM(4, rand.New(rand.NewPCG(4, 4)))
	dir := filepath.Join(t.TempDir(), "base")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	info := r.delta(t, dir+"-delta", open(t, dir), guestmem.NewPageSet(r.total()))
	if own := info.Manifest.Memory.Files[1]; own.Size != fileHeader+4*rootEntry {
		t.Errorf("%d bytes in the new file", own.Size)
	}
}

func TestFiles_that_nothing_refers_to_are_not_linked(t *testing.T) {
	rnd := rand.New(rand.NewPCG(4, 4))
	r := smallRAM(4, rnd)
	dir := filepath.Join(t.TempDir(), "base")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	changed := guestmem.NewPageSet(r.total())
	changed.Add(0, r.total())
	r.pages[7] = bytes.Repeat([]byte("x"), guestmem.PageSize)
	info := r.delta(t, dir+"-delta", open(t, dir), changed)
	if files := info.Manifest.Memory.Files; len(files) != 1 || files[0].Number != 2 {
		t.Errorf("files %+v, want the new one alone", files)
	}
}

func TestA_file_is_given_up_when_less_than_a_quarter_of_it_is_needed(t *testing.T) {
	for _, tc := range []struct {
		name    string
		changed uint64 // of 400 pages, from the first
		files   int
	}{
		{"a quarter is kept", 300, 2},
		{"a page less is carried over", 301, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRAM(Slot{Size: ChunkPages * guestmem.PageSize})
			for p := range uint64(400) {
				r.pages[p] = bytes.Repeat([]byte{byte(p), byte(p >> 8), 1, 2}, guestmem.PageSize/4)
			}
			dir := filepath.Join(t.TempDir(), "base")
			if _, err := Create(context.Background(), dir, r.spec()); err != nil {
				t.Fatal(err)
			}
			changed := guestmem.NewPageSet(r.total())
			changed.Add(0, tc.changed)
			for p := range tc.changed {
				r.pages[p] = bytes.Repeat([]byte{byte(p), 3}, guestmem.PageSize/2)
			}
			info := r.delta(t, dir+"-delta", open(t, dir), changed)
			if n := len(info.Manifest.Memory.Files); n != tc.files {
				t.Errorf("%d files, want %d", n, tc.files)
			}
			if (info.CarriedBytes > 0) != (tc.files == 1) {
				t.Errorf("%d bytes carried over", info.CarriedBytes)
			}
			if err := Verify(context.Background(), info.Dir); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestWhat_is_left_of_a_frame_is_packed_anew_when_half_of_it_is_dead(t *testing.T) {
	for _, tc := range []struct {
		name   string
		dead   uint64 // pages of each of two frames
		frames uint64
		pages  uint64 // stored pages, needed or not
	}{
		{"half", FramePages / 2, 1, FramePages},
		{"less", FramePages/2 - 1, 2, 2 * FramePages},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRAM(Slot{Size: ChunkPages * guestmem.PageSize})
			changed := guestmem.NewPageSet(r.total())
			for p := range uint64(2 * FramePages) {
				r.pages[p] = make([]byte, guestmem.PageSize)
				fillPage(r.pages[p], p, true) // stored uncompressed
			}
			dir := filepath.Join(t.TempDir(), "base")
			if _, err := Create(context.Background(), dir, r.spec()); err != nil {
				t.Fatal(err)
			}
			for p := range uint64(2 * FramePages) {
				if p%FramePages < tc.dead {
					changed.Add(p, p+1)
					delete(r.pages, p)
				}
			}
			spec := r.spec()
			spec.Base, spec.Changed, spec.maxFiles = open(t, dir), changed, 1
			info, err := Create(context.Background(), dir+"-delta", spec)
			if err != nil {
				t.Fatal(err)
			}
			if st := info.Manifest.Stats; st.Frames != tc.frames || st.StoredBytes != tc.pages*guestmem.PageSize {
				t.Errorf("%+v, want %d frames with room for %d pages", st, tc.frames, tc.pages)
			}
			if err := r.verify(info.Dir); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestTwo_compactions_of_one_snapshot_at_once_are_refused(t *testing.T) {
	dir, r := smallDelta(t)
	lock, err := osfile.OS.Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Compact(context.Background(), dir); !errors.Is(err, unix.EWOULDBLOCK) {
		t.Errorf("got %v, want EWOULDBLOCK", err)
	}
	lock.Close()
	if _, err := Compact(context.Background(), dir+"x"); !errors.Is(err, ErrNotFound) {
		t.Errorf("no such snapshot: got %v, want ErrNotFound", err)
	}
	if _, err := Compact(context.Background(), dir); err != nil {
		t.Error(err)
	}
	if err := r.verify(dir); err != nil {
		t.Error(err)
	}
}

// A file may have only a leaf, which refers to an older file. When the writer gives up that older file, it writes
// the leaf anew and no longer needs the file.
func TestA_file_with_nothing_but_a_rewritten_leaf_is_not_kept(t *testing.T) {
	r := newRAM(Slot{Size: 2 * ChunkPages * guestmem.PageSize})
	for p := range r.total() {
		r.pages[p] = bytes.Repeat([]byte{byte(p), byte(p >> 8), 1, 2}, guestmem.PageSize/4)
	}
	parent := t.TempDir()
	path := func(n int) string { return filepath.Join(parent, fmt.Sprint(n)) }
	if _, err := Create(context.Background(), path(1), r.spec()); err != nil {
		t.Fatal(err)
	}
	// Pages of chunk 0 become zeros. This makes a leaf and no frames.
	changed := guestmem.NewPageSet(r.total())
	changed.Add(0, 20)
	for p := range uint64(20) {
		delete(r.pages, p)
	}
	info := r.delta(t, path(2), open(t, path(1)), changed)
	if own := info.Manifest.Memory.Files[1]; own.Pages != 0 || own.LeafBytes == 0 {
		t.Fatalf("the second file has %d pages and leaves of %d bytes", own.Pages, own.LeafBytes)
	}
	// The first file cannot be linked, so the writer gives it up. The second one can be linked.
	changed = guestmem.NewPageSet(r.total())
	changed.Add(ChunkPages, 2*ChunkPages)
	for p := uint64(ChunkPages); p < 2*ChunkPages; p++ {
		delete(r.pages, p)
	}
	base := open(t, path(2))
	spec := r.spec()
	spec.Base, spec.Changed, spec.FS = base, changed, unlinkable{noSync: fast, name: linkName(base.manifest.Memory.Files[0].ID)}
	info, err := Create(context.Background(), path(3), spec)
	if err != nil {
		t.Fatal(err)
	}
	if files := info.Manifest.Memory.Files; len(files) != 1 {
		t.Errorf("files %+v, want one", files)
	}
	if err := checkDir(path(3), info.Manifest); err != nil {
		t.Error(err)
	}
	if err := r.verify(path(3)); err != nil {
		t.Error(err)
	}
}

// unlinkable lets one file have too many links.
type unlinkable struct {
	noSync
	name string
}

func (u unlinkable) Link(a, b string) error {
	if filepath.Base(b) == u.name {
		return &os.LinkError{Op: "link", Old: a, New: b, Err: unix.EMLINK}
	}
	return u.noSync.Link(a, b)
}

func TestA_delta_on_a_base_that_has_been_compacted_or_removed_is_whole(t *testing.T) {
	for _, how := range []string{"compacted", "removed"} {
		t.Run(how, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(4, 5))
			r := smallRAM(4, rnd)
			parent := t.TempDir()
			first, second := filepath.Join(parent, "1"), filepath.Join(parent, "2")
			if _, err := Create(context.Background(), first, r.spec()); err != nil {
				t.Fatal(err)
			}
			changed := r.dirty(rnd)
			r.delta(t, second, open(t, first), changed)
			base := open(t, second)
			if how == "compacted" {
				if _, err := Compact(context.Background(), second); err != nil {
					t.Fatal(err)
				}
				if err := r.compare(second); err != nil {
					t.Fatal(err)
				}
			} else if err := os.RemoveAll(second); err != nil {
				t.Fatal(err)
			}
			if err := r.compareOpen(base); err != nil {
				t.Errorf("the open base was disturbed: %v", err)
			}
			third := r.clone()
			info := third.delta(t, filepath.Join(parent, "3"), base, third.dirty(rnd))
			for _, f := range info.Manifest.Memory.Files {
				if how == "compacted" && f.Number == 2 {
					t.Error("a file that is gone was linked")
				}
			}
		})
	}
}

func TestCompact_leaves_one_file_with_nothing_to_spare(t *testing.T) {
	rnd := rand.New(rand.NewPCG(6, 6))
	r := smallRAM(6, rnd)
	parent := t.TempDir()
	dir := filepath.Join(parent, "0")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		base := open(t, dir)
		dir = filepath.Join(parent, fmt.Sprint(i+1))
		r.delta(t, dir, base, r.dirty(rnd))
	}
	before := open(t, dir)
	info, err := Compact(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.compare(dir); err != nil {
		t.Fatal(err)
	}
	if err := r.compareOpen(before); err != nil {
		t.Errorf("an open reader was disturbed: %v", err)
	}
	if err := Verify(context.Background(), dir); err != nil {
		t.Fatal(err)
	}
	after := open(t, dir)
	am, bm := *after.Manifest(), *before.Manifest()
	if len(am.Memory.Files) != 1 || am.ID != bm.ID || am.CreatedUnixNano != bm.CreatedUnixNano || am.Depth != bm.Depth || am.Stats.Pages != bm.Stats.Pages {
		t.Errorf("%+v became %+v", bm, am)
	}
	if after.ManifestSHA256() != info.ManifestSHA256 {
		t.Error("the digest is another")
	}
	again, err := Compact(context.Background(), dir)
	if err != nil || again.SizeBytes != 0 {
		t.Errorf("a second time: %+v, %v", again, err)
	}
	left, err := os.ReadDir(parent)
	if err != nil || slices.ContainsFunc(left, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), ".") }) {
		t.Errorf("%v is left (%v)", left, err)
	}
}

// A host that gets a snapshot from elsewhere reads the pages that its guest needs first with few requests.
func TestHot_pages_lie_one_behind_the_other(t *testing.T) {
	for _, dense := range []bool{false, true} {
		mem := testMemory(t, 64<<20)
		var hot []uint64
		for page := uint64(0); page < 16384; page += 3 {
			p := make([]byte, guestmem.PageSize)
			fillPage(p, page, page%2 == 0)
			writePage(t, mem, page, p)
			if page%51 == 0 {
				hot = append(hot, page)
			}
		}
		spec := testSpec(t, mem)
		spec.Hot = hot
		dir := filepath.Join(t.TempDir(), "s")
		if _, err := Create(t.Context(), dir, spec); err != nil {
			t.Fatal(err)
		}
		if dense {
			if _, err := Compact(t.Context(), dir); err != nil {
				t.Fatal(err)
			}
		}
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		places := map[Place]bool{}
		first, end, sum := int64(1<<62), int64(0), int64(0)
		d, err := NewDecoder()
		if err != nil {
			t.Fatal(err)
		}
		defer d.Release()
		got, want := make([]byte, guestmem.PageSize), make([]byte, guestmem.PageSize)
		for _, page := range hot {
			p, ok, err := s.Memory().FramePlace(page)
			if err != nil || !ok {
				t.Fatalf("page %d: %v, %v", page, ok, err)
			}
			if !places[p] {
				places[p] = true
				first, end, sum = min(first, p.Off), max(end, p.Off+p.Len), sum+p.Len
			}
			fillPage(want, page, page%2 == 0)
			if err := s.Memory().ReadPage(page, got, d); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("page %d differs, %v", page, err)
			}
		}
		if !dense && (sum != int64(len(hot))*guestmem.PageSize || end-first != sum) {
			t.Errorf("%d hot pages have %d bytes from %d to %d", len(hot), sum, first, end)
		}
		if err := Verify(t.Context(), dir); err != nil {
			t.Error(err)
		}
	}
}
