package vmm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// fork makes an image of a running machine, which keeps running. It returns the image, the machine's state, and its
// RAM at that moment.
func fork(t *testing.T, m *Machine, mode scribbleMode, ahead bool, o pager.FreezeOptions) (i *pager.Image, states []State, ram []byte) {
	t.Helper()
	i, err := pager.NewImage(m.Memory())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { i.Close() })
	if ahead {
		if _, err := m.TakeDirtyRunning(); err != nil {
			t.Fatal(err)
		}
		if err := i.CopyRunning(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	f, err := pager.Prepare(m.Memory(), nil, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	states, err = m.Export()
	set := guestmem.NewPageSet(m.Memory().Size() / guestmem.PageSize)
	if m.prebuilt.cfg.TrackDirty {
		dirty, derr := m.TakeDirty()
		err = errors.Join(err, derr)
		set = dirty
	}
	if !ahead {
		set.Add(0, set.Pages())
	}
	if err != nil {
		t.Fatal(err)
	}
	ram = ramImage(t, m, mode, nil)
	if err := errors.Join(f.Freeze(set), m.Resume()); err != nil {
		t.Fatal(err)
	}
	err = i.CopySet(t.Context(), set, f)
	if err := errors.Join(err, f.Close(), i.Seal()); err != nil {
		t.Fatal(err)
	}
	return i, states, ram
}

// child makes a machine from an image. The machine does not run yet: KVM writes to the RAM of a machine that takes
// on a state.
func child(t *testing.T, image *os.File, mode scribbleMode, tracked bool) *Machine {
	t.Helper()
	mem, err := guestmem.NewPrivate(mode.ram, image)
	if err != nil {
		t.Fatal(err)
	}
	m, err := testConfig{TrackDirty: tracked}.with(mem)
	if err != nil {
		t.Fatal(errors.Join(err, mem.Close()))
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Close(), mem.Close()); err != nil {
			t.Error(err)
		}
	})
	return m
}

// A guest, its children and theirs continue from the same RAM and never see each other's writes. This holds if RAM
// was copied ahead of the pause, if all of it was write-protected in the pause, and if the machine keeps no log.
func TestA_childs_RAM_is_the_parents_at_the_fork_byte_for_byte(t *testing.T) {
	for _, how := range []struct {
		name    string
		ahead   bool
		opts    pager.FreezeOptions
		tracked bool
		mode    scribbleMode
	}{
		{"copied ahead", true, pager.FreezeOptions{Expect: 80 << 20 / guestmem.PageSize}, true, scribbleModes[1]},
		{"copied ahead, rest protected", true, pager.FreezeOptions{CopyBytes: 2 << 20}, true, scribbleModes[0]},
		{"all protected, no log", false, pager.FreezeOptions{CopyBytes: 10 << 20}, false, scribbleModes[2]},
	} {
		mode := how.mode
		t.Run(fmt.Sprintf("%s, %s", how.name, mode.name), func(t *testing.T) {
			parent := startScribblerOf(t, mode, testConfig{TrackDirty: how.tracked})
			if err := parent.Memory().Write(0x400000, bytes.Repeat([]byte{0xa5}, 11<<20)); err != nil {
				t.Fatal(err)
			}
			scribble(t, parent, 100)
			image, states, ram := fork(t, parent, mode, how.ahead, how.opts)
			scribble(t, parent, 100)
			a, b := child(t, image.File(), mode, how.tracked), child(t, image.File(), mode, how.tracked)
			for _, m := range []*Machine{a, b} {
				if got := ramImage(t, m, mode, nil); !bytes.Equal(got, ram) {
					t.Fatalf("a child's RAM differs from the parent's at the fork, first at %#x", differ(got, ram))
				}
			}
			if err := errors.Join(a.Import(states), a.Start()); err != nil {
				t.Fatal(err)
			}
			scribble(t, a, 100)
			if err := a.Memory().Discard(0x600000, 1<<20); err != nil {
				t.Fatal(err)
			}
			if got := ramImage(t, b, mode, nil); !bytes.Equal(got, ram) {
				t.Fatalf("a child sees its sibling's writes, at %#x", differ(got, ram))
			}
			// Fork the child too, which has run and given memory back.
			image2, states2, ram2 := fork(t, a, mode, how.ahead, how.opts)
			scribble(t, a, 100)
			c := child(t, image2.File(), mode, how.tracked)
			if got := ramImage(t, c, mode, nil); !bytes.Equal(got, ram2) {
				t.Fatalf("a grandchild's RAM differs from the child's at the fork, first at %#x", differ(got, ram2))
			}
			if err := errors.Join(b.Import(states), b.Start(), c.Import(states2), c.Start()); err != nil {
				t.Fatal(err)
			}
			for _, m := range []*Machine{parent, a, b, c} {
				scribble(t, m, 20)
			}
		})
	}
}

func differ(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}
