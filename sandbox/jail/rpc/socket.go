package rpc

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxRights is SCM_MAX_FD, the kernel's limit for one packet.
const maxRights = 253

// Pair makes the two ends of a connection. The child's end is for exec.Cmd.ExtraFiles, or for New in this process.
func Pair() (keeper, child *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a pair of sockets: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "rpc of keeper"), os.NewFile(uintptr(fds[1]), "rpc of child"), nil
}

// Dup returns a duplicate of a file, which the caller can send while it keeps the file.
func Dup(f *os.File) (*os.File, error) {
	fd, err := dup(f)
	if err != nil {
		return nil, fmt.Errorf("duplicate the descriptor of %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func dup(f *os.File) (fd int, err error) {
	if cerr := control(f, func(of int) { fd, err = unix.FcntlInt(uintptr(of), unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return 0, cerr
	}
	return fd, err
}

// control is for File.Fd's purpose. That may make the file block, also for others who share it.
func control(f *os.File, do func(fd int)) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	if raw.Control(func(fd uintptr) { do(int(fd)) }) != nil { // an error of package poll with one meaning
		return fmt.Errorf("%s: %w", f.Name(), os.ErrClosed)
	}
	return nil
}

// A socket is one end, in Go's poller.
type socket struct {
	f   *os.File
	raw syscall.RawConn
}

// open takes the place of f, whether it blocks or not.
func open(f *os.File) (socket, error) {
	fd, err := dup(f)
	if err != nil {
		return socket{}, err
	}
	f.Close()
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return socket{}, err
	}
	s := socket{f: os.NewFile(uintptr(fd), f.Name())}
	if err := s.f.SetDeadline(time.Time{}); err != nil { // not in the poller
		s.f.Close()
		return socket{}, fmt.Errorf("%w: it must be an end of rpc.Pair", err)
	}
	s.raw, err = s.f.SyscallConn()
	return s, err
}

// receive waits for a packet. The error is io.EOF once the peer has closed its end and all its packets have been read.
func (s socket) receive(p, oob []byte) (n int, fds []int, err error) {
	var oobn, flags int
	werr := s.raw.Read(func(fd uintptr) bool {
		for {
			n, oobn, flags, _, err = unix.Recvmsg(int(fd), p, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
			// The peer closed its end before it had read all. The kernel says so once; then come its packets.
			if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ECONNRESET) {
				return !errors.Is(err, unix.EAGAIN)
			}
		}
	})
	if werr != nil {
		return 0, nil, werr
	}
	if err != nil {
		return 0, nil, os.NewSyscallError("recvmsg", err)
	}
	if fds, err = parseRights(oob[:oobn]); err != nil {
		return 0, nil, err
	}
	switch {
	case flags&unix.MSG_CTRUNC != 0:
		err = fmt.Errorf("descriptors of a packet are lost: the peer sent too many (%w), or this process may open no more "+
			"(then raise its limit of open files)", ErrProtocol)
	case flags&unix.MSG_TRUNC != 0:
		err = broken("a packet has more than %d bytes", len(p))
	case n == 0 && len(fds) == 0:
		err = io.EOF // or an empty packet, which nobody sends
	}
	if err != nil {
		closeFDs(fds)
		return 0, nil, err
	}
	return n, fds, nil
}

func parseRights(oob []byte) (fds []int, err error) {
	for len(oob) > 0 {
		h, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			closeFDs(fds)
			return nil, fmt.Errorf("read the descriptors of a packet: %w", err)
		}
		if h.Level == unix.SOL_SOCKET && h.Type == unix.SCM_RIGHTS {
			got, err := unix.ParseUnixRights(&unix.SocketControlMessage{Header: h, Data: data})
			if err != nil {
				closeFDs(fds)
				return nil, fmt.Errorf("read the descriptors of a packet: %w", err)
			}
			fds = append(fds, got...)
		}
		oob = rest
	}
	return fds, nil
}

// A filesError is why a message could not be sent with its files. The connection is all right.
type filesError struct{ error }

func (e filesError) Unwrap() error { return e.error }

// sendTo sends the packets of m that have not been sent. It calls before ahead of the last. EAGAIN says that the
// socket has no room.
func (m *message) sendTo(fd int, before func()) error {
	var oob []byte
	if len(m.files) > 0 && !m.begun {
		fds := make([]int, len(m.files))
		for i, f := range m.files {
			if err := control(f, func(fd int) { fds[i] = fd }); err != nil {
				return filesError{fmt.Errorf("send a file: %w", err)}
			}
		}
		oob = unix.UnixRights(fds...)
	}
	var space [headerSize + maxMethod]byte
	for {
		head := m.header(space[:0])
		part := m.body[m.sent:]
		part = part[:min(len(part), packetSize-len(head))]
		if m.sent+len(part) == len(m.body) {
			before()
		}
		_, err := unix.SendmsgBuffers(fd, [][]byte{head, part}, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EBADF), errors.Is(err, unix.ETOOMANYREFS):
			if oob != nil {
				return filesError{fmt.Errorf("send %d files: %w", len(m.files), err)}
			}
			return err
		case err != nil:
			return err
		}
		m.begun, oob = true, nil
		if m.sent += len(part); m.sent == len(m.body) {
			return nil
		}
	}
}
