package bench

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Caches are the states of the page cache that can be measured.
var Caches = []string{cacheWarm, cacheCold}

const (
	cacheWarm = "warm" // as the last run left it
	cacheCold = "cold" // without the files that a restore reads
)

// evict drops from the page cache all files that the restore of a VM reads: its snapshot with all its bases, its
// images and the layers of its disk. Pages that another process has mapped stay.
func (v *sleeper) evict() error {
	files := append([]string{v.parts.Image, v.parts.SystemDisk}, v.parts.Disk.Layers...)
	err := filepath.WalkDir(v.snap, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("looking for the files of a snapshot: %w", err)
	}
	pages, err := filepath.Glob(filepath.Join(v.parts.PageCache, "*.pages"))
	if err != nil {
		return fmt.Errorf("looking for the cache of pages: %w", err)
	}
	for _, path := range append(files, pages...) {
		if path == "" {
			continue
		}
		if err := evictFile(path); err != nil {
			return err
		}
	}
	return nil
}

func evictFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("dropping a file from the page cache: %w", err)
	}
	defer f.Close()
	// Dirty pages would stay.
	if err := f.Sync(); err != nil {
		return fmt.Errorf("dropping %s from the page cache: %w", path, err)
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("dropping %s from the page cache: %w", path, err)
	}
	return nil
}
