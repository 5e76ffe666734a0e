package pagecache

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ramBytes = 64 << 20

func newRAM(t testing.TB) *guestmem.Memory {
	t.Helper()
	mem, err := guestmem.New(ramBytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	return mem
}

// fill gives pages [first, end) content that compresses and differs between seeds.
func fill(t testing.TB, mem *guestmem.Memory, seed, first, end uint64) {
	t.Helper()
	p := make([]byte, pageSize)
	for page := first; page < end; page++ {
		r := rand.New(rand.NewPCG(seed, page))
		for i := range p {
			p[i] = byte(r.UintN(3))
		}
		if err := mem.Write(guestmem.GPA(page*pageSize), p); err != nil {
			t.Fatal(err)
		}
	}
}

// take writes a snapshot of mem. With a base it is a delta in which pages [first, end) have changed.
func take(t testing.TB, mem *guestmem.Memory, base *snapshot.Snapshot, first, end uint64) *snapshot.Snapshot {
	t.Helper()
	src, err := snapshot.NewGuestSource(mem)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	spec := snapshot.Spec{VCPUs: 1, Memory: src}
	if base != nil {
		spec.Base, spec.Changed = base, guestmem.NewPageSet(ramBytes/pageSize)
		spec.Changed.Add(first, end)
	}
	dir := filepath.Join(t.TempDir(), "snap")
	if _, err := snapshot.Create(t.Context(), dir, spec); err != nil {
		t.Fatal(err)
	}
	s, err := snapshot.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// full returns a snapshot with n pages that have content.
func full(t testing.TB, seed, n uint64) *snapshot.Snapshot {
	t.Helper()
	mem := newRAM(t)
	fill(t, mem, seed, 0, n)
	return take(t, mem, nil, 0, 0)
}

func newCache(t testing.TB) *Cache {
	t.Helper()
	c := New(filepath.Join(t.TempDir(), "pages"))
	c.minFree = 0
	return c
}

// placed is a frame and a page of RAM that it has.
type placed struct {
	*snapshot.Frame
	page uint64
}

// framesOf returns all frames of a snapshot.
func framesOf(t testing.TB, s *snapshot.Snapshot) (out []placed) {
	t.Helper()
	for i := range s.Memory().Chunks() {
		l, err := s.Memory().Leaf(i)
		if err != nil {
			t.Fatal(err)
		}
		for k := 0; l != nil && k < l.NumFrames(); k++ {
			out = append(out, placed{l.Frame(k), pageIn(t, l, k) + uint64(i)*snapshot.ChunkPages})
		}
	}
	return out
}

// pageIn returns the first page of the chunk that a frame has.
func pageIn(t testing.TB, l *snapshot.Leaf, frame int) uint64 {
	t.Helper()
	for i := range snapshot.ChunkPages {
		if f, _, ok := l.Page(i); ok && f == frame {
			return uint64(i)
		}
	}
	t.Fatalf("frame %d has no page", frame)
	return 0
}

// look asks a reader for all frames and returns the count of hits. A frame without the pages of the snapshot is an
// error.
func look(t testing.TB, r *Reader, s *snapshot.Snapshot) (hits int) {
	t.Helper()
	d, err := snapshot.NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	buf := make([]byte, snapshot.MaxFramePages*pageSize)
	for _, f := range framesOf(t, s) {
		got, ok := r.Read(f.page, f.Frame, buf)
		if !ok {
			continue
		}
		hits++
		want, err := s.Memory().ReadFrame(f.Frame, d)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("the frame at %d of file %d has other pages than the snapshot", f.Offset(), f.File())
		}
	}
	return hits
}

// lookOnce is look with a new reader.
func lookOnce(t testing.TB, c *Cache, s *snapshot.Snapshot) int {
	t.Helper()
	r := c.Open(osfile.OS, s)
	defer r.Close()
	return look(t, r, s)
}

// wake looks, and adds what was missing.
func wake(t testing.TB, c *Cache, s *snapshot.Snapshot) (hits int) {
	t.Helper()
	r := c.Open(osfile.OS, s)
	defer r.Close()
	hits = look(t, r, s)
	if err := c.Add(t.Context(), s.Dir(), r.Missed(), nil); err != nil {
		t.Fatal(err)
	}
	return hits
}

// theFile returns the cache file of the last memory file of a snapshot.
func theFile(c *Cache, s *snapshot.Snapshot) string {
	files := s.Files()
	name, err := Name(files[len(files)-1])
	if err != nil {
		panic(err) // a memory file that is open
	}
	return c.path(name)
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func overwrite(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestThe_second_wake_finds_all_frames_of_the_first(t *testing.T) {
	c, s := newCache(t), full(t, 1, 300)
	n := len(framesOf(t, s))
	if n < 2 {
		t.Fatalf("the snapshot has %d frames: this test shows nothing", n)
	}
	for i, want := range []int{0, n, n} {
		if got := wake(t, c, s); got != want {
			t.Errorf("wake %d found %d frames of %d, want %d", i+1, got, n, want)
		}
	}
}

// The first snapshot of a clone, and each later one, refers to the files of earlier snapshots.
func TestA_chain_finds_what_it_has_in_common_at_any_depth(t *testing.T) {
	const depth = 40
	c, mem := newCache(t), newRAM(t)
	fill(t, mem, 1, 0, 300)
	s := take(t, mem, nil, 0, 0)
	wake(t, c, s)
	for i := range uint64(depth) {
		fill(t, mem, 2+i, 300+i, 301+i)
		s = take(t, mem, s, 300+i, 301+i)
	}
	base := s.Manifest().Memory.Files[0]
	want := 0
	for _, f := range framesOf(t, s) {
		if f.File() == base.Number {
			want++
		}
	}
	if got := wake(t, c, s); got != want || want == 0 {
		t.Errorf("found %d frames of the first file, which has %d", got, want)
	}
	// After another sleep, the cache has what the ancestors have.
	last := s
	s = take(t, mem, s, 0, 0)
	own := last.Manifest().Memory.Files[len(last.Manifest().Memory.Files)-1].Number
	want = 0
	for _, f := range framesOf(t, s) {
		if f.File() != own {
			want++
		}
	}
	if got := wake(t, c, s); got != want {
		t.Errorf("found %d frames of ancestors, there are %d", got, want)
	}
}

func TestA_deltas_own_file_is_kept_when_it_is_missed_the_second_time(t *testing.T) {
	c, mem := newCache(t), newRAM(t)
	fill(t, mem, 1, 0, 64)
	base := take(t, mem, nil, 0, 0)
	fill(t, mem, 2, 0, 64)
	s := take(t, mem, base, 0, 64)
	n := len(framesOf(t, s))
	for i, want := range []int{0, 0, n} {
		if got := wake(t, c, s); got != want {
			t.Errorf("wake %d found %d frames of %d, want %d", i+1, got, n, want)
		}
	}
}

// The test flips bits of a small file in turn: all of its header and its list, and some of its content.
func TestNo_flipped_bit_delivers_anything_else(t *testing.T) {
	c, s := newCache(t), full(t, 1, 2)
	wake(t, c, s)
	n := len(framesOf(t, s))
	path := theFile(c, s)
	good := read(t, path)
	const step = 61 // in content
	list := (headerSize + n*entrySize) * 8
	var bits []int
	for bit := range list {
		bits = append(bits, bit)
	}
	for bit := int(contentAt(n)) * 8; bit < len(good)*8; bit += step {
		bits = append(bits, bit)
	}
	for _, bit := range bits {
		// Write in place, so that the file stays in the page cache.
		bad := good[bit/8] ^ 1<<(bit%8)
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.WriteAt([]byte{bad}, int64(bit/8))
		if err == nil && lookOnce(t, c, s) == n {
			t.Errorf("bit %d was flipped, and nothing was missed", bit)
		}
		_, werr := f.WriteAt(good[bit/8:bit/8+1], int64(bit/8))
		if err := errors.Join(err, werr, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if got := lookOnce(t, c, s); got != n {
		t.Errorf("as it was, it has %d frames of %d", got, n)
	}
}

func TestA_file_that_is_cut_short_delivers_nothing_else(t *testing.T) {
	c, s := newCache(t), full(t, 1, 40)
	wake(t, c, s)
	path := theFile(c, s)
	good := read(t, path)
	for n := 0; n < len(good); n += 97 {
		overwrite(t, path, good[:n])
		if got := lookOnce(t, c, s); got != 0 {
			t.Fatalf("cut to %d bytes of %d it had %d frames", n, len(good), got)
		}
	}
	overwrite(t, path, append(good, 0))
	if got := lookOnce(t, c, s); got != 0 {
		t.Errorf("with a byte too many it had %d frames", got)
	}
}

// A file that is cut short while it is open is missed as well: the reader has no mapping of it.
func TestA_file_that_is_cut_short_while_it_is_read_is_missed(t *testing.T) {
	c, s := newCache(t), full(t, 1, 300)
	wake(t, c, s)
	r := c.Open(osfile.OS, s)
	defer r.Close()
	if err := os.Truncate(theFile(c, s), contentAt(len(framesOf(t, s)))+pageSize); err != nil {
		t.Fatal(err)
	}
	if got := look(t, r, s); got != 0 {
		t.Errorf("%d frames were there", got)
	}
}

func TestWhat_is_not_of_this_snapshot_is_not_delivered(t *testing.T) {
	le := binary.LittleEndian
	resum := func(b []byte) {
		n := int(le.Uint32(b[12:]))
		le.PutUint32(b[sumAt:], indexSum(b[:headerSize+n*entrySize]))
	}
	for _, tt := range []struct {
		name string
		do   func(b, other []byte) []byte
	}{
		{"the file of another memory file", func(_, other []byte) []byte { return other }},
		{"the content of another one", func(b, other []byte) []byte {
			n := int(le.Uint32(b[12:]))
			return append(b[:contentAt(n)], other[contentAt(n):]...)
		}},
		{"of another version", func(b, _ []byte) []byte { b[8]++; resum(b); return b }},
		{"of another boot", func(b, _ []byte) []byte { b[bootAt]++; resum(b); return b }},
		{"with more entries than there may be", func(b, _ []byte) []byte { le.PutUint32(b[12:], 1<<31); return b }},
		{"whose frames have another checksum", func(b, _ []byte) []byte {
			for i := range int(le.Uint32(b[12:])) {
				b[headerSize+i*entrySize+12]++
			}
			resum(b)
			return b
		}},
		{"whose first frame has no pages", func(b, _ []byte) []byte { b[headerSize+24] = 0; resum(b); return b }},
		{"whose first frame has more pages than a frame may", func(b, _ []byte) []byte { b[headerSize+24] = 255; resum(b); return b }},
		{"whose first frame lies elsewhere", func(b, _ []byte) []byte { le.PutUint32(b[headerSize+16:], 1<<31); resum(b); return b }},
		{"text", func([]byte, []byte) []byte { return []byte(strings.Repeat("pages ", 50000)) }},
		{"nothing", func([]byte, []byte) []byte { return nil }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s, other := newCache(t), full(t, 1, 64), full(t, 2, 64)
			wake(t, c, s)
			wake(t, c, other)
			overwrite(t, theFile(c, s), tt.do(read(t, theFile(c, s)), read(t, theFile(c, other))))
			if got := wake(t, c, s); got != 0 {
				t.Errorf("%d frames were there", got)
			}
			// The wake must have repaired the file.
			if got, n := lookOnce(t, c, s), len(framesOf(t, s)); got != n {
				t.Errorf("afterwards %d frames of %d were there", got, n)
			}
		})
	}
}

// A file that lacks only one of many frames is not written again for it, unless it is damaged.
func TestA_damaged_frame_is_put_right(t *testing.T) {
	c, s := newCache(t), full(t, 1, 1024)
	wake(t, c, s)
	n := len(framesOf(t, s))
	if n <= slack {
		t.Fatalf("the snapshot has %d frames: this test shows less than it says", n)
	}
	b := read(t, theFile(c, s))
	b[contentAt(n)+100] ^= 1
	overwrite(t, theFile(c, s), b)
	for i, want := range []int{n - 1, n} {
		if got := wake(t, c, s); got != want {
			t.Errorf("wake %d found %d frames, want %d", i+1, got, want)
		}
	}
}

func TestMany_writers_at_once_leave_whole_files(t *testing.T) {
	c := newCache(t)
	mem := newRAM(t)
	fill(t, mem, 1, 0, 300)
	base := take(t, mem, nil, 0, 0)
	var all []*snapshot.Snapshot
	for i := range uint64(4) {
		fill(t, mem, 2+i, 400, 420)
		all = append(all, take(t, mem, base, 400, 420))
	}
	var writers sync.WaitGroup
	for i := range 12 {
		writers.Go(func() {
			r := c.Open(osfile.OS, all[i%4])
			defer r.Close()
			buf := make([]byte, snapshot.MaxFramePages*pageSize)
			for k, f := range framesOf(t, all[i%4]) {
				if k%4 == i%4 || f.File() != 1 { // each add has missed other frames
					r.Read(f.page, f.Frame, buf)
				}
			}
			if err := c.Add(t.Context(), all[i%4].Dir(), r.Missed(), nil); err != nil {
				t.Error(err)
			}
		})
	}
	writers.Wait()
	for _, s := range all {
		wake(t, c, s)
		wake(t, c, s)
		if got, n := lookOnce(t, c, s), len(framesOf(t, s)); got != n {
			t.Errorf("%d frames of %d were there", got, n)
		}
	}
	noTemps(t, c)
}

func noTemps(t *testing.T, c *Cache) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(c.dir, tempPrefix+"*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestWithout_room_nothing_is_kept(t *testing.T) {
	c, s := newCache(t), full(t, 1, 64)
	c.minFree = 1 << 60
	r := c.Open(osfile.OS, s)
	defer r.Close()
	look(t, r, s)
	if err := c.Add(t.Context(), s.Dir(), r.Missed(), nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v, want ENOSPC", err)
	}
	if got := lookOnce(t, c, s); got != 0 {
		t.Errorf("%d frames were kept", got)
	}
	noTemps(t, c)
}

func TestAdd_keeps_no_pages_that_may_not_be_kept_and_asks_for_all_that_it_takes(t *testing.T) {
	c, s := newCache(t), full(t, 1, 64)
	r := c.Open(osfile.OS, s)
	defer r.Close()
	look(t, r, s)
	missed := r.Missed()
	var asked int64
	answer := false
	may := func(_ string, n int64) bool { asked = n; return answer }
	if err := c.Add(t.Context(), s.Dir(), missed, may); err != nil || asked == 0 {
		t.Errorf("asked for %d, %v", asked, err)
	}
	if got, err := filepath.Glob(filepath.Join(c.dir, "*")); err != nil || len(got) > 0 {
		t.Errorf("there are %v, %v", got, err)
	}
	answer = true
	if err := c.Add(t.Context(), s.Dir(), missed, may); err != nil {
		t.Fatal(err)
	}
	all, err := c.list()
	if err != nil || len(all) != 1 || all[0].size > asked {
		t.Errorf("asked for %d, and there are %+v, %v", asked, all, err)
	}
}

// The file system becomes full in the middle of a file.
func TestA_file_that_cannot_be_written_leaves_the_others(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "small")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("mounting a small file system: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	c := New(filepath.Join(dir, "pages"))
	c.minFree = 0
	mem := newRAM(t)
	fill(t, mem, 1, 0, 100)
	s := take(t, mem, nil, 0, 0)
	wake(t, c, s)
	n := len(framesOf(t, s))
	if got := lookOnce(t, c, s); got != n {
		t.Fatalf("%d frames of %d were kept", got, n)
	}
	// The check for room comes before others write as well, and so passes.
	more := full(t, 2, 400)
	r := c.Open(osfile.OS, more)
	defer r.Close()
	look(t, r, more)
	if err := c.Add(t.Context(), more.Dir(), r.Missed(), nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v, want ENOSPC", err)
	}
	noTemps(t, c)
	if got := lookOnce(t, c, s); got != n {
		t.Errorf("of the other file %d frames of %d are there", got, n)
	}
}

func TestA_file_has_no_more_than_it_may(t *testing.T) {
	c, s := newCache(t), full(t, 1, 400)
	c.maxFile = 100 * pageSize
	for range 3 {
		wake(t, c, s)
	}
	if st, err := os.Stat(theFile(c, s)); err != nil || st.Size() > c.maxFile+2*pageSize || st.Size() < c.maxFile/2 {
		t.Errorf("it has %v, %v", st.Size(), err)
	}
	if got := lookOnce(t, c, s); got == 0 || got == len(framesOf(t, s)) {
		t.Errorf("%d frames are in it", got)
	}
}

func TestWhat_was_used_least_recently_goes_first(t *testing.T) {
	c := newCache(t)
	var all []*snapshot.Snapshot
	for i := range uint64(4) {
		all = append(all, full(t, 1+i, 64))
	}
	for i, s := range all[:3] {
		wake(t, c, s)
		at := time.Now().Add(time.Duration(i-10) * time.Hour)
		if err := os.Chtimes(theFile(c, s), at, at); err != nil {
			t.Fatal(err)
		}
	}
	wake(t, c, all[0]) // hits all, so the file counts as used
	c.maxBytes = 3 * 66 * pageSize
	wake(t, c, all[3])
	for i, want := range []bool{true, false, true, true} {
		if got := lookOnce(t, c, all[i]) > 0; got != want {
			t.Errorf("file %d is there: %v, want %v", i, got, want)
		}
	}
}

func TestSweep_keeps_what_snapshots_have_and_others_files(t *testing.T) {
	c, s, gone := newCache(t), full(t, 1, 64), full(t, 2, 64)
	if n, bytes, err := c.Sweep(nil); n != 0 || bytes != 0 || err != nil {
		t.Errorf("without a cache: %d files, %d bytes, %v", n, bytes, err)
	}
	wake(t, c, s)
	wake(t, c, gone)
	strange := filepath.Join(c.dir, "notes.txt")
	overwrite(t, strange, []byte("mine"))
	overwrite(t, filepath.Join(c.dir, tempPrefix+"123"), []byte("half"))
	n, bytes, err := c.Sweep(map[string]bool{filepath.Base(theFile(c, s)): true})
	if n != 1 || bytes < 64*pageSize || err != nil {
		t.Errorf("%d files, %d bytes, %v", n, bytes, err)
	}
	if got := lookOnce(t, c, gone); got != 0 {
		t.Errorf("%d frames of the one that is gone are there", got)
	}
	if got, want := lookOnce(t, c, s), len(framesOf(t, s)); got != want {
		t.Errorf("%d frames of %d of the other are there", got, want)
	}
	if _, err := os.Stat(strange); err != nil {
		t.Error(err)
	}
	noTemps(t, c)
}

func TestSweep_does_not_wait_for_a_writer(t *testing.T) {
	c, s := newCache(t), full(t, 1, 64)
	wake(t, c, s)
	lock, err := osfile.TryOpenLocked(c.dir, os.O_RDONLY, 0, osfile.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if n, _, err := c.Sweep(nil); n != 0 || err != nil {
		t.Errorf("%d files went, %v", n, err)
	}
}

func TestAdd_ends_with_its_context(t *testing.T) {
	c, s := newCache(t), full(t, 1, 64)
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	lock, err := osfile.TryOpenLocked(c.dir, os.O_RDONLY, 0, osfile.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	r := c.Open(osfile.OS, s)
	defer r.Close()
	look(t, r, s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Add(ctx, s.Dir(), r.Missed(), nil) }()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was told to end", err)
	}
}

func TestAdd_of_a_snapshot_that_is_gone_changes_nothing(t *testing.T) {
	c, s := newCache(t), full(t, 1, 64)
	r := c.Open(osfile.OS, s)
	defer r.Close()
	look(t, r, s)
	if err := os.RemoveAll(s.Dir()); err != nil {
		t.Fatal(err)
	}
	if err := c.Add(t.Context(), s.Dir(), r.Missed(), nil); !errors.Is(err, snapshot.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

// Pages that are not in memory are read from the snapshot, in which they are smaller.
func TestRead_does_not_wait_for_the_disk(t *testing.T) {
	c, s := newCache(t), full(t, 1, 300)
	wake(t, c, s)
	f, err := os.Open(theFile(c, s))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := c.Open(osfile.OS, s)
	defer r.Close()
	if err := errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Preadv2(int(f.Fd()), [][]byte{make([]byte, pageSize)}, pageSize, unix.RWF_NOWAIT); n > 0 || !errors.Is(err, unix.EAGAIN) {
		t.Skipf("this file system keeps files in memory, or cannot say: %d, %v", n, err)
	}
	// A read that does not wait starts one ahead, which may be quick: one of these finds its page still absent.
	waits := true
	buf := make([]byte, snapshot.MaxFramePages*pageSize)
	for _, frame := range framesOf(t, s) {
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		if _, ok := r.Read(frame.page, frame.Frame, buf); !ok {
			waits = false
		}
	}
	if waits {
		t.Error("all frames were read from the disk")
	}
	if r.Stats().Damaged != 0 {
		t.Error("what was not in memory counts as damaged")
	}
}

func TestRead_allocates_nothing(t *testing.T) {
	c, s := newCache(t), full(t, 1, 300)
	wake(t, c, s)
	r := c.Open(osfile.OS, s)
	defer r.Close()
	there, absent := framesOf(t, s)[0], framesOf(t, full(t, 2, 64))[0]
	buf := make([]byte, snapshot.MaxFramePages*pageSize)
	for name, f := range map[string]placed{"a frame that is there": there, "one that is not": absent} {
		if n := testing.AllocsPerRun(100, func() { r.Read(f.page, f.Frame, buf) }); n != 0 {
			t.Errorf("reading %s allocates %v times", name, n)
		}
	}
}

// Whoever writes a memory file chooses the id in it.
func TestA_copy_of_a_memory_file_shares_no_pages_with_it(t *testing.T) {
	c, s := newCache(t), full(t, 1, 64)
	wake(t, c, s)
	dir := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(dir, os.DirFS(s.Dir())); err != nil {
		t.Fatal(err)
	}
	other, err := snapshot.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if other.Manifest().Memory.Files[0].ID != s.Manifest().Memory.Files[0].ID {
		t.Fatal("the copy has another id: this test shows nothing")
	}
	if got := lookOnce(t, c, other); got != 0 {
		t.Errorf("it has got %d frames", got)
	}
	if got := wake(t, c, s); got != len(framesOf(t, s)) {
		t.Errorf("of the file itself, only %d frames are there", got)
	}
}

func TestA_link_to_a_memory_file_has_its_pages_and_a_changed_file_does_not(t *testing.T) {
	c, s := newCache(t), full(t, 1, 64)
	wake(t, c, s)
	path := filepath.Join(s.Dir(), snapshot.MemoryName)
	if err := os.Link(path, filepath.Join(t.TempDir(), "link")); err != nil {
		t.Fatal(err)
	}
	if got := lookOnce(t, c, s); got != len(framesOf(t, s)) {
		t.Errorf("after a link, only %d frames are there", got)
	}
	now := time.Now()
	if err := os.Chtimes(path, now, now); err != nil {
		t.Fatal(err)
	}
	if got := lookOnce(t, c, s); got != 0 {
		t.Errorf("after a change, %d frames are there", got)
	}
}

// Another process says what it has missed.
func TestAdd_takes_any_list_of_pages(t *testing.T) {
	c, s := newCache(t), full(t, 1, 64)
	missed := []uint64{1 << 63, ^uint64(0), ramBytes / pageSize, ramBytes/pageSize - 1, 0, 0, 1, 0}
	for range MaxMissed {
		missed = append(missed, 40)
	}
	if err := c.Add(t.Context(), s.Dir(), missed, nil); err != nil {
		t.Fatal(err)
	}
	if got := lookOnce(t, c, s); got != 2 {
		t.Errorf("%d frames are there, 2 were missed", got)
	}
	if err := c.Add(t.Context(), s.Dir(), nil, nil); err != nil {
		t.Error(err)
	}
}

func FuzzDecodeIndex(f *testing.F) {
	id, boot := identity{1}, [16]byte{2}
	good := encodeIndex(id, boot, []entry{{key: key{offset: 64, stored: 9, crc: 1, pages: 16}, place: 1, sum: 3}, {key: key{offset: 99, pages: 1}, place: 17}})
	f.Add(good[:headerSize+2*entrySize], int64(18*pageSize))
	f.Add(encodeIndex(id, boot, nil)[:headerSize], int64(pageSize))
	f.Add([]byte(magic), int64(8))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		if len(b) >= headerSize {
			// The fuzzer does not find a checksum by itself.
			b = bytes.Clone(b)
			binary.LittleEndian.PutUint32(b[sumAt:], crc32.Update(crc32.Checksum(b[:sumAt], castagnoli), castagnoli, b[headerSize:]))
		}
		entries, err := decodeIndex(b, id, boot, size)
		if err != nil {
			if !errors.Is(err, errUnusable) {
				t.Errorf("an error of another kind: %v", err)
			}
			return
		}
		for i := range entries {
			if end := int64(entries[i].place)*pageSize + int64(entries[i].size()); end > size || entries[i].size() > snapshot.MaxFramePages*pageSize {
				t.Errorf("entry %d is outside of the file", i)
			}
		}
		const unused = identityAt + len(id)
		again := encodeIndex(id, boot, entries)[:len(b)]
		if !bytes.Equal(again[:sumAt], b[:sumAt]) && bytes.Equal(b[unused:sumAt], make([]byte, sumAt-unused)) {
			t.Errorf("%x is written as %x", b, again)
		}
	})
}

// BenchmarkFrame measures the cost of a page of a frame, from a snapshot and from a cache, until it can be put in
// place.
func BenchmarkFrame(b *testing.B) {
	c, s := newCache(b), full(b, 1, 512)
	wake(b, c, s)
	r := c.Open(osfile.OS, s)
	defer r.Close()
	d, err := snapshot.NewDecoder()
	if err != nil {
		b.Fatal(err)
	}
	defer d.Release()
	frames := framesOf(b, s)
	buf := make([]byte, snapshot.MaxFramePages*pageSize)
	b.Run("snapshot", func(b *testing.B) {
		for i := range b.N {
			if _, err := s.Memory().ReadFrame(frames[i%len(frames)].Frame, d); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("cache", func(b *testing.B) {
		for i := range b.N {
			if _, ok := r.Read(frames[i%len(frames)].page, frames[i%len(frames)].Frame, buf); !ok {
				b.Fatal("it is not there")
			}
		}
	})
}
