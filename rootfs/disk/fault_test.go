package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/faultfs"
	"golang.org/x/sys/unix"
)

// script is a short life of a disk that makes every kind of call. It continues after an error, as a guest that
// gets an I/O error does, and returns the errors.
func (w *world) script() (errs []error) {
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	var full, part = [2]int64{0, 5 * BlockSize}, [2]int64{BlockSize + 512, 1024}
	writeAt := func(span [2]int64) {
		v := w.next
		w.next++
		p := make([]byte, span[1])
		for i := int64(0); i < span[1]; i += sectorSize {
			stamp(p[i:], (span[0]+i)/sectorSize, v)
		}
		_, err := w.d.WriteAt(p, span[0])
		w.m.put(span[0], span[1], v, err != nil)
		note(err)
	}
	zero := func(off, n int64, unmap bool) {
		err := w.d.WriteZeroes(off, n, unmap)
		w.m.put(off, n, 0, err != nil)
		note(err)
	}
	seal := func() {
		before := w.d.Stack()
		_, err := w.d.Seal(context.Background(), w.path())
		note(err)
		if err == nil {
			w.unsynced = append(w.unsynced, snapshot{stack: before, want: maps.Clone(w.m)})
		}
	}
	writeAt(full)
	note(w.flush())
	seal()
	writeAt(part)
	note(w.flush())
	zero(2*BlockSize, BlockSize, true)
	zero(3*BlockSize, BlockSize, false)
	writeAt([2]int64{2 * BlockSize, 1024}) // a short write stores half: keep that whole sectors
	seal()
	writeAt([2]int64{0, BlockSize})
	zero(0, 1024, true)
	note(w.flush())
	writeAt(full)
	return errs
}

// TestEvery_fault_leaves_a_disk_that_reads_right_and_goes_on fails every call of every kind once, with every
// error. Afterwards it compares the disk with the model.
func TestEvery_fault_leaves_a_disk_that_reads_right_and_goes_on(t *testing.T) {
	type kind struct {
		op    faultfs.Op
		err   error
		short bool
		times int
	}
	var kinds []kind
	for _, op := range faultfs.Ops {
		for _, err := range []error{unix.EIO, unix.ENOSPC} {
			kinds = append(kinds, kind{op: op, err: err}, kind{op: op, err: err, times: 3})
		}
	}
	kinds = append(kinds, kind{op: faultfs.OpWrite, err: unix.ENOSPC, short: true}, kind{op: faultfs.OpWrite, err: unix.EDQUOT, short: true, times: -1})
	fired := 0
	for _, k := range kinds {
		for n := 1; ; n++ {
			w := newWorld(t, env{}, t.TempDir(), 1)
			sim, err := faultfs.NewSim(w.dir)
			must(t, err)
			w.env = env{fs: sim, boot: testBoot}
			must(t, w.start())
			what := fmt.Sprintf("%s %d fails with %v (short=%v times=%d)", k.op, n, k.err, k.short, k.times)
			sim.Inject(faultfs.Fault{Op: k.op, Nth: n, Times: k.times, Err: k.err, Short: k.short})
			errs := w.script()
			hit := sim.Fired() > 0
			sim.ClearFaults()
			syncLost := false
			for _, err := range errs {
				if !errors.Is(err, ErrNoSpace) && !errors.Is(err, ErrIO) && !errors.Is(err, ErrSyncFailed) {
					t.Fatalf("%s: untyped error: %v", what, err)
				}
				if errors.Is(err, ErrSyncFailed) {
					syncLost = true
				}
			}
			if !hit && len(errs) > 0 {
				t.Fatalf("%s: no fault, but %v", what, errs)
			}
			if hit {
				fired++
			}
			// The disk must continue: it reads right and takes writes. Unless a sync was lost it also flushes.
			w.fatal(w.m.check(w.d, true), what)
			again := w.script()
			if syncLost {
				if len(again) == 0 || !errors.Is(w.d.Flush(), ErrSyncFailed) {
					t.Fatalf("%s: a disk that lost a sync flushes again", what)
				}
			} else {
				for _, err := range again {
					t.Fatalf("%s: after the fault: %v", what, err)
				}
				w.fatal(w.flush(), what)
			}
			w.fatal(w.m.check(w.d, true), what)
			before := maps.Clone(w.m)
			s := w.d.Stack()
			if err := w.d.Close(); err != nil && !errors.Is(err, ErrSyncFailed) {
				t.Fatalf("%s: close: %v", what, err)
			}
			w.d, err = w.env.open(s, Options{})
			w.fatal(err, what+": reopen")
			if !syncLost { // otherwise writes since the last good flush may be lost
				w.fatal(before.check(w.d, false), what+": reopen")
			}
			w.checkSnapshots()
			must(t, w.d.Close())
			if !hit {
				break
			}
		}
	}
	t.Logf("%d faults", fired)
	if fired < 100 {
		t.Errorf("only %d faults were injected", fired)
	}
}

