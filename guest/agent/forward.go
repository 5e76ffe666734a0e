package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/relay"
)

const (
	// maxForwards bounds the connections of the forward port that are served at the same time. The agent answers
	// more with CodeLimit. The device has room for 1024 in all.
	maxForwards = 768
	// maxPending bounds a listener's connections that were announced and not accepted.
	maxPending = 64
	// forwardRequestTime is how long the host may take for its request.
	forwardRequestTime = 30 * time.Second
	// maxDatagramForwards bounds the UDP connections among them. Each has buffers for two datagrams.
	maxDatagramForwards = 64
	// acceptPause is how long a listener that is out of descriptors or memory waits.
	acceptPause = 100 * time.Millisecond
	// defaultDialTime and maxDialTime bound a dial in the guest.
	defaultDialTime = 30 * time.Second
	maxDialTime     = 5 * time.Minute
)

// forwards holds the connections and listeners that the host has opened at the forward port. The zero value is
// ready.
type forwards struct {
	connections // the host's ends
	wg          sync.WaitGroup
	last        atomic.Uint64 // latest token
	datagrams   atomic.Int32  // connections of UDP

	listenMu  sync.Mutex
	listeners map[uint64]*forwardListener
}

// forwardListener is a listener in the guest. It lives as long as its connection.
type forwardListener struct {
	net.Listener
	room   chan struct{} // has an element for each pending connection, and one for the next
	closed chan struct{}

	mu      sync.Mutex
	pending map[uint64]net.Conn // nil once it is closed
}

// ServeForward serves the forward port (see agentpb.ForwardPort) on l until ctx ends or
// Close is called, and closes l.
func (s *Server) ServeForward(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	f := &s.forwards
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer func() {
		cancel()
		stop()
		l.Close()
		f.close()
		f.wg.Wait()
	}()
	for {
		c, err := accept(l, ctx.Done())
		switch {
		case err == nil:
		case ctx.Err() != nil || errors.Is(err, net.ErrClosed) || errors.Is(err, os.ErrClosed):
			return nil
		default:
			return err
		}
		switch f.add(c, maxForwards) {
		case agentpb.CodeOK:
			f.wg.Go(func() {
				defer f.remove(c)
				f.serve(ctx, c)
			})
		case agentpb.CodeLimit:
			// The answer fits into the empty buffer of a new connection: this does not block.
			_ = answer(c, agentpb.CodeLimit, fmt.Sprintf("%d connections are open, the limit", maxForwards))
			c.Close()
		default:
			c.Close()
		}
	}
}

// accept accepts a connection. While descriptors or memory are short, the connection waits in the kernel's queue.
func accept(l net.Listener, done <-chan struct{}) (net.Conn, error) {
	for {
		c, err := l.Accept()
		if !exhausted(err) {
			return c, err
		}
		select {
		case <-time.After(acceptPause):
		case <-done:
			return nil, err
		}
	}
}

// token returns a number that no listener or connection of this agent has had.
func (f *forwards) token() uint64 { return f.last.Add(1) }

// serve serves one connection of the host to its end.
func (f *forwards) serve(ctx context.Context, c net.Conn) {
	defer func() {
		if r := recover(); r != nil { // one bad request must not take the machine's init down
			fmt.Fprintf(os.Stderr, "drowse-agent: forward: %v\n", r)
		}
	}()
	m, payload, err := readRequest(c)
	if err != nil {
		if errors.Is(err, agentpb.ErrForward) {
			_ = answer(c, agentpb.CodeInvalid, err.Error())
		}
		return
	}
	switch m.Op {
	case agentpb.OpDial:
		f.dial(ctx, c, m, string(payload))
	case agentpb.OpListen:
		f.listen(ctx, c, m, string(payload))
	case agentpb.OpAccept:
		f.accept(c, binary.BigEndian.Uint64(payload), binary.BigEndian.Uint64(payload[agentpb.TokenSize:]))
	}
}

func readRequest(c net.Conn) (m agentpb.ForwardRequest, payload []byte, err error) {
	if err := c.SetReadDeadline(time.Now().Add(forwardRequestTime)); err != nil {
		return m, nil, err
	}
	var head [agentpb.ForwardRequestSize]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return m, nil, err
	}
	if err := m.Decode(&head); err != nil {
		return m, nil, err
	}
	payload = make([]byte, m.Length)
	if _, err := io.ReadFull(c, payload); err != nil {
		return m, nil, err
	}
	return m, payload, c.SetReadDeadline(time.Time{})
}

// answer sends an answer. It cuts a text that is too long.
func answer(c net.Conn, code agentpb.ForwardCode, text string) error {
	text = text[:min(len(text), agentpb.MaxForwardText)]
	var head [agentpb.ForwardAnswerSize]byte
	(&agentpb.ForwardAnswer{Code: code, Length: len(text)}).Encode(&head)
	_, err := c.Write(append(head[:], text...))
	return err
}

// dial connects to a socket of the guest, or to one that the guest can reach.
func (f *forwards) dial(ctx context.Context, c net.Conn, m agentpb.ForwardRequest, address string) {
	limit := defaultDialTime
	if m.TimeoutMs > 0 {
		limit = min(time.Duration(m.TimeoutMs)*time.Millisecond, maxDialTime)
	}
	switch m.Network {
	case agentpb.TCP, agentpb.Unix:
	case agentpb.UDP:
		defer f.datagrams.Add(-1)
		if f.datagrams.Add(1) > maxDatagramForwards {
			_ = answer(c, agentpb.CodeLimit, fmt.Sprintf("%d sockets of UDP are open, the limit", maxDatagramForwards))
			return
		}
	default:
		_ = answer(c, agentpb.CodeInvalid, m.Network.String()+" is not served")
		return
	}
	d := net.Dialer{Timeout: limit}
	to, err := d.DialContext(ctx, m.Network.String(), address)
	if err != nil {
		_ = answer(c, codeOf(err), err.Error())
		return
	}
	join(c, to)
}

