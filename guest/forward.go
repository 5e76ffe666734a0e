package guest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/guest/internal/relay"
)

// Conn is a connection to a socket in the guest. Read returns io.EOF only when the peer has ended its direction. If
// the connection was reset or cut, the error is syscall.ECONNRESET; when the VM sleeps all connections are cut.
// CloseWrite ends one direction, Close both, and Abort resets the peer. See relay.Stream for the rest.
type Conn = relay.Stream

// ForwardError is the agent's answer to a Dial or Listen that failed. It matches the errors of package syscall for
// its code (ECONNREFUSED, EHOSTUNREACH, ETIMEDOUT, EADDRINUSE among them), and fs.ErrNotExist and fs.ErrPermission.
type ForwardError struct {
	Op, Network, Address string
	Code                 agentpb.ForwardCode
	Message              string // the agent's words, made printable
}

// Error implements error.
func (e *ForwardError) Error() string {
	return fmt.Sprintf("guest: %s %s %s in the guest: %s", e.Op, e.Network, e.Address, e.Message)
}

// Is implements errors.Is.
func (e *ForwardError) Is(target error) bool {
	for _, f := range agentpb.ForwardErrors {
		if f.Err == target {
			return f.Code == e.Code
		}
	}
	return false
}

// guestAddr is the address of a socket in the guest, in the guest's words.
type guestAddr struct{ network, address string }

func (a guestAddr) Network() string { return a.network }
func (a guestAddr) String() string  { return a.address }

// Dial connects to a socket from within the guest. The agent does it, with root's rights there. The network is
// "tcp", with an address "host:port" whose host the guest looks up; "unix", with a path; or "udp", whose datagrams
// follow their length (2 bytes): package forward carries them. The error is a *ForwardError if the guest could not
// connect.
func (c *Client) Dial(ctx context.Context, network, address string) (*Conn, error) {
	m := agentpb.ForwardRequest{Op: agentpb.OpDial, Length: len(address)}
	if deadline, ok := ctx.Deadline(); ok {
		m.TimeoutMs = uint32(min(max(time.Until(deadline).Milliseconds(), 1), 1<<31))
	}
	k, err := c.carriedTo(ctx, network, address)
	if err != nil {
		return nil, err
	}
	conn, text, err := c.forward(ctx, "dial", network, address, m, []byte(address))
	if err != nil {
		k.made(nil, err)
		return nil, err
	}
	s := relay.NewStream(conn)
	s.Local, s.Remote = guestAddr{network, printable(text)}, guestAddr{network, address}
	k.made(s, nil)
	return s, nil
}

// forward makes a request at the forward port. It returns the connection for what follows, and the answer's text.
func (c *Client) forward(ctx context.Context, op, network, address string, m agentpb.ForwardRequest, payload []byte) (_ net.Conn, text string, err error) {
	n, ok := agentpb.ParseNetwork(network)
	if !ok {
		return nil, "", fmt.Errorf("guest: %s %s: use the network tcp, unix or udp", op, network)
	}
	if len(address) == 0 || len(address) > agentpb.MaxForwardAddress {
		return nil, "", fmt.Errorf("guest: %s %s: an address of %d bytes, at most %d", op, network, len(address), agentpb.MaxForwardAddress)
	}
	m.Network = n
	conn, err := c.dial(ctx, agentpb.ForwardPort)
	if err != nil {
		return nil, "", err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	interrupt := func() { _ = conn.SetDeadline(time.Unix(1, 0)) }
	stop, closing := context.AfterFunc(ctx, interrupt), context.AfterFunc(c.closing, interrupt)
	defer stop()
	defer closing()
	lost := func(err error) error {
		if ctx.Err() != nil {
			return fmt.Errorf("guest: %s %s %s: %w", op, network, address, ctx.Err())
		}
		return fmt.Errorf("guest: %s %s %s: %w: %w", op, network, address, ErrConnectionLost, err)
	}
	var head [agentpb.ForwardRequestSize]byte
	m.Encode(&head)
	if _, err := conn.Write(append(head[:], payload...)); err != nil {
		return nil, "", lost(err)
	}
	var b [agentpb.ForwardAnswerSize]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return nil, "", lost(err)
	}
	var a agentpb.ForwardAnswer
	if err := a.Decode(&b); err != nil {
		return nil, "", fmt.Errorf("guest: %s %s %s: %w: %w", op, network, address, ErrProtocol, err)
	}
	buf := make([]byte, a.Length)
	if _, err := io.ReadFull(conn, buf); err != nil {
		return nil, "", lost(err)
	}
	if a.Code != agentpb.CodeOK {
		return nil, "", &ForwardError{Op: op, Network: network, Address: address, Code: a.Code, Message: printable(string(buf))}
	}
	if !stop() || !closing() {
		return nil, "", lost(net.ErrClosed)
	}
	return conn, string(buf), nil
}

// Listener listens in the guest. It is a net.Listener whose connections are of type *Conn.
type Listener struct {
	c       *Client
	network string
	token   [agentpb.TokenSize]byte
	addr    guestAddr
	control net.Conn
	carried *carried

	ctx    context.Context
	cancel context.CancelFunc

	mu   sync.Mutex // held by Accept while it reads
	held *announced // announced, but not taken over for want of a descriptor

	closing   sync.Once
	closeTime time.Duration // maxCloseTime
}

