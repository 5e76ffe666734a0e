package guestmem

import "math/bits"

// PageSet is a set of pages of one guest's RAM, in the linear numbering that skips
// the hole. It is a bitmap: bit n%64 of word n/64 is page n. It is for one goroutine
// at a time unless nobody changes it.
type PageSet struct {
	words []uint64
	pages uint64
}

// NewPageSet returns an empty set for RAM of the given number of pages.
func NewPageSet(pages uint64) *PageSet {
	return &PageSet{words: make([]uint64, (pages+63)/64), pages: pages}
}

// Pages is the number of pages that the set is about, those in it and the others.
func (s *PageSet) Pages() uint64 { return s.pages }

// Words is the bitmap itself, which the caller may read and write. Bits from Pages
// on must stay clear.
func (s *PageSet) Words() []uint64 { return s.words }

// Len is the number of pages in the set.
func (s *PageSet) Len() uint64 {
	n := 0
	for _, w := range s.words {
		n += bits.OnesCount64(w)
	}
	return uint64(n)
}

// Has reports whether a page is in the set; one that is no page of RAM is not.
func (s *PageSet) Has(page uint64) bool {
	return page < s.pages && s.words[page/64]>>(page%64)&1 != 0
}

// Add puts the pages [first, end) into the set; those beyond RAM are left out.
func (s *PageSet) Add(first, end uint64) {
	s.each(first, end, func(w *uint64, mask uint64) { *w |= mask })
}

// Remove takes the pages [first, end) out of the set.
func (s *PageSet) Remove(first, end uint64) {
	s.each(first, end, func(w *uint64, mask uint64) { *w &^= mask })
}

func (s *PageSet) each(first, end uint64, f func(w *uint64, mask uint64)) {
	for end = min(end, s.pages); first < end; {
		n := min(64-first%64, end-first)
		f(&s.words[first/64], ^uint64(0)>>(64-n)<<(first%64))
		first += n
	}
}

// Union puts all pages of other, a set for the same RAM, into s.
func (s *PageSet) Union(other *PageSet) {
	for i, w := range other.words[:min(len(other.words), len(s.words))] {
		s.words[i] |= w
	}
}

// Intersect takes out of s all pages that are not in other, a set for the same RAM.
func (s *PageSet) Intersect(other *PageSet) {
	for i := range s.words {
		s.words[i] &= other.words[i]
	}
}

// Subtract takes out of s all pages of other, a set for the same RAM.
func (s *PageSet) Subtract(other *PageSet) {
	for i := range s.words {
		s.words[i] &^= other.words[i]
	}
}

// LenBetween is the number of pages of the set in [first, end).
func (s *PageSet) LenBetween(first, end uint64) uint64 {
	n := 0
	for end = min(end, s.pages); first < end; {
		k := min(64-first%64, end-first)
		n += bits.OnesCount64(s.words[first/64] >> (first % 64) << (64 - k))
		first += k
	}
	return uint64(n)
}

// Clone returns a copy.
func (s *PageSet) Clone() *PageSet {
	return &PageSet{words: append([]uint64(nil), s.words...), pages: s.pages}
}

// Next returns the first run [first, end) of pages in the set at or after page;
// first == end if there is none.
func (s *PageSet) Next(page uint64) (first, end uint64) { return s.NextBefore(page, s.pages) }

// NextBefore is Next among the pages before limit.
func (s *PageSet) NextBefore(page, limit uint64) (first, end uint64) {
	limit = min(limit, s.pages)
	first = s.seek(page, limit, 0)
	return first, s.seek(first, limit, ^uint64(0))
}

// seek finds the first page in [page, limit) whose bit differs from those of flip;
// limit if there is none.
func (s *PageSet) seek(page, limit, flip uint64) uint64 {
	for page < limit {
		if w := (s.words[page/64] ^ flip) >> (page % 64); w != 0 {
			return min(page+uint64(bits.TrailingZeros64(w)), limit)
		}
		page = (page/64 + 1) * 64
	}
	return limit
}
