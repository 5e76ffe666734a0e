package instance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// maxFrozen is when a guest goes on although nobody has told it to. The disk is usually
// frozen for milliseconds.
const maxFrozen = time.Minute

// SealFrozen has the guest write out and freeze its file system, gives the disk a new top
// layer, and lets the guest's writers go on. The VM is not paused. What is below the new
// layer is a clean file system with all that was written before. recorded is told the new
// stack before anything is written to it. If it fails, the guest goes on, and the disk may
// have one more layer.
func (in *Instance) SealFrozen(ctx context.Context, newTop string, l guest.HookLimits, recorded func(disk.Stack) error) (
	sealed disk.Stack, frozen time.Duration, failures []guest.HookFailure, err error) {
	err = in.ask(ctx, func(ctx context.Context, c *guest.Client) error {
		if err := in.disk.Prepare(newTop); err != nil {
			return err
		}
		hooked, err := c.Freeze(ctx, maxFrozen, l)
		if err != nil {
			return err
		}
		failures = hooked.Failures
		if hooked.Refused {
			return &spec.HooksError{Failures: failures}
		}
		sealed = in.disk.Stack()
		_, err = in.disk.SealThen(ctx, newTop, recorded)
		thawed, terr := c.Thaw(ctx, l)
		failures, frozen = append(failures, thawed.Failures...), thawed.Frozen
		return errors.Join(err, terr)
	})
	return sealed, frozen, failures, err
}

// NewIdentity makes a guest that has booted from the disk of another one a machine of its
// own: its machine id, of which the disk has the other one's.
func (in *Instance) NewIdentity(ctx context.Context) error {
	return in.ask(ctx, func(ctx context.Context, c *guest.Client) error {
		if _, err := c.Resume(ctx, guest.Resume{NewIdentity: true, Hostname: in.parts.Spec.Hostname}); err != nil {
			return fmt.Errorf("giving the guest an identity of its own: %w", err)
		}
		return nil
	})
}
