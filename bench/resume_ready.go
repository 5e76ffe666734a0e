package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// busy is a program in the guest that wakes now and then. It creates a file when it has built its data.
const busy = `
import random, sys, time
numbers = list(range(1000000))
PAGE = 4096
memory = bytearray(int(sys.argv[1]) << 20)
for at in range(0, len(memory), PAGE):
    memory[at:at + PAGE // 4] = random.randbytes(PAGE // 4)
open('` + busyFile + `', 'w').close()
while True:
    numbers[0] += 1
    time.sleep(1)
`

const busyFile = "/root/busy"

// busyWait bounds how long busy may take to begin.
const busyWait = 15 * time.Minute

// startBusy starts busy in a guest, and returns when it works: the snapshot must have a live interpreter, and not
// one that is still loading.
func (e Env) startBusy(ctx context.Context, name string) error { return e.startUsing(ctx, name, 0) }

// startUsing is startBusy with the given amount of memory in use.
func (e Env) startUsing(ctx context.Context, name string, mib int) error {
	return e.startLive(ctx, name, "busy.py", busy, strconv.Itoa(mib))
}

// startLive starts a program that makes busyFile when it works, and waits for that.
func (e Env) startLive(ctx context.Context, name, file, program string, args ...string) error {
	if err := e.startProgram(ctx, name, file, program, args...); err != nil {
		return err
	}
	c, err := guest.Dial(ctx, guest.UnixDialer(e.Store.State.VsockPath(name)))
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, busyWait)
	defer cancel()
	for {
		_, err := c.Stat(ctx, busyFile)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := wait.For(ctx, 500*time.Millisecond); err != nil {
			return fmt.Errorf("waiting for the program in the guest to begin: %w", err)
		}
	}
}

// ResumeReady measures the time from the call that restores a VM from a snapshot on disk, with a live python3
// program, to the agent's answer that clock and random numbers are new. What is prebuilt and what is not is as for
// ResumeEntry. Sizes, states of the page cache, and with and without a pool are interleaved.
//
// A run of each peer follows each run of drowse. QEMU's is the time from the start of its process, with a state
// that it has migrated to a file, to a byte that a process in the guest sends back over virtio-serial. It renews
// neither clock nor random numbers. Its row is resume_ready with parameter peer. resume_ready_ratio is its time
// divided by that of drowse's run before: once as measured, and once without the start of its process, since
// drowse restores in this one.
func ResumeReady(ctx context.Context, e Env, o Options) ([]Row, error) {
	used := func(mib int) int { return mib * o.UsedPercent / 100 }
	r := resumes{
		name: "resume_ready", n: o.N, warmup: o.Warmup, sizes: o.MemoryMiB, params: map[string]any{"depth": o.Depth},
		peers: o.Peers, peerUsedMiB: func(mib int) int { return o.PeerUsedMiB + used(mib) }, caches: o.Caches, pools: o.Pools, pages: o.PageCaches,
	}
	if o.UsedPercent > 0 {
		r.params["used_percent"] = o.UsedPercent
	}
	return r.measure(ctx, e, func(ctx context.Context, mib int) (*sleeper, error) {
		return e.sleeperWith(ctx, mib, o.Depth, func(ctx context.Context, name string) error { return e.startUsing(ctx, name, used(mib)) })
	})
}

// sleeperWith boots a VM, starts a program in it, puts it to sleep and wakes it depth times, and puts it to sleep
// once more.
func (e Env) sleeperWith(ctx context.Context, mib, depth int, start func(ctx context.Context, name string) error) (*sleeper, error) {
	return e.sleeperUsed(ctx, mib, depth, start, func(context.Context, string) error { return nil })
}

// sleeperUsed is sleeperWith for a VM that is used after each wake: a sleep keeps what was touched since the last wake
// for the next one.
func (e Env) sleeperUsed(ctx context.Context, mib, depth int, start, use func(ctx context.Context, name string) error) (*sleeper, error) {
	name := vmName(mib)
	v := &sleeper{record: &state.Record{Spec: sandbox.Spec{Name: name}}}
	if err := e.boot(ctx, name, mib); err != nil {
		return nil, err
	}
	if err := start(ctx, name); err != nil {
		return v, err
	}
	for i := range depth {
		e.say("%d MiB: sleep %d of %d", mib, i+1, depth+1)
		if _, err := e.Store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{}); err != nil {
			return v, err
		}
		if _, err := e.Store.With(e.Launcher).Sandbox(name).Wake(ctx); err != nil {
			return v, err
		}
		if err := use(ctx, name); err != nil {
			return v, err
		}
	}
	return v, e.sleep(ctx, v)
}

// startProgram starts a python3 program in a guest.
func (e Env) startProgram(ctx context.Context, name, file, program string, args ...string) error {
	c, err := guest.Dial(ctx, guest.UnixDialer(e.Store.State.VsockPath(name)))
	if err != nil {
		return err
	}
	defer c.Close()
	path := "/root/" + file
	if err := c.WriteFile(ctx, path, strings.NewReader(program), guest.WriteOptions{}); err != nil {
		return err
	}
	p, err := c.Start(ctx, guest.Cmd{Argv: append([]string{"python3", "-S", "-E", path}, args...), Detach: true})
	if err != nil {
		return err
	}
	return p.Close()
}
