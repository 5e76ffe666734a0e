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

// Add adds the frames that have the pages missed, of the snapshot in dir, to the cache files, and leaves out what does
// not fit. missed need not be trusted: the frames come from the snapshot's own index, and Add ignores pages that it
// lacks and more than MaxMissed. Call Add in the background: it takes the time of decompressing the frames, and waits
// for other writers. An error only means that the cache has less than it could have.
//
// The memory file that a delta itself has written is most often read only once, because the VM keeps running and
// sleeps again. For such a file Add first only makes an empty cache file, and adds its frames when some are
// missing a second time.
//
// may, if not nil, is asked whether there is room on disk for so many bytes of pages of a memory file, by its name.
func (c *Cache) Add(ctx context.Context, dir string, missed []uint64, may func(memoryFile string, bytes int64) bool) error {
	if may == nil {
		may = func(string, int64) bool { return true }
	}
	if err := c.add(ctx, dir, missed[:min(len(missed), MaxMissed)], may); err != nil {
		return fmt.Errorf("keeping decompressed pages in %s: %w", c.dir, err)
	}
	return nil
}

func (c *Cache) add(ctx context.Context, dir string, missed []uint64, may func(string, int64) bool) error {
	s, err := snapshot.Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	now := time.Now()
	memory := s.Manifest().Memory.Files
	ids := make([]identity, len(memory))
	for i, f := range s.Files() {
		if ids[i], err = identityOf(f); err != nil {
			return err
		}
		// The times are for evict. There may be no such file.
		_ = os.Chtimes(c.path(ids[i].name()), now, now)
	}
	frames, err := framesWith(s.Memory(), missed)
	if err != nil || len(frames) == 0 {
		return err
	}
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
	own := len(memory) - 1
	var errs []error
	for i, mf := range memory {
		if err := ctx.Err(); err != nil {
			return err
		}
		if of := frames[mf.Number]; len(of) > 0 {
			errs = append(errs, c.addTo(ctx, s, ids[i], of, i == own && s.Manifest().Base != "",
				func(n int64) bool { return may(mf.Name, n) }))
		}
	}
	return errors.Join(append(errs, c.evict())...)
}

// framesWith returns the frames of each memory file that have the given pages.
func framesWith(m *snapshot.Memory, pages []uint64) (map[uint32][]snapshot.Frame, error) {
	out := map[uint32][]snapshot.Frame{}
	for _, page := range pages {
		if page >= m.Pages() {
			continue
		}
		l, err := m.Leaf(int(page / snapshot.ChunkPages))
		if err != nil {
			return nil, err
		}
		if l == nil {
			continue
		}
		if i, _, ok := l.Page(int(page % snapshot.ChunkPages)); ok {
			f := l.Frame(i)
			out[f.File()] = append(out[f.File()], *f)
		}
	}
	return out, nil
}

// source is where the content of an entry comes from: a frame, or the previous file.
type source struct {
	entry
	frame *snapshot.Frame
	old   *entry
}

// addTo rewrites the cache file of a memory file with frames and with its present entries.
func (c *Cache) addTo(ctx context.Context, s *snapshot.Snapshot, id identity, frames []snapshot.Frame,
	noteFirst bool, may func(int64) bool) error {
	before, err := openFile(osfile.OS, c.path(id.name()), id, c.boot(), false)
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
	const block = 4096 // the rest of the last one, and one where the file system keeps the others' places
	if !may(contentAt(len(sources)) + int64(size) + 2*block) {
		return nil
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

func (c *Cache) write(ctx context.Context, s *snapshot.Snapshot, id identity, before *file,
	sources []source) (err error) {
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
	return os.Rename(f.Name(), c.path(id.name()))
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
	name string
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
		digits, ok := strings.CutSuffix(e.Name(), suffix)
		if _, isName := parseHex(digits); !ok || !isName {
			continue
		}
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(c.dir, e.Name()), &st); err != nil {
			return nil, &os.PathError{Op: "stat", Path: e.Name(), Err: err}
		}
		const block = 512 // of st_blocks, stat(2)
		out = append(out, cached{name: e.Name(), size: max(st.Size, st.Blocks*block), used: time.Unix(st.Mtim.Unix())})
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
		errs = append(errs, os.Remove(c.path(f.name)))
		total -= f.size
	}
	return errors.Join(errs...)
}

// Sweep removes all cache files except those whose names (Name, NameOf) are in keep, and what killed writers have
// left. It returns how many cache files it removed, not counting those of killed writers, and their size on disk,
// in bytes. It does nothing while a writer holds the lock.
func (c *Cache) Sweep(keep map[string]bool) (files int, bytes int64, err error) {
	return c.sweep(func(name string) bool { return keep[name] })
}

// Forget removes the cache files with these names. It does nothing while a writer holds the lock.
func (c *Cache) Forget(names map[string]bool) error {
	if len(names) == 0 {
		return nil
	}
	lock, err := osfile.TryOpenLocked(c.dir, os.O_RDONLY, 0, osfile.Exclusive)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, osfile.ErrLocked):
		return nil // a sweep finds them
	case err != nil:
		return fmt.Errorf("forgetting pages in %s: %w", c.dir, err)
	}
	defer lock.Close()
	var errs []error
	for name := range names {
		if err := os.Remove(c.path(name)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (c *Cache) sweep(keep func(name string) bool) (files int, bytes int64, err error) {
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
		if keep(f.name) {
			continue
		}
		err := os.Remove(c.path(f.name))
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
