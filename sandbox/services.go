package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// WaitService waits until a service of a running VM is ready, or ctx ends. This counts as use, so the VM does not
// go to sleep by itself meanwhile. It returns ErrServiceNotReady if the service will not become ready.
func (b *Sandbox) WaitService(ctx context.Context, service string) (records.Service, error) {
	spec, c, err := b.serviceOf(ctx, service)
	if err != nil {
		return records.Service{}, err
	}
	defer c.Close()
	out := records.Service{Service: spec}
	for {
		begun := time.Now()
		g, err := c.WaitService(ctx, service)
		if err != nil {
			return out, err
		}
		setState(&out, g)
		switch {
		case g.Ready:
			return out, nil
		case g.State == guest.ServiceStopped || g.State == guest.ServiceEnded || g.State == guest.ServiceFailed:
			return out, fmt.Errorf("%w: %s of %s has %s: see Sandbox(%q).ServiceLog of %q", control.ErrServiceNotReady, service, b.name, g.State, b.name, service)
		}
		// A guest that answers at once without an end must not be asked in a loop.
		if time.Since(begun) < time.Second {
			if err := wait.For(ctx, time.Second); err != nil {
				return out, fmt.Errorf("waiting for service %s of %s: %w", service, b.name, err)
			}
		}
	}
}

// SetService adds a service to a VM permanently, or replaces the one of that name. A running VM starts it, and
// restarts it if it differs from before; a stopped VM starts it when it boots. If the VM sleeps, the error is
// ErrNotRunning: wake it first. The VM's record has the service before the guest is told.
func (b *Sandbox) SetService(ctx context.Context, spec spec.Service) (records.Service, error) {
	if err := spec.Validate(); err != nil {
		return records.Service{}, err
	}
	live, err := b.changeServices(ctx, "service", spec, func(r *state.Record) error { return r.SetService(spec) })
	if err != nil || !live {
		return records.Service{Service: spec}, err
	}
	return b.StartService(ctx, spec.Name, false)
}

// RemoveService stops a service and removes it from the VM permanently.
func (b *Sandbox) RemoveService(ctx context.Context, service string) error {
	r, err := b.host.State.Get(b.name)
	if err != nil {
		return err
	}
	if state.FindService(r.Spec.Services, service) < 0 {
		return state.NoService(b.name, service)
	}
	if r.Phase == state.Running {
		c, err := b.Agent(ctx)
		if err != nil {
			return err
		}
		_, err = c.StopService(ctx, service, true)
		c.Close()
		if err != nil && !errors.Is(err, guest.ErrNotFound) {
			return err
		}
	}
	_, err = b.changeServices(ctx, "remove-service", service, func(r *state.Record) error { return r.DropService(service) })
	return err
}

// StartService starts a service of a running VM if it does not run; with restart, in any case.
func (b *Sandbox) StartService(ctx context.Context, service string, restart bool) (records.Service, error) {
	return b.order(ctx, service, func(c *guest.Client, spec *spec.Service) (guest.ServiceState, error) {
		return c.SetService(ctx, control.GuestService(spec), true, restart)
	})
}

// StopService stops a service of a running VM until it is started or the VM boots.
func (b *Sandbox) StopService(ctx context.Context, service string) (records.Service, error) {
	return b.order(ctx, service, func(c *guest.Client, _ *spec.Service) (guest.ServiceState, error) {
		return c.StopService(ctx, service, false)
	})
}

// order gives the guest of a running VM an order about a service, and returns the status after it.
func (b *Sandbox) order(ctx context.Context, service string, do func(*guest.Client, *spec.Service) (guest.ServiceState, error)) (records.Service, error) {
	spec, c, err := b.serviceOf(ctx, service)
	if err != nil {
		return records.Service{}, err
	}
	defer c.Close()
	out := records.Service{Service: spec}
	state, err := do(c, &spec)
	if err == nil {
		setState(&out, state)
	}
	return out, err
}

// setState takes over what the guest says of a service.
func setState(s *records.Service, g guest.ServiceState) {
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

// serviceOf returns a service of a running VM, and a client that the caller must close.
func (b *Sandbox) serviceOf(ctx context.Context, service string) (spec.Service, *guest.Client, error) {
	r, err := b.host.State.Get(b.name)
	if err != nil {
		return spec.Service{}, nil, err
	}
	i := state.FindService(r.Spec.Services, service)
	if i < 0 {
		return spec.Service{}, nil, state.NoService(b.name, service)
	}
	c, err := b.Agent(ctx)
	return r.Spec.Services[i], c, err
}

// Services lists the services of a VM in the order of their names. It does not wake a VM that sleeps.
func (b *Sandbox) Services(ctx context.Context) ([]records.Service, error) {
	r, err := b.host.State.Get(b.name)
	if err != nil {
		return nil, err
	}
	out := make([]records.Service, len(r.Spec.Services))
	for i, spec := range r.Spec.Services {
		out[i].Service = spec
		if r.Phase == state.Asleep {
			out[i].State = records.ServiceAsleep
		}
	}
	slices.SortFunc(out, func(a, b records.Service) int { return strings.Compare(a.Name, b.Name) })
	if r.Phase != state.Running || len(out) == 0 {
		return out, nil
	}
	c, err := b.Agent(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	states, err := c.Services(ctx)
	if err != nil {
		return nil, err
	}
	for i := range out {
		out[i].State = records.ServiceUnknown
		for _, g := range states {
			if g.Name == out[i].Name {
				setState(&out[i], g)
			}
		}
	}
	return out, nil
}

// ServiceLog writes the output of a service that its guest has kept to w, and with follow later output until ctx
// ends. A line names how many bytes were dropped before they could be written.
func (b *Sandbox) ServiceLog(ctx context.Context, service string, w io.Writer, follow bool) error {
	_, c, err := b.serviceOf(ctx, service)
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

// changeServices changes the services of a VM. If the VM has a process, it sends it the order, and live is true.
func (b *Sandbox) changeServices(ctx context.Context, order string, in any, change func(*state.Record) error) (live bool, err error) {
	r, err := b.change(ctx, "changing the services of", func() error {
		return control.Do(ctx, b.host.State, b.name, order, in, nil)
	}, func(r *state.Record) error {
		if r.Phase == state.Asleep {
			return fmt.Errorf("%w: %s is asleep, and so are its services: wake it with Sandbox(%q).Wake", ErrNotRunning, b.name, b.name)
		}
		return change(r)
	})
	return err == nil && r.Phase == state.Running, err
}
