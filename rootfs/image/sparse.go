package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
)

const (
	blockSize      = 4096
	sparseBufBytes = 1 << 20 // multiple of blockSize
)

var zeroBlock [blockSize]byte

// sparseWriter writes a new file front to back and leaves blocks of zeros as holes. It implements io.WriteSeeker as far as
// go-erofs needs it: after a Seek, what is written replaces what was there. The file must be empty at the beginning, and is
// complete only after finish. Not safe for concurrent use.
type sparseWriter struct {
	f    *os.File
	buf  []byte
	off  int64 // file offset of buf[0]
	end  int64 // logical size of the file
	over bool  // a Seek went back: zeros must be written, as the file may have data there
}

func newSparseWriter(f *os.File) *sparseWriter {
	return &sparseWriter{f: f, buf: make([]byte, 0, sparseBufBytes)}
}

// pos is the offset at which the next byte is written.
func (w *sparseWriter) pos() int64 { return w.off + int64(len(w.buf)) }

func (w *sparseWriter) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		// The first piece after an unaligned start is cut so that later pieces begin at a block.
		room := min(cap(w.buf)-len(w.buf), sparseBufBytes-int(w.off%blockSize)-len(w.buf))
		if room <= 0 {
			if err := w.flush(); err != nil {
				return total - len(p), err
			}
			continue
		}
		n := min(room, len(p))
		w.buf = append(w.buf, p[:n]...)
		p = p[n:]
	}
	return total, nil
}

// align fills up with zeros to the next block.
func (w *sparseWriter) align() error {
	if rest := int(w.pos() % blockSize); rest != 0 {
		_, err := w.Write(zeroBlock[:blockSize-rest])
		return err
	}
	return nil
}

func (w *sparseWriter) flush() error {
	start, b := w.off, w.buf
	w.off += int64(len(b))
	w.end = max(w.end, w.off)
	w.buf = w.buf[:0]
	if w.over || start%blockSize != 0 {
		_, err := w.f.WriteAt(b, start)
		return err
	}
	for len(b) > 0 {
		// A run of blocks of the same kind: all zero (a hole), or not.
		n, zero := 0, false
		for n < len(b) {
			size := min(blockSize, len(b)-n)
			z := bytes.Equal(b[n:n+size], zeroBlock[:size])
			if n == 0 {
				zero = z
			} else if z != zero {
				break
			}
			n += size
		}
		if !zero {
			if _, err := w.f.WriteAt(b[:n], start); err != nil {
				return err
			}
		}
		b, start = b[n:], start+int64(n)
	}
	return nil
}

// Seek implements io.Seeker for io.SeekStart only.
func (w *sparseWriter) Seek(offset int64, whence int) (int64, error) {
	if whence != io.SeekStart || offset < 0 {
		return 0, fmt.Errorf("seek to %d (whence %d): %w", offset, whence, errors.ErrUnsupported)
	}
	if err := w.flush(); err != nil {
		return 0, err
	}
	w.over = w.over || offset < w.end
	w.off = offset
	return offset, nil
}

// finish writes what is buffered and sets the size of the file, which matters when it ends in a hole.
func (w *sparseWriter) finish() error {
	if err := w.flush(); err != nil {
		return err
	}
	return w.f.Truncate(w.end)
}

// spoolContent is the content of a file that lies in a spool file.
type spoolContent struct {
	f         *os.File
	off, size int64
}

func (c spoolContent) open() (io.ReadCloser, error) {
	return io.NopCloser(io.NewSectionReader(c.f, c.off, c.size)), nil
}
