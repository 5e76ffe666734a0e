package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/snapshot"
)

// SnapshotInfo describes a snapshot in the store.
type SnapshotInfo struct {
	ID      string    `json:"id"`
	VM      string    `json:"vm"`
	Kind    string    `json:"kind"` // "sleep" or "named"
	Note    string    `json:"note,omitempty"`
	Created time.Time `json:"created"`
	RAM     uint64    `json:"ram_bytes"`
	Stored  int64     `json:"stored_bytes"`
	// Problem is why it cannot be used, empty if nothing is known.
	Problem string `json:"problem,omitempty"`
}

// ErrSnapshotInUse says that a VM may still need the snapshot.
var ErrSnapshotInUse = errors.New("the snapshot is in use")

// Snapshots lists the snapshots of the store, also those that cannot be opened.
func (s *Store) Snapshots() ([]SnapshotInfo, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return nil, fmt.Errorf("listing snapshots: %w", err)
	}
	var out []SnapshotInfo
	for _, e := range entries {
		if snapshot.IsTemp(e.Name()) {
			continue
		}
		m, err := s.manifest(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			out = append(out, SnapshotInfo{ID: e.Name(), Problem: err.Error()})
			continue
		}
		out = append(out, SnapshotInfo{
			ID: e.Name(), VM: m.Sandbox, Kind: m.Labels[labelKind], Note: m.Labels[labelNote],
			Created: time.Unix(0, m.CreatedUnixNano).UTC(), RAM: m.RAM(), Stored: diskUsage(s.snapshotDir(e.Name())),
		})
	}
	return out, nil
}

// FindSnapshot completes the first digits of a snapshot's id.
func (s *Store) FindSnapshot(prefix string) (string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return "", fmt.Errorf("looking for snapshot %s: %w", prefix, err)
	}
	var found []string
	for _, e := range entries {
		if !snapshot.IsTemp(e.Name()) && prefix != "" && strings.HasPrefix(e.Name(), prefix) {
			found = append(found, e.Name())
		}
	}
	switch len(found) {
	case 0:
		return "", fmt.Errorf("snapshot %q: %w: see `drowse snapshot ls`", prefix, snapshot.ErrNotFound)
	case 1:
		return found[0], nil
	}
	return "", fmt.Errorf("snapshot %q: %w: %d begin so: give more digits", prefix, snapshot.ErrNotFound, len(found))
}

// SnapshotDir is where a snapshot lies.
func (s *Store) SnapshotDir(id string) string { return s.snapshotDir(id) }

// SnapshotDisk is the disk of a snapshot, sealed, with absolute paths.
func (s *Store) SnapshotDisk(id string) (disk.Stack, error) {
	m, err := s.manifest(id)
	if err != nil {
		return disk.Stack{}, err
	}
	return s.absolute(snapshotDisk(m))
}

// VerifySnapshot reads all of a snapshot and checks it.
func (s *Store) VerifySnapshot(ctx context.Context, prefix string) error {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return err
	}
	snap, err := snapshot.Open(s.snapshotDir(id))
	if err != nil {
		return err
	}
	return errors.Join(snap.Verify(ctx), snap.Close())
}

// RemoveSnapshot deletes a snapshot. It fails with ErrSnapshotInUse when a VM sleeps
// in it or was made from it and has not slept since.
func (s *Store) RemoveSnapshot(ctx context.Context, prefix string) error {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return err
	}
	records, err := s.List()
	if err != nil {
		return err
	}
	for _, r := range records {
		if r.Snapshot == id {
			return fmt.Errorf("%w: snapshot %s is what VM %s comes back from", ErrSnapshotInUse, id, r.Spec.Name)
		}
	}
	if err := os.RemoveAll(s.snapshotDir(id)); err != nil {
		return fmt.Errorf("removing snapshot %s: %w", id, err)
	}
	_, err = s.Sweep(ctx)
	return err
}

// Inspect returns everything that is known of a VM, as one JSON object.
func (s *Store) Inspect(ctx context.Context, name string) (json.RawMessage, error) {
	r, err := s.Get(name)
	if err != nil {
		return nil, err
	}
	out := struct {
		*Record
		Live   *Info            `json:"live,omitempty"`
		Usage  int64            `json:"disk_bytes"`
		Layers map[string]int64 `json:"layer_bytes"`
	}{Record: r, Layers: map[string]int64{}}
	if r.Phase == Running {
		if info, err := s.Info(ctx, name); err == nil {
			out.Live = &info
		}
	}
	for _, l := range r.Disk.Layers {
		out.Layers[l] = diskUsage(filepath.Join(s.layerDir(), l))
		out.Usage += out.Layers[l]
	}
	return json.MarshalIndent(out, "", "  ")
}
