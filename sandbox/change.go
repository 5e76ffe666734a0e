package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/sandbox/state"
)

// changePoll is how often is looked at a VM that is between two phases.
const changePoll = 5 * time.Millisecond

// change changes a VM for good: its process does that by live if it has one, else stored changes its record. If the VM
// is falling asleep, woken or ending just then, it is tried again. It returns the record from before.
func (b *Sandbox) change(ctx context.Context, doing string, live func() error, stored func(*state.Record) error) (*state.Record, error) {
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
		if werr := rest(ctx, changePoll); werr != nil {
			return r, errors.Join(fmt.Errorf("%s %s: %w", doing, b.name, werr), err)
		}
	}
}

// passing says whether an error means that a VM has gone to sleep, been woken or ended in
// between, or is about to, so that what does no harm twice is to be tried again.
func passing(err error) bool {
	for _, e := range []error{ErrNotRunning, ErrRunning, io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// rest waits for some time, or until ctx ends.
func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
