package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Prune does what the metadata make due: it puts expired sandboxes to sleep, removes those whose time is over, and
// deletes sleeps that are not kept, disks left by sandboxes that were taken back, and everything unneeded. With
// dryRun it only reports this. A failed step is a problem, and does not stop other steps.
func (f *Fleet) Prune(ctx context.Context, dryRun bool) (records.Pruned, error) {
	p, err := f.prune(ctx, dryRun, true)
	return p, fail("prune", "", err)
}

// Keep is Prune for automatic use: it leaves the disks of sandboxes that were taken back.
func (f *Fleet) Keep(ctx context.Context) (records.Pruned, error) {
	p, err := f.prune(ctx, false, false)
	return p, fail("prune", "", err)
}

// Due reports whether a sandbox must be put to sleep or removed now. It costs less than Prune.
func (f *Fleet) Due() (bool, error) {
	all, err := f.state.List()
	var sandboxes []lifetime.Sandbox
	for _, r := range all {
		sandboxes = append(sandboxes, f.lasts(r))
	}
	p := lifetime.Decide(sandboxes, nil, f.now())
	due := len(p.Sleep)+len(p.Remove) > 0
	for _, s := range sandboxes {
		due = due || f.untold(s)
	}
	return due, fail("prune", "", err)
}

// stopTime is how long a guest may take to shut down.
const stopTime = 30 * time.Second

// suspend ends the time of a sandbox that stays.
func (f *Fleet) suspend(ctx context.Context, name string) error {
	m, err := f.state.Metadata(name)
	if err != nil {
		return err
	}
	if m.E2B != nil && m.E2B.DiskOnly {
		stopping, cancel := context.WithTimeout(ctx, stopTime)
		defer cancel()
		if f.host.Sandbox(name).Stop(stopping) == nil {
			return nil
		}
		// A guest that does not shut down keeps its memory as well.
	}
	_, err = f.host.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{})
	return err
}

func (f *Fleet) prune(ctx context.Context, dryRun, abandoned bool) (records.Pruned, error) {
	p := records.Pruned{DryRun: dryRun}
	snapshots, err := f.state.Snapshots()
	if err != nil {
		return p, err
	}
	all, err := f.state.List()
	whole := err == nil // else a sleep may belong to an unreadable sandbox
	p.Problems = append(p.Problems, lines(err)...)
	var sandboxes []lifetime.Sandbox
	for _, r := range all {
		sandboxes = append(sandboxes, f.lasts(r))
	}
	var sleeps []lifetime.Sleep
	for _, s := range snapshots {
		if whole && s.Kind == kindSleep {
			sleeps = append(sleeps, lifetime.Sleep{ID: s.ID, Owner: s.Owner, Created: s.Created, Tagged: s.Kept, Bytes: s.Exclusive})
		}
	}
	for _, s := range snapshots {
		if abandoned && s.Kind == kindAbandoned && !s.Kept {
			p.Abandoned = append(p.Abandoned, lifetime.Step{ID: s.ID, Name: s.VM, Why: whyAbandoned, Bytes: s.Exclusive})
		}
	}
	p.Plan = lifetime.Decide(sandboxes, sleeps, f.now())
	if dryRun {
		p.Freed.Snapshots = len(p.Plan.Snapshots) + len(p.Abandoned)
		for _, s := range append(slices.Clone(p.Plan.Snapshots), p.Abandoned...) {
			p.Bytes += s.Bytes
		}
		return p, nil
	}
	problem := func(err error) {
		if err != nil {
			p.Problems = append(p.Problems, lines(err)...)
		}
	}
	ctx = events.WithCause(ctx, events.Expiry)
	for _, s := range sandboxes {
		if f.untold(s) {
			problem(f.state.TellExpired(ctx, s.Name))
		}
	}
	for _, step := range p.Sleep {
		if err := ctx.Err(); err != nil {
			return p, err
		}
		if again := f.again(step); len(again.Sleep) > 0 {
			problem(f.suspend(ctx, step.Name))
		}
	}
	for _, step := range p.Remove {
		if err := ctx.Err(); err != nil {
			return p, err
		}
		freed, err := f.expire(ctx, step)
		p.Add(freed)
		problem(err)
	}
	p.Histories, err = f.state.ForgetRemoved(f.now().Add(-state.HistoryTime))
	problem(err)
	// The sweep looks again by itself, with everything locked that it relies on.
	sweep := f.state.Sweep
	if abandoned {
		sweep = f.state.SweepAbandoned
	}
	freed, err := sweep(ctx)
	p.Add(freed)
	if ctx.Err() != nil {
		return p, ctx.Err()
	}
	problem(err)
	return p, nil
}

