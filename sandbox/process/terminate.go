package process

import (
	"context"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// toldHooks is how long hooks, and promotions, may delay the sleep of a VM whose process was told to end. systemd
// kills a process 90 s after it told it to end (DefaultTimeoutStopSec=, systemd-system.conf(5)). Most of that time
// is for writing the VM's memory.
const toldHooks = 20 * time.Second

// sleepOnTerminate puts the VM to sleep when its process gets SIGTERM, as when the host shuts down or the session
// in which the VM was started ends, or before the lease of a shared sandbox does. Hooks that refuse or take longer than
// patience do not keep the VM awake, because it would be killed. An ephemeral VM ends.
func (p *process) sleepOnTerminate(ctx, terminated context.Context, why string, patience time.Duration) {
	select {
	case <-ctx.Done():
		return
	case <-terminated.Done():
	}
	if l, err := p.store.Metadata(p.r.Spec.Name); err == nil && l.Class == lifetime.Ephemeral {
		p.log.Info("told to end", "why", why)
		p.ends(events.Killed)
		p.in.Machine().Fail(control.ErrStopped)
		return
	}
	ctx = events.WithCause(ctx, events.Killed)
	p.holders.dismiss(control.DismissTime)
	hooked, cancel := context.WithCancel(ctx)
	defer cancel()
	late := time.AfterFunc(patience, cancel)
	res, err := p.sleep(hooked, "", func() error {
		late.Stop()
		return hooked.Err()
	})
	late.Stop()
	if err != nil && !errors.Is(err, spec.ErrNotRunning) {
		p.log.Warn("not asleep yet: going to sleep without hooks", "why", why, "error", err)
		res, err = p.sleep(ctx, spec.HooksSkip, nil)
	}
	switch {
	case err == nil:
		p.log.Info("gone to sleep", "why", why, "snapshot", res.Snapshot, "bytes", res.BytesStored)
		p.end()
	case !errors.Is(err, spec.ErrNotRunning):
		p.log.Error("it cannot sleep: what it has in memory is lost if it is killed", "why", why, "error", err)
	}
}

// leaseHooks is how long hooks may delay the sleep of a sandbox whose lease ends.
const leaseHooks = 2 * time.Second

// leased refuses to start a sandbox that other hosts share and this one has not claimed. Otherwise it returns a context
// that ends when the lease does, or later if the VM is frozen meanwhile, and one, nil for a sandbox that is not shared,
// that ends in time to sleep before: when less than a third of the lease's time is left, since its node renews it three
// times in that. The VM's lock must be held.
func (p *process) leased(ctx context.Context) (leased, low context.Context, release func(), err error) {
	dir, name := lease.In(p.store.Dir()), p.r.Spec.Name
	left, ttl, shared, err := dir.Left(name)
	if err != nil {
		return nil, nil, nil, err
	}
	if !shared {
		return ctx, nil, func() {}, nil
	}
	leased, end := context.WithCancelCause(ctx)
	low, warn := context.WithCancel(leased)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := dir.Watch(leased, name, left, ttl, warn, p.freeze); err != nil {
			p.log.Error("this host has no claim on it any more", "error", err)
			end(err)
		}
	}()
	return leased, low, func() {
		end(nil)
		warn()
		<-done
	}, nil
}
