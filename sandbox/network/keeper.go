package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/netpolicy/resolver"
	"github.com/drowse-vm/drowse/netpolicy/tlsname"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// A Process is a confined network process: a *confine.Process.
type Process interface {
	// CPU is the processor time that it has used, also after its end.
	CPU() time.Duration
	Wait() error
	Close() error
}

// Times of a network process.
const (
	prepareTimeout = time.Minute
	answerTimeout  = 15 * time.Second // for what it does at once
	restartPause   = 10 * time.Second // from the start of one that has ended to the next
)

// keeper is the half of a network that has rights: it accepts, connects, asks name servers and pins addresses. It reads
// nothing of what a guest says, but has it read by the network process, which it starts when the first packet comes
// that needs it. That process may be in the hands of the guest: each of its calls is judged by the policy in force.
type keeper struct {
	n *Network
	// dial is tlsname.Dial, except in tests.
	dial func(context.Context, netip.AddrPort) (*net.TCPConn, error)

	mu      sync.Mutex // guards what follows; held while a process starts
	running *running   // nil if there is none
	begun   time.Time  // of the last start
	barred  error      // why there is no other
	closed  bool

	current atomic.Pointer[inForce]
	usage   usage
	// asked and dialled bound what the process has the keeper do, in its own limits.
	asked, pinned, dialled bucket
	failed                 atomic.Uint64 // checked connections that were not passed
	// pace bounds how fast the process asks for anything.
	pace *rpc.Pace

	countsMu sync.Mutex // guards what follows
	ended    counts     // of the processes that have ended, as they were last seen

	flowsMu sync.Mutex // guards what follows
	flows   map[uint64]*checked
	lastRef uint64
	refused tlsname.EventLimit
	proxied tlsname.EventLimit
	awaited map[string]bool // secrets whose coming is waited for
}

// usage counts the network processes of a VM, one after the other. Asking never waits for one that starts.
type usage struct {
	mu    sync.Mutex // guards what follows
	proc  Process    // nil if there is none, or it is this process
	total spec.NetworkProcess
	cpu   time.Duration // of those that have ended
}

// begins notes a process that starts; nil is this one.
func (u *usage) begins(p Process) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.proc = p
	u.total.Starts++
}

// ends notes the end of the process, with its verdict unless it was told to end.
func (u *usage) ends(told bool, verdict error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.proc != nil {
		u.cpu += u.proc.CPU()
		u.proc = nil
	}
	switch {
	case told:
	case errors.Is(verdict, confine.ErrRefused):
		u.total.Refused++
	default:
		u.total.Failed++
	}
}

func (u *usage) get() (spec.NetworkProcess, time.Duration) {
	u.mu.Lock()
	defer u.mu.Unlock()
	cpu := u.cpu
	if u.proc != nil {
		cpu += u.proc.CPU()
	}
	out := u.total
	out.CPUSeconds = cpu.Seconds()
	return out, cpu
}

// inForce is the policy that the link has.
type inForce struct {
	order policyOrder
	spec  *netpolicy.Spec
}

// running is a network process, or a worker in this process if this host cannot confine.
type running struct {
	proc    Process // nil in this process
	conn    *rpc.Conn
	queries *os.File
	wg      sync.WaitGroup
	seen    counts // guarded by the keeper's countsMu, and over
	over    bool
}

// checked is a flow whose name the process checks.
type checked struct {
	flow    flow.Checked
	dialled bool
}

func newKeeper(n *Network) *keeper {
	return &keeper{n: n, dial: tlsname.Dial, flows: map[uint64]*checked{}, awaited: map[string]bool{},
		pace: rpc.NewPace(callBurst, callsPerSecond)}
}

var errNone = errors.New("the VM's network process is not there")

// get returns the network process, and starts it if need be.
func (k *keeper) get() (*running, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case k.running != nil:
		return k.running, nil
	case k.closed:
		return nil, errNone
	case k.barred != nil:
		return nil, k.barred
	case !k.begun.IsZero() && time.Since(k.begun) < restartPause:
		return nil, errNone
	}
	k.begun = time.Now()
	r, err := k.start()
	if err != nil {
		k.n.log.Error("the VM's network process does not start: names are not found, and connections refused", "error", err)
		return nil, err
	}
	k.running = r
	k.usage.begins(r.proc)
	r.wg.Go(func() { k.relayAnswers(r) })
	k.n.wg.Go(func() { k.watch(r) })
	return r, nil
}

