package cluster_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestSandbox_that_sleeps_durably_is_woken_by_any_host(t *testing.T) {
	store := dir(t)
	a, b := newHost(t, "a", store, cluster.Options{}), newHost(t, "b", store, cluster.Options{})
	b.loseImages()
	box := a.create("box")
	_, err := a.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Owner, m.Tags = "alice", []string{"one"}; return nil })
	must(t, err)
	a.counts("box", "1")
	want(t, "before it is shared", b.node.Claim(t.Context(), "box", nil), sandbox.ErrNotFound)
	a.sleep("box")
	b.counts("box", "2")
	r, err := b.State.Get("box")
	must(t, err)
	m, err := b.State.Metadata("box")
	must(t, err)
	was, err := a.State.Get("box")
	must(t, err)
	if r.ID != was.ID || r.Spec.Policy == nil || m.Owner != "alice" || len(m.Tags) != 1 {
		t.Errorf("it is another one: %+v, %+v", r, m)
	}
	// It runs on b: a says where.
	_, err = a.count("box")
	want(t, "on the other host", err, spec.ErrElsewhere)
	if _, err := box.Wake(t.Context()); !errors.Is(err, spec.ErrElsewhere) {
		t.Error("a wake on the other host:", err)
	}
	b.sleep("box")
	a.counts("box", "3")
	a.sleep("box")
	a.counts("box", "4") // without another one in between
	a.sleep("box")
	b.counts("box", "5")
	b.sleep("box")
	eventually(t, "one head is left", func() bool { return objects(t, store, "heads/") == 1 })
	must(t, a.Sandbox("box").Delete(t.Context(), sandbox.DeleteOptions{}))
	_, err = b.count("box")
	want(t, "what was deleted on another host", err, sandbox.ErrNotFound)
	if b.phase("box") != "" {
		t.Error("b still has it")
	}
	eventually(t, "no head is left", func() bool { return objects(t, store, "heads/")+objects(t, store, "data/heads-") == 0 })
	a.create("box")
	a.counts("box", "1")
	a.sleep("box")
	b.counts("box", "2")
}

func TestSandbox_that_falls_asleep_is_published_by_itself(t *testing.T) {
	store := dir(t)
	a, b := newHost(t, "a", store, cluster.Options{All: true}), newHost(t, "b", store, cluster.Options{})
	a.create("box")
	a.counts("box", "1")
	_, err := a.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
	must(t, err)
	eventually(t, "b can wake it", func() bool { _, err := b.count("box"); return err == nil })
	b.counts("box", "3")
	_, err = b.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
	must(t, err)
	eventually(t, "a can wake it", func() bool { n, err := a.count("box"); return err == nil && n == "4" })
}

func TestHost_that_dies_loses_its_sandboxes_to_others_as_they_last_slept_durably(t *testing.T) {
	store := dir(t)
	o := cluster.Options{TTL: 3 * time.Second}
	a, b := newHost(t, "a", store, o), newHost(t, "b", store, o)
	a.create("box")
	a.counts("box", "1")
	a.sleep("box")
	a.counts("box", "2")
	a.stop()
	a.stop = nil
	_, err := b.count("box")
	want(t, "at once", err, spec.ErrElsewhere)
	// Without its node the VM sleeps before its lease ends.
	eventually(t, "it sleeps", func() bool { return a.phase("box") == state.Asleep })
	eventually(t, "b wakes it", func() bool { n, err := b.count("box"); return err == nil && n == "2" })
	kept, err := a.State.Get("box")
	must(t, err)
	if _, err := a.bare.Sandbox("box").Wake(t.Context()); !errors.Is(err, spec.ErrUnclaimed) {
		t.Error("a wakes it without a node:", err)
	}
	b.sleep("box")
	a.join()
	a.counts("box", "3")
	if snaps, err := a.State.Snapshots(); err != nil || !hasTag(snaps, kept.Snapshot, "set-aside") {
		t.Errorf("what only a had is not kept: %+v, %v", snaps, err)
	}
}

func hasTag(all []spec.SnapshotInfo, id, tag string) bool {
	for _, s := range all {
		if s.ID == id && len(s.Tags) == 1 && s.Tags[0] == tag {
			return true
		}
	}
	return false
}

