package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/events"
)

// Bounds of what is kept for senders of datagrams. MaxConns bounds their number.
const (
	// maxDatagram is the largest datagram that is carried, in bytes. Policies deny fragments, so what passes is no
	// larger than a packet of the VM's device.
	maxDatagram = 9 << 10
	// maxHeld is how many datagrams of one sender are held while the VM wakes. maxHeldBytes bounds the bytes of
	// all senders to one port. maxHeldAge is how old a datagram may be when the VM is awake. Datagrams beyond a
	// bound are dropped, the newest first.
	maxHeld      = 16
	maxHeldBytes = 256 << 10
	maxHeldAge   = 30 * time.Second
	// A session ends, and lets the VM sleep, after this time without a datagram: before the first answer, and
	// after it. netpolicy forgets the flow of the first kind after 30 s, and of the second after 180 s.
	unansweredTime = 10 * time.Second
	answeredTime   = 60 * time.Second
	// refusalTime is how long other sessions do not try to wake a VM that could not be woken.
	refusalTime = time.Second
)

// held keeps a VM awake: sandbox.Sandbox.WakeLock.
type held interface {
	Done() <-chan struct{}
	Release()
}

// udpListener listens for one published port of UDP.
type udpListener struct {
	publishedPort
	conn *net.UDPConn
	// wake wakes the VM if it sleeps, and returns the address of its port.
	wake func(context.Context) (held, netip.AddrPort, error)
	// turnstile lets one session at a time wake the VM. Its holder owns refused and why.
	turnstile chan struct{}
	refused   time.Time
	why       error

	unanswered, answered time.Duration // time limits of sessions without a datagram

	// publishedPort.mu guards sessions and bytes, which counts the bytes that the sessions hold.
	sessions map[sender]*session
	bytes    int
}

// sender is a sender's address, and the host's address that it sent to if the listener listens at all of them.
type sender struct {
	from netip.AddrPort
	to   netip.Addr
}

func (s sender) String() string { return s.from.String() }

// session is the exchange of one sender with the guest. The listener's mutex guards it.
type session struct {
	sender
	oob      []byte       // makes answers come from the address that was asked
	guest    *net.UDPConn // nil until the VM is awake
	held     []datagram
	used     time.Time // when a datagram last passed
	answered bool
}

type datagram struct {
	bytes []byte
	at    time.Time
}

var (
	errFull    = errors.New("too many senders at once, or too many datagrams while the VM wakes")
	errTooLong = fmt.Errorf("a datagram of more than %d bytes", maxDatagram)
)

func (v *supervisor) listenUDP(ctx context.Context, p port) (closer, error) {
	h := &udpListener{publishedPort: publishedPort{v: v, port: p}, unanswered: unansweredTime, answered: answeredTime}
	h.wake = func(ctx context.Context) (held, netip.AddrPort, error) {
		hold, info, err := v.awake(events.WithCause(ctx, events.Packet), p.vm)
		if err != nil {
			return nil, netip.AddrPort{}, err
		}
		return hold, netip.AddrPortFrom(info.Address, p.guest), nil
	}
	if err := h.open(ctx); err != nil {
		return nil, err
	}
	return h, nil
}

// open starts to listen.
func (h *udpListener) open(ctx context.Context) error {
	h.turnstile, h.sessions = make(chan struct{}, 1), map[sender]*session{}
	network := "udp"
	if h.port.listen.Addr().Is4() {
		network = "udp4"
	}
	var err error
	if h.conn, err = net.ListenUDP(network, net.UDPAddrFromAddrPort(h.port.listen)); err != nil {
		return err
	}
	if h.port.listen.Addr().IsUnspecified() {
		if err := tellDestinations(h.conn, network == "udp4"); err != nil {
			return errors.Join(err, h.conn.Close())
		}
	}
	h.ctx, h.cancel = context.WithCancel(ctx)
	h.v.carried.Go(h.receive)
	return nil
}

// tellDestinations makes the kernel report to which address of the host each datagram was sent (ip(7), ipv6(7)):
// the answer has to come from there.
func tellDestinations(c *net.UDPConn, four bool) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	level, option := unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	if four {
		level, option = unix.IPPROTO_IP, unix.IP_PKTINFO
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, 1) }); err != nil {
		return err
	}
	return os.NewSyscallError("setsockopt", set)
}

// destination reads the kernel's report. It also returns the control message that makes an answer come from that
// address. Both are empty without a report.
func destination(oob []byte) (to netip.Addr, back []byte) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return to, nil
	}
	for _, m := range msgs {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			a := [4]byte(m.Data[4:8]) // ipi_spec_dst: the host's own address, even for a broadcast
			return netip.AddrFrom4(a), unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a})
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			a := [16]byte(m.Data[:16])
			return netip.AddrFrom16(a), unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a})
		}
	}
	return to, nil
}

// close stops listening, and ends all sessions.
func (h *udpListener) close() {
	h.cancel()
	h.conn.Close()
}

func (h *udpListener) receive() {
	b, oob := make([]byte, maxDatagram), make([]byte, 128)
	for {
		n, oobn, flags, from, err := h.conn.ReadMsgUDPAddrPort(b, oob)
		if err != nil {
			if h.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			h.failed("receiving a datagram failed", from, err)
			if wait.For(h.ctx, acceptPause) != nil {
				return
			}
			continue
		}
		s := sender{from: from}
		var back []byte
		if oobn > 0 {
			s.to, back = destination(oob[:oobn])
		}
		if flags&unix.MSG_TRUNC != 0 {
			err = errTooLong
		} else {
			err = h.take(s, back, b[:n])
		}
		if err != nil && h.ctx.Err() == nil {
			h.failed("a datagram was dropped", s, err)
		}
	}
}

