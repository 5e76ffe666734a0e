package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
)

// SocketFile is the name of the Unix socket in a state directory.
const SocketFile = "api.sock"

// Bounds of connections.
const (
	maxConns      = 3072 // at once, of one listener: more than all kinds of requests
	maxConnsOfOne = 1280 // of one address, by TCP
	maxHeader     = 32 << 10
	headerTime    = 10 * time.Second
	idleTime      = 2 * time.Minute
	drainTime     = 10 * time.Second // for running requests when the server ends
	maxSocketPath = 107              // bytes (unix(7))
)

// ErrListen means that the server cannot listen as configured.
var ErrListen = errors.New("the API cannot be served like that")

// TCP says where to listen beside the Unix socket.
type TCP struct {
	// Address is HOST:PORT. An empty host is refused: use 0.0.0.0 or [::] for all addresses.
	Address string
	// TLS, if not nil, has the server's certificates.
	TLS *tls.Config
	// Identities are callers besides those with tokens, and have client certificates asked for; nil is none.
	Identities *identity.Store
	// Plain allows a non-loopback address without TLS, for a server behind something else that encrypts.
	Plain bool
}

// Listen listens on TCP, with TLS if it is configured. It refuses to listen if there are neither tokens nor Identities,
// and without TLS at an address that other hosts reach.
func (t TCP) Listen(known *tokens.Store) (net.Listener, error) {
	all, err := known.Read()
	if err != nil {
		return nil, err
	}
	if len(all) == 0 && t.Identities == nil {
		return nil, fmt.Errorf("%w: there is no token in %s, and nobody could be let in over TCP: make one with `drowse token create`", ErrListen, known.Path())
	}
	host, _, err := net.SplitHostPort(t.Address)
	if err != nil {
		return nil, fmt.Errorf("%w: address %q: use HOST:PORT, as 127.0.0.1:7300", ErrListen, t.Address)
	}
	if host == "" {
		return nil, fmt.Errorf("%w: address %q: name the host's address, or 0.0.0.0 or [::] for all", ErrListen, t.Address)
	}
	config := t.TLS
	if config != nil {
		config = config.Clone()
		config.MinVersion, config.NextProtos = max(config.MinVersion, tls.VersionTLS12), []string{"h2", "http/1.1"}
		config = t.Identities.TLS(config)
	}
	l, err := net.Listen("tcp", t.Address)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrListen, err)
	}
	// The resolved address counts, not the text: a name may stand for any address.
	at, ok := l.Addr().(*net.TCPAddr)
	if config == nil && !t.Plain && (!ok || !loopback(at)) {
		l.Close()
		return nil, fmt.Errorf("%w: %s is reached by others, and tokens would pass in the clear: use --tls-cert and --tls-key, or --no-tls if something else encrypts", ErrListen, l.Addr())
	}
	l = limitConns(l)
	if config != nil {
		l = tls.NewListener(l, config)
	}
	return l, nil
}

func loopback(a *net.TCPAddr) bool {
	ip, ok := netip.AddrFromSlice(a.IP)
	return ok && ip.Unmap().IsLoopback()
}

// unixListener is a listener on a Unix socket. A lock beside the socket shows that its server runs.
type unixListener struct {
	net.Listener
	lock *os.File
}

// Close stops listening and removes the socket.
func (l *unixListener) Close() error { return errors.Join(l.Listener.Close(), l.lock.Close()) }

// ListenUnix listens on a Unix socket that only its owner may use, from the first moment. It replaces the socket
// of a server that was killed. If a server runs, it returns ErrListen.
func ListenUnix(path string) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("%w: the path of the socket has %d bytes, and %d are possible: use a shorter state directory", ErrListen, len(path), maxSocketPath)
	}
	lock, err := osfile.TryOpenLocked(path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600, osfile.Exclusive)
	if errors.Is(err, osfile.ErrLocked) {
		err = fmt.Errorf("another server serves %s", filepath.Base(path))
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrListen, err)
	}
	l, err := osfile.ListenUnix(path)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("%w: %w", ErrListen, err)
	}
	return &unixListener{l, lock}, nil
}

// Serve serves the listeners until ctx ends, and then closes them. Requests that still run have 10 s to finish.
// Serve may be called once.
func (s *Server) Serve(ctx context.Context, listeners ...net.Listener) error {
	base, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	h := &http.Server{
		Handler: s, ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeader, ConnContext: connContext,
		BaseContext: func(net.Listener) context.Context { return base },
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // errors of clients do not fill the log
	}
	ended := make(chan error, len(listeners))
	for _, l := range listeners {
		if l.Addr().Network() == "unix" {
			l = limitConns(l) // as TCP.Listen does
		}
		go func() {
			err := h.Serve(l)
			if errors.Is(err, http.ErrServerClosed) {
				err = nil
			}
			ended <- err
		}()
	}
	var err error
	left := len(listeners)
	select {
	case <-ctx.Done():
	case err = <-ended:
		left--
	}
	close(s.draining)
	s.endAll()
	end, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	if serr := h.Shutdown(end); serr != nil {
		// Their contexts end.
		cancel()
		err = errors.Join(err, h.Close())
	}
	// It does not know of WebSockets. They have been told to end, and their connections end with cancel.
	gone := make(chan struct{})
	go func() { s.streams.Wait(); close(gone) }()
	select {
	case <-gone:
	case <-end.Done():
		cancel()
		<-gone
	}
	for range left {
		err = errors.Join(err, <-ended)
	}
	return err
}
