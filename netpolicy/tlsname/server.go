package tlsname

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
)

// Limits of a server, which serves one VM.
const (
	// MaxConnections is how many connections are open at once, including those without a hello yet. Each has two
	// sockets, MaxHello bytes at most until its name is checked, and afterwards what the kernel's buffers hold.
	MaxConnections = 256
	// HelloTimeout is how long a hello may take.
	HelloTimeout = 10 * time.Second
	// ConnectTimeout is how long the peer may take to answer.
	ConnectTimeout = 30 * time.Second

	maxEarly        = 1 << 20 // bytes before a second hello
	sweepInterval   = 30 * time.Second
	eventsPerSecond = 100
)

// Flows finds and judges the endpoint's flows: a link.Link.
type Flows interface {
	Checked(port uint16) (flow.Checked, error)
	Lives(c flow.Checked) (bool, error)
	OpensName(c flow.Checked, name string) bool
}

// Refusal is a connection that was reset because of its hello.
type Refusal struct {
	Flow   flow.Checked
	Reason netpolicy.Reason
	// Name is the server name; empty if there is no valid one.
	Name string
	// Quiet is set if there were already 100 refusals in this second. Suppressed counts the quiet ones before one
	// that is not quiet.
	Quiet      bool
	Suppressed uint32
}

// Config configures a server.
type Config struct {
	Flows Flows
	// Dial connects to the peer of a flow, whose client has asked for a name that the rules open; nil is Dial.
	Dial func(ctx context.Context, c flow.Checked, name string) (*net.TCPConn, error)
	// Refused gets connections that are reset, and Named the names of the others. The server calls them from
	// several goroutines. Nil discards them.
	Refused func(Refusal)
	Named   func(flow flow.Checked, name string)
	// HelloTimeout is for tests; 0 is the constant HelloTimeout.
	HelloTimeout time.Duration
}

// Server checks the names of one VM's connections. Its methods are safe for concurrent use.
type Server struct {
	cfg Config

	mu    sync.Mutex // guards what follows
	open  map[*connection]bool
	stats netpolicy.TLSStats
	limit EventLimit
}

// connection is a connection that the guest has opened.
type connection struct {
	flow  flow.Checked
	guest *net.TCPConn
	peer  *net.TCPConn // owned by the goroutine that serves it
	// Guarded by the server's mutex. name is empty until the rules allow it.
	name   string
	cancel context.CancelFunc
}

// New makes a server without connections.
func New(cfg Config) *Server {
	if cfg.Dial == nil {
		cfg.Dial = func(ctx context.Context, c flow.Checked, _ string) (*net.TCPConn, error) { return Dial(ctx, c.Peer) }
	}
	if cfg.Refused == nil {
		cfg.Refused = func(Refusal) {}
	}
	if cfg.Named == nil {
		cfg.Named = func(flow.Checked, string) {}
	}
	cfg.HelloTimeout = cmp.Or(cfg.HelloTimeout, HelloTimeout)
	return &Server{cfg: cfg, open: map[*connection]bool{}}
}

// Stats returns the counts so far.
func (s *Server) Stats() netpolicy.TLSStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	st.Open = uint64(len(s.open))
	return st
}

// Listen makes a server's socket: a port of the gateway's address that the kernel chooses, on the endpoint's
// interface alone. The interface need not have the address yet.
func Listen(ctx context.Context, device string) (*net.TCPListener, error) {
	return ListenAt(ctx, device, 0)
}

// ListenAt is Listen at a port.
func ListenAt(ctx context.Context, device string, port uint16) (*net.TCPListener, error) {
	cfg := net.ListenConfig{
		// Probes would keep an idle VM awake, since they count as use.
		KeepAlive: -1,
		Control: func(_, _ string, c syscall.RawConn) error {
			var inner error
			err := c.Control(func(fd uintptr) {
				inner = errors.Join(unix.BindToDevice(int(fd), device), unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1),
					// Its connections inherit this, so that the kernel resets them if the process dies; see unfinished.
					unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
			})
			return errors.Join(err, inner)
		},
	}
	// The guest must not have subflows besides the one that is judged.
	cfg.SetMultipathTCP(false)
	ln, err := cfg.Listen(ctx, "tcp4", netip.AddrPortFrom(netpolicy.TheWire.Gateway4, port).String())
	if err != nil {
		return nil, fmt.Errorf("listening for connections of %s: %w", device, err)
	}
	return ln.(*net.TCPListener), nil
}

