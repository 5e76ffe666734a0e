package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// changePoll is how often a VM that is between two phases is polled.
const changePoll = 5 * time.Millisecond

// change makes a lasting change to a VM. live has its process do that, if there is one; otherwise stored changes its
// record. If the VM is just falling asleep, waking or ending, change tries again. It returns the previous record.
func (b *Sandbox) change(ctx context.Context, doing string, live func() error, stored func(*state.Record) error) (*state.Record, error) {
	if err := b.host.claim(ctx, b.name); err != nil {
		return nil, err
	}
	for {
		r, err := b.host.State.Get(b.name)
		if err != nil {
			return nil, err
		}
		var refused error
		if r.Phase == state.Running {
			err = live()
		} else {
			err = b.host.State.Change(b.name, func(r *state.Record) error {
				refused = stored(r)
				return refused
			})
		}
		if refused != nil || !passing(err) {
			return r, err
		}
		if werr := wait.For(ctx, changePoll); werr != nil {
			return r, errors.Join(fmt.Errorf("%s %s: %w", doing, b.name, werr), err)
		}
	}
}

// passing reports whether err means that a VM has just gone to sleep, been woken or ended, or is about to. Then
// the caller tries again, if doing so twice does no harm.
func passing(err error) bool {
	for _, e := range []error{ErrNotRunning, ErrRunning, io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
