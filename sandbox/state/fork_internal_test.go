package state

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// Only the disk decides, at the moment of the call, whether a child has a snapshot.
func TestA_forks_record_claims_a_snapshot_that_is_there_only(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	r := &Record{
		Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: "child"}, Phase: Stopped, Parent: id,
		Fork: &Origin{Parent: "p", ParentID: spec.NewID(), Generation: 1},
	}
	l, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	claims := func(want string) {
		t.Helper()
		if got, err := s.Get("child"); err != nil || got.Snapshot != want {
			t.Errorf("it claims %q (%v), want %q", got.Snapshot, err, want)
		}
	}
	claims("")
	if err := os.Mkdir(s.SnapshotDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	claims("")
	if err := os.WriteFile(filepath.Join(s.SnapshotDir(id), snapshot.ManifestName), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	claims(id)
	r.Snapshot = spec.NewID() // it slept since
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	claims(r.Snapshot)
}