func (k *keeper) start() (_ *running, err error) {
	mine, its, err := rpc.Pair()
	if err != nil {
		return nil, err
	}
	queries, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("socketpair", err), mine.Close(), its.Close())
	}
	r := &running{queries: os.NewFile(uintptr(queries[0]), "queries")}
	itsQueries := os.NewFile(uintptr(queries[1]), "queries of the network process")
	if k.n.config.Start != nil {
		r.proc, err = k.n.config.Start(k.n.ctx, []*os.File{its, itsQueries})
	}
	confined := r.proc != nil
	if err != nil || confined {
		err = errors.Join(err, its.Close(), itsQueries.Close())
	} else {
		r.wg.Go(func() {
			fd, err := unix.FcntlInt(itsQueries.Fd(), unix.F_DUPFD_CLOEXEC, 0)
			if err = errors.Join(err, itsQueries.Close()); err == nil {
				err = newWorker().run(its, fd)
			}
			if err != nil {
				k.n.log.Error("serving the VM's network", "error", err)
			}
		})
	}
	if err == nil {
		r.conn, err = rpc.New(mine, options(k.serve))
	}
	if err != nil {
		return nil, errors.Join(err, mine.Close(), r.close())
	}
	roots, err := proxy.ExtraRoots()
	if err == nil {
		ctx, cancel := context.WithTimeout(k.n.ctx, prepareTimeout)
		defer cancel()
		_, err = r.conn.Call(ctx, callPrepare, prepareOrder{Confined: confined, Roots: roots, Policy: k.current.Load().order}, nil)
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// close kills the process. All its connections are reset.
func (r *running) close() error {
	var errs []error
	if r.conn != nil {
		errs = append(errs, r.conn.Close())
	}
	if r.proc != nil {
		errs = append(errs, r.proc.Close())
	}
	errs = append(errs, r.queries.Close())
	r.wg.Wait()
	return errors.Join(errs...)
}

// watch waits for the end of the process.
func (k *keeper) watch(r *running) {
	<-r.conn.Done()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.running = nil
	err := r.close()
	if r.proc != nil {
		err = cmp.Or(r.proc.Wait(), err)
	}
	k.usage.ends(k.closed, err)
	k.countsMu.Lock()
	k.ended, r.over = k.ended.plus(r.seen).nowOpen(counts{}), true
	k.countsMu.Unlock()
	k.flowsMu.Lock()
	clear(k.flows)
	k.flowsMu.Unlock()
	switch {
	case k.closed:
	case errors.Is(err, confine.ErrRefused):
		k.barred = fmt.Errorf("%w: it was in the hands of its guest, or drowse has a bug", err)
		k.n.log.Error("the VM's network process was ended: names, checked connections and the proxy are refused until it wakes anew", "error", err)
	default:
		k.n.log.Error("the VM's network process has ended: the next query or connection starts another", "error", err)
	}
}

// close ends the process for good.
func (k *keeper) close() {
	k.mu.Lock()
	k.closed = true
	r := k.running
	k.mu.Unlock()
	if r != nil {
		_ = r.conn.Close() // watch does the rest
	}
}

// setPolicy has the process follow a policy that the link has. If it does not, it is ended, with all connections.
func (k *keeper) setPolicy(p *inForce) {
	k.current.Store(p)
	k.mu.Lock()
	r := k.running
	k.mu.Unlock()
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(k.n.ctx, answerTimeout)
	defer cancel()
	if _, err := r.conn.Call(ctx, callPolicy, p.order, nil); err != nil {
		k.n.log.Error("the VM's network process does not follow the policy: it is ended", "error", err)
		k.n.wg.Go(func() { _ = r.conn.Close() }) // it waits for calls, which may wait for the network
	}
}

// stats returns the counts of all processes. Of one that has ended, those since stats was called last are not known.
func (k *keeper) stats() (c counts) {
	k.mu.Lock()
	r := k.running
	k.mu.Unlock()
	var now counts
	err := errNone
	if r != nil {
		ctx, cancel := context.WithTimeout(k.n.ctx, answerTimeout)
		defer cancel()
		_, err = r.conn.Call(ctx, callStats, none{}, &now)
	}
	k.countsMu.Lock()
	defer k.countsMu.Unlock()
	c = k.ended
	if r != nil && !r.over {
		if err == nil {
			r.seen = now
		}
		c = c.plus(r.seen)
	}
	c.TLS.Failed += k.failed.Load()
	return c
}

// relayQueries passes the guest's queries to the process until ctx ends. Those that it has no room for are lost.
func (k *keeper) relayQueries(ctx context.Context, pc net.PacketConn) error {
	stop := context.AfterFunc(ctx, func() { pc.Close() })
	defer stop()
	k.queriesAt(pc)
	defer k.queriesAt(nil)
	b := make([]byte, queryHeader+maxQuery)
	for {
		n, from, err := pc.ReadFrom(b[queryHeader:])
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("reading the guest's queries: %w", err)
		}
		at, ok := from.(*net.UDPAddr)
		if !ok || !k.isGuest(at.AddrPort().Addr()) {
			continue
		}
		r, err := k.get()
		if err != nil {
			continue
		}
		putHeader(b, at.AddrPort())
		_ = r.queries.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = r.queries.Write(b[:queryHeader+n])
	}
}

