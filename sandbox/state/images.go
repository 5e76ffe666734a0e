package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/snapshot"
)

// ImageUsers names the VMs and snapshots that need an image, given by its full id:
// VMs that run as well as those that do not, and snapshots that a VM can be made
// from. It fails when one of them cannot be read, since it may need the image too.
func (s *Store) ImageUsers(id string) ([]string, error) {
	records, err := s.List()
	if err != nil {
		return nil, fmt.Errorf("asking who uses image %.12s: %w", id, err)
	}
	var users []string
	needed := map[string]bool{}
	for _, r := range records {
		if r.Boot.ImageID == id {
			users = append(users, "VM "+r.Spec.Name)
		}
		for _, id := range s.lasts(r).Needs {
			needed[id] = true
		}
	}
	entries, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return nil, fmt.Errorf("asking who uses image %.12s: %w", id, err)
	}
	for _, e := range entries {
		if snapshot.IsTemp(e.Name()) {
			continue
		}
		m, err := snapshot.ReadManifest(s.SnapshotDir(e.Name()))
		if errors.Is(err, snapshot.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("asking who uses image %.12s: snapshot %s: %w", id, e.Name(), err)
		}
		if kind := m.Labels[labelKind]; (kind == KindSleep || kind == KindFork) && !needed[e.Name()] && !s.kept(e.Name()) {
			continue // nothing needs it: a sweep deletes it
		}
		var r Record
		if err := json.Unmarshal([]byte(m.Labels[LabelRecord]), &r); err != nil {
			return nil, fmt.Errorf("asking who uses image %.12s: snapshot %s: its record: %w", id, e.Name(), err)
		}
		if r.Boot.ImageID == id {
			users = append(users, "snapshot "+e.Name())
		}
	}
	return users, nil
}
