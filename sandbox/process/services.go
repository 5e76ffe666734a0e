package process

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// The rest is in the VM's process.

func (p *process) handleServices(handle func(string, func(*http.Request) (any, error), func())) {
	change := func(f func(*state.Record) error) (any, error) {
		p.op.Lock()
		defer p.op.Unlock()
		if err := p.alive(); err != nil {
			return nil, err
		}
		defer p.in.KeepRunning()()
		if err := p.in.ListenServices(); err != nil {
			return nil, err
		}
		before := p.r.Spec.Services
		err := f(p.r)
		if err == nil {
			err = p.store.Save(p.r)
		}
		if err != nil {
			p.r.Spec.Services = before
		}
		return struct{}{}, err
	}
	handle("PUT /services", func(r *http.Request) (any, error) {
		var want spec.Service
		d := json.NewDecoder(io.LimitReader(r.Body, 4*spec.MaxServicesBytes))
		d.DisallowUnknownFields()
		if err := d.Decode(&want); err != nil {
			return nil, fmt.Errorf("reading a service: %w: %w", spec.ErrInvalid, err)
		}
		return change(func(r *state.Record) error { return r.SetService(want) })
	}, nil)
	handle("DELETE /services", func(r *http.Request) (any, error) {
		name := r.URL.Query().Get("name")
		return change(func(r *state.Record) error { return r.DropService(name) })
	}, nil)
}

// startServices starts the services of a guest that has booted. What fails does not keep the
// VM from running.
func (p *process) startServices(ctx context.Context) {
	ctx, stop := p.in.WhileRunning(ctx)
	defer stop()
	c, err := p.in.Agent(ctx)
	if err != nil {
		p.log.Error("services could not be started", "error", err)
		return
	}
	defer c.Close()
	for i := range p.r.Spec.Services {
		spec := &p.r.Spec.Services[i]
		if _, err := c.SetService(ctx, control.GuestService(spec), true, false); err != nil {
			p.log.Error("a service could not be started", "service", spec.Name, "error", err)
		}
	}
}

// serviceTrail puts what a guest says of its services into the audit trail: of services that
// the VM has, and no more than the bounds below, so that a guest cannot push out what others
// have done.
type serviceTrail struct {
	trail *audit.Trail
	known func(name string) bool
	now   func() time.Time

	mu    sync.Mutex // guards what follows
	left  int
	since time.Time
	lost  uint64
}

// Events in a row that are recorded, and how long it takes until one more is.
const (
	serviceEvents = 64
	serviceEvery  = 10 * time.Second
)

func (t *serviceTrail) record(e guest.ServiceEvent) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.known(e.Name) {
		return
	}
	t.lost += min(e.Lost, 1<<32)
	now := t.now()
	if t.since.IsZero() {
		t.left, t.since = serviceEvents, now
	}
	if n := int(min(now.Sub(t.since)/serviceEvery, serviceEvents)); n > 0 {
		t.left, t.since = min(t.left+n, serviceEvents), now
	}
	if t.left == 0 {
		t.lost++
		return
	}
	t.left--
	a := audit.Action{Kind: audit.KindServiceExit, Process: e.Name}
	o := audit.Outcome{Error: e.Problem}
	switch e.Event {
	case guest.EventStarted, guest.EventFailed:
		a.Kind = audit.KindServiceStart
	case guest.EventReady:
		a.Kind = audit.KindServiceReady
	case guest.EventUnhealthy:
		a.Kind = audit.KindServiceUnhealthy
	case guest.EventEnded:
		o.Exit, o.ExitSignal = &e.Exit, e.Signal
	}
	if t.lost > 0 {
		o.Error = strings.TrimSpace(fmt.Sprintf("%s (%d events before this one are not recorded)", o.Error, t.lost))
		t.lost = 0
	}
	// What cannot be recorded has been done all the same.
	if p, err := t.trail.Begin(context.Background(), a); err == nil {
		p.End(o)
	}
}

// serviceEvents is what is done with what the guest says of services.
func (p *process) serviceEvents() func(guest.ServiceEvent) {
	name := p.r.Spec.Name
	// As the record is on disk: p.r may be in use by what waits for the guest.
	known := func(service string) bool {
		r, err := p.store.Load(name)
		return err == nil && state.FindService(r.Spec.Services, service) >= 0
	}
	t := &serviceTrail{trail: audit.Open(p.store.AuditPath(name)), now: time.Now, known: known}
	return t.record
}
