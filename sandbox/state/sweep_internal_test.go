package state

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// sleepingVM makes a VM whose disk has this many layers of its own, each with a block of its number.
func sleepingVM(t *testing.T, s *Store, name string, layers int) *Record {
	t.Helper()
	r := &Record{Version: RecordVersion, ID: spec.NewID(), Spec: spec.VM{Name: name}, Phase: Asleep}
	l, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	layer := func() string { return filepath.Join(s.LayerDir(), r.NewLayer()) }
	st, err := disk.Create(layer(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range layers {
		if _, err := d.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, disk.BlockSize), int64(i)*disk.BlockSize); err != nil {
			t.Fatal(err)
		}
		if i+1 < layers {
			if _, err := d.Seal(t.Context(), layer()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := d.CloseSealed(); err != nil {
		t.Fatal(err)
	}
	r.Disk = s.Relative(d.Stack())
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	return r
}

// wantBlocks checks the blocks that sleepingVM wrote.
func wantBlocks(t *testing.T, s *Store, name string, n int) {
	t.Helper()
	r, err := s.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	st, err := s.Absolute(r.Disk)
	if err != nil {
		t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{ReadOnly: true})
	if err != nil {
		t.Fatalf("with the layers %v: %v", r.Disk.Layers, err)
	}
	defer d.Close()
	for i := range n {
		got := make([]byte, disk.BlockSize)
		if _, err := d.ReadAt(got, int64(i)*disk.BlockSize); err != nil || got[0] != byte(i+1) || got[disk.BlockSize-1] != byte(i+1) {
			t.Errorf("block %d has %d, %v", i, got[0], err)
		}
	}
}

// One store must be able to import an export from before and one from after. A snapshot that names the old layers
// must find them unchanged.
func TestAttack_joining_layers_of_a_sleeping_VM_changes_no_layer_under_its_name(t *testing.T) {
	const layers = 8
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := sleepingVM(t, s, "a", layers)
	before := map[string][]byte{}
	for _, l := range r.Disk.Layers {
		b, err := os.ReadFile(filepath.Join(s.LayerDir(), l))
		if err != nil {
			t.Fatal(err)
		}
		before[l] = b
	}
	// A new clone or an export would read them like this.
	for l := range before {
		f, err := os.Open(filepath.Join(s.LayerDir(), l))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.Flock(int(f.Fd()), unix.LOCK_SH); err != nil {
			t.Fatal(err)
		}
	}
	needed := holders{}
	needed.add(r.Disk.Layers, "VM a")
	for range 3 {
		if err := s.joinLayers(t.Context(), "a", needed); err != nil {
			t.Fatal(err)
		}
	}
	after, err := s.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	if len(after.Disk.Layers) != looseLayers {
		t.Errorf("it has the layers %v, want %d", after.Disk.Layers, looseLayers)
	}
	wantBlocks(t, s, "a", layers)
	for l, b := range before {
		if now, err := os.ReadFile(filepath.Join(s.LayerDir(), l)); err != nil || !bytes.Equal(now, b) {
			t.Errorf("the content of layer %s has changed, or it is gone (%v)", l, err)
		}
	}
	// The old list of layers still has the same content.
	if err := s.Save(r); err != nil {
		t.Fatal(err)
	}
	wantBlocks(t, s, "a", layers)
}

func TestJoinLayers_leaves_what_others_need_and_what_has_much_data(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for i, size := range []int64{9 << 20, 1 << 20, 2 << 20, 50 << 20, 1 << 20, 3 << 20, 1 << 20} {
		f, err := os.Create(filepath.Join(s.LayerDir(), fmt.Sprint(i)))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, size), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	all := []string{"0", "1", "2", "3", "4", "5", "6"}
	for name, tt := range map[string]struct {
		layers   []string
		shared   string
		first, n int
	}{
		"too few":                             {all[:4], "", 0, 0},
		"the lightest of two":                 {all[:5], "", 1, 2},
		"the lightest of four":                {all, "", 1, 4},
		"the lightest without one of others'": {all, "4", 0, 3},
		"fewer, if three have too much":       {[]string{"3", "0", "3", "0", "3", "0"}, "", 4, 2},
		"none, if two have too much":          {[]string{"3", "3", "3", "3", "3"}, "", 0, 0},
		"too few without those of others'":    {all, "456", 0, 0},
	} {
		first, n := s.chooseJoin(tt.layers, func(l string) bool { return !strings.Contains(tt.shared, l) })
		if first != tt.first || n != tt.n {
			t.Errorf("%s: %d from %d on, want %d from %d on", name, n, first, tt.n, tt.first)
		}
	}
}

// Pages of removed snapshots would keep content of their guests' memory.
func TestSweep_removes_cached_pages_of_no_snapshot(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.PageCacheDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.PageCacheDir(), "00112233445566778899aabbccddeeff.pages")
	if err := os.WriteFile(path, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.oldPageCacheDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	freed, err := s.Sweep(t.Context())
	if err != nil || freed.CacheFiles != 1 || freed.Bytes < 8192 {
		t.Errorf("it has freed %+v, %v", freed, err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file is there: %v", err)
	}
	if _, err := os.Stat(s.oldPageCacheDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("pages of an earlier version are there: %v", err)
	}
}

// Otherwise a sweep of one store would remove the pages of the other.
func TestStores_that_share_a_cache_directory_do_not_share_pages(t *testing.T) {
	var stores [2]*Store
	cache := t.TempDir()
	for i := range stores {
		dir := t.TempDir()
		if err := os.Symlink(cache, filepath.Join(dir, "cache")); err != nil {
			t.Fatal(err)
		}
		var err error
		if stores[i], err = OpenStore(dir); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(stores[0].PageCacheDir(), "00112233445566778899aabbccddeeff.pages")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := stores[1].Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a sweep of another store has removed it: %v", err)
	}
}
