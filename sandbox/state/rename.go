package state

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Rename gives a VM another name. If the VM runs, the error is ErrRunning; if the name is taken, ErrExists. Its
// id, disk, snapshots, metadata, audit trail and its host name in the guest stay. A repeated rename does nothing.
// After a crash at any instant the VM has one of the two names, and is whole.
func (s *Store) Rename(ctx context.Context, name, to string) error {
	if !spec.ValidName(to) {
		return spec.InField("to", fmt.Errorf("%w: name %q: use 1 to 40 lower-case letters, digits and inner hyphens", spec.ErrInvalid, to))
	}
	if err := s.CheckPaths(to); err != nil {
		return err
	}
	if shared := lease.In(s.dir); shared.Shared(name) || shared.Shared(to) {
		return fmt.Errorf("%w: renaming VM %s to %s: hosts that share a sandbox know it by its name: clone it", spec.ErrInvalid, name, to)
	}
	if name == to {
		_, err := s.Get(name)
		return err
	}
	// A sweep that lists the VMs meanwhile could miss both names.
	unlock, err := s.Share(ctx)
	if err != nil {
		return fmt.Errorf("renaming VM %s: %w", name, err)
	}
	defer func() { _ = unlock() }()
	// So could a count of its owner's VMs.
	release, err := limits.AdmitSandbox(s.dir, s.Owner(name), func() (int, error) { return 0, nil })
	if err != nil {
		return fmt.Errorf("renaming VM %s: %w", name, err)
	}
	defer func() { _ = release() }()
	running := fmt.Errorf("%w: %s: put it to sleep or stop it before it gets another name", spec.ErrRunning, name)
	r, l, err := s.atRest(ctx, name, running)
	if errors.Is(err, spec.ErrNotFound) {
		if there, terr := s.Load(to); terr == nil && there.Former == name {
			return nil
		}
	}
	if err != nil {
		return err
	}
	defer l.Release() // the lock is on the file, whatever its name
	// The record must first say that the directory may have either name: see Load.
	r.NextName = to
	if err := s.Save(r); err != nil {
		return err
	}
	err = unix.Renameat2(unix.AT_FDCWD, s.VMDir(name), unix.AT_FDCWD, s.VMDir(to), unix.RENAME_NOREPLACE)
	if err != nil {
		r.NextName = ""
		serr := s.Save(r)
		if errors.Is(err, unix.EEXIST) {
			err = fmt.Errorf("%w: %s: choose another name, or remove it with Sandbox(%q).Delete", spec.ErrExists, to, to)
		} else {
			err = fmt.Errorf("renaming VM %s: %w", name, err)
		}
		return errors.Join(err, serr)
	}
	if err := osfile.SyncDir(filepath.Join(s.dir, "vms")); err != nil {
		return fmt.Errorf("renaming VM %s: %w", name, err)
	}
	if r, err = s.Load(to); err != nil {
		return err
	}
	if err := s.Save(r); err != nil {
		return err
	}
	e := s.Event(ctx, r, events.Renamed)
	e.Details.From = name
	s.Tell(e)
	return nil
}

// adoptName completes in memory what a rename has done on disk.
func (r *Record) adoptName(name string) {
	if r.NextName == name && r.Spec.Name != name {
		r.Former, r.Spec.Name = r.Spec.Name, name
	}
	r.NextName = ""
}
