package freepages

import (
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Without returns a source that has zeros in the pages of free, and the content of src in all others. It never
// reads the pages of free from src.
func Without(src snapshot.MemorySource, free *guestmem.PageSet) snapshot.MemorySource {
	w := &without{MemorySource: src, free: free}
	w.releaser, _ = src.(snapshot.PageReleaser)
	return w
}

type without struct {
	snapshot.MemorySource
	releaser snapshot.PageReleaser // nil if the source is not a PageReleaser
	free     *guestmem.PageSet
}

// NextData implements snapshot.MemorySource.
func (w *without) NextData(page uint64) (first, end uint64, err error) {
	for {
		if first, end, err = w.MemorySource.NextData(page); err != nil || first == end {
			return first, end, err
		}
		lo, hi := w.free.NextBefore(first, end)
		switch {
		case lo == hi: // none of it is free
			return first, end, nil
		case lo > first:
			return first, lo, nil
		}
		if hi < end {
			next, _ := w.free.NextBefore(hi, end)
			return hi, next, nil
		}
		page = end
	}
}

// ReadPages implements snapshot.MemorySource.
func (w *without) ReadPages(page uint64, p []byte) error {
	return w.split(page, page+uint64(len(p))/guestmem.PageSize, func(first, end uint64, free bool) error {
		part := p[(first-page)*guestmem.PageSize : (end-page)*guestmem.PageSize]
		if free {
			clear(part)
			return nil
		}
		return w.MemorySource.ReadPages(first, part)
	})
}

// Release implements snapshot.PageReleaser.
func (w *without) Release(first, end uint64) {
	if w.releaser == nil {
		return
	}
	_ = w.split(first, end, func(first, end uint64, free bool) error {
		if !free {
			w.releaser.Release(first, end)
		}
		return nil
	})
}

// split calls f, in order, for the runs of [first, end) that are all free or all not free.
func (w *without) split(first, end uint64, f func(first, end uint64, free bool) error) error {
	for first < end {
		lo, hi := w.free.NextBefore(first, end)
		if first < lo {
			if err := f(first, lo, false); err != nil {
				return err
			}
		}
		if lo < hi {
			if err := f(lo, hi, true); err != nil {
				return err
			}
		}
		first = hi
	}
	return nil
}
