package vmm

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/lazyram"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// lazily restores a paused machine as one whose pages come when they are touched.
func lazily(t *testing.T, from *Machine) (*Machine, *pager.Pager) {
	t.Helper()
	states, err := from.Export()
	if err != nil {
		t.Fatal(err)
	}
	mem, p := lazyram.Restore(t, from.Memory())
	m, err := testConfig{TrackDirty: true}.with(mem)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Close(), p.Close(), mem.Close()); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(m.Import(states), m.Start()); err != nil {
		t.Fatal(err)
	}
	return m, p
}

// What is evicted comes back to the byte, whoever has written to RAM since the restore.
func TestEvicted_pages_come_back_as_they_were(t *testing.T) {
	noise := make([]byte, 16<<10)
	for i := range noise {
		noise[i] = byte(rand.Uint32())
	}
	name := filepath.Join(t.TempDir(), "noise")
	if err := os.WriteFile(name, noise, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, mode := range scribbleModes {
		t.Run(mode.name, func(t *testing.T) {
			first := startScribbler(t, mode)
			for _, at := range []guestmem.GPA{0x400000, vmmArea} {
				if err := first.Memory().Write(at, bytes.Repeat([]byte{0xa5}, 3<<20)); err != nil {
					t.Fatal(err)
				}
			}
			scribble(t, first, 100)
			vmmWrites(t, first, f)
			if err := first.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
			m, p := lazily(t, first)
			if _, err := m.Evict(); !errors.Is(err, ErrNotPaused) {
				t.Errorf("of a running machine: got %v, want ErrNotPaused", err)
			}
			var before, after []byte
			for k := range 8 {
				scribble(t, m, 1+rand.Uint64N(50))
				vmmWrites(t, m, f)
				if err := m.Pause(t.Context()); err != nil {
					t.Fatal(err)
				}
				if k%2 == 0 { // else many are missing already
					before = ramImage(t, m, mode, before)
				}
				pages, err := m.Evict()
				if err != nil {
					t.Fatal(err)
				}
				if k%2 == 0 {
					if pages < 5<<20/guestmem.PageSize {
						t.Errorf("%d pages evicted, want those of 5 MiB at least", pages)
					}
					if after = ramImage(t, m, mode, after); !bytes.Equal(after, before) {
						off := differ(after, before)
						t.Fatalf("pause %d: RAM has changed at %#x (%s)", k, off, areaOf(mode, off))
					}
				}
				// The host's kernel may still have been waiting for the page of the vCPU's last fault.
				if again, err := m.Evict(); k%2 != 0 && again > 1 || err != nil {
					t.Errorf("evicted again in one pause: %d pages, %v", again, err)
				}
				if err := m.Resume(); err != nil {
					t.Fatal(err)
				}
			}
			if p.Stats().Evicted.Load() == 0 {
				t.Error("the pager has evicted nothing")
			}
			if err := m.Pause(context.Background()); err != nil {
				t.Fatal(err)
			}
			if _, err := m.TakeDirty(); err != nil {
				t.Fatal(err)
			}
			if pages, err := m.Evict(); pages != 0 || err != nil || !m.DirtyTaken() {
				t.Errorf("after a capture %d pages are evicted: %v", pages, err)
			}
		})
	}
}
