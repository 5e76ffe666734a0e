package cluster_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// counted counts what is read of a store.
type counted struct {
	blob.Store
	loads, lists atomic.Int64
	fails        atomic.Bool
}

func (c *counted) Load(ctx context.Context, key string, limit int64) ([]byte, blob.Version, error) {
	if strings.HasPrefix(key, "families/") {
		c.loads.Add(1)
	}
	return c.Store.Load(ctx, key, limit)
}

func (c *counted) List(ctx context.Context, prefix string, each func(blob.Info) error) error {
	if c.fails.Load() {
		return errors.New("the store is gone")
	}
	c.lists.Add(1)
	return c.Store.List(ctx, prefix, each)
}

// rows returns what a list says: name, host and status.
func rows(l records.List) string {
	var out []string
	for _, s := range l.Sandboxes {
		out = append(out, s.Name+" "+s.Host+" "+string(s.Status))
	}
	return strings.Join(out, ", ")
}

func TestList_of_any_host_has_the_sandboxes_of_all(t *testing.T) {
	store := dir(t)
	seen := &counted{Store: store}
	o := cluster.Options{TTL: 3 * time.Second}
	a, b := newDoor(t, "a", seen, cluster.Options{}), newDoor(t, "b", store, o)
	a.own("here", "alice")
	b.own("there", "alice")
	b.own("theirs", "bob")
	b.own("slept", "alice")
	b.sleep("slept")
	b.create("private")
	a.create("alone")
	c, alice := a.as("all", ""), a.as("alice", "alice")
	list := func() records.List {
		t.Helper()
		l, err := c.List(t.Context(), records.Filter{})
		must(t, err)
		return l
	}
	const all = "alone  running, here a running, slept  asleep, theirs b running, there b running"
	if l := list(); rows(l) != all || len(l.Problems) > 0 {
		t.Errorf("%s; %q", rows(l), l.Problems)
	}
	l, err := alice.List(t.Context(), records.Filter{})
	if err != nil || rows(l) != "here a running, slept  asleep, there b running" {
		t.Errorf("its owner's: %s, %v", rows(l), err)
	}
	l, err = c.List(t.Context(), records.Filter{Owner: "alice", Statuses: []records.Status{records.Running}, Limit: 1})
	if err != nil || rows(l) != "here a running" || l.Next != "here" {
		t.Errorf("a page: %s, next %q, %v", rows(l), l.Next, err)
	}
	if row, err := alice.Get(t.Context(), "slept"); err != nil || row.Status != records.Asleep || row.Owner != "alice" {
		t.Errorf("one that sleeps in the store: %+v, %v", row, err)
	}
	if _, err := a.as("bob", "bob").Get(t.Context(), "slept"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error("one of another owner that sleeps in the store:", err)
	}
	// Nobody is asked twice in a moment.
	loads, lists := seen.loads.Load(), seen.lists.Load()
	for range 20 {
		list()
	}
	if seen.lists.Load() > lists+2 || seen.loads.Load() > loads+20 {
		t.Errorf("20 lists list the store %d times, and read %d records", seen.lists.Load()-lists, seen.loads.Load()-loads)
	}
	// What happens elsewhere is seen.
	b.sleep("there")
	_, err = b.State.SetMetadata(t.Context(), "theirs", func(m *spec.Metadata, _ error) error { m.Purpose = "new"; return nil })
	must(t, err)
	eventually(t, "the list is new", func() bool {
		l := list()
		return strings.HasSuffix(rows(l), "there  asleep") && l.Sandboxes[3].Purpose == "new"
	})
	// A host that does not answer keeps its rows, which say so.
	b.endDoor()
	eventually(t, "the list says so", func() bool {
		l := list()
		return len(l.Problems) == 1 && strings.Contains(l.Problems[0], "host b does not answer") && strings.Contains(l.Sandboxes[3].Problem, "b does not answer") && l.Sandboxes[3].Purpose == "new"
	})
	bobs, err := a.as("bob2", "bob").List(t.Context(), records.Filter{})
	if err != nil || rows(bobs) != "theirs b running" || len(bobs.Problems) != 1 {
		t.Errorf("his owner's: %s, %q, %v", rows(bobs), bobs.Problems, err)
	}
	// When its lease has ended, they sleep in the store.
	b.stop()
	b.stop = nil
	eventually(t, "it has none", func() bool { return strings.Contains(rows(list()), "theirs  asleep") })
	// So it stays while the store is away.
	seen.fails.Store(true)
	eventually(t, "the list says how old it is", func() bool {
		l := list()
		return strings.Contains(rows(l), "theirs  asleep") && len(l.Problems) == 1 && strings.Contains(l.Problems[0], "ago")
	})
}

// A host has an old copy of what runs elsewhere, and shows what is there.
func TestList_shows_a_sandbox_as_it_is_where_it_runs(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	a.own("box", "")
	a.sleep("box")
	b.counts("box", "1")
	c := a.as("all", "")
	l, err := c.List(t.Context(), records.Filter{})
	if err != nil || rows(l) != "box b running" {
		t.Errorf("%s, %v", rows(l), err)
	}
	b.sleep("box")
	eventually(t, "it sleeps", func() bool {
		l, err := c.List(t.Context(), records.Filter{})
		return err == nil && rows(l) == "box  asleep"
	})
	must(t, b.Sandbox("box").Delete(t.Context(), sandbox.DeleteOptions{}))
	eventually(t, "it is gone", func() bool {
		l, err := b.as("all", "").List(t.Context(), records.Filter{})
		return err == nil && rows(l) == ""
	})
}
