package snapshot

import (
	"fmt"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// MemorySource is what Create reads RAM from: its content at one instant,
// whatever the guest does meanwhile. Pages are numbered through all slots,
// without the hole.
//
// For a full snapshot Create asks NextData which pages there are, for a delta
// the set of changed pages says so. Each page is read at most once. A source may
// be slow: no more is read ahead than a few chunks for each goroutine. When it
// fails, so does Create, with its error. Create does not close it.
type MemorySource interface {
	// Slots are the pieces of RAM in ascending order.
	Slots() []Slot
	// NextData returns the first run [first, end) of pages at or after page
	// that may be something else than zeros. The run may end early; there is
	// nothing more if first == end. It is called from one goroutine at a time,
	// and not at all for a delta.
	NextData(page uint64) (first, end uint64, err error)
	// ReadPages copies pages from page on into p, whose length is a multiple
	// of guestmem.PageSize, at most 64 pages. It is called from several
	// goroutines at once and must not make missing pages resident.
	ReadPages(page uint64, p []byte) error
}

// PageReleaser is what a MemorySource may be as well: Release is called when the
// pages [first, end) have been read and will not be asked for again, from the
// goroutine that has read them. A source that keeps copies of pages which the
// guest has overwritten since can let go of them. Pages that are never read are
// not released.
type PageReleaser interface {
	Release(first, end uint64)
}

// GuestSource reads RAM that is all there: the machine was not restored lazily,
// or its restore is finished, or its RAM is mapped from an image. Package pager has the
// source for the others.
type GuestSource struct {
	mem     *guestmem.Memory
	slots   []guestmem.Slot
	pagemap *Pagemap
	// backed are the pages that an image has content for; nil without one.
	backed *guestmem.PageSet
}

// NewGuestSource returns a source for mem. Close it when done.
func NewGuestSource(mem *guestmem.Memory) (*GuestSource, error) {
	pm, err := OpenPagemap()
	if err != nil {
		return nil, err
	}
	return &GuestSource{mem: mem, slots: mem.Slots(), pagemap: pm, backed: mem.Backed()}, nil
}

// Close gives back what the source holds; the memory stays as it is.
func (g *GuestSource) Close() error { return g.pagemap.Close() }

// LayoutOf returns the slots of mem in the form of the manifest.
func LayoutOf(mem *guestmem.Memory) []Slot {
	var out []Slot
	for _, s := range mem.Slots() {
		out = append(out, Slot{GPA: s.GPA, Size: s.Size})
	}
	return out
}

// Slots implements MemorySource.
func (g *GuestSource) Slots() []Slot { return LayoutOf(g.mem) }

// NextData implements MemorySource: pages that the host never had to commit are
// zeros, and so are those that it maps to its page of zeros, unless they are in the
// image that RAM is mapped from.
func (g *GuestSource) NextData(page uint64) (first, end uint64, err error) {
	first, end, err = g.pagemap.NextData(g.slots, page)
	if err != nil || g.backed == nil {
		return first, end, err
	}
	if lo, hi := g.backed.Next(page); lo < hi && (first == end || lo <= first) {
		return lo, hi, nil
	}
	return first, end, nil
}

// ReadPages implements MemorySource.
func (g *GuestSource) ReadPages(page uint64, p []byte) error {
	return ReadGuest(g.mem, page, p)
}

// ReadGuest copies pages of guest memory, which may cross a hole, into p.
func ReadGuest(mem *guestmem.Memory, page uint64, p []byte) error {
	for len(p) > 0 {
		gpa, err := mem.FromLinear(page * guestmem.PageSize)
		if err != nil {
			return fmt.Errorf("reading guest page %d: %w", page, err)
		}
		n := uint64(len(p))
		if gpa < guestmem.HoleStart {
			n = min(n, uint64(guestmem.HoleStart-gpa))
		}
		if err := mem.Read(gpa, p[:n]); err != nil {
			return fmt.Errorf("reading guest page %d: %w", page, err)
		}
		p, page = p[n:], page+n/guestmem.PageSize
	}
	return nil
}
