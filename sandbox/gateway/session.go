package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
)

// session is a sandbox that is held awake for requests, with the connections to its guest. Its connections do not
// count as use of the VM: the lock does. So the sandbox is in use exactly as long as the session holds the lock, and
// a pooled connection keeps no VM awake. A session ends when its last request has left and Linger has passed, or when
// the VM must sleep or ends; its connections end with it, so none is used after a sleep.
//
// A session whose open requests are all idle streams is retired: it lets go of the lock and takes no new requests,
// but its connections go on until the VM sleeps. Bytes on them count as use.
type session struct {
	g        *Gateway
	id, name string
	wakes    bool // the request that opened it may wake the sandbox

	ctx    context.Context // ends with the session
	cancel context.CancelCauseFunc
	ready  chan struct{} // closed when it is open or has failed
	err    error         // of opening; set before ready is closed

	client *guest.Client
	h1, h2 *http.Transport // to HTTP/1.1 and to HTTP/2 servers

	// The gateway's mu guards these.
	open    int // requests
	streams int // of them, those that let the sandbox sleep
	timer   *time.Timer
	over    bool // it takes no more requests
	uses    map[*use]struct{}

	mu      sync.Mutex // guards what follows
	conns   map[*conn]struct{}
	lock    *sandbox.WakeLock // nil once let go
	touched atomic.Int64      // when use was last reported by a retired session, in Unix nanoseconds
	retired atomic.Bool
}

// use is one request's part in a session.
type use struct {
	s        *session
	first    bool // the session was opened for it
	idle     bool // it lets the sandbox sleep once it streams
	grant    Grant
	to       Route
	streamed bool        // the gateway's mu guards it
	revoke   func(error) // cuts it alone; nil until it is carried, and the gateway's mu guards it
}

// carries notes what cuts the use alone.
func (u *use) carries(revoke func(error)) {
	u.s.g.mu.Lock()
	defer u.s.g.mu.Unlock()
	u.revoke = revoke
}

// reviewEvery is how often open requests are looked at, whether their grants are still good.
const reviewEvery = 2 * time.Second

// errRevoked is the cause of the end of a request whose grant is no longer good.
var errRevoked = fmt.Errorf("%w any more", ErrToken)

// review cuts what was let in by a grant that is no longer good, until the gateway ends.
func (g *Gateway) review(by Revoker) {
	tick := time.NewTicker(reviewEvery)
	defer tick.Stop()
	for {
		select {
		case <-g.life.Done():
			return
		case <-tick.C:
		}
		g.mu.Lock()
		all := make([]*session, 0, len(g.live))
		for s := range g.live {
			all = append(all, s)
		}
		g.mu.Unlock()
		for _, s := range all {
			stands, err := by.Standing(s.id, s.name)
			if err != nil {
				continue // it is gone, or was renamed
			}
			var over []func(error)
			g.mu.Lock()
			for u := range s.uses {
				if u.revoke != nil && !stands(u.to, u.grant) {
					over = append(over, u.revoke)
				}
			}
			g.mu.Unlock()
			for _, revoke := range over {
				revoke(errRevoked)
			}
		}
	}
}

// use returns a use of the sandbox with that id, whose name is or was that of the route.
func (g *Gateway) use(ctx context.Context, id string, to Route, grant Grant) (*use, error) {
	l, name := g.o.Limits, to.Sandbox
	g.mu.Lock()
	switch {
	case g.closed:
		g.mu.Unlock()
		return nil, errClosed
	case g.requests >= l.Requests:
		g.mu.Unlock()
		return nil, fmt.Errorf("%w: %d requests are open", ErrBusy, l.Requests)
	case grant.Owner != "" && g.requestsOfOwner[grant.Owner] >= l.RequestsOfOwner:
		g.mu.Unlock()
		return nil, fmt.Errorf("%w: %d requests of the owner of %s are open", ErrBusy, l.RequestsOfOwner, name)
	case g.requestsOf[id] >= l.RequestsOf:
		g.mu.Unlock()
		return nil, fmt.Errorf("%w: %d requests of %s are open", ErrBusy, l.RequestsOf, name)
	}
	s := g.sessions[id]
	first := s == nil
	if first || !s.isReady() {
		ofOwner := grant.Owner != "" && g.waitingOfOwner[grant.Owner] >= max(l.Waiting/2, 1)
		if g.waiting >= l.Waiting || ofOwner || g.waitingOf[id] >= l.WaitingOf {
			g.mu.Unlock()
			return nil, fmt.Errorf("%w: too many requests wait for sandboxes to wake", ErrBusy)
		}
		g.waiting++
		g.waitingOf[id]++
		g.waitingOfOwner[grant.Owner]++
		defer func() {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.waiting--
			less(g.waitingOf, id)
			less(g.waitingOfOwner, grant.Owner)
		}()
	}
	if first {
		s = &session{g: g, id: id, name: name, wakes: grant.Wake, ready: make(chan struct{}), conns: map[*conn]struct{}{}, uses: map[*use]struct{}{}}
		// The wake must not end with the request that began it: others may wait for it.
		s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
		g.sessions[id] = s
		g.live[s] = struct{}{}
		g.all.Go(s.run)
	}
	s.open++
	g.requests++
	g.requestsOf[id]++
	if grant.Owner != "" {
		g.requestsOfOwner[grant.Owner]++
	}
	if s.timer != nil {
		s.timer.Stop()
	}
	u := &use{s: s, first: first, idle: grant.IdleStreams, grant: grant, to: to}
	s.uses[u] = struct{}{}
	g.mu.Unlock()
	select {
	case <-s.ready:
	case <-ctx.Done():
		u.leave()
		return nil, context.Cause(ctx)
	}
	err := s.err
	switch {
	case err == nil && s.name != name:
		// It was renamed. What is open goes on, and new requests open another session.
		g.mu.Lock()
		s.forget()
		g.mu.Unlock()
		err = errAgain
	case err == nil:
		return u, nil
	case errors.Is(err, sandbox.ErrNotRunning) && grant.Wake && !s.wakes:
		err = errAgain // it was opened for a request that must not wake it
	case errors.Is(err, sandbox.ErrNotRunning) && !grant.Wake:
		err = fmt.Errorf("%w: %w", ErrAsleep, err)
	}
	u.leave()
	return nil, err
}

