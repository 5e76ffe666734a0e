package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (m *benches) fork() *cobra.Command {
	var o bench.ForkOptions
	cmd := m.command("fork_pause", "How long a running guest stands still for a fork, and how long until its children answer", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.Warmup < 0 || len(o.MemoryMiB) == 0 || len(o.UsedMiB) == 0 {
			return nil, errRuns
		}
		if o.Count < 1 || o.Count > sandbox.MaxForks {
			return nil, usageError{fmt.Errorf("--count must be 1 to %d", sandbox.MaxForks)}
		}
		return bench.Forks(ctx, *m.env, o)
	})
	cmd.Aliases = []string{"fork_ready"}
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 20, "forks for each row")
	f.IntVar(&o.Warmup, "warmup", 2, "forks before that do not count")
	f.IntVar(&o.Count, "count", 1, "children of each fork")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{512}, "sizes of RAM in MiB")
	f.IntSliceVar(&o.UsedMiB, "used", []int{0, 64, 256}, "how much of it a program in the guest has in use, in MiB, up to half of RAM")
	f.BoolVar(&o.Busy, "busy", false, "let that program write to all of it while the guest is forked")
	return cmd
}

func (m *benches) forkDensity() *cobra.Command {
	var o bench.ForkDensityOptions
	cmd := m.command("fork_density", "What memory the forks of a guest with a live interpreter take", func(ctx context.Context) ([]bench.Row, error) {
		if o.Forks < 1 || o.Forks > sandbox.MaxForks {
			return nil, usageError{fmt.Errorf("--forks must be 1 to %d", sandbox.MaxForks)}
		}
		return bench.ForkDensity(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.Forks, "forks", 50, "children to make")
	f.IntVar(&o.MemoryMiB, "memory", spec.DefaultMemoryMiB, "RAM in MiB")
	return cmd
}
