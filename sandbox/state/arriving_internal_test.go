package state

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// Layers may arrive, and be moved, between the look for them and their opening.
func TestLayers_are_found_on_their_way_and_as_they_arrive(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	id := spec.NewID()
	dir := s.ArrivingDir(id)
	st, err := s.Absolute(disk.Stack{Layers: []string{"here", "comes"}})
	write := func(path string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte("x"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write(st.Layers[0])
	write(filepath.Join(dir, snapshot.ManifestName))
	write(filepath.Join(dir, "comes"))
	if coming, cerr := s.LayersArrive(id, st); err != nil || cerr != nil || !coming {
		t.Errorf("layers are not on their way: %v, %v", err, cerr)
	}
	var seen [][]string
	err = s.WithLayers(id, st, func(at disk.Stack) error {
		if seen = append(seen, at.Layers); len(seen) == 1 {
			if err := os.Rename(filepath.Join(dir, "comes"), st.Layers[1]); err != nil {
				t.Fatal(err)
			}
			return &fs.PathError{Op: "open", Path: at.Top(), Err: fs.ErrNotExist}
		}
		return nil
	})
	if err != nil || len(seen) != 2 || !slices.Equal(seen[0], []string{st.Layers[0], filepath.Join(dir, "comes")}) || !slices.Equal(seen[1], st.Layers) {
		t.Errorf("it looked in %q, %v", seen, err)
	}
	if coming, err := s.LayersArrive(id, st); err != nil || coming {
		t.Errorf("layers that have arrived are on their way, %v", err)
	}
	tries := 0
	gone := s.WithLayers(id, st, func(disk.Stack) error { tries++; return fs.ErrNotExist })
	if !errors.Is(gone, fs.ErrNotExist) || tries != 2 {
		t.Errorf("what is nowhere: %v after %d tries", gone, tries)
	}
}
