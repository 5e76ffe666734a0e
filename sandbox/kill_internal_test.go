package sandbox

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// startingVM makes a VM in its own store. It has no process, or a made-up one.
func startingVM(t *testing.T, phase state.Phase, pid, maker int) *Host {
	t.Helper()
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.State.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "a"}, Phase: phase, PID: pid, Maker: maker})
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	return s
}

// holder starts a process that holds the lock of the VM until it is killed.
func holder(t *testing.T, s *Host) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", `exec 9>>"$0" && flock 9 && echo held && exec sleep 1000`, filepath.Join(s.State.VMDir("a"), "lock"))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "held\n" {
		t.Fatal(line, err)
	}
	return cmd
}

// Each of these kills the test itself if Kill or Delete picks the wrong process.
func TestStop_kills_nobody_but_the_process_of_the_vm(t *testing.T) {
	t.Parallel()
	t.Run("whose maker has given it up", func(t *testing.T) {
		t.Parallel()
		s := startingVM(t, state.Starting, 0, os.Getpid())
		if err := s.Sandbox("a").Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r, err := s.State.Get("a"); err != nil || r.Phase != state.Crashed || !strings.Contains(r.Problem, "never started") {
			t.Errorf("%+v, %v", r, err)
		}
	})
	t.Run("whose number another process has", func(t *testing.T) {
		for _, phase := range []state.Phase{state.Starting, state.Running} {
			s := startingVM(t, phase, os.Getpid(), 0)
			if err := s.Sandbox("a").Kill(t.Context()); err != nil {
				t.Fatal(err)
			}
			if r, err := s.State.Get("a"); err != nil || r.Phase != state.Crashed || r.PID != 0 {
				t.Errorf("%s: %+v, %v", phase, r, err)
			}
		}
	})
	t.Run("that holds the lock and does not answer", func(t *testing.T) {
		s := startingVM(t, state.Starting, 0, os.Getpid())
		cmd := holder(t, s)
		r, err := s.State.Load("a")
		if err != nil {
			t.Fatal(err)
		}
		r.Phase, r.PID, r.Maker = state.Running, cmd.Process.Pid, 0
		if err := s.State.Save(r); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() { ended <- cmd.Wait() }()
		if err := s.Sandbox("a").Delete(t.Context(), DeleteOptions{Force: true}); err != nil {
			t.Error(err)
		}
		var exit *exec.ExitError
		if err := <-ended; !errors.As(err, &exit) || exit.Exited() {
			t.Errorf("the process ended with %v", err)
		}
		if _, err := s.State.Get("a"); !errors.Is(err, ErrNotFound) {
			t.Errorf("after its removal: %v", err)
		}
	})
}

func TestRemove_waits_for_who_looks_at_the_vm(t *testing.T) {
	t.Parallel()
	s := startingVM(t, state.Stopped, 0, 0)
	// Programs that other tests start inherit its descriptor for a moment, hence LockSoon.
	l, err := s.State.LockSoon(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	removed := make(chan error)
	go func() { removed <- s.Sandbox("a").Delete(t.Context(), DeleteOptions{}) }()
	l.Release()
	if err := <-removed; err != nil {
		t.Error(err)
	}
}
