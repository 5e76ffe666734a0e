package sandboxtest_test

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func limited(t *testing.T, h *sandbox.Host, o limits.Owner) {
	t.Helper()
	l := limits.Default
	l.MemoryWaitSeconds, l.DefaultOwner = 0, o
	if err := l.Write(h.State.Dir()); err != nil {
		t.Fatal(err)
	}
}

func owned(t *testing.T, h *sandbox.Host, name, owner string) (*sandbox.Sandbox, error) {
	t.Helper()
	return h.Create(t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: owner}})
}

func mustOwn(t *testing.T, h *sandbox.Host, name, owner string) *sandbox.Sandbox {
	t.Helper()
	b, err := owned(t, h, name, owner)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// overQuota checks an error of a caller's own process or of a VM's.
func overQuota(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, spec.ErrQuota) || control.ErrorCode(err) != "owner-limit" {
		t.Errorf("%s: %v, want ErrQuota", what, err)
	}
}

func use(t *testing.T, h *sandbox.Host, owner string, sandboxes, awake int) {
	t.Helper()
	if u, err := h.State.OwnerUse(t.Context(), owner); err != nil || u.Sandboxes != sandboxes || u.Awake != awake {
		t.Errorf("%q uses %+v (%v), want %d sandboxes and %d awake", owner, u, err, sandboxes, awake)
	}
}

func TestOwners_have_as_many_sandboxes_as_they_may(t *testing.T) {
	const most, tries = 10, 50
	h := (&sandboxtest.VMs{}).Host(t)
	limited(t, h, limits.Owner{Sandboxes: most})
	var made atomic.Int64
	var all sync.WaitGroup
	for i := range tries {
		all.Go(func() {
			if _, err := owned(t, h, fmt.Sprintf("a%d", i), "a"); err == nil {
				made.Add(1)
			} else {
				overQuota(t, "a creation", err)
			}
		})
	}
	all.Wait()
	if made.Load() != most {
		t.Errorf("%d of %d were made, want %d", made.Load(), tries, most)
	}
	use(t, h, "a", most, most)
	// Forks and clones are sandboxes.
	b := mustOwn(t, h, "b", "b")
	if _, err := b.Fork(t.Context(), sandbox.ForkOptions{Count: most - 1, Name: "f"}); err != nil {
		t.Fatal(err)
	}
	_, err := b.Fork(t.Context(), sandbox.ForkOptions{Name: "g"})
	overQuota(t, "a fork", err)
	res, err := b.Sleep(t.Context(), sandbox.SleepOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Clone(t.Context(), res.Snapshot, sandbox.CloneOptions{Metadata: &spec.Metadata{Owner: "b"}})
	overQuota(t, "a clone", err)
	use(t, h, "b", most, most-1)
	if err := h.Sandbox("f-1").Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Clone(t.Context(), res.Snapshot, sandbox.CloneOptions{Metadata: &spec.Metadata{Owner: "b"}}); err != nil {
		t.Error(err)
	}
}

func TestOwners_have_as_many_awake_as_they_may(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	a, b := mustOwn(t, h, "a", "x"), mustOwn(t, h, "b", "x")
	mustOwn(t, h, "c", "x")
	limited(t, h, limits.Owner{Awake: 1}) // less than are awake
	use(t, h, "x", 3, 3)
	_, err := owned(t, h, "d", "x")
	overQuota(t, "a boot", err)
	if _, err := h.State.Load("d"); !errors.Is(err, spec.ErrNotFound) {
		t.Errorf("one that was refused: %v", err)
	}
	mustOwn(t, h, "y", "y")
	for _, one := range []*sandbox.Sandbox{a, b} {
		if _, err := one.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	_, err = a.Wake(t.Context())
	overQuota(t, "a wake", err)
	want(t, h, "a", state.Asleep)
	v.Kill("c")
	use(t, h, "x", 3, 0)
	if _, err := a.Wake(t.Context()); err != nil {
		t.Fatalf("c was killed: %v", err)
	}
	_, err = b.Wake(t.Context())
	overQuota(t, "another wake", err)
	// A VM that is awake counts for the owner with whom it started.
	if _, err := h.State.SetMetadata(t.Context(), "b", func(m *spec.Metadata, _ error) error { m.Owner = "z"; return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Wake(t.Context()); err != nil {
		t.Errorf("its new owner has none awake: %v", err)
	}
	use(t, h, "z", 1, 1)
	limited(t, h, limits.Owner{AwakeMiB: 2 * spec.DefaultMemoryMiB})
	mustOwn(t, h, "d", "x")
	_, err = owned(t, h, "e", "x")
	overQuota(t, "memory", err)
}

func TestOwners_with_a_full_disk_can_sleep_and_no_more(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	a := mustOwn(t, h, "a", "x")
	r := want(t, h, "a", state.Running)
	// What the sandbox has written, though to no disk of a file system.
	if err := osfile.WriteFile(filepath.Join(h.State.LayerDir(), r.ID+"-900"), bytes.Repeat([]byte{1}, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	limited(t, h, limits.Owner{DiskMiB: 1})
	_, err := a.Snapshot(t.Context(), sandbox.SnapshotOptions{})
	overQuota(t, "a snapshot", err)
	_, err = a.Fork(t.Context(), sandbox.ForkOptions{})
	overQuota(t, "a fork", err)
	_, err = owned(t, h, "b", "x")
	overQuota(t, "a creation", err)
	if _, err := a.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Errorf("a sleep: %v", err)
	}
	_, err = a.Wake(t.Context())
	overQuota(t, "a wake", err)
	mustOwn(t, h, "c", "y")
	limited(t, h, limits.Owner{})
	if _, err := a.Wake(t.Context()); err != nil {
		t.Error(err)
	}
}
