package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// guestCheck is what the agent is told of a check.
func guestCheck(c *spec.ServiceCheck) *guest.ServiceCheck {
	if c == nil {
		return nil
	}
	u := &guest.ServiceCheck{
		Argv: c.Exec, Interval: time.Duration(c.IntervalSeconds) * time.Second, Timeout: time.Duration(c.TimeoutSeconds) * time.Second,
		Start: time.Duration(c.StartSeconds) * time.Second, Alive: uint32(c.AliveFailures),
	}
	for kind, address := range map[string]string{guest.CheckTCP: c.TCP, guest.CheckHTTP: c.HTTP, guest.CheckUnix: c.Unix, guest.CheckFile: c.File} {
		if address != "" {
			u.Kind, u.Address = kind, address
		}
	}
	if u.Kind == "" {
		u.Kind = guest.CheckExec
	}
	return u
}

// guestService is what the agent is told.
func guestService(s *spec.Service) guest.Service {
	seconds := func(n int) time.Duration { return time.Duration(n) * time.Second }
	u := guest.Service{
		Name: s.Name, Argv: s.Argv, Env: s.Env, Dir: s.Dir, User: s.User, Restart: s.Restart,
		Backoff: seconds(s.BackoffSeconds), MaxBackoff: seconds(s.MaxBackoffSeconds),
		StopSignal: s.StopSignal, StopTime: seconds(s.StopSeconds), LogBytes: s.LogKiB << 10, Check: guestCheck(s.Check),
	}
	if u.Restart == "" {
		u.Restart = guest.RestartAlways
	}
	switch {
	case s.MaxRestarts == 0:
		u.MaxRestarts = spec.DefaultMaxRestarts
	case s.MaxRestarts > 0:
		u.MaxRestarts = uint32(s.MaxRestarts)
	}
	return u
}

// ServiceStatus is a service of a VM, and how it is.
type ServiceStatus struct {
	spec.Service
	// State is that of guest.ServiceState while the VM runs. "unknown" is one that the guest
	// does not know: start it. Of a VM that does not run it is "asleep", or empty.
	State    string     `json:"state,omitempty"`
	PID      int        `json:"pid,omitempty"`
	Restarts uint64     `json:"restarts"`
	Started  *time.Time `json:"started,omitempty"`
	// ExitCode, as a shell gives it, and Ended are of the last run that has ended.
	ExitCode *int       `json:"exit_code,omitempty"`
	Ended    *time.Time `json:"ended,omitempty"`
	Problem  string     `json:"problem,omitempty"`
	// Ready: it runs, and its check has passed since its start, at ReadyAt. CheckProblem is why the last check has
	// failed, CheckRestarts how often it was ended for that.
	Ready         bool       `json:"ready"`
	ReadyAt       *time.Time `json:"ready_at,omitempty"`
	CheckProblem  string     `json:"check_problem,omitempty"`
	CheckRestarts uint64     `json:"check_restarts,omitempty"`
}

// ErrServiceNotReady: a service has stopped, ended or failed, and is not going to be ready by itself.
var ErrServiceNotReady = errors.New("the service is not ready, and will not be by itself")

// WaitService waits until a service of a running VM is ready, or ctx ends. It is use of the VM, which does not go to
// sleep by itself meanwhile. The error is ErrServiceNotReady when it need not be waited for.
func (s *Store) WaitService(ctx context.Context, name, service string) (ServiceStatus, error) {
	spec, c, err := s.serviceOf(ctx, name, service)
	if err != nil {
		return ServiceStatus{}, err
	}
	defer c.Close()
	out := ServiceStatus{Service: spec}
	for {
		begun := time.Now()
		g, err := c.WaitService(ctx, service)
		if err != nil {
			return out, err
		}
		out.is(g)
		switch {
		case g.Ready:
			return out, nil
		case g.State == guest.ServiceStopped || g.State == guest.ServiceEnded || g.State == guest.ServiceFailed:
			return out, fmt.Errorf("%w: %s of %s has %s: see `drowse service logs %s %s`", ErrServiceNotReady, service, name, g.State, name, service)
		}
		// A guest that answers at once without an end must not be asked in a loop.
		if time.Since(begun) < time.Second {
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
				return out, fmt.Errorf("waiting for service %s of %s: %w", service, name, ctx.Err())
			}
		}
	}
}

