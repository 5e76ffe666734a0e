package process

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// shedding is what a VM discards before it sleeps. It is nil for a VM that persists completely.
type shedding struct {
	p      *process
	spec   lifetime.Persist
	ignore bool
	out    spec.Persisted
}

// shed promotes and drops what the metadata names. If it fails, it has dropped nothing that was not promoted.
func (p *process) shed(ctx context.Context, over spec.HookPolicy) (*shedding, error) {
	name := p.r.Spec.Name
	l, err := p.store.Metadata(name)
	if err != nil {
		// This does not block the sleep: only what the metadata names is dropped.
		p.log.Warn("all of the VM persists over its sleep, since its metadata cannot be read", "error", err)
		return nil, nil
	}
	if l.Persist.Empty() {
		return nil, nil
	}
	policy := p.r.Spec.Hooks.Effective(over)
	sh := &shedding{p: p, spec: l.Persist, ignore: policy == spec.HooksIgnore}
	if policy == spec.HooksSkip || len(sh.spec.Drop)+len(sh.spec.Promote) == 0 && sh.within() == nil {
		return sh, nil
	}
	ctx, cancel := p.in.WhileRunning(ctx)
	defer cancel()
	if err := sh.ask(ctx); err != nil {
		p.tellShed(ctx, sh, err)
		return sh, fmt.Errorf("%w: or use --hooks %s to have it sleep all the same, with what is not promoted not dropped either", p.in.Explain(ctx, err), spec.HooksIgnore)
	}
	p.tellShed(ctx, sh, nil)
	return sh, nil
}

// ask has the guest do its part.
func (sh *shedding) ask(ctx context.Context) error {
	if err := sh.p.store.EnsureAudit(sh.p.r.Spec.Name); err != nil {
		return fmt.Errorf("%w: %w", spec.ErrPromote, err)
	}
	c, err := sh.p.in.Agent(ctx)
	if err != nil {
		switch {
		case len(sh.spec.Promote) > 0:
			return sh.failed(fmt.Errorf("%w: %w", spec.ErrPromote, err))
		case len(sh.spec.Drop) > 0:
			return sh.failed(fmt.Errorf("%w: %w", spec.ErrDrop, err))
		}
		return nil // the limit does not need the agent
	}
	// Close it before the guest is paused, so that the saved state has no connection.
	defer c.Close()
	copies, seen, err := sh.p.promote(ctx, c, sh.spec)
	sh.out.Promoted = copies
	drops := sh.spec.Drop
	if err != nil {
		if err := sh.failed(err); err != nil {
			return err
		}
		// What was not promoted stays.
		drops = slices.DeleteFunc(slices.Clone(drops), sh.spec.Promoted)
	}
	if err := sh.drop(ctx, c, drops, seen); err != nil {
		return sh.failed(err)
	}
	return nil
}

// promote is control.Promote within the disk quota. p.op must be held.
func (p *process) promote(ctx context.Context, c *guest.Client, persist lifetime.Persist) (copies []spec.Promoted, seen map[string]guest.Seen, err error) {
	room, settle, err := p.beginPromotion(ctx, persist)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", spec.ErrPromote, err)
	}
	copies, seen, err = control.Promote(ctx, c, p.r.Spec.Name, persist, room)
	if errors.Is(err, guest.ErrLimit) && p.quota.limit > 0 {
		err = fmt.Errorf("%w: %w", err, p.overQuota())
	}
	settle(ctx, copies, err)
	return copies, seen, err
}