// Dial connects the host to a peer by its own routes. It refuses destinations that the host would not send on.
func Dial(ctx context.Context, peer netip.AddrPort) (*net.TCPConn, error) {
	routes, err := netlink.RouteGet(peer.Addr().AsSlice())
	if err != nil {
		return nil, fmt.Errorf("finding the way to %v: %w", peer, err)
	}
	if len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return nil, fmt.Errorf("connecting to %v: it is no address beyond the host", peer)
	}
	d := net.Dialer{Timeout: ConnectTimeout}
	c, err := d.DialContext(ctx, "tcp4", peer.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// Listener is where connections of the endpoint come from: a *net.TCPListener, or one that gets them passed.
type Listener interface {
	AcceptTCP() (*net.TCPConn, error)
	Close() error
}

// Serve checks connections until the context ends. Then it resets all, closes the listener and returns nil. It may
// be called once.
func (s *Server) Serve(ctx context.Context, ln Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	wg.Go(func() { s.sweep(ctx) })
	for {
		c, err := ln.AcceptTCP()
		if ctx.Err() != nil {
			if err == nil {
				reset(c)
			}
			return nil
		}
		if err != nil {
			if Passing(err) {
				// For example, the process has too many open files: new connections wait.
				_ = wait.For(ctx, 100*time.Millisecond)
				continue
			}
			ln.Close()
			return fmt.Errorf("accepting connections whose names are checked: %w", err)
		}
		x, conn := s.admit(ctx, c)
		if x == nil {
			continue
		}
		wg.Go(func() {
			defer s.drop(x)
			s.serve(conn, x)
		})
	}
}

// Passing reports whether an error of a listener passes, so that it may go on.
func Passing(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM) ||
		errors.Is(err, unix.ECONNABORTED)
}

// admit finds the connection's flow and registers it, or resets the connection.
func (s *Server) admit(ctx context.Context, c *net.TCPConn) (*connection, context.Context) {
	from, _ := netip.ParseAddrPort(c.RemoteAddr().String())
	flow, err := s.cfg.Flows.Checked(from.Port())
	if err != nil {
		reset(c)
		s.count(func(st *netpolicy.TLSStats) { st.Failed++ })
		return nil, nil
	}
	x := &connection{flow: flow, guest: c}
	ctx, x.cancel = context.WithCancel(ctx)
	s.mu.Lock()
	full := len(s.open) >= MaxConnections
	if !full {
		s.open[x] = true
	}
	s.mu.Unlock()
	if full {
		x.cancel()
		reset(c)
		s.refuse(x, netpolicy.ReasonTLSBusy, "")
		return nil, nil
	}
	return x, ctx
}

func (s *Server) drop(x *connection) {
	x.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, x)
}

func (s *Server) count(f func(*netpolicy.TLSStats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.stats)
}

// EventLimit bounds the events of one kind: 100 a second. The zero value is ready; the caller must serialize its use.
type EventLimit struct {
	second     int64
	count      int
	suppressed uint32
}

// Take counts an event. If it may be reported, suppressed is how many before it may not.
func (l *EventLimit) Take() (suppressed uint32, ok bool) {
	if now := time.Now().Unix(); now != l.second {
		l.second, l.count = now, 0
	}
	if l.count++; l.count > eventsPerSecond {
		l.suppressed++
		return 0, false
	}
	suppressed, l.suppressed = l.suppressed, 0
	return suppressed, true
}

// refuse reports a connection that was reset.
func (s *Server) refuse(x *connection, reason netpolicy.Reason, name string) {
	r := Refusal{Flow: x.flow, Reason: reason, Name: name}
	s.mu.Lock()
	s.stats.Refused++
	suppressed, ok := s.limit.Take()
	r.Suppressed, r.Quiet = suppressed, !ok
	s.mu.Unlock()
	s.cfg.Refused(r)
}