// States of services that only the host knows.
const (
	ServiceUnknown = "unknown"
	ServiceAsleep  = "asleep"
)

func (s *ServiceStatus) is(g guest.ServiceState) {
	s.State, s.PID, s.Restarts, s.Problem = g.State, g.PID, g.Restarts, g.Problem
	s.Ready, s.CheckProblem, s.CheckRestarts, s.ReadyAt = g.Ready, g.CheckProblem, g.CheckRestarts, nil
	if !g.ReadyAt.IsZero() {
		s.ReadyAt = &g.ReadyAt
	}
	if !g.Started.IsZero() {
		s.Started = &g.Started
	}
	if g.Exit != nil {
		s.ExitCode, s.Ended = &g.Exit.Code, &g.Ended
	}
}

// SetService gives a VM a service, in the place of one of that name, for good. In a VM that
// runs it is started, anew if it is another than before; one that has stopped starts it when
// it boots. One that sleeps is ErrNotRunning: wake it first. It is in the VM's record before
// the guest is told.
func (s *Store) SetService(ctx context.Context, name string, spec spec.Service) (ServiceStatus, error) {
	if err := spec.Validate(); err != nil {
		return ServiceStatus{}, err
	}
	body, err := json.Marshal(spec)
	if err != nil {
		return ServiceStatus{}, err
	}
	live, err := s.changeServices(ctx, name, http.MethodPut, "/services", body, func(r *state.Record) error { return r.SetService(spec) })
	if err != nil || !live {
		return ServiceStatus{Service: spec}, err
	}
	return s.StartService(ctx, name, spec.Name, false)
}

// RemoveService ends a service and takes it from the VM for good.
func (s *Store) RemoveService(ctx context.Context, name, service string) error {
	r, err := s.Get(name)
	if err != nil {
		return err
	}
	if state.FindService(r.Spec.Services, service) < 0 {
		return state.NoService(name, service)
	}
	if r.Phase == state.Running {
		c, err := s.Agent(ctx, name)
		if err != nil {
			return err
		}
		_, err = c.StopService(ctx, service, true)
		c.Close()
		if err != nil && !errors.Is(err, guest.ErrNotFound) {
			return err
		}
	}
	_, err = s.changeServices(ctx, name, http.MethodDelete, "/services?name="+url.QueryEscape(service), nil, func(r *state.Record) error { return r.DropService(service) })
	return err
}

// StartService starts a service of a running VM if it does not run, or, with restart, in any
// case.
func (s *Store) StartService(ctx context.Context, name, service string, restart bool) (ServiceStatus, error) {
	spec, c, err := s.serviceOf(ctx, name, service)
	if err != nil {
		return ServiceStatus{}, err
	}
	defer c.Close()
	out := ServiceStatus{Service: spec}
	state, err := c.SetService(ctx, guestService(&spec), true, restart)
	if err == nil {
		out.is(state)
	}
	return out, err
}

// StopService stops a service of a running VM, until it is started or the VM boots.
func (s *Store) StopService(ctx context.Context, name, service string) (ServiceStatus, error) {
	spec, c, err := s.serviceOf(ctx, name, service)
	if err != nil {
		return ServiceStatus{}, err
	}
	defer c.Close()
	out := ServiceStatus{Service: spec}
	state, err := c.StopService(ctx, service, false)
	if err == nil {
		out.is(state)
	}
	return out, err
}

