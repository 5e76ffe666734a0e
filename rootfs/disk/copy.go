package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/drowse-vm/drowse/internal/osfile"
)

const (
	copyStep  = 64 << 20 // bytes copied between two looks at the context
	copyChunk = 1 << 20  // bytes of buffer
)

// ReadAt implements io.ReaderAt, for tools and tests; a device uses ReadExtent.
func (d *Disk) ReadAt(p []byte, off int64) (done int, err error) {
	if off >= d.size {
		return 0, io.EOF
	}
	short := int64(len(p)) > d.size-off
	if short {
		p = p[:d.size-off]
	}
	for done < len(p) {
		l, fileOff, n, err := d.resolve(off+int64(done), int64(len(p)-done))
		if err != nil {
			return done, err
		}
		q := p[done : done+int(n)]
		if l == nil {
			clear(q)
		} else if _, err := l.f.ReadAt(q, fileOff); err != nil {
			return done, ioError("read "+l.path, err)
		}
		done += int(n)
	}
	if short {
		return done, io.EOF
	}
	return done, nil
}

// WriteAt implements io.WriterAt, for tools and tests; a device uses WriteExtent and Wrote.
func (d *Disk) WriteAt(p []byte, off int64) (done int, err error) {
	for done < len(p) {
		_, fileOff, n, err := d.WriteExtent(off+int64(done), int64(len(p)-done))
		if err != nil {
			return done, err
		}
		top, _ := d.top()
		_, err = top.f.WriteAt(p[done:done+int(n)], fileOff)
		if err := d.Wrote(off+int64(done), n, err); err != nil {
			return done, err
		}
		done += int(n)
	}
	return done, nil
}

// Clone writes the disk's content to a new raw file, which appears under its name only when it is
// whole and durable. Holes stay holes, and on file systems with reflinks data is shared. Writes made
// to the disk meanwhile may or may not be in it: clone a paused or read-only disk.
func (d *Disk) Clone(ctx context.Context, path string) (err error) {
	dir, name := filepath.Split(path)
	tmp := filepath.Join(dir, "."+name+".tmp")
	f, err := d.env.fs.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return ioError("clone disk", err)
	}
	open := true
	defer func() {
		if open {
			_ = f.Close() // the first error is the one to report
		}
		if err != nil {
			_ = d.env.fs.Remove(tmp)
		}
	}()
	if err := f.Truncate(d.size); err != nil {
		return ioError("clone disk", err)
	}
	if err := d.copyTo(ctx, f); err != nil {
		return fmt.Errorf("clone disk to %s: %w", path, err)
	}
	if err := f.Sync(); err != nil {
		return ioError("clone disk", err)
	}
	open = false
	if err := f.Close(); err != nil {
		return ioError("clone disk", err)
	}
	if err := d.env.fs.Rename(tmp, path); err != nil {
		return ioError("clone disk", err)
	}
	return ioError("clone disk", d.env.fs.SyncDir(filepath.Dir(path)))
}

func (d *Disk) copyTo(ctx context.Context, dst osfile.File) error {
	buf := make([]byte, copyChunk)
	for off := int64(0); off < d.size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		l, fileOff, n, err := d.resolve(off, min(copyStep, d.size-off))
		if err != nil {
			return err
		}
		if l != nil {
			if err := copySparse(dst, off, l, fileOff, n, buf); err != nil {
				return ioError("copy from "+l.path, err)
			}
		}
		off += n
	}
	return nil
}

// copySparse copies the parts of a layer's file that are not holes.
func copySparse(dst osfile.File, off int64, l *layer, fileOff, n int64, buf []byte) error {
	shift := off - fileOff
	for end := fileOff + n; ; {
		fileOff = nextData(l.os, fileOff, end)
		if fileOff >= end {
			return nil
		}
		stop := nextHole(l.os, fileOff, end)
		if err := osfile.CopyRange(dst, fileOff+shift, l.f, fileOff, stop-fileOff, buf); err != nil {
			return err
		}
		fileOff = stop
	}
}

// Import makes a sealed layer with the content of a raw file, leaving out its zero blocks. The layer
// appears under its name only when it is whole and durable. Fork writable disks over it.
func Import(ctx context.Context, path, raw string) (Stack, error) {
	return hostEnv().importRaw(ctx, path, raw)
}

func (e env) importRaw(ctx context.Context, path, raw string) (s Stack, err error) {
	if _, err := e.fs.Stat(path); err == nil {
		return Stack{}, ioError("import disk", &fs.PathError{Op: "create", Path: path, Err: fs.ErrExist})
	}
	src, err := e.openBase(raw)
	if err != nil {
		return Stack{}, fmt.Errorf("import disk: %w", err)
	}
	defer func() { _ = src.close() }() // only read from
	dir, name := filepath.Split(path)
	part := filepath.Join(dir, "."+name+".import")
	if err := e.fs.Remove(part); err != nil && !errors.Is(err, fs.ErrNotExist) { // of an import that died
		return Stack{}, ioError("import disk", err)
	}
	s, err = e.createDisk(part, Stack{}, header{size: src.hdr.size}, false)
	if err != nil {
		return Stack{}, fmt.Errorf("import disk: %w", err)
	}
	defer func() {
		if err != nil {
			_ = e.fs.Remove(part)
		}
	}()
	d, err := e.open(s, Options{})
	if err != nil {
		return Stack{}, fmt.Errorf("import disk: %w", err)
	}
	if err := d.fill(ctx, src); err != nil {
		return Stack{}, errors.Join(fmt.Errorf("import disk from %s: %w", raw, err), d.Close())
	}
	if err := d.CloseSealed(); err != nil {
		return Stack{}, fmt.Errorf("import disk: %w", err)
	}
	if err := e.fs.Rename(part, path); err != nil {
		return Stack{}, ioError("import disk", err)
	}
	return Stack{Layers: []string{path}}, ioError("import disk", e.fs.SyncDir(filepath.Dir(path)))
}

// fill writes the blocks of a raw file that are not zero.
func (d *Disk) fill(ctx context.Context, src *layer) error {
	buf := make([]byte, copyChunk)
	for off := int64(0); off < src.limit; {
		if err := ctx.Err(); err != nil {
			return err
		}
		off = nextData(src.os, off, src.limit) / BlockSize * BlockSize
		p := buf[:min(copyChunk, src.limit-off)]
		if len(p) == 0 {
			return nil
		}
		if _, err := src.f.ReadAt(p, off); err != nil {
			return ioError("read", err)
		}
		for len(p) > 0 {
			n := 0
			for n < len(p) && !zeroBlock(p[n:]) {
				n += min(BlockSize, len(p)-n)
			}
			if n > 0 {
				if _, err := d.WriteAt(p[:n], off); err != nil {
					return err
				}
			} else {
				n = min(BlockSize, len(p))
			}
			p, off = p[n:], off+int64(n)
		}
	}
	return nil
}

// zeroBlock says whether the first block of p is all zeros.
func zeroBlock(p []byte) bool {
	n := min(BlockSize, len(p))
	return bytes.Equal(p[:n], statePage[blockAbsent][:n])
}
