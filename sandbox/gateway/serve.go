package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// Bounds of connections of clients.
const (
	maxConns   = 20000 // at once, of one listener
	maxHeader  = 64 << 10
	headerTime = 10 * time.Second // until a request's header, or a handshake, is complete
	idleTime   = 2 * time.Minute  // between requests
	drainTime  = 5 * time.Second  // for running requests when the gateway ends
	maxStreams = 256              // of one HTTP/2 connection
	acceptRest = 50 * time.Millisecond
)

// ErrListen means that a gateway cannot listen as configured.
var ErrListen = errors.New("the gateway cannot be served like that")

// Listeners are where a gateway is reached.
type Listeners struct {
	// HTTP takes HTTP/1.1 and HTTP/2: with TLS if it is set, else HTTP/2 with prior knowledge (h2c).
	HTTP net.Listener
	// Raw, if not nil, takes TLS connections, and carries what is in them to the port of their server name. TLS ends
	// here, or in the guest if Grant.GuestTLS says so.
	Raw net.Listener
	// TLS has the certificates: see Certificates and ACME. nil is no TLS; Raw connections must then end in guests.
	TLS *tls.Config
	// ConnsOf bounds the connections of one address, by listener; for IPv6, of one /64 network. 0 is half of all.
	// Behind a load balancer, all connections may have one address.
	ConnsOf int
}

// Serve serves the listeners until ctx ends, and then closes them and the gateway. It may be called once.
func (g *Gateway) Serve(ctx context.Context, l Listeners) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(l.TLS != nil)
	p.SetUnencryptedHTTP2(l.TLS == nil)
	h := &http.Server{
		Handler: g, Protocols: &p, ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeader,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerConnection: 1 << 20, MaxReceiveBufferPerStream: 256 << 10,
			SendPingTimeout: idleTime, PingTimeout: headerTime,
		},
		ErrorLog: slog.NewLogLogger(g.log.Handler(), slog.LevelDebug), // errors of clients do not fill the log
	}
	if l.TLS != nil {
		raw := l.TLS.Clone()
		raw.NextProtos = nil // what the guest's server speaks is not known here
		g.rawTLS.Store(raw)
	}
	var all sync.WaitGroup
	ended := make(chan error, 2)
	serve := func(do func() error) {
		all.Go(func() {
			err := do()
			if errors.Is(err, http.ErrServerClosed) || ctx.Err() != nil {
				err = nil
			}
			ended <- err
		})
	}
	if l.HTTP != nil {
		in := Bound(l.HTTP, l.ConnsOf)
		if l.TLS != nil {
			c := l.TLS.Clone()
			c.NextProtos = append([]string{"h2", "http/1.1"}, c.NextProtos...)
			in = tls.NewListener(in, c)
		}
		serve(func() error { return h.Serve(in) })
	}
	if l.Raw != nil {
		serve(func() error { return g.serveRaw(ctx, Bound(l.Raw, l.ConnsOf), g.rawTLS.Load()) })
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-ended:
	}
	end, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	cancel()
	if h.Shutdown(end) != nil {
		err = errors.Join(err, h.Close())
	}
	err = errors.Join(err, g.Close())
	all.Wait()
	return err
}

// boundedListener bounds the connections of a listener, and those of one address.
type boundedListener struct {
	net.Listener
	ofOne int

	mu sync.Mutex // guards what follows
	n  int
	of map[netip.Addr]int
}

// Bound bounds the connections of a listener: 20,000, and ofOne of one address; 0 is half of all.
func Bound(l net.Listener, ofOne int) net.Listener {
	if ofOne <= 0 {
		ofOne = maxConns / 2
	}
	return &boundedListener{Listener: l, ofOne: ofOne, of: map[netip.Addr]int{}}
}

// Accept implements net.Listener. It closes connections beyond the bounds.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := source(c.RemoteAddr())
		l.mu.Lock()
		ok := l.n < maxConns && l.of[from] < l.ofOne
		if ok {
			l.n++
			l.of[from]++
		}
		l.mu.Unlock()
		if ok {
			return &boundedConn{Conn: c, left: sync.OnceFunc(func() { l.left(from) })}, nil
		}
		_ = c.Close()
	}
}

func (l *boundedListener) left(from netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n--
	if l.of[from]--; l.of[from] == 0 {
		delete(l.of, from)
	}
}

// source returns the address that a connection counts for: of IPv6, its /64 network, since one host has all of it.
func source(a net.Addr) netip.Addr {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	ip := t.AddrPort().Addr().Unmap()
	if ip.Is6() {
		if p, err := ip.WithZone("").Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return ip
}

type boundedConn struct {
	net.Conn
	left func()
}

// Close implements net.Conn.
func (c *boundedConn) Close() error {
	c.left()
	return c.Conn.Close()
}

// CloseWrite ends one direction.
func (c *boundedConn) CloseWrite() error {
	if t, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return t.CloseWrite()
	}
	return nil
}

// Listen listens on TCP for a gateway. Without TLS it refuses an address that other hosts reach, since tokens would
// pass in the clear, unless plain allows it.
func Listen(address string, encrypted, plain bool) (net.Listener, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return nil, fmt.Errorf("%w: address %q: use HOST:PORT, with 0.0.0.0 or [::] for all addresses", ErrListen, address)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrListen, err)
	}
	at, ok := l.Addr().(*net.TCPAddr)
	if !encrypted && !plain && (!ok || !at.IP.IsLoopback()) {
		return nil, errors.Join(fmt.Errorf("%w: others reach %s, and tokens would pass in the clear: use a certificate", ErrListen, l.Addr()), l.Close())
	}
	return l, nil
}