// TestFailed_creation_leaves_no_file_and_can_be_repeated fails every call of Create, Fork and Import.
func TestFailed_creation_leaves_no_file_and_can_be_repeated(t *testing.T) {
	dir := t.TempDir()
	raw := filepath.Join(dir, "raw")
	src := mustOpenNew(t, filepath.Join(dir, "src"))
	mustWrite(t, src, 3*BlockSize, fillBlock(9, 2*BlockSize))
	rawCopy(t, src, raw)
	sealed := src.Stack()
	must(t, src.CloseSealed())
	makers := map[string]func(e env, path string) error{
		"create": func(e env, path string) error {
			_, err := e.createDisk(path, Stack{}, header{size: mib}, true)
			return err
		},
		"fork":   func(e env, path string) error { _, err := e.fork(path, sealed, 0); return err },
		"import": func(e env, path string) error { _, err := e.importRaw(t.Context(), path, raw); return err },
	}
	for name, mk := range makers {
		for _, op := range faultfs.Ops {
			for n := 1; ; n++ {
				sim, err := faultfs.NewSim(dir)
				must(t, err)
				path := filepath.Join(dir, "new")
				sim.Inject(faultfs.Fault{Op: op, Nth: n, Err: unix.ENOSPC})
				err = mk(env{fs: sim, boot: testBoot}, path)
				fired := sim.Fired()
				sim.ClearFaults()
				if fired == 0 {
					must(t, err)
					must(t, sim.Remove(path))
					break
				}
				what := fmt.Sprintf("%s: %s %d fails", name, op, n)
				if err == nil {
					if op == faultfs.OpRemove {
						must(t, sim.Remove(path))
						continue // removal of a file that never existed
					}
					t.Fatalf("%s: no error", what)
				}
				if !errors.Is(err, ErrNoSpace) && !errors.Is(err, ErrSyncFailed) {
					t.Fatalf("%s: untyped error: %v", what, err)
				}
				ents, err := sim.ReadDir(dir)
				must(t, err)
				left := slices.DeleteFunc(ents, func(e fs.DirEntry) bool { return e.Name() == "raw" || e.Name() == "src" })
				// Only an error after the final rename may leave the file, which is then whole.
				if len(left) > 0 && !(len(left) == 1 && left[0].Name() == "new" && op == faultfs.OpSyncDir) {
					t.Fatalf("%s: left %v behind", what, left)
				}
				for _, l := range left {
					must(t, sim.Remove(filepath.Join(dir, l.Name())))
				}
				must(t, mk(env{fs: sim, boot: testBoot}, path))
				must(t, sim.Remove(path))
			}
		}
	}
}

func mustOpenNew(t testing.TB, path string) *Disk {
	t.Helper()
	s, err := Create(path, mib)
	must(t, err)
	return mustOpen(t, s)
}

// TestEvery_fault_in_a_merge_leaves_the_stack_readable fails every call of a merge and reads through the resulting
// stack. Then it repeats the merge and reads again.
func TestEvery_fault_in_a_merge_leaves_the_stack_readable(t *testing.T) {
	for _, op := range faultfs.Ops {
		for n := 1; ; n++ {
			w := newWorld(t, env{}, t.TempDir(), 1)
			sim, err := faultfs.NewSim(w.dir)
			must(t, err)
			w.env = env{fs: sim, boot: testBoot}
			must(t, w.start())
			if errs := w.script(); len(errs) > 0 {
				t.Fatal(errs)
			}
			must(t, w.d.Close())
			s := w.d.Stack()
			what := fmt.Sprintf("%s %d fails", op, n)
			sim.Inject(faultfs.Fault{Op: op, Nth: n, Err: unix.EIO})
			err = w.env.merge(t.Context(), s.Layers[0], s.Layers[1])
			hit := sim.Fired() > 0
			if hit && err == nil {
				t.Fatalf("%s: no error", what)
			}
			sim.ClearFaults()
			for range 2 {
				w.d, err = w.env.open(s, Options{})
				w.fatal(err, what)
				w.fatal(w.m.check(w.d, false), what)
				must(t, w.d.Close())
				w.fatal(w.env.merge(t.Context(), s.Layers[0], s.Layers[1]), what)
			}
			if !hit {
				break
			}
		}
	}
}

func TestInterrupted_merge_can_be_cancelled_and_repeated(t *testing.T) {
	s, dir := mustCreate(t, 8*mib)
	d := mustOpen(t, s)
	mustWrite(t, d, 0, fillBlock(1, mib))
	_, err := d.Seal(t.Context(), filepath.Join(dir, "1"))
	must(t, err)
	mustWrite(t, d, mib/2, fillBlock(2, mib))
	s = d.Stack()
	must(t, d.CloseSealed())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, Merge(ctx, s.Layers[0], s.Layers[1]), context.Canceled)
	_, err = Open(Stack{Layers: s.Layers[:1]}, Options{ReadOnly: true})
	wantErr(t, err, ErrMerging)
	must(t, Merge(t.Context(), s.Layers[0], s.Layers[1]))
	ro, err := Open(s, Options{ReadOnly: true})
	must(t, err)
	wantBytes(t, ro, 0, append(fillBlock(1, mib/2), fillBlock(2, mib)...))
	must(t, ro.Close())
}
