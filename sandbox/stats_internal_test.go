package sandbox

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestProcessStats_are_those_of_the_process(t *testing.T) {
	const size = 32 << 20
	held := make([]byte, size)
	for i := 0; i < size; i += 4096 {
		held[i] = 1
	}
	// Use the processor for at least a tick.
	for deadline := time.Now().Add(time.Minute); ; {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		if u.Utime.Nano() > int64(50*time.Millisecond) || time.Now().After(deadline) {
			break
		}
	}
	h, err := processStats(os.Getpid())
	runtime.KeepAlive(held)
	if err != nil {
		t.Fatal(err)
	}
	if h.PID != os.Getpid() || h.CPUUserMs <= 0 || h.MemoryPrivate < size || h.MemoryShared == 0 {
		t.Errorf("got %+v", h)
	}
	// A process that has just started. The kernel counts in ticks.
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	young, err := processStats(cmd.Process.Pid)
	if err != nil || young.AwakeMs > h.AwakeMs {
		t.Errorf("after %v ms: %+v, %v", h.AwakeMs, young, err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if _, err := processStats(cmd.Process.Pid); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
		t.Errorf("a process that is gone gives %v", err)
	}
}

func TestProcessStats_sum_up_memory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "smaps_rollup")
	text := "55d0-7fff ---p 00000000 00:00 0    [rollup]\nRss: 100 kB\nShared_Clean: 1 kB\nShared_Dirty: 2 kB\nPrivate_Clean:  4 kB\nPrivate_Dirty: 8 kB\nSwap: 16 kB\nSwapPss: 5 kB\nPrivate_Hugetlb: 32 kB\nnonsense\nPrivate_Dirty: -1 kB\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var h spec.HostStats
	if err := addMemory(&h, path); err != nil || h != (spec.HostStats{MemoryPrivate: 44 << 10, MemoryShared: 3 << 10, MemorySwapped: 16 << 10}) {
		t.Errorf("got %+v, %v", h, err)
	}
}

func TestStats_of_a_VM_that_does_not_run_are_refused(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.State.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "vm"}, Phase: state.Asleep})
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	if _, err := s.Sandbox("vm").Stats(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("asleep: %v", err)
	}
	if _, err := s.Sandbox("other").Stats(t.Context()); !errors.Is(err, ErrNotFound) {
		t.Errorf("not there: %v", err)
	}
}
