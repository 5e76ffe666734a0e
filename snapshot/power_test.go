package snapshot

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/faultfs"
	"github.com/drowse-vm/drowse/internal/test/racetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// A history writes, compacts and removes snapshots one after the other. When the power fails, each of its steps is
// over or not.
type history struct {
	dir  string
	fs   osfile.FS
	rams map[string]*ram
	// sure names the snapshots that must exist after a crash now, maybe those that may exist. All of them must be
	// whole.
	sure, maybe map[string]bool
}

// historyRAM returns RAM so small that a seed takes milliseconds.
func historyRAM() *ram {
	r := newRAM(Slot{Size: 700 * guestmem.PageSize}, Slot{GPA: 4 << 30, Size: 300 * guestmem.PageSize})
	return r
}

func newHistory(dir string, fs osfile.FS) *history {
	return &history{dir: dir, fs: fs, rams: map[string]*ram{}, sure: map[string]bool{}, maybe: map[string]bool{}}
}

func (h *history) path(name string) string { return filepath.Join(h.dir, name) }

func (h *history) create(name, base string, r *ram, changed *guestmem.PageSet, maxFiles int) error {
	spec := r.spec()
	spec.FS, spec.maxFiles, spec.Writers = h.fs, maxFiles, 1
	if base != "" {
		s, err := Open(h.path(base))
		if err != nil {
			return err
		}
		defer s.Close()
		spec.Base, spec.Changed = s, changed
	}
	h.rams[name], h.maybe[name] = r.clone(), true
	if _, err := Create(context.Background(), h.path(name), spec); err != nil {
		return err
	}
	h.sure[name] = true
	return nil
}

func (h *history) compact(name string) error {
	_, err := compact(context.Background(), h.path(name), h.fs)
	return err
}

func (h *history) remove(name string) error {
	h.sure[name] = false
	if err := remove(h.path(name), h.fs); err != nil {
		return err
	}
	h.maybe[name] = false
	return nil
}

// run executes the history until something fails.
func (h *history) run(seed uint64) error {
	rnd := rand.New(rand.NewPCG(seed, 2))
	r := historyRAM()
	next := func() *guestmem.PageSet {
		changed := guestmem.NewPageSet(r.total())
		for range 3 {
			p := rnd.Uint64N(r.total())
			changed.Add(p, p+4)
			for q := p; q < min(p+4, r.total()); q++ {
				r.set(q, rnd)
			}
		}
		return changed
	}
	for range 3 {
		next()
	}
	fork := r.clone()
	for _, step := range []func() error{
		func() error { return h.create("a", "", r, nil, 0) },
		func() error { return h.create("b", "a", r, next(), 0) },
		func() error { return h.create("c", "b", r, next(), 0) },
		func() error { return h.remove("a") },
		func() error { return h.create("d", "c", r, next(), 2) },
		func() error { return h.compact("c") },
		func() error { return h.create("e", "d", r, next(), 1) },
		func() error { return h.remove("d") },
		func() error { return h.compact("b") },
		func() error { return h.create("f", "", fork, nil, 0) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// verify compares every page.
func (r *ram) verify(dir string) error {
	s, err := Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := r.compareOpen(s); err != nil {
		return err
	}
	return s.Verify(context.Background())
}

// check returns what is wrong with what a crash has left in dir.
func (h *history) check(dir string) error {
	newest := ""
	for name, r := range h.rams {
		err := r.compare(filepath.Join(dir, name))
		switch {
		case err == nil:
			if !h.maybe[name] {
				return fmt.Errorf("%s has come back", name)
			}
			newest = max(newest, name)
		case errors.Is(err, ErrNotFound) && !h.sure[name]:
		default:
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if h.rams[e.Name()] == nil && !strings.HasPrefix(e.Name(), tempPrefix) {
			return fmt.Errorf("%s is there", e.Name())
		}
	}
	// The history must be able to continue.
	if _, err := Clean(dir); err != nil {
		return err
	}
	if newest == "" {
		return nil
	}
	if err := h.rams[newest].verify(filepath.Join(dir, newest)); err != nil {
		return err
	}
	after := newHistory(dir, fast)
	r := h.rams[newest].clone()
	changed := guestmem.NewPageSet(r.total())
	changed.Add(1, 2)
	delete(r.pages, 1)
	if err := after.create("next", newest, r, changed, 2); err != nil {
		return err
	}
	return r.compare(filepath.Join(dir, "next"))
}

var powerSeeds = flag.Int("snapshot.powercuts", 0, "how many losses of power to simulate; 0: 1,000, or 100 with -short or -race")

// After a loss of power, unsynced data is present, absent or partial, in any order. Every snapshot that Create has
// reported as written is whole, and any other is whole or absent.
func TestA_loss_of_power_leaves_every_snapshot_whole_or_not_there(t *testing.T) {
	all, counted := simHistory(t, 0)
	if err := all.run(0); err != nil {
		t.Fatal(err)
	}
	total := counted.Calls()
	// Each history is cut once and crashes a few times.
	const each = 10
	n := *powerSeeds
	if n == 0 {
		n = racetest.Cases(1000, 100)
	}
	scratch := fastDir(t)
	for i := range n / each {
		seed := uint64(i)
		h, sim := simHistory(t, seed)
		sim.CutAfter(rand.New(rand.NewPCG(seed, 3)).IntN(total + 5))
		if err := h.run(seed); err != nil && !errors.Is(err, faultfs.ErrPowerCut) {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for k := range uint64(each) {
			dest := filepath.Join(scratch, "crashed")
			if err := os.Mkdir(dest, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := sim.Crash(seed*each+k, dest); err != nil {
				t.Fatal(err)
			}
			if err := h.check(dest); err != nil {
				t.Fatalf("seed %d, crash %d: %v", seed, k, err)
			}
			if err := os.RemoveAll(dest); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.RemoveAll(h.dir); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d crashes of histories with %d calls", n/each*each, total)
}

func simHistory(t *testing.T, seed uint64) (*history, *faultfs.Sim) {
	t.Helper()
	dir := filepath.Join(fastDir(t), fmt.Sprint(seed))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	sim, err := faultfs.NewSim(dir)
	if err != nil {
		t.Fatal(err)
	}
	return newHistory(dir, sim), sim
}

// remove is Remove on a given file system.
func remove(dir string, fsys osfile.FS) error {
	temp, err := discard(dir, fsys)
	if err != nil || temp == "" {
		return err
	}
	return fsys.RemoveAll(temp)
}
