package process

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// changeServices changes the services in the record, and listens for the guest's reports on them.
func (p *process) changeServices(change func() error) error {
	end, err := p.begin()
	if err != nil {
		return err
	}
	defer end()
	if err := p.in.ListenServices(); err != nil {
		return err
	}
	return p.save(change)
}

// startServices starts the services of a guest that has booted. The VM runs even if one fails.
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

// serviceTrail records the guest's reports on its services in the audit trail. It records only services that the
// VM has, and only within the bounds below, so that a guest cannot push out other actions.
type serviceTrail struct {
	trail *audit.Trail
	known func(name string) bool
	now   func() time.Time

	mu   sync.Mutex // guards what follows
	rate allowance
	lost uint64
}

// serviceEvents in a row are recorded, and then one per serviceEvery.
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
	if !t.rate.take(t.now(), serviceEvents, serviceEvery) {
		t.lost++
		return
	}
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
	// The event has happened, even if it cannot be recorded.
	if p, err := t.trail.Begin(context.Background(), a); err == nil {
		p.End(o)
	}
}

// serviceEvents returns the handler of the guest's reports on services.
func (p *process) serviceEvents() func(guest.ServiceEvent) {
	name := p.r.Spec.Name
	// From the record on disk: a goroutine that waits for the guest may be using p.r.
	known := func(service string) bool {
		r, err := p.store.Load(name)
		return err == nil && state.FindService(r.Spec.Services, service) >= 0
	}
	t := &serviceTrail{trail: audit.Open(p.store.AuditPath(name)), now: time.Now, known: known}
	return t.record
}
