package process

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// partsVM is a VM of which only the parts are asked for.
type partsVM struct{ VM }

func (partsVM) Parts() instance.Parts { return instance.Parts{Spec: spec.VM{Name: "box"}} }

// What would need all of a disk is refused while that is on its way, and changes nothing.
func TestDisk_that_is_on_its_way_is_not_captured_joined_or_booted(t *testing.T) {
	store, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := &state.Record{ID: spec.NewID(), Spec: spec.VM{Name: "box"}, Snapshot: spec.NewID()}
	p := &process{store: store, r: r, log: slog.New(slog.DiscardHandler), in: partsVM{}, arriving: &arriving{over: make(chan struct{})}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.diskSnapshot(ctx, "", ""); !errors.Is(err, spec.ErrArriving) {
		t.Errorf("a snapshot of the disk: %v", err)
	}
	if _, err := p.squash(ctx); !errors.Is(err, spec.ErrArriving) {
		t.Errorf("joining layers: %v", err)
	}
	dir := store.ArrivingDir(r.Snapshot)
	for _, name := range []string{snapshot.ManifestName, "comes"} {
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	st, err := store.Absolute(disk.Stack{Layers: []string{"comes"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.writable(ctx, st); !errors.Is(err, spec.ErrArriving) {
		t.Errorf("a boot: %v", err)
	}
	if entries, err := os.ReadDir(store.LayerDir()); err != nil || len(entries) > 0 || r.NextLayer != 0 {
		t.Errorf("layers are %v, %v", entries, err)
	}
}
