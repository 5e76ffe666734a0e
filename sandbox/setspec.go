package sandbox

import (
	"context"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// SetSpec changes a VM. Except for the policy it must not run: ErrRunning. What is refused has changed nothing, but if
// that is the policy, the others have been changed before.
func (s *Store) SetSpec(ctx context.Context, name string, c spec.Changes) error {
	if c.Idle != nil || c.Hooks != nil || c.VCPUs != nil || c.MemoryMiB != nil {
		if err := s.ChangeSpec(ctx, name, c); err != nil {
			return err
		}
	}
	if c.Policy == nil {
		return nil
	}
	_, err := s.SetPolicy(ctx, name, c.Policy)
	return err
}
