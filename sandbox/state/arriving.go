package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// Snapshots whose memory is still on its way are in a directory of their own, so nothing that looks for a snapshot
// finds one of them. Only the node of a host that shares sandboxes makes and removes them: see package cluster.

// ArrivingDir returns the directory of a snapshot whose memory is on its way; of all of them for an empty id.
func (s *Store) ArrivingDir(id string) string { return filepath.Join(s.dir, "arriving", id) }

// ReceiveLater is ReceiveSnapshot without the memory: see snapshot.ReceiveLater. Disk and image are whole when it
// returns. Arrived must follow.
func (s *Store) ReceiveLater(ctx context.Context, src snapshot.Source, o ImportOptions) (res ImportResult, err error) {
	parent := s.ArrivingDir("")
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return res, err
	}
	if err := osfile.SyncDir(s.dir); err != nil {
		return res, err
	}
	return s.takeIn(ctx, o, func(_ string, im *importing) (*snapshot.Imported, error) {
		return snapshot.ReceiveLater(ctx, src, parent, im)
	})
}

// Keep keeps a snapshot until Unkeep, although the VM that sleeps in it is removed. was reports that it is kept anyway.
func (s *Store) Keep(ctx context.Context, id string) (was bool, err error) {
	unlock, err := s.Share(ctx)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	m, err := s.Manifest(id)
	if err != nil {
		return false, err
	}
	was = s.kept(id)
	if err = s.lendOwner(m); err == nil && !was {
		err = s.keep(id)
	}
	return was, err
}

// Unkeep lets sweeps delete a snapshot that was received, now that a record names it, once none does.
func (s *Store) Unkeep(ctx context.Context, id string) error {
	unlock, err := s.Share(ctx)
	if err != nil {
		return err
	}
	return errors.Join(s.unkeep(id), unlock())
}

// Arrived makes a snapshot of one whose memory is all there.
func (s *Store) Arrived(ctx context.Context, id string) error {
	// No sweep sees it in neither place.
	unlock, err := s.Share(ctx)
	if err != nil {
		return err
	}
	return errors.Join(snapshot.Arrived(s.ArrivingDir(id), s.SnapshotDir(id)), unlock())
}

// Arriving returns the ids of the snapshots whose memory is on its way.
func (s *Store) Arriving() (ids []string, err error) {
	entries, err := os.ReadDir(s.ArrivingDir(""))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if IDPattern.MatchString(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, err
}

// IsArriving reports whether the memory of a snapshot is on its way.
func (s *Store) IsArriving(id string) bool {
	_, err := os.Lstat(filepath.Join(s.ArrivingDir(id), snapshot.ManifestName))
	return id != "" && err == nil
}

// DropArriving removes a snapshot whose memory does not come any more. A VM that runs on it gets no more of it.
func (s *Store) DropArriving(id string) error { return snapshot.Remove(s.ArrivingDir(id)) }

// CleanArriving removes what a killed ReceiveLater or DropArriving has left.
func (s *Store) CleanArriving() error {
	_, err := snapshot.Clean(s.ArrivingDir(""))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// ComingManifest returns the manifest of a snapshot, also of one whose memory is on its way.
func (s *Store) ComingManifest(id string) (*snapshot.Manifest, error) {
	for range 2 { // it may arrive in between
		if m, err := snapshot.ReadManifest(s.ArrivingDir(id)); err == nil {
			return m, nil
		}
		if m, err := s.Manifest(id); !errors.Is(err, snapshot.ErrNotFound) && !errors.Is(err, spec.ErrArriving) {
			return m, err
		}
	}
	return s.Manifest(id)
}

// arrivingError is why a snapshot whose memory is on its way cannot be used.
func arrivingError(id string) error {
	return fmt.Errorf("snapshot %s: %w", id, spec.ErrArriving)
}

// SystemDisks returns the disks with agents that this store has.
func (s *Store) SystemDisks() []string {
	paths, _ := filepath.Glob(filepath.Join(s.systemDir(), "*.erofs")) // without special characters in the pattern's end
	return paths
}

// HotPages returns the pages of a snapshot's memory that its guest needs to be ready, and further ones that it needs
// soon.
func HotPages(snap *snapshot.Snapshot) (hot, soon []uint64, err error) {
	return instance.HotPages(snap.Payloads())
}

// markArriving marks the layers of snapshots whose memory is on its way.
func (s *Store) markArriving(m *mark) error {
	ids, err := s.Arriving()
	if err != nil {
		return fmt.Errorf("listing snapshots on their way: %w", err)
	}
	for _, id := range ids {
		man, err := snapshot.ReadManifest(s.ArrivingDir(id))
		switch {
		case errors.Is(err, snapshot.ErrNotFound): // it has arrived, or was dropped
		case err != nil:
			m.problems = append(m.problems, fmt.Errorf("snapshot %s, on its way: %w: what it may need is kept", id, err))
			m.guess([]string{filepath.Join(s.ArrivingDir(id), snapshot.ManifestName)})
		default:
			for _, d := range man.Disks {
				m.layers.add(d.Layers, "arriving snapshot "+id)
			}
		}
	}
	return nil
}
