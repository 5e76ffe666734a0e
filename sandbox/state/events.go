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

// Events is the journal of what becomes of the store's VMs. Each is written when it has been done, by the process that
// has done it. One that cannot be written is logged, and is in nobody's way.
func (s *Store) Events() *events.Journal {
	return events.Open(filepath.Join(s.dir, "events"), events.Options{})
}

// Event begins one of a VM.
func (s *Store) Event(ctx context.Context, r *Record, t events.Type) events.Event {
	e := events.Event{Type: t, Cause: events.CauseOf(ctx)}
	s.about(&e, r)
	return e
}

// about says whose event it is. What an ephemeral VM was for is not to be found when it is gone.
func (s *Store) about(e *events.Event, r *Record) {
	e.Sandbox, e.SandboxID, e.Tags = r.Spec.Name, r.ID, slices.Clone(r.Spec.Tags)
	s.whose(e)
}

// whose adds what the metadata says.
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

// maxEventsWaiting is how many events of the process of a VM wait to be written.
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

// toWrite is an event with what is called, if not nil, when it is written, or cannot be.
type toWrite struct {
	events.Event
	then func(events.Event)
}

// NewEventWriter begins one, which is to be closed.
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

// Close waits until all is written. What is told from then on is not.
func (t *EventWriter) Close() {
	t.mu.Lock()
	t.closed = true
	close(t.in)
	t.mu.Unlock()
	<-t.done
}

// Put has an event written and hooks of the host called.
func (t *EventWriter) Put(e events.Event) { t.PutThen(e, nil) }

// PutThen is Put that calls then, unless that is nil, when the event is written.
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

// MaxHooksTold is of how many failed hooks of one event of the machine there are events.
const MaxHooksTold = 8
