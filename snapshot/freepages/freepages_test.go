package freepages

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

const testRAM = 64 << 20

var configs = []struct {
	name string
	linuxConfig
}{
	{"as of 6.1", linuxConfig{ram: testRAM, stride: 64, levels: 4, buddy: -129}},
	{"as of 6.12", linuxConfig{ram: testRAM, stride: 64, levels: 4, buddy: -0x1000_0000}},
	{"struct pages of 56 bytes", linuxConfig{ram: testRAM, stride: 56, levels: 4, buddy: -129}},
	{"struct pages scattered", linuxConfig{ram: testRAM, stride: 64, levels: 4, buddy: -129, small: true}},
	{"five levels, one list of sections", linuxConfig{ram: testRAM, stride: 64, levels: 5, buddy: -129, direct: true}},
}

// everything returns a set of all pages.
func everything(mem *guestmem.Memory) *guestmem.PageSet {
	all := guestmem.NewPageSet(mem.Size() / guestmem.PageSize)
	all.Add(0, all.Pages())
	return all
}

func (l *linux) mustLocate(t *testing.T) *Map {
	t.Helper()
	m, err := l.locate()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestFree_pages_of_a_guest_are_those_of_its_free_blocks(t *testing.T) {
	for _, c := range configs {
		t.Run(c.name, func(t *testing.T) {
			l := newLinux(t, c.linuxConfig)
			r := rand.New(rand.NewPCG(7, c.stride))
			want := guestmem.NewPageSet(l.mem.Size() / guestmem.PageSize)
			for pfn := uint64(0); pfn < testRAM/guestmem.PageSize; pfn += 1 << (orders - 1) {
				l.populate(r, pfn, orders-1, want.Add)
			}
			m := l.mustLocate(t)
			got, err := m.Free(l.mem, everything(l.mem))
			if err != nil {
				t.Fatal(err)
			}
			if n := want.Len(); n < 1000 || n > want.Pages()-1000 {
				t.Fatalf("%d pages are free: the test is worth nothing", n)
			}
			if c.stride != 64 || c.small {
				// Free may leave out blocks whose struct pages lie across a gap. It must find only free pages.
				lost := want.Clone()
				lost.Subtract(got)
				if c.small && got.Len() == 0 || !c.small && lost.Len() > want.Len()/3 {
					t.Errorf("%d of %d free pages are found", got.Len(), want.Len())
				}
				want.Intersect(got)
			}
			if !slices.Equal(got.Words(), want.Words()) {
				t.Errorf("%d pages are free, found %d", want.Len(), got.Len())
			}
			if !m.Holds(l.mem, l.root, l.levels) || !m.Holds(l.mem, l.root|0xfff, l.levels) {
				t.Error("the map does not hold for the page tables that it was made of")
			}
			again, err := Decode(m.Encode(), l.mem)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(again.Encode(), m.Encode()) {
				t.Error("a map that was kept is another")
			}
		})
	}
}

func TestFree_pages_above_the_hole_are_found(t *testing.T) {
	l := newLinux(t, linuxConfig{ram: uint64(guestmem.HoleStart) + 256<<20, stride: 64, levels: 4, buddy: -129})
	above := uint64(guestmem.HoleEnd) / guestmem.PageSize
	l.use(above, 1<<11)
	l.free(above+1<<10, 10)
	got, err := l.mustLocate(t).Free(l.mem, everything(l.mem))
	if err != nil {
		t.Fatal(err)
	}
	first, end := got.Next(0)
	linear := uint64(guestmem.HoleStart) / guestmem.PageSize
	if first != linear+1<<10 || end != first+1<<10 || got.Len() != 1<<10 {
		t.Errorf("pages [%d, %d) are free, %d in all", first, end, got.Len())
	}
}

func TestFree_is_not_what_only_looks_like_it(t *testing.T) {
	const block = 1 << 10 // the first page of the block that the cases change
	for _, c := range []struct {
		name   string
		change func(l *linux)
	}{
		{"no mark", func(l *linux) { l.put32(l.field(block, offMapcount), 1<<32-1) }},
		{"a mark of something else", func(l *linux) { l.put32(l.field(block, offMapcount), uint32(l.buddy)-1) }},
		{"a block larger than there is", func(l *linux) { l.put32(l.field(block, offPrivate), orders) }},
		{"an order of more than 32 bits", func(l *linux) { l.put32(l.field(block, offPrivate+4), 1) }},
		{"a reference to the first page", func(l *linux) { l.put32(l.field(block, offRefcount), 1) }},
		{"a reference to the last page", func(l *linux) { l.put32(l.field(block+1<<10-1, offRefcount), 1) }},
		{"a negative reference", func(l *linux) { l.put32(l.field(block+77, offRefcount), 1<<32-1) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLinux(t, configs[0].linuxConfig)
			l.use(0, 4<<10)
			l.free(block, 10)
			m := l.mustLocate(t)
			if got, err := m.Free(l.mem, everything(l.mem)); err != nil || got.Len() != 1<<10 {
				t.Fatalf("before: %d pages, %v", got.Len(), err)
			}
			c.change(l)
			if got, err := m.Free(l.mem, everything(l.mem)); err != nil || got.Has(block) {
				t.Errorf("after: %d pages, %v", got.Len(), err)
			}
		})
	}
	l := newLinux(t, configs[0].linuxConfig)
	l.use(0, 4<<10)
	l.free(block+8, 4)
	if got, err := l.mustLocate(t).Free(l.mem, everything(l.mem)); err != nil || got.Len() != 0 {
		t.Errorf("a block that is not aligned: %d pages, %v", got.Len(), err)
	}
}

func TestFree_looks_only_where_it_is_worth_it(t *testing.T) {
	l := newLinux(t, configs[0].linuxConfig)
	for pfn := uint64(0); pfn < 4<<10; pfn += 1 << 10 {
		l.free(pfn, 10)
	}
	m := l.mustLocate(t)
	some := guestmem.NewPageSet(l.mem.Size() / guestmem.PageSize)
	some.Add(100, 100+worthwhile-1)
	some.Add(1<<10+5, 1<<10+5+worthwhile)
	got, err := m.Free(l.mem, some)
	if err != nil || got.Len() != worthwhile || !got.Has(1<<10+5) {
		t.Errorf("%d pages, %v", got.Len(), err)
	}
	if _, err := m.Free(l.mem, guestmem.NewPageSet(5)); err == nil {
		t.Error("a set for other RAM is taken")
	}
}

func TestHolds_not_for_page_tables_of_another_kernel(t *testing.T) {
	l := newLinux(t, configs[0].linuxConfig)
	m := l.mustLocate(t)
	empty := l.alloc(1)
	elsewhere := l.alloc(1)
	l.mapPage(elsewhere, vmemmap, l.alloc(512)&^(2<<20-1), true)
	for name, cr3 := range map[string]uint64{"empty": empty, "elsewhere": elsewhere, "no RAM": 1 << 50, "in the hole": uint64(guestmem.HoleStart)} {
		if m.Holds(l.mem, cr3, 4) {
			t.Errorf("it holds for page tables that are %s", name)
		}
	}
	if m.Holds(l.mem, l.root, 5) {
		t.Error("it holds for tables of five levels")
	}
	// Put page tables for user space beside the kernel's, a page higher.
	l.next = (l.next + 2*guestmem.PageSize - 1) &^ (2*guestmem.PageSize - 1)
	kernel := l.alloc(2)
	l.mapPage(kernel, vmemmap, l.memmap[vmemmap/guestmem.PageSize], true)
	if !m.Holds(l.mem, kernel, 4) || !m.Holds(l.mem, kernel|userTables, 4) {
		t.Error("it does not hold for a process in user space")
	}
}

func TestLocate_refuses_notes_that_lack_something_or_make_no_sense(t *testing.T) {
	l := newLinux(t, configs[0].linuxConfig)
	n, err := readNote(l.mem, guestmem.GPA(l.note.at), l.note.size)
	if err != nil {
		t.Fatal(err)
	}
	text := func(skip, add string) string {
		b := &strings.Builder{}
		for k, v := range n {
			if k != skip {
				b.WriteString(k + "=" + v + "\n")
			}
		}
		return b.String() + add
	}
	l.writeNote(text("", ""))
	if _, err := l.locate(); err != nil {
		t.Fatalf("in another order: %v", err)
	}
	for key := range n {
		if key == "OSRELEASE" || key == "BUILD-ID" || key == "KERNELOFFSET" || key == "OFFSET(page.flags)" || key == "NUMBER(pgtable_l5_enabled)" {
			continue
		}
		for _, value := range []string{"", key + "=\n", key + "=x\n", key + "=-7000000000000\n", key + "=0\n", key + "=999999999\n", key + "=9223372036854775807\n"} {
			if strings.HasPrefix(key, "OFFSET") && strings.HasSuffix(value, "=0\n") {
				continue // taking it is allowed
			}
			l.next = 32 << 20
			l.writeNote(text(key, value))
			if _, err := l.locate(); !errors.Is(err, ErrUnknown) {
				t.Errorf("with %q: %v", value, err)
			}
		}
	}
	l.next = 32 << 20
	l.writeNote(text("", "NUMBER(sme_mask)=140737488355328\n"))
	if _, err := l.locate(); !errors.Is(err, ErrUnknown) {
		t.Errorf("encrypted: %v", err)
	}
	for _, at := range []struct{ gpa, size uint64 }{
		{0, 1024}, {l.note.at, 0}, {l.note.at, 11}, {l.note.at, 30}, {l.note.at, MaxNote + 1}, {testRAM - 20, 1024}, {1 << 62, 1024}, {1<<64 - 8, 1024},
	} {
		if _, err := Locate(l.mem, guestmem.GPA(at.gpa), at.size); !errors.Is(err, ErrUnknown) {
			t.Errorf("a note at %#x of %d bytes: %v", at.gpa, at.size, err)
		}
	}
}

func TestLocate_leaves_out_sections_without_struct_pages(t *testing.T) {
	c := linuxConfig{ram: 512 << 20, stride: 64, levels: 4, buddy: -129, sections: []bool{true, false, true}}
	l := newLinux(t, c)
	section := uint64(1) << (sectionBits - pageBits)
	for s := range uint64(4) {
		l.free(s*section+1<<10, 10)
	}
	got, err := l.mustLocate(t).Free(l.mem, everything(l.mem))
	if err != nil || got.Len() != 2<<10 || !got.Has(1<<10) || !got.Has(2*section+1<<10) {
		t.Errorf("%d pages, %v", got.Len(), err)
	}
}

func TestDecode_refuses_what_it_has_not_written(t *testing.T) {
	l := newLinux(t, configs[0].linuxConfig)
	good := l.mustLocate(t).Encode()
	less, err := guestmem.New(guestmem.MinSize / 1)
	if err != nil {
		t.Fatal(err)
	}
	defer less.Close()
	refused := func(name string, b []byte) {
		t.Helper()
		if _, err := Decode(b, l.mem); !errors.Is(err, ErrUnknown) {
			t.Errorf("%s: %v", name, err)
		}
	}
	refused("nothing", nil)
	refused("no extents", good[:encodedHeader])
	refused("cut off", good[:len(good)-1])
	refused("extents that overlap", append(slices.Clone(good), bytes.Repeat(good[encodedHeader:encodedHeader+encodedExtent], 100)...))
	refused("too many extents", append(slices.Clone(good), bytes.Repeat(good[encodedHeader:encodedHeader+encodedExtent], maxExtents)...))
	for i := range encodedHeader + encodedExtent {
		b := slices.Clone(good)
		b[i] ^= 0x80
		m, err := Decode(b, l.mem)
		if err != nil {
			if !errors.Is(err, ErrUnknown) {
				t.Errorf("byte %d changed: %v", i, err)
			}
			continue
		}
		if _, err := m.Free(l.mem, everything(l.mem)); err != nil {
			t.Errorf("byte %d changed, and taken: %v", i, err)
		}
	}
}

// plain is a source of RAM in which page n is filled with n.
type plain struct {
	pages    uint64
	data     *guestmem.PageSet
	released []uint64
	asked    *guestmem.PageSet
}

func (p *plain) Slots() []snapshot.Slot { return []snapshot.Slot{{Size: p.pages * guestmem.PageSize}} }

func (p *plain) NextData(page uint64) (first, end uint64, err error) {
	first, end = p.data.Next(page)
	return first, end, nil
}

func (p *plain) ReadPages(page uint64, b []byte) error {
	p.asked.Add(page, page+uint64(len(b))/guestmem.PageSize)
	for i := range b {
		b[i] = byte(page + uint64(i)/guestmem.PageSize)
	}
	return nil
}

func (p *plain) Release(first, end uint64) {
	for ; first < end; first++ {
		p.released = append(p.released, first)
	}
}

func TestWithout_has_zeros_where_pages_are_free_and_asks_for_none_of_them(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 9))
	for range 300 {
		const pages = 200
		random := func() *guestmem.PageSet {
			s := guestmem.NewPageSet(pages)
			for range r.IntN(12) {
				first := r.Uint64N(pages)
				s.Add(first, first+r.Uint64N(40))
			}
			return s
		}
		src := &plain{pages: pages, data: random(), asked: guestmem.NewPageSet(pages)}
		free := random()
		w := Without(src, free)
		want := src.data.Clone()
		want.Subtract(free)
		got := guestmem.NewPageSet(pages)
		for page := uint64(0); ; {
			first, end, err := w.NextData(page)
			if err != nil || first < page && first != end {
				t.Fatalf("from page %d: [%d, %d), %v", page, first, end, err)
			}
			if first == end {
				break
			}
			got.Add(first, end)
			page = end
		}
		if !slices.Equal(got.Words(), want.Words()) {
			t.Fatalf("there are pages %x, got %x", want.Words(), got.Words())
		}
		first := r.Uint64N(pages - 64)
		b := bytes.Repeat([]byte{0xee}, 64*guestmem.PageSize)
		if err := w.ReadPages(first, b); err != nil {
			t.Fatal(err)
		}
		for i := range b {
			page := first + uint64(i)/guestmem.PageSize
			if v := byte(page); !free.Has(page) && b[i] != v || free.Has(page) && b[i] != 0 {
				t.Fatalf("page %d has %#x, free: %v", page, b[i], free.Has(page))
			}
		}
		src.asked.Intersect(free)
		if src.asked.Len() > 0 {
			t.Fatal("free pages were asked for")
		}
		w.(snapshot.PageReleaser).Release(first, first+64)
		n := 0
		for p := first; p < first+64; p++ {
			if !free.Has(p) {
				n++
			}
		}
		if len(src.released) != n || slices.ContainsFunc(src.released, free.Has) {
			t.Fatalf("released %v", src.released)
		}
	}
}

