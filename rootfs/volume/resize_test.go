package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
)

const largerSize = 2 * testSize

// sector returns what put has written.
func sector(t *testing.T, v *Volume, off int64) byte {
	t.Helper()
	p := make([]byte, 512)
	if _, err := v.data.ReadAt(p, off); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(p, bytes.Repeat(p[:1], len(p))) {
		t.Fatalf("the sector at %d is torn", off)
	}
	return p[0]
}

func TestResize_refuses_what_cannot_be_and_changes_nothing(t *testing.T) {
	s, _ := simStore(t)
	before := create(t, s, "v")
	named := errors.New("a VM sleeps with it")
	for _, tt := range []struct {
		name   string
		volume string
		size   int64
		hold   func() *Volume
		allow  func(*Record) error
		want   error
	}{
		{"smaller than the least", "v", testSize - 1<<20, nil, nil, ErrSize},
		{"no whole MiB", "v", testSize + 512, nil, nil, ErrSize},
		{"too large", "v", MaxSize + 1<<20, nil, nil, ErrSize},
		{"no name", "..", largerSize, nil, nil, ErrName},
		{"not there", "w", largerSize, nil, nil, ErrNotFound},
		{"attached for writing", "v", largerSize, func() *Volume { return attach(t, s, "v", false) }, nil, ErrInUse},
		{"attached for reading", "v", largerSize, func() *Volume { return attach(t, s, "v", true) }, nil, ErrInUse},
		{"not allowed", "v", largerSize, nil, func(*Record) error { return named }, named},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.hold != nil {
				v := tt.hold()
				defer v.Close()
			}
			if _, err := s.Resize(t.Context(), tt.volume, tt.size, tt.allow); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
			if r, err := s.Get("v"); err != nil || *r != *before {
				t.Errorf("the volume is now %+v (%v)", r, err)
			}
		})
	}
}

func TestResize_makes_larger_never_smaller_and_may_be_repeated(t *testing.T) {
	s, sim := simStore(t)
	create(t, s, "v")
	v := attach(t, s, "v", false)
	if err := errors.Join(put(v, sim, 'a', 0), put(v, sim, 'z', testSize-512), v.Flush(),
		v.Settle(Settled{Snapshot: "s", VM: "a"}), v.Close()); err != nil {
		t.Fatal(err)
	}
	first, err := s.Resize(t.Context(), "v", largerSize, nil)
	if err != nil {
		t.Fatal(err)
	}
	if first.Size != largerSize || first.Settled != nil || first.Generation != v.Record().Generation+1 {
		t.Errorf("resized: %+v", first)
	}
	again, err := s.Resize(t.Context(), "v", largerSize, nil)
	if err != nil || *again != *first {
		t.Errorf("once more: %+v (%v), want %+v", again, err, first)
	}
	if _, err := s.Resize(t.Context(), "v", testSize, nil); !errors.Is(err, ErrSize) {
		t.Errorf("smaller again: %v, want ErrSize", err)
	}
	v = attach(t, s, "v", false)
	if v.Size() != largerSize || sector(t, v, 0) != 'a' || sector(t, v, testSize-512) != 'z' || sector(t, v, largerSize-512) != 0 {
		t.Errorf("the resized volume has %d bytes, or others than before", v.Size())
	}
	if n, err := s.Allocated("v"); err != nil || n > 1<<20 {
		t.Errorf("the holes of the volume are gone: %d bytes (%v)", n, err)
	}
}

