package sandbox

import (
	"errors"
	"log/slog"
	"os"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/vmm"
)

// A VM for which the host has no memory stays as it was, and the caller learns why.
func TestServe_vm_without_room_in_memory_is_left_as_it_was(t *testing.T) {
	const snap = "11111111111111111111111111111111"
	for _, c := range []struct {
		name     string
		before   state.Phase
		after    state.Phase
		snapshot string
		unwanted bool // the caller no longer waits
		want     error
	}{
		{"one that sleeps", state.Asleep, state.Asleep, snap, false, vmm.ErrHostMemory},
		{"one that has stopped", state.Stopped, state.Stopped, "", false, vmm.ErrHostMemory},
		{"one that is being made", state.Starting, state.Stopped, "", false, vmm.ErrHostMemory},
		{"one that waits and is canceled", state.Asleep, state.Asleep, snap, true, control.ErrCanceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := Open(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			l := limits.Limits{MemoryOvercommit: limits.MinOvercommit}
			if c.unwanted {
				l.MemoryWaitSeconds = limits.MaxMemoryWaitSeconds
			}
			if err := l.Write(s.State.Dir()); err != nil {
				t.Fatal(err)
			}
			_, capacity, err := limits.AwakeMemory(s.State.Dir())
			if err != nil {
				t.Fatal(err)
			}
			release, err := limits.AdmitMemory(t.Context(), s.State.Dir(), int(capacity), true)
			if err != nil {
				t.Fatal(err)
			}
			lock, err := s.State.Create(&state.Record{
				Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "a", MemoryMiB: 128}, Phase: c.before, Snapshot: c.snapshot,
			})
			if err != nil {
				t.Fatal(err)
			}
			lock.Release()
			var said []control.Report
			err = process.Serve(t.Context(), s.State, "a", process.ServeOptions{
				Snapshot: c.snapshot, Log: slog.New(slog.DiscardHandler), Report: func(r control.Report) { said = append(said, r) },
				Wanted: func() bool { return !c.unwanted },
			})
			if !errors.Is(err, c.want) || len(said) != 1 || said[0].Error == nil || !c.unwanted && !errors.Is(said[0].Error, c.want) {
				t.Errorf("%v, %+v", err, said)
			}
			if layers, err := os.ReadDir(s.State.LayerDir()); err != nil || len(layers) != 0 {
				t.Errorf("a disk was begun: %v, %v", layers, err)
			}
			if r, err := s.State.Load("a"); err != nil || r.Phase != c.after || r.PID != 0 {
				t.Errorf("it is %+v now (%v), want %s", r, err, c.after)
			}
			if err := release(); err != nil {
				t.Error(err)
			}
			if used, _, err := limits.AwakeMemory(s.State.Dir()); err != nil || used != 0 {
				t.Errorf("%d MiB are taken by nobody (%v)", used, err)
			}
		})
	}
}
