package pager

import (
	"github.com/drowse-vm/drowse/snapshot"
)

// Source is the RAM of a machine that has been restored lazily, for
// snapshot.Create. Pages that nobody has touched since are taken from the
// snapshot that the machine came from; they do not become resident. The guest
// and its devices must be paused while it is in use, or, as for Image.CopyRunning,
// what they write from then on must be read again; Load may go on.
type Source struct {
	p *Pager
	// pagemap gives answers that may be old, which are right while the guest is paused: what Load fills meanwhile is
	// stored.
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

// Close gives back what the source holds.
func (s *Source) Close() error { return s.pagemap.Close() }

// Slots implements snapshot.MemorySource.
func (s *Source) Slots() []snapshot.Slot { return snapshot.LayoutOf(s.p.mem) }

// NextData implements snapshot.MemorySource: there may be data in pages that the
// host has committed, and in those that the snapshot has content for, whether it
// is there already or not: Load may fill them between two questions.
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

// nextStored is the first run of pages from page on that the snapshot has content
// for and that were not given to the balloon, not beyond the end of a chunk.
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

// stillMissing is missing for whoever takes a missing page's content from elsewhere. A fill
// wakes those who wait for the page before it sets the present bit, and they may have
// written to the page, and may even be paused again, before it does. So a bit that is not
// set means something only under the mutex, which the fill holds.
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
	var frame *snapshot.Frame // what raw holds the pages of
	var raw []byte
	for ; len(b) > 0; b, page = b[pageSize:], page+1 {
		n, i := page/chunkPages, int(page%chunkPages)
		leaf, err := p.snap.Leaf(int(n))
		if err != nil {
			return err
		}
		c := p.chunk(n)
		if !c.stillMissing(i) {
			// It was given to the balloon, or it is there; reading it from the
			// guest puts at most a page of zeros in place.
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
