package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/template"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// A disk-only snapshot is a snapshot whose RAM is one page of zeros and that has no states, so all code for
// snapshots can handle it (see docs/adr/0019).

// KindDisk marks such a snapshot.
const KindDisk = "disk"

// KindAbandoned marks the disk that a VM left when it was taken back to an earlier snapshot. It is deleted by
// SweepAbandoned, or when it or its VM is removed.
const KindAbandoned = "abandoned"

// DiskOnly reports whether a snapshot has no memory.
func DiskOnly(m *snapshot.Manifest) bool {
	return m.Labels[labelKind] == KindDisk || m.Labels[labelKind] == KindAbandoned
}

// Abandon keeps the disk of a VM that has crashed or stopped, before the VM is taken back to a snapshot. It
// returns the id of the new snapshot, or "" if there is nothing to keep. The VM's lock must be held.
func (s *Store) Abandon(ctx context.Context, r *Record, to *snapshot.Manifest) (id string, err error) {
	if slices.Equal(r.Disk.Layers, SnapshotStack(to).Layers) {
		return "", nil
	}
	fail := func(err error) (string, error) {
		return "", fmt.Errorf("keeping what %s has on its disk: %w: nothing has been changed: Sandbox(%q).Start boots it with that disk", r.Spec.Name, err, r.Spec.Name)
	}
	st, err := s.Absolute(r.Disk)
	if err != nil {
		return fail(err)
	}
	// A VM can boot from it once it is sealed. A damaged disk is kept as it is.
	d, err := disk.Open(st, disk.Options{})
	if err == nil {
		err = d.CloseSealed()
	}
	note := fmt.Sprintf("what %s had on its disk when it was taken back to %.12s", r.Spec.Name, to.ID)
	if err != nil && !errors.Is(err, disk.ErrSealed) {
		if ctx.Err() != nil || errors.Is(err, disk.ErrInUse) {
			return fail(err)
		}
		note += "; it is damaged"
	}
	labels, err := s.Labels(r, KindAbandoned)
	if err != nil {
		return fail(err)
	}
	labels[LabelNote] = note
	id = spec.NewID()
	if _, err := snapshot.Create(ctx, s.SnapshotDir(id), snapshot.Spec{
		ID: id, Sandbox: r.Spec.Name, VCPUs: r.Spec.VCPUs, Image: r.Boot.ImageID, Kernel: r.Boot.KernelID,
		Disks:  []snapshot.Disk{{Name: instance.DeviceDisk, Size: uint64(r.Spec.DiskMiB) << 20, Layers: r.Disk.Layers}},
		Labels: labels, Memory: NoMemory{},
	}); err != nil {
		return fail(err)
	}
	return id, nil
}

// NoMemory is the RAM of a snapshot without memory.
type NoMemory struct{}

// Slots implements snapshot.MemorySource.
func (NoMemory) Slots() []snapshot.Slot { return []snapshot.Slot{{Size: guestmem.PageSize}} }

// NextData implements snapshot.MemorySource: there are only zeros.
func (NoMemory) NextData(page uint64) (first, end uint64, err error) { return page, page, nil }

// ReadPages implements snapshot.MemorySource.
func (NoMemory) ReadPages(_ uint64, p []byte) error {
	clear(p)
	return nil
}

// Snapshots lists the snapshots of the store, including those that cannot be opened.
func (s *Store) Snapshots() ([]spec.SnapshotInfo, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return nil, fmt.Errorf("listing snapshots: %w", err)
	}
	var out []spec.SnapshotInfo
	for _, e := range entries {
		if snapshot.IsTemp(e.Name()) {
			continue
		}
		m, err := s.Manifest(e.Name())
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

// damagedInfo returns what is known about a snapshot whose memory is unreadable.
func (s *Store) damagedInfo(id string, problem error) spec.SnapshotInfo {
	i := spec.SnapshotInfo{ID: id}
	if m, err := snapshot.ReadManifest(s.SnapshotDir(id)); err == nil {
		i = s.snapshotInfo(m)
	}
	i.Problem = problem.Error()
	return i
}

func (s *Store) snapshotInfo(m *snapshot.Manifest) spec.SnapshotInfo {
	i := spec.SnapshotInfo{
		ID: m.ID, VM: m.Sandbox, Kind: m.Labels[labelKind], Note: m.Labels[LabelNote],
		Created: time.Unix(0, m.CreatedUnixNano).UTC(), RAM: m.RAM(), Base: m.Base, Depth: int(m.Depth),
		Owner: m.Labels[labelOwner], Tags: s.snapshotTags(m.ID), Kept: s.kept(m.ID),
	}
	if DiskOnly(m) {
		i.RAM = 0
	}
	i.Stored, i.Exclusive = DiskUsage(s.SnapshotDir(m.ID))
	return i
}

// SnapshotDetails is all that is known about a snapshot, including its parts.
type SnapshotDetails struct {
	spec.SnapshotInfo
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

// InspectSnapshot returns the details of a snapshot.
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
		d.Problem = err.Error() + "; its disk does not depend on its memory: Host.Create with Disk boots a VM from it"
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

// CompactSnapshot rewrites a snapshot so that it shares no file with others and has nothing that it does not need.
// It returns how many bytes the snapshot had exclusively before and has now.
func (s *Store) CompactSnapshot(ctx context.Context, prefix string) (before, after int64, err error) {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return 0, 0, err
	}
	_, before = DiskUsage(s.SnapshotDir(id))
	if _, err := snapshot.Compact(ctx, s.SnapshotDir(id)); err != nil {
		return before, before, err
	}
	_, after = DiskUsage(s.SnapshotDir(id))
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
		if IDPattern.MatchString(prefix) && s.IsArriving(prefix) {
			return "", arrivingError(prefix)
		}
		return "", fmt.Errorf("snapshot %q: %w: see Store.Snapshots", prefix, snapshot.ErrNotFound)
	case 1:
		return found[0], nil
	}
	return "", fmt.Errorf("snapshot %q: %w: %d begin so: give more digits", prefix, snapshot.ErrNotFound, len(found))
}

