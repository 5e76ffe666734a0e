package pager

import (
	"iter"
	"slices"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// scanGap is the largest gap between pages of interest that a scan includes: scanning a page costs a hundredth of
// a call.
const scanGap = 64

// inUse returns the pages of set that the host has committed and, as far as the page map tells, does not map to
// its zero page. It touches no page. The other pages are zeros, or missing.
func inUse(slots []guestmem.Slot, set *guestmem.PageSet) (*guestmem.PageSet, error) {
	pm, err := snapshot.OpenPagemap()
	if err != nil {
		return nil, err
	}
	defer pm.Close()
	out := guestmem.NewPageSet(set.Pages())
	for first, end := range near(set, scanGap) {
		err := pieces(slots, first, end, func(hva uintptr, page, n uint64) error {
			return pm.Scan(hva, n, func(lo, hi uint64) { out.Add(page+lo, page+hi) })
		})
		if err != nil {
			return nil, err
		}
	}
	for i, w := range set.Words() {
		out.Words()[i] &= w
	}
	return out, nil
}

// near yields runs of pages that begin and end with a page of the set and include gaps of at most gap pages.
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

// pieces splits the pages [first, end) at the bounds of slots and calls f with each part: its address in this
// process, its first page, and its number of pages. The slots may be parts of the guest's slots, in ascending
// order.
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