func less(of map[string]int, key string) {
	if of[key]--; of[key] <= 0 {
		delete(of, key)
	}
}

func (s *session) isReady() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

// run opens the session and stays until it has ended.
func (s *session) run() {
	err := s.start()
	if err != nil {
		s.err = err
		close(s.ready)
		s.g.mu.Lock()
		defer s.g.mu.Unlock()
		s.cut(err)
		delete(s.g.live, s)
		return
	}
	asked := s.lock.Done() // closed by letGo as well
	close(s.ready)
	select {
	case <-asked:
		if !s.retired.Load() {
			s.g.mu.Lock()
			s.cut(errSleeps)
			s.g.mu.Unlock()
		}
	case <-s.ctx.Done():
	}
	<-s.ctx.Done()
	s.end()
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	delete(s.g.live, s)
}

// errSleeps is the cause of cut connections.
var errSleeps = fmt.Errorf("%w: the sandbox has gone to sleep or has ended", ErrBadServer)

// start wakes the sandbox and connects to its agent.
func (s *session) start() (err error) {
	ctx, cancel := context.WithTimeout(events.WithCause(s.ctx, events.Connection), s.g.o.Limits.WakeTime)
	defer cancel()
	b := s.g.host.Sandbox(s.name)
	if s.wakes {
		s.lock, err = b.WakeWithLock(ctx)
	} else {
		s.lock, err = b.WakeLock(ctx)
	}
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			s.lock.Release()
		}
	}()
	if err := s.check(); err != nil {
		return err
	}
	if err := s.g.host.State.EnsureAudit(s.name); err != nil {
		return err
	}
	if s.client, err = guest.Dial(ctx, guest.IdleDialer(s.g.host.State.VsockPath(s.name))); err != nil {
		return err
	}
	s.h1, s.h2 = s.transport(false), s.transport(true)
	return nil
}

// check fails if the session's name has passed to another sandbox.
func (s *session) check() error {
	r, err := s.g.host.State.Load(s.name)
	if err == nil && r.ID != s.id {
		err = errAgain
	}
	return err
}

// transport returns a transport to the guest's servers.
func (s *session) transport(h2 bool) *http.Transport {
	var p http.Protocols
	p.SetHTTP1(!h2)
	p.SetHTTP2(h2)
	p.SetUnencryptedHTTP2(h2)
	return &http.Transport{
		DialContext: s.dial, Protocols: &p, DisableCompression: true, MaxResponseHeaderBytes: maxResponseHeader,
		MaxIdleConns: maxIdleConns, MaxIdleConnsPerHost: maxIdleConns, ExpectContinueTimeout: time.Second,
		HTTP2:           &http.HTTP2Config{MaxReceiveBufferPerConnection: 1 << 20, MaxReceiveBufferPerStream: 256 << 10},
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, TLSHandshakeTimeout: dialTime, // see Grant.HTTPS
	}
}

const (
	// maxIdleConns bounds the pooled connections of a session.
	maxIdleConns = 64
	// dialTime is how long a guest may take to accept a connection.
	dialTime = 30 * time.Second
)

// dial connects to a port of the guest's loopback interface.
func (s *session) dial(ctx context.Context, _, address string) (net.Conn, error) {
	_, text, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, err
	}
	return s.connect(ctx, uint16(port))
}

