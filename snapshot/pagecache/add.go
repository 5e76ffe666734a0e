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
	// minFree is how much of the file system a cache leaves to others, in bytes.
	minFree = 1 << 30
	// tempPrefix begins the names of files that are being written. Only who holds the
	// lock writes, so others of that name have been left by somebody who was killed.
	tempPrefix = ".new-"
	// slack: a file is not written again for less than one slackth of what it has.
	slack = 32
)

// Add puts those frames into the cache that r has been asked for until now and did not
// have, with what the files have already; what does not fit is left out. dir is the
// directory of the snapshot. It is for the background, takes the time of decompressing them
// once more, and waits for other writers. An error means that less is in the cache than
// could be, and nothing else. Frames that are asked for later are not noted, so it is of
// use once for each Reader.
//
// The memory file that a delta itself has written is most often read once: the VM goes on
// and sleeps again. It is noted first, and its frames are added when there are missing ones a second
// time.
func (c *Cache) Add(ctx context.Context, r *Reader, dir string) error {
	if err := c.add(ctx, r, dir); err != nil {
		return fmt.Errorf("keeping decompressed pages in %s: %w", c.dir, err)
	}
	return nil
}

func (c *Cache) add(ctx context.Context, r *Reader, dir string) error {
	now := time.Now()
	for _, path := range r.paths {
		// For evict. Whoever has removed it may have done so.
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
	// Nobody else writes to the cache.
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

// source is where the content of an entry comes from: a frame, or the file before.
type source struct {
	entry
	frame *snapshot.Frame
	old   *entry
}

// addTo writes the file of a memory file anew, with frames and what is in it already.
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

// choose says what the next file is to have; nothing if that of before is good enough.
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
					continue // somebody else has added it meanwhile
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
	// Not synced: a loss of power ends the boot, and with it the use of the file. And a
	// sleep, which waits for this, does not wait for a disk.
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
	size int64 // what it takes on disk, in bytes
	used time.Time
}

// list returns the files of the cache, what was used least recently first.
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

// evict removes files until the others take no more than they may. The lock is held.
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

// Sweep removes the files of all memory files but those whose ids are in keep, and what
// writers have left that were killed. It returns how many files went and what they took on
// disk, in bytes. It does nothing while somebody writes.
func (c *Cache) Sweep(keep map[string]bool) (files int, bytes int64, err error) {
	return c.sweep(func(id string) bool { return keep[id] })
}

// Forget removes the files of the memory files with these ids. It does nothing while somebody writes.
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
