package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// partSuffix ends the name of the file of an incomplete sealed layer. Files that a crash has left may be deleted.
const partSuffix = ".part"

// Squash writes the content of layers that are neighbours in a stack, lowest first, to one new layer in the file
// path. The new layer can replace all of them in that stack, and in any other that has them in this order. The old
// layers stay unchanged, so that other disks can keep using them. They must be sealed, and may be in use by open
// disks.
//
// The new layer has the id of the uppermost and the parent of the lowest. It gets its name only when it is
// complete and durable. The cost in time, and in space if the file system has no reflinks, grows with the data
// that no layer above covers.
func Squash(ctx context.Context, layers []string, path string) error {
	if err := hostEnv().squash(ctx, layers, path); err != nil {
		return fmt.Errorf("squash %d layers into %s: %w", len(layers), path, err)
	}
	return nil
}

func (e env) squash(ctx context.Context, paths []string, path string) error {
	if len(paths) < 2 {
		return fmt.Errorf("%w: there are none to join", ErrMissingParent)
	}
	var ls []*layer
	defer func() {
		for _, l := range ls {
			_ = l.close() // only read from
		}
	}()
	for i, p := range paths {
		l, err := e.openLayer(p, os.O_RDONLY, osfile.Shared)
		if err != nil {
			return err
		}
		ls = append(ls, l)
		if l.hdr.state != StateSealed {
			return fmt.Errorf("%w: %s is %v, not sealed", ErrInUse, p, l.hdr.state)
		}
		if l.hdr.flags&flagSinking != 0 {
			return fmt.Errorf("%w: of %s into the layer below it", ErrMerging, p)
		}
		if i == 0 {
			continue
		}
		below := ls[i-1]
		if l.hdr.parent != below.hdr.id {
			return fmt.Errorf("%w: %s needs %v, %s is %v", ErrMissingParent, p, l.hdr.parent, below.path, below.hdr.id)
		}
		if below.hdr.size > l.hdr.size {
			return fmt.Errorf("%s: %w: smaller than %s below it", p, ErrCorrupt, below.path)
		}
	}
	x, err := indexOf(ls)
	if err != nil {
		return err
	}
	top := ls[len(ls)-1].hdr
	return e.writeSealed(ctx, path, header{
		size: top.size, id: top.id, parent: ls[0].hdr.parent, state: StateSealed, merge: ls[len(ls)-2].hdr.id,
	}, ls, x)
}

// writeSealed makes a sealed layer from the blocks of others, as the index x has them. It gets its name only when
// it is complete and durable.
func (e env) writeSealed(ctx context.Context, path string, h header, from []*layer, x *index) (err error) {
	if _, err := e.fs.Stat(path); err == nil {
		return ioError("create layer", &fs.PathError{Op: "create", Path: path, Err: fs.ErrExist})
	}
	part := path + partSuffix
	if err := e.fs.Remove(part); err != nil && !errors.Is(err, fs.ErrNotExist) { // left by a process that died
		return ioError("create layer", err)
	}
	out, err := e.create(part, header{size: h.size, id: h.id, parent: h.parent, state: StateFrozen}, false)
	if err != nil {
		return err
	}
	open := true
	defer func() {
		if open {
			_ = out.close() // the first error is the one to report
		}
		if err != nil {
			_ = e.fs.Remove(part)
		}
	}()
	if err := out.copyFrom(ctx, from, x); err != nil {
		return err
	}
	if h.tableOff, h.tableLen, h.tableCRC, err = out.writeTable(squashedRuns(x, len(from), h.parent == ID{}), h.endOfData()); err != nil {
		return err
	}
	if err := out.f.Datasync(); err != nil { // data and table: neither counts until the header says so
		return ioError("sync "+part, fmt.Errorf("%w: %w", ErrSyncFailed, err))
	}
	if err := e.commitHeader(out, h); err != nil {
		return err
	}
	open = false
	if err := out.close(); err != nil {
		return err
	}
	if err := e.fs.Rename(part, path); err != nil {
		return ioError("rename", err)
	}
	if err := e.fs.SyncDir(filepath.Dir(path)); err != nil {
		_ = e.fs.Remove(path)
		return ioError("sync directory", err)
	}
	return nil
}

