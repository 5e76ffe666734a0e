package guestmem

import (
	"math/rand/v2"
	"testing"
)

func TestPageSetRunsAreThoseOfAPlainArray(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, pages := range []uint64{1, 63, 64, 65, 200, 1000} {
		for range 50 {
			s, plain := NewPageSet(pages), make([]bool, pages)
			for range 6 {
				first, end := r.Uint64N(pages), r.Uint64N(pages+70)
				on := r.IntN(3) > 0
				if on {
					s.Add(first, end)
				} else {
					s.Remove(first, end)
				}
				for p := first; p < min(end, pages); p++ {
					plain[p] = on
				}
			}
			n := uint64(0)
			got := make([]bool, pages)
			for first, end := s.Next(0); first < end; first, end = s.Next(end) {
				if first > 0 && got[first-1] || end > pages {
					t.Fatalf("of %d pages: run [%d, %d) is not whole or not in RAM", pages, first, end)
				}
				for p := first; p < end; p++ {
					got[p] = true
				}
				n += end - first
			}
			for p := range plain {
				if got[p] != plain[p] || s.Has(uint64(p)) != plain[p] {
					t.Fatalf("of %d pages: page %d is %v, want %v", pages, p, got[p], plain[p])
				}
			}
			if n != s.Len() || s.Has(pages) {
				t.Fatalf("of %d pages: %d in runs, Len %d, page beyond the end: %v", pages, n, s.Len(), s.Has(pages))
			}
			u := NewPageSet(pages)
			u.Union(s)
			c := u.Clone()
			u.Remove(0, pages)
			if c.Len() != n || u.Len() != 0 {
				t.Fatalf("copy has %d pages, want %d; the emptied set %d", c.Len(), n, u.Len())
			}
		}
	}
}