// serviceOf returns a service of a running VM, and a client to close.
func (s *Store) serviceOf(ctx context.Context, name, service string) (spec.Service, *guest.Client, error) {
	r, err := s.Get(name)
	if err != nil {
		return spec.Service{}, nil, err
	}
	i := state.FindService(r.Spec.Services, service)
	if i < 0 {
		return spec.Service{}, nil, state.NoService(name, service)
	}
	c, err := s.Agent(ctx, name)
	return r.Spec.Services[i], c, err
}

// Services lists the services of a VM in the order of their names. A VM that sleeps is not
// woken.
func (s *Store) Services(ctx context.Context, name string) ([]ServiceStatus, error) {
	r, err := s.Get(name)
	if err != nil {
		return nil, err
	}
	out := make([]ServiceStatus, len(r.Spec.Services))
	for i, spec := range r.Spec.Services {
		out[i].Service = spec
		if r.Phase == state.Asleep {
			out[i].State = ServiceAsleep
		}
	}
	slices.SortFunc(out, func(a, b ServiceStatus) int { return strings.Compare(a.Name, b.Name) })
	if r.Phase != state.Running || len(out) == 0 {
		return out, nil
	}
	c, err := s.Agent(ctx, name)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	states, err := c.Services(ctx)
	if err != nil {
		return nil, err
	}
	for i := range out {
		out[i].State = ServiceUnknown
		for _, g := range states {
			if g.Name == out[i].Name {
				out[i].is(g)
			}
		}
	}
	return out, nil
}

// ServiceLog writes the output of a service that its guest has kept to w, and with follow what
// comes until ctx ends. What was dropped before it could be written is named by a line.
func (s *Store) ServiceLog(ctx context.Context, name, service string, w io.Writer, follow bool) error {
	_, c, err := s.serviceOf(ctx, name, service)
	if err != nil {
		return err
	}
	defer c.Close()
	next, known := uint64(0), false
	for {
		data, at, end, err := c.ServiceLog(ctx, service, next, follow && known)
		if err != nil {
			return err
		}
		if known && at > next {
			if _, err := fmt.Fprintf(w, "[%d bytes were dropped]\n", at-next); err != nil {
				return err
			}
		}
		if _, err := w.Write(data); err != nil {
			return err
		}
		next, known = at+uint64(len(data)), true
		if next >= end && !follow {
			return nil
		}
		if len(data) == 0 && at < end {
			return fmt.Errorf("reading the log of service %s: %w: an empty part", service, guest.ErrProtocol)
		}
	}
}

// changeServices changes the services in a VM's record: by its process if it runs. live says
// that it does.
func (s *Store) changeServices(ctx context.Context, name, method, path string, body []byte, change func(*state.Record) error) (live bool, err error) {
	for {
		r, err := s.Get(name)
		if err != nil {
			return false, err
		}
		switch r.Phase {
		case state.Running:
			live = true
			err = s.callWith(ctx, name, method, path, body, discard)
		case state.Asleep:
			return false, fmt.Errorf("%w: %s is asleep, and so are its services: wake it with `drowse wake %s`", ErrNotRunning, name, name)
		default:
			live = false
			err = s.changeRecord(name, change)
		}
		if !passing(err) {
			return live, err
		}
		select {
		case <-ctx.Done():
			return false, errors.Join(fmt.Errorf("changing the services of %s: %w", name, ctx.Err()), err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// changeRecord changes the record of a VM without a process.
func (s *Store) changeRecord(name string, change func(*state.Record) error) error {
	l, err := s.Lock(name)
	if err != nil {
		return err
	}
	defer l.Release()
	r, err := s.Load(name)
	if err != nil {
		return err
	}
	if err := change(r); err != nil {
		return err
	}
	return s.Save(r)
}

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
			return nil, fmt.Errorf("reading a service: %w: %w", ErrSpec, err)
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
		if _, err := c.SetService(ctx, guestService(spec), true, false); err != nil {
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
