package main

import (
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What needs no guest is done here with VMs in memory: a fork takes the place of the workspace, and all expires.
func TestLife_without_guests_ends_with_the_fork_in_place_and_then_with_nothing(t *testing.T) {
	vms := fleettest.New()
	now := time.Now()
	clock := func() time.Time { return now }
	vms.Now = clock
	f := fleet.New(vms, fleet.Options{Now: clock})
	ctx := t.Context()
	label := state.Metadata{Class: lifetime.Resumable, Keep: lifetime.Keep{Expired: 1}}
	if _, _, err := f.GetOrCreate(ctx, fleet.Request{Spec: sandbox.Spec{Name: workspace, Image: "app"}, Metadata: label}); err != nil {
		t.Fatal(err)
	}
	if err := vms.Write(workspace, "as it was"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Fork(ctx, workspace, []fleet.Child{{Name: "fork"}, {Name: "other"}}); err != nil {
		t.Fatal(err)
	}
	if err := vms.Write("fork", "better"); err != nil {
		t.Fatal(err)
	}
	if err := takePlace(ctx, f, "fork"); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{workspace: "better", original: "as it was"} {
		if _, err := f.Wake(ctx, name); err != nil {
			t.Fatal(err)
		}
		if got, err := vms.Read(name); err != nil || got != want {
			t.Errorf("%s has %q (%v), want %q", name, got, err, want)
		}
	}
	all, err := f.List(ctx, records.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range all.Sandboxes {
		names = append(names, s.Name)
	}
	if !slices.Equal(names, []string{"other", workspace, original}) {
		t.Errorf("there are %v", names)
	}
	ticking := func() time.Time {
		now = now.Add(time.Second)
		return now
	}
	if n, err := expireAll(ctx, f, ticking); err != nil || n != 3 {
		t.Errorf("%d were removed, want 3 (%v)", n, err)
	}
}
