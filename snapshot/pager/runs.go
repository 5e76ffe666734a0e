package pager

import (
	"iter"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// near yields runs of pages that begin and end with pages of the set and have no gap
// of more than gap pages in them.
func near(set *guestmem.PageSet, gap uint64) iter.Seq2[uint64, uint64] {
	return func(yield func(uint64, uint64) bool) {
		first, end := set.Next(0)
		for first < end {
			f, e := set.Next(end)
			if f < e && f-end <= gap {
				end = e
				continue
			}
			if !yield(first, end) {
				return
			}
			first, end = f, e
		}
	}
}

// pieces calls f with the parts of the pages [first, end) that are in one slot each:
// where they lie in this process, the first page, and how many.
func pieces(slots []guestmem.Slot, first, end uint64, f func(hva uintptr, page, n uint64) error) error {
	for _, s := range slots {
		base := s.Offset / pageSize
		lo, hi := max(first, base), min(end, base+s.Size/pageSize)
		if lo >= hi {
			continue
		}
		if err := f(s.HVA+uintptr((lo-base)*pageSize), lo, hi-lo); err != nil {
			return err
		}
	}
	return nil
}
