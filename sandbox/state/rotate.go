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

// Rotation has a sandbox begin anew from a snapshot that is known to be good, at its wakes. What it has done since is
// left then: its last sleep is kept until the next one, as by Store.RestoreTo. It is kept in the Metadata, so it needs
// nobody who watches the time, and never interrupts a sandbox that runs. The zero value is none.
type Rotation struct {
	// To is the snapshot, one of the sandbox's own with memory; it is kept for as long as it is named here.
	To string `json:"to,omitempty"`
	// At is from when on, by the host's clock: the first wake at that time or later begins anew, and those after it do
	// not. The zero time is each wake.
	At time.Time `json:"at,omitzero"`
	// Every is after how many seconds a wake begins anew again, MinTimer to lifetime.MaxSeconds; 0 is once. It goes
	// with At.
	Every int64 `json:"every_seconds,omitempty"`
}

// timer is what of it is a time.
func (r Rotation) timer() Timer { return Timer{At: r.At, Every: r.Every} }

func (r Rotation) check() error {
	if r == (Rotation{}) {
		return nil
	}
	if r.To == "" {
		return fmt.Errorf("%w: a rotation names no snapshot to begin anew from", ErrMetadata)
	}
	if len(r.To) > maxSnapshotID {
		return fmt.Errorf("%w: a rotation to snapshot %.64q: use the id of one of its snapshots", ErrMetadata, r.To)
	}
	if err := r.timer().check(); err != nil {
		return fmt.Errorf("when it begins anew: %w", err)
	}
	return nil
}

// maxSnapshotID bounds what is given for the id of a snapshot, in bytes.
const maxSnapshotID = 64

// due says whether a wake now begins anew.
func (r Rotation) due(now time.Time) bool {
	return r.To != "" && (r.At.IsZero() || r.timer().Due(now))
}

// after is the rotation once a wake has begun anew.
func (r Rotation) after(now time.Time) Rotation {
	if r.At.IsZero() {
		return r
	}
	next := r.timer().after(now)
	if next.At.IsZero() {
		return Rotation{}
	}
	r.At = next.At
	return r
}

// checkRotation refuses a rotation that no wake of a VM could do, and completes the id of its snapshot. Whoever calls
// it keeps sweeps out until the metadata is written: one sees it then, or is over.
func (s *Store) checkRotation(r *Record, rot *Rotation) error {
	if rot.To == "" {
		return rot.check()
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
		return fail(ErrForeignSnapshot, "take one with `drowse snapshot "+r.Spec.Name+"`")
	case DiskOnly(m):
		return fail(ErrDiskOnly, "take one with memory")
	case kind != KindSleep && kind != KindNamed:
		return fail(ErrMetadata, "it is what a fork began with: take one with `drowse snapshot "+r.Spec.Name+"`")
	case slices.ContainsFunc(r.Spec.Volumes, func(v spec.VolumeMount) bool { return !v.ReadOnly }):
		return fail(ErrMetadata, "it writes to a volume, which moves on, and no memory of an earlier time may meet it")
	}
	rot.To = id
	return nil
}

// RotateIfDue takes a VM that is to be woken back to the snapshot of its rotation, if it is time. Killed at any
// instant, it either has done that or not: that it has is in the record, so the next wake does not do it a second time.
// It returns errBetween if the VM has changed meanwhile.
func (s *Store) RotateIfDue(ctx context.Context, r *Record, rot Rotation) (*Record, error) {
	if !rot.due(time.Now()) {
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
			return nil, fmt.Errorf("beginning anew, as `drowse update --rotate-to` has it: %w", err)
		}
		if left != "" && r.Left != left {
			// Or a guest that ends again and again would fill the host's disk. If it stays, pruning removes it.
			_ = s.RemoveSnapshot(ctx, left)
		}
	}
	if always {
		return r, nil
	}
	_, err := s.setMetadata(ctx, name, func(l *Metadata, unreadable error) error {
		if unreadable != nil || l.Rotate != rot {
			return ErrNothingToTell
		}
		l.Rotate = rot.after(time.Now())
		return nil
	}, func(*Record, Metadata, Metadata, error) {})
	return r, nothing(err)
}

// notRotated refuses to take a VM back to a snapshot in which its next wake would not leave it.
func (s *Store) notRotated(name, id string) error {
	l, err := s.Metadata(name)
	if err != nil || l.Rotate.To == id || !l.Rotate.due(time.Now()) {
		return nil
	}
	return fmt.Errorf("%w: its next wake begins anew from snapshot %s: change that with `drowse update %s --no-rotate`", ErrMetadata, l.Rotate.To, name)
}

// Lasting is a VM's metadata if its time is not over: ErrExpired. A metadata that cannot be read is in nobody's way.
func (s *Store) Lasting(name string) (Metadata, error) {
	l, err := s.Metadata(name)
	if err != nil {
		return Metadata{}, nil //nolint:nilerr // what it says cannot be known, and the VM is its owner's
	}
	if lifetime.Expired(l.Expires, time.Now()) {
		return l, fmt.Errorf("%w: %s, at %s: extend it with `drowse update %s --ttl TIME`", ErrExpired, name, l.Expires.Format(time.RFC3339), name)
	}
	return l, nil
}
