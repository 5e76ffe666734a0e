package ledger_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/blob"
)

// A holder with a slow clock has stopped before a contender with a fast one goes on, and has its tenth to do so.
func TestContender_waits_longer_than_the_owner_holds_whatever_their_clocks(t *testing.T) {
	for _, ttl := range []time.Duration{time.Second, 1001 * time.Millisecond, ledger.DefaultTTL, time.Hour} {
		h, w := ledger.Holds(ttl), ledger.Waits(ttl)
		if h >= ttl || w <= ttl || 11*h > 9*w {
			t.Errorf("%v: the owner holds %v, and a contender waits %v", ttl, h, w)
		}
	}
}

// store is one in memory whose calls take time: they are done in the middle of it.
type store struct {
	blob.Store
	mu    sync.Mutex
	takes time.Duration
	lost  error // what swaps return although they are done
	down  atomic.Bool
}

func (s *store) set(takes time.Duration, lost error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.takes, s.lost = takes, lost
}

func (s *store) call(do func()) error {
	s.mu.Lock()
	takes, lost := s.takes, s.lost
	s.mu.Unlock()
	time.Sleep(takes / 2)
	do()
	time.Sleep(takes - takes/2)
	return lost
}

func (s *store) Load(_ context.Context, key string, limit int64) (b []byte, v blob.Version, err error) {
	_ = s.call(func() { b, v, err = s.Store.Load(context.Background(), key, limit) })
	return b, v, err
}

func (s *store) Swap(_ context.Context, key string, old blob.Version, body []byte) (v blob.Version, err error) {
	if s.down.Load() {
		return "", errors.New("the store is down")
	}
	if lost := s.call(func() { v, err = s.Store.Swap(context.Background(), key, old, body) }); lost != nil {
		return "", lost
	}
	return v, err
}

// bubble is the clock of a synctest bubble.
type bubble struct{ begun time.Time }

func (b bubble) Now() time.Duration { return time.Since(b.begun) }

func (b bubble) Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

const ttl = 10 * time.Second

// timed runs a test with a ledger whose time passes at once.
func timed(t *testing.T, test func(t *testing.T, open func() *ledger.Ledger, s *store)) {
	dir, err := blob.OpenDir(t.TempDir())
	must(t, err)
	synctest.Test(t, func(t *testing.T) {
		s := &store{Store: dir}
		test(t, func() *ledger.Ledger {
			l, err := ledger.Open(s, ledger.Options{TTL: ttl, Clock: bubble{time.Now()}})
			must(t, err)
			return l
		}, s)
	})
}

func TestSession_lasts_from_before_its_renewal_was_sent(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, st *store) {
		const slow = 2 * time.Second
		st.set(slow, nil)
		begun := time.Now()
		s := join(t, open(), "a")
		if got, want := s.Deadline(), slow+ledger.Holds(ttl); got != want { // the load took as long
			t.Errorf("joined until %v, want %v", got, want)
		}
		time.Sleep(ttl/3 + 2*slow + time.Millisecond - time.Since(begun))
		if got, want := s.Deadline(), slow+ttl/3+ledger.Holds(ttl); got != want {
			t.Errorf("renewed until %v, want %v", got, want)
		}
	})
}

func TestSession_ends_in_time_though_its_renewals_hang_and_does_not_come_back(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, st *store) {
		s := join(t, open(), "a")
		c := claim(t, s, "box")
		st.set(2*ttl, nil)
		until := s.Deadline()
		begun := time.Now()
		<-s.Lost()
		if got := time.Since(begun); got > until+time.Millisecond {
			t.Errorf("lost after %v, and it lasted until %v", got, until)
		}
		time.Sleep(3 * ttl) // the answers have come
		want(t, "the session", s.Err(), ledger.ErrLost)
		want(t, "its claim", c.Err(), ledger.ErrLost)
		want(t, "a commit", c.Commit(t.Context(), "s", false), ledger.ErrLost)
		st.set(0, nil)
	})
}

