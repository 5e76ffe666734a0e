package freepages

import (
	"encoding/binary"
	"fmt"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// worthwhile is how many pages of a largest block (4 MiB) a capture must have before Free reads the block's struct
// pages. That takes about as long as copying this many pages, so a guest with few changed pages is not paused for
// it.
const worthwhile = 16

// Free returns the pages of candidates that the guest does not use. It skips blocks of 2^(orders-1) pages that
// have fewer than 16 candidates. The machine and its devices must be paused, and the machine must run the kernel
// that the map describes, see Holds. If a lazy restore has not loaded the struct pages that Free reads, Free loads
// them.
func (m *Map) Free(mem *guestmem.Memory, candidates *guestmem.PageSet) (*guestmem.PageSet, error) {
	if candidates.Pages() != mem.Size()/guestmem.PageSize {
		return nil, fmt.Errorf("looking for free pages: a set for %d pages, RAM has %d", candidates.Pages(), mem.Size()/guestmem.PageSize)
	}
	free := guestmem.NewPageSet(candidates.Pages())
	block := uint64(1) << (m.orders - 1)
	var buf []byte
	for _, e := range m.extents {
		// Blocks begin at multiples of their size, counted in physical addresses.
		for pfn := e.pfn &^ (block - 1); pfn < e.pfn+e.pages; pfn += block {
			lo, hi := max(pfn, e.pfn), min(pfn+block, e.pfn+e.pages)
			page, err := mem.Linear(guestmem.GPA(lo * guestmem.PageSize))
			if err != nil {
				return nil, fmt.Errorf("looking for free pages: %w", err)
			}
			// The extent is inside one slot, so its linear page numbers are contiguous too.
			page /= guestmem.PageSize
			if candidates.LenBetween(page, page+hi-lo) < worthwhile {
				continue
			}
			n := (hi - lo) * uint64(m.stride)
			if uint64(cap(buf)) < n {
				buf = make([]byte, n)
			}
			if err := mem.Read(e.gpa+guestmem.GPA((lo-e.pfn)*uint64(m.stride)), buf[:n]); err != nil {
				return nil, fmt.Errorf("looking for free pages: %w", err)
			}
			m.scan(buf[:n], lo, func(first, end uint64) { free.Add(page+first-lo, page+end-lo) })
		}
	}
	free.Intersect(candidates)
	return free, nil
}

// scan calls found for each free block whose struct pages are all in b. b begins with the struct page of page pfn.
func (m *Map) scan(b []byte, pfn uint64, found func(first, end uint64)) {
	stride := uint64(m.stride)
	n := uint64(len(b)) / stride
	for i := uint64(0); i < n; {
		size := m.block(b[i*stride:], pfn+i)
		if size == 0 || i+size > n || !m.unused(b[i*stride:(i+size)*stride]) {
			i++
			continue
		}
		found(pfn+i, pfn+i+size)
		i += size
	}
}

// block returns the size in pages of the free block that begins with page pfn, 0 if none does. The struct page of
// pfn is at the start of b.
func (m *Map) block(b []byte, pfn uint64) uint64 {
	if binary.LittleEndian.Uint32(b[m.mapcount:]) != m.buddy {
		return 0
	}
	order := binary.LittleEndian.Uint64(b[m.private:])
	if order >= uint64(m.orders) || pfn&(1<<order-1) != 0 {
		return 0
	}
	return 1 << order
}

// unused reports whether no struct page in b has a reference.
func (m *Map) unused(b []byte) bool {
	for ; len(b) > 0; b = b[m.stride:] {
		if binary.LittleEndian.Uint32(b[m.refcount:]) != 0 {
			return false
		}
	}
	return true
}