// Recheck asks the rules about all connections again, and resets those that the rules no longer open. Call it
// after Link.Swap.
func (s *Server) Recheck() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.open {
		if x.name != "" && !s.cfg.Flows.OpensName(x.flow, x.name) {
			s.cut(x)
		}
	}
}

// cut resets a connection. The lock is held.
func (s *Server) cut(x *connection) {
	x.cancel()
	delete(s.open, x)
	s.stats.Cut++
}

// allow records the name of a connection, if the rules open it. A concurrent Recheck comes either before, and then
// the new rules judge here, or after, and finds the name.
func (s *Server) allow(x *connection, name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open[x] || !s.cfg.Flows.OpensName(x.flow, name) {
		return false
	}
	x.name = name
	return true
}

// sweep resets connections whose flow has ended: the guest can no longer use them.
func (s *Server) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.sweepOnce()
		}
	}
}

func (s *Server) sweepOnce() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.open {
		if lives, err := s.cfg.Flows.Lives(x.flow); err == nil && !lives {
			s.cut(x)
		}
	}
}

// reset closes a connection so that the other side does not take it for the end of the stream.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// unfinished makes the kernel reset a connection if this process is killed: the other side must not take its
// stream for complete.
func unfinished(c *net.TCPConn) { _ = c.SetLinger(0) }

// finish closes a connection after both directions have ended. Data in flight still arrives.
func finish(c *net.TCPConn) {
	_ = c.SetLinger(-1)
	_ = c.Close()
}

// serve handles a connection from its hello to its end.
func (s *Server) serve(ctx context.Context, x *connection) {
	stop := context.AfterFunc(ctx, func() { reset(x.guest) })
	buf, name, n, reason, err := s.hello(x.guest, nil)
	if err == nil && !s.allow(x, name) {
		reason, err = netpolicy.ReasonTLSName, errRefused
	}
	if err != nil {
		s.end(stop, x.guest)
		if reason != 0 && ctx.Err() == nil {
			s.refuse(x, reason, name)
		}
		return
	}
	s.cfg.Named(x.flow, name)
	peer, err := s.cfg.Dial(ctx, x.flow, name)
	if err != nil {
		s.end(stop, x.guest)
		s.count(func(st *netpolicy.TLSStats) { st.Failed++ })
		return
	}
	unfinished(peer)
	x.peer = peer
	stopPeer := context.AfterFunc(ctx, func() { reset(peer) })
	s.count(func(st *netpolicy.TLSStats) { st.Passed++ })
	reason, err = s.relay(x, name, buf, n)
	if err != nil {
		s.end(stop, x.guest)
		s.end(stopPeer, peer)
		if reason != 0 && ctx.Err() == nil {
			s.refuse(x, reason, "")
		}
		return
	}
	if stop() {
		finish(x.guest)
	}
	if stopPeer() {
		finish(peer)
	}
}

// end resets a connection unless the context does.
func (s *Server) end(stop func() bool, c *net.TCPConn) {
	if stop() {
		reset(c)
	}
}

var errRefused = errors.New("refused")

// hello reads a hello that begins with buf. It returns all bytes read, and n, the length of the hello in them.
// With an error, reason says why to refuse the hello; 0 means that the client is gone.
func (s *Server) hello(c *net.TCPConn, buf []byte) (_ []byte, name string, n int, reason netpolicy.Reason, err error) {
	_ = c.SetReadDeadline(time.Now().Add(s.cfg.HelloTimeout))
	for {
		name, n, err = Hello(buf)
		switch {
		case err == nil:
			_ = c.SetReadDeadline(time.Time{})
			return buf, name, n, 0, nil
		case errors.Is(err, ErrNoName):
			return nil, "", 0, netpolicy.ReasonTLSNoName, err
		case errors.Is(err, ErrECH):
			return nil, "", 0, netpolicy.ReasonTLSECH, err
		case !errors.Is(err, ErrShort):
			return nil, "", 0, netpolicy.ReasonTLSHello, err
		}
		if buf, err = fill(c, buf, n, MaxHello); err != nil {
			switch {
			case errors.Is(err, os.ErrDeadlineExceeded):
				reason = netpolicy.ReasonTLSTimeout
			case errors.Is(err, io.EOF) && len(buf) > 0:
				reason = netpolicy.ReasonTLSHello
			}
			return nil, "", 0, reason, err
		}
	}
}