// The volume does not become what a failed resize program leaves behind.
func TestResize_that_fails_half_way_leaves_the_volume_as_it_was(t *testing.T) {
	s, sim := simStore(t)
	create(t, s, "v")
	v := attach(t, s, "v", false)
	if err := errors.Join(put(v, sim, 'a', 4096), v.Flush(), v.Close()); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("killed")
	grow := s.grow
	s.grow = func(_ context.Context, path string, size int64) error {
		f, err := s.fs.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteAt([]byte("half"), 4096)
		return errors.Join(err, f.Truncate(size), f.Close(), broken)
	}
	if _, err := s.Resize(t.Context(), "v", largerSize, nil); !errors.Is(err, broken) {
		t.Fatalf("got %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	s.grow = grow
	if _, err := s.Resize(ended, "v", largerSize, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("called off: %v", err)
	}
	v = attach(t, s, "v", false)
	if v.Size() != testSize || sector(t, v, 4096) != 'a' {
		t.Errorf("the volume has %d bytes, or others than before", v.Size())
	}
	v.Close()
	if _, err := s.Resize(t.Context(), "v", largerSize, nil); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(s.dir); err != nil || len(left) != 2 {
		t.Errorf("%v is left (%v)", left, err)
	}
}

// The test cuts the power after each call in turn.
func TestResize_leaves_the_old_or_the_new_when_the_power_goes(t *testing.T) {
	sizes := map[int64]int{}
	for cut := 0; ; cut++ {
		s, sim := simStore(t)
		create(t, s, "v")
		v := attach(t, s, "v", false)
		if err := errors.Join(put(v, sim, 'a', 0), put(v, sim, 'z', testSize-512), v.Flush(),
			v.Settle(Settled{Snapshot: "s", VM: "a"}), v.Close()); err != nil {
			t.Fatal(err)
		}
		sim.CutAfter(cut)
		_, rerr := s.Resize(t.Context(), "v", largerSize, nil)
		for seed := range uint64(8) {
			dir := t.TempDir()
			if err := sim.Crash(seed, dir); err != nil {
				t.Fatal(err)
			}
			after := storeOn(osfile.OS, dir)
			fatal := func(args ...any) {
				t.Helper()
				t.Fatalf("cut %d (%v), seed %d: %s", cut, rerr, seed, fmt.Sprint(args...))
			}
			r, err := after.Get("v")
			if err != nil {
				fatal(err)
			}
			v, err := after.Attach("v", false, nil)
			if err != nil {
				fatal(err)
			}
			if v.Size() != r.Size || v.Size() != testSize && v.Size() != largerSize || rerr == nil && v.Size() != largerSize {
				fatal("it has ", v.Size(), " bytes, and its record says ", r.Size)
			}
			if v.Size() != testSize && v.Record().Settled != nil {
				fatal("memory of a smaller disk still belongs to it")
			}
			if sector(t, v, 0) != 'a' || sector(t, v, testSize-512) != 'z' {
				fatal("its content has changed")
			}
			sizes[v.Size()]++
			v.Close()
			again, err := after.Resize(t.Context(), "v", largerSize, nil)
			if err != nil || again.Size != largerSize {
				fatal("resized again: ", again, err)
			}
			if kept, err := readRecord(after.fs, filepath.Join(after.dir, "v")); err != nil || *kept != *again {
				fatal("its record is ", kept, err)
			}
			if left, err := os.ReadDir(after.dir); err != nil || len(left) != 2 { // besides the volume and the lock
				fatal(left, " is left ", err)
			}
		}
		if rerr == nil {
			break // no more calls to cut
		}
	}
	if sizes[testSize] == 0 || sizes[largerSize] == 0 {
		t.Errorf("found after the crashes: %v: this test shows less than it says", sizes)
	}
}

func TestAttach_while_the_volume_is_resized_waits_for_nobody_and_finds_it(t *testing.T) {
	s := storeOn(osfile.OS, t.TempDir())
	create(t, s, "v")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			v, err := s.Attach("v", true, nil)
			if err == nil {
				err = v.Close()
			}
			if err != nil && !errors.Is(err, ErrInUse) {
				t.Error(err)
				return
			}
		}
	})
	for size := int64(testSize); size < testSize+20<<20; {
		r, err := s.Resize(t.Context(), "v", size+1<<20, nil)
		if errors.Is(err, ErrInUse) {
			continue // the volume is being read
		}
		if err != nil {
			t.Error(err)
			break
		}
		size = r.Size
	}
	close(stop)
	wg.Wait()
}

func e2fs(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// The test uses real file systems, also beyond 16 GiB, where a resize needs more group descriptors.
func TestResize_keeps_the_files_and_fills_the_volume(t *testing.T) {
	for _, name := range []string{"mkfs.ext4", "e2fsck", "resize2fs", "debugfs", "dumpe2fs"} {
		if _, err := exec.LookPath(name); err != nil {
			if os.Getenv("CI") != "" {
				t.Fatal(err)
			}
			t.Skip(err)
		}
	}
	s := Open(filepath.Join(t.TempDir(), "volumes"))
	create(t, s, "v")
	data := filepath.Join(s.dir, "v", dataName)
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, bytes.Repeat([]byte("content\n"), 1<<17), 0o600); err != nil {
		t.Fatal(err)
	}
	e2fs(t, "debugfs", "-w", "-R", "write "+text+" kept", data)
	for _, size := range []int64{testSize + 1<<20, 300 << 20, 20 << 30} {
		if _, err := s.Resize(t.Context(), "v", size, nil); err != nil {
			t.Fatal(err)
		}
		e2fs(t, "e2fsck", "-fn", data)
		if out := e2fs(t, "dumpe2fs", "-h", data); !strings.Contains(strings.Join(strings.Fields(out), " "), fmt.Sprintf("Block count: %d ", size/disk.BlockSize)) {
			t.Errorf("a volume of %d bytes has a file system of another size:\n%s", size, out)
		}
		copied := filepath.Join(t.TempDir(), "copied")
		e2fs(t, "debugfs", "-R", "dump kept "+copied, data)
		want, err := os.ReadFile(text)
		got, gerr := os.ReadFile(copied)
		if err := errors.Join(err, gerr); err != nil || !bytes.Equal(got, want) {
			t.Errorf("at %d bytes the file has changed (%v)", size, err)
		}
		v := attach(t, s, "v", true)
		if v.Size() != size {
			t.Errorf("it has %d bytes, want %d", v.Size(), size)
		}
		v.Close()
	}
	if n, err := s.Allocated("v"); err != nil || n > 64<<20 {
		t.Errorf("it takes %d bytes (%v)", n, err)
	}

	// A damaged volume does not change.
	f, err := os.OpenFile(data, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(bytes.Repeat([]byte{0xa5}, 256<<10), 4096)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Resize(t.Context(), "v", 21<<30, nil); !errors.Is(err, disk.ErrDamaged) {
		t.Errorf("a damaged file system: %v, want ErrDamaged", err)
	}
	if r, err := s.Get("v"); err != nil || r.Size != 20<<30 {
		t.Errorf("it is now %+v (%v)", r, err)
	}
}
