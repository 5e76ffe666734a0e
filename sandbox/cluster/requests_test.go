package cluster_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
)

// requests are what a store was asked.
type requests struct {
	puts    int // Put, Swap and List, which vendors charge alike
	gets    int
	in, out int64 // bytes
	what    []string
}

// tally counts requests, without the renewals of sessions, which do not grow with sandboxes.
type tally struct {
	blob.Store
	mu sync.Mutex // guards n
	n  requests
}

func (s *tally) note(op, key string, in, out int) {
	if strings.HasPrefix(key, "hosts/") {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if op == "get" {
		s.n.gets++
	} else {
		s.n.puts++
	}
	s.n.in, s.n.out, s.n.what = s.n.in+int64(in), s.n.out+int64(out), append(s.n.what, op+" "+key)
}

// take returns the requests since the last call.
func (s *tally) take() requests {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.n
	s.n = requests{}
	return n
}

// Put implements blob.Store.
func (s *tally) Put(ctx context.Context, key string, body []byte) error {
	s.note("put", key, len(body), 0)
	return s.Store.Put(ctx, key, body)
}

// Swap implements blob.Store.
func (s *tally) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	s.note("swap", key, len(body), 0)
	return s.Store.Swap(ctx, key, old, body)
}

// List implements blob.Store.
func (s *tally) List(ctx context.Context, prefix string, each func(blob.Info) error) error {
	s.note("list", prefix, 0, 0)
	return s.Store.List(ctx, prefix, each)
}

// ReadAt implements blob.Store.
func (s *tally) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	s.note("get", key, 0, len(p))
	return s.Store.ReadAt(ctx, key, p, off)
}

// Load implements blob.Store.
func (s *tally) Load(ctx context.Context, key string, limit int64) ([]byte, blob.Version, error) {
	b, v, err := s.Store.Load(ctx, key, limit)
	s.note("get", key, 0, len(b))
	return b, v, err
}

// A store of objects is paid by the request. Their number for a wake and a sleep has a bound, and the same one for the
// hundredth as for the third. It is printed, and stands in docs/SPECIFICATION.md.
func TestRequests_of_a_wake_and_a_sleep_are_few_and_do_not_grow(t *testing.T) {
	d, err := blob.OpenDir(t.TempDir())
	must(t, err)
	store := &tally{Store: d}
	o := cluster.Options{TTL: 10 * time.Minute}
	a, b := newHost(t, "a", store, o), newHost(t, "b", store, o)
	a.vms.Pages, b.vms.Pages = 1024, 1024
	a.create("box")
	count := 0
	wake := func(h *host) {
		t.Helper()
		count++
		h.counts("box", fmt.Sprint(count))
	}
	sleep := func(h *host) {
		t.Helper()
		h.sleep("box")
		eventually(t, "the store has what the sandbox needs", func() bool { return onlyNeeded(t, d, "box") })
	}
	measure := func(what string, maxPuts, maxGets int, do func()) {
		t.Helper()
		store.take()
		do()
		n := store.take()
		t.Logf("%-24s %3d puts, %3d gets, %8d bytes in, %8d out", what, n.puts, n.gets, n.in, n.out)
		if n.puts > maxPuts || n.gets > maxGets {
			t.Errorf("%s: %d puts and %d gets, want at most %d and %d: %s", what, n.puts, n.gets, maxPuts, maxGets, strings.Join(n.what, ", "))
		}
	}
	wake(a)
	measure("first sleep, and image", 12, 6, func() { sleep(a) })
	// Each sleep adds a file of memory and a layer. A wake may meet what the sleep before has left for the background.
	const many = 40
	for i := range many {
		name := fmt.Sprintf("%d. ", i+2)
		here, files := a, 2*i
		if i == many-1 {
			here = b
		}
		if i > 3 && i < many-3 {
			wake(here)
			sleep(here)
			continue
		}
		switch here {
		case a:
			measure(name+"wake", 1, 3, func() { wake(here) })
		case b:
			measure(name+"wake, elsewhere", 1, 16+files, func() { wake(here) })
		}
		measure(name+"sleep", 5, 4, func() { sleep(here) })
	}
}

// together is a store that answers no read of a head's files until so many of them are asked for.
type together struct {
	blob.Store
	many int
	all  chan struct{}

	once  sync.Once
	mu    sync.Mutex // guards asked
	asked map[string]bool
}

// ReadAt implements blob.Store.
func (s *together) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if strings.HasPrefix(key, "data/heads-") {
		s.mu.Lock()
		if s.asked[key] = true; len(s.asked) >= s.many {
			s.once.Do(func() { close(s.all) })
		}
		s.mu.Unlock()
		select {
		case <-s.all:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return s.Store.ReadAt(ctx, key, p, off)
}

// Each round trip to the store is time that somebody waits for his sandbox.
func TestWake_elsewhere_asks_at_once_for_all_that_it_needs_first(t *testing.T) {
	d, err := blob.OpenDir(t.TempDir())
	must(t, err)
	const sleeps = 6
	// The layer of each sleep, the memory of the first one, and that of the last one.
	store := &together{Store: d, many: sleeps + 2, all: make(chan struct{}), asked: map[string]bool{}}
	a, b := newHost(t, "a", d, cluster.Options{}), newHost(t, "b", store, cluster.Options{})
	a.vms.Pages, b.vms.Pages = 1024, 1024
	a.create("box")
	for i := range sleeps {
		a.counts("box", fmt.Sprint(i+1))
		a.sleep("box")
	}
	b.counts("box", fmt.Sprint(sleeps+1))
}