// indexOf returns an index of which layer has each block: source n is the data of ls[n-1], 0 is none, and
// len(ls)+1 is zeros.
func indexOf(ls []*layer) (*index, error) {
	x := newIndex(ls[len(ls)-1].hdr.blocks())
	for i, l := range ls {
		err := l.runs(func(r run) {
			s := source(i + 1)
			if r.state == blockZero {
				s = source(len(ls) + 1)
			}
			x.set(r.start, r.count, s)
		})
		if err != nil {
			return nil, err
		}
	}
	return x, nil
}

// each calls f for the runs of one source, in order, until it fails.
func (x *index) each(f func(s source, start, count int64) error) error {
	for b := int64(0); b < x.blocks; {
		s := x.get(b)
		n := x.runLen(b, x.blocks, s)
		if err := f(s, b, n); err != nil {
			return err
		}
		b += n
	}
	return nil
}

// squashedRuns returns the runs of an index that indexOf has made of that many layers. It leaves zeros out at the
// bottom of a stack, where no layer lies below.
func squashedRuns(x *index, layers int, bottom bool) func(func(run)) error {
	return func(each func(run)) error {
		var j joiner
		err := x.each(func(s source, start, count int64) error {
			switch {
			case s == 0:
			case int(s) <= layers:
				j.add(run{start: start, count: count, state: blockData}, each)
			case !bottom:
				j.add(run{start: start, count: count, state: blockZero}, each)
			}
			return nil
		})
		j.flush(each)
		return err
	}
}

// copyFrom copies the blocks of the layers that their index x refers to into l.
func (l *layer) copyFrom(ctx context.Context, ls []*layer, x *index) error {
	buf := make([]byte, copyChunk)
	return x.each(func(s source, start, count int64) error {
		if s == 0 || int(s) > len(ls) {
			return nil
		}
		from := ls[s-1]
		for off, n := start*BlockSize, count*BlockSize; n > 0; {
			if err := ctx.Err(); err != nil {
				return err
			}
			step := min(n, copyStep)
			if err := osfile.CopyRange(l.f, l.data+off, from.f, from.data+off, step, buf); err != nil {
				return ioError("copy from "+from.path, err)
			}
			off, n = off+step, n-step
		}
		return nil
	})
}

// Substitute makes Stack return one layer, which Squash made from neighbours below the top, in their place. The
// disk itself keeps using the layers that it has open; a disk opened by the new names has fewer. If Substitute
// fails, it changes nothing.
func (d *Disk) Substitute(layers []string, by string) error {
	l, err := d.env.openLayer(by, os.O_RDONLY, osfile.Shared)
	if err != nil {
		return fmt.Errorf("substitute layers: %w", err)
	}
	h := l.hdr
	if err := l.close(); err != nil {
		return fmt.Errorf("substitute layers: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() {
		return fmt.Errorf("substitute layers: %w", ErrClosed)
	}
	names := *d.names.Load()
	first := -1
	if len(layers) > 0 {
		first = slices.IndexFunc(names, func(n layerName) bool { return n.path == layers[0] })
	}
	end := first + len(layers)
	if first < 0 || end >= len(names) || !slices.EqualFunc(names[first:end], layers, func(n layerName, path string) bool { return n.path == path }) {
		return fmt.Errorf("substitute layers: %w: they are not neighbours below the top of this disk", ErrMissingParent)
	}
	if h.state != StateSealed || h.id != names[end-1].id || h.parent != names[first].parent {
		return fmt.Errorf("substitute layers: %w: %s is not what has been made of them", ErrMissingParent, by)
	}
	changed := slices.Concat(names[:first], []layerName{{by, h.id, h.parent}}, names[end:])
	d.names.Store(&changed)
	return nil
}