func (k *keeper) isGuest(a netip.Addr) bool {
	a = a.Unmap()
	return a == k.n.address || a == netpolicy.TheWire.Guest4
}

func (k *keeper) queriesAt(pc net.PacketConn) {
	k.n.queries.Store(&pc)
}

// relayAnswers passes answers of the process to the guest, and to nobody else.
func (k *keeper) relayAnswers(r *running) {
	b := make([]byte, queryHeader+maxQuery)
	for {
		n, err := r.queries.Read(b)
		if err != nil {
			return
		}
		k.pace.Call(b[:n])
		if pc := k.n.queries.Load(); n > queryHeader && pc != nil && *pc != nil && k.isGuest(header(b).Addr()) {
			_, _ = (*pc).WriteTo(b[queryHeader:n], net.UDPAddrFromAddrPort(header(b)))
		}
	}
}

// accept passes connections of the guest to the process until ctx ends.
func (k *keeper) accept(ctx context.Context, ln *net.TCPListener, kind string) error {
	defer ln.Close()
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	for {
		c, err := ln.AcceptTCP()
		if ctx.Err() != nil {
			if err == nil {
				reset(c)
			}
			return nil
		}
		if tlsname.Passing(err) {
			// For example, this process has too many open files: new connections wait.
			_ = wait.For(ctx, 100*time.Millisecond)
			continue
		}
		if err != nil {
			return fmt.Errorf("accepting connections of the guest: %w", err)
		}
		if err := k.pass(ctx, c, kind); err != nil {
			if kind == arrivesTLS {
				k.failed.Add(1)
			}
			reset(c)
		}
	}
}

func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// pass gives the process a connection of the guest.
func (k *keeper) pass(ctx context.Context, c *net.TCPConn, kind string) error {
	a := arrival{Kind: kind}
	if kind == arrivesTLS {
		from, err := netip.ParseAddrPort(c.RemoteAddr().String())
		if err != nil {
			return err
		}
		a.Port = from.Port()
		if a.Flow, err = k.n.link.Checked(a.Port); err != nil {
			return err
		}
		if err := k.register(&a.Flow); err != nil {
			return err
		}
	}
	r, err := k.get()
	if err != nil {
		return err
	}
	f, err := c.File()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if _, err := r.conn.Call(ctx, callConnection, a, nil, f); err != nil {
		return err
	}
	return c.Close()
}

// register gives a flow its number. Flows that have ended make room.
func (k *keeper) register(c *flow.Checked) error {
	k.flowsMu.Lock()
	defer k.flowsMu.Unlock()
	if len(k.flows) >= 2*tlsname.MaxConnections {
		for ref, f := range k.flows {
			if lives, err := k.n.link.Lives(f.flow); err == nil && !lives {
				delete(k.flows, ref)
			}
		}
		if len(k.flows) >= 2*tlsname.MaxConnections {
			return errors.New("too many checked connections at once")
		}
	}
	if c.Ref == 0 { // else the link has given it one
		k.lastRef++
		c.Ref = k.lastRef
	}
	k.flows[c.Ref] = &checked{flow: *c}
	return nil
}

