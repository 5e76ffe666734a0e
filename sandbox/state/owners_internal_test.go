package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

func limited(t *testing.T, s *Store, others limits.Owner, named map[string]limits.Owner) {
	t.Helper()
	l := limits.Default
	l.DefaultOwner, l.Owners = others, named
	if err := l.Write(s.dir); err != nil {
		t.Fatal(err)
	}
}

// makeOwned makes a sleeping VM of an owner.
func makeOwned(s *Store, name, owner string) (*Record, error) {
	r := &Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: name}, Phase: Asleep}
	if err := r.SetMetadata(&spec.Metadata{Owner: owner}); err != nil {
		return nil, err
	}
	lock, err := s.Create(r)
	if err != nil {
		return nil, err
	}
	lock.Release()
	return r, nil
}

func mustOwn(t *testing.T, s *Store, name, owner string) *Record {
	t.Helper()
	r, err := makeOwned(s, name, owner)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func setOwner(s *Store, name, owner string) error {
	_, err := s.SetMetadata(context.Background(), name, func(m *spec.Metadata, _ error) error { m.Owner = owner; return nil })
	return err
}

func openTest(t *testing.T) *Store {
	t.Helper()
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestCreate_many_at_once_make_as_many_as_the_owner_may_have(t *testing.T) {
	const most, tries = 10, 50
	s := openTest(t)
	limited(t, s, limits.Owner{Sandboxes: most}, nil)
	var made, refused atomic.Int64
	var all sync.WaitGroup
	for i := range tries {
		all.Go(func() {
			switch _, err := makeOwned(s, fmt.Sprintf("v%d", i), "a"); {
			case err == nil:
				made.Add(1)
			case errors.Is(err, spec.ErrQuota):
				refused.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	all.Wait()
	if made.Load() != most || refused.Load() != tries-most {
		t.Errorf("%d made and %d refused of %d with a limit of %d", made.Load(), refused.Load(), tries, most)
	}
	entries, err := os.ReadDir(filepath.Join(s.dir, "vms"))
	if err != nil || len(entries) != most {
		t.Errorf("%d directories (%v): those refused must leave none", len(entries), err)
	}
	if n, err := s.ownerCount("a"); err != nil || n != most {
		t.Errorf("%d are counted (%v)", n, err)
	}
	mustOwn(t, s, "other", "b")
}

func TestCreate_counts_those_without_an_owner_together_and_a_removed_one_no_more(t *testing.T) {
	s := openTest(t)
	limited(t, s, limits.Owner{}, map[string]limits.Owner{"": {Sandboxes: 2}})
	mustOwn(t, s, "a", "")
	r := &Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "b"}, Phase: Asleep} // no metadata at all
	lock, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	lock.Release()
	if _, err := makeOwned(s, "c", ""); !errors.Is(err, spec.ErrQuota) {
		t.Errorf("a third: %v", err)
	}
	if _, err := makeOwned(s, "b", ""); !errors.Is(err, spec.ErrExists) {
		t.Errorf("a name that is taken: %v", err)
	}
	if err := s.Rename(t.Context(), "b", "d"); err != nil {
		t.Errorf("a rename is no creation: %v", err)
	}
	if _, err := s.Remove(t.Context(), "a", false); err != nil {
		t.Fatal(err)
	}
	mustOwn(t, s, "c", "")
}

func TestSetMetadata_another_owner_counts_anew(t *testing.T) {
	s := openTest(t)
	mustOwn(t, s, "a", "x")
	mustOwn(t, s, "b", "x")
	mustOwn(t, s, "c", "y")
	limited(t, s, limits.Owner{Sandboxes: 1}, nil) // lower than the use of x
	if err := setOwner(s, "a", "y"); !errors.Is(err, spec.ErrQuota) || s.Owner("a") != "x" {
		t.Errorf("y has one already: %v, %q", err, s.Owner("a"))
	}
	if _, err := s.SetMetadata(t.Context(), "a", func(m *spec.Metadata, _ error) error { m.Purpose = "p"; return nil }); err != nil {
		t.Errorf("a change of something else: %v", err)
	}
	if err := setOwner(s, "a", "z"); err != nil {
		t.Errorf("z has none: %v", err)
	}
	if _, err := makeOwned(s, "d", "x"); !errors.Is(err, spec.ErrQuota) {
		t.Errorf("x has one left: %v", err)
	}
	if err := setOwner(s, "b", "w"); err != nil {
		t.Error(err)
	}
	mustOwn(t, s, "d", "x")
	var got atomic.Int64
	var all sync.WaitGroup
	for _, name := range []string{"a", "b", "c", "d"} {
		all.Go(func() {
			if setOwner(s, name, "one") == nil {
				got.Add(1)
			}
		})
	}
	all.Wait()
	if got.Load() != 1 {
		t.Errorf("%d were given to an owner who may have one", got.Load())
	}
}

// writeMiB makes a file of that many MiB.
func writeMiB(t *testing.T, path string, mib int) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(bytes.Repeat([]byte{1}, mib<<20)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

func (s *Store) useMiB(t *testing.T, owner string) int {
	t.Helper()
	u, err := s.OwnerUse(t.Context(), owner)
	if err != nil {
		t.Fatal(err)
	}
	return u.DiskMiB
}

func TestAdmitDisk_counts_layers_and_snapshots_for_who_wrote_or_needs_them(t *testing.T) {
	s := openTest(t)
	a, b, c := mustOwn(t, s, "a", "x"), mustOwn(t, s, "b", "y"), mustOwn(t, s, "c", "x")
	layer := a.NewLayer()
	writeMiB(t, filepath.Join(s.LayerDir(), layer), 3)
	a.Disk.Layers, b.Disk.Layers = []string{layer}, []string{layer} // b was made from it
	for _, r := range []*Record{a, b} {
		if err := s.Save(r); err != nil {
			t.Fatal(err)
		}
	}
	labels, err := s.Labels(c, KindNamed)
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	if _, err := snapshot.Create(t.Context(), s.SnapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: "c", VCPUs: 1, Labels: labels, Memory: NoMemory{}, Disks: []snapshot.Disk{{Name: instance.DeviceDisk, Size: 64 << 20}},
	}); err != nil {
		t.Fatal(err)
	}
	writeMiB(t, filepath.Join(s.SnapshotDir(id), "extra"), 2)
	if x, y := s.useMiB(t, "x"), s.useMiB(t, "y"); x != 5 || y != 0 {
		t.Errorf("x has %d MiB and y %d, want 5 and 0", x, y)
	}
	limited(t, s, limits.Owner{DiskMiB: 5}, nil)
	for owner, want := range map[string]error{"x": spec.ErrQuota, "y": nil, "z": nil} {
		if err := s.AdmitDisk(t.Context(), owner); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", owner, err, want)
		}
	}
	limited(t, s, limits.Owner{DiskMiB: 6}, nil)
	if err := s.AdmitDisk(t.Context(), "x"); err != nil {
		t.Error(err)
	}
	// What a removed one wrote belongs to who needs it, or remains its owner's.
	for _, name := range []string{"a", "c"} {
		if _, err := s.Remove(t.Context(), name, false); err != nil {
			t.Fatal(err)
		}
	}
	if x, y := s.useMiB(t, "x"), s.useMiB(t, "y"); x != 2 || y != 3 {
		t.Errorf("after the removals x has %d MiB and y %d, want 2 and 3", x, y)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.OwnerUse(ended, "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("of a context that has ended: %v", err)
	}
}
