package sandbox_test

import (
	"errors"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// made makes a sandbox, and returns its record.
func made(t *testing.T, h *sandbox.Host, want sandbox.Spec, o sandbox.CreateOptions) *state.Record {
	t.Helper()
	want.Image = "test"
	b, err := h.Create(t.Context(), want, o)
	if err != nil {
		t.Fatal(err)
	}
	r, err := h.State.Get(b.Name())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// makeWanted makes the templates that are wanted, and checks how many.
func makeWanted(t *testing.T, h *sandbox.Host, want int) {
	t.Helper()
	if list, err := h.MakeTemplates(t.Context()); err != nil || len(list) != want {
		t.Fatalf("%d templates made (%v), want %d", len(list), err, want)
	}
}

func TestCreate_boots_once_and_then_starts_from_the_template(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{}); r.Template != "" || r.Booted != "there was no template for it" {
		t.Errorf("the first is from template %q, or has booted because %q", r.Template, r.Booted)
	}
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{}); r.Booted != "its template was not made yet" {
		t.Errorf("the second has booted because %q", r.Booted)
	}
	makeWanted(t, h, 1)
	makeWanted(t, h, 0)
	r := made(t, h, sandbox.Spec{Name: "third"}, sandbox.CreateOptions{})
	if r.Template == "" || r.Booted != "" || r.Snapshot != "" || r.Parent != "" || r.Lineage != "" || r.Base != r.Template {
		t.Errorf("the third has the record %+v", r)
	}
	if r := made(t, h, sandbox.Spec{}, sandbox.CreateOptions{NoTemplate: true}); r.Template != "" || r.Booted == "" {
		t.Errorf("with NoTemplate it is from template %q, or has booted because %q", r.Template, r.Booted)
	}
	if _, err := h.Sandbox("third").Wake(t.Context()); err != nil {
		t.Error(err)
	}
	if err := errors.Join(h.Sandbox("third").Kill(t.Context())); err != nil {
		t.Error(err)
	}
}