func (k *keeper) flow(ref uint64) (flow.Checked, error) {
	k.flowsMu.Lock()
	defer k.flowsMu.Unlock()
	f := k.flows[ref]
	if f == nil {
		return flow.Checked{}, flow.ErrNoFlow
	}
	return f.flow, nil
}

// once returns a flow that has not been connected yet.
func (k *keeper) once(ref uint64) (flow.Checked, error) {
	k.flowsMu.Lock()
	defer k.flowsMu.Unlock()
	f := k.flows[ref]
	if f == nil || f.dialled {
		return flow.Checked{}, flow.ErrNoFlow
	}
	f.dialled = true
	return f.flow, nil
}

var (
	errRefused = errors.New("the policy does not allow it")
	errBusy    = errors.New("more than the policy allows in this time")
)

// serve judges the calls of the network process.
func (k *keeper) serve(ctx context.Context, method string, body []byte, files []*os.File) (any, []*os.File, error) {
	closeAll(files)
	k.pace.Call(body)
	now := k.current.Load()
	p := now.order.Policy
	switch method {
	case callAsk:
		return handle(body, func(q resolver.Question) (any, error) {
			if !asks(p, q.Name) || q.Type != dns.TypeA && q.Type != dns.TypeAAAA || !slices.Contains(p.DNS.Upstreams, q.Server) {
				return nil, errRefused
			}
			// A query asks each server at most twice.
			per := queriesOf(p) * uint64(2*len(p.DNS.Upstreams))
			if !k.asked.take(per, 2*per) {
				return nil, errBusy
			}
			return q.Ask(ctx)
		})
	case callPin:
		return handle(body, func(a pin) (any, error) {
			if !asks(p, a.Name) || !a.Address.IsValid() || !now.spec.Public(a.Address.Unmap()) {
				return nil, errRefused
			}
			if per := queriesOf(p) * resolver.MaxAddresses; !k.pinned.take(per, 2*per) {
				return nil, errBusy
			}
			return nil, k.n.link.Pin(a.Name, a.Address, min(max(a.TTL, resolver.MinPin), resolver.MaxPin))
		})
	case callLives:
		return handle(body, func(ref uint64) (any, error) {
			f, err := k.flow(ref)
			if err != nil {
				return false, nil
			}
			return k.n.link.Lives(f)
		})
	case callOpensName:
		return handle(body, func(a named) (any, error) {
			f, err := k.flow(a.Flow)
			return err == nil && netpolicy.ValidName(a.Name) && k.n.link.OpensName(f, a.Name), nil
		})
	case callDialName:
		var c *net.TCPConn
		_, _, err := handle(body, func(a named) (_ any, err error) {
			f, err := k.once(a.Flow)
			if err != nil {
				return nil, err
			}
			if !netpolicy.ValidName(a.Name) || !k.n.link.OpensName(f, a.Name) {
				return nil, errRefused
			}
			k.n.flows.Named(f, a.Name)
			c, err = k.dial(ctx, f.Peer)
			return nil, err
		})
		return handOver(c, err)
	case callOpens:
		return handle(body, func(a opening) (any, error) {
			rule, ok := k.opens(p, a)
			return opened{rule, ok}, nil
		})
	case callDial:
		var c *net.TCPConn
		_, _, err := handle(body, func(a opening) (_ any, err error) {
			if _, ok := k.opens(p, a); !ok {
				return nil, errRefused
			}
			limit := p.Limits.Egress.OrDefault().Connections
			if !k.dialled.take(limit.PerSecond, cmp.Or(limit.Burst, max(limit.PerSecond/10, 32))) {
				return nil, errBusy
			}
			c, err = k.dial(ctx, a.Peer)
			return nil, err
		})
		return handOver(c, err)
	case callSecret:
		return handle(body, func(name string) (any, error) {
			if !p.ProxyOn() || !p.Injects(name) {
				return nil, errRefused
			}
			return k.secret(rpc.Peer(ctx), name), nil
		})
	case callRefused:
		return handle(body, func(a refusal) (any, error) { return nil, k.tellRefused(a) })
	case callProxied:
		return handle(body, func(e proxy.Event) (any, error) { return nil, k.tellProxied(p, e) })
	}
	return nil, nil, fmt.Errorf("a call of %q: there is no such", method)
}

// asks reports whether a policy resolves a name.
func asks(p *netpolicy.Policy, name string) bool {
	return p.DNS != nil && len(name) <= 253 && p.HasName(name)
}

