package snapshot

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The page map does not know the content of RAM that is mapped from an image.
func TestA_snapshot_of_mapped_RAM_has_the_image_the_writes_and_no_discarded_pages(t *testing.T) {
	const size = 4 << 30
	hole := uint64(guestmem.HoleStart) / guestmem.PageSize
	last := uint64(size/guestmem.PageSize - 1)
	fd, err := unix.MemfdCreate("image", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "image")
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	want := map[uint64][]byte{}
	fill := func(page, seed uint64) []byte {
		p := make([]byte, guestmem.PageSize)
		fillPage(p, seed, true)
		want[page] = p
		return p
	}
	for _, page := range []uint64{0, 1, 2, 3, 300, 301, 302, 40000, hole - 1, hole, hole + 7, last} {
		if _, err := f.WriteAt(fill(page, page), int64(page*guestmem.PageSize)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, guestmem.ImageSeals); err != nil {
		t.Fatal(err)
	}
	mem, err := guestmem.NewPrivate(size, f)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	for _, page := range []uint64{1, 150, 301, 40001, hole, hole + 1} {
		writePage(t, mem, page, fill(page, page+1))
	}
	for _, page := range []uint64{2, 300, 301} { // touched or not
		if err := mem.Discard(guestmem.GPA(page*guestmem.PageSize), guestmem.PageSize); err != nil {
			t.Fatal(err)
		}
		delete(want, page)
	}
	for _, scan := range []bool{true, false} {
		spec := testSpec(t, mem)
		spec.Memory.(*GuestSource).pagemap.scan = scan && hasPagemapScan(t, mem)
		dir := filepath.Join(t.TempDir(), "snap")
		info, err := Create(t.Context(), dir, spec)
		if err != nil {
			t.Fatal(err)
		}
		if n := info.Manifest.Stats.Pages; n != uint64(len(want)) {
			t.Errorf("scan %v: %d pages, want %d", scan, n, len(want))
		}
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		for page, p := range want {
			leaf, err := s.Memory().Leaf(int(page / ChunkPages))
			if err != nil || leaf == nil {
				t.Fatalf("scan %v: no chunk of page %#x (%v)", scan, page, err)
			}
			k, slot, ok := leaf.Page(int(page % ChunkPages))
			if !ok {
				t.Errorf("scan %v: page %#x is missing", scan, page)
				continue
			}
			d, err := NewDecoder()
			if err != nil {
				t.Fatal(err)
			}
			raw, err := s.Memory().ReadFrame(leaf.Frame(k), d)
			if err != nil || !bytes.Equal(raw[slot*guestmem.PageSize:][:guestmem.PageSize], p) {
				t.Errorf("scan %v: page %#x is not what RAM holds (%v)", scan, page, err)
			}
			d.Release()
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
