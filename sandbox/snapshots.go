package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/snapshot"
)

// SnapshotInfo describes a snapshot in the store.
type SnapshotInfo struct {
	ID      string    `json:"id"`
	VM      string    `json:"vm"` // the name that it had then
	Owner   string    `json:"vm_id,omitempty"`
	Kind    string    `json:"kind"` // "sleep", "named", "disk", "fork" or "abandoned"
	Note    string    `json:"note,omitempty"`
	Created time.Time `json:"created"`
	RAM     uint64    `json:"ram_bytes"` // 0 for one of a disk
	// Stored is what its files take on disk, and Exclusive what of that no other
	// snapshot has as well: what removing it frees.
	Stored    int64 `json:"stored_bytes"`
	Exclusive int64 `json:"exclusive_bytes"`
	// Base is the snapshot that it is a delta of, empty for a full one, and Depth
	// how many deltas lie between it and a full one. The base may be gone: a
	// snapshot has all that it needs.
	Base  string `json:"base,omitempty"`
	Depth int    `json:"depth"`
	// Tags keep it from being pruned: TagSnapshot.
	Tags []string `json:"tags,omitempty"`
	// Kept says that it has tags, or was imported.
	Kept bool `json:"kept,omitempty"`
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
		if errors.Is(err, snapshot.ErrNotFound) {
			continue
		}
		if err != nil {
			out = append(out, s.damagedInfo(e.Name(), err))
			continue
		}
		out = append(out, s.snapshotInfo(m))
	}
	return out, nil
}

// damagedInfo is what is known of a snapshot whose memory cannot be had.
func (s *Store) damagedInfo(id string, problem error) SnapshotInfo {
	i := SnapshotInfo{ID: id}
	if m, err := snapshot.ReadManifest(s.SnapshotDir(id)); err == nil {
		i = s.snapshotInfo(m)
	}
	i.Problem = problem.Error()
	return i
}

func (s *Store) snapshotInfo(m *snapshot.Manifest) SnapshotInfo {
	i := SnapshotInfo{
		ID: m.ID, VM: m.Sandbox, Kind: m.Labels[labelKind], Note: m.Labels[labelNote],
		Created: time.Unix(0, m.CreatedUnixNano).UTC(), RAM: m.RAM(), Base: m.Base, Depth: int(m.Depth),
		Owner: m.Labels[labelOwner], Tags: s.snapshotTags(m.ID), Kept: s.kept(m.ID),
	}
	if diskOnly(m) {
		i.RAM = 0
	}
	i.Stored, i.Exclusive = diskUsage(s.SnapshotDir(m.ID))
	return i
}

// SnapshotDetails is everything that is known of a snapshot, its parts included.
type SnapshotDetails struct {
	SnapshotInfo
	Manifest *snapshot.Manifest `json:"manifest"`
	States   []StateInfo        `json:"states"`
	// UsedBy are the VMs that come back from it.
	UsedBy []string `json:"used_by"`
}

// StateInfo describes the saved state of one part of a machine.
type StateInfo struct {
	Name    string `json:"name"`
	Kind    string `json:"kind"`
	Version uint32 `json:"version"`
	Bytes   int    `json:"bytes"`
}

// InspectSnapshot returns what a snapshot says of itself.
func (s *Store) InspectSnapshot(prefix string) (*SnapshotDetails, error) {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return nil, err
	}
	m, err := snapshot.ReadManifest(s.SnapshotDir(id))
	if err != nil {
		return nil, err
	}
	d := &SnapshotDetails{SnapshotInfo: s.snapshotInfo(m), Manifest: m, UsedBy: []string{}}
	snap, err := snapshot.Open(s.SnapshotDir(id))
	if err != nil {
		d.Problem = err.Error() + "; its disk does not depend on its memory: `drowse run --from-disk` boots a VM from it"
	} else {
		defer snap.Close()
		for _, p := range snap.Payloads() {
			d.States = append(d.States, StateInfo{p.Name, p.Kind, p.Version, len(p.Data)})
		}
	}
	records, err := s.List()
	for _, r := range records {
		if r.Snapshot == id {
			d.UsedBy = append(d.UsedBy, r.Spec.Name)
		}
	}
	return d, err
}

