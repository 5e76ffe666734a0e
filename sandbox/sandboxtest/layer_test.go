package sandboxtest_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/faultfs"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// stackOf returns the disk of a VM.
func stackOf(t *testing.T, h *sandbox.Host, r *state.Record) disk.Stack {
	t.Helper()
	st, err := h.State.Absolute(r.Disk)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestWake_uses_the_layer_that_its_sleep_has_left_unless_something_has_written_to_it(t *testing.T) {
	write := func(t *testing.T, st disk.Stack) {
		d, err := disk.Open(st, disk.Options{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = d.WriteAt(make([]byte, 512), d.Size()-512)
		if err = errors.Join(err, d.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		meanwhile func(t *testing.T, h *sandbox.Host, left string, st disk.Stack)
		used      bool
	}{
		"nothing":                           {func(*testing.T, *sandbox.Host, string, disk.Stack) {}, true},
		"opened":                            {func(t *testing.T, _ *sandbox.Host, _ string, st disk.Stack) { mustClose(t, st) }, true},
		"written, as by a wake that failed": {func(t *testing.T, _ *sandbox.Host, _ string, st disk.Stack) { write(t, st) }, false},
		"removed": {func(t *testing.T, _ *sandbox.Host, left string, _ disk.Stack) {
			if err := os.Remove(left); err != nil {
				t.Fatal(err)
			}
		}, false},
		"damaged": {func(t *testing.T, _ *sandbox.Host, left string, _ disk.Stack) {
			if err := os.Truncate(left, 100); err != nil {
				t.Fatal(err)
			}
		}, false},
		"swept": {func(t *testing.T, h *sandbox.Host, left string, _ disk.Stack) {
			h.State.Grace = 0
			if _, err := h.State.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(left); err != nil {
				t.Errorf("the sweep has removed what the wake needs: %v", err)
			}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			v := &sandboxtest.VMs{}
			h := v.Host(t)
			b := create(t, h, sandbox.Spec{Name: "a"})
			for range 2 { // the second sleep has the layer of the first wake below
				if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
					t.Fatal(err)
				}
				r := want(t, h, "a", state.Asleep)
				left := filepath.Join(h.State.LayerDir(), r.LastLayer())
				tc.meanwhile(t, h, left, stackOf(t, h, r).With(left))
				if _, err := b.Wake(t.Context()); err != nil {
					t.Fatal(err)
				}
				now := want(t, h, "a", state.Running)
				if used := stackOf(t, h, now).Top() == left; used != tc.used {
					t.Errorf("the disk is %v, and the sleep had left %s", now.Disk, left)
				}
				if err := v.Guest("a").WriteFile("/root/word", []byte(name)); err != nil {
					t.Fatal(err)
				}
			}
			if err := b.Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
				t.Fatal(err)
			}
			h.State.Grace = 0
			if _, err := h.State.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
			if entries, err := os.ReadDir(h.State.LayerDir()); err != nil || len(entries) > 0 {
				t.Errorf("after its removal there are %v, %v", entries, err)
			}
		})
	}
}

func mustClose(t *testing.T, st disk.Stack) {
	t.Helper()
	d, err := disk.Open(st, disk.Options{})
	if err == nil {
		err = d.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// What a wake waits for: its record's file and directory.
func TestWake_syncs_its_record_once_and_no_layer(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	b := create(t, h, sandbox.Spec{Name: "a"})
	if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	sim, err := faultfs.NewSim(h.State.VMDir("a"))
	if err != nil {
		t.Fatal(err)
	}
	h.State.FS = sim // its process has ended
	if _, err := b.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, op := range []faultfs.Op{faultfs.OpSync, faultfs.OpSyncDir, faultfs.OpRename} {
		if n := sim.Count(op); n != 1 {
			t.Errorf("%d of %s, want 1", n, op)
		}
	}
}
