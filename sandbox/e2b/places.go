package e2b

import "sync"

// places bounds what goes on at once, of all owners together and of each: an owner has half of them at most, so that
// there are some for others. What has no owner is the operator's.
type places struct {
	most int

	mu sync.Mutex // guards what follows
	n  int
	of map[string]int // by owner
}

func newPlaces(most int) *places { return &places{most: most, of: map[string]int{}} }

// take takes a place until leave is called; ok is false if there is none.
func (p *places) take(owner string) (leave func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.n >= p.most || owner != "" && p.of[owner] >= p.most/2 {
		return nil, false
	}
	p.n++
	p.of[owner]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.n--
		if p.of[owner]--; p.of[owner] == 0 {
			delete(p.of, owner)
		}
	}, true
}
