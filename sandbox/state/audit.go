package state

import (
	"context"
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/guest/audit"
)

// AuditPath returns the trail of what was done in a VM through its agent: see package audit.
func (s *Store) AuditPath(name string) string { return audit.Path(s.VsockPath(name)) }

// Audit calls f for all that was done in a VM through its agent, by any program, in the order in which it began;
// with o.Follow, also for new entries. An error of f ends Audit, which returns it. Audit only reads files, so it
// works for a VM that sleeps, has stopped or crashed. A VM that a version without trails made has none until its
// next start or wake.
//
// The trail begins with the VM: actions in the VM that it is a fork or clone of are in that VM's trail. Removing
// the VM removes its trail.
func (s *Store) Audit(ctx context.Context, name string, o audit.ReadOptions, f func(audit.Entry) error) (audit.Trailer, error) {
	r, err := s.Load(name)
	if err != nil {
		return audit.Trailer{}, err
	}
	is, err := audit.Read(ctx, s.AuditPath(name), o, f)
	if errors.Is(err, audit.ErrNone) {
		return audit.Trailer{Head: r.auditHead(), First: 1}, nil
	}
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("reading the audit trail of VM %s: %w", name, err)
	}
	return is, err
}

// auditHead returns the head of a VM's trail.
func (r *Record) auditHead() audit.Head {
	h := audit.Head{VM: r.ID, Name: r.Spec.Name, Snapshot: r.Parent}
	if r.Fork != nil {
		h.Parent, h.ParentID = r.Fork.Parent, r.Fork.ParentID
	}
	return h
}

// beginAudit makes the trail of a new VM.
func (s *Store) beginAudit(r *Record) error {
	// No other process holds its lock for longer than one line takes.
	return audit.Ensure(context.Background(), s.AuditPath(r.Spec.Name), r.auditHead())
}

// EnsureAudit makes the trail of a VM that has none, and replaces one that a power cut has spoilt.
func (s *Store) EnsureAudit(name string) error {
	if _, err := audit.ReadHead(s.AuditPath(name)); err == nil {
		return nil
	}
	r, err := s.Load(name)
	if err != nil {
		return err
	}
	return s.beginAudit(r)
}