// join tells the host that the socket is connected, and carries its bytes or datagrams.
func join(c, to net.Conn) {
	end := relay.Socket(to)
	if err := answer(c, agentpb.CodeOK, to.LocalAddr().String()); err != nil {
		_ = end.Reset()
		return
	}
	if _, ok := to.(*net.UDPConn); ok {
		relay.JoinDatagrams(relay.NewStream(c), to)
		return
	}
	_, _, _ = relay.Join(relay.NewStream(c), end) // each side sees how the other ended
}

// listen listens as long as c lives, and announces incoming connections there.
func (f *forwards) listen(ctx context.Context, c net.Conn, m agentpb.ForwardRequest, address string) {
	if m.Network != agentpb.TCP && m.Network != agentpb.Unix {
		_ = answer(c, agentpb.CodeInvalid, m.Network.String()+" is not served")
		return
	}
	var lc net.ListenConfig
	inner, err := lc.Listen(ctx, m.Network.String(), address)
	if err != nil {
		_ = answer(c, codeOf(err), err.Error())
		return
	}
	l := &forwardListener{Listener: inner, room: make(chan struct{}, maxPending), closed: make(chan struct{}), pending: make(map[uint64]net.Conn)}
	token := f.token()
	f.listenMu.Lock()
	if f.listeners == nil {
		f.listeners = make(map[uint64]*forwardListener)
	}
	f.listeners[token] = l
	f.listenMu.Unlock()
	var wg sync.WaitGroup
	defer func() {
		f.listenMu.Lock()
		delete(f.listeners, token)
		f.listenMu.Unlock()
		l.end()
		wg.Wait()
	}()
	text := binary.BigEndian.AppendUint64(nil, token)
	if err := answer(c, agentpb.CodeOK, string(text)+inner.Addr().String()); err != nil {
		return
	}
	wg.Go(func() {
		l.announce(f, c)
		// Wakes the Read below. serve closes the connection.
		_ = c.SetReadDeadline(time.Unix(1, 0))
	})
	// agentpb.EndListener from the host or the end of the connection ends the listener. The host takes the end of
	// the connection as the sign that the address is free: the listener closes first.
	var b [1]byte
	_, _ = c.Read(b[:])
	// An announcement that the host does not read must not keep the listener open.
	_ = c.SetWriteDeadline(time.Unix(1, 0))
}

// announce accepts connections and announces them on c, until the listener or c is closed.
func (l *forwardListener) announce(f *forwards, c net.Conn) {
	for {
		// When too many are pending, the next ones wait in the kernel's queue.
		select {
		case l.room <- struct{}{}:
		case <-l.closed:
			return
		}
		conn, err := accept(l, l.closed)
		if err != nil {
			return
		}
		token := f.token()
		l.mu.Lock()
		closed := l.pending == nil
		if !closed {
			l.pending[token] = conn
		}
		l.mu.Unlock()
		if closed {
			_ = relay.Socket(conn).Reset()
			return
		}
		from := conn.RemoteAddr().String()
		from = from[:min(len(from), agentpb.MaxForwardAddress)]
		var head [agentpb.AnnouncementSize]byte
		(&agentpb.Announcement{Token: token, Length: len(from)}).Encode(&head)
		if _, err := c.Write(append(head[:], from...)); err != nil {
			return
		}
	}
}

// take returns the pending connection with the token, or nil.
func (l *forwardListener) take(token uint64) net.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	conn := l.pending[token]
	if conn != nil {
		delete(l.pending, token)
		<-l.room
	}
	return conn
}

// end closes the listener and resets the connections that the host has not accepted.
func (l *forwardListener) end() {
	close(l.closed)
	l.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, conn := range l.pending {
		_ = relay.Socket(conn).Reset()
	}
	l.pending = nil
}

// accept hands a pending connection to the host.
func (f *forwards) accept(c net.Conn, listener, token uint64) {
	f.listenMu.Lock()
	l := f.listeners[listener]
	f.listenMu.Unlock()
	var conn net.Conn
	if l != nil {
		conn = l.take(token)
	}
	if conn == nil {
		_ = answer(c, agentpb.CodeNotFound, "the connection is gone")
		return
	}
	join(c, conn)
}

// codeOf returns the code of an error of a dial or a listen.
func codeOf(err error) agentpb.ForwardCode {
	var (
		dns     *net.DNSError
		timeout interface{ Timeout() bool }
		bad     *net.AddrError
	)
	for _, f := range agentpb.ForwardErrors {
		if errors.Is(err, f.Err) {
			return f.Code
		}
	}
	switch {
	case exhausted(err), errors.Is(err, syscall.EAGAIN):
		return agentpb.CodeLimit
	case errors.As(err, &bad):
		return agentpb.CodeInvalid
	case errors.As(err, &timeout) && timeout.Timeout():
		return agentpb.CodeTimeout
	case errors.As(err, &dns):
		return agentpb.CodeUnreachable
	}
	return agentpb.CodeFailed
}

// exhausted reports whether a call may succeed once others have released descriptors or memory.
func exhausted(err error) bool {
	return slices.ContainsFunc([]syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS}, func(e syscall.Errno) bool { return errors.Is(err, e) })
}
