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
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lease"
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
	eventually(t, "there are the heads that it needs", func() bool { return onlyNeeded(t, store, "box") })
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

func TestSandbox_that_cannot_sleep_is_stopped_when_its_hosts_lease_ends(t *testing.T) {
	store := dir(t)
	o := cluster.Options{TTL: 4 * time.Second}
	a, b := newHost(t, "a", store, o), newHost(t, "b", store, o)
	a.create("box")
	a.sleep("box")
	a.counts("box", "1")
	a.noSleep.Store(true)
	a.stop()
	l, err := lease.In(a.State.Dir()).Lease()
	must(t, err)
	eventually(t, "it is stopped", func() bool { return a.phase("box") == state.Crashed })
	if lease.Now() < l.Until {
		t.Error("it was stopped before its lease ended")
	}
	eventually(t, "b wakes it", func() bool { n, err := b.count("box"); return err == nil && n == "1" })
}

func TestSandbox_of_which_a_caller_may_know_nothing_stays_where_it_is(t *testing.T) {
	store := dir(t)
	a, b := newHost(t, "a", store, cluster.Options{}), newHost(t, "b", store, cluster.Options{})
	a.create("box")
	a.sleep("box")
	no := errors.New("not his")
	want(t, "the claim", b.node.Claim(t.Context(), "box", func(spec.Metadata) error { return no }), no)
	if names, err := lease.In(b.State.Dir()).Names(); err != nil || len(names) > 0 || b.phase("box") != "" {
		t.Errorf("b has %q, %v", names, err)
	}
	a.counts("box", "1")
}

// The host that has changed it has not woken it: what it sleeps in is here as well.
func TestSandbox_that_was_changed_on_another_host_wakes_from_the_snapshot_that_is_here(t *testing.T) {
	store := dir(t)
	a, b := newHost(t, "a", store, cluster.Options{}), newHost(t, "b", store, cluster.Options{})
	a.create("box")
	a.counts("box", "1")
	a.sleep("box")
	must(t, b.node.Claim(t.Context(), "box", nil))
	_, err := b.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Purpose = "changed"; return nil })
	must(t, err)
	must(t, b.node.Publish(t.Context(), "box"))
	a.counts("box", "2")
	if m, err := a.State.Metadata("box"); err != nil || m.Purpose != "changed" {
		t.Errorf("%+v, %v", m, err)
	}
}

// What a host knows of a sandbox that has gone on elsewhere must not end it.
func TestSandbox_that_lasts_longer_by_another_host_is_not_removed_as_expired(t *testing.T) {
	store := dir(t)
	a, b := newHost(t, "a", store, cluster.Options{}), newHost(t, "b", store, cluster.Options{})
	lasts := func(h *host, d time.Duration) {
		t.Helper()
		_, err := h.State.SetMetadata(t.Context(), "box", func(m *spec.Metadata, _ error) error { m.Expires = time.Now().Add(d); return nil })
		must(t, err)
	}
	a.create("box")
	a.sleep("box")
	lasts(a, -time.Second)
	must(t, a.node.Publish(t.Context(), "box"))
	must(t, b.node.Claim(t.Context(), "box", nil))
	lasts(b, time.Hour)
	must(t, b.node.Publish(t.Context(), "box"))
	_, err := fleet.New(a.Host, fleet.Options{}).Prune(t.Context(), false)
	must(t, err)
	b.counts("box", "1")
}