func TestNode_that_is_replaced_leaves_what_runs_alone(t *testing.T) {
	store := dir(t)
	o := cluster.Options{TTL: 5 * time.Second}
	a, b := newHost(t, "a", store, o), newHost(t, "b", store, o)
	a.create("box")
	a.sleep("box")
	a.counts("box", "1")
	a.stop()
	a.join()
	begun := time.Now()
	for time.Since(begun) < 2*o.TTL {
		if a.phase("box") != state.Running {
			t.Fatal("it is", a.phase("box"))
		}
		_, err := b.count("box")
		want(t, "on the other host", err, spec.ErrElsewhere)
		time.Sleep(o.TTL / 5)
	}
	a.counts("box", "2")
	a.sleep("box")
	b.counts("box", "3")
}

func TestSandbox_that_went_on_nowhere_else_goes_on_where_it_was(t *testing.T) {
	store := dir(t)
	o := cluster.Options{TTL: 3 * time.Second}
	a := newHost(t, "a", store, o)
	a.create("box")
	a.sleep("box")
	a.counts("box", "1")
	a.stop()
	eventually(t, "it sleeps", func() bool { return a.phase("box") == state.Asleep })
	time.Sleep(o.TTL * 12 / 10)
	a.join()
	a.counts("box", "2")
}

func TestSandbox_that_cannot_be_shared_is_refused(t *testing.T) {
	store := dir(t)
	a, b := newHost(t, "a", store, cluster.Options{}), newHost(t, "b", store, cluster.Options{})
	a.create("box")
	want(t, "one that runs", a.node.Publish(t.Context(), "box"), sandbox.ErrRunning)
	a.sleep("box")
	want(t, "a rename", a.State.Rename(t.Context(), "box", "crate"), spec.ErrInvalid)
	b.create("box")
	_, err := b.Sandbox("box").Sleep(t.Context(), sandbox.SleepOptions{})
	must(t, err)
	want(t, "a second one of a name", b.node.Publish(t.Context(), "box"), spec.ErrExists)
	b.counts("box", "1") // it is b's own
	_, err = cluster.Join(t.Context(), a.bare, cluster.Options{Store: store, Name: "c"})
	want(t, "a second node", err, spec.ErrServed)
	a.stop()
	_, err = cluster.Join(t.Context(), a.bare, cluster.Options{Store: dir(t), Name: "a"})
	want(t, "another cluster", err, spec.ErrInvalid)
}

// A copy of a state directory must not run what the original runs.
func TestCopy_of_a_hosts_directory_does_not_take_its_session(t *testing.T) {
	store := dir(t)
	a := newHost(t, "a", store, cluster.Options{TTL: 5 * time.Second})
	a.create("box")
	a.sleep("box")
	a.counts("box", "1")
	other := newHost(t, "b", store, cluster.Options{})
	other.stop()
	for _, file := range []string{"cluster/node.json", "cluster/claims/box.json"} {
		text, err := os.ReadFile(filepath.Join(a.State.Dir(), file))
		must(t, err)
		must(t, os.WriteFile(filepath.Join(other.State.Dir(), file), text, 0o600))
	}
	_, err := cluster.Join(t.Context(), other.bare, cluster.Options{Store: store, Name: "a", TTL: 5 * time.Second})
	want(t, "the copy", err, ledger.ErrHostInUse)
	a.counts("box", "2")
}

// A policy that was changed while a sandbox slept is in force wherever it wakes once that is published.
func TestChange_of_a_sleeping_sandbox_is_published(t *testing.T) {
	store := dir(t)
	a, b := newHost(t, "a", store, cluster.Options{}), newHost(t, "b", store, cluster.Options{})
	a.create("box")
	a.sleep("box")
	_, err := a.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Purpose = "changed"; return nil })
	must(t, err)
	must(t, a.node.Publish(t.Context(), "box"))
	b.counts("box", "1")
	if m, err := b.State.Metadata("box"); err != nil || m.Purpose != "changed" {
		t.Errorf("%+v, %v", m, err)
	}
}
