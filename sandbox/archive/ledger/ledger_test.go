package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/blob"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dir string) (*ledger.Ledger, blob.Store) {
	t.Helper()
	store, err := blob.OpenDir(dir)
	must(t, err)
	l, err := ledger.Open(store, ledger.Options{TTL: ttl})
	must(t, err)
	return l, store
}

func join(t *testing.T, l *ledger.Ledger, host string) *ledger.Session {
	t.Helper()
	s, err := l.Join(t.Context(), host, "")
	must(t, err)
	t.Cleanup(func() { _ = s.Leave(context.WithoutCancel(t.Context())) })
	return s
}

func want(t *testing.T, what string, err, wanted error) {
	t.Helper()
	if !errors.Is(err, wanted) {
		t.Errorf("%s: got %v, want %v", what, err, wanted)
	}
}

// deletes deletes the objects of uploads of the sandbox box: see push.
func deletes(store blob.Store) func(context.Context, string) error {
	return func(ctx context.Context, upload string) error { return store.Delete(ctx, "uploads/box/"+upload) }
}

func claim(t *testing.T, s *ledger.Session, family string) *ledger.Claim {
	t.Helper()
	c, err := s.Claim(t.Context(), family)
	must(t, err)
	return c
}

// push uploads and commits a snapshot.
func push(t *testing.T, store blob.Store, c *ledger.Claim, snapshot string, n ledger.Needs, release bool) {
	t.Helper()
	must(t, c.Intend(t.Context(), snapshot, n))
	for _, u := range n.Fresh {
		must(t, store.Put(t.Context(), "uploads/"+c.Family()+"/"+u, []byte(u)))
	}
	must(t, c.Commit(t.Context(), snapshot, release))
}

func there(t *testing.T, store blob.Store, upload string) bool {
	t.Helper()
	_, _, err := store.Load(t.Context(), "uploads/"+upload, 1000)
	if err != nil && !errors.Is(err, blob.ErrNotFound) {
		t.Fatal(err)
	}
	return err == nil
}

func TestA_sandbox_moves_to_another_host_when_it_is_released(t *testing.T) {
	dir := t.TempDir()
	l, store := open(t, dir)
	l2, _ := open(t, dir)
	a, b := join(t, l, "a"), join(t, l2, "b")
	c := claim(t, a, "box")
	var held *ledger.HeldError
	if _, err := b.Claim(t.Context(), "box"); !errors.As(err, &held) || held.Host != "a" || held.Wait <= 0 {
		t.Error("another host:", err)
	}
	if _, err := a.Claim(t.Context(), "box"); !errors.As(err, &held) || held.Host != "a" || held.Wait != 0 {
		t.Error("the same host again:", err)
	}
	push(t, store, c, "s1", ledger.Needs{Fresh: []string{"u1", "u2"}}, true)
	want(t, "a commit after the release", c.Commit(t.Context(), "s1", false), ledger.ErrReleased)
	d := claim(t, b, "box")
	if d.Head() != "s1" || d.Fence() != 2 {
		t.Errorf("head %q, fence %d", d.Head(), d.Fence())
	}
}

func TestA_dead_hosts_sandbox_is_claimed_after_its_time_to_live(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, store *store) {
		a, err := open().Join(t.Context(), "a", "")
		must(t, err)
		c := claim(t, a, "box")
		push(t, store, c, "s1", ledger.Needs{Fresh: []string{"u1"}}, false)
		must(t, c.Intend(t.Context(), "s2", ledger.Needs{Fresh: []string{"u2"}, Reused: []string{"u1"}}))
		ledger.Kill(a)
		l2 := open()
		b := join(t, l2, "b")
		for {
			var held *ledger.HeldError
			d, err := b.Claim(t.Context(), "box")
			if errors.As(err, &held) {
				if a.Err() == nil && held.Wait <= 0 {
					t.Fatal("no time to wait for a living host")
				}
				time.Sleep(held.Wait)
				continue
			}
			must(t, err)
			want(t, "the dead host's session", a.Err(), ledger.ErrLost)
			if d.Head() != "s1" {
				t.Errorf("the head is %q", d.Head())
			}
			break
		}
		must(t, store.Put(t.Context(), "uploads/box/u2", nil))
		must(t, l2.Collect(t.Context(), "box", deletes(store)))
		if there(t, store, "box/u2") || !there(t, store, "box/u1") {
			t.Error("deleted too much or too little")
		}
	})
}

