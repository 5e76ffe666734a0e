package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/disk"
)

// sleepingVM has a disk of so many layers that are its own, each with a block of its number.
func sleepingVM(t *testing.T, s *Store, name string, layers int) *Record {
	t.Helper()
	r := &Record{Version: recordVersion, ID: newID(), Spec: Spec{Name: name}, Phase: Asleep}
	l, err := s.create(r)
	if err != nil {
		t.Fatal(err)
	}
	defer l.release()
	layer := func() string { return filepath.Join(s.layerDir(), r.newLayer()) }
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
	r.Disk = s.relative(d.Stack())
	if err := s.save(r); err != nil {
		t.Fatal(err)
	}
	return r
}

// wantBlocks reads what sleepingVM has written.
func wantBlocks(t *testing.T, s *Store, name string, n int) {
	t.Helper()
	r, err := s.load(name)
	if err != nil {
		t.Fatal(err)
	}
	st, err := s.absolute(r.Disk)
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

func TestJoinLayers_that_meets_one_in_use_goes_on_there_the_next_time(t *testing.T) {
	const layers = 8
	for busy := range layers {
		t.Run(fmt.Sprint("layer ", busy), func(t *testing.T) {
			s, err := OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			r := sleepingVM(t, s, "a", layers)
			f, err := os.Open(filepath.Join(s.layerDir(), r.Disk.Layers[busy]))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := unix.Flock(int(f.Fd()), unix.LOCK_SH); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := s.joinLayers(t.Context(), "a", holders{}); err != nil {
					t.Fatal(err)
				}
				r, err := s.load("a")
				if err != nil {
					t.Fatal(err)
				}
				// Those below the one that is in use are one.
				if want := layers - max(0, busy-1); len(r.Disk.Layers) != want {
					t.Errorf("it has the layers %v, want %d", r.Disk.Layers, want)
				}
				wantBlocks(t, s, "a", layers)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			if err := s.joinLayers(t.Context(), "a", holders{}); err != nil {
				t.Fatal(err)
			}
			if r, err = s.load("a"); err != nil {
				t.Fatal(err)
			}
			if n := len(r.Disk.Layers); n > looseLayers {
				t.Errorf("it has %d layers in the end", n)
			}
			wantBlocks(t, s, "a", layers)
		})
	}
}

// Pages of snapshots that are gone hold what was in the memory of their guests.
func TestSweep_removes_cached_pages_of_no_snapshot(t *testing.T) {
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.pageCacheDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(s.pageCacheDir(), "00112233445566778899aabbccddeeff.pages")
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

// Else a sweep of one would remove the pages of the other.
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
	path := filepath.Join(stores[0].pageCacheDir(), "00112233445566778899aabbccddeeff.pages")
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