// announced is a connection that waits in the agent to be accepted.
type announced struct {
	token []byte
	from  string
}

// maxAcceptTime bounds the time to take over one connection.
const maxAcceptTime = 30 * time.Second

// maxCloseTime bounds the wait for the agent to confirm that a listener has ended.
const maxCloseTime = 2 * time.Second

// Listen listens at an address in the guest: "tcp" with "host:port", where port 0 lets the guest choose, or "unix"
// with a path. The agent does it, with root's rights there. The listener ends when the VM sleeps: Accept then fails
// with ErrConnectionLost. At most 64 connections wait in the agent to be accepted.
func (c *Client) Listen(ctx context.Context, network, address string) (_ *Listener, err error) {
	m := agentpb.ForwardRequest{Op: agentpb.OpListen, Length: len(address)}
	p, err := c.record(ctx, "listen "+network+" "+address, audit.Action{Kind: audit.KindListen, Network: network, Address: address})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.End(audit.Outcome{Error: err.Error()})
		}
	}()
	conn, text, err := c.forward(ctx, "listen", network, address, m, []byte(address))
	if err != nil {
		return nil, err
	}
	if len(text) <= agentpb.TokenSize {
		conn.Close()
		return nil, fmt.Errorf("guest: listen %s %s: %w: an answer without a token", network, address, ErrProtocol)
	}
	l := &Listener{c: c, network: network, control: conn, closeTime: maxCloseTime, carried: &carried{record: p}, addr: guestAddr{network, printable(text[agentpb.TokenSize:])}}
	copy(l.token[:], text)
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l, nil
}

// Addr returns the listener's address in the guest.
func (l *Listener) Addr() net.Addr { return l.addr }

// Close ends the listener in the guest. Once the agent has confirmed that, the address is free there. If the agent
// does not answer, because it is stopped or hostile, Close returns after two seconds; the agent then finds its
// connection closed. Accepted connections live on; waiting ones are reset.
func (l *Listener) Close() error {
	var err error
	l.closing.Do(func() {
		l.cancel()
		l.carried.last()
		// Any byte from the host asks the agent to end the listener and then close the connection. An Accept that
		// waits reads that end as well.
		if l.control.SetDeadline(time.Now().Add(l.closeTime)) == nil {
			if _, err := l.control.Write([]byte{agentpb.EndListener}); err == nil {
				l.mu.Lock()
				_, _ = io.Copy(io.Discard, l.control)
				l.mu.Unlock()
			}
		}
		err = l.control.Close()
	})
	return err
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	c, err := l.AcceptGuest()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// AcceptGuest waits for a connection in the guest and takes it over. It skips one that has ended by then, or that
// the agent does not hand over in time. If it fails for want of descriptors, with syscall.EMFILE or ENFILE, the
// connection keeps waiting.
func (l *Listener) AcceptGuest() (*Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		next := l.held
		l.held = nil
		if next == nil {
			var err error
			if next, err = l.announced(); err != nil {
				return nil, err
			}
		}
		conn, err := l.take(next.token, next.from)
		if err == nil {
			return conn, nil
		}
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) {
			l.held = next
			return nil, err
		}
		// If the listener itself is lost, reading its connection fails next.
	}
}

// announced waits for the next announcement.
func (l *Listener) announced() (_ *announced, err error) {
	var head [agentpb.AnnouncementSize]byte
	var a agentpb.Announcement
	var from string
	if _, err = io.ReadFull(l.control, head[:]); err == nil {
		if err := a.Decode(&head); err != nil {
			l.cancel()
			l.carried.last()
			l.control.Close()
			return nil, fmt.Errorf("guest: accept %s %s: %w: %w", l.network, l.addr, ErrProtocol, err)
		}
		buf := make([]byte, a.Length)
		_, err = io.ReadFull(l.control, buf)
		from = printable(string(buf))
	}
	if err != nil {
		l.carried.last()
	}
	switch {
	case l.ctx.Err() != nil:
		return nil, fmt.Errorf("guest: accept %s %s: %w", l.network, l.addr, net.ErrClosed)
	case err != nil:
		return nil, fmt.Errorf("guest: accept %s %s: %w: %w", l.network, l.addr, ErrConnectionLost, err)
	}
	return &announced{binary.BigEndian.AppendUint64(nil, a.Token), from}, nil
}

// take takes over a connection that the agent has announced.
func (l *Listener) take(token []byte, from string) (*Conn, error) {
	ctx, cancel := context.WithTimeout(l.ctx, maxAcceptTime)
	defer cancel()
	m := agentpb.ForwardRequest{Op: agentpb.OpAccept, Length: 2 * agentpb.TokenSize}
	l.carried.begin()
	conn, _, err := l.c.forward(ctx, "accept", l.network, l.addr.address, m, append(l.token[:], token...))
	if err != nil {
		l.carried.made(nil, err)
		return nil, err
	}
	s := relay.NewStream(conn)
	s.Local, s.Remote = l.addr, guestAddr{l.network, from}
	l.carried.made(s, nil)
	return s, nil
}
