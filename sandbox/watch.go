package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// awakePoll is how often a VM that sleeps is looked at by those who do not wake it.
const awakePoll = 500 * time.Millisecond

// AwaitAwake waits until a VM runs, and does not wake it. It fails with ErrNotRunning if it has ended, and
// with ErrNotFound if there is none.
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
	// Recursive watches what lies below directories as well, on their own file systems, and comes to lie
	// there: at most 8192 directories.
	Recursive bool
	// Use counts as use of the VM: it does not go to sleep by itself while it is watched.
	Use bool
	// Ready, if not nil, is called when all that happens from then on is told, at first and after each wake.
	Ready func()
}

// Watch tells f of changes of files in a VM until ctx ends, f fails, or the VM ends. It goes on through sleeps and
// wakes, which it does not cause: while the VM sleeps nothing happens in it, and what happened just before and
// just after is told when it is awake. The VM must be awake when it begins. What could not be told is told
// as guest.WatchOverflow.
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
		// It sleeps, or is about to end.
		if err := b.AwaitAwake(ctx); err != nil {
			return err
		}
		// A process that has just ended may look as if it ran.
		if err := rest(ctx, awakePoll/10); err != nil {
			return err
		}
	}
}