// queriesOf returns how many queries a second a policy with a resolver allows.
func queriesOf(p *netpolicy.Policy) uint64 {
	return uint64(cmp.Or(p.DNS.QueriesPerSecond, resolver.DefaultRate))
}

func (k *keeper) opens(p *netpolicy.Policy, a opening) (rule string, ok bool) {
	if !p.ProxyOn() || a.Name != "" && !netpolicy.ValidName(a.Name) {
		return "", false
	}
	return k.n.link.Opens(a.Peer, a.Name)
}

func handOver(c *net.TCPConn, err error) (any, []*os.File, error) {
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	f, err := c.File()
	if err != nil {
		return nil, nil, err
	}
	return nil, []*os.File{f}, nil
}

// secret returns a secret for a request. If there is none, the process hears when there may be.
func (k *keeper) secret(conn *rpc.Conn, name string) secretValue {
	value, ok, changed := k.n.config.Secrets.Secret(name)
	if ok {
		return secretValue{value, true}
	}
	k.flowsMu.Lock()
	defer k.flowsMu.Unlock()
	if k.awaited[name] {
		return secretValue{}
	}
	k.awaited[name] = true
	k.n.wg.Go(func() {
		select {
		case <-changed:
		case <-conn.Done():
		case <-k.n.ctx.Done():
		}
		k.flowsMu.Lock()
		delete(k.awaited, name)
		k.flowsMu.Unlock()
		_ = conn.Post(postSecret, name) // the connection has ended
	})
	return secretValue{}
}

// tlsReasons are why a connection is refused for its name.
var tlsReasons = []netpolicy.Reason{netpolicy.ReasonTLSName, netpolicy.ReasonTLSNoName, netpolicy.ReasonTLSECH,
	netpolicy.ReasonTLSHello, netpolicy.ReasonTLSTimeout, netpolicy.ReasonTLSBusy}

// tellRefused records what the process says of a connection of the guest. Each is refused once.
func (k *keeper) tellRefused(a refusal) error {
	k.flowsMu.Lock()
	f := k.flows[a.Flow]
	delete(k.flows, a.Flow)
	suppressed, ok := k.refused.Take()
	k.flowsMu.Unlock()
	if f == nil || !slices.Contains(tlsReasons, a.Reason) || a.Name != "" && !netpolicy.ValidName(a.Name) {
		return errRefused
	}
	k.n.refused(tlsname.Refusal{Flow: f.flow, Reason: a.Reason, Name: a.Name, Quiet: !ok, Suppressed: suppressed})
	return nil
}

// tellProxied records an event of the proxy, which is of this VM alone.
func (k *keeper) tellProxied(p *netpolicy.Policy, e proxy.Event) error {
	_, err := proxy.ParseTarget(e.Host, 1)
	known := e.Secret == ""
	if !known {
		known = !slices.ContainsFunc(strings.Split(e.Secret, ","), func(s string) bool { return !p.Injects(s) })
	}
	if !slices.Contains(append([]netpolicy.Reason{netpolicy.ReasonInject, netpolicy.ReasonProxy, netpolicy.ReasonConnRate}, tlsReasons...), e.Reason) ||
		err != nil || !known || e.Status < 0 || e.Status > 999 {
		return errRefused
	}
	if e.Rule = ""; e.Peer.IsValid() {
		rule, ok := k.n.link.Opens(e.Peer, "")
		if !ok && netpolicy.ValidName(e.Host) {
			rule, _ = k.n.link.Opens(e.Peer, e.Host)
		}
		e.Rule = rule
	}
	k.flowsMu.Lock()
	suppressed, ok := k.proxied.Take()
	k.flowsMu.Unlock()
	if e.Suppressed += suppressed; ok {
		k.n.proxied(e)
	}
	return nil
}

// bucket bounds how often something is done. The zero value is full.
type bucket struct {
	once sync.Once
	of   *rate.Limiter
}

func (b *bucket) take(perSecond, burst uint64) bool {
	b.once.Do(func() { b.of = rate.NewLimiter(rate.Limit(perSecond), int(burst)) })
	b.of.SetLimit(rate.Limit(perSecond)) // of the policy that is in force now
	b.of.SetBurst(int(burst))
	return b.of.Allow()
}
