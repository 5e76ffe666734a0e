package guestmem

import "math/bits"

// PageSet is a set of pages of one guest's RAM, in the linear numbering that skips the hole. It is a bitmap: bit
// n%64 of word n/64 is page n. Goroutines may use it concurrently only while none changes it.
type PageSet struct {
	words []uint64
	pages uint64
}

// NewPageSet returns an empty set for RAM of the given number of pages.
func NewPageSet(pages uint64) *PageSet {
	return &PageSet{words: make([]uint64, (pages+63)/64), pages: pages}
}

// Pages returns the number of pages of the RAM, in the set or not.
func (s *PageSet) Pages() uint64 { return s.pages }

// Words returns the bitmap itself, which the caller may read and write. Bits from Pages on must stay clear.
func (s *PageSet) Words() []uint64 { return s.words }

// Len returns the number of pages in the set.
func (s *PageSet) Len() uint64 {
	n := 0
	for _, w := range s.words {
		n += bits.OnesCount64(w)
	}
	return uint64(n)
}

// Has reports whether a page is in the set, which a page outside RAM never is.
func (s *PageSet) Has(page uint64) bool {
	return page < s.pages && s.words[page/64]>>(page%64)&1 != 0
}

// Add adds the pages [first, end) to the set, except those beyond RAM.
func (s *PageSet) Add(first, end uint64) {
	s.each(first, end, func(w *uint64, mask uint64) { *w |= mask })
}

// Remove removes the pages [first, end) from the set.
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

// Union adds to s all pages of other, a set for the same RAM.
func (s *PageSet) Union(other *PageSet) {
	for i, w := range other.words[:min(len(other.words), len(s.words))] {
		s.words[i] |= w
	}
}

// Intersect removes from s all pages that are not in other, a set for the same RAM.
func (s *PageSet) Intersect(other *PageSet) {
	for i := range s.words {
		s.words[i] &= other.words[i]
	}
}

// Subtract removes from s all pages of other, a set for the same RAM.
func (s *PageSet) Subtract(other *PageSet) {
	for i := range s.words {
		s.words[i] &^= other.words[i]
	}
}

// LenBetween returns the number of pages of the set in [first, end).
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

// Next returns the first run [first, end) of pages in the set at or after page. If there is none, first == end.
func (s *PageSet) Next(page uint64) (first, end uint64) { return s.NextBefore(page, s.pages) }

// NextBefore is Next among the pages before limit.
func (s *PageSet) NextBefore(page, limit uint64) (first, end uint64) {
	limit = min(limit, s.pages)
	first = s.seek(page, limit, 0)
	return first, s.seek(first, limit, ^uint64(0))
}

// seek returns the first page in [page, limit) whose bit differs from that of flip, or limit.
func (s *PageSet) seek(page, limit, flip uint64) uint64 {
	for page < limit {
		if w := (s.words[page/64] ^ flip) >> (page % 64); w != 0 {
			return min(page+uint64(bits.TrailingZeros64(w)), limit)
		}
		page = (page/64 + 1) * 64
	}
	return limit
}
