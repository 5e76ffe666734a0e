package sandbox

import (
	"errors"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestHost_has_the_sandboxes_that_there_are(t *testing.T) {
	t.Parallel()
	h := tempStore(t)
	withMetadata(t, h, "b", state.Stopped, nil)
	withMetadata(t, h, "a", state.Asleep, nil)
	list, err := h.List()
	if err != nil || len(list) != 2 || list[0].Name() != "a" || list[1].Name() != "b" {
		t.Errorf("%v, %v, want a and b", list, err)
	}
	if b, err := h.Get("a"); err != nil || b.Name() != "a" {
		t.Errorf("a: %v, %v", b, err)
	}
	if _, err := h.Get("c"); !errors.Is(err, ErrNotFound) {
		t.Errorf("c: %v, want ErrNotFound", err)
	}
}

// A use wakes a sleeping VM. It does not boot a VM that its owner stopped, and reports a missing one.
func TestUse_of_a_sandbox_that_cannot_be_woken_says_why(t *testing.T) {
	t.Parallel()
	h := tempStore(t)
	withMetadata(t, h, "stopped", state.Stopped, nil)
	for name, want := range map[string]error{"stopped": ErrNotRunning, "none": ErrNotFound} {
		b := h.Sandbox(name)
		if _, err := b.Exec(t.Context(), guest.Cmd{Argv: []string{"true"}}); !errors.Is(err, want) {
			t.Errorf("a command in %s: %v, want %v", name, err, want)
		}
		if _, err := b.Dial(t.Context(), "tcp", "127.0.0.1:80"); !errors.Is(err, want) {
			t.Errorf("a connection to %s: %v, want %v", name, err, want)
		}
	}
}
