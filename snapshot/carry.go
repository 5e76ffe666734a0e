package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// deltaFiles is the most memory files that a delta may have. With a higher limit deltas copy less: see FORMAT.md,
// "Choice of constants".
const deltaFiles = 32

// A delta drops a file of which less than 1/liveShare of the pages are still needed, and carries those pages over.
const liveShare = 4

// plan returns the base's files that the new snapshot drops after it has carried their live parts over.
//
// File numbers grow with time, so the files are in order of age, oldest first, and no file refers to a younger
// one. To keep to the limit, plan always drops the youngest files, so that only young leaves must be searched. It
// works like a log-structured merge tree: the new file absorbs its neighbour, then the next one while that is no
// larger than all it has absorbed so far. So a copied byte ends up in a file at least twice as large as before, or
// each absorbed file lowers the number of files by one.
func (o *memoryWriter) plan(files []MemoryFile, limit int) map[uint32]bool {
	carried := map[uint32]bool{}
	var left []MemoryFile
	size := o.total()
	for _, f := range files {
		u := o.tally.file(f.Number)
		switch {
		case *u == (use{}):
		case u.pages*liveShare < f.StoredPages:
			carried[f.Number] = true
			size += int64(u.frameBytes + u.leafBytes)
		default:
			left = append(left, f)
		}
	}
	forced := len(left) + 1 - limit
	if forced <= 0 {
		return carried
	}
	for n := len(left); n > 0; n-- {
		u := o.tally.file(left[n-1].Number)
		cost := int64(u.frameBytes + u.leafBytes)
		if forced <= 0 && cost > size {
			break
		}
		carried[left[n-1].Number] = true
		size += cost
		forced--
	}
	return carried
}

// carry copies the live parts of the dropped files of the base into the new file, links the files that stay into
// dir, and returns those.
func (w *writer) carry(ctx context.Context, out *memoryWriter, dir string) ([]MemoryFile, error) {
	base := w.base.manifest.Memory.Files
	carried := map[uint32]bool{}
	if w.dense {
		for _, f := range base {
			carried[f.Number] = true
		}
	} else {
		carried = out.plan(base, w.maxFiles)
	}
	var files []MemoryFile
	for i, f := range base {
		if carried[f.Number] || *out.tally.file(f.Number) == (use{}) {
			continue
		}
		ok, err := w.link(w.base.files[i], filepath.Join(w.base.dir, f.Name), filepath.Join(dir, linkName(f.ID)))
		if err != nil {
			return nil, err
		}
		if ok {
			files = append(files, f)
		} else {
			carried[f.Number] = true
		}
	}
	if len(carried) == 0 {
		return files, nil
	}
	p := pass{w: w, out: out, carried: carried}
	before := out.total()
	if err := p.run(ctx, w.mayTouch(out, carried)); err != nil {
		return nil, fmt.Errorf("carrying frames over: %w", err)
	}
	if err := out.writeHot(); err != nil {
		return nil, err
	}
	out.carried = out.total() - before
	// The tally follows each leaf as it is replaced, so this check proves that nothing is left behind.
	for n := range carried {
		if u := *out.tally.file(n); u != (use{}) {
			return nil, fmt.Errorf("%d pages of memory file %d were not carried over: the base does not state rightly what it has there: %w",
				u.pages, n, ErrBase)
		}
	}
	// A file is no longer needed if it only had leaves that are now rewritten.
	kept := files[:0]
	for _, f := range files {
		if *out.tally.file(f.Number) != (use{}) {
			kept = append(kept, f)
		} else if err := w.fs.RemoveAll(filepath.Join(dir, linkName(f.ID))); err != nil {
			return nil, err
		}
	}
	return kept, nil
}

