package cluster_test

import (
	"context"
	"errors"
	"io"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// farStore is a store behind a network: a round trip, a rate that all reads share, and what reads say while it is down.
// It counts what is read.
type farStore struct {
	blob.Store
	rtt time.Duration

	gets, bytes atomic.Int64
	down        atomic.Bool
	mu          sync.Mutex // guards what follows
	perSecond   float64    // bytes; 0 is no limit
	free        time.Time
	files       map[string]int // bytes of each file of a head
	// refuse has reads of the memory of heads fail, slow those of more than a guest waits for at once, of any memory or
	// layer, and cut all that is asked of the store.
	refuse, slow, cut atomic.Bool
}

// rate sets how many bytes come in a second; 0 is no limit.
func (s *farStore) rate(perSecond float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.perSecond, s.free = perSecond, time.Time{}
}

var errDown = errors.New("the network is down")

func (s *farStore) wait(ctx context.Context, key string, n int) error {
	if s.down.Load() || s.cut.Load() {
		return errDown
	}
	if s.refuse.Load() && memoryRE.MatchString(key) || s.slow.Load() && n > 600<<10 && filesRE.MatchString(key) {
		return errDown
	}
	s.gets.Add(1)
	s.bytes.Add(int64(n))
	s.mu.Lock()
	if parts := strings.Split(key, "/"); len(parts) == 4 && s.files != nil {
		s.files[parts[2]] += n
	}
	s.mu.Unlock()
	until := time.Now().Add(s.rtt)
	s.mu.Lock()
	if s.perSecond > 0 {
		if s.free.Before(until) {
			s.free = until
		}
		s.free = s.free.Add(time.Duration(float64(n) / s.perSecond * float64(time.Second)))
		until = s.free
	}
	s.mu.Unlock()
	select {
	case <-time.After(time.Until(until)):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ReadAt implements blob.Store.
func (s *farStore) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if err := s.wait(ctx, key, len(p)); err != nil {
		return err
	}
	return s.Store.ReadAt(ctx, key, p, off)
}

// Load implements blob.Store.
func (s *farStore) Load(ctx context.Context, key string, limit int64) ([]byte, blob.Version, error) {
	b, v, err := s.Store.Load(ctx, key, limit)
	if werr := s.wait(ctx, key, len(b)); werr != nil {
		return nil, "", werr
	}
	return b, v, err
}

// Swap implements blob.Store.
func (s *farStore) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	if s.cut.Load() {
		return "", errDown
	}
	if !s.down.Load() { // the session goes on: only the memory is out of reach
		time.Sleep(s.rtt)
	}
	return s.Store.Swap(ctx, key, old, body)
}

// memoryRE matches packs of the first memory file of a head: behind its document and the manifest.
var memoryRE = regexp.MustCompile(`^data/heads-[^/]+/2/[0-9]+$`)

// filesRE matches packs of all memory files and layers.
var filesRE = regexp.MustCompile(`^data/heads-[^/]+/([2-9]|[0-9]{2,})/[0-9]+$`)

// sleeper makes a sandbox that sleeps in the store, whose memory does not get to b.
func sleeper(t *testing.T, o cluster.Options) (a, b *host, far *farStore, id string) {
	t.Helper()
	near := dir(t)
	far = &farStore{Store: near}
	a, b = newHost(t, "a", near, o), newHost(t, "b", far, o)
	a.create("box")
	a.counts("box", "1")
	a.sleep("box")
	r, err := a.State.Get("box")
	must(t, err)
	far.refuse.Store(true)
	must(t, b.node.Claim(t.Context(), "box", nil))
	if !b.State.IsArriving(r.Snapshot) || b.State.IsThere(r.Snapshot) {
		t.Fatal("it does not arrive")
	}
	if b.phase("box") != state.Asleep {
		t.Fatalf("it is %q", b.phase("box"))
	}
	return a, b, far, r.Snapshot
}

func TestNode_goes_on_with_memory_that_its_predecessor_has_begun_to_get(t *testing.T) {
	_, b, far, id := sleeper(t, cluster.Options{TTL: crashTTL})
	woken := make(chan error, 1)
	go func() {
		_, err := b.Sandbox("box").Wake(t.Context())
		woken <- err
	}()
	for range 3 {
		b.stop()
		b.join()
		if !b.State.IsArriving(id) || b.State.IsThere(id) {
			t.Fatal("it does not arrive any more")
		}
	}
	far.refuse.Store(false)
	must(t, <-woken)
	b.counts("box", "2")
	if !b.State.IsThere(id) || b.State.IsArriving(id) {
		t.Error("its snapshot is not whole")
	}
	must(t, b.State.VerifySnapshot(t.Context(), id))
	b.sleep("box")
}

func TestSandbox_that_is_deleted_while_its_memory_arrives_leaves_nothing(t *testing.T) {
	a, b, far, id := sleeper(t, cluster.Options{})
	must(t, b.Sandbox("box").Delete(t.Context(), sandbox.DeleteOptions{}))
	if b.State.IsArriving(id) || b.State.IsThere(id) {
		t.Error("its memory stays")
	}
	far.refuse.Store(false)
	eventually(t, "the store is empty", func() bool { return objects(t, far, "data/heads-") == 0 })
	if _, err := a.count("box"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("using it: %v", err)
	}
}

// What has lost its memory in one place goes on from the store elsewhere.
func TestHost_that_dies_while_memory_arrives_loses_the_sandbox_to_others(t *testing.T) {
	a, b, far, id := sleeper(t, cluster.Options{TTL: time.Second})
	b.stop()
	eventually(t, "the other host wakes it", func() bool {
		n, err := a.count("box")
		return err == nil && n == "2"
	})
	a.sleep("box") // what it slept in before is removed
	b.join()
	far.refuse.Store(false)
	b.counts("box", "3")
	eventually(t, "nothing arrives any more", func() bool { return !b.State.IsArriving(id) })
	b.sleep("box")
}

// A snapshot that is on its way is refused by name.
func TestSnapshot_that_arrives_is_no_snapshot_yet(t *testing.T) {
	_, b, far, id := sleeper(t, cluster.Options{})
	_, err := b.Clone(t.Context(), id, sandbox.CloneOptions{Name: "copy"})
	want(t, "a clone", err, spec.ErrArriving)
	want(t, "an export", b.State.ExportSnapshot(t.Context(), id, io.Discard), spec.ErrArriving)
	want(t, "a check", b.State.VerifySnapshot(t.Context(), id), spec.ErrArriving)
	want(t, "a removal", b.State.RemoveSnapshot(t.Context(), id), spec.ErrArriving)
	if _, err := b.State.Sweep(t.Context()); err != nil {
		t.Error("a sweep:", err)
	}
	far.refuse.Store(false)
	b.counts("box", "2")
}
