package agent

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agent/poll"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// listenBacklog is how many connections the kernel holds for the agent.
const listenBacklog = 128

// vsockAddr names the host end of a connection.
type vsockAddr struct{ cid, port uint32 }

func (vsockAddr) Network() string { return "vsock" }

func (a vsockAddr) String() string {
	return strconv.FormatUint(uint64(a.cid), 10) + ":" + strconv.FormatUint(uint64(a.port), 10)
}

// vsockListener accepts connections from the host only. It turns away a process inside the guest that reaches the
// port by local loopback: the agent runs as root and obeys any peer.
type vsockListener struct {
	*poll.File
	port uint32
}

// ListenVsock listens on the given vsock port for connections from the host.
func ListenVsock(port uint32) (net.Listener, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a vsock socket (the kernel needs virtio-vsock): %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind vsock port %d: %w", port, err)
	}
	if err := unix.Listen(fd, listenBacklog); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen on vsock port %d: %w", port, err)
	}
	pf, err := poll.New(fd, "vsock")
	if err != nil {
		return nil, fmt.Errorf("poll vsock port %d: %w", port, err)
	}
	return &vsockListener{File: pf, port: port}, nil
}

// Accept waits for the next connection from the host.
func (l *vsockListener) Accept() (net.Conn, error) {
	for {
		var fd int
		var cid uint32
		var errno syscall.Errno
		err := l.Raw().Read(func(lfd uintptr) bool {
			fd, cid, errno = rawAccept(lfd)
			return errno != syscall.EAGAIN
		})
		switch {
		case err != nil:
			return nil, err
		case errno == syscall.EINTR || errno == syscall.ECONNABORTED || errno == syscall.ECONNRESET:
			continue
		case errno != 0:
			return nil, errno
		}
		if cid != unix.VMADDR_CID_HOST {
			unix.Close(fd)
			continue
		}
		pf, err := poll.New(fd, "vsock")
		if err != nil {
			return nil, err
		}
		pf.SetAddr(vsockAddr{cid: cid, port: l.port})
		return pf, nil
	}
}

// Addr is the address the listener is bound to.
func (l *vsockListener) Addr() net.Addr { return vsockAddr{cid: unix.VMADDR_CID_ANY, port: l.port} }

// ReportReady tells the host that the agent listens: it dials the given port of the host and sends one line. A
// host that does not listen there is not an error. ReportReady dials a host that does not answer again for half a
// minute, since a busy host waits for this line and may need the time.
func ReportReady(port uint32, version string) error {
	r := agentpb.Ready{Version: version}
	r.VMCoreInfo, r.VMCoreInfoSize = vmcoreinfo()
	return again(readyTries, func() error { return tellHost(port, r.Line(), false) })
}

const (
	// readyTimeoutSeconds bounds one dial of the host, and readyTries their number.
	readyTimeoutSeconds = 1
	readyTries          = 30
)

// maxInterrupted bounds how often again repeats a call that a signal interrupted.
const maxInterrupted = 1000

// again calls f until it does not time out, at most tries times. It also repeats a call that a signal interrupts:
// the runtime sends signals to threads whose time slice is over, and connect(2) of AF_VSOCK gives up at any
// signal.
func again(tries int, f func() error) error {
	for interrupted := 0; ; {
		err := f()
		switch {
		case errors.Is(err, unix.EINTR) && interrupted < maxInterrupted:
			interrupted++
		case errors.Is(err, unix.ETIMEDOUT) && tries > 1:
			tries--
		default:
			return err
		}
	}
}

// dialHost connects to a vsock port of the host within the given seconds, unless a signal interrupts it: another
// try needs another socket. The file is in blocking mode.
func dialHost(port uint32, seconds int64) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	// SO_VM_SOCKETS_CONNECT_TIMEOUT of linux/vm_sockets.h.
	_ = unix.SetsockoptTimeval(fd, unix.AF_VSOCK, unix.SO_VM_SOCKETS_CONNECT_TIMEOUT, &unix.Timeval{Sec: seconds})
	if err := unix.Connect(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_HOST, Port: port}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("connect", err)
	}
	return os.NewFile(uintptr(fd), "vsock"), nil
}

// tellHost sends a line to a port of the host. If answer is set, it waits until the host has answered with a byte.
func tellHost(port uint32, line string, answer bool) error {
	limit := int64(readyTimeoutSeconds)
	if answer {
		limit = hostTimeoutSeconds
	}
	f, err := dialHost(port, limit)
	if errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENETUNREACH) {
		return nil
	}
	if err == nil {
		defer f.Close()
		_, err = f.WriteString(line)
	}
	if err == nil && answer {
		if err = unix.SetsockoptTimeval(int(f.Fd()), unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: limit}); err == nil {
			_, err = f.Read(make([]byte, 1)) // an end of file is not an answer
		}
	}
	if err != nil {
		return fmt.Errorf("tell vsock port %d of the host: %w", port, err)
	}
	return nil
}

// ReportHooks tells the host, at the given port, whether there are hooks, and waits until the host knows. A host
// that does not listen does not want to know.
func ReportHooks(port uint32, present bool) error {
	line := "hooks 0\n"
	if present {
		line = "hooks 1\n"
	}
	return again(1, func() error { return tellHost(port, line, true) })
}

// hostTimeoutSeconds bounds the dialling of the host, and the wait for its answer.
const hostTimeoutSeconds = 5

// reportTries bounds how often the agent reports an event that the host does not take: a wake may have cut the
// connection.
const reportTries = 3

// ReportService tells the host, at the given port, of an event, and waits until the host knows. A host that does
// not listen does not want to know.
func ReportService(port uint32, line string) error {
	var err error
	for range reportTries {
		if err = again(1, func() error { return tellHost(port, line, true) }); err == nil {
			break
		}
	}
	return err
}
