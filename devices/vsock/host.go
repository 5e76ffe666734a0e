package vsock

import (
	"errors"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// This file has the host's side of connections: the listener, the line of a new client, and the readiness of
// sockets.

// maxLine bounds the first line of a host client in bytes, including its end.
const maxLine = 32

// watched are the events that the loop watches for every connection; epoll always adds EPOLLHUP and EPOLLERR.
const watched = unix.EPOLLIN | unix.EPOLLRDHUP

// accept takes new host clients.
func (e *engine) accept() {
	if e.acceptAfter != 0 {
		if e.now < e.acceptAfter {
			return
		}
		e.acceptAfter = 0
	}
	for range turnAccepts {
		fd, _, err := unix.Accept4(e.endpoint.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case err == nil && e.loop.Failed():
			unix.Close(fd)
			continue
		case err == nil:
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
			continue
		case errors.Is(err, unix.EAGAIN):
			e.acceptReady = false
			return
		default:
			// The host is out of descriptors or memory: let clients wait longer.
			e.acceptAfter = e.now + int64(acceptPause)
			return
		}
		if c := e.newConn(fd, stateHandshake, own(fd)); c != nil {
			e.setDeadline(c, handshakeTimeout)
		}
	}
}

// own reports whether this process itself is at the other end (unix(7), SO_PEERCRED): it has connected, or listens
// there.
func own(fd int) bool {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	return err == nil && int(cred.Pid) == unix.Getpid()
}

// newConn makes a connection that owns fd, or closes fd and returns nil if there are too many. An fd of -1 means that
// it has none yet. The connection counts as a use unless this process is at its other end.
func (e *engine) newConn(fd int, s connState, own bool) *conn {
	if e.open+int(e.inbox.calls.Load()) >= MaxConnections {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil
	}
	var slot int32
	if n := len(e.freeSlots); n > 0 {
		slot = e.freeSlots[n-1]
		e.freeSlots = e.freeSlots[:n-1]
	} else {
		slot = int32(len(e.slots))
		e.slots = append(e.slots, nil)
	}
	e.generation++
	c := &conn{slot: slot, gen: e.generation, fd: fd, state: s, burst: 1, own: own}
	if fd < 0 {
		e.slots[slot] = c
		return c
	}
	if err := e.loop.Watch(fd, watched, slot, c.gen); err != nil {
		unix.Close(fd)
		e.freeSlots = append(e.freeSlots, slot)
		return nil
	}
	e.slots[slot] = c
	e.opened(c)
	return c
}

// opened counts a connection with a socket.
func (e *engine) opened(c *conn) {
	c.counted = true
	e.open++
	if !c.own {
		e.stats.Open.Add(1)
		e.stats.Uses.Add(1)
	}
}

// register records a connection by its ports, and gives it its share of the buffer space.
func (e *engine) register(c *conn, k key) {
	c.alloc = smallBuffer
	if e.large < largeBuffers {
		e.large++
		c.alloc = largeBuffer
	}
	c.key = k
	e.conns[k] = c
}

// closeHost closes the host's end.
func (e *engine) closeHost(c *conn) {
	if c.fd >= 0 {
		unix.Close(c.fd)
		c.fd = -1
	}
	c.readable = false
	e.discard(c)
}

// discard drops what the client has not read. The guest gets its credit back.
func (e *engine) discard(c *conn) {
	c.forwarded += uint32(c.backlog.n)
	e.stats.Buffered.Add(-uint64(c.backlog.n))
	c.backlog.n = 0
	e.releaseBuffer(c)
}

func (e *engine) releaseBuffer(c *conn) {
	if c.backlog.buf == nil {
		return
	}
	if len(c.backlog.buf) == largeBuffer && len(e.spare) < spareBuffers {
		e.spare = append(e.spare, c.backlog.buf)
	}
	c.backlog = backlog{}
}

func (e *engine) takeBuffer(c *conn) {
	if c.backlog.buf != nil {
		return
	}
	if n := len(e.spare); n > 0 && c.alloc == largeBuffer {
		c.backlog.buf = e.spare[n-1]
		e.spare = e.spare[:n-1]
		return
	}
	c.backlog.buf = make([]byte, c.alloc)
}

// forget removes the guest's end: no packet finds the connection any more.
func (e *engine) forget(c *conn) {
	if e.conns[c.key] == c {
		delete(e.conns, c.key)
	}
	e.unqueue(c)
	c.say = 0
}

// drop ends a connection without telling the guest.
func (e *engine) drop(c *conn) {
	e.forget(c)
	e.closeHost(c)
	if e.slots[c.slot] != c {
		return
	}
	e.vacate(c)
	if c.counted {
		e.open--
	}
	if c.dialed != nil {
		c.dialed <- errRefused
		c.dialed = nil
	}
	if !c.own {
		e.stats.Open.Add(^uint64(0))
	}
	if c.alloc == largeBuffer {
		e.large--
	}
}

// vacate frees the slot.
func (e *engine) vacate(c *conn) {
	e.slots[c.slot] = nil
	e.freeSlots = append(e.freeSlots, c.slot)
	if e.parked == c {
		e.parked = nil
	}
}

// abort ends a connection with a reset.
func (e *engine) abort(c *conn) {
	e.sendReset(c.key, typeStream)
	e.drop(c)
}

// ready handles readiness of a connection's socket.
func (e *engine) ready(c *conn, events uint32) {
	if events&(unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		c.hup = true
	}
	if events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		c.readable = true
	}
	if events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0 && c.backlog.n > 0 {
		e.flush(c)
		if e.slots[c.slot] != c {
			return
		}
	}
	switch c.state {
	case stateHandshake:
		if c.readable {
			e.handshake(c)
		}
	case stateRequested:
		if c.hup {
			e.refuse(c)
		}
	case stateOpen:
		if c.eof {
			e.ended(c)
		} else if c.wantsRead() {
			e.enqueue(c)
		} else if c.hup && c.got&shutdownReceive != 0 {
			// The guest does not want what the client has left behind.
			c.eof = true
			e.ended(c)
		}
	case stateDraining:
		if c.hup {
			e.drop(c)
		}
	}
}