// connect connects to a port of the guest's loopback interface: 127.0.0.1, or ::1 if nothing listens there.
func (s *session) connect(ctx context.Context, port uint16) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	stop := context.AfterFunc(s.ctx, cancel)
	defer stop()
	c, err := s.client.Dial(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if errors.Is(err, syscall.ECONNREFUSED) {
		var err6 error
		if c, err6 = s.client.Dial(ctx, "tcp", net.JoinHostPort("::1", strconv.Itoa(int(port)))); err6 == nil {
			err = nil
		} else {
			return nil, fmt.Errorf("%w: %w", ErrClosedPort, err)
		}
	}
	if refused, ok := errors.AsType[*guest.ForwardError](err); ok && refused.Code == agentpb.CodeLimit {
		err = fmt.Errorf("%w: %w", ErrBusy, err)
	}
	if err != nil {
		return nil, err
	}
	k := &conn{Conn: c, s: s}
	k.gone, k.leave = context.WithCancel(context.Background())
	if err := s.check(); err != nil {
		_ = c.Abort()
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		_ = c.Abort()
		return nil, context.Cause(s.ctx)
	}
	s.conns[k] = struct{}{}
	return k, nil
}

// conn is a connection to the guest.
type conn struct {
	*guest.Conn
	s     *session
	gone  context.Context // ends with it
	leave context.CancelFunc
}

// Read implements net.Conn.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.s.touch()
	return n, err
}

// Write implements net.Conn.
func (c *conn) Write(p []byte) (int, error) {
	c.s.touch()
	return c.Conn.Write(p)
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.s.mu.Lock()
	delete(c.s.conns, c)
	c.s.mu.Unlock()
	c.leave()
	return c.Conn.Close()
}

// touchEvery is how often bytes on idle streams are reported as use.
const touchEvery = time.Second

// touch reports bytes of a retired session to the VM's process as use.
func (s *session) touch() {
	if !s.retired.Load() {
		return
	}
	now, last := time.Now().UnixNano(), s.touched.Load()
	if now-last < int64(touchEvery) || !s.touched.CompareAndSwap(last, now) {
		return
	}
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	if s.g.closed || s.ctx.Err() != nil {
		return
	}
	s.g.all.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, touchEvery)
		defer cancel()
		// If that fails, the VM sleeps or ends, and cuts the connections.
		if lock, err := s.g.host.Sandbox(s.name).WakeLock(ctx); err == nil {
			lock.Release()
		}
	})
}

// stream notes that the request has become a stream. If its owner wants, the sandbox may sleep from now on.
func (u *use) stream() {
	if !u.idle {
		return
	}
	u.s.g.mu.Lock()
	defer u.s.g.mu.Unlock()
	if !u.streamed {
		u.streamed = true
		u.s.streams++
		u.s.linger()
	}
}

// leave ends the use.
func (u *use) leave() {
	s, g := u.s, u.s.g
	g.mu.Lock()
	defer g.mu.Unlock()
	g.requests--
	less(g.requestsOf, s.id)
	if u.grant.Owner != "" {
		less(g.requestsOfOwner, u.grant.Owner)
	}
	delete(s.uses, u)
	s.open--
	if u.streamed {
		s.streams--
	}
	if s.open == 0 && (!s.isReady() || s.over) {
		s.cut(errUnused)
		return
	}
	s.linger()
}

// errUnused is the cause of the end of a session that nobody waits for.
var errUnused = errors.New("nobody uses the session")

// linger has the session end, or retire, in a moment, if no request keeps the sandbox awake. The gateway's mu is held.
func (s *session) linger() {
	if s.over || s.open > s.streams {
		return
	}
	if s.timer != nil {
		s.timer.Reset(s.g.o.Limits.Linger)
		return
	}
	s.timer = time.AfterFunc(s.g.o.Limits.Linger, func() {
		s.g.mu.Lock()
		defer s.g.mu.Unlock()
		switch {
		case s.over || s.open > s.streams:
		case s.open == 0:
			s.cut(errUnused)
		default:
			s.forget()
			s.retired.Store(true)
			s.g.all.Go(s.letGo)
		}
	})
}

// forget has new requests open a new session. The gateway's mu is held.
func (s *session) forget() {
	s.over = true
	if s.g.sessions[s.id] == s {
		delete(s.g.sessions, s.id)
	}
}

// cut ends the session and all its requests. The gateway's mu is held.
func (s *session) cut(why error) {
	s.forget()
	s.cancel(why)
}

// end closes all that an ended session has. Its context has ended.
func (s *session) end() {
	s.h1.CloseIdleConnections()
	s.h2.CloseIdleConnections()
	s.mu.Lock()
	for c := range s.conns {
		_ = c.Abort()
	}
	clear(s.conns)
	s.mu.Unlock()
	_ = s.client.Close()
	s.letGo()
}

// letGo lets the VM sleep.
func (s *session) letGo() {
	s.mu.Lock()
	lock := s.lock
	s.lock = nil
	s.mu.Unlock()
	if lock != nil {
		lock.Release()
	}
}
