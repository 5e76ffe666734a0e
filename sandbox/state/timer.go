package state

import (
	"context"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Timer says when a sandbox is woken. It is kept in its Metadata, and carried out by a supervisor, to within a second;
// one that was due while there was none fires once when there is one again.
type Timer struct {
	// At is the next time, by the host's clock; zero is never.
	At time.Time `json:"at,omitzero"`
	// Every is after how many seconds it is woken again, MinTimer to lifetime.MaxSeconds; 0 is once.
	Every int64 `json:"every_seconds,omitempty"`
}

// MinTimer is the shortest time between two wakes by a timer, in seconds.
const MinTimer = 1

func (t Timer) check() error {
	switch y := t.At.Year(); {
	case t.Every < 0 || t.Every > lifetime.MaxSeconds:
		return fmt.Errorf("%w: it is woken every %d s: use %d to %d, or 0 for once", ErrMetadata, t.Every, MinTimer, lifetime.MaxSeconds)
	case t.At.IsZero() && t.Every > 0:
		return fmt.Errorf("%w: it is woken every %d s, and it is not said when first", ErrMetadata, t.Every)
	case !t.At.IsZero() && (y < 1970 || y > 2200):
		return fmt.Errorf("%w: it is woken in the year %d: use one before 2200", ErrMetadata, y)
	}
	return nil
}

// Due says whether it is time.
func (t Timer) Due(now time.Time) bool { return !t.At.IsZero() && !now.Before(t.At) }

// after is the timer once it has fired: what was missed meanwhile is left out.
func (t Timer) after(now time.Time) Timer {
	if t.Every == 0 {
		return Timer{}
	}
	step := time.Duration(t.Every) * time.Second
	if !now.Before(t.At) {
		t.At = t.At.Add((now.Sub(t.At)/step + 1) * step)
	}
	return t
}

// TimerFired sets a sandbox's timer to its next time, and tells that it has fired, and of a problem if there was one.
// It does nothing if the timer is another one by now.
func (s *Store) TimerFired(ctx context.Context, name string, fired Timer, problem error) error {
	ctx = events.WithCause(ctx, events.Timer)
	_, err := s.setMetadata(ctx, name, func(l *Metadata, unreadable error) error {
		if unreadable != nil || !l.Wake.At.Equal(fired.At) || l.Wake.Every != fired.Every {
			return ErrNothingToTell
		}
		l.Wake = l.Wake.after(time.Now())
		return nil
	}, func(r *Record, _, _ Metadata, _ error) {
		e := s.Event(ctx, r, events.TimerFired)
		if problem != nil {
			e.Details.Problem = problem.Error()
		}
		s.Tell(e)
	})
	return nothing(err)
}