// take passes on a datagram, or holds it until the VM is awake. An error means that it was dropped.
func (h *udpListener) take(from sender, back, b []byte) error {
	for {
		guest, err := h.hold(from, back, b)
		if guest == nil || err != nil {
			return err
		}
		// The kernel may report the fate of an earlier datagram here.
		if _, err = guest.Write(b); errors.Is(err, syscall.ECONNREFUSED) {
			_, err = guest.Write(b)
		}
		if !errors.Is(err, net.ErrClosed) {
			return err
		}
		// Its VM has just gone to sleep. The next session wakes it.
		h.mu.Lock()
		if s := h.sessions[from]; s != nil && s.guest == guest {
			delete(h.sessions, from)
		}
		h.mu.Unlock()
	}
}

// hold keeps a datagram if the VM is not awake yet; else it returns the socket to send it by. A sender without a
// session gets one.
func (h *udpListener) hold(from sender, back, b []byte) (*net.UDPConn, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.ctx.Err(); err != nil {
		return nil, err
	}
	s := h.sessions[from]
	if s != nil && s.guest != nil {
		s.used = time.Now()
		return s.guest, nil
	}
	full := h.bytes+len(b) > maxHeldBytes
	if s == nil && (full || len(h.sessions) >= h.v.o.MaxConns) || s != nil && (full || len(s.held) >= maxHeld) {
		return nil, errFull
	}
	if s == nil {
		s = &session{sender: from, oob: back}
		h.sessions[from] = s
		h.v.carried.Go(func() {
			if err := h.carry(s); err != nil && h.ctx.Err() == nil {
				h.failed("datagrams found no way to their VM", from, err)
			}
		})
	}
	s.used = time.Now()
	s.held = append(s.held, datagram{slices.Clone(b), s.used})
	h.bytes += len(b)
	return nil, nil
}

// carry runs a session: it wakes the VM if it sleeps, passes on what is held, and then carries the answers.
func (h *udpListener) carry(s *session) error {
	defer h.forget(s)
	ctx, cancel := context.WithTimeout(h.ctx, wakeTime)
	hold, to, err := h.turn(ctx)
	cancel()
	if err != nil {
		return err
	}
	defer hold.Release()
	guest, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return err
	}
	ended, cut := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(cut)
		select {
		case <-hold.Done():
		case <-h.ctx.Done():
		case <-ended:
		}
		guest.Close()
	}()
	defer func() {
		close(ended)
		<-cut
	}()
	if err := h.deliver(s, guest); err != nil {
		return err
	}
	return h.answers(s, guest)
}

// turn wakes the VM for one session after the other. Shortly after a failure it returns that error at once.
func (h *udpListener) turn(ctx context.Context) (held, netip.AddrPort, error) {
	select {
	case h.turnstile <- struct{}{}:
	case <-ctx.Done():
		return nil, netip.AddrPort{}, ctx.Err()
	}
	defer func() { <-h.turnstile }()
	if h.why != nil && time.Since(h.refused) < refusalTime {
		return nil, netip.AddrPort{}, h.why
	}
	hold, to, err := h.wake(ctx)
	if h.why = err; err != nil {
		h.refused = time.Now()
		return nil, netip.AddrPort{}, err
	}
	return hold, to, nil
}

// deliver sends what is held, in order, before anything that comes later.
func (h *udpListener) deliver(s *session, guest *net.UDPConn) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	for _, d := range s.held {
		if now.Sub(d.at) > maxHeldAge {
			continue
		}
		_, err := guest.Write(d.bytes)
		if err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
	}
	h.drop(s)
	s.guest, s.used = guest, now
	return nil
}

// drop discards what is held for a session.
func (h *udpListener) drop(s *session) {
	for _, d := range s.held {
		h.bytes -= len(d.bytes)
	}
	s.held = nil
}

// forget ends a session.
func (h *udpListener) forget(s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(s)
	if h.sessions[s.sender] == s {
		delete(h.sessions, s.sender)
	}
}

// answers carries what the guest sends until the session has been idle too long, or the VM sleeps.
func (h *udpListener) answers(s *session, guest *net.UDPConn) error {
	b := make([]byte, maxDatagram)
	for {
		end, over := h.idle(s)
		if over {
			return nil
		}
		if err := guest.SetReadDeadline(end); err != nil {
			return closed(err)
		}
		n, _, flags, _, err := guest.ReadMsgUDPAddrPort(b, nil)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ECONNREFUSED):
			continue // no listener in the guest, which may change
		case err != nil:
			return closed(err)
		case flags&unix.MSG_TRUNC != 0:
			h.failed("an answer was dropped", s.sender, errTooLong)
			continue
		}
		h.mu.Lock()
		s.used, s.answered = time.Now(), true
		h.mu.Unlock()
		if _, _, err := h.conn.WriteMsgUDPAddrPort(b[:n], s.oob, s.from); err != nil && h.ctx.Err() == nil {
			h.failed("an answer was dropped", s.sender, err)
		}
	}
}

// closed returns nil for the error of a closed socket.
func closed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// idle returns when the session ends, and whether it is over. If it is over, it is removed: a later datagram of
// its sender begins a new session.
func (h *udpListener) idle(s *session) (end time.Time, over bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	end = s.used.Add(h.unanswered)
	if s.answered {
		end = s.used.Add(h.answered)
	}
	if time.Now().Before(end) {
		return end, false
	}
	if h.sessions[s.sender] == s {
		delete(h.sessions, s.sender)
	}
	return end, true
}
