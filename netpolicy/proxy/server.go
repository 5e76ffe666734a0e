package proxy

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/tlsname"
)

// Bounds of a server, which serves one endpoint.
const (
	// MaxConnections is how many connections of the endpoint are open at once; one more is reset. Each has at most
	// one connection to a peer, and some 64 KiB of buffers.
	MaxConnections = 128
	// MaxHeaderBytes bounds a request's head; net/http adds 4 KiB. MaxHeaders bounds its fields.
	MaxHeaderBytes = 16 << 10
	MaxHeaders     = 100
	// MaxAnswerBytes bounds an answer's head.
	MaxAnswerBytes = 64 << 10

	// HeaderTimeout is for a request's head, a ClientHello, and a handshake.
	HeaderTimeout = 10 * time.Second
	// KeepTimeout is for the pause between two requests of a connection.
	KeepTimeout = 2 * time.Minute
	// IdleTimeout is for a connection on which nothing passes in either direction.
	IdleTimeout = 15 * time.Minute
	// RequestTimeout is for a request with its answer, TunnelTimeout for a tunnel.
	RequestTimeout = time.Hour
	TunnelTimeout  = 24 * time.Hour
	// ConnectTimeout is for connecting to a peer, over all its addresses, with the handshake.
	ConnectTimeout = 30 * time.Second
	// SecretTimeout is how long a request waits for a missing secret, for example after a wake.
	SecretTimeout = time.Minute
	// HeldTimeout is how long the proxy holds back bytes of an answer of unknown length that may begin a secret.
	// It is long, so that a guest that reads slowly does not receive a secret in two parts.
	HeldTimeout = 5 * time.Second

	maxIdlePeers  = 16
	idlePeer      = 30 * time.Second
	sweepInterval = 30 * time.Second
)

// Sizes of a secret that can be put into a request, in bytes. A mask of a shorter one would match unrelated text.
const (
	MinSecret = 8
	MaxSecret = 4096
)

// ErrSecret is a value that cannot be in a request.
var ErrSecret = errors.New("not a value that can be put into a request")

// CheckSecret checks that a secret can be put into a request: MinSecret to MaxSecret visible ASCII characters,
// with spaces only inside.
func CheckSecret(value []byte) error {
	if len(value) < MinSecret || len(value) > MaxSecret {
		return fmt.Errorf("%w: it has %d bytes: %d to %d", ErrSecret, len(value), MinSecret, MaxSecret)
	}
	for i, c := range value {
		if c < ' ' || c > '~' || c == ' ' && (i == 0 || i == len(value)-1) {
			return fmt.Errorf("%w: byte %d of it is not a visible ASCII character", ErrSecret, i)
		}
	}
	return nil
}

// Rules judge connections: a link.Link.
type Rules interface {
	// Opens reports whether the proxy may connect to a peer, and by which rule. name is the server name that the
	// client is certain to send in TLS; empty is none.
	Opens(peer netip.AddrPort, name string) (rule string, ok bool)
}

// Names find addresses: a resolver.Resolver.
type Names interface {
	Lookup(ctx context.Context, name string) ([]netip.Addr, error)
}

// Secrets provide the values of secrets.
type Secrets interface {
	// Secret returns the value of a secret. If it is missing, ok is false, and changed is closed when it may be there.
	Secret(name string) (value string, ok bool, changed <-chan struct{})
}

// Event is a refused request, or a request with a secret.
type Event struct {
	// Reason is netpolicy.ReasonInject for requests with a secret, whether they were sent or not. For refused
	// requests it is ReasonProxy, ReasonConnRate or one of TLS.
	Reason netpolicy.Reason
	// Sent is set if the request was sent with the secret.
	Sent bool
	// Host is the requested name or address. Peer is the address of the connection, made or refused.
	Host string
	Port uint16
	Peer netip.AddrPort
	// Rule is the name of the rule that decided about the peer; empty if none did.
	Rule string
	// Secret is the name of the secret, or names with commas between.
	Secret string
	// Status is the status of the answer; 0 if there was none.
	Status int
	// Suppressed counts earlier events that were not reported: at most 100 of a kind are reported in a second.
	Suppressed uint32
}

// Config configures a server.
type Config struct {
	Identity *Identity
	Rules    Rules
	Names    Names
	Secrets  Secrets
	// Roots are the authorities for hosts' certificates; nil means the host's own.
	Roots *x509.CertPool
	// Dial connects to a peer that Rules open, with that name; nil is tlsname.Dial.
	Dial func(ctx context.Context, peer netip.AddrPort, name string) (*net.TCPConn, error)
	// Event receives events. The server calls it from several goroutines. Nil discards events.
	Event func(Event)

	// For tests; 0 is the constant of that name.
	HeaderTimeout, IdleTimeout, SecretTimeout, heldTimeout, sweepInterval time.Duration
}

