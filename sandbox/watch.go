package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// awakePoll is how often AwaitAwake looks at a VM that sleeps.
const awakePoll = 500 * time.Millisecond

// AwaitAwake waits until a VM runs, and does not wake it. It returns ErrNotRunning if the VM has ended, and
// ErrNotFound if it does not exist.
func (b *Sandbox) AwaitAwake(ctx context.Context) error {
	s, name := b.host, b.name
	tick := time.NewTicker(awakePoll)
	defer tick.Stop()
	for {
		r, err := s.State.Get(name)
		if err != nil {
			return err
		}
		switch r.Phase {
		case state.Running:
			return nil
		case state.Asleep, state.Starting:
		default:
			return fmt.Errorf("%w: %s is %s", ErrNotRunning, name, r.Phase)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s to be awake: %w", name, ctx.Err())
		}
	}
}

// WatchOptions say what Watch watches, and how.
type WatchOptions struct {
	// Paths are 1 to 64 absolute names of files and directories of the guest.
	Paths []string
	// Recursive also watches what is below directories, now or later, on their own file systems: at most 8192
	// directories.
	Recursive bool
	// Use counts as use of the VM: the VM does not go to sleep by itself while it is watched.
	Use bool
	// Ready, if not nil, is called when all later changes will be reported, at first and after each wake.
	Ready func()
}

// Watch reports changes of files in a VM to f until ctx ends, f fails, or the VM ends. It continues through sleeps
// and wakes, and does not cause them. Nothing happens in a sleeping VM; changes just before and just after the
// sleep are reported when it is awake. The VM must be awake when Watch begins. Changes that could not be reported
// are reported as guest.WatchOverflow.
func (b *Sandbox) Watch(ctx context.Context, o WatchOptions, f func(guest.WatchEvent) error) error {
	s, name := b.host, b.name
	w := guest.NewWatch(o.Paths, o.Recursive)
	dialer := guest.IdleDialer(s.State.VsockPath(name))
	if o.Use {
		dialer = guest.UnixDialer(s.State.VsockPath(name))
	}
	r, err := s.State.Get(name)
	if err != nil {
		return err
	}
	if r.Phase != state.Running {
		return fmt.Errorf("%w: %s is %s", ErrNotRunning, name, r.Phase)
	}
	began := false
	ready := func() {
		began = true
		if o.Ready != nil {
			o.Ready()
		}
	}
	var refused error // by f
	for {
		err := func() error {
			c, err := guest.Dial(ctx, dialer)
			if err != nil {
				return err
			}
			defer c.Close()
			return c.Watch(ctx, w, ready, func(e guest.WatchEvent) error {
				refused = f(e)
				return refused
			})
		}()
		switch {
		case refused != nil:
			return refused
		case ctx.Err() != nil:
			return ctx.Err()
		case !errors.Is(err, guest.ErrConnectionLost) && !errors.Is(err, guest.ErrUnavailable):
			return err
		case !began:
			return err
		}
		// The VM sleeps, or is about to end.
		if err := b.AwaitAwake(ctx); err != nil {
			return err
		}
		// A process that has just ended may still look running.
		if err := wait.For(ctx, awakePoll/10); err != nil {
			return err
		}
	}
}
