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

// maxFrozen is how long the guest's disk stays frozen at most: after that the guest thaws it by itself. It is
// usually frozen for milliseconds.
const maxFrozen = time.Minute

// SealFrozen has the guest write out and freeze its file system, gives the disk a new top layer, and thaws the
// file system. The VM is not paused. Below the new layer is a clean file system with all that was written before.
// recorded gets the new stack before anything is written to it. If SealFrozen fails, the guest still runs on, and
// the disk may have one more layer.
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

// NewIdentity gives a guest that has booted from another VM's disk its own identity: the disk still has the other
// VM's machine id.
func (in *Instance) NewIdentity(ctx context.Context) error {
	return in.ask(ctx, func(ctx context.Context, c *guest.Client) error {
		if _, err := c.Resume(ctx, guest.Resume{NewIdentity: true, Hostname: in.parts.Spec.Hostname}); err != nil {
			return fmt.Errorf("giving the guest an identity of its own: %w", err)
		}
		return nil
	})
}
