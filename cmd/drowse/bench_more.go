package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/bench"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (m *benches) instruction() *cobra.Command {
	var o bench.InstructionOptions
	cmd := m.hostCommand("guest_instruction", "How long an instruction takes that a guest executes as its kernel does", measuring(m, &o, bench.Instructions, func() bool { return o.N < 1 || o.Warmup < 0 }))
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 50, "runs for each mix of instructions")
	f.IntVar(&o.Warmup, "warmup", 2, "runs before that do not count")
	return cmd
}

func (m *benches) boot() *cobra.Command {
	var o bench.BootOptions
	cmd := m.command("boot", "From the beginning of a VM's process to the call of its agent", measuring(m, &o, bench.Boots, func() bool { return o.N < 1 || o.Warmup < 0 || len(o.MemoryMiB) == 0 || len(o.VCPUs) == 0 }))
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 10, "boots for each size and number of CPUs")
	f.IntVar(&o.Warmup, "warmup", 1, "boots before that do not count")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{spec.DefaultMemoryMiB}, "sizes of RAM in MiB")
	f.IntSliceVar(&o.VCPUs, "vcpus", []int{spec.DefaultVCPUs}, "numbers of CPUs of the guest")
	return cmd
}

func (m *benches) exec() *cobra.Command {
	var o bench.ResumeExecOptions
	cmd := m.command("resume_exec", "From the call that restores a VM to the output of a command in a shell that was there", measuring(m, &o, bench.ResumeExec, func() bool { return o.N < 1 || o.Warmup < 0 || o.Depth < 0 || len(o.MemoryMiB) == 0 }))
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 100, "runs for each size")
	f.IntVar(&o.Warmup, "warmup", 5, "runs before that do not count")
	f.IntVar(&o.Depth, "depth", 10, "how often each VM has slept and been woken before")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{512}, "sizes of RAM in MiB")
	return cmd
}

func (m *benches) sleep() *cobra.Command {
	var o bench.SleepOptions
	cmd := m.command("sleep", "From the call that puts a VM to sleep until its process is gone, and what is written", measuring(m, &o, bench.Sleeps, func() bool { return o.N < 1 || o.Warmup < 0 || len(o.MemoryMiB) == 0 || len(o.DirtyMiB) == 0 }))
	cmd.Aliases = []string{"sleep_bytes"}
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 20, "sleeps for each size and amount")
	f.IntVar(&o.Warmup, "warmup", 2, "sleeps before that do not count")
	f.IntSliceVar(&o.MemoryMiB, "memory", []int{512}, "sizes of RAM in MiB")
	f.IntSliceVar(&o.DirtyMiB, "dirty", []int{0, 64}, "how much the guest changes before each sleep, in MiB, up to half of RAM")
	return cmd
}