// SnapshotDisk returns the disk of a snapshot, sealed, with absolute paths. It does not need the snapshot's memory.
func (s *Store) SnapshotDisk(id string) (disk.Stack, error) {
	m, err := snapshot.ReadManifest(s.SnapshotDir(id))
	if err != nil {
		return disk.Stack{}, err
	}
	return s.Absolute(SnapshotStack(m))
}

// VerifySnapshot reads and checks all of a snapshot.
//
// It checks the disk as far as possible without reading all data of the layers.
func (s *Store) VerifySnapshot(ctx context.Context, prefix string) error {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return err
	}
	if err := snapshot.Verify(ctx, s.SnapshotDir(id)); err != nil {
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

// RemoveSnapshot deletes a snapshot. It returns ErrSnapshotInUse when a VM sleeps in it or was made from it and
// has not slept since. While another process restores it, it waits for some seconds until that VM is recorded.
func (s *Store) RemoveSnapshot(ctx context.Context, prefix string) error {
	return s.removeSnapshot(ctx, prefix, func(string) bool { return false })
}

// removeSnapshot is RemoveSnapshot, unless the snapshot is to be spared.
func (s *Store) removeSnapshot(ctx context.Context, prefix string, spared func(id string) bool) error {
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
			return fmt.Errorf("%w: snapshot %s %s", spec.ErrSnapshotInUse, id, why)
		}
		if spared(id) {
			return nil
		}
		// An unreadable one goes as well. What it needed then goes once it is old enough.
		if m, err := snapshot.ReadManifest(s.SnapshotDir(id)); err == nil {
			layers = SnapshotStack(m).Layers
		}
		free, err = snapshot.Discard(s.SnapshotDir(id))
		return errors.Join(err, s.unkeep(id))
	})
	if errors.Is(err, ErrStoreBusy) {
		err = fmt.Errorf("%w: VMs or snapshots are being made of others: %w", spec.ErrSnapshotInUse, err)
	}
	if free != nil {
		err = errors.Join(err, free())
	}
	if err != nil {
		return fmt.Errorf("removing snapshot %s: %w", id, err)
	}
	_, err = s.SweepExcept(ctx, Exempt{layers: layers})
	return err
}

// DisksOf returns the layers of a VM's disk, with the bytes that each takes on the host's, and the snapshots of
// disks that the VM left when it was taken back.
func (s *Store) DisksOf(ctx context.Context, r *Record) (layers map[string]int64, abandoned []string, err error) {
	have := manifests{}
	if _, _, err := s.readManifests(ctx, have); err != nil {
		return nil, nil, err
	}
	for id, m := range have {
		if m.Labels[labelKind] == KindAbandoned && m.Labels[labelOwner] == r.ID {
			abandoned = append(abandoned, id)
		}
	}
	slices.Sort(abandoned)
	layers = map[string]int64{}
	for _, l := range r.Disk.Layers {
		layers[l], _ = DiskUsage(filepath.Join(s.LayerDir(), l))
	}
	return layers, abandoned, nil
}

// SnapshotDir returns the directory of a snapshot.
func (s *Store) SnapshotDir(id string) string { return filepath.Join(s.dir, "snapshots", id) }

// IsThere reports whether a snapshot is on disk.
func (s *Store) IsThere(id string) bool {
	m, err := s.Manifest(id)
	return err == nil && m.ID == id
}

// PutTemplate writes the entry of a template, whose snapshot is that of a sleep. From then on it outlives its VM.
func (s *Store) PutTemplate(ctx context.Context, e template.Entry) error {
	unlock, err := s.Share(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = unlock() }()
	m, err := s.Manifest(e.Snapshot)
	if err != nil {
		return err
	}
	if err := errors.Join(s.lend(e.Snapshot), s.lendOwner(m)); err != nil {
		return err
	}
	return s.Templates().Put(e)
}

// RemoveTemplates removes templates, and the snapshots of those that no running VM builds on. VMs that were made from
// them keep what they need.
func (s *Store) RemoveTemplates(ctx context.Context, list ...template.Entry) error {
	var gone Exempt
	for _, e := range list {
		if err := s.Templates().Remove(e.Key); err != nil {
			return err
		}
		gone.Snapshots = append(gone.Snapshots, e.Snapshot)
	}
	_, err := s.SweepExcept(ctx, gone)
	return err
}
