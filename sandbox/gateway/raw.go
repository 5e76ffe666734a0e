package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
)

// serveRaw carries TLS connections by their server names until l is closed or ctx ends.
func (g *Gateway) serveRaw(ctx context.Context, l net.Listener, config *tls.Config) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	var all sync.WaitGroup
	defer all.Wait()
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			g.log.Warn("accepting a connection failed", "at", l.Addr(), "error", err)
			select {
			case <-time.After(acceptRest): // descriptors may be short
				continue
			case <-ctx.Done():
				return nil
			}
		}
		all.Go(func() {
			defer c.Close()
			to, err := g.raw(ctx, c, config)
			if err != nil {
				reset(c) // also if the gateway ends
			}
			if err != nil && ctx.Err() == nil {
				g.report(refusal(to, err))
			}
		})
	}
}

// raw carries one connection to its end. It fails if the connection has not reached its guest's server.
func (g *Gateway) raw(ctx context.Context, c net.Conn, config *tls.Config) (Route, error) {
	came := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { reset(c) })
	defer stop()
	if err := c.SetDeadline(came.Add(headerTime)); err != nil {
		return Route{}, err
	}
	hello, name, err := readHello(c)
	if err != nil {
		return Route{}, err
	}
	to, err := g.o.Resolver.ResolveName(name)
	if err != nil {
		return Route{}, err
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return to, err
	}
	if is := peer.From(ctx); is != nil && is.Sandbox != to.Sandbox {
		return to, fmt.Errorf("%w: it is not the sandbox that the host %s asserts", ErrRoute, is.From)
	}
	carried, away := g.passOnRaw(ctx, c, hello, to)
	if carried {
		return to, nil
	}
	u, err := g.enter(ctx, to, nil)
	if err != nil {
		return to, because(err, away)
	}
	defer u.leave()
	cut := context.AfterFunc(u.s.ctx, cancel)
	defer cut()
	u.carries(func(error) { cancel() })
	opened := &begun{Conn: c, first: bytes.NewReader(hello), shakes: true}
	var client net.Conn = opened
	if !u.grant.GuestTLS {
		if config == nil {
			return to, fmt.Errorf("%w: the gateway has no certificate, and TLS of the port does not end in the guest", ErrRoute)
		}
		t := tls.Server(client, config)
		shake, done := context.WithTimeout(ctx, headerTime)
		defer done()
		if err := t.HandshakeContext(shake); err != nil {
			return to, fmt.Errorf("%w: %w", ErrRoute, err)
		}
		client = t
	}
	opened.shakes = false
	guest, err := u.s.connect(ctx, to.Port)
	if err != nil {
		return to, ofServer(err)
	}
	g.carried(u, to, came)
	u.stream()
	relay(client, guest, func() { reset(c) })
	return to, nil
}

// relay carries bytes both ways until both ends have ended. If one breaks, it breaks the other.
func relay(client net.Conn, guest peer.Conn, breakClient func()) {
	broken := func() {
		breakClient()
		_ = guest.Abort()
	}
	var both sync.WaitGroup
	one := func(to, from net.Conn, end func() error) {
		if _, err := copyAll(to, from); err != nil || end() != nil {
			broken()
		}
	}
	both.Go(func() { one(guest, client, guest.CloseWrite) })
	both.Go(func() { one(client, guest, client.(interface{ CloseWrite() error }).CloseWrite) })
	both.Wait()
	_ = guest.Close()
	_ = client.Close()
}

// reset ends a connection with an error for its peer, so that the peer does not take it for a normal end.
func reset(c net.Conn) {
	switch b := c.(type) {
	case *boundedConn:
		if t, ok := b.Conn.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
	case peer.Conn:
		_ = b.Abort()
	}
	_ = c.Close()
}

// maxHello bounds what a client may send until its ClientHello is complete, in bytes. crypto/tls has the same bound
// for one message.
const maxHello = 64 << 10

// errPeeked ends the handshake that only reads.
var errPeeked = errors.New("read")

// readHello reads the first message of TLS, and returns all that was read, and the server name in it. It sends
// nothing.
func readHello(r io.Reader) (hello []byte, name string, err error) {
	k := &peeked{r: io.LimitReader(r, maxHello)}
	var seen bool
	err = tls.Server(k, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		name, seen = h.ServerName, true
		return nil, errPeeked
	}}).Handshake()
	switch {
	case !seen:
		return nil, "", fmt.Errorf("%w: not a TLS connection: %w", ErrRoute, err)
	case name == "":
		return nil, "", fmt.Errorf("%w: the connection has no server name", ErrRoute)
	}
	return k.read.Bytes(), name, nil
}

// peeked is a connection that keeps what is read, and drops what is written: the alert of the failed handshake.
type peeked struct {
	r    io.Reader
	read bytes.Buffer
}

// Read implements net.Conn.
func (p *peeked) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.read.Write(b[:n])
	return n, err
}

func (p *peeked) Write(b []byte) (int, error)      { return len(b), nil }
func (p *peeked) Close() error                     { return nil }
func (p *peeked) LocalAddr() net.Addr              { return nil }
func (p *peeked) RemoteAddr() net.Addr             { return nil }
func (p *peeked) SetDeadline(time.Time) error      { return nil }
func (p *peeked) SetReadDeadline(time.Time) error  { return nil }
func (p *peeked) SetWriteDeadline(time.Time) error { return nil }

// begun is a connection of which the first bytes have been read.
type begun struct {
	net.Conn
	first *bytes.Reader
	// shakes means that a handshake is under way. Its end by its context closes the connection, which is no normal end.
	shakes bool
}

// Close implements net.Conn.
func (b *begun) Close() error {
	if b.shakes {
		reset(b.Conn)
		return nil
	}
	return b.Conn.Close()
}

// Read implements net.Conn.
func (b *begun) Read(p []byte) (int, error) {
	if b.first.Len() > 0 {
		return b.first.Read(p)
	}
	return b.Conn.Read(p)
}

// CloseWrite ends one direction.
func (b *begun) CloseWrite() error { return b.Conn.(interface{ CloseWrite() error }).CloseWrite() }
