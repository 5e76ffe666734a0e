package sandbox

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
	"github.com/drowse-vm/drowse/snapshot"
)

func TestAttack_damaged_memory_leaves_a_way_to_the_disk(t *testing.T) {
	const layer = "ext4-1-64-0123456789abcdef.layer"
	for name, damage := range map[string]func(path string) error{
		"not there": os.Remove,
		"cut off":   func(path string) error { return os.Truncate(path, 100) },
		"overwritten": func(path string) error {
			return os.WriteFile(path, make([]byte, 4096), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := statetest.NewHost(t)
			s := &Host{State: h.Store}
			h.Layer(layer, "committed")
			r := h.Record("vm", layer)
			r.Snapshot = h.Snapshot(r, state.KindSleep, nil)
			l, err := h.Create(r)
			if err != nil {
				t.Fatal(err)
			}
			l.Release()
			if err := damage(filepath.Join(h.SnapshotDir(r.Snapshot), snapshot.MemoryName)); err != nil {
				t.Fatal(err)
			}
			if _, err := snapshot.Open(h.SnapshotDir(r.Snapshot)); err == nil {
				t.Fatal("its memory is not damaged")
			} else if err := unreadable("vm", err); !strings.Contains(err.Error(), `Sandbox("vm").Start with DiscardMemory`) {
				t.Errorf("a wake says %v", err)
			}
			// Everything about the disk needs only the manifest.
			if st, err := h.SnapshotDisk(r.Snapshot); err != nil || len(st.Layers) != 1 {
				t.Errorf("its disk is %v (%v)", st, err)
			}
			if d, err := h.InspectSnapshot(r.Snapshot); err != nil || d.Problem == "" || d.VM != "vm" || !slices.Equal(d.UsedBy, []string{"vm"}) {
				t.Errorf("looked at it is %+v (%v)", d, err)
			}
			if list, err := h.Snapshots(); err != nil || len(list) != 1 || list[0].Problem == "" || list[0].VM != "vm" || list[0].Kind != state.KindSleep {
				t.Errorf("listed it is %+v (%v)", list, err)
			}
			m, err := snapshot.ReadManifest(h.SnapshotDir(r.Snapshot))
			if err != nil {
				t.Fatal(err)
			}
			agent := filepath.Join(t.TempDir(), "agent")
			h.Write(agent, "a program")
			if made, err := s.With(pool.Launcher{Agent: agent}).recordFromDisk(t.Context(), Spec{Name: "other", Kernel: "built"}, m); err != nil || !slices.Equal(made.Disk.Layers, r.Disk.Layers) {
				t.Errorf("another VM of its disk is %+v (%v)", made, err)
			}
			// The start itself needs a guest. It finds a stopped VM with that disk, so `drowse start` works even
			// if this process is killed here.
			if _, err := s.With(pool.Launcher{}).Sandbox("vm").Start(t.Context(), StartOptions{}); !errors.Is(err, ErrNotRunning) {
				t.Errorf("a start that does not give up the memory: %v", err)
			}
			if err := s.discardMemory(context.Background(), "vm"); err != nil {
				t.Fatal(err)
			}
			got, err := h.Get("vm")
			if err != nil || got.Phase != state.Stopped || got.Snapshot != r.Snapshot || !slices.Equal(got.Disk.Layers, r.Disk.Layers) {
				t.Errorf("it is %+v (%v)", got, err)
			}
			if got := h.Word(got.Disk.Layers...); got != "committed" {
				t.Errorf("its disk begins with %q", got)
			}
		})
	}
}