// Server is one endpoint's proxy. Its methods are safe for concurrent use.
type Server struct {
	cfg       Config
	base      context.Context // ends with the server
	cancel    context.CancelFunc
	transport *http.Transport
	inner     *http.Server // for connections whose TLS ends here
	policy    atomic.Pointer[netpolicy.Policy]
	identity  atomic.Pointer[Identity]
	handlers  sync.WaitGroup
	serving   sync.WaitGroup

	requests, tunnels, injected, refused, busy, cuts atomic.Uint64

	mu       sync.Mutex // guards what follows
	closed   bool
	guests   map[*guestConn]struct{}
	peers    map[*peerConn]struct{}
	rate     rate
	reported map[netpolicy.Reason]*tlsname.EventLimit
}

// New makes a server. It refuses everything until it has a policy.
func New(cfg Config) *Server {
	cfg.HeaderTimeout = cmp.Or(cfg.HeaderTimeout, HeaderTimeout)
	cfg.IdleTimeout = cmp.Or(cfg.IdleTimeout, IdleTimeout)
	cfg.SecretTimeout = cmp.Or(cfg.SecretTimeout, SecretTimeout)
	cfg.heldTimeout = cmp.Or(cfg.heldTimeout, HeldTimeout)
	cfg.sweepInterval = cmp.Or(cfg.sweepInterval, sweepInterval)
	if cfg.Dial == nil {
		cfg.Dial = func(ctx context.Context, peer netip.AddrPort, _ string) (*net.TCPConn, error) {
			return tlsname.Dial(ctx, peer)
		}
	}
	if cfg.Event == nil {
		cfg.Event = func(Event) {}
	}
	s := &Server{
		cfg: cfg, guests: map[*guestConn]struct{}{}, peers: map[*peerConn]struct{}{}, reported: map[netpolicy.Reason]*tlsname.EventLimit{},
	}
	s.base, s.cancel = context.WithCancel(context.Background())
	s.policy.Store(&netpolicy.Policy{})
	s.identity.Store(cfg.Identity)
	s.transport = s.newTransport()
	s.inner = s.server(s.serveEnded)
	return s
}

// Listen makes a server's socket: netpolicy.ProxyPort of the gateway's address, on the endpoint's interface alone.
func Listen(ctx context.Context, device string) (*net.TCPListener, error) {
	return tlsname.ListenAt(ctx, device, netpolicy.ProxyPort)
}

// Stats returns the counts so far.
func (s *Server) Stats() netpolicy.ProxyStats {
	s.mu.Lock()
	open := len(s.guests)
	s.mu.Unlock()
	return netpolicy.ProxyStats{
		Open: uint64(open), Requests: s.requests.Load(), Tunnels: s.tunnels.Load(), Injected: s.injected.Load(),
		Refused: s.refused.Load(), Busy: s.busy.Load(), Cut: s.cuts.Load(),
	}
}

// SetIdentity replaces the identity by one of the same authority.
func (s *Server) SetIdentity(id *Identity) { s.identity.Store(id) }

// SetPolicy replaces the policy, and cuts connections that the new one does not open. Call it after Link.Swap.
func (s *Server) SetPolicy(p *netpolicy.Policy) {
	s.policy.Store(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rate = rate{}
	// keep judges a connection again that is being made now.
	for c := range s.peers {
		if !s.opens(c) {
			s.cuts.Add(1)
			c.cut()
		}
	}
	for c := range s.guests {
		if c.ends && !meets(p, c.target) {
			c.cut()
		}
	}
}

// opens asks the rules again about a connection.
func (s *Server) opens(c *peerConn) bool {
	name := ""
	if c.checked {
		name = c.target.Host
	}
	_, ok := s.cfg.Rules.Opens(c.peer, name)
	return ok
}

// meets reports whether requests to a target may get a secret.
func meets(p *netpolicy.Policy, t Target) bool {
	if !p.ProxyOn() {
		return false
	}
	for i := range p.Proxy.Inject {
		if p.Proxy.Inject[i].Meets(t.Host, t.Port) {
			return true
		}
	}
	return false
}

// Serve answers requests until the context ends. Then it closes everything, and returns nil. It may be called once.
func (s *Server) Serve(ctx context.Context, ln tlsname.Listener) error {
	defer s.cancel()
	outer := s.server(s.serveProxy)
	stop := context.AfterFunc(ctx, func() {
		s.close()
		_ = outer.Close() // reported below
	})
	defer stop()
	s.handlers.Go(s.sweep)
	err := outer.Serve(&listener{ln, s})
	s.close()
	err = errors.Join(unlessClosed(err), unlessClosed(outer.Close()), unlessClosed(s.inner.Close()))
	s.transport.CloseIdleConnections()
	s.handlers.Wait() // first: handlers hand connections on
	s.serving.Wait()
	if err != nil {
		return fmt.Errorf("serving a VM's proxy: %w", err)
	}
	return nil
}

// server makes an HTTP server with the bounds of this package.
func (s *Server) server(h http.HandlerFunc) *http.Server {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	quiet := log.New(io.Discard, "", 0) // a guest could fill a log
	return &http.Server{
		Handler: s.within(h), ErrorLog: quiet, Protocols: p, ReadHeaderTimeout: s.cfg.HeaderTimeout, IdleTimeout: KeepTimeout,
		MaxHeaderBytes: MaxHeaderBytes, DisableGeneralOptionsHandler: true,
		BaseContext: func(net.Listener) context.Context { return s.base },
		// Serve waits for the goroutines of connections, which net/http does not.
		ConnState: func(_ net.Conn, is http.ConnState) {
			switch is {
			case http.StateNew:
				s.serving.Add(1)
			case http.StateHijacked, http.StateClosed:
				s.serving.Done()
			}
		},
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if e, ok := c.(*ended); ok {
				return context.WithValue(ctx, targetKey{}, e.target)
			}
			return ctx
		},
	}
}

func unlessClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// close resets all connections and refuses new ones.
func (s *Server) close() {
	s.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for c := range s.guests {
		c.cut()
	}
	for c := range s.peers {
		c.cut()
	}
	clear(s.guests)
	clear(s.peers)
}

// within makes Serve wait for a handler.
func (s *Server) within(h http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			panic(http.ErrAbortHandler) // ends only the connection
		}
		s.handlers.Add(1)
		s.mu.Unlock()
		defer s.handlers.Done()
		h(w, r)
	})
}

// listener admits connections of the endpoint.
type listener struct {
	tlsname.Listener
	s *Server
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptTCP()
		if err != nil {
			return nil, err
		}
		g := &guestConn{TCPConn: c, s: l.s}
		l.s.mu.Lock()
		full := len(l.s.guests) >= MaxConnections
		if !full && !l.s.closed {
			l.s.guests[g] = struct{}{}
			l.s.mu.Unlock()
			return g, nil
		}
		l.s.mu.Unlock()
		if full {
			l.s.busy.Add(1)
		}
		g.cut()
	}
}

// guestConn is a connection of the endpoint.
type guestConn struct {
	*net.TCPConn
	s *Server
	// Guarded by the server's mutex: whether TLS ends here, and the target.
	ends   bool
	target Target
}

// Close implements [net.Conn].
func (c *guestConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.guests, c)
	c.s.mu.Unlock()
	return c.TCPConn.Close()
}

func (c *guestConn) cut() { cut(c.TCPConn) }

// cut resets a connection. Its user must still close it.
func cut(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// ended is a connection whose TLS ends here.
type ended struct {
	net.Conn
	target Target
}

type targetKey struct{}

// hand passes an accepted connection to the inner server.
func (s *Server) hand(c net.Conn) {
	one := make(handed, 1)
	one <- c
	_ = s.inner.Serve(one) // it returns as soon as it has the connection
}

// handed is a listener of one connection.
type handed chan net.Conn

// Accept implements [net.Listener].
func (h handed) Accept() (net.Conn, error) {
	select {
	case c := <-h:
		return c, nil
	default:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener]. It closes a connection that was not accepted.
func (h handed) Close() error {
	if c, err := h.Accept(); err == nil {
		return c.Close()
	}
	return nil
}

// Addr implements [net.Listener].
func (h handed) Addr() net.Addr { return &net.TCPAddr{} }

// sweep resets idle connections of the endpoint.
func (s *Server) sweep() {
	tick := time.NewTicker(s.cfg.sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-s.base.Done():
			return
		case <-tick.C:
		}
		s.mu.Lock()
		for c := range s.guests {
			if quiet(c.TCPConn) >= s.cfg.IdleTimeout {
				s.cuts.Add(1)
				c.cut()
			}
		}
		s.mu.Unlock()
	}
}

// quiet returns for how long a connection has been idle (tcp(7), TCP_INFO). The kernel measures it, so bytes need
// not pass through this process.
func quiet(c *net.TCPConn) (idle time.Duration) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			idle = time.Duration(min(info.Last_data_recv, info.Last_data_sent)) * time.Millisecond
		}
	})
	return idle
}

// report reports an event, unless too many of its kind came.
func (s *Server) report(e Event) {
	s.mu.Lock()
	if s.reported[e.Reason] == nil {
		s.reported[e.Reason] = &tlsname.EventLimit{}
	}
	var ok bool
	e.Suppressed, ok = s.reported[e.Reason].Take()
	s.mu.Unlock()
	if ok {
		s.cfg.Event(e)
	}
}
