package snapshot

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/farfiles"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// testMemory has pages of every kind: untouched zeros, touched zeros, text, and noise that does not compress.
func testMemory(t testing.TB, size uint64) *guestmem.Memory {
	t.Helper()
	mem, err := guestmem.New(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	return mem
}

func fillPage(p []byte, page uint64, noise bool) {
	r := rand.New(rand.NewPCG(page, 7))
	for i := 0; i < len(p); i += 8 {
		v := r.Uint64()
		if !noise {
			v &= 0x0101010101010101
		}
		for j := range 8 {
			p[i+j] = byte(v >> (8 * j))
		}
	}
}

func writePage(t testing.TB, mem *guestmem.Memory, page uint64, p []byte) {
	t.Helper()
	gpa, err := mem.FromLinear(page * guestmem.PageSize)
	if err != nil {
		t.Fatal(err)
	}
	if err := mem.Write(gpa, p); err != nil {
		t.Fatal(err)
	}
}

func testSpec(t testing.TB, mem *guestmem.Memory) Spec {
	t.Helper()
	src, err := NewGuestSource(mem)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { src.Close() })
	return Spec{
		Sandbox: "otter", VCPUs: 2, Kernel: "k", Image: "i", Memory: src,
		Host:  map[string]string{"tsc_khz": "2600000"},
		Disks: []Disk{{Name: "root", Size: 1 << 30, Layers: []string{"base", "top"}}},
		Payloads: []Payload{
			{Name: "vcpu0", Kind: "vcpu", Version: 1, Data: []byte("regs")},
			{Name: "blk0", Kind: "virtio-blk", Version: 3, Data: nil},
		},
	}
}

func TestWhat_was_written_is_read_back(t *testing.T) {
	mem := testMemory(t, 4<<30)
	want := map[uint64][]byte{}
	put := func(page uint64, p []byte) {
		want[page] = p
		writePage(t, mem, page, p)
	}
	for page := uint64(100); page < 1700; page += 1 + page%5 {
		p := make([]byte, guestmem.PageSize)
		fillPage(p, page, page%3 == 0)
		put(page, p)
	}
	last := uint64(4<<30)/guestmem.PageSize - 1
	hole := uint64(guestmem.HoleStart) / guestmem.PageSize
	for _, page := range []uint64{0, hole - 1, hole, last} {
		p := make([]byte, guestmem.PageSize)
		fillPage(p, page, false)
		put(page, p)
	}
	put(5000, make([]byte, guestmem.PageSize))

	dir := filepath.Join(t.TempDir(), "snap")
	info, err := Create(context.Background(), dir, testSpec(t, mem))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", info.Manifest.Stats)
	if got := info.Manifest.Stats.Pages; got != uint64(len(want)-1) {
		t.Errorf("%d pages stored, want %d", got, len(want)-1)
	}
	s, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Verify(context.Background()); err != nil {
		t.Fatal(err)
	}
	d, err := NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	got := make([]byte, guestmem.PageSize)
	for page := uint64(0); page < s.Memory().Pages(); page++ {
		w, ok := want[page]
		if !ok {
			if s.Memory().ZeroChunk(int(page / ChunkPages)) {
				page |= ChunkPages - 1
				continue
			}
			w = zeroPage[:]
		}
		if err := s.Memory().ReadPage(page, got, d); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, w) {
			t.Fatalf("page %d differs", page)
		}
	}
}

func TestOpenIn_opens_the_files_of_another_process(t *testing.T) {
	r := smallRAM(3, rand.New(rand.NewPCG(8, 21)))
	parent := t.TempDir()
	if _, err := Create(t.Context(), filepath.Join(parent, "base"), r.spec()); err != nil {
		t.Fatal(err)
	}
	c, f, err := farfiles.Pair()
	if err != nil {
		t.Fatal(err)
	}
	far, err := farfiles.New(f)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := farfiles.Serve(c, nil)
		done <- err
	}()
	defer func() {
		if err := errors.Join(far.Close(), <-done, c.Close()); err != nil {
			t.Error(err)
		}
	}()
	base, err := OpenIn(far, filepath.Join(parent, "base"))
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	spec := r.spec()
	spec.FS, spec.Base, spec.Changed = far, base, guestmem.NewPageSet(r.total())
	info, err := Create(t.Context(), filepath.Join(parent, "delta"), spec)
	if err != nil {
		t.Fatal(err)
	}
	if info.SharedBytes == 0 {
		t.Error("it has no link to the base's file")
	}
	s, err := OpenIn(far, info.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i, f := range s.Files() {
		if want := filepath.Join(info.Dir, s.Manifest().Memory.Files[i].Name); f.Name() != want {
			t.Errorf("file %d is %s, want %s", i, f.Name(), want)
		}
	}
	if err := r.compareOpen(s); err != nil {
		t.Error(err)
	}
	if _, err := OpenIn(far, filepath.Join(parent, "none")); !errors.Is(err, ErrNotFound) {
		t.Errorf("no snapshot: got %v, want ErrNotFound", err)
	}
}

// The directory may be written by somebody who wants another file to be read.
func TestOpen_follows_no_link_from_the_directory(t *testing.T) {
	r := smallRAM(3, rand.New(rand.NewPCG(8, 22)))
	dir := filepath.Join(t.TempDir(), "snap")
	if _, err := Create(t.Context(), dir, r.spec()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{ManifestName, MemoryName} {
		elsewhere := filepath.Join(t.TempDir(), name)
		path := filepath.Join(dir, name)
		if err := errors.Join(os.Rename(path, elsewhere), os.Symlink(elsewhere, path)); err != nil {
			t.Fatal(err)
		}
		if s, err := Open(dir); err == nil {
			s.Close()
			t.Errorf("%s was opened elsewhere", name)
		}
		if err := os.Rename(elsewhere, path); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.verify(dir); err != nil {
		t.Error(err)
	}
}
