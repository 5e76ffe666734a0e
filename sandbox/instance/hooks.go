package instance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// HookLimits returns the limits for the guest's agent, with defaults filled in. The record itself keeps no
// defaults, so that a reader without hooks still understands it.
func HookLimits(h spec.Hooks, p spec.HookPolicy) guest.HookLimits {
	seconds := func(n, d int) time.Duration {
		if n == 0 {
			n = d
		}
		return time.Duration(n) * time.Second
	}
	return guest.HookLimits{
		Each: seconds(h.TimeoutSeconds, spec.DefaultHookSeconds), All: seconds(h.AllSeconds, spec.DefaultAllSeconds),
		IgnoreFailures: p == spec.HooksIgnore,
	}
}

// hookRun are hooks that ran before something, and whose counterparts must run after it.
type hookRun struct {
	in       *Instance
	limits   guest.HookLimits
	failures []guest.HookFailure
	due      bool
	once     sync.Once
}

// listenHooks lets the guest report that it has hooks. A guest without hooks is then not asked before each sleep. The
// device ends the listener.
func (in *Instance) listenHooks() error {
	l, err := in.vsock.Listen(guest.HooksPort)
	if err != nil {
		return fmt.Errorf("listening for hooks of the guest: %w", err)
	}
	go guest.ServeHooks(l, in.hooks.Store)
	return nil
}

// runHooks runs the guest's hooks for one event.
func (in *Instance) runHooks(ctx context.Context, event guest.HookEvent, l guest.HookLimits) (res guest.Hooked, err error) {
	err = in.ask(ctx, func(ctx context.Context, c *guest.Client) (err error) {
		res, err = c.Hooks(ctx, event, l)
		return err
	})
	return res, err
}

// RunHooksBefore runs the hooks for a sleep or a snapshot. If they refuse, the agent has already told them to go on.
func (in *Instance) RunHooksBefore(ctx context.Context, event guest.HookEvent, over spec.HookPolicy) (*hookRun, error) {
	want := in.parts.Spec.Hooks
	policy := want.Effective(over)
	h := &hookRun{in: in, limits: HookLimits(want, policy)}
	if policy == spec.HooksSkip || !in.hooks.Load() {
		return h, nil
	}
	res, err := in.runHooks(ctx, event, h.limits)
	h.failures, h.due = res.Failures, err != nil || res.Ran > 0
	switch {
	case err != nil && policy == spec.HooksIgnore:
		h.failures = append(h.failures, noAnswer(event, err))
	case err != nil:
		// The guest may have run them nevertheless. If it answers now, it runs their counterparts; otherwise it
		// does so at the start of its next sleep.
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lateWake)
		defer cancel()
		in.afterHooks(late, guest.HookWake)
		return nil, fmt.Errorf("%w: the agent in the guest does not answer: %w: use --hooks %s to do without", spec.ErrHooks, err, spec.HooksSkip)
	case res.Refused && policy != spec.HooksIgnore:
		return nil, &spec.HooksError{Failures: h.failures}
	}
	return h, nil
}

// lateWake is how long a guest that has not answered gets for another try.
const lateWake = 10 * time.Second

// noAnswer returns the failure of all hooks of an event.
func noAnswer(event guest.HookEvent, err error) guest.HookFailure {
	return guest.HookFailure{Name: "*", Event: event, Problem: err.Error()}
}

// After runs the counterparts of the hooks, once, and waits for them.
func (h *hookRun) After(ctx context.Context) {
	if h == nil || !h.due {
		return
	}
	h.once.Do(func() { h.failures = append(h.failures, h.in.afterHooks(ctx, guest.HookWake)...) })
}

// afterHooks runs the hooks' counterparts. A failure does not undo what the capture has done.
func (in *Instance) afterHooks(ctx context.Context, event guest.HookEvent) []guest.HookFailure {
	res, err := in.runHooks(ctx, event, HookLimits(in.parts.Spec.Hooks, spec.HooksIgnore))
	if err != nil {
		res.Failures = append(res.Failures, noAnswer(event, err))
	}
	for _, f := range res.Failures {
		in.log.Warn("hook in the guest", "problem", f.String())
	}
	return res.Failures
}

// Failed returns the failures of the hooks.
func (h *hookRun) Failed() []guest.HookFailure { return h.failures }

// ListenServices lets the guest report the state of its services. A VM without services does not listen. A second call
// does nothing.
func (in *Instance) ListenServices() error {
	if in.parts.ServiceEvent == nil {
		return nil
	}
	l, err := in.vsock.Listen(guest.ServicesPort)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listening for services of the guest: %w", err)
	}
	go guest.ServeServices(l, in.parts.ServiceEvent)
	return nil
}