// FuzzNote gives Locate notes in a machine that is otherwise in order.
func FuzzNote(f *testing.F) {
	l := &linux{linuxConfig: configs[0].linuxConfig}
	f.Add(asNote(l.noteText(4, directMap)))
	f.Add(asNote("PAGESIZE=4096\n"))
	f.Add([]byte{})
	mem, err := guestmem.New(testRAM)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { mem.Close() })
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 || len(b) > MaxNote {
			return
		}
		if err := mem.Write(4096, b); err != nil {
			t.Fatal(err)
		}
		if _, err := Locate(mem, 4096, uint64(len(b))); err != nil && !errors.Is(err, ErrUnknown) {
			t.Fatal(err)
		}
	})
}

// FuzzDecode decodes arbitrary bytes, and uses the maps that Decode takes.
func FuzzDecode(f *testing.F) {
	mem, err := guestmem.New(testRAM)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { mem.Close() })
	m := Map{stride: 64, refcount: 52, mapcount: 48, private: 40, buddy: 1<<32 - 129, orders: 11, levels: 4,
		extents: []extent{{pfn: 0, pages: 4096, gpa: 1 << 20, va: vmemmap}}}
	f.Add(m.Encode())
	all := everything(mem)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Decode(b, mem)
		if err != nil {
			if !errors.Is(err, ErrUnknown) {
				t.Fatal(err)
			}
			return
		}
		if len(m.extents) > 64 {
			return
		}
		if _, err := m.Free(mem, all); err != nil {
			t.Fatal(err)
		}
		m.Holds(mem, 0, int(m.levels))
		if !bytes.Equal(m.Encode(), b) {
			t.Fatal("what was read is written in another way")
		}
	})
}
