package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/snapshot"
)

// Freed is what a sweep has deleted.
type Freed struct {
	Snapshots int   `json:"snapshots"`
	Layers    int   `json:"layers"`
	Bytes     int64 `json:"bytes"`
}

// templateOwner begins the names of the empty file systems, which are small and
// needed again.
const templateOwner = "ext4"

// Labels of a snapshot.
const (
	labelKind   = "drowse.kind"   // kindSleep or kindNamed
	labelRecord = "drowse.record" // the VM's record at that time
	labelOwner  = "drowse.owner"  // the id of that VM
	labelNote   = "drowse.note"   // the user's words

	kindSleep = "sleep"
	kindNamed = "named"
)

// Sweep deletes the sleep snapshots that no VM needs any more, the disk layers that
// neither a VM nor a snapshot needs, and what interrupted commands have left. It
// never deletes a snapshot that was asked for by name. When a record or a snapshot
// cannot be read, nothing is deleted that it might need.
func (s *Store) Sweep(ctx context.Context) (Freed, error) {
	var freed Freed
	unlock, err := s.lockImports(unix.LOCK_EX)
	if errors.Is(err, ErrRunning) {
		return freed, nil // another time
	}
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	defer func() { _ = unlock() }()
	// The files first, then who needs them: what is made in between is not in the
	// list, and so not deleted.
	files, err := os.ReadDir(s.layerDir())
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	snaps, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	records, err := s.List()
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	layers, snapshots, live := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, r := range records {
		// The process of a VM makes and deletes its files itself, also while its
		// record does not say yet that it runs. Without a process the record
		// stands still as long as the lock is held, so it is read then.
		l, err := s.lock(r.Spec.Name)
		switch {
		case err == nil:
			r, err = s.load(r.Spec.Name)
			l.release()
			if err != nil {
				return freed, fmt.Errorf("tidying up: %w", err)
			}
		case errors.Is(err, ErrRunning):
			live[r.ID] = true
		case !errors.Is(err, ErrNotFound):
			return freed, fmt.Errorf("tidying up: %w", err)
		}
		for _, l := range r.Disk.Layers {
			layers[filepath.Base(l)] = true
		}
		if r.Snapshot != "" {
			snapshots[r.Snapshot] = true
		}
	}
	if err := s.sweepSnapshots(ctx, snaps, snapshots, live, layers, &freed); err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	var errs []error
	for _, e := range files {
		owner, _, _ := strings.Cut(e.Name(), "-")
		if layers[e.Name()] || live[owner] || owner == templateOwner {
			continue
		}
		n, err := remove(filepath.Join(s.layerDir(), e.Name()))
		errs = append(errs, err)
		if n > 0 {
			freed.Layers++
			freed.Bytes += n
		}
	}
	return freed, errors.Join(errs...)
}

func (s *Store) sweepSnapshots(ctx context.Context, entries []fs.DirEntry, needed, live, layers map[string]bool, freed *Freed) error {
	if _, err := snapshot.Clean(filepath.Join(s.dir, "snapshots")); err != nil {
		return err
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		dir := s.snapshotDir(e.Name())
		if snapshot.IsTemp(e.Name()) {
			continue
		}
		snap, err := snapshot.Open(dir)
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return fmt.Errorf("snapshot %s: %w: nothing has been deleted that it may need", e.Name(), err)
		}
		m := snap.Manifest()
		if err := snap.Close(); err != nil {
			return err
		}
		// A snapshot is there for a moment before the record of its VM names it.
		if m.Labels[labelKind] == kindSleep && !needed[e.Name()] && !live[m.Labels[labelOwner]] && !s.kept(e.Name()) {
			_, n := diskUsage(dir)
			if err := snapshot.Remove(dir); err != nil {
				return err
			}
			freed.Snapshots++
			freed.Bytes += n
			continue
		}
		for _, d := range m.Disks {
			for _, l := range d.Layers {
				layers[l] = true
			}
		}
	}
	return nil
}

// remove deletes a file or a tree and returns how many bytes of disk that gives back.
func remove(path string) (int64, error) {
	_, n := diskUsage(path)
	return n, os.RemoveAll(path)
}
