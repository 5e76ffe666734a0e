package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
)

// ResumeReadyOptions say how resume_ready is measured.
type ResumeReadyOptions struct {
	// N is the number of resumes of each size, after Warmup that do not count.
	N, Warmup int
	// MemoryMiB are the sizes of guest RAM to compare.
	MemoryMiB []int
	// Depth is how often each VM has slept and been woken before: its snapshot is that
	// many deltas away from a full one.
	Depth int
}

// busy is a program in the guest that is awake now and then.
const busy = `
import time
numbers = list(range(1000000))
while True:
    numbers[0] += 1
    time.sleep(1)
`

// ResumeReady measures the time from the call that restores a VM from a snapshot on disk,
// in which a python3 program is alive, to the agent's answer that clock and random numbers
// are new. Nothing is made ahead: VM, vCPU, memory, devices and pager are made from
// nothing, in this process. The page cache is warm. Sizes are interleaved.
func ResumeReady(ctx context.Context, e Env, o ResumeReadyOptions) (rows []Row, err error) {
	var vms []*sleeper
	defer func() {
		for _, v := range vms {
			err = errors.Join(err, e.Store.Remove(context.WithoutCancel(ctx), v.record.Spec.Name, true))
		}
	}()
	for _, mib := range o.MemoryMiB {
		v, err := e.sleeperAt(ctx, mib, o.Depth)
		if v != nil {
			vms = append(vms, v)
		}
		if err != nil {
			return nil, err
		}
	}
	dir, err := os.MkdirTemp("", "drowse-bench-")
	if err != nil {
		return nil, fmt.Errorf("making a directory for the runs: %w", err)
	}
	defer os.RemoveAll(dir)
	for i := range o.Warmup + o.N {
		if i%10 == 0 {
			e.say("resume_ready: run %d of %d", i, o.Warmup+o.N)
		}
		for _, v := range vms {
			if err := v.restore(ctx, dir, i >= o.Warmup, sandbox.RestoreOptions{}); err != nil {
				return nil, err
			}
		}
	}
	for _, v := range vms {
		rows = append(rows, v.series.row("resume_ready", map[string]any{
			"memory_mib": v.parts.Spec.MemoryMiB, "vcpus": v.parts.Spec.VCPUs, "depth": o.Depth, "cache": "warm", "pool": false,
		}))
	}
	return rows, nil
}

// sleeperAt boots a VM, starts a program in it, and puts it to sleep and wakes it as often
// as is said, and to sleep once more.
func (e Env) sleeperAt(ctx context.Context, mib, depth int) (*sleeper, error) {
	v := &sleeper{record: &sandbox.Record{Spec: sandbox.Spec{Name: fmt.Sprintf("bench-%d-%d", os.Getpid(), mib)}}, series: newSeries()}
	name := v.record.Spec.Name
	e.say("booting a guest of %d MiB", mib)
	if _, err := e.Store.Run(ctx, e.Launcher, sandbox.Spec{Name: name, Image: e.Image, Kernel: e.Kernel, MemoryMiB: mib}); err != nil {
		return nil, err
	}
	if err := e.startProgram(ctx, name, "busy.py", busy); err != nil {
		return v, err
	}
	for i := range depth {
		e.say("%d MiB: sleep %d of %d", mib, i+1, depth+1)
		if _, err := e.Store.Sleep(ctx, name); err != nil {
			return v, err
		}
		if _, err := e.Store.Wake(ctx, e.Launcher, name); err != nil {
			return v, err
		}
	}
	return v, e.sleep(ctx, v)
}

// startProgram starts a python3 program in a guest.
func (e Env) startProgram(ctx context.Context, name, file, program string) error {
	c, err := guest.Dial(ctx, guest.UnixDialer(e.Store.VsockPath(name)))
	if err != nil {
		return err
	}
	defer c.Close()
	path := "/root/" + file
	if err := c.WriteFile(ctx, path, strings.NewReader(program), guest.WriteOptions{}); err != nil {
		return err
	}
	p, err := c.Start(ctx, guest.Cmd{Argv: []string{"python3", "-S", "-E", path}, Detach: true})
	if err != nil {
		return err
	}
	return p.Close()
}
