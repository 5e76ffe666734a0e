package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Merge shortens a stack as older versions did, so that tests can open what each stage of a merge leaves. Production
// code does not merge, since a merge changes the content of a layer under its name.
//
// It joins two neighbouring layers into one. It copies the data of upper into lower's file. The file then takes
// upper's id, its place below the layers above it, and its path. Afterwards lower's path is gone, and a stack [..,
// lower, upper, ..] has become [.., upper, ..].
//
// Preconditions: lower is sealed, and no other layer, snapshot or running VM refers to it (those that Merge can
// see are ErrInUse). Stacks that have lower below upper may share upper. A stack must not share it that has, in
// lower's place, the layers that [Squash] has made of lower. Merge first seals upper if it is not sealed yet. The
// cost is that of upper's data.
//
// A merge that was interrupted by ctx, an error or a crash leaves a stack that reads as before while lower is used
// only below upper, which Open enforces. Repeating it completes it, and repeating a complete one does nothing.
// Open takes the old list of files at every stage and after the end, so the list need not change in the same
// instant.
func Merge(ctx context.Context, lower, upper string) error {
	if err := hostEnv().merge(ctx, lower, upper); err != nil {
		return fmt.Errorf("merge %s into %s: %w", upper, lower, err)
	}
	return nil
}

func (e env) merge(ctx context.Context, lower, upper string) (err error) {
	up, err := e.openLayer(upper, os.O_RDWR, osfile.Exclusive)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, up.close()) }()
	if up.hdr.state == StateMerging {
		return fmt.Errorf("%w: of %v into %s", ErrMerging, up.hdr.merge, upper)
	}
	if _, err := e.fs.Stat(lower); errors.Is(err, fs.ErrNotExist) && up.hdr.merge != (ID{}) {
		return ioError("sync directory", e.fs.SyncDir(filepath.Dir(upper))) // an earlier merge came this far
	}
	low, err := e.openLayer(lower, os.O_RDWR, osfile.Exclusive)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, low.close()) }()

	if low.hdr.id != up.hdr.id { // otherwise only the last step is missing
		if err := e.mergeInto(ctx, low, up); err != nil {
			return err
		}
	}
	if err := e.fs.Rename(lower, upper); err != nil {
		return ioError("rename", err)
	}
	err = e.fs.SyncDir(filepath.Dir(upper))
	if err == nil && filepath.Dir(lower) != filepath.Dir(upper) {
		err = e.fs.SyncDir(filepath.Dir(lower))
	}
	return ioError("sync directory", err)
}

func (e env) mergeInto(ctx context.Context, low, up *layer) error {
	low.fresh, up.fresh = true, true
	switch low.hdr.state {
	case StateSealed:
	case StateMerging:
		if low.hdr.merge != up.hdr.id {
			return fmt.Errorf("%w: of %v into %s", ErrMerging, low.hdr.merge, low.path)
		}
	default:
		return fmt.Errorf("%w: the lower layer is %v, not sealed", ErrInUse, low.hdr.state)
	}
	if low.hdr.flags&flagSinking != 0 {
		return fmt.Errorf("%w: of %s into the layer below it, %v", ErrMerging, low.path, low.hdr.parent)
	}
	if up.hdr.parent != low.hdr.id {
		return fmt.Errorf("%w: upper needs %v, lower is %v", ErrMissingParent, up.hdr.parent, low.hdr.id)
	}
	if up.hdr.size != low.hdr.size {
		return fmt.Errorf("%w: the layers differ in size, %d and %d bytes; clone the disk instead", ErrSize, low.hdr.size, up.hdr.size)
	}
	if up.hdr.state == StateOpen {
		if err := up.freeze(); err != nil {
			return err
		}
	}
	if err := e.seal(up); err != nil {
		return err
	}

	if h := up.hdr; h.flags&flagSinking == 0 {
		h.flags |= flagSinking
		if err := e.commitHeader(up, h); err != nil {
			return err
		}
	}
	merged, err := mergedRuns(low, up)
	if err != nil {
		return err
	}
	if low.hdr.state == StateSealed {
		h := low.hdr
		h.state, h.merge = StateMerging, up.hdr.id
		if err := e.commitHeader(low, h); err != nil {
			return err
		}
	}
	if err := copyRuns(ctx, low, up); err != nil {
		return err
	}
	h := low.hdr
	// The old table must stay readable until the header points to the new one.
	start := (h.tableOff + h.tableLen + BlockSize - 1) / BlockSize * BlockSize
	if h.tableOff, h.tableLen, h.tableCRC, err = low.writeTable(merged, start); err != nil {
		return err
	}
	if err := low.f.Datasync(); err != nil {
		return ioError("sync "+low.path, fmt.Errorf("%w: %w", ErrSyncFailed, err))
	}
	h.state, h.id, h.merge = StateSealed, up.hdr.id, low.hdr.id
	return e.commitHeader(low, h)
}

// mergedRuns returns the runs of both layers, upper first where they overlap. It keeps zeros only if there is a
// layer below.
func mergedRuns(low, up *layer) (func(func(run)) error, error) {
	x := newIndex(low.hdr.blocks())
	fill := func(r run) { x.set(r.start, r.count, source(r.state)) }
	if err := low.runs(fill); err != nil {
		return nil, err
	}
	if err := up.runs(fill); err != nil {
		return nil, err
	}
	bottom := low.hdr.parent == ID{}
	return func(each func(run)) error {
		for b := int64(0); b < x.blocks; {
			s := x.get(b)
			n := x.runLen(b, x.blocks, s)
			if s == blockData || s == blockZero && !bottom {
				each(run{start: b, count: n, state: byte(s)})
			}
			b += n
		}
		return nil
	}, nil
}

// copyRuns copies upper's data into lower and frees what upper makes zero. It can be repeated.
func copyRuns(ctx context.Context, low, up *layer) error {
	buf := make([]byte, copyChunk)
	var err error
	rerr := up.runs(func(r run) {
		off, n := r.start*BlockSize, r.count*BlockSize
		for err == nil && n > 0 {
			if err = ctx.Err(); err != nil {
				return
			}
			step := min(n, copyStep)
			if r.state == blockZero {
				step = n
				err = low.f.Fallocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, low.data+off, n)
			} else {
				err = osfile.CopyRange(low.f, low.data+off, up.f, up.data+off, step, buf)
			}
			off, n = off+step, n-step
		}
	})
	if err != nil && ctx.Err() == nil {
		err = ioError("copy", err)
	}
	return errors.Join(rerr, err)
}
