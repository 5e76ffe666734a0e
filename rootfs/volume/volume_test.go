package volume

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/test/faultfs"
)

const testSize = MinSize

// simStore returns a store on a file system that fails on demand, with a cheap format.
func simStore(t *testing.T) (*Store, *faultfs.Sim) {
	t.Helper()
	root := t.TempDir()
	sim, err := faultfs.NewSim(root)
	if err != nil {
		t.Fatal(err)
	}
	return storeOn(sim, root), sim
}

func storeOn(fsys osfile.FS, root string) *Store {
	lengthen := func(_ context.Context, path string, size int64) error {
		f, err := fsys.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		return errors.Join(f.Truncate(size), f.Close())
	}
	return &Store{dir: filepath.Join(root, "volumes"), fs: fsys, format: lengthen, grow: lengthen}
}

func create(t *testing.T, s *Store, name string) *Record {
	t.Helper()
	r, err := s.Create(t.Context(), name, testSize)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func attach(t *testing.T, s *Store, name string, readOnly bool) *Volume {
	t.Helper()
	v, err := s.Attach(name, readOnly, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = v.Close() }) // the test may have closed it already
	return v
}

// put writes a sector as a block device does.
func put(v *Volume, sim *faultfs.Sim, b byte, off int64) error {
	f, at, n, err := v.WriteExtent(off, 512)
	if err != nil {
		return err
	}
	_, err = sim.Twin(f).WriteAt(bytes.Repeat([]byte{b}, int(n)), at)
	return v.Wrote(off, n, err)
}

func TestCreate_refuses_names_and_sizes_that_cannot_be(t *testing.T) {
	s, _ := simStore(t)
	for _, tt := range []struct {
		name string
		size int64
		want error
	}{
		{"", testSize, ErrName}, {"a/b", testSize, ErrName}, {"..", testSize, ErrName}, {"-a", testSize, ErrName}, {"A", testSize, ErrName},
		{"a", 0, ErrSize}, {"a", testSize - 1, ErrSize}, {"a", testSize + 512, ErrSize}, {"a", MaxSize + 1<<20, ErrSize},
	} {
		if _, err := s.Create(t.Context(), tt.name, tt.size); !errors.Is(err, tt.want) {
			t.Errorf("%q of %d bytes: %v, want %v", tt.name, tt.size, err, tt.want)
		}
	}
	create(t, s, "a")
	if _, err := s.Create(t.Context(), "a", testSize); !errors.Is(err, ErrExists) {
		t.Errorf("a second one: %v, want ErrExists", err)
	}
}

func TestStore_lists_gets_and_removes(t *testing.T) {
	s, _ := simStore(t)
	if all, err := s.List(); err != nil || len(all) != 0 {
		t.Errorf("before there is any: %v, %v", all, err)
	}
	create(t, s, "b")
	want := create(t, s, "a")
	if all, err := s.List(); err != nil || len(all) != 2 || all[0].ID != want.ID {
		t.Errorf("got %v, %v", all, err)
	}
	refused := errors.New("a VM names it")
	if err := s.Remove(t.Context(), "a", func(*Record) error { return refused }); !errors.Is(err, refused) {
		t.Errorf("got %v, want what the caller says", err)
	}
	if err := s.Remove(t.Context(), "a", func(*Record) error { return nil }); err != nil {
		t.Error(err)
	}
	if _, err := s.Get("a"); !errors.Is(err, ErrNotFound) {
		t.Errorf("after its removal: %v, want ErrNotFound", err)
	}
	if _, err := s.Attach("a", false, nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("attaching it: %v, want ErrNotFound", err)
	}
	if again := create(t, s, "a"); again.ID == want.ID {
		t.Error("another volume has the same id")
	}
}

func TestAttach_is_for_one_writer_or_many_readers(t *testing.T) {
	s, _ := simStore(t)
	create(t, s, "v")
	for _, tt := range []struct {
		first, second bool // read-only
		ok            bool
	}{{false, false, false}, {false, true, false}, {true, false, false}, {true, true, true}} {
		a := attach(t, s, "v", tt.first)
		b, err := s.Attach("v", tt.second, nil)
		if tt.ok != (err == nil) || err != nil && !errors.Is(err, ErrInUse) {
			t.Errorf("read-only %v, then read-only %v: %v", tt.first, tt.second, err)
		}
		if err == nil {
			b.Close()
		}
		if err := s.Remove(t.Context(), "v", func(*Record) error { return nil }); !errors.Is(err, ErrInUse) {
			t.Errorf("removing an attached one: %v, want ErrInUse", err)
		}
		a.Close()
	}
}

