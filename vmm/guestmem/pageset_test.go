package guestmem

import (
	"errors"
	"math/rand/v2"
	"testing"
)

func TestPage_set_runs_are_those_of_a_plain_array(t *testing.T) {
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
			from, limit := r.Uint64N(pages), r.Uint64N(pages+70)
			first, end := s.NextBefore(from, limit)
			for p := from; p < min(limit, pages); p++ {
				if in := p >= first && p < end; in != plain[p] && (in || p < first || p == end) {
					t.Fatalf("of %d pages: first run of [%d, %d) is [%d, %d)", pages, from, limit, first, end)
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

func TestRead_set_packs_the_pages_across_the_hole(t *testing.T) {
	m := newMemory(t, 4<<30)
	hole := uint64(HoleStart) / PageSize
	set := NewPageSet(m.Size() / PageSize)
	for _, page := range []uint64{3, 4, 9, hole - 1, hole, hole + 5} {
		set.Add(page, page+1)
		gpa, err := m.FromLinear(page * PageSize)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Write(gpa, []byte{byte(page), byte(page >> 8)}); err != nil {
			t.Fatal(err)
		}
	}
	p := make([]byte, 4*PageSize)
	if err := m.ReadSet(set, 4, hole+1, p); err != nil {
		t.Fatal(err)
	}
	for i, page := range []uint64{4, 9, hole - 1, hole} {
		if got := p[i*PageSize:]; got[0] != byte(page) || got[1] != byte(page>>8) {
			t.Errorf("page %d of the result is not page %d of RAM", i, page)
		}
	}
	if err := m.ReadSet(set, 0, set.Pages(), p); !errors.Is(err, ErrRange) {
		t.Errorf("into too little room: got %v, want ErrRange", err)
	}
}
