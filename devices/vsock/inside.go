package vsock

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// This file connects code of this process with the guest, without a path.

// acceptBacklog is how many connections wait until a listener of this process accepts them.
const acceptBacklog = 64

var (
	errNoDriver = errors.New("the guest's driver is not active")
	errRefused  = errors.New("the guest does not accept the connection")
)

// dial is a call of Device.Dial that waits for the guest.
type dial struct {
	port   uint32
	fd     int        // the engine's end
	result chan error // has room for one
	fresh  bool       // leave the parked connection
	park   bool       // there is no client yet: neither fd nor result
}

// fail ends a dial whose socket no engine has.
func (d *dial) fail() {
	if !d.park {
		unix.Close(d.fd)
		d.result <- errRefused
	}
}

// Park has the guest accept a connection to the port before a client comes. It does not wait for that. The next client
// for the port takes it over, at once and without the guest. One is parked at most; a further call does nothing. It
// outlives the process that the VM is captured in, unless other connections do not: see the package.
func (d *Device) Park(port uint32) error {
	if err := d.inbox.dial(&dial{port: port, fd: -1, park: true}); err != nil {
		return fmt.Errorf("parking a connection to vsock port %d of the guest: %w", port, err)
	}
	return nil
}

// Dial connects to a port of the guest, and returns when a process there has accepted. It does not wait for a driver
// that is not active. The connection does not count as use: see [Stats].
func (d *Device) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	return d.dial(ctx, port, false)
}

// DialFresh is Dial that leaves the parked connection to others.
func (d *Device) DialFresh(ctx context.Context, port uint32) (net.Conn, error) {
	return d.dial(ctx, port, true)
}

func (d *Device) dial(ctx context.Context, port uint32, fresh bool) (net.Conn, error) {
	c, err := d.connected(ctx, port, fresh)
	if err != nil {
		return nil, fmt.Errorf("connecting to vsock port %d of the guest: %w", port, err)
	}
	return c, nil
}

func (d *Device) connected(ctx context.Context, port uint32, fresh bool) (net.Conn, error) {
	pair, err := socketPair()
	if err != nil {
		return nil, err
	}
	if err := d.join(ctx, port, pair[0], fresh); err != nil {
		unix.Close(pair[1])
		return nil, err
	}
	return socketConn(pair[1])
}

// DialOn is Dial for a connected Unix socket whose other end the caller, or another process, has. The device takes a
// duplicate of f.
func (d *Device) DialOn(ctx context.Context, port uint32, f *os.File) error {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		if err = unix.SetNonblock(fd, true); err != nil {
			unix.Close(fd)
		} else {
			err = d.join(ctx, port, fd, false)
		}
	}
	if err != nil {
		return fmt.Errorf("connecting to vsock port %d of the guest: %w", port, err)
	}
	return nil
}

// join connects a socket, which it takes, with a port of the guest.
func (d *Device) join(ctx context.Context, port uint32, fd int, fresh bool) error {
	if port == anyPort {
		unix.Close(fd)
		return unix.EADDRNOTAVAIL
	}
	wait := &dial{port: port, fd: fd, result: make(chan error, 1), fresh: fresh}
	if err := d.inbox.dial(wait); err != nil {
		unix.Close(fd)
		return err
	}
	select {
	case err := <-wait.result:
		return err
	case <-ctx.Done():
		d.inbox.giveUp(wait)
		return ctx.Err()
	}
}

// Listen accepts the guest's connections to a port of the host. It comes before Config.Connect and Config.Path. The
// connections do not count as use: see [Stats]. The guest's connection is refused while 64 others wait to be accepted.
// Closing the device closes the listener.
func (d *Device) Listen(port uint32) (net.Listener, error) {
	l := &listener{inbox: &d.inbox, port: port, waiting: make(chan int, acceptBacklog), done: make(chan struct{})}
	if err := d.inbox.listen(l); err != nil {
		return nil, fmt.Errorf("listening on vsock port %d of the host: %w", port, err)
	}
	return l, nil
}

// listener accepts connections of the guest to one port.
type listener struct {
	inbox   *inbox
	port    uint32
	waiting chan int      // sockets not yet accepted; the inbox's mutex guards sending
	done    chan struct{} // closed with the listener
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	select {
	case fd := <-l.waiting:
		return socketConn(fd)
	case <-l.done:
		return nil, &net.OpError{Op: "accept", Net: l.Addr().Network(), Addr: l.Addr(), Err: net.ErrClosed}
	}
}

// Close implements [net.Listener]. A second call does nothing.
func (l *listener) Close() error {
	l.inbox.unlisten(l)
	return nil
}

// end closes what was not accepted. The caller holds the inbox's mutex.
func (l *listener) end() {
	close(l.done)
	for {
		select {
		case fd := <-l.waiting:
			unix.Close(fd)
		default:
			return
		}
	}
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return hostAddr(l.port) }

// hostAddr is a vsock port of the host.
type hostAddr uint32

func (hostAddr) Network() string  { return "vsock" }
func (a hostAddr) String() string { return "host:" + strconv.FormatUint(uint64(a), 10) }

func socketPair() ([2]int, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	return pair, os.NewSyscallError("socketpair", err)
}

// socketConn turns a socket into a connection, which owns it. It is a *net.UnixConn.
func socketConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "vsock")
	defer f.Close()
	return net.FileConn(f)
}
