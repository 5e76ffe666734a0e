package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// Volumes returns the volumes of the store.
func (s *Store) Volumes() *volume.Store { return volume.Open(filepath.Join(s.dir, "volumes")) }

// VolumeInfo describes a volume.
type VolumeInfo struct {
	*volume.Record
	Allocated int64 `json:"allocated_bytes"` // of disk
	// UsedBy are the VMs that name it, in any phase.
	UsedBy []VolumeUser `json:"used_by"`
}

// VolumeUser is a VM that names a volume.
type VolumeUser struct {
	VM       string `json:"vm"`
	Phase    Phase  `json:"phase"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"read_only"`
}

// InspectVolume returns what is known about a volume.
func (s *Store) InspectVolume(name string) (*VolumeInfo, error) {
	r, err := s.Volumes().Get(name)
	if err != nil {
		return nil, err
	}
	i := &VolumeInfo{Record: r, UsedBy: []VolumeUser{}}
	if i.Allocated, err = s.Volumes().Allocated(name); err != nil {
		return nil, err
	}
	records, err := s.List()
	for _, vm := range records {
		for _, m := range vm.Spec.Volumes {
			if m.Name == name {
				i.UsedBy = append(i.UsedBy, VolumeUser{vm.Spec.Name, vm.Phase, m.Path, m.ReadOnly})
			}
		}
	}
	return i, err
}

// RemoveVolume deletes a volume that no VM names; otherwise it returns volume.ErrInUse.
func (s *Store) RemoveVolume(ctx context.Context, name string) error {
	return s.Volumes().Remove(ctx, name, func(r *volume.Record) error {
		return s.eachUser(r.Name, func(vm *Record, _ spec.VolumeMount) error {
			return fmt.Errorf("%w: VM %s (%s) names it: remove that first", volume.ErrInUse, vm.Spec.Name, vm.Phase)
		})
	})
}

// ResizeVolume makes a volume larger: see volume.Store.Resize. It returns volume.ErrInUse while a VM runs or
// sleeps with it; a stopped VM finds it larger at its next start.
func (s *Store) ResizeVolume(ctx context.Context, name string, size int64) (*volume.Record, error) {
	return s.Volumes().Resize(ctx, name, size, func(r *volume.Record) error {
		return s.eachUser(r.Name, func(vm *Record, _ spec.VolumeMount) error {
			if vm.Phase != Asleep {
				return nil // it holds the volume's lock, or nothing
			}
			return fmt.Errorf("%w: VM %s sleeps with it: wake and stop it, or remove it", volume.ErrInUse, vm.Spec.Name)
		})
	})
}

// eachUser calls f for each VM that names a volume, perhaps more than once. An unreadable record may name it, and is an
// error.
func (s *Store) eachUser(name string, f func(*Record, spec.VolumeMount) error) error {
	for before := []string(nil); ; {
		names, err := s.directories()
		if err != nil || before != nil && slices.Equal(names, before) {
			return err
		}
		for _, n := range names {
			vm, err := s.Load(n)
			if errors.Is(err, spec.ErrNotFound) {
				continue // being made, removed or renamed
			}
			if err != nil {
				return err
			}
			for _, m := range vm.Spec.Volumes {
				if m.Name != name {
					continue
				}
				if err := f(vm, m); err != nil {
					return err
				}
			}
		}
		// A VM that was renamed meanwhile may have been missed under both names.
		before = names
	}
}

// directories lists those of VMs, by name. It is not nil.
func (s *Store) directories() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "vms"))
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

// FindVolumes refuses early if a volume does not exist.
func (s *Store) FindVolumes(mounts []spec.VolumeMount) error {
	for _, m := range mounts {
		if _, err := s.Volumes().Get(m.Name); err != nil {
			return err
		}
	}
	return nil
}

// AttachVolumes attaches the volumes of a VM. A sleeping VM has no process and thus no lock, but it keeps its
// volumes: the guest in its memory still uses them.
func (s *Store) AttachVolumes(r *Record) (all []*volume.Volume, err error) {
	defer func() {
		if err != nil {
			for _, v := range all {
				err = errors.Join(err, v.Close())
			}
			all = nil
		}
	}()
	for _, m := range r.Spec.Volumes {
		v, err := s.Volumes().Attach(m.Name, m.ReadOnly, func(*volume.Record) error {
			// With the lock held: a VM that wakes meanwhile does not get it.
			return s.eachUser(m.Name, func(vm *Record, other spec.VolumeMount) error {
				if vm.ID == r.ID || vm.Phase != Asleep || m.ReadOnly && other.ReadOnly {
					return nil
				}
				return fmt.Errorf("%w: VM %s sleeps with it: wake and stop it, or remove it", volume.ErrInUse, vm.Spec.Name)
			})
		})
		if err != nil {
			return all, err
		}
		all = append(all, v)
	}
	return all, nil
}

// CheckVolumes is instance.Parts.CheckVolumes without an instance. Without the locks it may be wrong a moment
// later, but it fails before anything is made.
func (s *Store) CheckVolumes(r *Record, snapshotID string) error {
	if len(r.Spec.Volumes) == 0 {
		return nil
	}
	m, err := snapshot.ReadManifest(s.SnapshotDir(snapshotID))
	if err != nil {
		return err
	}
	held, err := instance.HeldVolumes(m)
	if err != nil {
		return err
	}
	for _, h := range held {
		v, err := s.Volumes().Get(h.Name)
		if errors.Is(err, volume.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("its guest has volume %s, which is not part of a snapshot: %w", h.Name, err)
		}
		if err != nil {
			return err
		}
		if err := v.Check(h.ID, h.Generation, h.ReadOnly, volume.Settled{Snapshot: m.ID, VM: r.ID}); err != nil {
			return instance.Stale(h, m.ID, err)
		}
	}
	return nil
}
