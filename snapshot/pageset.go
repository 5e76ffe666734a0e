package snapshot

import (
	"fmt"
	"math/bits"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// PageSet is a set of pages of RAM in linear numbering (through all slots,
// without the hole), one bit for each: 32 KiB for each GiB. It is for one
// goroutine at a time; any number may read it while nobody changes it.
type PageSet struct {
	words []uint64
	pages uint64
}

// NewPageSet returns an empty set for RAM of that many pages.
func NewPageSet(pages uint64) *PageSet {
	return &PageSet{words: make([]uint64, (pages+63)/64), pages: pages}
}

// PageSetOf makes a set of a bitmap: bit n%64 of word n/64 is page n. It keeps
// the words and does not copy them. It fails with ErrSpec if there are not
// exactly as many words as RAM of that many pages needs, or if bits beyond its
// end are set.
func PageSetOf(words []uint64, pages uint64) (*PageSet, error) {
	if want := (pages + 63) / 64; uint64(len(words)) != want {
		return nil, fmt.Errorf("a bitmap of %d words for %d pages, which need %d: %w", len(words), pages, want, ErrSpec)
	}
	if r := pages % 64; r != 0 && words[len(words)-1]>>r != 0 {
		return nil, fmt.Errorf("a bitmap with pages beyond the %d that there are: %w", pages, ErrSpec)
	}
	return &PageSet{words: words, pages: pages}, nil
}

// Pages is how many pages RAM has, in the set or not.
func (s *PageSet) Pages() uint64 { return s.pages }

// Words is the bitmap itself; changes of it change the set.
func (s *PageSet) Words() []uint64 { return s.words }

// Add puts the pages [first, end) into the set. Pages that RAM does not have
// are ignored.
func (s *PageSet) Add(first, end uint64) {
	end = min(end, s.pages)
	for ; first < end && first%64 != 0; first++ {
		s.words[first/64] |= 1 << (first % 64)
	}
	for ; first+64 <= end; first += 64 {
		s.words[first/64] = ^uint64(0)
	}
	for ; first < end; first++ {
		s.words[first/64] |= 1 << (first % 64)
	}
}

// Has reports whether a page is in the set.
func (s *PageSet) Has(page uint64) bool {
	return page < s.pages && s.words[page/64]>>(page%64)&1 != 0
}

// Len is the number of pages in the set.
func (s *PageSet) Len() uint64 {
	n := 0
	for _, w := range s.words {
		n += bits.OnesCount64(w)
	}
	return uint64(n)
}

// Union puts all pages of o into s. It fails with ErrSpec if they are of RAM of
// different sizes.
func (s *PageSet) Union(o *PageSet) error {
	if s.pages != o.pages {
		return fmt.Errorf("joining sets of %d and %d pages: %w", s.pages, o.pages, ErrSpec)
	}
	for i, w := range o.words {
		s.words[i] |= w
	}
	return nil
}

// chunk copies the bits of a chunk and reports whether there are any.
func (s *PageSet) chunk(n uint64, bits *[ChunkPages / 64]uint64) bool {
	*bits = [ChunkPages / 64]uint64{}
	copy(bits[:], s.words[n*(ChunkPages/64):])
	return *bits != [ChunkPages / 64]uint64{}
}

func pagesOf(slots []Slot) uint64 {
	var n uint64
	for _, s := range slots {
		n += s.Size
	}
	return n / guestmem.PageSize
}