// promoteNow implements Promote in the VM's process, which knows the room that its disk quota has left.
func (p *process) promoteNow(ctx context.Context) ([]spec.Promoted, error) {
	end, err := p.begin()
	if err != nil {
		return nil, err
	}
	defer end()
	l, err := p.store.Metadata(p.r.Spec.Name)
	if err != nil {
		return nil, err
	}
	if err := p.store.EnsureAudit(p.r.Spec.Name); err != nil {
		return nil, err
	}
	c, err := p.in.Agent(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	copies, _, err := p.promote(ctx, c, l.Persist)
	for _, m := range copies {
		p.tell(ctx, events.Promoted, control.PromotedDetails(m))
	}
	return copies, err
}

// failed records err and returns nil if hooks' failures are ignored; otherwise it returns err.
func (sh *shedding) failed(err error) error {
	if !sh.ignore {
		return err
	}
	sh.out.Problems = append(sh.out.Problems, err.Error())
	return nil
}

// drop empties directories, and has the guest trim what they used on the disk.
func (sh *shedding) drop(ctx context.Context, c *guest.Client, drops []string, seen map[string]guest.Seen) error {
	var paths []guest.DropPath
	for _, d := range drops {
		p := guest.DropPath{Path: d}
		if was, ok := seen[d]; ok {
			p.Seen = &was
		}
		paths = append(paths, p)
	}
	var done []guest.Dropped
	var err error
	if len(paths) > 0 {
		done, err = c.Drop(ctx, paths, control.DropTime, false)
	}
	freed := uint64(0)
	var problems []string
	for i, d := range done {
		freed += min(d.Bytes, control.TrimWorth)
		switch d.State {
		case guest.DropDirectory, guest.DropReplaced:
			sh.out.Dropped = append(sh.out.Dropped, spec.Dropped{Path: drops[i], Entries: d.Entries, Bytes: d.Bytes, Kept: d.Kept, Mounts: d.Mounts})
		case guest.DropAbsent:
		default:
			problems = append(problems, drops[i]+" is no directory, or a symbolic link leads to it")
		}
		if d.Problem != "" {
			problems = append(problems, d.Problem)
		}
	}
	if err != nil {
		return fmt.Errorf("%w: %w", spec.ErrDrop, err)
	}
	if len(problems) > 0 {
		return fmt.Errorf("%w: %s: see to it in the guest, or change what is dropped: Fleet.Update of %q with Persist.Drop", spec.ErrDrop, strings.Join(problems, "; "), sh.p.r.Spec.Name)
	}
	if freed < control.TrimWorth && sh.within() == nil {
		return nil
	}
	if _, err := c.Drop(ctx, nil, control.TrimTime, true); err != nil {
		// Data that is not trimmed is stored and counts.
		sh.p.log.Warn("the guest has not written out and trimmed its disk", "error", err)
	}
	return nil
}

// within returns nil if the disk has no more data than may persist.
func (sh *shedding) within() error {
	if sh.spec.MaxBytes == 0 {
		return nil
	}
	sh.out.DiskBytes = sh.p.in.Disk().Data()
	if sh.out.DiskBytes > sh.spec.MaxBytes {
		return &control.PersistLimitError{Bytes: sh.out.DiskBytes, Max: sh.spec.MaxBytes, Name: sh.p.r.Spec.Name}
	}
	return nil
}

// still returns CaptureOptions.Still: once the guest stands still, its disk must not have more data than may persist.
func (sh *shedding) still(also func() error) func() error {
	if sh == nil || sh.spec.MaxBytes == 0 {
		return also
	}
	return func() error {
		if also != nil {
			if err := also(); err != nil {
				return err
			}
		}
		return sh.within()
	}
}

// result returns what the result of the sleep reports.
func (sh *shedding) result() *spec.Persisted {
	if sh == nil {
		return nil
	}
	return &sh.out
}

// tellShed writes events for promotions and failures. tellLimit does so for a sleep that the limit refuses.
func (p *process) tellShed(ctx context.Context, sh *shedding, failed error) {
	for _, m := range sh.out.Promoted {
		p.tell(ctx, events.Promoted, control.PromotedDetails(m))
	}
	problems := sh.out.Problems
	if failed != nil {
		problems = append(slices.Clone(problems), failed.Error())
	}
	for _, problem := range problems {
		p.tell(ctx, events.PersistFailed, events.Details{Problem: problem})
	}
}

// tellLimit writes an event for a sleep that the limit has refused.
func (p *process) tellLimit(ctx context.Context, err error) {
	if errors.Is(err, spec.ErrPersistLimit) {
		p.tell(ctx, events.PersistFailed, events.Details{Problem: err.Error()})
	}
}
