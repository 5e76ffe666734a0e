package relay

import (
	"io"
	"os"
	"sync"
	"syscall"

	"github.com/drowse-vm/drowse/guest/agent/poll"
)

// BufferSize is how many bytes the relay moves at a time: with a head, 32 KiB, which the allocator does not round up.
// firstBuffer is the buffer of a reader that has not had much to read.
const (
	BufferSize  = 32<<10 - headSize
	firstBuffer = 4 << 10
)

// buffers are in use only while there are bytes to move: an idle connection holds none.
var buffers = sync.Pool{New: func() any { return new(buffer) }}

type buffer [headSize + BufferSize]byte

// chunks calls use for each piece that it reads from r, with a buffer whose first headSize bytes are free and the
// number of bytes after them. It ends with the first error of r, io.EOF at its end, or of use. For a reader with a
// descriptor it takes a buffer only once the reader is readable.
func chunks(r io.Reader, use func(buf *buffer, n int) error) (readErr, useErr error) {
	var rc syscall.RawConn
	if sc, ok := r.(syscall.Conn); ok {
		if rc, readErr = sc.SyscallConn(); readErr != nil {
			return readErr, nil
		}
	}
	for {
		var (
			buf *buffer
			n   int
		)
		if rc != nil {
			buf, n, readErr = rawReadWait(rc)
		} else {
			buf = buffers.Get().(*buffer)
			n, readErr = r.Read(buf[headSize:])
		}
		if n > 0 {
			useErr = use(buf, n)
		}
		buffers.Put(buf)
		if readErr != nil || useErr != nil {
			return readErr, useErr
		}
	}
}

// rawReadWait waits for bytes without a buffer, and reads them into one.
func rawReadWait(rc syscall.RawConn) (buf *buffer, n int, err error) {
	var errno syscall.Errno
	err = rc.Read(func(fd uintptr) bool {
		buf = buffers.Get().(*buffer)
		n, errno = poll.ReadAgain(fd, buf[headSize:])
		if errno == syscall.EAGAIN {
			buffers.Put(buf)
			buf = nil
			return false
		}
		return true
	})
	if buf == nil {
		buf = buffers.Get().(*buffer)
	}
	switch {
	case err != nil:
		return buf, 0, err
	case errno != 0:
		return buf, 0, os.NewSyscallError("read", errno)
	case n == 0:
		return buf, 0, io.EOF
	}
	return buf, n, nil
}
