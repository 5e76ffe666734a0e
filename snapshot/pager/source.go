package pager

import (
	"github.com/drowse-vm/drowse/snapshot"
)

// Source is the RAM of a lazily restored machine, for snapshot.Create. For pages that are not loaded, it reads the
// snapshot that the machine came from, and does not make them resident. The guest and its devices must be paused
// while it is in use, or, as for Image.CopyRunning, the caller must read what they write meanwhile again. Load may
// continue.
type Source struct {
	p *Pager
	// pagemap may give old answers. They are right while the guest is paused: NextData finds the pages that Load
	// fills meanwhile in the snapshot.
	pagemap *snapshot.Pagemap
}

// Source returns a source. Close it when done, before the pager.
func (p *Pager) Source() (*Source, error) {
	pm, err := snapshot.OpenPagemap()
	if err != nil {
		return nil, err
	}
	return &Source{p: p, pagemap: pm}, nil
}

// Close releases the source's resources.
func (s *Source) Close() error { return s.pagemap.Close() }

// Slots implements snapshot.MemorySource.
func (s *Source) Slots() []snapshot.Slot { return snapshot.LayoutOf(s.p.mem) }

// NextData implements snapshot.MemorySource. It returns pages that the host has committed and pages that the
// snapshot has content for, present or not, because Load may fill them between two calls.
func (s *Source) NextData(page uint64) (first, end uint64, err error) {
	if first, end, err = s.pagemap.NextData(s.p.slots, page); err != nil {
		return 0, 0, err
	}
	lo, hi, err := s.nextStored(page)
	switch none := first == end; {
	case err != nil:
		return 0, 0, err
	case lo < hi && none:
		return lo, hi, nil
	case lo < hi && lo < first:
		return lo, min(hi, first), nil
	}
	return first, end, nil
}

// nextStored returns the first run of pages from page on that the snapshot has content for and that were not given
// to the balloon. The run ends at the end of a chunk at the latest.
func (s *Source) nextStored(page uint64) (first, end uint64, err error) {
	p := s.p
	for n := page / chunkPages; n < uint64(p.snap.Chunks()); n, page = n+1, (n+1)*chunkPages {
		leaf, err := p.snap.Leaf(int(n))
		if err != nil {
			return 0, 0, err
		}
		if leaf == nil {
			continue
		}
		c := p.chunk(n)
		stored := func(i int) bool {
			_, _, ok := leaf.Page(i)
			return ok && !c.isZeroed(i)
		}
		for i := int(page % chunkPages); i < chunkPages; i++ {
			if !stored(i) {
				continue
			}
			k := i + 1
			for k < chunkPages && stored(k) {
				k++
			}
			return n*chunkPages + uint64(i), n*chunkPages + uint64(k), nil
		}
	}
	return page, page, nil
}

// stillMissing is missing for code that takes a missing page's content from elsewhere. A fill wakes the threads
// that wait for the page before it sets the present bit. They may write to the page, and may even be paused again,
// before the bit is set. So a clear bit is reliable only under the mutex, which the fill holds.
func (c *chunk) stillMissing(i int) bool {
	if !c.missing(i) {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.missing(i)
}

// ReadPages implements snapshot.MemorySource.
func (s *Source) ReadPages(page uint64, b []byte) error {
	p := s.p
	d, err := snapshot.NewDecoder()
	if err != nil {
		return err
	}
	defer d.Release()
	var frame *snapshot.Frame // the frame whose pages raw holds
	var raw []byte
	for ; len(b) > 0; b, page = b[pageSize:], page+1 {
		n, i := page/chunkPages, int(page%chunkPages)
		leaf, err := p.snap.Leaf(int(n))
		if err != nil {
			return err
		}
		c := p.chunk(n)
		if !c.stillMissing(i) {
			// The page was given to the balloon or is present. Reading it from the guest maps a zero page at most.
			if err := snapshot.ReadGuest(p.mem, page, b[:pageSize]); err != nil {
				return err
			}
			continue
		}
		k, slot, stored := 0, 0, false
		if leaf != nil {
			k, slot, stored = leaf.Page(i)
		}
		if !stored {
			clear(b[:pageSize])
			continue
		}
		if f := leaf.Frame(k); f != frame {
			if raw, err = p.snap.ReadFrame(f, d); err != nil {
				return err
			}
			frame = f
		}
		copy(b, raw[slot*pageSize:(slot+1)*pageSize])
	}
	return nil
}