// CompactSnapshot rewrites a snapshot so that it shares no file with others and has
// nothing that it does not need. It returns how many bytes it had to itself before and
// has now.
func (s *Store) CompactSnapshot(ctx context.Context, prefix string) (before, after int64, err error) {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return 0, 0, err
	}
	_, before = diskUsage(s.SnapshotDir(id))
	if _, err := snapshot.Compact(ctx, s.SnapshotDir(id)); err != nil {
		return before, before, err
	}
	_, after = diskUsage(s.SnapshotDir(id))
	return before, after, nil
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

// SnapshotDisk is the disk of a snapshot, sealed, with absolute paths. It does not depend on the snapshot's memory.
func (s *Store) SnapshotDisk(id string) (disk.Stack, error) {
	m, err := snapshot.ReadManifest(s.SnapshotDir(id))
	if err != nil {
		return disk.Stack{}, err
	}
	return s.absolute(snapshotDisk(m))
}

// VerifySnapshot reads all of a snapshot and checks it.
//
// Its disk is checked as far as layers can be without reading all their data.
func (s *Store) VerifySnapshot(ctx context.Context, prefix string) error {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return err
	}
	if err := snapshot.Verify(ctx, s.SnapshotDir(id), nil); err != nil {
		return err
	}
	st, err := s.SnapshotDisk(id)
	if err != nil {
		return err
	}
	if err := disk.Verify(st); err != nil {
		return fmt.Errorf("the disk of snapshot %s: %w", id, err)
	}
	return nil
}

// RemoveSnapshot deletes a snapshot. It fails with ErrSnapshotInUse when a VM sleeps in it or was made from it and has
// not slept since. While somebody restores it, it waits for some seconds until that VM is recorded.
func (s *Store) RemoveSnapshot(ctx context.Context, prefix string) error {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return err
	}
	var layers []string
	var free func() error
	err = s.alone(ctx, func() error {
		m, err := s.markRecords(ctx)
		if err != nil {
			return err
		}
		if why, named := m.names(id); named {
			return fmt.Errorf("%w: snapshot %s %s", ErrSnapshotInUse, id, why)
		}
		// One that cannot be read goes as well; what it needed then goes when it has its age.
		if m, err := snapshot.ReadManifest(s.SnapshotDir(id)); err == nil {
			layers = snapshotDisk(m).Layers
		}
		free, err = snapshot.Discard(s.SnapshotDir(id))
		return errors.Join(err, s.unkeep(id))
	})
	if errors.Is(err, errStoreBusy) {
		err = fmt.Errorf("%w: VMs or snapshots are being made of others: %w", ErrSnapshotInUse, err)
	}
	if free != nil {
		err = errors.Join(err, free())
	}
	if err != nil {
		return fmt.Errorf("removing snapshot %s: %w", id, err)
	}
	_, err = s.sweep(ctx, exempt{layers: layers})
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
		// Abandoned are the snapshots of disks that it has left when it was taken back.
		Abandoned []string `json:"abandoned,omitempty"`
	}{Record: r}
	if r.Phase == Running {
		if info, err := s.Info(ctx, name); err == nil {
			out.Live = &info
		}
	}
	if out.Layers, out.Abandoned, err = s.disksOf(ctx, r); err != nil {
		return nil, err
	}
	for _, size := range out.Layers {
		out.Usage += size
	}
	return json.MarshalIndent(out, "", "  ")
}

// disksOf are the layers of a VM's disk, with what each takes on the host's, in bytes; and the snapshots of disks that
// it has left when it was taken back.
func (s *Store) disksOf(ctx context.Context, r *Record) (layers map[string]int64, abandoned []string, err error) {
	have := manifests{}
	if _, _, err := s.readManifests(ctx, have); err != nil {
		return nil, nil, err
	}
	for id, m := range have {
		if m.Labels[labelKind] == kindAbandoned && m.Labels[labelOwner] == r.ID {
			abandoned = append(abandoned, id)
		}
	}
	slices.Sort(abandoned)
	layers = map[string]int64{}
	for _, l := range r.Disk.Layers {
		layers[l], _ = diskUsage(filepath.Join(s.layerDir(), l))
	}
	return layers, abandoned, nil
}
