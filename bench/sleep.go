package bench

import (
	"context"
	"errors"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Sleeps measures sleeps: the time from the call of Sandbox.Sleep until the VM's process has
// ended (sleep), of which the guest stands still for stage pause and its memory is written
// in stage save; and what is written (sleep_bytes, in MiB). Each is a delta of the one
// before. Amounts are interleaved.
func Sleeps(ctx context.Context, e Env, o Options) ([]Row, error) {
	return ofSizes(o.MemoryMiB, func(mib int) ([]Row, error) { return e.sleeps(ctx, o, mib) })
}

func (e Env) sleeps(ctx context.Context, o Options, mib int) (rows []Row, err error) {
	name := vmName(mib)
	amounts, err := e.dirtied(ctx, name, mib, o.DirtyMiB)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	gone, stored := perAmount(amounts, inMs), perAmount(amounts, inMiB)
	// The first of all is no delta.
	if _, err := e.sleepAndWake(ctx, name); err != nil {
		return nil, err
	}
	for i := range o.Warmup + o.N {
		e.say("sleep: round %d of %d", i, o.Warmup+o.N)
		for _, d := range amounts {
			if err := e.dirty(ctx, name, d); err != nil {
				return nil, err
			}
			res, err := e.sleepAndWake(ctx, name)
			if err != nil {
				return nil, err
			}
			if i < o.Warmup {
				continue
			}
			g, b := gone[d], stored[d]
			g.add(ns(res.Stages["gone"]))
			g.stagesOf(res.Stages, "pause", "save")
			b.add(max(1, res.BytesStored))
			b.fault("pages_changed", int64(res.PagesChanged))
		}
	}
	for _, d := range amounts {
		params := map[string]any{"memory_mib": mib, "dirty_mib": d, "vcpus": spec.DefaultVCPUs}
		rows = append(rows, gone[d].row("sleep", params), stored[d].row("sleep_bytes", params))
	}
	return rows, nil
}

func (e Env) sleepAndWake(ctx context.Context, name string) (control.SleepResult, error) {
	res, err := e.Store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{})
	if err != nil {
		return res, err
	}
	_, err = e.Store.With(e.Launcher).Sandbox(name).Wake(ctx)
	return res, err
}
