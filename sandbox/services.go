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
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

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
	state, err := c.SetService(ctx, control.GuestService(&spec), true, restart)
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
			err = control.CallWith(ctx, s.Store, name, method, path, body, control.Discard)
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
