package snapshot

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// smallSnapshot has frames of both codecs in two chunks, and is small enough to
// try every bit of it. It returns the pages that are not zeros.
func smallSnapshot(t testing.TB) (dir string, want map[uint64][]byte) {
	t.Helper()
	mem := testMemory(t, guestmem.MinSize)
	want = map[uint64][]byte{}
	for _, page := range []uint64{0, 1, 3, ChunkPages - 1, 2 * ChunkPages} {
		p := make([]byte, guestmem.PageSize)
		if page == 2*ChunkPages {
			fillPage(p, page, true)
		} else {
			copy(p[page:], "a little text")
		}
		want[page] = p
		writePage(t, mem, page, p)
	}
	dir = filepath.Join(t.TempDir(), "snap")
	spec := testSpec(t, mem)
	if _, err := Create(context.Background(), dir, spec); err != nil {
		t.Fatal(err)
	}
	return dir, want
}

func isTyped(err error) bool {
	for _, e := range []error{ErrCorrupt, ErrIncomplete, ErrVersion, ErrForeign, ErrNotFound} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// readAll opens the snapshot and reads all pages of the two chunks. It returns
// the first error; wrong bytes are fatal.
func readAll(t *testing.T, dir string, want map[uint64][]byte, what string) error {
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
	if !bytes.Equal(s.Payloads()[0].Data, []byte("regs")) {
		t.Fatalf("%s: a payload has wrong bytes", what)
	}
	var first error
	got := make([]byte, guestmem.PageSize)
	for _, page := range []uint64{0, 1, 2, 3, 4, ChunkPages - 1, ChunkPages, 2 * ChunkPages, 2*ChunkPages + 1, 5 * ChunkPages} {
		if err := s.Memory().ReadPage(page, got, d); err != nil {
			if first == nil {
				first = err
			}
			continue
		}
		w := want[page]
		if w == nil {
			w = zeroPage[:]
		}
		if !bytes.Equal(got, w) {
			t.Fatalf("%s: page %d has wrong bytes", what, page)
		}
	}
	return first
}

func TestEveryFlippedBitIsRefused(t *testing.T) {
	dir, want := smallSnapshot(t)
	if err := readAll(t, dir, want, "undamaged"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{ManifestName, MemoryName} {
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
		step := 1
		if testing.Short() {
			step = 17
		}
		for i := 0; i < len(data)*8; i += step {
			bad := data[i/8] ^ 1<<(i%8)
			if _, err := f.WriteAt([]byte{bad}, int64(i/8)); err != nil {
				t.Fatal(err)
			}
			what := name + " with a flipped bit"
			err := readAll(t, dir, want, what)
			if err == nil {
				t.Errorf("%s: bit %d of byte %d: nothing was noticed", what, i%8, i/8)
			} else if !isTyped(err) {
				t.Errorf("%s: bit %d of byte %d: untyped error %v", what, i%8, i/8, err)
			}
			if _, err := f.WriteAt(data[i/8:i/8+1], int64(i/8)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := readAll(t, dir, want, "repaired"); err != nil {
		t.Fatal(err)
	}
}

func TestEveryTruncationIsRefusedByOpen(t *testing.T) {
	dir, _ := smallSnapshot(t)
	for _, name := range []string{ManifestName, MemoryName} {
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
		if err := os.WriteFile(path, append(data, 0), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("%s is one byte longer: got %v, want ErrCorrupt", name, err)
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWhatIsNoSnapshotIsToldApart(t *testing.T) {
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

func TestVerifyFindsADamagedFrame(t *testing.T) {
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

func TestAFrameThatExpandsTooFarIsRefused(t *testing.T) {
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

func TestReadingAFrameAllocatesNothing(t *testing.T) {
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