func TestContender_counts_from_the_answer_that_shows_the_last_sign_of_life(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, st *store) {
		a, err := open().Join(t.Context(), "a", "")
		must(t, err)
		claim(t, a, "box")
		ledger.Kill(a)
		b := join(t, open(), "b")
		wait := func() time.Duration {
			t.Helper()
			var held *ledger.HeldError
			if _, err := b.Claim(t.Context(), "box"); !errors.As(err, &held) || held.Host != "a" {
				t.Fatal(err)
			}
			return held.Wait
		}
		st.set(time.Second, nil)
		if got := wait(); got != ledger.Waits(ttl) {
			t.Errorf("at first sight it waits %v, want %v", got, ledger.Waits(ttl))
		}
		st.set(0, nil)
		time.Sleep(ledger.Waits(ttl) - 1)
		if got := wait(); got != 1 {
			t.Errorf("it waits %v, want 1 ns", got)
		}
		a2, err := open().Join(t.Context(), "a", a.Incarnation())
		must(t, err)
		ledger.Kill(a2)
		if got := wait(); got != ledger.Waits(ttl) {
			t.Errorf("after another sign of life it waits %v, want %v", got, ledger.Waits(ttl))
		}
		time.Sleep(ledger.Waits(ttl))
		claim(t, b, "box")
	})
}

func TestHost_that_comes_back_goes_on_with_its_session_unless_that_was_ended(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, _ *store) {
		a, err := open().Join(t.Context(), "a", "")
		must(t, err)
		c := claim(t, a, "box")
		ledger.Kill(a)
		begun := time.Now()
		a2, err := open().Join(t.Context(), "a", a.Incarnation())
		must(t, err)
		if a2.Incarnation() != a.Incarnation() || time.Since(begun) > 0 {
			t.Errorf("it is %s after %v, and was %s", a2.Incarnation(), time.Since(begun), a.Incarnation())
		}
		b := join(t, open(), "b")
		var held *ledger.HeldError
		if _, err := b.Claim(t.Context(), "box"); !errors.As(err, &held) {
			t.Fatal("what a host has claimed before it came back is free:", err)
		}
		d := claim(t, a2, "box")
		if !d.Follows(c.Fence()) || d.Follows(0) {
			t.Error("it does not follow its own claim, or it follows none")
		}
		want(t, "the former process's claim", c.Commit(t.Context(), "s", true), ledger.ErrReleased)
		ledger.Kill(a2)
		a2, err = open().Join(t.Context(), "a", a.Incarnation())
		must(t, err)
		if d = claim(t, a2, "box"); !d.Follows(c.Fence()) {
			t.Error("a claim of the same session was in between, and counts as another's")
		}
		ledger.Kill(a2)
		if _, err := b.Claim(t.Context(), "box"); !errors.As(err, &held) {
			t.Fatal(err)
		}
		time.Sleep(ledger.Waits(ttl))
		e := claim(t, b, "box")
		a3 := join(t, open(), "a")
		if a4, err := open().Join(t.Context(), "a", a.Incarnation()); !errors.Is(err, ledger.ErrHostInUse) {
			t.Errorf("another process with the name and an old session: %+v, %v", a4, err)
		}
		must(t, e.Release(t.Context()))
		if f := claim(t, a3, "box"); f.Follows(d.Fence()) || !f.Follows(e.Fence()) {
			t.Error("a claim follows one before another host's")
		}
	})
}

func TestDeleted_sandboxs_name_is_for_a_new_one(t *testing.T) {
	l, st := open(t, t.TempDir())
	s := join(t, l, "a")
	create := func() (*ledger.Claim, error) { return s.Create(t.Context(), "box") }
	c, err := create()
	must(t, err)
	push(t, st, c, "s1", ledger.Needs{Fresh: []string{"u1"}}, true)
	_, err = create()
	want(t, "a second one", err, ledger.ErrExists)
	c = claim(t, s, "box")
	must(t, c.Delete(t.Context()))
	_, err = s.Claim(t.Context(), "box")
	want(t, "a claim of what is deleted", err, ledger.ErrDeleted)
	d, err := create()
	must(t, err)
	if d.Head() != "" || d.Follows(c.Fence()-1) {
		t.Errorf("the new one has the head %q, or goes on with the old one", d.Head())
	}
	push(t, st, d, "s2", ledger.Needs{Fresh: []string{"u2"}}, true)
	must(t, l.Collect(t.Context(), "box", deletes(st)))
	if there(t, st, "box/u1") || !there(t, st, "box/u2") {
		t.Error("deleted too much or too little")
	}
}

