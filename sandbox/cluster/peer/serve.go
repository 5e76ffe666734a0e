package peer

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"golang.org/x/net/netutil"
)

// Bounds of connections of other hosts.
const (
	maxConns   = 16384
	maxStreams = 4096 // of one HTTP/2 connection
	headerTime = 10 * time.Second
	drainTime  = 5 * time.Second
)

// Serve serves other hosts at a listener until ctx ends, and then closes it. handlers get the requests, by
// Passed.Service. Their RemoteAddr and TLS are as the first host saw them.
func (p *Peers) Serve(ctx context.Context, l net.Listener, handlers map[string]http.Handler) error {
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	h := &http.Server{
		Handler: p.admitted(handlers), Protocols: &protocols, ReadHeaderTimeout: headerTime, IdleTimeout: 2 * idleTime, MaxHeaderBytes: 2 * maxHeader,
		BaseContext: func(net.Listener) context.Context { return base },
		HTTP2:       &http.HTTP2Config{MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerConnection: 1 << 20, MaxReceiveBufferPerStream: 256 << 10},
		ErrorLog:    slog.NewLogLogger(p.log.Handler(), slog.LevelDebug), // strangers do not fill the log
	}
	ended := make(chan error, 1)
	go func() {
		err := h.Serve(tls.NewListener(wholeListener{netutil.LimitListener(l, maxConns)}, p.o.Identity.server()))
		if errors.Is(err, http.ErrServerClosed) {
			err = nil
		}
		ended <- err
	}()
	var err error
	select {
	case <-ctx.Done():
	case err = <-ended:
		ended <- nil
	}
	end, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	if h.Shutdown(end) != nil {
		cancel()
		err = errors.Join(err, h.Close())
	}
	p.Close()
	return errors.Join(err, <-ended)
}

// admitted passes on requests of hosts of the cluster.
func (p *Peers) admitted(handlers map[string]http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		is, err := p.admit(r)
		if err != nil {
			if p.logs.Allow() {
				p.log.Warn("a request that is not of a host of the cluster was refused", "from", r.RemoteAddr, "error", err)
			}
			w.Header().Set("Connection", "close")
			http.Error(w, "not a host of the cluster", http.StatusForbidden)
			return
		}
		r = r.WithContext(context.WithValue(r.Context(), passedKey{}, is))
		r.Header.Del(headerPassed)
		r.RemoteAddr = is.Client
		if !is.TLS {
			r.TLS = nil
		}
		// What another handler has set for an earlier request of the connection.
		c := http.NewResponseController(w)
		_ = errors.Join(c.SetReadDeadline(time.Time{}), c.SetWriteDeadline(time.Time{}))
		if h := handlers[is.Service]; h != nil {
			h.ServeHTTP(w, r)
			return
		}
		NotHere(w, r)
	})
}

// admit returns what a host asserts of a request. The handshake has proven that the sender has its key. Whether that is
// a host's is looked up for each request: keys end with their sessions.
func (p *Peers) admit(r *http.Request) (*Passed, error) {
	if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
		return nil, errors.New("no key")
	}
	c := r.TLS.PeerCertificates[0]
	key, name := keyOf(c), c.Subject.CommonName
	h, err := p.o.Directory.Peer(r.Context(), name, false)
	if err != nil || h.Key != key {
		if !p.strang.Allow() {
			return nil, errors.New("too many that are not known")
		}
		h, err = p.o.Directory.Peer(r.Context(), name, true)
	}
	switch {
	case err != nil:
		return nil, err
	case h.Key != key:
		return nil, fmt.Errorf("%.64q: %w", name, errKey)
	}
	values := r.Header.Values(headerPassed)
	if len(values) != 1 {
		return nil, fmt.Errorf("%d assertions", len(values))
	}
	is, err := decodePassed(values[0])
	if err != nil {
		return nil, fmt.Errorf("what it asserts: %w", err)
	}
	is.From = h.Name
	return is, nil
}

