package pager

import (
	"iter"
	"slices"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// scanGap is the largest gap between pages of interest over which a scan goes on: looking at a page costs a hundredth
// of a call.
const scanGap = 64

// inUse returns those pages of set that the host has committed and that, as far as it tells, it does
// not map to its page of zeros. It touches none. The others are zeros, or missing.
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
