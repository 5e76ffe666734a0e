package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Events is the journal of what becomes of the store's VMs. Each is written when it has been done, by the process that
// has done it. One that cannot be written is logged, and is in nobody's way.
func (s *Store) Events() *events.Journal {
	return events.Open(filepath.Join(s.dir, "events"), events.Options{})
}

// event begins one of a VM.
func (s *Store) event(ctx context.Context, r *Record, t events.Type) events.Event {
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

// tell writes an event, and returns it as it was written.
func (s *Store) tell(e events.Event) events.Event {
	e, err := s.Events().Append(e)
	if err != nil {
		slog.Warn("an event is not in the journal", "type", string(e.Type), "sandbox", e.Sandbox, "error", err)
	}
	return e
}

// causeHeader tells the process of a VM on whose behalf it is asked for something.
const causeHeader = "Drowse-Cause"

// asked is the context for what a request asks for, which goes on if the one who asked goes away.
func asked(r *http.Request) context.Context {
	ctx := context.WithoutCancel(r.Context())
	if c := events.Cause(r.Header.Get(causeHeader)); c.Check() == nil {
		ctx = events.WithCause(ctx, c)
	}
	return ctx
}

// maxEventsWaiting is how many events of the process of a VM wait to be written.
const maxEventsWaiting = 256

// eventWriter writes the events of a VM's process in their order, in the background.
type eventWriter struct {
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

func (s *Store) newEventWriter(log *slog.Logger) *eventWriter {
	t := &eventWriter{store: s, log: log, in: make(chan toWrite, maxEventsWaiting), done: make(chan struct{})}
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

// close waits until all is written. What is told from then on is not.
func (t *eventWriter) close() {
	t.mu.Lock()
	t.closed = true
	close(t.in)
	t.mu.Unlock()
	<-t.done
}

// tell has an event of this VM written. p.op is held, or the VM is not there for others yet.
func (p *process) tell(ctx context.Context, t events.Type, d events.Details) {
	p.tellAs(events.CauseOf(ctx), t, d)
}

func (p *process) tellAs(c events.Cause, t events.Type, d events.Details) { p.tellThen(c, t, d, nil) }

// tellThen is tellAs that calls then, if it is not nil, with what was written. then must not block.
func (p *process) tellThen(c events.Cause, t events.Type, d events.Details, then func(events.Event)) {
	if p.events == nil {
		return
	}
	p.events.putThen(events.Event{
		Type: t, Cause: c, Details: d, Sandbox: p.r.Spec.Name, SandboxID: p.r.ID, Tags: slices.Clone(p.r.Spec.Tags),
	}, then)
}

func (t *eventWriter) put(e events.Event) { t.putThen(e, nil) }

func (t *eventWriter) putThen(e events.Event, then func(events.Event)) {
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

// maxHooksTold is of how many failed hooks of one event of the machine there are events.
const maxHooksTold = 8

// tellHooks tells of hooks in the guest that have failed: their names, and not what they have printed.
func (p *process) tellHooks(ctx context.Context, failures []guest.HookFailure) {
	for _, f := range failures[:min(len(failures), maxHooksTold)] {
		p.tell(ctx, events.HookFailed, events.Details{Hook: f.Name, Event: string(f.Event), Problem: f.Problem})
	}
}

// tellRefusal tells of the hooks that an error is of.
func (p *process) tellRefusal(ctx context.Context, err error) {
	var h *spec.HooksError
	if errors.As(err, &h) {
		p.tellHooks(ctx, h.Failures)
	}
}

// begun is the event of a VM that is there. making says that it was not before.
func (p *process) begun(making bool, o ServeOptions) (events.Type, events.Details) {
	rep := p.report()
	d := events.Details{Milliseconds: rep.Stages["boot"]}
	if o.Snapshot != "" || o.Fork != nil {
		d.Milliseconds, d.Snapshot = rep.Stages["resume_ready"], o.Snapshot
	}
	if o.Fork != nil {
		d.Snapshot = p.r.Parent
	}
	switch {
	case making:
		if p.r.Fork != nil {
			d.Parent = p.r.Fork.Parent
		}
		return events.Created, d
	case o.Snapshot != "":
		return events.Woken, d
	}
	return events.Started, d
}
