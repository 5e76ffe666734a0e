package snapshot

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/drowse-vm/drowse/internal/test/racetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// smallSnapshot has frames of both codecs in two chunks. It is small enough to flip every bit of it.
func smallSnapshot(t testing.TB) (dir string, r *ram) {
	t.Helper()
	r = newRAM(Slot{Size: 2 * ChunkPages * guestmem.PageSize}, Slot{GPA: 4 << 30, Size: 40 * guestmem.PageSize})
	for _, page := range []uint64{0, 1, 3, ChunkPages - 1, 2 * ChunkPages} {
		p := make([]byte, guestmem.PageSize)
		if page == 2*ChunkPages {
			fillPage(p, page, true)
		} else {
			copy(p[page:], "a little text")
		}
		r.pages[page] = p
	}
	dir = filepath.Join(fastDir(t), "snap")
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	return dir, r
}

// smallDelta is a delta on such a snapshot. It has a chunk with frames in two files and one with a leaf in the old
// file. It does not need all of the old file.
func smallDelta(t testing.TB) (dir string, r *ram) {
	t.Helper()
	full, before := smallSnapshot(t)
	s := open(t, full)
	r = before.clone()
	changed := guestmem.NewPageSet(r.total())
	changed.Add(1, 3)
	delete(r.pages, 1)
	r.pages[2] = bytes.Repeat([]byte("other text"), 410)[:guestmem.PageSize]
	dir = full + "-delta"
	r.delta(t, dir, s, changed)
	return dir, r
}

// small lists the snapshots that the tests damage bit by bit.
var small = []struct {
	name string
	make func(t testing.TB) (string, *ram)
}{
	{"full", smallSnapshot},
	{"delta", smallDelta},
}

// needed marks the bytes of the memory files that the snapshot refers to. The files of ancestors have others too.
func needed(t *testing.T, dir string) map[string][]bool {
	t.Helper()
	s := open(t, dir)
	out := map[string][]bool{}
	for _, f := range s.manifest.Memory.Files {
		out[f.Name] = make([]bool, f.Size)
	}
	m := s.Memory()
	mark := func(file *memoryFile, at int64, n int) {
		for i := range n {
			out[file.name][at+int64(i)] = true
		}
	}
	for i := range m.files {
		mark(&m.files[i], 0, fileHeader)
	}
	mark(&m.files[len(m.files)-1], m.files[len(m.files)-1].root, len(m.root))
	for c := range m.Chunks() {
		l, err := m.Leaf(c)
		if err != nil {
			t.Fatal(err)
		}
		if l == nil {
			continue
		}
		r := m.ref(c)
		mark(m.file(r.file), r.offset, r.length())
		for i := range l.NumFrames() {
			mark(m.file(l.Frame(i).File()), l.Frame(i).Offset(), l.Frame(i).StoredBytes())
		}
	}
	return out
}

