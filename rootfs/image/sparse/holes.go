package sparse

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Reader reads the first size bytes of a file front to back and makes up the zeros of holes itself: the kernel would
// put a page of the page cache behind each.
type Reader struct {
	f    *os.File
	size int64
	off  int64
	data int64 // from off to here is a hole, if it is larger than off
	next int64 // from data to here is data
}

// NewReader reads the first size bytes of a file.
func NewReader(f *os.File, size int64) *Reader { return &Reader{f: f, size: size} }

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (int, error) {
	if r.off >= r.size {
		return 0, io.EOF
	}
	if r.off >= r.next {
		r.locate()
	}
	if r.off < r.data {
		n := int(min(int64(len(p)), r.data-r.off))
		clear(p[:n])
		r.off += int64(n)
		return n, nil
	}
	n, err := r.f.ReadAt(p[:min(int64(len(p)), r.next-r.off)], r.off)
	r.off += int64(n)
	if err == io.EOF && n > 0 {
		err = nil
	}
	return n, err
}

// locate finds the next data at or behind off (lseek(2), SEEK_DATA and SEEK_HOLE). Where the filesystem cannot tell,
// all is data.
func (r *Reader) locate() {
	r.data, r.next = r.off, r.size
	data, err := r.f.Seek(r.off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		// No data up to the end of the file, which must be as long as was said.
		if end, err := r.f.Seek(0, io.SeekEnd); err == nil && end >= r.size {
			r.data = r.size
		}
		return
	}
	if err != nil {
		return
	}
	hole, err := r.f.Seek(data, unix.SEEK_HOLE)
	if err != nil || hole <= data {
		return
	}
	r.data, r.next = min(data, r.size), min(hole, r.size)
}
