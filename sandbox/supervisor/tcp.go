package supervisor

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/netpolicy"

	"github.com/drowse-vm/drowse/sandbox/events"
)

// publishedPort is a published port of a VM, on the host.
type publishedPort struct {
	v      *supervisor
	port   port
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex // guards what follows
	said   time.Time  // when a failure was logged
	unsaid int        // failures since then that were not logged
}

// tcpListener listens for one published port of TCP.
type tcpListener struct {
	publishedPort
	listener *net.TCPListener
	room     chan struct{} // has one element per carried connection
}

// closer is a listener of either protocol.
type closer interface{ close() }

const (
	// dialTime is how long a guest may take to accept a connection.
	dialTime = 30 * time.Second
	// sayEvery is how often a failure is logged.
	sayEvery = time.Second
	// acceptPause is the pause after a failed accept, for example for want of descriptors.
	acceptPause = 100 * time.Millisecond
)

// listenTCP listens for a port.
func (v *supervisor) listenTCP(ctx context.Context, p port) (closer, error) {
	if p.protocol == netpolicy.UDP {
		return v.listenUDP(ctx, p)
	}
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(p.listen))
	if err != nil {
		return nil, err
	}
	d := &tcpListener{publishedPort: publishedPort{v: v, port: p}, listener: l, room: make(chan struct{}, v.o.MaxConns)}
	d.ctx, d.cancel = context.WithCancel(ctx)
	v.carried.Go(d.accept)
	return d, nil
}

// close stops listening, and ends the carried connections.
func (d *tcpListener) close() {
	d.cancel()
	d.listener.Close()
}

func (d *tcpListener) accept() {
	for {
		select {
		case d.room <- struct{}{}:
		case <-d.ctx.Done():
			return
		}
		c, err := d.listener.AcceptTCP()
		if err != nil {
			<-d.room
			if d.ctx.Err() != nil {
				return
			}
			d.v.log.Warn("accepting a connection failed", "at", d.port.listen, "error", err)
			if wait.For(d.ctx, acceptPause) != nil {
				return
			}
			continue
		}
		d.v.carried.Go(func() {
			defer func() { <-d.room }()
			d.v.o.Counters.Connections.Add(1)
			defer d.v.o.Counters.Connections.Add(-1)
			if err := d.carry(c); err != nil && d.ctx.Err() == nil {
				d.v.o.Counters.Refused.Add(1)
				d.failed("a connection found no way to its VM", c.RemoteAddr(), err)
			}
		})
	}
}

// failed logs a delivery that failed, at most once a second: clients must not be able to fill the log.
func (e *publishedPort) failed(what string, from fmt.Stringer, err error) {
	now := time.Now()
	e.mu.Lock()
	quiet := now.Sub(e.said) < sayEvery
	unsaid := e.unsaid
	if quiet {
		e.unsaid++
	} else {
		e.said, e.unsaid = now, 0
	}
	e.mu.Unlock()
	if !quiet {
		e.v.log.Warn(what, "vm", e.port.vm, "at", e.port.listen, "protocol", e.port.protocol, "from", from, "error", err, "others_before", unsaid)
	}
}

// carry brings a connection to the guest, and wakes the VM if it sleeps. An error means that it did not arrive.
func (d *tcpListener) carry(c *net.TCPConn) error {
	ctx, cancel := context.WithTimeout(d.ctx, wakeTime)
	defer cancel()
	activation := Activation{VM: d.port.vm, By: ByConnection, Came: time.Now()}
	hold, info, err := d.v.awake(events.WithCause(ctx, events.Connection), d.port.vm)
	activation.Awake = time.Now()
	if err != nil {
		reset(c)
		return err
	}
	defer hold.Release()
	dialer := net.Dialer{Timeout: dialTime}
	g, err := dialer.DialContext(ctx, "tcp", netip.AddrPortFrom(info.Address, d.port.guest).String())
	if err != nil {
		reset(c)
		return err
	}
	if d.v.o.Activated != nil {
		activation.Delivered = time.Now()
		d.v.o.Activated(activation)
	}
	guest := g.(*net.TCPConn)
	// When the VM sleeps or ends, or the listener is closed, the connection has no other end any more.
	ended := make(chan struct{})
	var cut sync.WaitGroup
	cut.Go(func() {
		select {
		case <-hold.Done():
		case <-d.ctx.Done():
		case <-ended:
			return
		}
		reset(c)
		reset(guest)
	})
	relay(c, guest)
	close(ended)
	cut.Wait()
	return nil
}

// relay carries bytes both ways until both ends have closed. If one fails, it resets both.
func relay(a, b *net.TCPConn) {
	var both sync.WaitGroup
	one := func(to, from *net.TCPConn) {
		// For TCP sockets this is splice(2): the bytes stay in the kernel.
		if _, err := io.Copy(to, from); err != nil {
			reset(to)
			reset(from)
			return
		}
		if err := to.CloseWrite(); err != nil {
			reset(to)
			reset(from)
		}
	}
	both.Go(func() { one(a, b) })
	both.Go(func() { one(b, a) })
	both.Wait()
	a.Close()
	b.Close()
}

// reset ends a connection with an error for its peer, so that the peer does not take it for a normal end.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}
