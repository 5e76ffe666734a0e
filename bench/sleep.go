package bench

import (
	"context"
	"errors"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Sleeps measures sleeps: the time from the call of Sandbox.Sleep until the VM's process has ended (sleep), and
// how much is written (sleep_bytes, in MiB). In stage pause the guest stands still, and in stage save its memory
// is written. Each sleep is a delta of the one before. Amounts are interleaved.
func Sleeps(ctx context.Context, e Env, o Options) ([]Row, error) {
	return ofSizes(o.MemoryMiB, func(mib int) ([]Row, error) {
		return e.written(ctx, o, mib, "sleep", "sleep_bytes", e.sleepAndWake, func(s *series, res spec.SleepResult) {
			s.add(ns(res.Stages["gone"]))
			s.stagesOf(res.Stages, "pause", "save")
		})
	})
}

// written changes some of a guest's memory and measures how the guest is then written, for each amount in turn.
// record takes the times of what, and the row bytes has the amount written. Each is a delta of the one before,
// except in the first round, which does not count.
func (e Env) written(ctx context.Context, o Options, mib int, what, bytes string, write func(context.Context, string) (spec.SleepResult, error),
	record func(*series, spec.SleepResult),
) (rows []Row, err error) {
	name := vmName(mib)
	amounts, err := e.dirtied(ctx, name, mib, o.DirtyMiB)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.remove(ctx, name)) }()
	times, stored := map[int]*series{}, map[int]*series{}
	for _, d := range amounts {
		times[d], stored[d] = newSeries(inMs), newSeries(inMiB)
	}
	for i := -1; i < o.Warmup+o.N; i++ {
		e.say("%s: round %d of %d", what, i+1, o.Warmup+o.N)
		for _, d := range amounts {
			if err := e.dirty(ctx, name, d); err != nil {
				return nil, err
			}
			res, err := write(ctx, name)
			if err != nil {
				return nil, err
			}
			if i >= o.Warmup {
				record(times[d], res)
				stored[d].stored(res)
			}
		}
	}
	for _, d := range amounts {
		params := map[string]any{"memory_mib": mib, "dirty_mib": d, "vcpus": spec.DefaultVCPUs}
		rows = append(rows, times[d].row(what, params), stored[d].row(bytes, params))
	}
	return rows, nil
}

func (e Env) sleepAndWake(ctx context.Context, name string) (spec.SleepResult, error) {
	res, err := e.Store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{})
	if err != nil {
		return res, err
	}
	_, err = e.Store.With(e.Launcher).Sandbox(name).Wake(ctx)
	return res, err
}
