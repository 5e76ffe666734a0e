package state

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// ImageUsers returns the VMs, running or not, and the snapshots usable for a VM, that need an image, given by its
// full id. It fails when one of them cannot be read, since that one may need the image too.
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
	have := manifests{}
	_, unread, err := s.readManifests(context.Background(), have)
	if err != nil {
		return nil, fmt.Errorf("asking who uses image %.12s: %w", id, err)
	}
	for snap, err := range unread {
		return nil, fmt.Errorf("asking who uses image %.12s: snapshot %s: %w", id, snap, err)
	}
	for _, snap := range slices.Sorted(maps.Keys(have)) {
		labels := have[snap].Labels
		if kind := labels[labelKind]; (kind == KindSleep || kind == KindFork) && !needed[snap] && !s.kept(snap) {
			continue // no VM needs it: a sweep deletes it
		}
		var r Record
		if err := json.Unmarshal([]byte(labels[LabelRecord]), &r); err != nil {
			return nil, fmt.Errorf("asking who uses image %.12s: snapshot %s: its record: %w", id, snap, err)
		}
		if r.Boot.ImageID == id {
			users = append(users, "snapshot "+snap)
		}
	}
	return users, nil
}
