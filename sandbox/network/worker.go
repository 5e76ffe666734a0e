package network

import (
	"context"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/netpolicy/resolver"
	"github.com/drowse-vm/drowse/netpolicy/tlsname"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
)

// Argument makes a program that calls process.ServeProcess the network process of a VM.
const Argument = "network"

// Descriptors of the network process.
const (
	keeperFD = 3 + iota
	queriesFD
)

// Main is the network process of a VM. It returns when the keeper has closed the connection.
func Main() error {
	// The keeper decides when it ends. A terminal or a host that shuts down signals both.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	return newWorker().run(os.NewFile(keeperFD, "keeper"), queriesFD)
}

// worker reads what the guest and its peers say: queries, names in TLS, requests. All that needs a right it asks the
// keeper for. Usually it is alone in a confined process.
type worker struct {
	connected chan struct{} // closed when there is conn
	conn      *rpc.Conn
	ctx       context.Context
	cancel    context.CancelFunc
	wg        sync.WaitGroup
	queries   *queries

	dns      *resolver.Resolver
	tls      *tlsname.Server
	arriving map[string]*arrivals
	roots    *x509.CertPool

	mu        sync.Mutex              // guards what follows
	flows     map[uint16]flow.Checked // of connections that arrive, by port
	changed   chan struct{}           // closed when a secret has changed
	proxy     *proxy.Server           // nil while the policy has no proxy
	stopProxy func()
}

func newWorker() *worker {
	w := &worker{connected: make(chan struct{}), flows: map[uint16]flow.Checked{}, changed: make(chan struct{}),
		arriving: map[string]*arrivals{arrivesDNS: newArrivals(), arrivesTLS: newArrivals(), arrivesProxy: newArrivals()}}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.dns = resolver.New(resolver.Config{Pinner: w, Exchange: resolver.Exchange(w.ask)})
	w.tls = tlsname.New(tlsname.Config{Flows: w, Dial: w.dialName, Refused: w.refused})
	return w
}

// run serves the keeper until that closes the connection.
func (w *worker) run(keeper *os.File, queriesFD int) error {
	if err := unix.SetNonblock(queriesFD, true); err != nil {
		return err
	}
	w.queries = &queries{f: os.NewFile(uintptr(queriesFD), "queries")}
	defer w.queries.Close()
	conn, err := rpc.New(keeper, options(w.serve))
	if err != nil {
		return err
	}
	w.conn = conn
	close(w.connected)
	<-conn.Done()
	w.cancel()
	w.endProxy()
	w.wg.Wait()
	for _, a := range w.arriving {
		a.end()
	}
	return conn.Close()
}

func (w *worker) serve(ctx context.Context, method string, body []byte, files []*os.File) (any, []*os.File, error) {
	<-w.connected
	defer closeAll(files)
	switch method {
	case callPrepare:
		return handle(body, func(o prepareOrder) (any, error) { return nil, w.prepare(o) })
	case callPolicy:
		return handle(body, func(o policyOrder) (any, error) { return nil, w.setPolicy(o) })
	case callConnection:
		return handle(body, func(a arrival) (any, error) {
			if len(files) != 1 {
				return nil, errors.New("a connection without a descriptor")
			}
			return nil, w.arrive(a, files[0])
		})
	case callStats:
		c := counts{DNS: w.dns.Stats(), TLS: w.tls.Stats()}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.proxy != nil {
			s := w.proxy.Stats()
			c.Proxy = &s
		}
		return c, nil, nil
	case postSecret:
		w.mu.Lock()
		defer w.mu.Unlock()
		close(w.changed)
		w.changed = make(chan struct{})
		return nil, nil, nil
	}
	return nil, nil, fmt.Errorf("a call of %q: there is no such", method)
}

