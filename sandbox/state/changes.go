package state

import (
	"context"
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

// Complete fills in what a Spec leaves open, its name included, and checks that this host and store can have such a VM.
func (s *Store) Complete(want spec.VM) (spec.VM, error) {
	if want.Name == "" {
		want.Name = "vm-" + spec.NewID()[:8]
	}
	want, err := want.WithDefaults()
	if err != nil {
		return want, err
	}
	if err := vmm.CheckHostMemory(want.Memory()); err != nil {
		return want, fmt.Errorf("%w: %w", spec.ErrInvalid, err)
	}
	return want, s.CheckPaths(want.Name)
}

// Change changes the record of a VM. If the VM has a process, it returns spec.ErrRunning.
func (s *Store) Change(name string, change func(*Record) error) error {
	l, err := s.Lock(name)
	if err != nil {
		return err
	}
	defer l.Release()
	r, err := s.Load(name)
	if err != nil {
		return err
	}
	if err := change(r); err != nil {
		return err
	}
	return s.Save(r)
}

// atRest locks a VM that does not run, and returns its record. If the VM runs, it returns running as the error.
func (s *Store) atRest(ctx context.Context, name string, running error) (*Record, *VMLock, error) {
	r, err := s.Get(name)
	if err != nil {
		return nil, nil, err
	}
	if r.Phase == Running || r.Phase == Starting {
		return nil, nil, running
	}
	l, err := s.LockSoon(ctx, name)
	if errors.Is(err, spec.ErrRunning) {
		return nil, nil, running
	}
	if err != nil {
		return nil, nil, err
	}
	r, err = s.Load(name)
	if err == nil && (r.Phase == Running || r.Phase == Starting) {
		err = running
	}
	if err != nil {
		l.Release()
		return nil, nil, err
	}
	return r, l, nil
}

// ChangeSpec changes a VM in all but its policy. If the VM runs, the error is spec.ErrRunning. A refused change
// changes nothing.
func (s *Store) ChangeSpec(ctx context.Context, name string, c spec.Changes) error {
	running := fmt.Errorf("changing %s: %w: put it to sleep or stop it first; this holds from its next wake or boot on", name, spec.ErrRunning)
	r, l, err := s.atRest(ctx, name, running)
	if err != nil {
		return err
	}
	defer l.Release()
	want, err := r.Spec.Changed(c, r.Phase == Asleep)
	if err == nil {
		want, err = s.Complete(want)
	}
	if err != nil {
		return fmt.Errorf("changing %s: %w", name, err)
	}
	r.Spec = want
	if err := s.Save(r); err != nil {
		return err
	}
	s.Tell(s.Event(ctx, r, events.Updated))
	return nil
}
