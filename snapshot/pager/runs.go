package pager

import (
	"iter"
	"slices"

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
// where they lie in this process, the first page, and how many. The slots may be
// parts of those of the guest, in ascending order.
func pieces(slots []guestmem.Slot, first, end uint64, f func(hva uintptr, page, n uint64) error) error {
	i, _ := slices.BinarySearchFunc(slots, first*pageSize, func(s guestmem.Slot, off uint64) int {
		if s.Offset+s.Size <= off {
			return -1
		}
		return 1
	})
	for _, s := range slots[i:] {
		base := s.Offset / pageSize
		lo, hi := max(first, base), min(end, base+s.Size/pageSize)
		if lo >= hi {
			break
		}
		if err := f(s.HVA+uintptr((lo-base)*pageSize), lo, hi-lo); err != nil {
			return err
		}
	}
	return nil
}
