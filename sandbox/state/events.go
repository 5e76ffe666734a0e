package state

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Events returns the journal of events of the store's VMs. The process that has done an action writes its event
// afterwards. An event that cannot be written is logged and blocks nothing.
func (s *Store) Events() *events.Journal {
	return events.Open(filepath.Join(s.dir, "events"), events.Options{})
}

// Event returns a new event of a VM.
func (s *Store) Event(ctx context.Context, r *Record, t events.Type) events.Event {
	e := events.Event{Type: t, Cause: events.CauseOf(ctx)}
	s.about(&e, r)
	return e
}

// about adds whose event it is. The purpose of an ephemeral VM must not be found after it is gone.
func (s *Store) about(e *events.Event, r *Record) {
	e.Sandbox, e.SandboxID, e.Tags = r.Spec.Name, r.ID, slices.Clone(r.Spec.Tags)
	s.whose(e)
}

// whose adds data from the metadata.
func (s *Store) whose(e *events.Event) {
	l, err := s.Metadata(e.Sandbox)
	if err == nil && l.Class == lifetime.Ephemeral {
		e.Tags = nil
		return
	}
	e.Owner = l.Owner
	e.Tags = slices.Compact(slices.Sorted(slices.Values(append(e.Tags, l.Tags...))))
}

// Tell writes an event, and returns it as it was written.
func (s *Store) Tell(e events.Event) events.Event {
	e, err := s.Events().Append(e)
	if err != nil {
		slog.Warn("an event is not in the journal", "type", string(e.Type), "sandbox", e.Sandbox, "error", err)
	}
	return e
}

// maxEventsWaiting is how many events of a VM's process may wait to be written.
const maxEventsWaiting = 256

// EventWriter writes the events of a VM's process in their order, in the background.
type EventWriter struct {
	store *Store
	log   *slog.Logger
	in    chan toWrite
	done  chan struct{}

	mu     sync.Mutex // guards closed, and in against being closed
	closed bool
}

// toWrite is an event. then, if not nil, is called when the event is written, or cannot be.
type toWrite struct {
	events.Event
	then func(events.Event)
}

// NewEventWriter starts an EventWriter, which the caller must close.
func (s *Store) NewEventWriter(log *slog.Logger) *EventWriter {
	t := &EventWriter{store: s, log: log, in: make(chan toWrite, maxEventsWaiting), done: make(chan struct{})}
	go func() {
		defer close(t.done)
		j := s.Events()
		for e := range t.in {
			s.whose(&e.Event)
			written, err := j.Append(e.Event)
			if err != nil {
				t.log.Warn("an event is not in the journal", "type", string(e.Type), "error", err)
			}
			if e.then != nil {
				e.then(written)
			}
		}
	}()
	return t
}

// Close waits until all events are written. It discards later ones.
func (t *EventWriter) Close() {
	t.mu.Lock()
	t.closed = true
	close(t.in)
	t.mu.Unlock()
	<-t.done
}

// Put writes an event, in the background.
func (t *EventWriter) Put(e events.Event) { t.PutThen(e, nil) }

// PutThen is Put that then calls then, unless that is nil, when the event is written.
func (t *EventWriter) PutThen(e events.Event, then func(events.Event)) {
	e.Time = time.Now().UTC()
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		select {
		case t.in <- toWrite{e, then}:
			return
		default:
			t.log.Warn("an event is not in the journal: too many wait to be written", "type", string(e.Type))
		}
	}
	if then != nil {
		then(e)
	}
}

// MaxHooksTold is the maximum number of failed hooks that get events for one event of the machine.
const MaxHooksTold = 8