func TestAttach_for_reading_refuses_a_journal_that_must_be_replayed(t *testing.T) {
	s, sim := simStore(t)
	create(t, s, "v")
	v := attach(t, s, "v", false)
	super := make([]byte, 4096)
	binary.LittleEndian.PutUint16(super[superMagicAt:], ext4Magic)
	binary.LittleEndian.PutUint32(super[superIncompat:], incompatReplay|0x2)
	f, _, _, err := v.WriteExtent(0, int64(len(super)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sim.Twin(f).WriteAt(super, 0); err != nil {
		t.Fatal(err)
	}
	v.Close()
	if _, err := s.Attach("v", true, nil); !errors.Is(err, ErrDirty) {
		t.Errorf("got %v, want ErrDirty", err)
	}
	attach(t, s, "v", false)
}

func TestReadOnly_volumes_take_no_writes(t *testing.T) {
	s, _ := simStore(t)
	create(t, s, "v")
	v := attach(t, s, "v", true)
	if _, _, _, err := v.WriteExtent(0, 512); !errors.Is(err, ErrReadOnly) {
		t.Errorf("write: %v", err)
	}
	if err := v.Discard(0, 512); !errors.Is(err, ErrReadOnly) {
		t.Errorf("discard: %v", err)
	}
	if err := v.WriteZeroes(0, 512, true); !errors.Is(err, ErrReadOnly) {
		t.Errorf("write zeroes: %v", err)
	}
	if err := errors.Join(v.Flush(), v.Settle(Settled{"s", "vm"})); err != nil {
		t.Error(err)
	}
	if r, err := s.Get("v"); err != nil || r.Generation != 0 || r.Settled != nil {
		t.Errorf("the record has changed: %+v, %v", r, err)
	}
}

// Each step does something to a volume that VM "a" has settled with snapshot "s".
func TestCheck_takes_only_the_content_that_the_memory_belongs_to(t *testing.T) {
	mine := Settled{"s", "a"}
	for name, tt := range map[string]struct {
		do   func(*testing.T, *Store, *faultfs.Sim)
		as   Settled
		rw   bool // may continue to write
		read bool // may continue to read
	}{
		"nothing":        {func(*testing.T, *Store, *faultfs.Sim) {}, mine, true, true},
		"another VM":     {func(*testing.T, *Store, *faultfs.Sim) {}, Settled{"s", "b"}, false, true},
		"older snapshot": {func(*testing.T, *Store, *faultfs.Sim) {}, Settled{"r", "a"}, false, true},
		"attached, not written": {func(t *testing.T, s *Store, _ *faultfs.Sim) {
			attach(t, s, "v", false).Close()
		}, mine, true, true},
		"read": {func(t *testing.T, s *Store, _ *faultfs.Sim) {
			v := attach(t, s, "v", true)
			_, _, _, err := v.ReadExtent(0, 512)
			if err = errors.Join(err, v.Close()); err != nil {
				t.Fatal(err)
			}
		}, mine, true, true},
		"written": {func(t *testing.T, s *Store, sim *faultfs.Sim) {
			v := attach(t, s, "v", false)
			if err := errors.Join(put(v, sim, 9, 0), v.Close()); err != nil {
				t.Fatal(err)
			}
		}, mine, false, false},
		"a write that failed": {func(t *testing.T, s *Store, _ *faultfs.Sim) {
			v := attach(t, s, "v", false)
			_, _, _, err := v.WriteExtent(0, 512)
			if err != nil || v.Wrote(0, 512, unix.EIO) == nil {
				t.Fatal(err)
			}
			v.Close()
		}, mine, false, false},
		"discarded": {func(t *testing.T, s *Store, _ *faultfs.Sim) {
			v := attach(t, s, "v", false)
			if err := errors.Join(v.Discard(0, 4096), v.Close()); err != nil {
				t.Fatal(err)
			}
		}, mine, false, false},
		"zeroed": {func(t *testing.T, s *Store, _ *faultfs.Sim) {
			v := attach(t, s, "v", false)
			if err := errors.Join(v.WriteZeroes(0, 4096, false), v.Close()); err != nil {
				t.Fatal(err)
			}
		}, mine, false, false},
		"written, and settled for a later snapshot": {func(t *testing.T, s *Store, sim *faultfs.Sim) {
			v := attach(t, s, "v", false)
			if err := errors.Join(put(v, sim, 9, 0), v.Settle(Settled{"t", "a"}), v.Close()); err != nil {
				t.Fatal(err)
			}
		}, mine, false, false},
		"settled again, and written after that by the same holder": {func(t *testing.T, s *Store, sim *faultfs.Sim) {
			v := attach(t, s, "v", false)
			if err := errors.Join(put(v, sim, 9, 0), v.Settle(mine), put(v, sim, 10, 0), v.Close()); err != nil {
				t.Fatal(err)
			}
		}, mine, false, false},
		"removed and made anew": {func(t *testing.T, s *Store, _ *faultfs.Sim) {
			if err := s.Remove(t.Context(), "v", func(*Record) error { return nil }); err != nil {
				t.Fatal(err)
			}
			create(t, s, "v")
		}, mine, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, sim := simStore(t)
			create(t, s, "v")
			v := attach(t, s, "v", false)
			if err := errors.Join(put(v, sim, 1, 0), v.Settle(mine)); err != nil {
				t.Fatal(err)
			}
			was := v.Record()
			v.Close()
			tt.do(t, s, sim)
			for _, readOnly := range []bool{false, true} {
				want := map[bool]bool{false: tt.rw, true: tt.read}[readOnly]
				v := attach(t, s, "v", readOnly)
				err := v.Check(was.ID, was.Generation, tt.as)
				v.Close()
				if want != (err == nil) || err != nil && !errors.Is(err, ErrStale) {
					t.Errorf("read-only %v: %v, want ok %v", readOnly, err, want)
				}
				r, gerr := s.Get("v")
				if gerr != nil {
					t.Fatal(gerr)
				}
				if again := r.Check(was.ID, was.Generation, readOnly, tt.as); (again == nil) != (err == nil) {
					t.Errorf("read-only %v: not attached it is %v, attached %v", readOnly, again, err)
				}
			}
		})
	}
}

func TestFlush_that_failed_is_never_promised_again(t *testing.T) {
	s, sim := simStore(t)
	create(t, s, "v")
	v := attach(t, s, "v", false)
	if err := put(v, sim, 1, 0); err != nil {
		t.Fatal(err)
	}
	sim.Inject(faultfs.Fault{Op: faultfs.OpSync, Path: dataName, Nth: 1, Err: unix.EIO})
	for range 2 {
		if err := v.Flush(); !errors.Is(err, ErrSyncFailed) {
			t.Errorf("got %v, want ErrSyncFailed", err)
		}
	}
	if err := v.Settle(Settled{"s", "a"}); !errors.Is(err, ErrSyncFailed) {
		t.Errorf("settling it: %v, want ErrSyncFailed", err)
	}
	if r, err := s.Get("v"); err != nil || r.Settled != nil {
		t.Errorf("it is settled: %+v, %v", r, err)
	}
}

func TestDiscard_gives_space_back(t *testing.T) {
	s := storeOn(osfile.OS, t.TempDir())
	create(t, s, "v")
	v := attach(t, s, "v", false)
	f, at, _, err := v.WriteExtent(0, 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(bytes.Repeat([]byte{1}, 4<<20), at); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(v.Wrote(0, 4<<20, nil), v.Flush()); err != nil {
		t.Fatal(err)
	}
	before, err := s.Allocated("v")
	if err != nil || before < 4<<20 {
		t.Fatalf("%d bytes allocated, %v", before, err)
	}
	if err := errors.Join(v.Discard(0, 2<<20), v.WriteZeroes(2<<20, 1<<20, true), v.WriteZeroes(3<<20, 1<<20, false), v.Flush()); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4<<20)
	if _, err := f.ReadAt(buf, 0); err != nil || !bytes.Equal(buf, make([]byte, 4<<20)) {
		t.Errorf("not zeros (%v)", err)
	}
	if after, err := s.Allocated("v"); err != nil || after > before-3<<20 {
		t.Errorf("%d bytes allocated before and %d after (%v)", before, after, err)
	}
}

// The test cuts the power after each call in turn.
func TestCreate_and_Remove_leave_all_or_nothing_when_the_power_goes(t *testing.T) {
	for cut := 0; ; cut++ {
		s, sim := simStore(t)
		sim.CutAfter(cut)
		_, cerr := s.Create(t.Context(), "v", testSize)
		if cerr == nil {
			cerr = s.Remove(t.Context(), "v", func(*Record) error { return nil })
			if cerr == nil {
				return // no more calls to cut
			}
		}
		for seed := range uint64(8) {
			dir := t.TempDir()
			if err := sim.Crash(seed, dir); err != nil {
				t.Fatal(err)
			}
			after := storeOn(osfile.OS, dir)
			if r, err := after.Get("v"); err == nil {
				v, err := after.Attach("v", false, nil)
				if err != nil || v.Size() != testSize {
					t.Fatalf("cut %d, seed %d: %+v cannot be attached: %v", cut, seed, r, err)
				}
				v.Close()
				if err := after.Remove(t.Context(), "v", func(*Record) error { return nil }); err != nil {
					t.Fatalf("cut %d, seed %d: %v", cut, seed, err)
				}
			} else if !errors.Is(err, ErrNotFound) {
				t.Fatalf("cut %d, seed %d: %v", cut, seed, err)
			}
			// A half-done operation does not block Create, and its remains go.
			if _, err := after.Create(t.Context(), "v", testSize); err != nil {
				t.Fatalf("cut %d, seed %d: %v", cut, seed, err)
			}
			left, err := os.ReadDir(after.dir)
			if err != nil || len(left) != 2 { // besides the volume and the lock
				t.Fatalf("cut %d, seed %d: %v is left (%v)", cut, seed, left, err)
			}
		}
	}
}

// Whichever call is the last before the power goes or an error comes, a volume that names a snapshot has the
// content of that snapshot.
func TestSettled_content_is_that_of_the_snapshot_whatever_fails(t *testing.T) {
	type want struct{ first byte }
	settled := map[Settled]want{{"s1", "a"}: {1}, {"s2", "a"}: {2}}
	life := func(v *Volume, sim *faultfs.Sim) {
		// The guest sees the errors and continues.
		_ = put(v, sim, 1, 0)
		_ = v.Settle(Settled{"s1", "a"})
		_ = put(v, sim, 2, 0)
		_ = v.Flush()
		_ = v.Settle(Settled{"s2", "a"})
		_ = v.Discard(0, 4096)
		_ = put(v, sim, 3, 0)
		_ = v.Flush()
	}
	check := func(name, dir string) bool {
		after := storeOn(osfile.OS, dir)
		r, err := after.Get("v")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if r.Settled == nil {
			return false
		}
		v := attach(t, after, "v", false)
		defer v.Close()
		var got [1]byte
		if _, err := v.data.ReadAt(got[:], 0); err != nil || got[0] != settled[*r.Settled].first {
			t.Errorf("%s: it is settled for %v and has %d, want %d (%v)", name, *r.Settled, got[0], settled[*r.Settled].first, err)
		}
		return true
	}
	seen := 0
	for cut := 0; ; cut++ {
		s, sim := simStore(t)
		create(t, s, "v")
		v := attach(t, s, "v", false)
		before := sim.Calls()
		sim.CutAfter(cut)
		life(v, sim)
		done := sim.Calls()-before < cut
		v.Close()
		for seed := range uint64(8) {
			dir := t.TempDir()
			if err := sim.Crash(seed, dir); err != nil {
				t.Fatal(err)
			}
			if check(fmt.Sprintf("power cut %d, seed %d", cut, seed), dir) {
				seen++
			}
		}
		if done {
			break
		}
	}
	if seen == 0 {
		t.Error("no crash has left a settled volume: the test shows nothing")
	}
	for _, op := range []faultfs.Op{faultfs.OpOpen, faultfs.OpWrite, faultfs.OpSync, faultfs.OpRename, faultfs.OpSyncDir, faultfs.OpFallocate} {
		for nth := 1; ; nth++ {
			s, sim := simStore(t)
			create(t, s, "v")
			v := attach(t, s, "v", false)
			sim.Inject(faultfs.Fault{Op: op, Nth: nth, Err: unix.EIO, Short: op == faultfs.OpWrite})
			fired := sim.Fired()
			life(v, sim)
			fired = sim.Fired() - fired
			v.Close()
			for seed := range uint64(4) {
				dir := t.TempDir()
				if err := sim.Crash(seed, dir); err != nil {
					t.Fatal(err)
				}
				check(fmt.Sprintf("%s %d fails, seed %d", op, nth, seed), dir)
			}
			if fired == 0 {
				break
			}
		}
	}
}

func TestCreate_makes_a_clean_file_system(t *testing.T) {
	for _, name := range []string{"mkfs.ext4", "e2fsck"} {
		if _, err := exec.LookPath(name); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skip(err)
		}
	}
	s := Open(filepath.Join(t.TempDir(), "volumes"))
	create(t, s, "v")
	if out, err := exec.CommandContext(t.Context(), "e2fsck", "-fn", filepath.Join(s.dir, "v", dataName)).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	if n, err := s.Allocated("v"); err != nil || n > testSize/2 {
		t.Errorf("an empty volume of %d bytes takes %d (%v)", testSize, n, err)
	}
	if left, err := filepath.Glob(filepath.Join(s.dir, "v", "*")); err != nil || len(left) != 2 {
		t.Errorf("its directory has %v (%v)", left, err)
	}
	attach(t, s, "v", true)
}

func FuzzReadRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"id":"00112233445566778899aabbccddeeff","name":"v","size":16777216,"created":"2026-01-02T03:04:05Z","generation":3,"settled":{"snapshot":"s","vm":"a"}}`))
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(`{"version":1,"size":-1}`))
	f.Fuzz(func(t *testing.T, p []byte) {
		dir := filepath.Join(t.TempDir(), "v")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, recordName), p, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := readRecord(osfile.OS, dir)
		if err != nil {
			if !errors.Is(err, ErrRecord) {
				t.Errorf("%v is no ErrRecord", err)
			}
			return
		}
		if r.Size <= 0 || r.Name != "v" || len(r.ID) != 2*idBytes {
			t.Errorf("taken: %+v", r)
		}
	})
}
