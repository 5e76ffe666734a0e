package state

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// checkRotation refuses a rotation that no wake of a VM could do, and completes the id of its snapshot. The caller
// must keep sweeps out until the metadata is written, so that they see it or have ended.
func (s *Store) checkRotation(r *Record, rot *spec.Rotation) error {
	if rot.To == "" {
		return rot.Check()
	}
	id, err := s.FindSnapshot(rot.To)
	if err != nil {
		return err
	}
	m, err := s.Manifest(id)
	if err != nil {
		return err
	}
	fail := func(err error, why string) error {
		return fmt.Errorf("having %s begin anew from snapshot %s: %w: %s", r.Spec.Name, id, err, why)
	}
	switch kind := m.Labels[labelKind]; {
	case m.Labels[labelOwner] != r.ID:
		return fail(spec.ErrForeignSnapshot, fmt.Sprintf("take one with Sandbox(%q).Snapshot", r.Spec.Name))
	case DiskOnly(m):
		return fail(spec.ErrDiskOnly, "take one with memory")
	case kind != KindSleep && kind != KindNamed:
		return fail(spec.ErrMetadata, fmt.Sprintf("it is what a fork began with: take one with Sandbox(%q).Snapshot", r.Spec.Name))
	case slices.ContainsFunc(r.Spec.Volumes, func(v spec.VolumeMount) bool { return !v.ReadOnly }):
		return fail(spec.ErrMetadata, "it writes to a volume, which moves on, and no memory of an earlier time may meet it")
	}
	rot.To = id
	return nil
}

// RotateIfDue takes a VM that will be woken back to the snapshot of its rotation, if it is due. A kill at any
// instant leaves it done or not done: the record says so, and the next wake does not repeat it. RotateIfDue
// returns ErrBetween if the VM has changed meanwhile.
func (s *Store) RotateIfDue(ctx context.Context, r *Record, rot spec.Rotation) (*Record, error) {
	if !rot.Due(time.Now()) {
		return r, nil
	}
	name, always := r.Spec.Name, rot.At.IsZero()
	if always && r.Phase == Asleep && r.Snapshot == rot.To {
		return r, nil
	}
	if always || !r.Rotated.Equal(rot.At) {
		var err error
		left := r.Left
		r, err = s.restoreTo(events.WithCause(ctx, events.Rotation), name, rot.To, func(r *Record) { r.Rotated = rot.At })
		switch {
		case errors.Is(err, spec.ErrRunning):
			return nil, ErrBetween
		case err != nil:
			return nil, fmt.Errorf("beginning anew, as its metadata has it: %w", err)
		}
		if left != "" && r.Left != left {
			// Otherwise a guest that ends repeatedly would fill the host's disk. If this fails, pruning removes it.
			_ = s.removeSnapshot(ctx, left, s.kept)
		}
	}
	if always {
		return r, nil
	}
	_, err := s.setMetadata(ctx, name, func(l *spec.Metadata, unreadable error) error {
		if unreadable != nil || l.Rotate != rot {
			return ErrNothingToTell
		}
		l.Rotate = rot.After(time.Now())
		return nil
	}, func(*Record, spec.Metadata, spec.Metadata, error) {})
	return r, nothing(err)
}

// notRotated refuses to take a VM back to a snapshot that its next wake would leave by a rotation.
func (s *Store) notRotated(name, id string) error {
	l, err := s.Metadata(name)
	if err != nil || l.Rotate.To == id || !l.Rotate.Due(time.Now()) {
		return nil
	}
	return fmt.Errorf("%w: its next wake begins anew from snapshot %s: change that: Fleet.Update of %q with Rotate", spec.ErrMetadata, l.Rotate.To, name)
}

// Lasting returns a VM's metadata, or spec.ErrExpired if it has expired. Unreadable metadata is not an error.
func (s *Store) Lasting(name string) (spec.Metadata, error) {
	l, err := s.Metadata(name)
	if err != nil {
		return spec.Metadata{}, nil //nolint:nilerr // what it says cannot be known, and the VM is its owner's
	}
	if lifetime.Expired(l.Expires, time.Now()) {
		return l, fmt.Errorf("%w: %s, at %s: extend it: Fleet.Update of %q with Expires", spec.ErrExpired, name, l.Expires.Format(time.RFC3339), name)
	}
	return l, nil
}