// mayTouch returns a function that emits the chunks that may have frames or leaves in the dropped files.
func (w *writer) mayTouch(out *memoryWriter, carried map[uint32]bool) func(context.Context, func(job) error) error {
	oldest := ^uint32(0)
	for n := range carried {
		oldest = min(oldest, n)
	}
	m := w.base.memory
	// Collect the leaves that exist now, because the pass makes others while it runs.
	var jobs []job
	for c := range uint64(m.Chunks()) {
		leaf, ok := out.leaves[c]
		if !ok && m.ref(int(c)).file < oldest || ok && len(leaf) == 0 {
			continue
		}
		j := job{chunk: c, leaf: leaf}
		if w.hot != nil {
			chunkOf(w.hot, c, &j.hot)
		}
		jobs = append(jobs, j)
	}
	return func(_ context.Context, emit func(job) error) error {
		for _, j := range jobs {
			if err := emit(j); err != nil {
				return err
			}
		}
		return nil
	}
}

// link makes newname a hard link to the base's open file f. It returns false without an error if no link is
// possible but nothing is broken: the base was removed or compacted since it was opened, it is on another file
// system, the file system has no hard links, or the file has too many.
func (w *writer) link(f osfile.File, oldname, newname string) (bool, error) {
	err := w.fs.Link(oldname, newname)
	for _, e := range []error{fs.ErrNotExist, unix.EXDEV, unix.EMLINK, unix.EPERM, unix.EOPNOTSUPP, unix.ENOSYS} {
		if errors.Is(err, e) {
			return false, nil
		}
	}
	if err != nil {
		return false, err
	}
	want, err := f.Stat()
	if err != nil {
		return false, err
	}
	if got, err := w.fs.Stat(newname); err != nil {
		return false, err
	} else if !osfile.SameFile(got, want) {
		return false, w.fs.RemoveAll(newname)
	}
	return true, nil
}

// move carries over what the old leaf has in dropped files. moved has the number of pages still needed of each old
// frame. move checks and copies a frame unchanged if more than half of it is needed (all of it, if dense). It
// repacks the needed pages of the others, and those of tiny compressed frames if there are several, because an index
// entry can be as large as such a frame.
func (p *pass) move(u *unit, t *tools, moved [ChunkPages]uint16) error {
	tiny, limit := 0, FramePages/4
	if p.w.dense {
		limit = FramePages - 1
	}
	for i := range u.old.frames {
		if n := int(moved[i]); n > 0 && n <= limit && u.old.frames[i].codec != codecRaw {
			tiny++
		}
	}
	m := p.w.base.memory
	for i := range u.old.frames {
		f := &u.old.frames[i]
		live := int(moved[i])
		if live == 0 {
			continue
		}
		whole := 2*live > f.Pages()
		if p.w.dense {
			whole = live == f.Pages()
		}
		if tiny > 1 && live <= limit && f.codec != codecRaw {
			whole = false
		}
		var err error
		if whole {
			err = u.copyFrame(m, t.d, i)
		} else {
			err = u.repackFrame(m, t, i)
		}
		if err != nil {
			return fmt.Errorf("base: %w", err)
		}
	}
	return nil
}

// copyFrame copies an old frame without decompressing it.
func (u *unit) copyFrame(m *Memory, d *Decoder, i int) error {
	f := u.old.frames[i]
	b, err := m.readStored(&f, d)
	if err != nil {
		return err
	}
	if got := checksum(b); got != f.crc {
		return corrupt(m.file(f.file).name, f.offset, "frame checksum is %08x, the index says %08x", got, f.crc)
	}
	f.offset = int64(len(u.blob))
	u.blob = append(u.blob, b...)
	for page := range u.old.pages {
		if frame, slot, ok := u.old.Page(page); ok && frame == i {
			u.leaf.setPage(page, len(u.leaf.frames), slot)
		}
	}
	u.leaf.frames = append(u.leaf.frames, f)
	return nil
}

// repackFrame packs the pages of an old frame that are still needed into new frames, without compression if they had
// none.
func (u *unit) repackFrame(m *Memory, t *tools, i int) error {
	raw, err := m.ReadFrame(&u.old.frames[i], t.d)
	if err != nil {
		return err
	}
	for page := range u.old.pages {
		if frame, slot, ok := u.old.Page(page); ok && frame == i {
			if u.old.frames[i].codec == codecRaw {
				u.hot.set(page)
			}
			u.pack(t.c, raw[slot*guestmem.PageSize:][:guestmem.PageSize], page)
		}
	}
	return nil
}
