package state

import (
	"context"
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/vmm"
)

// Complete fills in what a Spec leaves open, its name as well, and checks that this host and store can have such a VM.
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

// ChangeSpec changes a VM that does not run in all but its policy: spec.ErrRunning. What is refused has changed
// nothing.
func (s *Store) ChangeSpec(ctx context.Context, name string, c spec.Changes) error {
	r, err := s.Get(name)
	if err != nil {
		return err
	}
	running := fmt.Errorf("changing %s: %w: put it to sleep or stop it first; this holds from its next wake or boot on", name, spec.ErrRunning)
	if r.Phase == Running || r.Phase == Starting {
		return running
	}
	l, err := s.LockSoon(ctx, name)
	if errors.Is(err, spec.ErrRunning) {
		return running
	}
	if err != nil {
		return err
	}
	defer l.Release()
	if r, err = s.Load(name); err != nil {
		return err
	}
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
