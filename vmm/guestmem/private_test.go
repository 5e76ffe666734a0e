package guestmem

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// memfd makes an image of RAM of size bytes in which each of the pages is filled with
// its number, and one more.
func memfd(t *testing.T, size uint64, seals int, pages ...uint64) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("image", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "image")
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(int64(size)); err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(page) + 1}, PageSize), int64(page*PageSize)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f
}

func newPrivate(t *testing.T, f *os.File, size uint64) *Memory {
	t.Helper()
	m, err := NewPrivate(size, f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// pageOf is the first byte of a page.
func pageOf(t *testing.T, m *Memory, page uint64) byte {
	t.Helper()
	gpa, err := m.FromLinear(page * PageSize)
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, PageSize)
	if err := m.Read(gpa, p); err != nil {
		t.Fatal(err)
	}
	for _, b := range p {
		if b != p[0] {
			t.Fatalf("page %d is not all %#x", page, p[0])
		}
	}
	return p[0]
}

func upTo(n uint64) []uint64 {
	var out []uint64
	for p := range n {
		out = append(out, p)
	}
	return out
}

func TestMemories_of_one_image_do_not_see_each_others_writes(t *testing.T) {
	const size = 4 << 30
	hole := uint64(HoleStart) / PageSize
	f := memfd(t, size, ImageSeals, 3, 4, hole-1, hole, size/PageSize-1)
	a, b := newPrivate(t, f, size), newPrivate(t, f, size)
	f.Close()
	for _, page := range []uint64{3, 4, 5, hole - 1, hole, hole + 1, size/PageSize - 1} {
		want := byte(page) + 1
		if page == 5 || page == hole+1 {
			want = 0
		}
		gpa, _ := a.FromLinear(page * PageSize)
		if err := a.Write(gpa, bytes.Repeat([]byte{0xee}, PageSize)); err != nil {
			t.Fatal(err)
		}
		if got := pageOf(t, b, page); got != want {
			t.Errorf("page %#x of the second is %#x, want %#x", page, got, want)
		}
		if got := pageOf(t, a, page); got != 0xee {
			t.Errorf("page %#x of the first is %#x after writing 0xee", page, got)
		}
	}
	n := 0
	if b.TakeDirty(func(uint64) { n++ }); n != 0 {
		t.Errorf("%d pages of the second count as written", n)
	}
}

func TestDiscard_of_an_images_pages_gives_zeros_not_the_image(t *testing.T) {
	for _, tc := range []struct {
		name     string
		replaced int
		discard  [][2]uint64 // first page, number of pages
	}{
		{"one page", 0, [][2]uint64{{7, 1}}},
		{"across the end of the data", 0, [][2]uint64{{90, 100}}},
		{"the same twice", 0, [][2]uint64{{10, 4}, {10, 4}}},
		{"neighbours, then all", 0, [][2]uint64{{10, 4}, {14, 4}, {0, 200}}},
		{"every other page", 0, [][2]uint64{{1, 1}, {3, 1}, {5, 1}, {7, 1}, {9, 1}}},
		{"no more mappings", maxReplaced, [][2]uint64{{7, 1}, {90, 100}, {7, 1}}},
		{"no more mappings in the middle", maxReplaced - 1, [][2]uint64{{7, 1}, {30, 20}, {5, 10}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := memfd(t, MinSize, ImageSeals, upTo(100)...)
			m := newPrivate(t, f, MinSize)
			m.image.replaced = tc.replaced
			gone := map[uint64]bool{}
			for i, d := range tc.discard {
				// Some have been touched or written before, some have not.
				if i%2 == 0 {
					if err := m.Write(GPA(d[0]*PageSize), []byte{0x77}); err != nil {
						t.Fatal(err)
					}
				}
				if err := m.Discard(GPA(d[0]*PageSize), d[1]*PageSize); err != nil {
					t.Fatal(err)
				}
				for p := d[0]; p < d[0]+d[1]; p++ {
					gone[p] = true
				}
			}
			other := newPrivate(t, f, MinSize)
			backed := m.Backed()
			for page := range uint64(210) {
				image := byte(0)
				if page < 100 {
					image = byte(page) + 1
				}
				want := image
				if gone[page] {
					want = 0
				}
				if got := pageOf(t, m, page); got != want {
					t.Errorf("page %d is %#x, want %#x", page, got, want)
				}
				if got := pageOf(t, other, page); got != image {
					t.Errorf("page %d of a sibling is %#x, want %#x", page, got, image)
				}
				if want != 0 && !backed.Has(page) {
					t.Errorf("page %d is in the image and not in Backed", page)
				}
				if tc.replaced == 0 && gone[page] && backed.Has(page) {
					t.Errorf("page %d was discarded and is in Backed", page)
				}
			}
			// What is written afterwards stays, and goes with the next discard.
			d := tc.discard[0]
			gpa := GPA(d[0] * PageSize)
			if err := m.Write(gpa, bytes.Repeat([]byte{0x55}, PageSize)); err != nil {
				t.Fatal(err)
			}
			if got := pageOf(t, m, d[0]); got != 0x55 {
				t.Errorf("a page that was discarded is %#x after writing 0x55", got)
			}
			if err := m.Discard(gpa, PageSize); err != nil {
				t.Fatal(err)
			}
			if got := pageOf(t, m, d[0]); got != 0 {
				t.Errorf("discarded once more it is %#x", got)
			}
		})
	}
}

func TestDiscarded_pages_take_no_memory(t *testing.T) {
	const pages = 8192
	f := memfd(t, MinSize, ImageSeals, upTo(pages)...)
	m := newPrivate(t, f, MinSize)
	if err := m.Zero(0, pages*PageSize); err != nil {
		t.Fatal(err)
	}
	if err := m.Discard(0, pages*PageSize); err != nil {
		t.Fatal(err)
	}
	resident := make([]byte, pages)
	if err := mincore(m.mem[:pages*PageSize], resident); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, r := range resident {
		n += int(r & 1)
	}
	if n != 0 {
		t.Errorf("%d of %d discarded pages are still there", n, pages)
	}
}

func TestAreas_cover_RAM_in_pieces_of_one_kind(t *testing.T) {
	const size = 4 << 30
	hole := uint64(HoleStart) / PageSize
	f := memfd(t, size, ImageSeals, 0, 1, 500, hole-2, hole-1, hole, size/PageSize-1)
	m := newPrivate(t, f, size)
	if err := m.Discard(PageSize, PageSize); err != nil {
		t.Fatal(err)
	}
	at, kinds := uint64(0), map[bool]int{}
	for _, a := range m.Areas() {
		if a.Offset != at || a.Size == 0 {
			t.Fatalf("piece at %#x of %#x bytes follows one that ends at %#x", a.Offset, a.Size, at)
		}
		if gpa, err := m.FromLinear(at); err != nil || gpa != a.GPA || !m.Contains(a.GPA, a.Size) || a.HVA != addressOf(m.mem)+uintptr(at) {
			t.Errorf("piece at %#x: address %#x (%v), not inside of one slot, or elsewhere", at, a.GPA, err)
		}
		mapped := m.image.mapped.Has(at / PageSize)
		kinds[mapped]++
		for p := at / PageSize; p < (at+a.Size)/PageSize; p++ {
			if m.image.mapped.Has(p) != mapped {
				t.Fatalf("piece at %#x is of two kinds", at)
			}
		}
		at += a.Size
	}
	if at != size || kinds[true] != 5 || kinds[false] != 3 {
		t.Errorf("pieces end at %#x, %v of each kind", at, kinds)
	}
}

func TestAn_image_of_many_pieces_is_mapped_in_few(t *testing.T) {
	var pages []uint64
	for p := uint64(0); p < MinSize/PageSize; p += minHole + 1 {
		pages = append(pages, p)
	}
	if len(pages) < maxImageRuns/2 {
		t.Fatalf("%d pieces show nothing", len(pages))
	}
	const size = 256 << 20
	for p := uint64(MinSize / PageSize); p < size/PageSize; p += minHole + 2 {
		pages = append(pages, p)
	}
	m := newPrivate(t, memfd(t, size, ImageSeals, pages...), size)
	if n := len(m.Areas()); n > 2*maxImageRuns+1 {
		t.Errorf("RAM is in %d pieces", n)
	}
	for _, p := range pages {
		if got := pageOf(t, m, p); got != byte(p)+1 {
			t.Fatalf("page %d is %#x", p, got)
		}
	}
}

func TestAn_image_that_somebody_could_change_is_refused(t *testing.T) {
	plain, err := os.CreateTemp(t.TempDir(), "plain")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	if err := plain.Truncate(MinSize); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]*os.File{
		"a plain file":      plain,
		"no seals":          memfd(t, MinSize, 0, 1),
		"may be written to": memfd(t, MinSize, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL, 1),
		"may shrink":        memfd(t, MinSize, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SEAL, 1),
		"too short":         memfd(t, MinSize-PageSize, ImageSeals, 1),
	} {
		if m, err := NewPrivate(MinSize, f); !errors.Is(err, ErrImage) {
			t.Errorf("%s: got %v, %v, want ErrImage", name, m, err)
		}
	}
}
