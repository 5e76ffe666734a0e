package sandbox

import (
	"context"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// SetSpec changes a VM. The VM must not run (ErrRunning), except for a change of the policy. A refused change
// changes nothing, except that a refused policy comes after the other changes were made.
func (b *Sandbox) SetSpec(ctx context.Context, c spec.Changes) error {
	s, name := b.host, b.name
	if err := s.claim(ctx, name); err != nil {
		return err
	}
	if c.Idle != nil || c.Hooks != nil || c.VCPUs != nil || c.MemoryMiB != nil {
		if err := s.State.ChangeSpec(ctx, name, c); err != nil {
			return err
		}
	}
	if c.Policy == nil {
		return nil
	}
	_, err := b.SetPolicy(ctx, c.Policy)
	return err
}