func TestUploads_are_deleted_when_no_snapshot_needs_them(t *testing.T) {
	l, store := open(t, t.TempDir())
	c := claim(t, join(t, l, "a"), "box")
	push(t, store, c, "s1", ledger.Needs{Fresh: []string{"u1", "u2"}}, false)
	push(t, store, c, "s2", ledger.Needs{Fresh: []string{"u3"}, Reused: []string{"u2"}}, false)
	want(t, "the head", l.Remove(t.Context(), "box", "s2"), ledger.ErrSnapshot)
	want(t, "what was the head", c.Commit(t.Context(), "s1", false), ledger.ErrSnapshot)
	want(t, "a fresh one that is there", c.Intend(t.Context(), "s3", ledger.Needs{Fresh: []string{"u3"}}), ledger.ErrSnapshot)
	refused := func(uploads ...string) {
		t.Helper()
		var condemned *ledger.CondemnedError
		if err := c.Intend(t.Context(), "s3", ledger.Needs{Reused: uploads}); !errors.As(err, &condemned) || len(condemned.Uploads) != 1 || condemned.Uploads[0] != "u1" {
			t.Error("an upload of a removed snapshot:", err)
		}
	}
	refused("u1", "u2")
	must(t, l.Collect(t.Context(), "box", deletes(store)))
	refused("u1", "u2") // nothing says any more that it was there
	if there(t, store, "box/u1") || !there(t, store, "box/u2") || !there(t, store, "box/u3") {
		t.Error("deleted too much or too little")
	}
}

// counting is a store that counts what it is asked of families.
type counting struct {
	blob.Store
	loads, swaps atomic.Int32
}

func (s *counting) Load(ctx context.Context, key string, limit int64) ([]byte, blob.Version, error) {
	if strings.HasPrefix(key, "families/") {
		s.loads.Add(1)
	}
	return s.Store.Load(ctx, key, limit)
}

func (s *counting) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	if strings.HasPrefix(key, "families/") {
		s.swaps.Add(1)
	}
	return s.Store.Swap(ctx, key, old, body)
}

func TestA_sandbox_that_stays_on_its_host_is_read_once_and_written_three_times(t *testing.T) {
	dir := t.TempDir()
	_, store := open(t, dir)
	asked := &counting{Store: store}
	l, err := ledger.Open(asked, ledger.Options{TTL: ttl})
	must(t, err)
	s := join(t, l, "a")
	for i := range 100 {
		asked.loads.Store(0)
		asked.swaps.Store(0)
		push(t, store, claim(t, s, "box"), fmt.Sprintf("s%d", i), ledger.Needs{Fresh: []string{fmt.Sprintf("u%d", i)}}, true)
		must(t, l.Collect(t.Context(), "box", deletes(store)))
		if loads, swaps := asked.loads.Load(), asked.swaps.Load(); i > 0 && (loads != 1 || swaps != 3) {
			t.Fatalf("round %d: %d reads and %d writes", i, loads, swaps)
		}
		if i > 0 && there(t, store, fmt.Sprintf("box/u%d", i-1)) {
			t.Fatal("what the head before needed is there")
		}
	}
	// Another host's change is met: what is remembered is not what counts.
	other, _ := open(t, dir)
	b := join(t, other, "b")
	c := claim(t, b, "box")
	var held *ledger.HeldError
	if _, err := s.Claim(t.Context(), "box"); !errors.As(err, &held) || held.Host != "b" {
		t.Error("what another host has:", err)
	}
	must(t, c.Release(t.Context()))
	must(t, claim(t, s, "box").Release(t.Context())) // though it was another's when it was last read
	must(t, claim(t, b, "box").Delete(t.Context()))
	_, err = s.Claim(t.Context(), "box")
	want(t, "what another host has deleted", err, ledger.ErrDeleted)
	must(t, l.Collect(t.Context(), "box", deletes(store)))
	if f, err := l.Family(t.Context(), "box"); err != nil || !f.Deleted || len(f.Snapshots) > 0 || there(t, store, "box/u99") {
		t.Errorf("it is no tombstone: %+v, %v", f, err)
	}
}

func TestMany_hosts_of_a_directory_run_a_sandbox_one_at_a_time(t *testing.T) {
	const hosts, rounds = 4, 10
	dir := t.TempDir()
	var running, pushed atomic.Int32
	var all sync.WaitGroup
	for h := range hosts {
		l, store := open(t, dir)
		s := join(t, l, fmt.Sprintf("h%d", h))
		all.Go(func() {
			for round := 0; round < rounds; {
				c, err := s.Claim(t.Context(), "box")
				var held *ledger.HeldError
				if errors.As(err, &held) {
					time.Sleep(time.Millisecond)
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if running.Add(1) != 1 {
					t.Error("it runs twice")
				}
				if c.Head() != "" {
					if want := fmt.Sprintf("s%d", pushed.Load()); c.Head() != want {
						t.Errorf("the head is %s, not %s", c.Head(), want)
					}
				}
				id := fmt.Sprintf("s%d", pushed.Add(1))
				upload := id + ".u"
				err = c.Intend(t.Context(), id, ledger.Needs{Fresh: []string{upload}})
				err = errors.Join(err, store.Put(t.Context(), "uploads/box/"+upload, nil))
				running.Add(-1)
				if err := errors.Join(err, c.Commit(t.Context(), id, true), l.Collect(t.Context(), "box", deletes(store))); err != nil {
					t.Error(err)
					return
				}
				round++
			}
		})
	}
	all.Wait()
	l, store := open(t, dir)
	must(t, l.Collect(t.Context(), "box", deletes(store)))
	f, err := l.Family(t.Context(), "box")
	must(t, err)
	if f.Fence != hosts*rounds || f.Head != fmt.Sprintf("s%d", hosts*rounds) {
		t.Errorf("%+v", f)
	}
	for i := range hosts * rounds {
		if id := fmt.Sprintf("s%d", i+1); there(t, store, "box/"+id+".u") != (id == f.Head) {
			t.Errorf("the upload of %s, and the head is %s", id, f.Head)
		}
	}
}

// late is a store that does one swap of a family when its caller has given up.
type late struct {
	blob.Store
	armed atomic.Bool
	done  chan struct{}
}

func (s *late) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	if key != "families/box" || !s.armed.CompareAndSwap(true, false) {
		return s.Store.Swap(ctx, key, old, body)
	}
	<-ctx.Done()
	_, err := s.Store.Swap(context.WithoutCancel(ctx), key, old, body)
	close(s.done)
	return "", errors.Join(ctx.Err(), err)
}