// handle decodes the argument of a call and does it.
func handle[T any](body []byte, f func(T) (any, error)) (any, []*os.File, error) {
	var arg T
	if err := json.Unmarshal(body, &arg); err != nil {
		return nil, nil, fmt.Errorf("reading a call: %w", err)
	}
	reply, err := f(arg)
	return reply, nil, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// prepare confines this process, before it reads anything of a guest.
func (w *worker) prepare(o prepareOrder) (err error) {
	if w.roots, err = proxy.Roots(o.Roots); err != nil {
		return err
	}
	if o.Confined {
		walls, err := confine.Enter()
		if err != nil {
			return err
		}
		if err := confine.Lock(walls); err != nil {
			return err
		}
	}
	if err := w.setPolicy(o.Policy); err != nil {
		return err
	}
	w.mu.Lock()
	dns, tls := w.arriving[arrivesDNS], w.arriving[arrivesTLS]
	w.mu.Unlock()
	for _, serve := range []func() error{
		func() error { return w.dns.Serve(w.ctx, w.queries, dns) },
		func() error { return w.tls.Serve(w.ctx, tls) },
	} {
		w.wg.Go(func() {
			// Without one of its services the process is of no use. After its end the keeper starts another.
			defer w.conn.Close()
			if err := serve(); err != nil && !errors.Is(err, io.EOF) { // which is the keeper's end
				fmt.Fprintln(os.Stderr, "the network process:", err)
			}
		})
	}
	return nil
}

// setPolicy comes after the keeper has put the policy in force.
func (w *worker) setPolicy(o policyOrder) error {
	s, err := netpolicy.Compile(o.Policy, o.Identity, o.Environment)
	if err != nil {
		return err
	}
	w.tls.Recheck()
	w.dns.SetPolicy(o.Policy, s)
	if o.Proxy == nil {
		w.endProxy()
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	id, err := o.Proxy.Identity()
	if err != nil {
		return err
	}
	if w.proxy == nil {
		w.startProxy(id)
	} else {
		w.proxy.SetIdentity(id)
	}
	w.proxy.SetPolicy(o.Policy)
	return nil
}

// endProxy ends the proxy, if there is one. The lock must not be held: requests need it.
func (w *worker) endProxy() {
	w.mu.Lock()
	stop := w.stopProxy
	w.proxy, w.stopProxy = nil, nil
	w.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// startProxy starts the proxy. The lock must be held.
func (w *worker) startProxy(id *proxy.Identity) {
	p := proxy.New(proxy.Config{Identity: id, Rules: w, Names: w.dns, Secrets: w, Roots: w.roots, Dial: w.dial, Event: w.proxied})
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan struct{})
	in := w.arriving[arrivesProxy].again()
	w.arriving[arrivesProxy] = in
	go func() {
		defer close(ended)
		if err := p.Serve(ctx, in); err != nil {
			fmt.Fprintln(os.Stderr, "the network process:", err)
		}
	}()
	w.proxy, w.stopProxy = p, func() { cancel(); <-ended }
}

// arrive takes a connection of the guest.
func (w *worker) arrive(a arrival, f *os.File) error {
	c, err := tcpOf(f)
	if err != nil {
		return err
	}
	_ = c.SetKeepAlive(false) // see tlsname.ListenAt
	w.mu.Lock()
	in := w.arriving[a.Kind]
	if a.Kind == arrivesTLS {
		w.flows[a.Port] = a.Flow
	}
	w.mu.Unlock()
	if in == nil || !in.put(c) {
		_ = c.SetLinger(0)
		return errors.Join(errors.New("too many connections at once"), c.Close())
	}
	return nil
}

func tcpOf(f *os.File) (*net.TCPConn, error) {
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(errors.New("it is no TCP connection"), c.Close())
	}
	return t, nil
}

// soon is how long the keeper may take for what it does at once.
const soon = 30 * time.Second

// now asks the keeper for what it does at once.
func (w *worker) now(method string, arg, reply any) error {
	ctx, cancel := context.WithTimeout(w.ctx, soon)
	defer cancel()
	files, err := w.conn.Call(ctx, method, arg, reply)
	closeAll(files)
	return err
}

// connection asks the keeper for a connection.
func (w *worker) connection(ctx context.Context, method string, arg any) (*net.TCPConn, error) {
	files, err := w.conn.Call(ctx, method, arg, nil)
	defer closeAll(files)
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		return nil, errors.New("the keeper has passed no connection")
	}
	return tcpOf(files[0])
}

func (w *worker) ask(ctx context.Context, q resolver.Question) (answer []byte, err error) {
	files, err := w.conn.Call(ctx, callAsk, q, &answer)
	closeAll(files)
	return answer, err
}

// Pin implements resolver.Pinner.
func (w *worker) Pin(name string, a netip.Addr, ttl time.Duration) error {
	return w.now(callPin, pin{name, a, ttl}, nil)
}

// Checked implements tlsname.Flows.
func (w *worker) Checked(port uint16) (flow.Checked, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c, ok := w.flows[port]
	delete(w.flows, port)
	if !ok {
		return c, flow.ErrNoFlow
	}
	return c, nil
}

// Lives implements tlsname.Flows.
func (w *worker) Lives(c flow.Checked) (lives bool, err error) {
	err = w.now(callLives, c.Ref, &lives)
	return lives, err
}

// OpensName implements tlsname.Flows.
func (w *worker) OpensName(c flow.Checked, name string) (ok bool) {
	return w.now(callOpensName, named{c.Ref, name}, &ok) == nil && ok
}

func (w *worker) dialName(ctx context.Context, c flow.Checked, name string) (*net.TCPConn, error) {
	return w.connection(ctx, callDialName, named{c.Ref, name})
}

