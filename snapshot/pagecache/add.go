package pagecache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/snapshot"
)

const (
	// minFree is the free space that a cache leaves on the file system, in bytes.
	minFree = 1 << 30
	// tempPrefix begins the names of files that are being written. Only the holder of the lock writes, so any
	// other file with this prefix was left by a killed writer.
	tempPrefix = ".new-"
	// slack: a file is not rewritten for fewer new entries than 1/slack of those that it has.
	slack = 32
)

// Add adds the frames that r has missed so far to the cache files, and leaves out what does not fit. dir is the
// directory of the snapshot. Call Add in the background: it takes the time of decompressing the frames once more,
// and waits for other writers. An error only means that the cache has less than it could have. r notes no frames
// that it misses later, so a second Add for a Reader does nothing.
//
// The memory file that a delta itself has written is most often read only once, because the VM keeps running and
// sleeps again. For such a file Add first only makes an empty cache file, and adds its frames when some are
// missing a second time.
func (c *Cache) Add(ctx context.Context, r *Reader, dir string) error {
	if err := c.add(ctx, r, dir); err != nil {
		return fmt.Errorf("keeping decompressed pages in %s: %w", c.dir, err)
	}
	return nil
}

func (c *Cache) add(ctx context.Context, r *Reader, dir string) error {
	now := time.Now()
	for _, path := range r.paths {
		// The times are for evict. The file may have been removed meanwhile.
		_ = os.Chtimes(path, now, now)
	}
	missed := r.takeMissed()
	if len(missed) == 0 {
		return nil
	}
	s, err := snapshot.Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	// The lock keeps other writers out of the cache.
	lock, err := osfile.OpenLocked(ctx, c.dir, os.O_RDONLY, 0, osfile.Exclusive)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := c.removeTemps(); err != nil {
		return err
	}
	own := len(s.Manifest().Memory.Files) - 1
	var errs []error
	for i, mf := range s.Manifest().Memory.Files {
		if err := ctx.Err(); err != nil {
			return err
		}
		var frames []snapshot.Frame
		for _, f := range missed {
			if f.File() == mf.Number {
				frames = append(frames, f)
			}
		}
		if len(frames) > 0 {
			errs = append(errs, c.addTo(ctx, s, mf, frames, i == own && s.Manifest().Base != ""))
		}
	}
	return errors.Join(append(errs, c.evict())...)
}

// source is where the content of an entry comes from: a frame, or the previous file.
type source struct {
	entry
	frame *snapshot.Frame
	old   *entry
}

// addTo rewrites the cache file of a memory file with frames and with its present entries.
func (c *Cache) addTo(ctx context.Context, s *snapshot.Snapshot, mf snapshot.MemoryFile, frames []snapshot.Frame, noteFirst bool) error {
	id, ok := parseID(mf.ID)
	if !ok {
		return nil
	}
	before, err := openFile(c.path(mf.ID), id, c.boot(), false)
	if err == nil {
		defer before.f.Close()
	} else {
		before = nil
		if noteFirst {
			frames = nil
		}
	}
	sources, err := c.choose(ctx, before, frames)
	if err != nil || sources == nil {
		return err
	}
	var size uint64
	for i := range sources {
		size += uint64(sources[i].size())
	}
	var st unix.Statfs_t
	if err := unix.Statfs(c.dir, &st); err != nil {
		return os.NewSyscallError("statfs", err)
	}
	if free := st.Bavail * uint64(st.Bsize); free < size+c.minFree {
		return fmt.Errorf("%d MiB would leave less than %d MiB to others: %w", size>>20, c.minFree>>20, unix.ENOSPC)
	}
	return c.write(ctx, s, id, before, sources)
}

// choose returns what the next file must have, nil if the previous one is good enough.
func (c *Cache) choose(ctx context.Context, before *file, frames []snapshot.Frame) ([]source, error) {
	sources := []source{}
	has := map[int64]bool{}
	room := c.maxFile
	add := func(s source) {
		if n := int64(s.size()); n <= room && !has[s.offset] && len(sources) < maxEntries {
			has[s.offset] = true
			room -= n
			sources = append(sources, s)
		}
	}
	buf := make([]byte, snapshot.MaxFramePages*pageSize)
	good := func(e *entry) bool { return before.read(e, buf[:e.size()]) }
	damaged := false
	for i := range frames {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		f := &frames[i]
		if before != nil {
			if e := before.find(keyOf(f)); e != nil {
				if good(e) {
					continue // another process has added it meanwhile
				}
				damaged = true
			}
		}
		add(source{entry: entry{key: keyOf(f)}, frame: f})
	}
	if before == nil {
		return sources, nil
	}
	if len(sources) == 0 || len(sources)*slack < len(before.entries) && !damaged {
		return nil, nil
	}
	for i := range before.entries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if e := &before.entries[i]; !has[e.offset] && good(e) {
			add(source{entry: *e, old: e})
		}
	}
	return sources, nil
}

