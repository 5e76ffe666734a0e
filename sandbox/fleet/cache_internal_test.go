package fleet

import (
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

func TestList_reads_nothing_again_that_sleeps_and_has_not_changed(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	f := New(h, Options{})
	for _, name := range []string{"a", "b", "c"} {
		if _, err := h.Create(t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "b"} {
		if _, err := h.Sandbox(name).Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	list := func() []records.Sandbox {
		l, err := f.List(t.Context(), records.Filter{})
		if err != nil || len(l.Sandboxes) != 3 {
			t.Fatalf("the list has %+v (%v)", l, err)
		}
		return l.Sandboxes
	}
	for { // a list always reads files again that were just written
		stamps, err := h.State.FileStamps()
		if err != nil {
			t.Fatal(err)
		}
		if stamps["a"] != "" && stamps["b"] != "" {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	list()
	for name, c := range f.cache {
		c.row.Purpose = "remembered"
		f.cache[name] = c
	}
	for _, s := range list() {
		if remembered := s.Purpose == "remembered"; remembered != (s.Status == records.Asleep) {
			t.Errorf("%s, which is %s, was remembered: %v", s.Name, s.Status, remembered)
		}
	}
}
