package process

import (
	"context"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// welcome runs the host's hooks for the start of this process, in the background. The caller has already added it
// to p.welcomed.
func (p *process) welcome(e events.Event) {
	if hosthooks.Word(e.Type) == "" {
		p.welcomed.Done()
		return
	}
	go func() {
		defer p.welcomed.Done()
		p.tellFailed(p.store.HooksAfter(context.Background(), e, p.log))
	}()
}

func (p *process) tellFailed(failed []events.Event) {
	if p.events == nil {
		return
	}
	for _, e := range failed {
		p.events.Put(e)
	}
}

// hostRun are the host's hooks that ran before a sleep.
type hostRun struct {
	p        *process
	event    events.Event
	started  hosthooks.Hooks
	failures []report.HookFailure
}

// hostBefore runs the host's hooks before a sleep, after those for the VM's start. If they refuse, hostBefore
// tells those that were started that the VM runs on. p.op must be held.
func (p *process) hostBefore(ctx context.Context, over spec.HookPolicy) (*hostRun, error) {
	h := &hostRun{p: p}
	policy := p.r.Spec.Hooks.Effective(over)
	if policy == spec.HooksSkip {
		return h, nil
	}
	// The limits of hooks bound this wait.
	p.welcomed.Wait()
	hooks, err := p.store.FindHostHooks()
	if err == nil && hooks.None() {
		return h, nil
	}
	h.event = p.store.Event(ctx, p.r, events.Sleeping)
	h.event.Version, h.event.Time = events.Version, time.Now().UTC()
	if err != nil {
		h.failures = append(h.failures, state.NoneRun(h.event.Type, err))
	}
	if err == nil || policy == spec.HooksIgnore {
		var failures []report.HookFailure
		h.started, failures = hooks.Before(ctx, h.event, policy == spec.HooksIgnore)
		h.failures = append(h.failures, failures...)
	}
	if len(h.failures) > 0 && policy != spec.HooksIgnore {
		h.settle(ctx, spec.ErrHostHooks)
		return nil, &spec.HostHooksError{Failures: h.failures}
	}
	return h, nil
}

// settle tells the started hooks if the sleep has failed, and why: by a code, since the error's text may come from
// the guest. It reports all hooks that have failed, and returns them.
func (h *hostRun) settle(ctx context.Context, err error) []report.HookFailure {
	if err != nil && !h.started.None() {
		e := h.event
		e.Type, e.Time, e.Details.Reason = events.SleepFailed, time.Now().UTC(), whyAwake(err)
		h.failures = append(h.failures, h.started.After(context.WithoutCancel(ctx), e)...)
	}
	h.p.tellFailed(state.HostHooksFailed(h.event, h.failures, h.p.log))
	return h.failures
}

// whyAwake returns the code for the reason why a VM does not sleep.
func whyAwake(err error) string {
	if errors.Is(err, errUsed) {
		return "used"
	}
	if code := control.ErrorCode(err); code != "" {
		return code
	}
	return "error"
}