func (c *Cache) write(ctx context.Context, s *snapshot.Snapshot, id [16]byte, before *file, sources []source) (err error) {
	slices.SortFunc(sources, func(a, b source) int { return cmp.Compare(a.offset, b.offset) })
	f, err := os.CreateTemp(c.dir, tempPrefix)
	if err != nil {
		return err
	}
	defer func() {
		if f.Close(); err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	d, err := snapshot.NewDecoder()
	if err != nil {
		return err
	}
	defer d.Release()
	entries := make([]entry, len(sources))
	buf := make([]byte, snapshot.MaxFramePages*pageSize)
	at := contentAt(len(sources))
	for i := range sources {
		if err := ctx.Err(); err != nil {
			return err
		}
		src := &sources[i]
		var raw []byte
		if src.old != nil {
			raw = buf[:src.old.size()]
			if !before.read(src.old, raw) {
				return fmt.Errorf("%w: it has changed while it was copied", errUnusable)
			}
		} else if raw, err = s.Memory().ReadFrame(src.frame, d); err != nil {
			return err
		}
		src.place, src.sum = uint32(at/pageSize), crc32.Checksum(raw, castagnoli)
		if _, err := f.WriteAt(raw, at); err != nil {
			return err
		}
		entries[i] = src.entry
		at += int64(len(raw))
	}
	if _, err := f.WriteAt(encodeIndex(id, c.boot(), entries), 0); err != nil {
		return err
	}
	// Do not sync: a power loss ends the boot, and the file is not used after it. And a sleep, which waits for
	// this, must not wait for a disk.
	return os.Rename(f.Name(), c.path(fmt.Sprintf("%x", id)))
}

func (c *Cache) removeTemps() error {
	all, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range all {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			errs = append(errs, os.Remove(filepath.Join(c.dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// cached is a file of the cache.
type cached struct {
	id   string
	size int64 // its size on disk, in bytes
	used time.Time
}

// list returns the files of the cache, the least recently used first.
func (c *Cache) list() (out []cached, err error) {
	all, err := os.ReadDir(c.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range all {
		id, ok := strings.CutSuffix(e.Name(), suffix)
		if _, isID := parseID(id); !ok || !isID {
			continue
		}
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(c.dir, e.Name()), &st); err != nil {
			return nil, &os.PathError{Op: "stat", Path: e.Name(), Err: err}
		}
		const block = 512 // of st_blocks, stat(2)
		out = append(out, cached{id: id, size: max(st.Size, st.Blocks*block), used: time.Unix(st.Mtim.Unix())})
	}
	slices.SortFunc(out, func(a, b cached) int { return a.used.Compare(b.used) })
	return out, nil
}

// evict removes the least recently used files until the others fit into maxBytes. The lock is held.
func (c *Cache) evict() error {
	all, err := c.list()
	if err != nil {
		return err
	}
	var total int64
	for _, f := range all {
		total += f.size
	}
	var errs []error
	for _, f := range all {
		if total <= c.maxBytes {
			break
		}
		errs = append(errs, os.Remove(c.path(f.id)))
		total -= f.size
	}
	return errors.Join(errs...)
}

// Sweep removes the files of all memory files except those whose ids are in keep, and what killed writers have
// left. It returns how many cache files it removed, not counting those of killed writers, and their size on disk,
// in bytes. It does nothing while a writer holds the lock.
func (c *Cache) Sweep(keep map[string]bool) (files int, bytes int64, err error) {
	return c.sweep(func(id string) bool { return keep[id] })
}

// Forget removes the files of the memory files with these ids. It does nothing while a writer holds the lock.
func (c *Cache) Forget(ids map[string]bool) error {
	_, _, err := c.sweep(func(id string) bool { return !ids[id] })
	return err
}

func (c *Cache) sweep(keep func(id string) bool) (files int, bytes int64, err error) {
	lock, err := osfile.TryOpenLocked(c.dir, os.O_RDONLY, 0, osfile.Exclusive)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, osfile.ErrLocked):
		return 0, 0, nil // another time
	case err != nil:
		return 0, 0, fmt.Errorf("tidying up %s: %w", c.dir, err)
	}
	defer lock.Close()
	errs := []error{c.removeTemps()}
	all, err := c.list()
	errs = append(errs, err)
	for _, f := range all {
		if keep(f.id) {
			continue
		}
		err := os.Remove(c.path(f.id))
		errs = append(errs, err)
		if err == nil {
			files++
			bytes += f.size
		}
	}
	if err := errors.Join(errs...); err != nil {
		return files, bytes, fmt.Errorf("tidying up %s: %w", c.dir, err)
	}
	return files, bytes, nil
}
