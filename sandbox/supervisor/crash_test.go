package supervisor

import (
	"encoding/json"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestA_process_that_is_killed_is_told_of_once(t *testing.T) {
	s, err := sandbox.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// This process stands in for a VM's. Only its pid and the holder of the lock matter.
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(s.State.Dir(), "vms", "a")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	record, err := json.Marshal(state.Record{Version: 1, ID: "1", Spec: sandbox.Spec{Name: "a"}, Phase: state.Running, PID: cmd.Process.Pid})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "vm.json")
	if err := os.WriteFile(path, record, 0o600); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	v := &supervisor{
		host: s, stamps: noticed[map[string]string]{read: s.State.FileStamps}, log: slog.New(slog.DiscardHandler), seen: map[string]string{}, pids: map[string]int{}, want: map[string][]port{},
		listeners: map[port]closer{}, refused: map[port]string{}, guarded: map[string]guarded{},
	}
	crashes := func() (n int) {
		t.Helper()
		if err := v.look(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := s.State.Events().Read(t.Context(), events.ReadOptions{}, func(e events.Event) error {
			if e.Type == events.Crashed && e.Sandbox == "a" && e.Cause == events.Killed {
				n++
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for range 2 {
		if n := crashes(); n != 0 {
			t.Fatalf("told %d times while it runs", n)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	lock.Close()
	for range 3 {
		if n := crashes(); n != 1 {
			t.Fatalf("told %d times", n)
		}
	}
}
