package agent

import (
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// pollFile is a pipe, terminal or socket on the runtime's poller, read and
// written without waking the scheduler's monitor. Reads and writes may run
// concurrently with each other and with Close.
type pollFile struct {
	f    *os.File
	rc   syscall.RawConn
	addr net.Addr
}

// newPollFile takes over fd, which must be non-blocking and pollable.
func newPollFile(fd int, name string) (*pollFile, error) {
	f := os.NewFile(uintptr(fd), name)
	rc, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &pollFile{f: f, rc: rc}, nil
}

func (c *pollFile) Read(p []byte) (int, error) {
	var n int
	var errno syscall.Errno
	err := c.rc.Read(func(fd uintptr) bool {
		n, errno = readAgain(fd, p)
		return errno != syscall.EAGAIN
	})
	return readResult(n, len(p), errno, err)
}

// readNow reads what is there without waiting; EAGAIN when nothing is.
// A deadline that has passed does not stop it.
func (c *pollFile) readNow(p []byte) (int, error) {
	var n int
	var errno syscall.Errno
	err := c.rc.Control(func(fd uintptr) { n, errno = readAgain(fd, p) })
	return readResult(n, len(p), errno, err)
}

func readAgain(fd uintptr, p []byte) (int, syscall.Errno) {
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

func (c *pollFile) Write(p []byte) (int, error) {
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
func (c *pollFile) SyscallConn() (syscall.RawConn, error) { return c.rc, nil }

// raw gives calls of one's own the descriptor, on the poller.
func (c *pollFile) raw() syscall.RawConn { return c.rc }

// setAddr says what LocalAddr and RemoteAddr answer.
func (c *pollFile) setAddr(a net.Addr) { c.addr = a }

func (c *pollFile) Close() error                       { return c.f.Close() }
func (c *pollFile) LocalAddr() net.Addr                { return c.addr }
func (c *pollFile) RemoteAddr() net.Addr               { return c.addr }
func (c *pollFile) SetDeadline(t time.Time) error      { return c.f.SetDeadline(t) }
func (c *pollFile) SetReadDeadline(t time.Time) error  { return c.f.SetReadDeadline(t) }
func (c *pollFile) SetWriteDeadline(t time.Time) error { return c.f.SetWriteDeadline(t) }
