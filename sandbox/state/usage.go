package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// diskBlock is the unit of st_blocks, in bytes (stat(2)).
const diskBlock = 512

// DiskUsage returns the bytes that a file or the files of a tree take on disk: all, and those that deleting them
// would free, which excludes files with other names. Unreadable files count nothing.
func DiskUsage(path string) (all, exclusive int64) {
	_ = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				all += st.Blocks * diskBlock
				if d.IsDir() || st.Nlink == 1 {
					exclusive += st.Blocks * diskBlock
				}
			}
		}
		return nil
	})
	return all, exclusive
}

// Usage is what a store takes on disk, in bytes, by purpose. A file with several names counts once, in the first
// field that it belongs to.
type Usage struct {
	// Layers are writable disks of VMs and of snapshots.
	Layers int64 `json:"layers"`
	// Snapshots are those that VMs come back from. Kept are all others: named ones, those with tags, and kept
	// earlier sleeps.
	Snapshots int64 `json:"snapshots"`
	Kept      int64 `json:"kept"`
	Images    int64 `json:"images"`
	// Pages are decompressed pages of snapshots, which can be made again.
	Pages   int64 `json:"pages"`
	Volumes int64 `json:"volumes"`
}

// Usage looks at the files of the store: some microseconds for each. A file that disappears meanwhile is not an
// error. If ctx ends first, the result is incomplete.
func (s *Store) Usage(ctx context.Context) (u Usage, err error) {
	c := counter{ctx: ctx, seen: map[inode]bool{}}
	// List the snapshots first, then their users: one that a VM falls asleep in meanwhile is not in the list.
	entries, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return u, fmt.Errorf("looking at what the store takes: %w", err)
	}
	needed := map[string]bool{}
	records, err := s.List()
	if err != nil && len(records) == 0 {
		return u, fmt.Errorf("looking at what the store takes: %w", err)
	}
	for _, r := range records {
		needed[r.Snapshot], needed[r.Previous], needed[r.Base] = true, true, true
	}
	errs := []error{err, c.add(s.LayerDir(), &u.Layers)}
	for _, of := range []struct {
		needed bool
		bytes  *int64
	}{{true, &u.Snapshots}, {false, &u.Kept}} {
		for _, e := range entries {
			if needed[e.Name()] == of.needed {
				errs = append(errs, c.add(s.SnapshotDir(e.Name()), of.bytes))
			}
		}
	}
	errs = append(errs, c.add(filepath.Join(s.ImageDir(), "images"), &u.Images), c.add(s.PageCacheDir(), &u.Pages),
		c.add(filepath.Join(s.dir, "volumes"), &u.Volumes))
	if err := errors.Join(errs...); err != nil {
		return u, fmt.Errorf("looking at what the store takes: %w", err)
	}
	return u, nil
}

type inode struct{ device, number uint64 }

// counter adds up what files take, each once.
type counter struct {
	ctx  context.Context
	seen map[inode]bool
}

// add adds what a tree takes. A missing tree takes nothing.
func (c counter) add(path string, sum *int64) error {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to // several stores may share one
	}
	return filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if cerr := c.ctx.Err(); cerr != nil {
			return cerr
		}
		var info fs.FileInfo
		if err == nil {
			info, err = d.Info()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return nil
		}
		if st.Nlink > 1 && !d.IsDir() {
			id := inode{st.Dev, st.Ino}
			if c.seen[id] {
				return nil
			}
			c.seen[id] = true
		}
		*sum += st.Blocks * diskBlock
		return nil
	})
}
