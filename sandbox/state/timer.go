package state

import (
	"context"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// TimerFired sets a sandbox's timer to its next time, and writes the event that it fired, with a problem if there
// was one. It does nothing if the timer has been changed.
func (s *Store) TimerFired(ctx context.Context, name string, fired spec.Timer, problem error) error {
	ctx = events.WithCause(ctx, events.Timer)
	_, err := s.setMetadata(ctx, name, func(l *spec.Metadata, unreadable error) error {
		if unreadable != nil || !l.Wake.At.Equal(fired.At) || l.Wake.Every != fired.Every {
			return ErrNothingToTell
		}
		l.Wake = l.Wake.After(time.Now())
		return nil
	}, func(r *Record, _, _ spec.Metadata, _ error) {
		e := s.Event(ctx, r, events.TimerFired)
		if problem != nil {
			e.Details.Problem = problem.Error()
		}
		s.Tell(e)
	})
	return nothing(err)
}
