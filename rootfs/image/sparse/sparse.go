package sparse

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
)

const (
	// BlockSize is that of the file systems of images and of their holes, in bytes.
	BlockSize = 4096
	// BufBytes is how much a Writer buffers, and what is good to buffer elsewhere: a multiple of BlockSize.
	BufBytes = 1 << 20
)

var zeroBlock [BlockSize]byte

// Writer writes a new file front to back and leaves blocks of zeros as holes. It implements io.WriteSeeker as far as
// go-erofs needs it: after a Seek, what is written replaces what was there. The file must be empty at the beginning,
// and is complete only after Finish. Not safe for concurrent use.
type Writer struct {
	f    *os.File
	buf  []byte
	off  int64 // file offset of buf[0]
	end  int64 // logical size of the file
	over bool  // a Seek went back: zeros must be written, as the file may have data there
}

// NewWriter writes to an empty file.
func NewWriter(f *os.File) *Writer {
	return &Writer{f: f, buf: make([]byte, 0, BufBytes)}
}

// Pos is the offset at which the next byte is written.
func (w *Writer) Pos() int64 { return w.off + int64(len(w.buf)) }

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (int, error) {
	total := len(p)
	for len(p) > 0 {
		// The first piece after an unaligned start is cut so that later pieces begin at a block.
		room := min(cap(w.buf)-len(w.buf), BufBytes-int(w.off%BlockSize)-len(w.buf))
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

// Align fills up with zeros to the next block.
func (w *Writer) Align() error {
	if rest := int(w.Pos() % BlockSize); rest != 0 {
		_, err := w.Write(zeroBlock[:BlockSize-rest])
		return err
	}
	return nil
}

func (w *Writer) flush() error {
	start, b := w.off, w.buf
	w.off += int64(len(b))
	w.end = max(w.end, w.off)
	w.buf = w.buf[:0]
	if w.over || start%BlockSize != 0 {
		_, err := w.f.WriteAt(b, start)
		return err
	}
	for len(b) > 0 {
		// A run of blocks of the same kind: all zero (a hole), or not.
		n, zero := 0, false
		for n < len(b) {
			size := min(BlockSize, len(b)-n)
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
func (w *Writer) Seek(offset int64, whence int) (int64, error) {
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

// Finish writes what is buffered and sets the size of the file, which matters when it ends in a hole.
func (w *Writer) Finish() error {
	if err := w.flush(); err != nil {
		return err
	}
	return w.f.Truncate(w.end)
}
