package disk

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"

	"github.com/drowse-vm/drowse/internal/osfile"
)

const (
	copyStep  = 64 << 20 // bytes copied between two checks of the context
	copyChunk = 1 << 20  // bytes of buffer
)

// ReadAt implements io.ReaderAt, for tools and tests. A device uses ReadExtent.
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

// WriteAt implements io.WriterAt, for tools and tests. A device uses WriteExtent and Wrote.
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

// Import makes a sealed layer in the file path with the content of a raw file of whole blocks, without its zero
// blocks. The layer gets its name only when it is complete and durable. Fork writable disks over it.
func Import(ctx context.Context, path, raw string) (Stack, error) {
	return hostEnv().importRaw(ctx, path, raw)
}

func (e env) importRaw(ctx context.Context, path, raw string) (s Stack, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("import disk from %s: %w", raw, err)
		}
	}()
	f, err := e.fs.OpenFile(raw, os.O_RDONLY, 0)
	if err != nil {
		return Stack{}, ioError("open", err)
	}
	defer func() { _ = f.Close() }() // only read from
	st, err := f.Stat()
	if err != nil {
		return Stack{}, ioError("stat", err)
	}
	h := header{size: st.Size(), id: newID(), state: StateSealed}
	if err := checkSize(h.size); err != nil {
		return Stack{}, err
	}
	src := &layer{path: raw, f: f, os: f.OS(), hdr: h} // its block 0 is at the start of the file
	x, err := src.filled(ctx)
	if err != nil {
		return Stack{}, err
	}
	if err := e.writeSealed(ctx, path, h, []*layer{src}, x); err != nil {
		return Stack{}, err
	}
	return Stack{Layers: []string{path}}, nil
}

// filled returns an index in which the nonzero blocks of a raw file have the source 1.
func (l *layer) filled(ctx context.Context) (*index, error) {
	x := newIndex(l.hdr.blocks())
	buf := make([]byte, copyChunk)
	for off := int64(0); off < l.hdr.size; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		data, _ := osfile.NextData(l.os, off, l.hdr.size)
		off = data / BlockSize * BlockSize
		p := buf[:min(copyChunk, l.hdr.size-off)]
		if _, err := l.f.ReadAt(p, off); err != nil {
			return nil, ioError("read", err)
		}
		for ; len(p) > 0; p, off = p[BlockSize:], off+BlockSize {
			if !bytes.Equal(p[:BlockSize], statePage[blockAbsent][:]) {
				x.set(off/BlockSize, 1, 1)
			}
		}
	}
	return x, nil
}