func TestA_claim_that_comes_after_its_caller_gave_up_is_released(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, store *store) {
		slow := &late{Store: store, done: make(chan struct{})}
		l, err := ledger.Open(slow, ledger.Options{TTL: ttl, Clock: bubble{time.Now()}})
		must(t, err)
		a := join(t, l, "a")
		slow.armed.Store(true)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		if _, err := a.Claim(ctx, "box"); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		<-slow.done
		b := join(t, open(), "b")
		for {
			var held *ledger.HeldError
			_, err := b.Claim(t.Context(), "box")
			if !errors.As(err, &held) {
				must(t, err)
				break
			}
			must(t, a.Err()) // alive, and so it is for it to release
			time.Sleep(10 * time.Millisecond)
		}
	})
}

func TestA_host_name_is_for_one_process(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, _ *store) {
		l, l2 := open(), open()
		a := join(t, l, "a")
		_, err := l2.Join(t.Context(), "a", "another")
		want(t, "a second process", err, ledger.ErrHostInUse)
		must(t, a.Err())
		ledger.Kill(a)
		b, err := l2.Join(t.Context(), "a", a.Incarnation())
		must(t, err)
		must(t, b.Leave(t.Context()))
		want(t, "after leaving", b.Err(), ledger.ErrLost)
		c, err := l.Join(t.Context(), "a", a.Incarnation())
		must(t, err)
		if c.Incarnation() == a.Incarnation() {
			t.Error("it goes on with a session that was left")
		}
		must(t, c.Leave(t.Context()))
	})
}

func TestA_full_family_takes_no_snapshots_and_can_be_claimed_and_deleted(t *testing.T) {
	l, _ := open(t, t.TempDir())
	s := join(t, l, "a")
	c := claim(t, s, "box")
	var err error
	for i := 0; err == nil; i++ {
		n := ledger.Needs{}
		for u := range 2000 {
			n.Fresh = append(n.Fresh, fmt.Sprintf("%0200d.%d.%d", 0, i, u))
		}
		err = c.Intend(t.Context(), fmt.Sprintf("s%d", i), n)
	}
	want(t, "one too many", err, ledger.ErrFull)
	must(t, c.Release(t.Context()))
	c = claim(t, s, "box")
	must(t, c.Delete(t.Context()))
	must(t, l.Collect(t.Context(), "box", func(context.Context, string) error { return nil }))
	f, err := l.Family(t.Context(), "box")
	must(t, err)
	if len(f.Snapshots) > 0 {
		t.Error(len(f.Snapshots), "snapshots are left")
	}
}

func TestHost_is_found_at_its_address_while_its_session_lasts(t *testing.T) {
	dir, key := t.TempDir(), strings.Repeat("0a", 32)
	store, err := blob.OpenDir(dir)
	must(t, err)
	with, err := ledger.Open(store, ledger.Options{TTL: ttl, Address: "10.0.0.1:7400", Key: key})
	must(t, err)
	plain, _ := open(t, dir)
	if _, err := plain.Host(t.Context(), "a"); !errors.Is(err, ledger.ErrNotFound) {
		t.Error("before there is one:", err)
	}
	a, err := with.Join(t.Context(), "a", "")
	must(t, err)
	join(t, plain, "b")
	if h, err := plain.Host(t.Context(), "a"); err != nil || h.Incarnation != a.Incarnation() || h.Address != "10.0.0.1:7400" || h.Key != key || h.Left <= 0 {
		t.Errorf("%+v, %v", h, err)
	}
	if h, err := with.Host(t.Context(), "b"); err != nil || h.Address != "" || h.Left <= 0 {
		t.Errorf("one without an address: %+v, %v", h, err)
	}
	must(t, a.Leave(t.Context()))
	if h, err := plain.Host(t.Context(), "a"); err != nil || h.Left != 0 {
		t.Errorf("one that has left: %+v, %v", h, err)
	}
	for _, o := range []ledger.Options{{Address: "10.0.0.1:7400"}, {Key: key}, {Address: "10.0.0.1", Key: key}, {Address: "a b:1", Key: key}, {Address: "a:0", Key: key}, {Address: "a:1", Key: "x"}} {
		if _, err := ledger.Open(store, o); !errors.Is(err, ledger.ErrName) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