// kindSleep is the kind of a snapshot that a sandbox sleeps in, kindAbandoned that of an abandoned disk.
const kindSleep, kindAbandoned = "sleep", "abandoned"

const whyAbandoned lifetime.Why = "its sandbox was taken back"

// untold reports whether an event of a sandbox's expiry is missing.
func (f *Fleet) untold(s lifetime.Sandbox) bool {
	if s.Unknown || !lifetime.Expired(s.Expires, f.now()) {
		return false
	}
	l, err := f.state.Metadata(s.Name)
	return err == nil && lifetime.Expired(l.Expires, f.now()) && !l.ExpiryTold.Equal(l.Expires)
}

// lasts returns the part of a VM that decides how long it lasts.
func (f *Fleet) lasts(r *state.Record) lifetime.Sandbox {
	l, err := f.state.Metadata(r.Spec.Name)
	return lasts(r, l, err)
}

func lasts(r *state.Record, l spec.Metadata, unreadable error) lifetime.Sandbox {
	return lifetime.Sandbox{
		ID: r.ID, Name: r.Spec.Name, Class: l.EffectiveClass(), Keep: l.Keep, Expires: l.Expires,
		Running: r.Phase == state.Running || r.Phase == state.Starting, Ended: r.Phase == state.Stopped || r.Phase == state.Crashed,
		Needs: []string{r.Snapshot, r.Previous, r.Base, l.Rotate.To}, Unknown: unreadable != nil,
	}
}

// again decides anew about the sandbox of a step.
func (f *Fleet) again(step lifetime.Step) lifetime.Plan {
	r, err := f.state.Get(step.Name)
	if err != nil || r.ID != step.ID {
		return lifetime.Plan{}
	}
	return lifetime.Decide([]lifetime.Sandbox{f.lasts(r)}, nil, f.now())
}

// errGone ends a change of metadata that were removed. errStays means that the sandbox must not be removed after
// all.
var (
	errGone  = errors.New("the sandbox was removed")
	errStays = errors.New("the sandbox stays")
)

// expire removes a sandbox if that is still due. It holds the lock of the metadata: a caller that extends the
// sandbox does so before, and it stays, or finds it gone.
func (f *Fleet) expire(ctx context.Context, step lifetime.Step) (freed spec.Freed, err error) {
	if cl := f.host.Cluster; cl != nil {
		// Another host may have it, and may have let it last longer.
		if err := cl.Claim(ctx, step.Name, nil); errors.Is(err, spec.ErrElsewhere) || errors.Is(err, sandbox.ErrNotFound) {
			return freed, nil
		} else if err != nil {
			return freed, err
		}
	}
	_, err = f.state.SetMetadata(ctx, step.Name, func(l *spec.Metadata, unreadable error) error {
		r, err := f.state.Get(step.Name)
		if err != nil {
			return err
		}
		plan := lifetime.Decide([]lifetime.Sandbox{lasts(r, *l, unreadable)}, nil, f.now())
		if r.ID != step.ID || len(plan.Remove) == 0 {
			return errStays
		}
		// Only an expired ephemeral sandbox is removed while it runs. The others were put to sleep, or were
		// started again just now.
		force := l.Class == lifetime.Ephemeral && plan.Remove[0].Why == lifetime.WhyExpired
		if err = f.host.Sandbox(step.Name).Delete(ctx, sandbox.DeleteOptions{Force: force, Freed: &freed}); err != nil {
			return err
		}
		return errGone
	})
	switch {
	case errors.Is(err, errGone), errors.Is(err, errStays), errors.Is(err, sandbox.ErrNotFound):
		return freed, nil
	case err != nil:
		return freed, fmt.Errorf("removing sandbox %s, which is %s: %w", step.Name, step.Why, err)
	}
	return freed, nil
}
