package freepages

import (
	"fmt"
	"math"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// kernelMap is where the mapping of the kernel's text begins, with any randomisation
// (Documentation/arch/x86/x86_64/mm.rst).
const kernelMap = 0xffff_ffff_8000_0000

// Bounds of the values in a note.
const (
	minStride, maxStride = 32, 512 // bytes of a struct page
	maxOrders            = 16
	// maxExtents bounds a Map. The struct pages of 16 GiB take 256 MiB, which Linux maps in
	// pieces of 2 MiB that are contiguous as a rule.
	maxExtents = 1 << 12
	// sectionFlags are the low bits of a section's section_mem_map.
	sectionFlags = 1<<pageBits - 1
)

// extent is the place of the struct pages of a run of pages.
type extent struct {
	// pfn is the first page, its physical address in pages, and pages is their number.
	pfn, pages uint64
	// gpa is the physical address of the first page's struct page, va the kernel's virtual address of it.
	gpa guestmem.GPA
	va  uint64
}

// Map says where in RAM a Linux guest has its struct pages, and what layout they have. It is valid as long as the
// guest runs the same kernel, through captures and restores. It does not change, so it may be used concurrently.
type Map struct {
	// stride is the size of a struct page; the others are offsets in it.
	stride, refcount, mapcount, private uint32
	// buddy is the value of _mapcount in the first page of a free block.
	buddy uint32
	// orders is the number of block sizes: 1<<0 to 1<<(orders-1) pages.
	orders uint32
	// levels is the number of levels of the page tables.
	levels  uint32
	extents []extent
}

// Locate finds the struct pages of the guest in mem. at and size are the values in the guest's
// /sys/kernel/vmcoreinfo. The guest may run. Locate fails with ErrUnknown if the guest's kernel does not report
// everything needed.
func Locate(mem *guestmem.Memory, at guestmem.GPA, size uint64) (*Map, error) {
	n, err := readNote(mem, at, size)
	if err != nil {
		return nil, fmt.Errorf("looking for the struct pages of the guest: %w", err)
	}
	m, err := locate(mem, n)
	if err != nil {
		return nil, fmt.Errorf("looking for the struct pages of the guest, Linux %q: %w", n["OSRELEASE"], err)
	}
	return m, nil
}

func locate(mem *guestmem.Memory, n note) (*Map, error) {
	m := &Map{}
	t, err := kernelTables(mem, n)
	if err != nil {
		return nil, err
	}
	m.levels = uint32(t.levels)
	if err := m.layout(n); err != nil {
		return nil, err
	}
	s, err := newSections(t, n)
	if err != nil {
		return nil, err
	}
	for _, slot := range mem.Slots() {
		pfn, end := uint64(slot.GPA)/guestmem.PageSize, (uint64(slot.GPA)+slot.Size)/guestmem.PageSize
		for pfn < end {
			next := min((pfn/s.pages+1)*s.pages, end)
			base, ok, err := s.memmap(pfn / s.pages)
			if err != nil {
				return nil, err
			}
			if ok {
				if err := m.add(t, base, pfn, next); err != nil {
					return nil, err
				}
			}
			pfn = next
		}
	}
	if len(m.extents) == 0 {
		return nil, unknown("none of its RAM has struct pages")
	}
	return m, nil
}

// layout reads the layout of a struct page from the note.
func (m *Map) layout(n note) error {
	if size, err := n.number("PAGESIZE"); err != nil || size != guestmem.PageSize {
		return unknown("pages of %q bytes", n["PAGESIZE"])
	}
	stride, err := n.between("SIZE(page)", minStride, maxStride)
	if err != nil {
		return err
	}
	m.stride = uint32(stride)
	for _, f := range []struct {
		key  string
		size int64
		to   *uint32
	}{
		{"OFFSET(page._refcount)", 4, &m.refcount},
		{"OFFSET(page._mapcount)", 4, &m.mapcount},
		{"OFFSET(page.private)", 8, &m.private},
	} {
		off, err := n.between(f.key, 0, int64(stride)-f.size)
		if err != nil {
			return err
		}
		*f.to = uint32(off)
	}
	buddy, err := n.between("NUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)", math.MinInt32, math.MaxUint32)
	if err != nil {
		return err
	}
	m.buddy = uint32(buddy)
	orders, err := n.between("LENGTH(zone.free_area)", 1, maxOrders)
	if err != nil {
		return err
	}
	m.orders = uint32(orders)
	return m.check()
}

// check returns an error if the description of a struct page is impossible.
func (m *Map) check() error {
	switch {
	case m.stride < minStride || m.stride > maxStride:
		return unknown("a struct page of %d bytes", m.stride)
	case m.refcount > m.stride-4 || m.mapcount > m.stride-4 || m.private > m.stride-8:
		return unknown("a struct page of %d bytes does not have its fields", m.stride)
	case overlap(m.refcount, 4, m.mapcount, 4) || overlap(m.refcount, 4, m.private, 8) || overlap(m.mapcount, 4, m.private, 8):
		return unknown("fields of a struct page are in the same place")
	case int32(m.buddy) >= -1:
		// _mapcount counts upwards from -1, a page that is not mapped.
		return unknown("free pages are marked by %d", int32(m.buddy))
	case m.orders == 0 || m.orders > maxOrders:
		return unknown("blocks of %d sizes", m.orders)
	case m.levels != 4 && m.levels != 5:
		return unknown("page tables of %d levels", m.levels)
	}
	return nil
}

// overlap reports whether two fields, given by offset and size, share bytes.
func overlap(a, aSize, b, bSize uint32) bool { return a < b+bSize && b < a+aSize }

// kernelTables returns the page tables that all of the kernel's others were copied from.
func kernelTables(mem *guestmem.Memory, n note) (tables, error) {
	t := tables{mem: mem, levels: 4}
	top, err := n.address("SYMBOL(init_top_pgt)")
	if err != nil {
		return t, err
	}
	base, err := n.number("NUMBER(phys_base)")
	if err != nil {
		return t, err
	}
	if n["NUMBER(pgtable_l5_enabled)"] == "1" {
		t.levels = 5
	}
	if mask := n["NUMBER(sme_mask)"]; mask != "" && mask != "0" {
		return t, unknown("its memory is encrypted")
	}
	t.root = top - kernelMap + uint64(base)
	return t, nil
}

// sections are Linux's pieces of physical memory. Each section's descriptor says where its struct pages are
// (Documentation/mm/memory-model.rst, SPARSEMEM).
type sections struct {
	t tables
	// pages is the number of pages in a section, and count the most sections that there can be.
	pages, count uint64
	// roots is the address of an array of lists of descriptors, or, if direct is set, of
	// one list. A descriptor has size bytes and its word at offset; a list has perRoot.
	roots                 uint64
	direct                bool
	size, offset, perRoot uint64
}

func newSections(t tables, n note) (s sections, err error) {
	s.t = t
	if s.roots, err = n.address("SYMBOL(mem_section)"); err != nil {
		return s, err
	}
	if s.size, err = n.between("SIZE(mem_section)", 8, guestmem.PageSize); err != nil {
		return s, err
	}
	if s.offset, err = n.between("OFFSET(mem_section.section_mem_map)", 0, int64(s.size)-8); err != nil {
		return s, err
	}
	bits, err := n.between("NUMBER(SECTION_SIZE_BITS)", pageBits+1, 40)
	if err != nil {
		return s, err
	}
	all, err := n.between("NUMBER(MAX_PHYSMEM_BITS)", int64(bits), 52)
	if err != nil {
		return s, err
	}
	length, err := n.between("LENGTH(mem_section)", 1, 1<<40)
	if err != nil {
		return s, err
	}
	s.pages, s.count = 1<<(bits-pageBits), 1<<(all-bits)
	s.perRoot = guestmem.PageSize / s.size
	switch {
	case length == (s.count+s.perRoot-1)/s.perRoot && s.perRoot > 1: // SPARSEMEM_EXTREME
	case length == s.count:
		s.direct = true
	default:
		return s, unknown("%d lists for %d sections", length, s.count)
	}
	return s, nil
}

// memmap returns the address at which the struct page of page 0 would be if all struct pages were contiguous with
// those of this section. ok is false for a section without struct pages.
func (s sections) memmap(section uint64) (base uint64, ok bool, err error) {
	if section >= s.count {
		return 0, false, unknown("RAM beyond its last section")
	}
	list, index := s.roots, section
	if !s.direct {
		if list, err = s.t.word(s.roots + 8*(section/s.perRoot)); err != nil || list == 0 {
			return 0, false, err
		}
		index = section % s.perRoot
	}
	word, err := s.t.word(list + index*s.size + s.offset)
	if err != nil {
		return 0, false, err
	}
	// Bit 0: present; bit 1: has a memory map.
	return word &^ sectionFlags, word&3 == 3, nil
}

// add finds the struct pages of the pages [pfn, end) and adds them to the extents. base is the result of memmap.
func (m *Map) add(t tables, base, pfn, end uint64) error {
	stride := uint64(m.stride)
	va, stop := base+pfn*stride, base+end*stride
	if stop < va {
		return unknown("struct pages at %#x", va)
	}
	for va < stop {
		gpa, n, err := t.lookup(va)
		if err != nil {
			return err
		}
		first := va
		// Extend the piece as far as it is physically contiguous.
		for va += min(n, stop-va); va < stop; {
			next, more, err := t.lookup(va)
			if err != nil {
				return err
			}
			if next != gpa+guestmem.GPA(va-first) {
				break
			}
			va += min(more, stop-va)
		}
		if !t.mem.Contains(gpa, va-first) {
			return unknown("struct pages at %#x, which is no RAM", gpa)
		}
		// Leave out a struct page that is cut in two: its page never counts as free.
		lo, hi := (first-base+stride-1)/stride, (va-base)/stride
		if lo >= hi {
			continue
		}
		if len(m.extents) == maxExtents {
			return unknown("struct pages in too many pieces")
		}
		at := base + lo*stride
		m.extents = append(m.extents, extent{pfn: lo, pages: hi - lo, gpa: gpa + guestmem.GPA(at-first), va: at})
	}
	return nil
}

// holds reports whether the page tables at cr3 map the struct pages to where they were.
func (m *Map) holds(mem *guestmem.Memory, cr3 uint64) bool {
	t := tables{mem: mem, root: cr3, levels: int(m.levels)}
	for _, e := range m.extents {
		if gpa, _, err := t.lookup(e.va); err != nil || gpa != e.gpa {
			return false
		}
	}
	return true
}

// Holds reports whether a vCPU with the given CR3, and 4 or 5 levels of page tables, runs the kernel that the map
// describes. The machine must be paused.
func (m *Map) Holds(mem *guestmem.Memory, cr3 uint64, levels int) bool {
	if levels != int(m.levels) {
		return false
	}
	// In user space a vCPU may have page tables without the kernel.
	return m.holds(mem, cr3) || m.holds(mem, cr3&^userTables)
}
