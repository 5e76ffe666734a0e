package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
)

// HookPolicy says what hooks in the guest mean for what they are run before.
type HookPolicy string

// The policies. The zero value is what the VM's Spec says, and there HooksRequire.
const (
	// HooksRequire: a hook that fails or is late refuses it, and so does a guest
	// whose agent does not answer, which could not be woken either.
	HooksRequire HookPolicy = "require"
	// HooksIgnore: hooks are run, and what fails is reported.
	HooksIgnore HookPolicy = "ignore"
	// HooksSkip: the guest is not asked.
	HooksSkip HookPolicy = "skip"
)

func (p HookPolicy) check() error {
	switch p {
	case "", HooksRequire, HooksIgnore, HooksSkip:
		return nil
	}
	return fmt.Errorf("%w: hooks %q: use %q, %q or %q", ErrSpec, string(p), HooksRequire, HooksIgnore, HooksSkip)
}

// HookSpec says how hooks in the guest (executables in /etc/drowse/hooks.d) are run.
type HookSpec struct {
	Policy HookPolicy `json:"policy,omitempty"`
	// TimeoutSeconds is the time for one hook, and AllSeconds for all of one event
	// together: 1 to 300. Defaults: 10 and 30.
	TimeoutSeconds int `json:"timeout_seconds,omitempty"`
	AllSeconds     int `json:"all_seconds,omitempty"`
}

// Defaults and limit of a HookSpec.
const (
	DefaultHookSeconds = 10
	DefaultAllSeconds  = 30
	MaxHookSeconds     = 300
)

func (h HookSpec) check() error {
	for _, n := range []int{h.TimeoutSeconds, h.AllSeconds} {
		if n < 0 || n > MaxHookSeconds {
			return fmt.Errorf("%w: %d s for hooks: use 1 to %d", ErrSpec, n, MaxHookSeconds)
		}
	}
	return h.Policy.check()
}

// limits are what the guest's agent is told. The record is left without defaults,
// so that it stays one that needs no hooks to be understood.
func (h HookSpec) limits(p HookPolicy) guest.HookLimits {
	seconds := func(n, d int) time.Duration {
		if n == 0 {
			n = d
		}
		return time.Duration(n) * time.Second
	}
	return guest.HookLimits{
		Each: seconds(h.TimeoutSeconds, DefaultHookSeconds), All: seconds(h.AllSeconds, DefaultAllSeconds),
		IgnoreFailures: p == HooksIgnore,
	}
}

// policy is what holds when over was asked for.
func (h HookSpec) policy(over HookPolicy) HookPolicy {
	switch {
	case over != "":
		return over
	case h.Policy != "":
		return h.Policy
	}
	return HooksRequire
}

// ErrHooks says that hooks in the guest stand against a sleep or a snapshot.
var ErrHooks = errors.New("hooks in the guest have refused")

// HooksError is an ErrHooks with what the hooks said.
type HooksError struct{ Failures []guest.HookFailure }

// Error is one line.
func (e *HooksError) Error() string {
	var b strings.Builder
	for i, f := range e.Failures {
		if i == 3 {
			fmt.Fprintf(&b, "; and %d more", len(e.Failures)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(f.String())
	}
	return fmt.Sprintf("%v: %s: see to them in the guest, or use --hooks %s", ErrHooks, b.String(), HooksIgnore)
}

// Unwrap makes it an ErrHooks.
func (e *HooksError) Unwrap() error { return ErrHooks }

// hookRun are the hooks that have been run before something, and are due their
// counterpart.
type hookRun struct {
	in       *Instance
	limits   guest.HookLimits
	failures []guest.HookFailure
	due      bool
	once     sync.Once
}

// listenHooks lets the guest say when it has hooks, so that those without are not asked
// before each sleep.
func (in *Instance) listenHooks() error {
	l, err := listenUnix(guest.HooksPath(in.parts.Socket))
	if err != nil {
		return fmt.Errorf("listening for hooks of the guest: %w", err)
	}
	in.closers = append(in.closers, l)
	go guest.ServeHooks(l, in.hooks.Store)
	return nil
}

// runHooks runs the guest's hooks for one event.
func (in *Instance) runHooks(ctx context.Context, event guest.HookEvent, l guest.HookLimits) (guest.Hooked, error) {
	ctx, cancel := in.whileRunning(ctx)
	defer cancel()
	c, err := in.Agent(ctx)
	if err != nil {
		return guest.Hooked{}, in.explain(ctx, err)
	}
	// Before the guest is paused, so that no connection is in what is saved of it.
	defer c.Close()
	res, err := c.Hooks(ctx, event, l)
	if err != nil {
		return res, in.explain(ctx, err)
	}
	return res, nil
}

// before runs the hooks for a sleep or a snapshot. If they refuse, they have been told
// to go on.
func (in *Instance) before(ctx context.Context, event guest.HookEvent, over HookPolicy) (*hookRun, error) {
	spec := in.parts.Spec.Hooks
	policy := spec.policy(over)
	h := &hookRun{in: in, limits: spec.limits(policy)}
	if policy == HooksSkip || !in.hooks.Load() {
		return h, nil
	}
	res, err := in.runHooks(ctx, event, h.limits)
	h.failures, h.due = res.Failures, err != nil || res.Ran > 0
	switch {
	case err != nil && policy == HooksIgnore:
		h.failures = append(h.failures, noAnswer(event, err))
	case err != nil:
		// It may have run them all the same. Then it is told to go on, if it takes
		// that; otherwise its next sleep begins with it.
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), lateWake)
		defer cancel()
		in.afterHooks(late, guest.HookWake)
		return nil, fmt.Errorf("%w: the agent in the guest does not answer: %w: use --hooks %s to do without", ErrHooks, err, HooksSkip)
	case res.Refused && policy != HooksIgnore:
		return nil, &HooksError{h.failures}
	}
	return h, nil
}

// lateWake is how long a guest that has not answered is tried again.
const lateWake = 10 * time.Second

// noAnswer is the failure of all hooks of an event.
func noAnswer(event guest.HookEvent, err error) guest.HookFailure {
	return guest.HookFailure{Name: "*", Event: event, Problem: err.Error()}
}

// after tells the hooks that the machine goes on, once. It waits for them.
func (h *hookRun) after(ctx context.Context) {
	if h == nil || !h.due {
		return
	}
	h.once.Do(func() { h.failures = append(h.failures, h.in.afterHooks(ctx, guest.HookWake)...) })
}

// afterHooks runs the counterparts. What fails does not undo what has been done.
func (in *Instance) afterHooks(ctx context.Context, event guest.HookEvent) []guest.HookFailure {
	res, err := in.runHooks(ctx, event, in.parts.Spec.Hooks.limits(HooksIgnore))
	if err != nil {
		res.Failures = append(res.Failures, noAnswer(event, err))
	}
	for _, f := range res.Failures {
		in.log.Warn("hook in the guest", "problem", f.String())
	}
	return res.Failures
}
