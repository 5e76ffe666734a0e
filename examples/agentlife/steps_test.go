package main

import (
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What needs no guest is done here with VMs in memory: a fork takes the place of the workspace, and all expires.
func TestLife_without_guests_ends_with_the_fork_in_place_and_then_with_nothing(t *testing.T) {
	vms := &sandboxtest.VMs{}
	h := vms.Host(t)
	now := time.Now()
	f := fleet.New(h, fleet.Options{Now: func() time.Time { return now }})
	ctx := t.Context()
	write := func(name, text string) {
		t.Helper()
		if err := vms.Guest(name).WriteFile("/root/text", []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	o := sandbox.CreateOptions{Metadata: &spec.Metadata{Class: lifetime.Resumable, Keep: lifetime.Keep{Expired: 1}}}
	if _, err := h.Create(ctx, sandbox.Spec{Name: workspace, Image: sandboxtest.Image}, o); err != nil {
		t.Fatal(err)
	}
	write(workspace, "as it was")
	if _, err := h.Sandbox(workspace).Fork(ctx, sandbox.ForkOptions{Children: []sandbox.ForkChild{{Name: "fork"}, {Name: "other"}}}); err != nil {
		t.Fatal(err)
	}
	write("fork", "better")
	if err := takePlace(ctx, h, "fork"); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{workspace: "better", original: "as it was"} {
		if _, err := h.Sandbox(name).Wake(ctx); err != nil {
			t.Fatal(err)
		}
		if got, err := vms.Guest(name).ReadFile("/root/text"); err != nil || string(got) != want {
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
