package poll

import (
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// File is a pipe, terminal or socket on the runtime's poller, read and
// written without waking the scheduler's monitor. Reads and writes may run
// concurrently with each other and with Close.
type File struct {
	f    *os.File
	rc   syscall.RawConn
	addr net.Addr
}

// New takes over fd, which must be non-blocking and pollable.
func New(fd int, name string) (*File, error) {
	f := os.NewFile(uintptr(fd), name)
	rc, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &File{f: f, rc: rc}, nil
}

// Read implements io.Reader. A terminal whose other end is closed is at its end.
func (c *File) Read(p []byte) (int, error) {
	var n int
	var errno syscall.Errno
	err := c.rc.Read(func(fd uintptr) bool {
		n, errno = ReadAgain(fd, p)
		return errno != syscall.EAGAIN
	})
	return readResult(n, len(p), errno, err)
}

// ReadNow reads what is there without waiting; EAGAIN when nothing is.
// A deadline that has passed does not stop it.
func (c *File) ReadNow(p []byte) (int, error) {
	var n int
	var errno syscall.Errno
	err := c.rc.Control(func(fd uintptr) { n, errno = ReadAgain(fd, p) })
	return readResult(n, len(p), errno, err)
}

// ReadAgain is read(2) on a descriptor that does not block, made again when a signal interrupts it.
func ReadAgain(fd uintptr, p []byte) (int, syscall.Errno) {
	for {
		n, errno := rawRead(fd, p)
		if errno != syscall.EINTR {
			return n, errno
		}
	}
}

func readResult(n, want int, errno syscall.Errno, err error) (int, error) {
	switch {
	case err != nil:
		return 0, err
	case errno == syscall.EIO: // a terminal whose other end is closed
		return 0, io.EOF
	case errno != 0:
		return 0, os.NewSyscallError("read", errno)
	case n == 0 && want > 0:
		return 0, io.EOF
	}
	return n, nil
}

// Write implements io.Writer.
func (c *File) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		var n int
		var errno syscall.Errno
		err := c.rc.Write(func(fd uintptr) bool {
			n, errno = rawWrite(fd, p[done:])
			return errno != syscall.EAGAIN
		})
		switch {
		case err != nil:
			return done, err
		case errno == syscall.EINTR:
		case errno != 0:
			return done, os.NewSyscallError("write", errno)
		default:
			done += n
		}
	}
	return done, nil
}

// SyscallConn implements syscall.Conn.
func (c *File) SyscallConn() (syscall.RawConn, error) { return c.rc, nil }

// Raw gives calls of one's own the descriptor, on the poller.
func (c *File) Raw() syscall.RawConn { return c.rc }

// SetAddr says what LocalAddr and RemoteAddr answer.
func (c *File) SetAddr(a net.Addr) { c.addr = a }

// Close implements net.Conn.
func (c *File) Close() error { return c.f.Close() }

// LocalAddr implements net.Conn.
func (c *File) LocalAddr() net.Addr { return c.addr }

// RemoteAddr implements net.Conn.
func (c *File) RemoteAddr() net.Addr { return c.addr }

// SetDeadline implements net.Conn.
func (c *File) SetDeadline(t time.Time) error { return c.f.SetDeadline(t) }

// SetReadDeadline implements net.Conn.
func (c *File) SetReadDeadline(t time.Time) error { return c.f.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (c *File) SetWriteDeadline(t time.Time) error { return c.f.SetWriteDeadline(t) }
