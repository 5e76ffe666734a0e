package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// HostHook is a hook on the host that is a function of the program, beside the executables in hooks.d of the store.
type HostHook = hosthooks.Func

// HostHookFailure is a hook on the host that has not done what it should.
type HostHookFailure = hosthooks.Failure

// WithHostHooks is the store with hooks that are functions of this program, in place of those that it had. They are
// called before the executables in hooks.d, by whichever process does what they are told of: this one for forks,
// expiries and removals that it carries out itself. A VM's own process is told when it is created, sleeps and wakes,
// also by itself: a program that wants these gives its functions to ServeProcessWith as well, and they are called in
// that process.
func (s *Store) WithHostHooks(hooks ...HostHook) *Store {
	return s.withHooks(hooks)
}

// withHooks is a copy of the store with these functions as hooks.
func (s *Store) withHooks(hooks []HostHook) *Store {
	other := *s
	other.hostHooks = slices.Clone(hooks)
	return &other
}

// ErrHostHooks says that hooks on the host stand against a sleep.
var ErrHostHooks = errors.New("hooks on the host have refused")

// HostHooksError is an ErrHostHooks with the hooks that have failed.
type HostHooksError struct{ Failures []HostHookFailure }

// Error is one line.
func (e *HostHooksError) Error() string {
	var all []string
	for i, f := range e.Failures {
		if i == 3 {
			all = append(all, fmt.Sprintf("and %d more", len(e.Failures)-i))
			break
		}
		all = append(all, f.String())
	}
	return fmt.Sprintf("%v: %s: see to them, or use --hooks %s", ErrHostHooks, strings.Join(all, "; "), spec.HooksIgnore)
}

// Unwrap makes it an ErrHostHooks.
func (e *HostHooksError) Unwrap() error { return ErrHostHooks }

// findHostHooks returns the hooks that there are now. With an error these are the functions alone.
func (s *Store) findHostHooks() (hosthooks.Hooks, error) {
	return hosthooks.Find(hosthooks.In(s.dir), s.hostHooks)
}

// announce writes an event, and runs the hooks of the host for it. It waits for them, also if ctx has ended: what they
// are told of has been.
func (s *Store) announce(ctx context.Context, e events.Event) {
	e = s.tell(e)
	for _, failed := range s.hooksAfter(ctx, e, slog.Default()) {
		s.tell(failed)
	}
}

// hooksAfter runs the hooks of the host for what has been. It logs what fails, and returns events of that.
func (s *Store) hooksAfter(ctx context.Context, e events.Event, log *slog.Logger) []events.Event {
	hooks, err := s.findHostHooks()
	failures := hooks.After(context.WithoutCancel(ctx), e)
	if err != nil {
		failures = append(failures, noneRun(e.Type, err))
	}
	return hostHooksFailed(e, failures, log)
}

// noneRun is the failure of all hooks in hooks.d.
func noneRun(t events.Type, err error) HostHookFailure {
	return HostHookFailure{Name: "*", Event: hosthooks.Word(t), Problem: err.Error()}
}

// hostHooksFailed logs failures, and makes events of them: without what the hooks have printed.
func hostHooksFailed(e events.Event, failures []HostHookFailure, log *slog.Logger) (out []events.Event) {
	for _, f := range failures {
		log.Warn("hook on the host", "sandbox", e.Sandbox, "problem", f.String())
		if len(out) < maxHooksTold {
			out = append(out, events.Event{
				Type: events.HostHookFailed, Cause: e.Cause, Sandbox: e.Sandbox, SandboxID: e.SandboxID, Owner: e.Owner, Tags: e.Tags,
				Details: events.Details{Hook: f.Name, Event: f.Event, Problem: f.Problem},
			})
		}
	}
	return out
}

// welcome runs the hooks of the host for the beginning of this process, in the background. p.welcomed has been told
// that it will.
func (p *process) welcome(e events.Event) {
	if hosthooks.Word(e.Type) == "" {
		p.welcomed.Done()
		return
	}
	go func() {
		defer p.welcomed.Done()
		p.tellFailed(p.store.hooksAfter(context.Background(), e, p.log))
	}()
}

func (p *process) tellFailed(failed []events.Event) {
	if p.events == nil {
		return
	}
	for _, e := range failed {
		p.events.put(e)
	}
}

// hostRun are the hooks of the host that were run before a sleep.
type hostRun struct {
	p        *process
	event    events.Event
	started  hosthooks.Hooks
	failures []HostHookFailure
}

// hostBefore runs the hooks of the host before a sleep, after those for the VM's beginning. If they refuse, those that
// were started have been told that it goes on. p.op is held.
func (p *process) hostBefore(ctx context.Context, over spec.HookPolicy) (*hostRun, error) {
	h := &hostRun{p: p}
	policy := p.r.Spec.Hooks.Effective(over)
	if policy == spec.HooksSkip {
		return h, nil
	}
	// These take no longer than hooks may.
	p.welcomed.Wait()
	hooks, err := p.store.findHostHooks()
	if err == nil && hooks.None() {
		return h, nil
	}
	h.event = p.store.event(ctx, p.r, events.Sleeping)
	h.event.Version, h.event.Time = events.Version, time.Now().UTC()
	if err != nil {
		h.failures = append(h.failures, noneRun(h.event.Type, err))
	}
	if err == nil || policy == spec.HooksIgnore {
		var failures []HostHookFailure
		h.started, failures = hooks.Before(ctx, h.event, policy == spec.HooksIgnore)
		h.failures = append(h.failures, failures...)
	}
	if len(h.failures) > 0 && policy != spec.HooksIgnore {
		h.settle(ctx, ErrHostHooks)
		return nil, &HostHooksError{h.failures}
	}
	return h, nil
}

// settle tells the hooks that were started if the sleep has not come about, and why: by a code, since the words may be
// the guest's. It tells of all that have failed, and returns them.
func (h *hostRun) settle(ctx context.Context, err error) []HostHookFailure {
	if err != nil && !h.started.None() {
		e := h.event
		e.Type, e.Time, e.Details.Reason = events.SleepFailed, time.Now().UTC(), whyAwake(err)
		h.failures = append(h.failures, h.started.After(context.WithoutCancel(ctx), e)...)
	}
	h.p.tellFailed(hostHooksFailed(h.event, h.failures, h.p.log))
	return h.failures
}

// whyAwake is the code of why a VM does not sleep.
func whyAwake(err error) string {
	if errors.Is(err, errUsed) {
		return "used"
	}
	if code := ErrorCode(err); code != "" {
		return code
	}
	return "error"
}