// A renewal whose answer is lost was done: the next one must not fail for that, and must not prolong the session.
func TestRenewal_whose_answer_is_lost_does_not_prolong_the_session(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, st *store) {
		s := join(t, open(), "a")
		until := s.Deadline()
		st.set(0, errors.New("lost"))
		time.Sleep(ttl / 2)
		if s.Deadline() != until {
			t.Errorf("it lasts until %v, and lasted until %v", s.Deadline(), until)
		}
		st.set(0, nil)
		time.Sleep(ttl / 10)
		if s.Deadline() <= until {
			t.Error("it is not renewed when answers come again")
		}
		must(t, s.Err())
	})
}

func TestClaim_is_not_sent_when_the_session_has_ended_meanwhile(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, st *store) {
		l := open()
		s := join(t, l, "a")
		st.set(2*ttl, nil) // the load takes longer than the session
		_, err := s.Claim(t.Context(), "box")
		want(t, "the claim", err, ledger.ErrLost)
		st.set(0, nil)
		_, err = l.Family(t.Context(), "box")
		want(t, "its sandbox", err, ledger.ErrNotFound)
	})
}

func TestHost_whose_record_is_missing_is_waited_for_as_long_as_any(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, st *store) {
		a, err := open().Join(t.Context(), "a", "")
		must(t, err)
		claim(t, a, "box")
		ledger.Kill(a)
		must(t, st.Delete(t.Context(), "hosts/a"))
		b := join(t, open(), "b")
		var held *ledger.HeldError
		if _, err := b.Claim(t.Context(), "box"); !errors.As(err, &held) || held.Wait != ledger.Waits(time.Hour) {
			t.Errorf("%+v, %v", held, err)
		}
	})
}

// once is a store whose next swap of a host fails, after something else has happened.
type once struct {
	*store
	first func()
}

func (s *once) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	if do := s.first; do != nil {
		s.first = nil
		do()
		return "", errors.New("the network has failed")
	}
	return s.store.Swap(ctx, key, old, body)
}

func TestSession_that_was_ended_while_a_host_came_back_does_not_go_on(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, st *store) {
		a, err := open().Join(t.Context(), "a", "")
		must(t, err)
		claim(t, a, "box")
		ledger.Kill(a)
		b := join(t, open(), "b")
		var held *ledger.HeldError
		if _, err := b.Claim(t.Context(), "box"); !errors.As(err, &held) {
			t.Fatal(err)
		}
		time.Sleep(held.Wait)
		l, err := ledger.Open(&once{st, func() { claim(t, b, "box") }}, ledger.Options{TTL: ttl, Clock: bubble{time.Now()}})
		must(t, err)
		again, err := l.Join(t.Context(), "a", a.Incarnation())
		must(t, err)
		defer ledger.Kill(again)
		if again.Incarnation() == a.Incarnation() {
			t.Error("it goes on with a session that another host has ended")
		}
	})
}

func TestIntent_of_an_earlier_claim_is_not_committed(t *testing.T) {
	l, _ := open(t, t.TempDir())
	s := join(t, l, "a")
	c := claim(t, s, "box")
	must(t, c.Intend(t.Context(), "s1", ledger.Needs{Fresh: []string{"u1"}}))
	must(t, c.Release(t.Context()))
	want(t, "the commit", claim(t, s, "box").Commit(t.Context(), "s1", false), ledger.ErrSnapshot)
}

func TestRelease_that_fails_is_done_by_the_session(t *testing.T) {
	timed(t, func(t *testing.T, open func() *ledger.Ledger, st *store) {
		c := claim(t, join(t, open(), "a"), "box")
		b := join(t, open(), "b")
		st.down.Store(true)
		if err := c.Release(t.Context()); err == nil {
			t.Fatal("it did not fail")
		}
		st.down.Store(false)
		time.Sleep(ttl)
		claim(t, b, "box")
	})
}

func TestFamily_has_another_counter_after_each_change(t *testing.T) {
	l, _ := open(t, t.TempDir())
	s := join(t, l, "a")
	for i := range uint64(3) {
		c := claim(t, s, "box")
		f, err := l.Family(t.Context(), "box")
		must(t, err)
		if f.Counter != 2*i+1 {
			t.Errorf("%d after %d changes", f.Counter, 2*i+1)
		}
		must(t, c.Release(t.Context()))
	}
}