// handshake reads the client's line, and no byte after it.
func (e *engine) handshake(c *conn) {
	n, _, err := unix.Recvfrom(c.fd, e.line[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch {
	case errors.Is(err, unix.EINTR):
		return
	case errors.Is(err, unix.EAGAIN):
		c.readable = false
		return
	case err != nil, n == 0:
		e.refuse(c)
		return
	}
	line, _, complete := strings.Cut(string(e.line[:n]), "\n")
	port, idle, ok := parseConnect(line)
	if !complete && n < maxLine && !c.hup {
		return
	}
	if complete && ok {
		_, err = unix.Read(c.fd, e.line[:len(line)+1])
	}
	if !complete || !ok || err != nil || c.hup {
		e.refuse(c)
		return
	}
	if idle && !c.own {
		c.own = true
		e.stats.Open.Add(^uint64(0))
		e.stats.Uses.Add(^uint64(0))
	}
	c.state = stateRequested
	if !e.takeOver(c, port) {
		e.ask(c, port)
	}
}

// takeOver gives c the guest's end of the parked connection, if that is to the port. It reports whether it was.
func (e *engine) takeOver(c *conn, port uint32) bool {
	p := e.parked
	if p == nil || p.state != stateParked || p.key.guestPort != port {
		return false
	}
	e.unqueue(p)
	e.vacate(p)
	c.key, c.say, c.alloc = p.key, p.say, p.alloc
	c.peerAlloc, c.peerForwarded = p.peerAlloc, p.peerForwarded
	e.conns[c.key] = c
	e.accepted(c)
	return true
}

// ask requests a connection to a port of the guest.
func (e *engine) ask(c *conn, port uint32) {
	e.register(c, key{guestPort: port, hostPort: e.freePort(port)})
	c.say |= sayRequest
	e.setDeadline(c, requestTimeout)
	e.enqueue(c)
}

// anyPort is VMADDR_PORT_ANY, which is no port.
const anyPort = 1<<32 - 1

// parseConnect parses "CONNECT <port>", and "CONNECT <port> idle" for a connection that does not count as use.
func parseConnect(line string) (port uint32, idle, ok bool) {
	digits, ok := strings.CutPrefix(line, "CONNECT ")
	if !ok {
		return 0, false, false
	}
	digits, idle = strings.CutSuffix(digits, " idle")
	n, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || n == anyPort {
		return 0, false, false
	}
	return uint32(n), idle, true
}

// freePort returns a host port that makes a new key. There are far fewer connections than ports.
func (e *engine) freePort(guestPort uint32) uint32 {
	for {
		p := e.nextPort
		e.nextPort++
		if e.nextPort >= lastHostPort {
			e.nextPort = firstHostPort
		}
		if _, taken := e.conns[key{guestPort, p}]; !taken {
			return p
		}
	}
}

// refuse ends a connection that was not established. The guest gets a reset if it knows of the connection.
func (e *engine) refuse(c *conn) {
	if c.state == stateHandshake || c.say&sayRequest != 0 {
		e.drop(c)
		return
	}
	e.abort(c)
}

// greet tells the client that the guest has accepted.
func (e *engine) greet(c *conn) bool {
	if c.dialed != nil {
		c.dialed <- nil
		c.dialed = nil
		return true
	}
	line := append(e.line[:0], "OK "...)
	line = strconv.AppendUint(line, uint64(c.key.hostPort), 10)
	line = append(line, '\n')
	// This is the first write to the socket, so it has room.
	n, err := unix.Write(c.fd, line)
	return err == nil && n == len(line)
}

// ended passes the end of the client's direction, or of both, on to the guest.
func (e *engine) ended(c *conn) {
	flags := uint32(shutdownSend)
	if c.hup {
		flags = shutdownBoth
	}
	e.tellShutdown(c, flags)
	if c.hup {
		e.closeHost(c)
		c.state = stateClosing
		e.setDeadline(c, closeTimeout)
	}
}

// hungUp reports whether a client that has ended its direction has also closed. The next epoll event would report
// that, but the guest need not be told twice.
func hungUp(fd int) bool {
	p := [1]unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(p[:], 0)
	return err == nil && n > 0 && p[0].Revents&unix.POLLHUP != 0
}

func (e *engine) tellShutdown(c *conn, flags uint32) {
	if c.toTell|flags == c.toTell {
		return
	}
	c.toTell |= flags
	c.say |= sayShutdown
	e.enqueue(c)
}

// flush writes buffered bytes of the guest to the client.
func (e *engine) flush(c *conn) {
	n, err := c.backlog.flush(c.fd)
	c.forwarded += uint32(n)
	e.stats.Buffered.Add(-uint64(n))
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		e.unwritable(c)
		return
	}
	if c.backlog.n > 0 {
		e.giveCredit(c)
		return
	}
	e.releaseBuffer(c)
	e.unblock(c)
	if c.state == stateDraining {
		e.drop(c)
		return
	}
	if c.got&shutdownSend != 0 {
		_ = unix.Shutdown(c.fd, unix.SHUT_WR)
	}
	e.giveCredit(c)
}

// block waits for room in the socket.
func (e *engine) block(c *conn) {
	if c.blocked {
		return
	}
	c.blocked = true
	if err := e.loop.Change(c.fd, watched|unix.EPOLLOUT, c.slot, c.gen); err != nil {
		e.abort(c)
	}
}

func (e *engine) unblock(c *conn) {
	if !c.blocked {
		return
	}
	c.blocked = false
	_ = e.loop.Change(c.fd, watched, c.slot, c.gen)
}

// unwritable handles a client that takes no more bytes. It may still have some for the guest.
func (e *engine) unwritable(c *conn) {
	e.discard(c)
	if c.state == stateDraining {
		e.drop(c)
		return
	}
	e.unblock(c)
	e.tellShutdown(c, shutdownReceive)
	e.giveCredit(c)
}
