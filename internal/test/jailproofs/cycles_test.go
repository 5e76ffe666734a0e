//go:build workloads

package jailproofs

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var (
	cycles    = flag.Int("cycles", 4, "how many sandboxes are made, run a command, sleep, wake, fork and are removed")
	atOnce    = flag.Int("cycles-at-once", 1, "how many of them at once")
	bootEvery = flag.Int("cycles-boot", 25, "each so many-th boots; the others begin from a template")
	looks     = flag.Int("cycles-looks", 5, "how often what the host has is counted meanwhile")
)

// cycle is the life of one sandbox and its child, confined. How they end depends on i. One that fails removes what
// there is: nothing of it may be left, either.
func cycle(ctx context.Context, e *guesttest.Env, want sandbox.Spec, i int) (err error) {
	h := e.Store.With(e.Launcher)
	want.Name = fmt.Sprintf("c%d", i)
	child := want.Name + "-child"
	defer func() {
		if err == nil {
			return
		}
		for _, name := range []string{want.Name, child} {
			if derr := h.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: true}); derr != nil && !errors.Is(derr, sandbox.ErrNotFound) {
				err = errors.Join(err, fmt.Errorf("delete %s after that: %w", name, derr))
			}
		}
	}()
	boots := i%*bootEvery == *bootEvery-1
	box, err := h.Create(ctx, want, sandbox.CreateOptions{Boot: boots})
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if err := confined(e, want.Name); err != nil {
		return err
	}
	if r, err := e.Store.State.Get(want.Name); err != nil || (r.Template == "") != boots {
		return fmt.Errorf("it has booted because %q (%v)", r.Booted, err)
	}
	// The question for a name starts the network process.
	if _, err := box.Exec(ctx, guest.Cmd{Argv: []string{"/bin/sh", "-c", "getent hosts denied.example; true"}}); err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	if _, err := box.Sleep(ctx, sandbox.SleepOptions{}); err != nil {
		return fmt.Errorf("sleep: %w", err)
	}
	if _, err := box.Wake(ctx); err != nil {
		return fmt.Errorf("wake: %w", err)
	}
	if _, err := box.Fork(ctx, sandbox.ForkOptions{Name: child, Early: i%2 == 1}); err != nil {
		return fmt.Errorf("fork: %w", err)
	}
	if err := confined(e, child); err != nil {
		return err
	}
	if _, err := h.Sandbox(child).Exec(ctx, guest.Cmd{Argv: []string{"/bin/true"}}); err != nil {
		return fmt.Errorf("exec in the child: %w", err)
	}
	order := []string{want.Name, child}
	switch i % 4 {
	case 1:
		order = []string{child, want.Name}
	case 2:
		_, err = box.Sleep(ctx, sandbox.SleepOptions{})
	case 3:
		err = h.Sandbox(child).Kill(ctx)
	}
	if err != nil {
		return fmt.Errorf("the end: %w", err)
	}
	for _, name := range order {
		if err := h.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil {
			return fmt.Errorf("delete %s: %w", name, err)
		}
	}
	return nil
}

// kernelFigures are of the kernel's memory. They depend on more than sandboxes.
func kernelFigures() string {
	var out []string
	text, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(text)) {
		if name, value, _ := strings.Cut(strings.TrimSpace(line), ":"); name == "MemAvailable" || name == "SUnreclaim" || name == "Percpu" || name == "KernelStack" {
			out = append(out, name+" "+strings.TrimSpace(value))
		}
	}
	text, _ = os.ReadFile("/sys/fs/cgroup/cgroup.stat")
	for line := range strings.Lines(string(text)) {
		out = append(out, strings.TrimSpace(line))
	}
	return strings.Join(out, ", ")
}

// diskUse is how much a directory has on disk, in KiB.
func diskUse(dir string) (kib int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if fi, err := d.Info(); err == nil {
				if st, ok := fi.Sys().(*syscall.Stat_t); ok {
					kib += st.Blocks / 2 // st_blocks of stat(2): units of 512 bytes
				}
			}
		}
		return nil // files come and go
	})
	return kib
}

// settled counts until a census has no more than an earlier one, or patience ends.
func settled(t *testing.T, h host, before census) (now census, more []string) {
	t.Helper()
	for end := time.Now().Add(patience / 5); ; time.Sleep(200 * time.Millisecond) {
		runtime.GC() // files without a reference are closed
		now, err := h.count()
		if err != nil {
			t.Fatal(err)
		}
		if before == nil {
			return now, nil
		}
		if more = now.more(before); len(more) == 0 || time.Now().After(end) {
			return now, more
		}
	}
}

func TestCycles_of_confined_sandboxes_leave_nothing_on_the_host(t *testing.T) {
	onlyEmulated(t)
	e := guesttest.New(t)
	want := sandbox.Spec{Image: guesttest.ImageTag, MemoryMiB: 128, DiskMiB: 256, Network: spec.NetworkTAP, Policy: mustPolicy(t)}
	h := host{store: e.Store.State.Dir(), dirs: []string{os.TempDir(), "/run/drowse", "/run/netns", "/dev/shm"}}
	if _, err := e.Store.With(e.Launcher).MakeTemplates(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	e.Store.State.Grace = 0 // what nobody names goes at once
	sweep := func() {
		t.Helper()
		if _, err := e.Store.State.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}

	// What the first ones leave is the host's: programs that are verified once, an empty file system, cached pages.
	const first = 4
	var next, done, failures atomic.Int64
	run := func(until int64) {
		t.Helper()
		var wg sync.WaitGroup
		for range *atOnce {
			wg.Go(func() {
				for t.Context().Err() == nil {
					i := next.Add(1) - 1
					if i >= until {
						next.Add(-1)
						return
					}
					if err := cycle(t.Context(), e, want, int(i)); err != nil {
						t.Errorf("cycle %d: %v", i, err)
						failures.Add(1)
					}
					done.Add(1)
				}
			})
		}
		wg.Wait()
		sweep()
	}
	run(first)
	before, _ := settled(t, h, nil)
	t.Logf("after %d cycles: %s; %d KiB in the store; %s", done.Load(), before.figures(), diskUse(h.store), kernelFigures())
	begin := time.Now()
	for look := range *looks {
		run(first + int64(*cycles*(look+1) / *looks))
		now, more := settled(t, h, before)
		n := done.Load() - first
		t.Logf("%d cycles later, after %v: %s; %d KiB in the store; %s", n, time.Since(begin).Round(time.Second), now.figures(), diskUse(h.store), kernelFigures())
		if len(more) > 0 {
			t.Fatalf("%d cycles have left %d things:\n%s", n, len(more), strings.Join(more, "\n"))
		}
	}
	t.Logf("%d cycles have left nothing; %d of them and of the first %d failed", *cycles, failures.Load(), first)
}