func (w *worker) refused(r tlsname.Refusal) {
	_ = w.now(callRefused, refusal{r.Flow.Ref, r.Reason, r.Name}, nil) // it fails with the connection to the keeper
}

// Opens implements proxy.Rules.
func (w *worker) Opens(peer netip.AddrPort, name string) (rule string, ok bool) {
	var o opened
	if w.now(callOpens, opening{peer, name}, &o) != nil {
		return "", false
	}
	return o.Rule, o.OK
}

func (w *worker) dial(ctx context.Context, peer netip.AddrPort, name string) (*net.TCPConn, error) {
	return w.connection(ctx, callDial, opening{peer, name})
}

// Secret implements proxy.Secrets.
func (w *worker) Secret(name string) (value string, ok bool, changed <-chan struct{}) {
	w.mu.Lock()
	changed = w.changed
	w.mu.Unlock()
	var v secretValue
	if w.now(callSecret, name, &v) != nil {
		return "", false, changed
	}
	return v.Value, v.OK, changed
}

func (w *worker) proxied(e proxy.Event) { _ = w.now(callProxied, e, nil) }

// arrivals is a listener whose connections the keeper has accepted.
type arrivals struct {
	waiting chan *net.TCPConn
	done    chan struct{}
	once    sync.Once
}

// maxArrivals bounds the connections that wait for a server.
const maxArrivals = 64

func newArrivals() *arrivals {
	return &arrivals{waiting: make(chan *net.TCPConn, maxArrivals), done: make(chan struct{})}
}

// again returns one like it that is open.
func (a *arrivals) again() *arrivals {
	a.end()
	return newArrivals()
}

func (a *arrivals) put(c *net.TCPConn) bool {
	select {
	case <-a.done:
		return false
	default:
	}
	select {
	case a.waiting <- c:
		return true
	default:
		return false
	}
}

// end resets connections that nobody has accepted.
func (a *arrivals) end() {
	_ = a.Close()
	for {
		select {
		case c := <-a.waiting:
			_ = c.SetLinger(0)
			_ = c.Close()
		default:
			return
		}
	}
}

// AcceptTCP implements tlsname.Listener.
func (a *arrivals) AcceptTCP() (*net.TCPConn, error) {
	select {
	case c := <-a.waiting:
		return c, nil
	case <-a.done:
		return nil, net.ErrClosed
	}
}

// Accept implements net.Listener.
func (a *arrivals) Accept() (net.Conn, error) {
	c, err := a.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Close implements net.Listener.
func (a *arrivals) Close() error {
	a.once.Do(func() { close(a.done) })
	return nil
}

// Addr implements net.Listener.
func (a *arrivals) Addr() net.Addr { return &net.TCPAddr{} }

// queries are the datagrams of a socket that the keeper has. On the way, each has the guest's address and port ahead.
type queries struct{ f *os.File }

// queryHeader is an IPv4 address and a port.
const queryHeader = 4 + 2

// maxQuery is what one has room for. The resolver takes less.
const maxQuery = 4096

func putHeader(b []byte, at netip.AddrPort) {
	a := at.Addr().Unmap().As4()
	copy(b, a[:])
	binary.BigEndian.PutUint16(b[4:], at.Port())
}

func header(b []byte) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b)), binary.BigEndian.Uint16(b[4:]))
}

// ReadFrom implements net.PacketConn.
func (q *queries) ReadFrom(p []byte) (int, net.Addr, error) {
	b := make([]byte, queryHeader+len(p))
	for {
		n, err := q.f.Read(b)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return 0, nil, os.ErrDeadlineExceeded // a net.Error, after which the resolver reads on
		case err != nil:
			return 0, nil, err
		}
		if n >= queryHeader {
			return copy(p, b[queryHeader:n]), net.UDPAddrFromAddrPort(header(b)), nil
		}
	}
}

// WriteTo implements net.PacketConn.
func (q *queries) WriteTo(p []byte, to net.Addr) (int, error) {
	at, ok := to.(*net.UDPAddr)
	if !ok || !at.AddrPort().Addr().Unmap().Is4() {
		return 0, fmt.Errorf("answering %v: it is no address of a guest", to)
	}
	b := make([]byte, queryHeader, queryHeader+len(p))
	putHeader(b, at.AddrPort())
	_, err := q.f.Write(append(b, p...))
	return len(p), err
}

func (q *queries) Close() error                       { return q.f.Close() }
func (q *queries) LocalAddr() net.Addr                { return &net.UDPAddr{} }
func (q *queries) SetDeadline(t time.Time) error      { return q.f.SetDeadline(t) }
func (q *queries) SetReadDeadline(t time.Time) error  { return q.f.SetReadDeadline(t) }
func (q *queries) SetWriteDeadline(t time.Time) error { return q.f.SetWriteDeadline(t) }
