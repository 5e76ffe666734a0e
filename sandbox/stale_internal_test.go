package sandbox

import (
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// An order to wake or boot a VM may come late, after the VM has run. The record must stay as that run left it.
func TestServe_refuses_an_order_from_before_the_VM_has_run(t *testing.T) {
	const old, last = "11111111111111111111111111111111", "22222222222222222222222222222222"
	for _, c := range []struct {
		name  string
		phase state.Phase
		maker int
		order string // the snapshot to wake from; empty is a boot
		late  bool
	}{
		{"a wake from an older sleep", state.Asleep, 0, old, true},
		{"a wake of one that has ended since", state.Stopped, 0, last, true},
		{"a boot of one that sleeps", state.Asleep, 0, "", true},
		{"a wake from the last sleep", state.Asleep, 0, last, false},
		{"a clone that is being made", state.Starting, os.Getpid(), last, false},
		{"a boot of one that has stopped", state.Stopped, 0, "", false},
		{"a boot of one that is being made", state.Starting, os.Getpid(), "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := Open(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			// The kernel does not exist, so an accepted order fails before it needs KVM.
			l, err := s.State.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "a"}, Phase: c.phase, Maker: c.maker, Snapshot: last})
			if err != nil {
				t.Fatal(err)
			}
			l.Release()
			before, err := os.ReadFile(s.State.RecordPath("a"))
			if err != nil {
				t.Fatal(err)
			}
			var told control.Report
			err = process.Serve(t.Context(), s.State, "a", process.ServeOptions{Snapshot: c.order, Log: slog.New(slog.DiscardHandler), Report: func(r control.Report) { told = r }})
			if late := errors.Is(err, ErrRunning); err == nil || late != c.late {
				t.Fatalf("got %v, want it refused: %v", err, c.late)
			}
			if !c.late {
				return
			}
			if told.Error == nil || !errors.Is(told.Error, ErrRunning) || !strings.Contains(told.Error.Error(), "try again") {
				t.Errorf("who has ordered it is told %v", told.Error)
			}
			if after, err := os.ReadFile(s.State.RecordPath("a")); err != nil || string(after) != string(before) {
				t.Errorf("the record has become %s (%v)", after, err)
			}
		})
	}
}