// fill reads until buf has need bytes. The buffer grows to most bytes at most.
func fill(c *net.TCPConn, buf []byte, need, most int) ([]byte, error) {
	for len(buf) < need {
		if len(buf) == cap(buf) {
			buf = append(make([]byte, 0, min(max(2*cap(buf), need, 2048), most)), buf...)
		}
		n, err := c.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		if err != nil && len(buf) < need {
			return buf, err
		}
	}
	return buf, nil
}

// relay passes on the hello, the first n bytes of buf, and then all that follows in both directions.
func (s *Server) relay(x *connection, name string, buf []byte, n int) (netpolicy.Reason, error) {
	if _, err := x.peer.Write(buf[:n]); err != nil {
		return 0, err
	}
	buf = buf[n:]
	// Pass on nothing more of the client's until the server's answer to the hello is known.
	head := make([]byte, 0, 4096)
	again := false
	for known := false; !known; {
		m, err := x.peer.Read(head[len(head):cap(head)])
		head = head[:len(head)+m]
		again, known = asksAgain(head)
		if err != nil {
			if !errors.Is(err, io.EOF) {
				return 0, err
			}
			break // the client gets the part of an answer that came; this is its end
		}
	}
	if _, err := x.guest.Write(head); err != nil {
		return 0, err
	}
	ends := make(chan error, 2)
	go func() { ends <- pass(x.guest, x.peer) }()
	var reason netpolicy.Reason
	var err error
	if again {
		buf, reason, err = s.second(x, name, buf)
	}
	if err == nil && len(buf) > 0 {
		_, err = x.peer.Write(buf)
	}
	if err == nil {
		go func() { ends <- pass(x.peer, x.guest) }()
		return 0, awaitEnds(ends, x.guest, x.peer)
	}
	ends <- err
	_ = awaitEnds(ends, x.guest, x.peer)
	return reason, err
}

// pass copies until the end of the stream, and passes that on. Between two sockets the kernel copies (splice(2)),
// and holds no more than its buffers have room for.
func pass(to, from *net.TCPConn) error {
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	return to.CloseWrite()
}

// second passes on what a client sends after the server has asked for another hello, up to and including that
// hello, if it has the same name. It returns the bytes read beyond it.
func (s *Server) second(x *connection, name string, buf []byte) ([]byte, netpolicy.Reason, error) {
	// The buffer may have two records: the current one and part of the next.
	const most = 2 * (recordHeader + maxRecord + 256)
	_ = x.guest.SetReadDeadline(time.Now().Add(s.cfg.HelloTimeout))
	early := 0
	for {
		var err error
		if buf, err = fill(x.guest, buf, recordHeader, most); err != nil {
			return nil, gone(err), err
		}
		size := recordHeader + int(buf[3])<<8 + int(buf[4])
		switch typ := buf[0]; {
		case typ == typeHandshake:
			all, again, n, reason, err := s.hello(x.guest, buf)
			if err != nil {
				return nil, reason, err
			}
			if again != name {
				return nil, netpolicy.ReasonTLSName, fmt.Errorf("%w: another name in the second hello", errRefused)
			}
			_, err = x.peer.Write(all[:n])
			return all[n:], 0, err
		case typ != typeChangeCipherSpec && typ != typeAlert && typ != typeApplicationData,
			size > recordHeader+maxRecord+256, early+size > maxEarly:
			return nil, netpolicy.ReasonTLSHello, fmt.Errorf("%w: a record of type %d before the second hello", errRefused, typ)
		}
		early += size
		if buf, err = fill(x.guest, buf, size, most); err != nil {
			return nil, gone(err), err
		}
		if _, err := x.peer.Write(buf[:size]); err != nil {
			return nil, 0, err
		}
		// The rest moves to the front, to make room for the next record.
		buf = append(make([]byte, 0, max(2048, len(buf)-size)), buf[size:]...)
	}
}

// gone returns the reason to refuse a client whose second hello does not come.
func gone(err error) netpolicy.Reason {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return netpolicy.ReasonTLSTimeout
	}
	return 0
}