func (m *benches) concurrent() *cobra.Command {
	var o bench.ConcurrentOptions
	var pool []string
	cmd := m.command("concurrent_resume", "How long VMs take that are woken at once, and what processors they need for it", func(ctx context.Context) ([]bench.Row, error) {
		if o.N < 1 || o.Warmup < 0 || len(o.AtOnce) == 0 || o.MemoryMiB < 1 || o.Awake < 0 {
			return nil, errRuns
		}
		if slices.Min(o.AtOnce) < 1 || slices.Max(o.AtOnce) > bench.MaxAtOnce {
			return nil, usageError{fmt.Errorf("--at-once must be 1 to %d", bench.MaxAtOnce)}
		}
		var err error
		if o.Pools, err = pools(pool); err != nil {
			return nil, err
		}
		return bench.ConcurrentResume(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 100, "wakes for each number of VMs, in at least five rounds")
	f.IntVar(&o.Warmup, "warmup", 1, "rounds before that do not count")
	f.DurationVar(&o.Awake, "awake", 0, "how long the VMs of a round stay awake: from three seconds on they keep pages for the next")
	f.IntSliceVar(&o.AtOnce, "at-once", []int{1, 4, 20}, "numbers of VMs to wake at once")
	f.StringSliceVar(&pool, "pool", []string{poolNo, poolYes}, poolHelp)
	f.IntVar(&o.MemoryMiB, "memory", spec.DefaultMemoryMiB, "RAM of each in MiB")
	return cmd
}

func (m *benches) density() *cobra.Command {
	var o bench.DensityOptions
	cmd := m.command("density", "What VMs cost that sleep, and those that idle", func(ctx context.Context) ([]bench.Row, error) {
		if o.MemoryMiB < 1 || o.Settle < 0 || o.Idle < time.Second {
			return nil, usageError{errors.New("--idle must be a second or more, --settle not negative, --memory positive")}
		}
		if o.Asleep < 1 || o.Awake < 1 || o.Awake > min(o.Asleep, bench.MaxAtOnce) {
			return nil, usageError{fmt.Errorf("--awake must be 1 to %d, and not more than --asleep", bench.MaxAtOnce)}
		}
		return bench.Density(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.Asleep, "asleep", 100, "VMs that sleep")
	f.IntVar(&o.Awake, "awake", 50, "how many of them to wake then")
	f.IntVar(&o.MemoryMiB, "memory", spec.DefaultMemoryMiB, "RAM of each in MiB")
	f.DurationVar(&o.Settle, "settle", time.Minute, "how long those are left alone before they are looked at")
	f.DurationVar(&o.Idle, "idle", time.Minute, "how long their processor time is counted then")
	return cmd
}

func (m *benches) vsock() *cobra.Command {
	var o bench.VsockOptions
	cmd := m.command("vsock_rtt", "From a ping of the agent in a running guest to its answer", measuring(m, &o, bench.VsockRTT, func() bool { return o.N < 1 || o.Warmup < 0 || o.MemoryMiB < 1 }))
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 1000, "pings")
	f.IntVar(&o.Warmup, "warmup", 20, "pings before that do not count")
	f.IntVar(&o.MemoryMiB, "memory", spec.DefaultMemoryMiB, "RAM in MiB")
	return cmd
}

func (m *benches) touch() *cobra.Command {
	var o bench.WakeTouchOptions
	cmd := m.command("wake_touch", "From a connection, or a packet, to a VM that sleeps until its answer", measuring(m, &o, bench.WakeTouch, func() bool {
		return o.N < 1 || o.Warmup < 0 || o.MemoryMiB < 1 || o.Depth < 0 || o.Settle < 0 || o.Pool < 0
	}))
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 100, "wakes by each kind of touch; one that is not answered ends it with an error")
	f.IntVar(&o.Warmup, "warmup", 5, "wakes before that do not count")
	f.IntVar(&o.Depth, "depth", 10, "how often the VM has slept and been woken before")
	f.IntVar(&o.MemoryMiB, "memory", 512, "RAM in MiB")
	f.IntVar(&o.Pool, "processes", 1, "processes that the supervisor keeps ready, 0 for none")
	f.DurationVar(&o.Settle, "settle", 500*time.Millisecond, "how long the VM sleeps before it is touched")
	return cmd
}

func (m *benches) blk() *cobra.Command {
	var o bench.BlkOptions
	cmd := m.command("blk", "How fast a guest reads and writes its disk, in sequence and at random", func(ctx context.Context) ([]bench.Row, error) {
		const most = 1 << 20
		if o.N < 1 || o.Warmup < 0 || o.MemoryMiB < 1 || o.FileMiB < 1 || o.FileMiB > most || o.Requests < 1 || o.Requests > most {
			return nil, usageError{fmt.Errorf("--runs and --memory must be 1 or more, --warmup 0 or more, --file and --requests 1 to %d", most)}
		}
		return bench.Blk(ctx, *m.env, o)
	})
	f := cmd.Flags()
	f.IntVar(&o.N, "runs", 20, "runs of each kind")
	f.IntVar(&o.Warmup, "warmup", 1, "runs before that do not count")
	f.IntVar(&o.MemoryMiB, "memory", spec.DefaultMemoryMiB, "RAM in MiB")
	f.IntVar(&o.FileMiB, "file", 64, "size of the file, in MiB")
	f.IntVar(&o.Requests, "requests", 1000, "requests of a run at random")
	return cmd
}
