package process

import (
	"context"
	"errors"
	"slices"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// tell writes an event of this VM. The caller holds p.op, unless the VM is not yet visible to others.
func (p *process) tell(ctx context.Context, t events.Type, d events.Details) {
	p.tellAs(events.CauseOf(ctx), t, d)
}

func (p *process) tellAs(c events.Cause, t events.Type, d events.Details) { p.tellThen(c, t, d, nil) }

// tellThen is like tellAs and then calls then, if it is not nil, with what was written. then must not block.
func (p *process) tellThen(c events.Cause, t events.Type, d events.Details, then func(events.Event)) {
	if p.events == nil {
		return
	}
	p.events.PutThen(events.Event{
		Type: t, Cause: c, Details: d, Sandbox: p.r.Spec.Name, SandboxID: p.r.ID, Tags: slices.Clone(p.r.Spec.Tags),
	}, then)
}

// tellHooks writes events for hooks in the guest that have failed: their names, but not their output.
func (p *process) tellHooks(ctx context.Context, failures []guest.HookFailure) {
	for _, f := range failures[:min(len(failures), state.MaxHooksTold)] {
		p.tell(ctx, events.HookFailed, events.Details{Hook: f.Name, Event: string(f.Event), Problem: f.Problem})
	}
}

// tellRefusal writes events for the hooks that caused err.
func (p *process) tellRefusal(ctx context.Context, err error) {
	var h *spec.HooksError
	if errors.As(err, &h) {
		p.tellHooks(ctx, h.Failures)
	}
}

// begun returns the event of a VM that is ready. making says that this start creates it.
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
		d.Template, d.Booted = p.r.Template != "", p.r.Booted
		if p.r.Fork != nil {
			d.Parent = p.r.Fork.Parent
		}
		return events.Created, d
	case o.Snapshot != "":
		return events.Woken, d
	}
	return events.Started, d
}
