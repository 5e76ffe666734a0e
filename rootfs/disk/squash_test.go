package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/test/faultfs"
)

// deepDisk opens a disk of 1 MiB in which each layer has half of what the next one covers. The second makes some
// blocks zero. deepDisk also returns the content of the disk.
func deepDisk(t *testing.T, s Stack, layers int) (*Disk, []byte) {
	t.Helper()
	d := mustOpen(t, s)
	want := make([]byte, mib)
	dir := filepath.Dir(s.Top())
	for i := range layers {
		off := i * 8 * BlockSize
		p := fillBlock(byte(i+1), 16*BlockSize)
		mustWrite(t, d, int64(off), p)
		copy(want[off:], p)
		if i == 1 {
			must(t, d.WriteZeroes(0, 4*BlockSize, true))
			clear(want[:4*BlockSize])
		}
		_, err := d.Seal(t.Context(), filepath.Join(dir, fmt.Sprint("layer", i)))
		must(t, err)
	}
	must(t, d.Flush())
	return d, want
}

func TestSquashed_layers_read_as_before_with_the_disk_open_and_those_they_were_made_of_gone(t *testing.T) {
	s, dir := mustCreate(t, mib)
	d, want := deepDisk(t, s, 6)
	all := d.Stack().Layers
	for _, some := range [][]string{all[3:5], all[:3]} {
		by := filepath.Join(dir, "squashed-"+filepath.Base(some[0]))
		must(t, Squash(t.Context(), some, by))
		must(t, d.Substitute(some, by))
		for _, old := range some {
			must(t, os.Remove(old))
		}
		wantBytes(t, d, 0, want)
	}
	s = d.Stack()
	if len(s.Layers) != 4 {
		t.Fatalf("the stack is %v, want 4 layers", s.Layers)
	}
	mustWrite(t, d, 0, fillBlock(0xee, BlockSize))
	copy(want, fillBlock(0xee, BlockSize))
	must(t, d.Close())
	d = mustOpen(t, s)
	wantBytes(t, d, 0, want)
	if !slices.Equal(d.Stack().Layers, s.Layers) {
		t.Errorf("opened by its names the stack is %v, want %v", d.Stack().Layers, s.Layers)
	}
	must(t, d.Close())
}

func TestSquash_refuses_what_does_not_belong_together(t *testing.T) {
	s, dir := mustCreate(t, mib)
	d, _ := deepDisk(t, s, 4)
	defer func() { must(t, d.Close()) }()
	ls := d.Stack().Layers
	by := filepath.Join(dir, "by")
	for name, tt := range map[string]struct {
		layers []string
		want   error
	}{
		"none":                  {nil, ErrMissingParent},
		"one":                   {ls[:1], ErrMissingParent},
		"one is left out":       {[]string{ls[0], ls[2]}, ErrMissingParent},
		"in disorder":           {[]string{ls[1], ls[0]}, ErrMissingParent},
		"the top":               {ls[3:], ErrInUse},
		"one that is not there": {[]string{ls[0], filepath.Join(dir, "nothing")}, ErrMissingParent},
	} {
		wantErr(t, Squash(t.Context(), tt.layers, by), tt.want)
		if _, err := os.Stat(by); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: there is a file: %v", name, err)
		}
	}
	wantErr(t, Squash(t.Context(), ls[:2], ls[3]), fs.ErrExist)
	must(t, Squash(t.Context(), ls[:2], by))
	for name, some := range map[string][]string{
		"none": nil, "others": ls[1:3], "more": ls[:3], "the top": ls[2:], "a stranger": {"x", "y"},
	} {
		before := d.Stack()
		if err := d.Substitute(some, by); !errors.Is(err, ErrMissingParent) {
			t.Errorf("in place of %s: %v, want ErrMissingParent", name, err)
		}
		if !slices.Equal(d.Stack().Layers, before.Layers) {
			t.Errorf("in place of %s: the stack has changed", name)
		}
	}
}

func TestFailed_or_cancelled_squash_leaves_nothing(t *testing.T) {
	s, dir := mustCreate(t, mib)
	d, want := deepDisk(t, s, 4)
	ls := d.Stack().Layers
	must(t, d.Close())
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, Squash(cancelled, ls[:3], filepath.Join(dir, "by")), context.Canceled)
	tried := 0
	for _, op := range faultfs.Ops {
		for n := 1; ; n++ {
			sim, err := faultfs.NewSim(dir)
			must(t, err)
			sim.Inject(faultfs.Fault{Op: op, Nth: n, Err: unix.ENOSPC})
			by := filepath.Join(dir, "by")
			err = env{fs: sim, boot: testBoot}.squash(t.Context(), ls[:3], by)
			hit := sim.Fired() > 0
			if _, serr := os.Stat(by); (serr == nil) != (err == nil) {
				t.Fatalf("%s %d fails: the error is %v and there is a file: %v", op, n, err, serr == nil)
			}
			if _, serr := os.Stat(by + partSuffix); serr == nil && op != faultfs.OpRemove {
				t.Fatalf("%s %d fails: a part is left", op, n)
			}
			if err == nil {
				d = mustOpen(t, Stack{Layers: append([]string{by}, ls[3:]...)})
				wantBytes(t, d, 0, want)
				must(t, d.Close())
				must(t, os.Remove(by))
			}
			if !hit {
				break
			}
			tried++
		}
	}
	if tried < 10 {
		t.Errorf("only %d faults were tried", tried)
	}
	d = mustOpen(t, Stack{Layers: ls})
	wantBytes(t, d, 0, want)
	must(t, d.Close())
}
