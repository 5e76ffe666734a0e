package snapshot

import (
	"fmt"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// MemorySource is what Create reads RAM from: its content at one instant, even if the guest runs meanwhile. Page
// numbers run through all slots and skip the hole.
//
// For a full snapshot Create asks NextData which pages to read; for a delta it reads the set of changed pages. It
// reads each page at most once. A source may be slow: each goroutine reads ahead only a few chunks. If the source
// fails, Create fails with its error. Create does not close the source.
type MemorySource interface {
	// Slots are the pieces of RAM in ascending order.
	Slots() []Slot
	// NextData returns the first run [first, end) of pages at or after page that may have other content than
	// zeros. The run may end early. first == end means that there are no more. Create calls NextData from one
	// goroutine at a time, and never for a delta.
	NextData(page uint64) (first, end uint64, err error)
	// ReadPages copies pages from page on into p, whose length is a multiple of guestmem.PageSize, at most 64
	// pages. Create calls it from several goroutines at once. It must not make missing pages resident.
	ReadPages(page uint64, p []byte) error
}

// PageReleaser is an optional interface of a MemorySource. Create calls Release when it has read the pages [first,
// end) and will not ask for them again, from the goroutine that has read them. A source that keeps copies of pages
// which the guest has overwritten can then free the copies. Create does not release pages that it never reads.
type PageReleaser interface {
	Release(first, end uint64)
}

// GuestSource reads RAM that is complete: the machine was not restored lazily, its restore is finished, or its RAM
// is mapped from an image. Package pager has the source for other machines.
type GuestSource struct {
	mem     *guestmem.Memory
	slots   []guestmem.Slot
	pagemap *Pagemap
	// backed are the pages that the image has content for; nil without an image.
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

// Close releases the source's resources and leaves the memory unchanged.
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

// NextData implements MemorySource. Pages that the host never committed, or maps to its zero page, are zeros
// unless the image that RAM is mapped from has them.
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
