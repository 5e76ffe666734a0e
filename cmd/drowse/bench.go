package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench"
)

func (a *app) benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure what drowse promises", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var e bench.Env
	f := cmd.PersistentFlags()
	f.StringVar(&e.Image, "image", "debian-python", "image of the guest")
	f.StringVar(&e.Kernel, "kernel", "", "kernel of the guest, as for run")
	cmd.AddCommand(a.benchEntry(&e), a.benchReady(&e), a.benchSnapshot(&e), a.benchDelta(&e), a.benchDepth(&e), a.benchFork(&e), a.benchDensity(&e), a.benchReport())
	return cmd
}

// benchmark is a command that measures. measure returns a usage error for options that
// make no sense.
func (a *app) benchmark(e *bench.Env, use, short string, measure func(context.Context) ([]bench.Row, error)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if e.Store, err = a.store(); err != nil {
				return err
			}
			if e.Launcher, err = a.launcher(); err != nil {
				return err
			}
			e.Progress = func(s string) { a.log.Info(s) }
			rows, err := measure(cmd.Context())
			if err != nil {
				return fmt.Errorf("measuring %s: %w", use, err)
			}
			r := bench.NewReport(rows)
			return a.print(r, func(w io.Writer) { r.Text(w) })
		},
	}
}

var errRuns = usageError{errors.New("--runs must be 1 or more, --warmup 0 or more, and lists must not be empty")}

func (a *app) benchEntry(e *bench.Env) *cobra.Command {
	var o bench.ResumeEntryOptions
	cmd := a.benchmark(e, "resume_entry", "From the call that restores a VM to its first KVM_RUN", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.Warmup < 0 || len(o.MemoryMiB) == 0 {
			return nil, errRuns
		}
		return bench.ResumeEntry(ctx, *e, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 100, "runs for each size")
	f.IntVar(&o.Warmup, "warmup", 5, "runs before that do not count")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{256, 4096}, "sizes of RAM in MiB")
	return cmd
}

func (a *app) benchReady(e *bench.Env) *cobra.Command {
	var o bench.ResumeReadyOptions
	cmd := a.benchmark(e, "resume_ready", "From the call that restores a VM to its agent's answer", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.Warmup < 0 || o.Depth < 0 || len(o.MemoryMiB) == 0 {
			return nil, errRuns
		}
		return bench.ResumeReady(ctx, *e, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 100, "runs for each size")
	f.IntVar(&o.Warmup, "warmup", 5, "runs before that do not count")
	f.IntVar(&o.Depth, "depth", 10, "how often each VM has slept and been woken before")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{512}, "sizes of RAM in MiB")
	return cmd
}

func (a *app) benchSnapshot(e *bench.Env) *cobra.Command {
	var o bench.SnapshotOptions
	cmd := a.benchmark(e, "snapshot_pause", "How long a running guest stands still for a snapshot, and what is written", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.Warmup < 0 || len(o.MemoryMiB) == 0 || len(o.DirtyMiB) == 0 {
			return nil, errRuns
		}
		return bench.Snapshots(ctx, *e, o)
	})
	cmd.Aliases = []string{"snapshot_bytes"}
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 20, "snapshots for each size and amount")
	f.IntVar(&o.Warmup, "warmup", 2, "snapshots before that do not count")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{512, 4096}, "sizes of RAM in MiB")
	f.IntSliceVar(&o.DirtyMiB, "dirty", []int{0, 16, 64, 256}, "how much the guest changes before each snapshot, in MiB, up to half of RAM")
	return cmd
}

func (a *app) benchDelta(e *bench.Env) *cobra.Command {
	var o bench.DeltaOptions
	cmd := a.benchmark(e, "delta_bytes", "What a snapshot writes after an idle second, and after files have come and gone", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.MemoryMiB < 1 || o.Idle < 0 || o.Settle < 0 || o.LeftMiB < 0 || o.WrittenMiB < o.LeftMiB {
			return nil, usageError{errors.New("--runs and --memory must be 1 or more, times 0 or more, and --left at most --written")}
		}
		return bench.Deltas(ctx, *e, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 5, "snapshots of each kind")
	f.IntVar(&o.MemoryMiB, "memory", 512, "RAM in MiB")
	f.DurationVar(&o.Idle, "idle", time.Second, "how long the guest is idle")
	f.IntVar(&o.WrittenMiB, "written", 100, "how much it writes to files, in MiB")
	f.IntVar(&o.LeftMiB, "left", 5, "how much of that it leaves there, in MiB")
	f.DurationVar(&o.Settle, "settle", 10*time.Second, "how long it has then until the snapshot")
	return cmd
}

func (a *app) benchDepth(e *bench.Env) *cobra.Command {
	var o bench.DepthOptions
	cmd := a.benchmark(e, "restore_depth", "From the call that restores a VM to an agent that answers, by the length of the chain of deltas", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.Warmup < 0 || len(o.Depths) == 0 || o.MemoryMiB < 1 || o.Settle < 0 {
			return nil, errRuns
		}
		return bench.RestoreDepth(ctx, *e, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 20, "restores of each depth")
	f.IntVar(&o.Warmup, "warmup", 2, "restores before that do not count")
	f.IntVar(&o.MemoryMiB, "memory", 256, "RAM in MiB")
	f.DurationVar(&o.Settle, "settle", 2*time.Minute, "how long the guest has after its boot")
	f.IntSliceVar(&o.Depths, "depths", []int{1, 10, 100, 1000}, "lengths of the chain to restore from")
	return cmd
}
