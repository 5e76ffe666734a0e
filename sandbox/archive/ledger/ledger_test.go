package ledger_test

import (
	"context"
	"errors"
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
	l, err := ledger.Open(store, ledger.Options{TTL: time.Second})
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

// deletes deletes the objects of uploads: see upload.
func deletes(store blob.Store) func(context.Context, string, string) error {
	return func(ctx context.Context, family, upload string) error {
		return store.Delete(ctx, "uploads/"+family+"/"+upload)
	}
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
	dir := t.TempDir()
	l, store := open(t, dir)

	a, err := l.Join(t.Context(), "a", "")
	must(t, err)
	c := claim(t, a, "box")
	push(t, store, c, "s1", ledger.Needs{Fresh: []string{"u1"}}, false)
	must(t, c.Intend(t.Context(), "s2", ledger.Needs{Fresh: []string{"u2"}, Reused: []string{"u1"}}))
	ledger.Kill(a)
	l2, _ := open(t, dir)
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
	must(t, l2.Collect(t.Context(), "box", deletes(store)))
	f, err := l2.Family(t.Context(), "box")
	must(t, err)
	if len(f.Snapshots) != 1 || !there(t, store, "box/u1") {
		t.Errorf("%+v", f)
	}
}

func TestUploads_are_deleted_when_no_snapshot_needs_them(t *testing.T) {
	l, store := open(t, t.TempDir())
	c := claim(t, join(t, l, "a"), "box")
	push(t, store, c, "s1", ledger.Needs{Fresh: []string{"u1", "u2"}}, false)
	push(t, store, c, "s2", ledger.Needs{Fresh: []string{"u3"}, Reused: []string{"u2"}}, false)
	want(t, "the head", l.Remove(t.Context(), "box", "s2"), ledger.ErrSnapshot)
	must(t, l.Remove(t.Context(), "box", "s1"))
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

func TestA_lent_snapshot_stays_until_the_borrower_is_deleted(t *testing.T) {
	l, store := open(t, t.TempDir())
	s := join(t, l, "a")
	c, b := claim(t, s, "box"), claim(t, s, "fork")
	push(t, store, c, "s1", ledger.Needs{Fresh: []string{"u1"}}, false)
	loan, err := b.Borrow(t.Context(), "box", "s1")
	must(t, err)
	_, err = b.Borrow(t.Context(), "box", "s0")
	want(t, "a loan of what is not there", err, ledger.ErrSnapshot)
	push(t, store, b, "f1", ledger.Needs{Loans: []string{loan}}, false)
	must(t, c.Delete(t.Context()))
	must(t, l.Collect(t.Context(), "box", deletes(store)))
	if !there(t, store, "box/u1") {
		t.Fatal("a lent upload was deleted")
	}
	_, err = s.Claim(t.Context(), "box")
	want(t, "a claim of a deleted sandbox", err, ledger.ErrDeleted)
	must(t, b.Delete(t.Context()))
	must(t, l.Collect(t.Context(), "fork", deletes(store)))
	if there(t, store, "box/u1") {
		t.Error("an upload of two deleted sandboxes is there")
	}
	for _, id := range []string{"box", "fork"} {
		if f, err := l.Family(t.Context(), id); err != nil || !f.Deleted || len(f.Snapshots)+len(f.Loans) > 0 {
			t.Errorf("%s is no tombstone: %+v, %v", id, f, err)
		}
	}
}
