package state

import (
	"context"
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/guest/audit"
)

// AuditPath is the trail of what was done in a VM through its agent: package audit.
func (s *Store) AuditPath(name string) string { return audit.Path(s.VsockPath(name)) }

// Audit calls f for what was done in a VM through its agent, by whichever program, in the
// order in which it began; with o.Follow, as it is done. f's error ends it and is returned.
// It reads files only, and may be called for a VM that sleeps, has stopped or crashed. A VM
// that was made by a version without trails has none until it is started or woken again.
//
// The trail begins with the VM: what was done in the VM that it is a fork or clone of is in
// that one's. It goes with the VM when that is removed.
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

// auditHead is what a VM's trail begins with.
func (r *Record) auditHead() audit.Head {
	h := audit.Head{VM: r.ID, Name: r.Spec.Name, Snapshot: r.Parent}
	if r.Fork != nil {
		h.Parent, h.ParentID = r.Fork.Parent, r.Fork.ParentID
	}
	return h
}

// beginAudit makes the trail of a new VM.
func (s *Store) beginAudit(r *Record) error {
	// Nobody else has it for longer than a line takes.
	return audit.Ensure(context.Background(), s.AuditPath(r.Spec.Name), r.auditHead())
}

// EnsureAudit makes the trail of a VM anew that has none, or one that a power cut has spoilt.
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