// Conn is a stream of bytes between hosts.
type Conn interface {
	net.Conn
	// CloseWrite ends one direction, and Abort the connection, so that the other end does not take it for a normal end.
	CloseWrite() error
	Abort() error
}

// Dial opens a stream of bytes to the host that has a sandbox, for the service of is. The errors are those of Pass; a
// nil connection without one means that no other host has the sandbox.
func (p *Peers) Dial(ctx context.Context, is Passed) (c Conn, err error) {
	last := ""
	for try := range 2 {
		host, werr := p.o.Directory.Where(ctx, is.Sandbox, try > 0)
		if werr != nil {
			return nil, errors.Join(err, werr)
		}
		if host == "" || host == last && !errors.Is(err, errNotHere) {
			return nil, err
		}
		c, derr := p.open(ctx, is, host)
		if derr == nil {
			return c, nil
		}
		err, last = unreachable(is.Sandbox, host, derr), host
	}
	return nil, err
}

func (p *Peers) open(ctx context.Context, is Passed, host string) (_ Conn, err error) {
	var to Host
	var c net.Conn
	for fresh := range 2 {
		next, derr := p.o.Directory.Peer(ctx, host, fresh > 0)
		if derr != nil || next == to {
			return nil, errors.Join(err, derr)
		}
		to = next
		if err = p.known(to); err == nil {
			c, err = p.dial(ctx, to, "http/1.1")
		}
		if err == nil {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	fail := func(err error) (Conn, error) { return nil, errors.Join(err, c.Close()) }
	is.Nonce = nonce()
	text, err := is.encode()
	if err != nil {
		return fail(err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_ = c.SetDeadline(time.Now().Add(shakeTime))
	r, err := http.NewRequest(http.MethodGet, "https://"+to.Key+"/", nil)
	if err != nil {
		return fail(err)
	}
	r.Header = http.Header{headerPassed: {text}, "Connection": {"Upgrade"}, "Upgrade": {streamProtocol}}
	if err := r.Write(c); err != nil {
		return fail(err)
	}
	in := bufio.NewReader(c)
	a, err := http.ReadResponse(in, r)
	if err != nil {
		return fail(err)
	}
	switch {
	case a.Header.Get(headerNotHere) == is.Nonce:
		return fail(errNotHere)
	case a.StatusCode != http.StatusSwitchingProtocols:
		return fail(fmt.Errorf("the host %s answers %s", to.Name, a.Status))
	}
	if err := c.SetDeadline(time.Time{}); err != nil || !stop() {
		return fail(errors.Join(err, context.Cause(ctx)))
	}
	return &stream{c, in}, nil
}

// streamProtocol is what a connection to another host becomes that carries bytes.
const streamProtocol = "drowse-stream"

// Accept takes a request of Dial, and returns its connection. Before it, NotHere refuses the request.
func Accept(w http.ResponseWriter, r *http.Request) (Conn, error) {
	if r.Header.Get("Upgrade") != streamProtocol {
		http.Error(w, "not a stream", http.StatusUpgradeRequired)
		return nil, errors.New("the request is no stream")
	}
	c, b, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(shakeTime))
	if _, err = c.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + streamProtocol + "\r\n\r\n")); err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &stream{c, b.Reader}, nil
}

// stream is a connection of which the reader may have read something.
type stream struct {
	net.Conn
	r *bufio.Reader
}

// Read implements net.Conn.
func (s *stream) Read(b []byte) (int, error) { return s.r.Read(b) }

// Abort implements Conn: without TLS's word that the stream is whole.
func (s *stream) Abort() error {
	if t, ok := s.Conn.(*tls.Conn); ok {
		return t.NetConn().Close()
	}
	return s.Conn.Close()
}

// CloseWrite implements Conn.
func (s *stream) CloseWrite() error { return s.Conn.(interface{ CloseWrite() error }).CloseWrite() }