func isTyped(err error) bool {
	for _, e := range []error{ErrCorrupt, ErrIncomplete, ErrVersion, ErrForeign, ErrNotFound} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// readAll opens the snapshot and reads all pages. It returns the first error. Wrong bytes are fatal.
func readAll(t *testing.T, dir string, want *ram, what string) error {
	t.Helper()
	s, err := Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	d, err := NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	return s.readAll(t, want, what, d)
}

// again opens the memory files anew, as Open does, and reads all pages. It is for damage to the memory files
// alone: parsing the manifest takes most of the time.
func (s *Snapshot) again(t *testing.T, want *ram, what string, d *Decoder) error {
	t.Helper()
	n := &Snapshot{fs: s.fs, dir: s.dir, manifest: s.manifest, payloads: s.payloads}
	defer n.Close()
	if err := n.openMemory(); err != nil {
		return err
	}
	return n.readAll(t, want, what, d)
}

func (s *Snapshot) readAll(t *testing.T, want *ram, what string, d *Decoder) error {
	t.Helper()
	if !bytes.Equal(s.Payloads()[0].Data, []byte("regs")) {
		t.Fatalf("%s: a payload has wrong bytes", what)
	}
	var first error
	note := func(err error) {
		if first == nil {
			first = err
		}
	}
	m := s.Memory()
	for c := range m.Chunks() {
		l, err := m.Leaf(c)
		if err != nil {
			note(err)
			continue
		}
		pages := m.chunkPages(c)
		// place[k] holds the pages of frame k by their slots, -1 for none.
		var place [][MaxFramePages]int
		if l != nil {
			place = make([][MaxFramePages]int, l.NumFrames())
		}
		for k := range place {
			for slot := range place[k] {
				place[k][slot] = -1
			}
		}
		for i := range pages {
			if l == nil {
				break
			}
			if k, slot, ok := l.Page(i); ok {
				place[k][slot] = i
			}
		}
		for page := range want.pages {
			if page/ChunkPages != uint64(c) {
				continue
			}
			stored := false
			if l != nil {
				_, _, stored = l.Page(int(page % ChunkPages))
			}
			if !stored {
				t.Fatalf("%s: page %d has become zeros", what, page)
			}
		}
		for k := range place {
			raw, err := m.ReadFrame(l.Frame(k), d)
			if err != nil {
				note(err)
				continue
			}
			for slot, i := range place[k] {
				if i < 0 {
					continue
				}
				if page := c*ChunkPages + i; !bytes.Equal(raw[slot*guestmem.PageSize:][:guestmem.PageSize], want.pages[uint64(page)]) {
					t.Fatalf("%s: page %d has wrong bytes", what, page)
				}
			}
		}
	}
	return first
}

func TestEvery_flipped_bit_is_refused(t *testing.T) {
	for _, sn := range small {
		t.Run(sn.name, func(t *testing.T) {
			dir, want := sn.make(t)
			if err := readAll(t, dir, want, "undamaged"); err != nil {
				t.Fatal(err)
			}
			need := needed(t, dir)
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			spare := 0
			for _, e := range entries {
				spare += flipEveryBit(t, dir, e.Name(), want, need[e.Name()])
			}
			if (spare > 0) != (sn.name == "delta") {
				t.Errorf("%d bytes that nothing refers to", spare)
			}
			if err := readAll(t, dir, want, "repaired"); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// flipEveryBit returns how many bytes of the file may have any value, because nothing refers to them.
func flipEveryBit(t *testing.T, dir, name string, want *ram, need []bool) (spare int) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	data, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s has %d bytes", name, len(data))
	whole := open(t, dir)
	d, err := NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	for i := 0; i < len(data)*8; i += racetest.Cases(1, 17) {
		bad := data[i/8] ^ 1<<(i%8)
		if _, err := f.WriteAt([]byte{bad}, int64(i/8)); err != nil {
			t.Fatal(err)
		}
		if what := name + " with a flipped bit"; name == ManifestName {
			err = readAll(t, dir, want, what)
		} else {
			err = whole.again(t, want, what, d)
		}
		switch {
		case err == nil && (need == nil || need[i/8]):
			t.Errorf("%s: bit %d of byte %d: nothing was noticed", name, i%8, i/8)
		case err == nil:
			spare++
		case need != nil && !need[i/8]:
			t.Errorf("%s: bit %d of byte %d, which is not needed: %v", name, i%8, i/8, err)
		case !isTyped(err):
			t.Errorf("%s: bit %d of byte %d: untyped error %v", name, i%8, i/8, err)
		}
		if _, err := f.WriteAt(data[i/8:i/8+1], int64(i/8)); err != nil {
			t.Fatal(err)
		}
	}
	return spare / 8
}

func TestEvery_truncation_is_refused_by_open(t *testing.T) {
	for _, sn := range small {
		t.Run(sn.name, func(t *testing.T) {
			dir, want := sn.make(t)
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				truncateEverywhere(t, dir, e.Name())
			}
			if err := readAll(t, dir, want, "repaired"); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func truncateEverywhere(t *testing.T, dir, name string) {
	t.Helper()
	path := filepath.Join(dir, name)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for n := len(data) - 1; n >= 0; n-- {
		if err := os.Truncate(path, int64(n)); err != nil {
			t.Fatal(err)
		}
		s, err := Open(dir)
		if err == nil {
			s.Close()
			t.Fatalf("%s cut to %d bytes of %d was opened", name, n, len(data))
		}
		if !errors.Is(err, ErrIncomplete) {
			t.Fatalf("%s cut to %d bytes of %d: got %v, want ErrIncomplete", name, n, len(data), err)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.Is(err, ErrIncomplete) {
		t.Fatalf("%s is missing: got %v, want ErrIncomplete", name, err)
	}
	if err := os.WriteFile(path, append(bytes.Clone(data), 0), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("%s is one byte longer: got %v, want ErrCorrupt", name, err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

var corruptions = flag.Int("snapshot.corruptions", 0, "how many random corruptions of a larger snapshot to try; 0: 20,000, or 1,000 with -short or -race")

// The test does random damage of every kind to a larger chain: it overwrites, moves, swaps or zeroes runs of
// bytes, and loses sectors.
func TestRandom_damage_never_gives_wrong_pages(t *testing.T) {
	n := *corruptions
	if n == 0 {
		n = racetest.Cases(20_000, 1000)
	}
	rnd := rand.New(rand.NewPCG(12, 12))
	r := newRAM(Slot{Size: 1200 * guestmem.PageSize})
	parent := fastDir(t)
	dir := filepath.Join(parent, "0")
	for p := uint64(0); p < r.total(); p += 16 {
		r.set(p, rnd)
	}
	if _, err := Create(context.Background(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		changed := guestmem.NewPageSet(r.total())
		for range 8 {
			p := rnd.Uint64N(r.total())
			changed.Add(p, p+1)
			r.set(p, rnd)
		}
		base := open(t, dir)
		dir = filepath.Join(parent, fmt.Sprint(i+1))
		r.delta(t, dir, base, changed)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	var files []*os.File
	var good [][]byte
	total := 0
	for _, e := range entries {
		f, err := os.OpenFile(filepath.Join(dir, e.Name()), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		names, files, good, total = append(names, e.Name()), append(files, f), append(good, b), total+len(b)
	}
	noticed := 0
	for i := range n {
		k := rnd.IntN(len(files))
		bad := bytes.Clone(good[k])
		for range 1 + rnd.IntN(3) {
			at := rnd.IntN(len(bad))
			run := min(1+rnd.IntN([]int{1, 8, 600}[rnd.IntN(3)]), len(bad)-at)
			switch rnd.IntN(4) {
			case 0:
				for j := range run {
					bad[at+j] = byte(rnd.Uint32())
				}
			case 1:
				clear(bad[at : at+run])
			case 2:
				copy(bad[at:at+run], good[k][rnd.IntN(len(bad)):])
			case 3: // a lost sector
				at &^= 511
				clear(bad[at:min(at+512, len(bad))])
			}
		}
		if _, err := files[k].WriteAt(bad, 0); err != nil {
			t.Fatal(err)
		}
		err := readAll(t, dir, r, names[k])
		if err != nil {
			noticed++
			if !isTyped(err) {
				t.Fatalf("damage %d of %s: untyped error %v", i, names[k], err)
			}
		}
		if err == nil && k == 0 && !bytes.Equal(bad, good[k]) {
			t.Fatalf("damage %d of %s was not noticed", i, names[k])
		}
		if _, err := files[k].WriteAt(good[k], 0); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d corruptions of %d files of %d KiB: %d refused, none gave a wrong page", n, len(files), total>>10, noticed)
	if noticed < n/2 {
		t.Errorf("only %d were noticed", noticed)
	}
	if err := readAll(t, dir, r, "repaired"); err != nil {
		t.Fatal(err)
	}
}

func TestWhat_is_no_snapshot_is_told_apart(t *testing.T) {
	dir, _ := smallSnapshot(t)
	other, _ := smallSnapshot(t)
	if _, err := Open(filepath.Join(dir, "nothing")); !errors.Is(err, ErrNotFound) {
		t.Errorf("no directory: got %v, want ErrNotFound", err)
	}
	manifest := filepath.Join(dir, ManifestName)
	data, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	put := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(manifest, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put([]byte("#!/bin/sh\necho this is something else entirely\n"))
	if _, err := Open(dir); !errors.Is(err, ErrForeign) {
		t.Errorf("another kind of file: got %v, want ErrForeign", err)
	}
	newer := bytes.Clone(data)
	binary.LittleEndian.PutUint32(newer[8:], Version+1)
	put(newer)
	if _, err := Open(dir); !errors.Is(err, ErrVersion) {
		t.Errorf("a newer format: got %v, want ErrVersion", err)
	}
	put(data)
	mem, err := os.ReadFile(filepath.Join(other, MemoryName))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, MemoryName), mem, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.Is(err, ErrCorrupt) {
		t.Errorf("the memory of another snapshot: got %v, want ErrCorrupt", err)
	}
}

func TestVerify_finds_a_damaged_frame(t *testing.T) {
	dir, _ := smallSnapshot(t)
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Verify(context.Background()); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, MemoryName), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{0xa5}, fileHeader+10); err != nil {
		t.Fatal(err)
	}
	var ce *CorruptError
	if err := s.Verify(context.Background()); !errors.As(err, &ce) || ce.File != MemoryName || ce.Offset != fileHeader {
		t.Errorf("got %v, want a CorruptError of the first frame", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Verify(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

func TestA_frame_that_expands_too_far_is_refused(t *testing.T) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	var stream bytes.Buffer
	enc.Reset(&stream)
	zeros := make([]byte, 1<<20)
	for range 512 {
		if _, err := enc.Write(zeros); err != nil {
			t.Fatal(err)
		}
	}
	if err := enc.Close(); err != nil {
		t.Fatal(err)
	}
	d, err := NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	for _, tc := range []struct {
		name string
		in   []byte
	}{
		{"512 MiB without a stated size", stream.Bytes()},
		{"64 MiB with a stated size", enc.EncodeAll(make([]byte, 64<<20), nil)},
		{"one byte too many", enc.EncodeAll(make([]byte, 2*guestmem.PageSize+1), nil)},
		{"one byte too few", enc.EncodeAll(make([]byte, 2*guestmem.PageSize-1), nil)},
		{"two zstd frames", enc.EncodeAll(make([]byte, 2*guestmem.PageSize), enc.EncodeAll(make([]byte, 2*guestmem.PageSize), nil))},
	} {
		f := Frame{stored: uint32(len(tc.in)), crc: checksum(tc.in), file: 1, codec: codecZstd, pages: 2}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		out, wrong := d.decode(&f, tc.in)
		runtime.ReadMemStats(&after)
		if out != nil || wrong == "" {
			t.Errorf("%s: it was taken", tc.name)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 4<<20 {
			t.Errorf("%s: %d bytes were allocated to refuse it", tc.name, n)
		}
	}
}

func TestReading_a_frame_allocates_nothing(t *testing.T) {
	dir, _ := smallSnapshot(t)
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	d, err := NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	l, err := s.Memory().Leaf(0)
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() {
		if _, err := s.Memory().ReadFrame(l.Frame(0), d); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations for each frame", n)
	}
}
