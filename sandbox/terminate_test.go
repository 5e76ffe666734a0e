package sandbox_test

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// shutDown does what systemd does to the processes of a scope, and at the end to all others, when the host shuts
// down: it sends SIGTERM to each, and SIGKILL after a timeout to those that still run. systemd waits 90 s; this
// waits longer, for a busy machine.
func shutDown(t *testing.T, pids map[string]int) {
	t.Helper()
	fds := map[string]int{}
	for name, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatalf("%s, process %d: %v", name, pid, err)
		}
		defer unix.Close(fd)
		fds[name] = fd
		if err := unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	until := time.Now().Add(10 * time.Minute)
	for name, fd := range fds {
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, max(0, int(time.Until(until).Milliseconds())))
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || n == 0 {
				t.Errorf("%s has not ended (%v) and is killed", name, err)
				_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			}
			break
		}
	}
}

func TestAttack_host_that_shuts_down_takes_the_memory_of_vms_that_run(t *testing.T) {
	t.Parallel()
	e, snap, said := base(t)
	pids := map[string]int{}
	running := func(name string) {
		t.Helper()
		r, err := e.Store.State.Get(name)
		if err != nil || r.Phase != state.Running {
			t.Fatalf("%s is %+v, %v", name, r, err)
		}
		pids[name] = r.PID
	}
	for _, name := range []string{"plain", "refuses"} {
		clone(e, snap, name)
		running(name)
	}
	putHook(e, "refuses", "10-no", "exit 1")
	ephemeral := spec.Metadata{Class: lifetime.Ephemeral}
	if _, err := e.Store.With(e.Launcher).Clone(t.Context(), snap, sandbox.CloneOptions{Name: "ephemeral", Metadata: &ephemeral}); err != nil {
		t.Fatal(err)
	}
	running("ephemeral")
	// One VM has an open connection that holds it awake, and one is just waking.
	agent := e.Agent("plain")
	p, err := agent.Start(t.Context(), guest.Cmd{Argv: []string{"sleep", "1000000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	clone(e, snap, "waking")
	e.Sleep("waking")
	woken := make(chan error, 1)
	go func() {
		_, err := e.Store.With(e.Launcher).Sandbox("waking").Wake(t.Context())
		woken <- err
	}()
	for r, err := e.Store.State.Get("waking"); pids["waking"] == 0; r, err = e.Store.State.Get("waking") {
		if err != nil {
			t.Fatal(err)
		}
		if r.Phase == state.Starting || r.Phase == state.Running {
			pids["waking"] = r.PID
		}
	}
	shutDown(t, pids)
	if err := <-woken; err != nil {
		t.Logf("whoever woke it is told: %v", err) // it may have fallen asleep before it could report
	}
	for _, name := range []string{"plain", "refuses", "waking"} {
		if r, err := e.Store.State.Get(name); err != nil || r.Phase != state.Asleep {
			t.Errorf("%s is %+v, %v", name, r, err)
			continue
		}
		e.Wake(name)
		if got := ask(e, name); got != said {
			t.Errorf("after the host has come back the keeper in %s says %q, want %q", name, got, said)
		}
		if err := e.Store.Sandbox(name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
	}
	if r, err := e.Store.State.Get("ephemeral"); err != nil || r.Phase != state.Stopped {
		t.Errorf("the ephemeral one is %+v, %v", r, err)
	}
}

func TestStandby_processes_end_when_they_are_told_to(t *testing.T) {
	t.Parallel()
	e := guesttest.New(t)
	pool, err := pool.New(e.Store.State, e.Launcher, pool.Options{Processes: 1, Shapes: []spec.Shape{{MemoryMiB: 128, VCPUs: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := pool.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	shutDown(t, map[string]int{"the process that stands by": pool.PIDs()[0]})
}
