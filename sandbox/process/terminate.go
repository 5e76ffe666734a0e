package process

import (
	"context"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// toldHooks is how long hooks, and promotions, may delay the sleep of a VM whose process was told to end. systemd
// kills a process 90 s after it told it to end (DefaultTimeoutStopSec=, systemd-system.conf(5)). Most of that time
// is for writing the VM's memory.
const toldHooks = 20 * time.Second

// sleepOnTerminate puts the VM to sleep when its process gets SIGTERM, as when the host shuts down or the session
// in which the VM was started ends. Hooks that refuse or take too long do not keep the VM awake, because it would
// be killed. An ephemeral VM ends.
func (p *process) sleepOnTerminate(ctx, terminated context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-terminated.Done():
	}
	if l, err := p.store.Metadata(p.r.Spec.Name); err == nil && l.Class == lifetime.Ephemeral {
		p.log.Info("told to end")
		p.ends(events.Killed)
		p.in.Machine().Fail(control.ErrStopped)
		return
	}
	ctx = events.WithCause(ctx, events.Killed)
	p.holders.dismiss(control.DismissTime)
	hooked, cancel := context.WithCancel(ctx)
	defer cancel()
	late := time.AfterFunc(toldHooks, cancel)
	res, err := p.sleep(hooked, "", func() error {
		late.Stop()
		return hooked.Err()
	})
	late.Stop()
	if err != nil && !errors.Is(err, spec.ErrNotRunning) {
		p.log.Warn("told to end, and not asleep yet: going to sleep without hooks", "error", err)
		res, err = p.sleep(ctx, spec.HooksSkip, nil)
	}
	switch {
	case err == nil:
		p.log.Info("gone to sleep, since its process was told to end", "snapshot", res.Snapshot, "bytes", res.BytesStored)
		p.end()
	case !errors.Is(err, spec.ErrNotRunning):
		p.log.Error("told to end, and cannot sleep: what it has in memory is lost if it is killed", "error", err)
	}
}
