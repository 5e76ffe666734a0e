package vsock

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// This file has the guest's side: what its packets do, and how packets get to it.

// drainTX handles up to limit packets of the guest.
func (e *engine) drainTX(limit int) error {
	more, err := e.loop.Drain(e.tx.Queue, &e.txChain, limit, e.packet)
	e.txReady = more
	return err
}

// packet handles one packet. It returns only errors of the host.
func (e *engine) packet(r *virtq.Reader) error {
	e.stats.PacketsFromGuest.Add(1)
	if err := r.ReadFull(e.raw[:]); err != nil {
		if errors.Is(err, virtq.ErrDriver) {
			e.stats.Violations.Add(1)
			return nil
		}
		return err
	}
	var h header
	h.decode(&e.raw)
	if h.srcCID != e.cid || h.dstCID != HostCID {
		e.stats.Ignored.Add(1)
		return nil
	}
	k := key{guestPort: h.srcPort, hostPort: h.dstPort}
	if h.typ != typeStream {
		// A packet of unknown type gets a reset as its answer (virtio 1.2, 5.10.6.4).
		e.stats.Violations.Add(1)
		if h.op != opReset {
			e.sendReset(k, h.typ)
		}
		return nil
	}
	c := e.conns[k]
	if c != nil && h.op == opRequest && (c.state == stateClosing || c.state == stateConnecting) {
		// The guest has forgotten a connection that the device still has, and uses its port again.
		e.drop(c)
		c = nil
	}
	if c == nil {
		switch h.op {
		case opReset:
		case opRequest:
			e.request(k, &h)
		default:
			e.sendReset(k, typeStream)
		}
		return nil
	}
	if c.state == stateConnecting && h.op != opReset {
		e.violation(c)
		return nil
	}
	c.peerAlloc, c.peerForwarded = h.bufAlloc, h.fwdCnt
	if c.stalled && c.credit() > 0 {
		c.stalled = false
		if c.wantsRead() {
			e.enqueue(c)
		}
	}
	if c.state == stateParked && h.op != opCreditUpdate && h.op != opCreditRequest && h.op != opReset {
		// There is nobody whom the guest could tell anything.
		e.abort(c)
		return nil
	}
	switch h.op {
	case opData:
		return e.data(c, r, &h)
	case opCreditUpdate:
	case opCreditRequest:
		c.say |= sayCredit
		e.enqueue(c)
	case opShutdown:
		e.guestShutdown(c, h.flags&shutdownBoth)
	case opReset:
		e.guestReset(c)
	case opResponse:
		if c.state != stateRequested || c.say&sayRequest != 0 {
			e.violation(c)
			break
		}
		e.accepted(c)
	default:
		e.violation(c)
	}
	return nil
}

// violation resets a connection on which the guest breaks the protocol.
func (e *engine) violation(c *conn) {
	e.stats.Violations.Add(1)
	e.abort(c)
}

// request connects the guest to a service of the host.
func (e *engine) request(k key, h *header) {
	c := e.reach(k.hostPort)
	if c == nil {
		e.sendReset(k, typeStream)
		return
	}
	e.register(c, k)
	c.peerAlloc, c.peerForwarded = h.bufAlloc, h.fwdCnt
	if c.state == stateConnecting {
		e.call(c)
		return
	}
	c.say |= sayResponse
	e.enqueue(c)
}

// reach makes a connection to a port of the host, or returns nil.
func (e *engine) reach(port uint32) *conn {
	if fd, listening := e.inbox.offer(port); listening {
		if fd < 0 {
			return nil
		}
		return e.newConn(fd, stateOpen, true)
	}
	if e.connect != nil {
		return e.newConn(-1, stateConnecting, true)
	}
	fd, err := e.endpoint.connect(port)
	if err != nil {
		return nil
	}
	return e.newConn(fd, stateOpen, own(fd))
}

// accepted opens a connection that a host client has requested, or parks it.
func (e *engine) accepted(c *conn) {
	if e.parked == c {
		c.state = stateParked
		e.setDeadline(c, 0)
		return
	}
	if !e.greet(c) {
		e.refuse(c)
		return
	}
	c.state = stateOpen
	e.setDeadline(c, 0)
	// Bytes that the client has sent early wait in the socket.
	c.readable = true
	e.enqueue(c)
}

// data passes bytes of the guest on to the host.
func (e *engine) data(c *conn, r *virtq.Reader, h *header) error {
	n := h.len
	switch {
	case uint64(n) > uint64(r.Remaining()), // longer than the packet
		c.state == stateRequested,                                  // not accepted
		c.got&shutdownSend != 0,                                    // after its end
		uint64(c.received-c.forwarded)+uint64(n) > uint64(c.alloc): // beyond the credit
		e.violation(c)
		return nil
	}
	c.received += n
	if c.fd < 0 || c.toTell&shutdownReceive != 0 {
		// The guest sent this before it knew that the client does not read any more.
		c.forwarded += n
		return nil
	}
	written := 0
	if c.backlog.n == 0 {
		var err error
		before := *r
		if e.ranges, err = r.Ranges(e.ranges[:0], int(n)); err != nil {
			return err
		}
		written, err = e.mem.Writev(c.fd, e.ranges)
		c.forwarded += uint32(written)
		switch {
		case err == nil, errors.Is(err, unix.EAGAIN):
		case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
			c.forwarded += n
			e.unwritable(c)
			return nil
		case ofSocket(err):
			e.abort(c)
			return nil
		default:
			return err
		}
		*r = before
		if err := r.Skip(written); err != nil {
			return err
		}
	}
	if rest := int(n) - written; rest > 0 {
		e.takeBuffer(c)
		if err := c.backlog.fill(r, rest); err != nil {
			return err
		}
		e.stats.Buffered.Add(uint64(rest))
		e.block(c)
		return nil
	}
	e.giveCredit(c)
	return nil
}

// ofSocket reports whether a transfer failed because of the socket. A failure of guest memory is fatal to the
// machine.
func ofSocket(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno) && errno != unix.EFAULT && errno != unix.EIO
}

// giveCredit tells the guest of new room once half of the buffer has become free, unless another packet has already
// done so.
func (e *engine) giveCredit(c *conn) {
	if c.state == stateOpen && c.got&shutdownSend == 0 && c.forwarded-c.toldForwarded >= c.alloc/2 {
		c.say |= sayCredit
		e.enqueue(c)
	}
}

// guestShutdown handles a guest that will not send, or not receive, any more.
func (e *engine) guestShutdown(c *conn, flags uint32) {
	if c.state == stateRequested {
		e.violation(c)
		return
	}
	news := flags &^ c.got
	c.got |= flags
	if c.got == shutdownBoth {
		// The connection is over. The reset confirms that (virtio 1.2, 5.10.6.5); the device must still deliver
		// what the guest has sent.
		e.sendReset(c.key, typeStream)
		e.guestReset(c)
		return
	}
	if c.fd < 0 {
		return
	}
	if news&shutdownReceive != 0 {
		_ = unix.Shutdown(c.fd, unix.SHUT_RD)
	}
	if news&shutdownSend != 0 && c.backlog.n == 0 {
		_ = unix.Shutdown(c.fd, unix.SHUT_WR)
	}
}

// guestReset handles a connection that is over for the guest.
func (e *engine) guestReset(c *conn) {
	if c.backlog.n == 0 || c.fd < 0 {
		e.drop(c)
		return
	}
	e.forget(c)
	c.state = stateDraining
	c.readable = false
	e.setDeadline(c, 0)
	_ = unix.Shutdown(c.fd, unix.SHUT_RD)
}

// sendReset queues a reset for a connection that the device does not have, or no longer has.
func (e *engine) sendReset(k key, typ uint16) {
	if e.resetsCount == len(e.resets) {
		return // too many wait already
	}
	e.resets[(e.resetsFrom+e.resetsCount)%len(e.resets)] = reset{k, typ}
	e.resetsCount++
}

// enqueue queues a connection to send to the guest.
func (e *engine) enqueue(c *conn) {
	if c.queued {
		return
	}
	c.queued = true
	c.next = nil
	if e.tail == nil {
		e.head = c
	} else {
		e.tail.next = c
	}
	e.tail = c
}

func (e *engine) dequeue() *conn {
	c := e.head
	e.head = c.next
	if e.head == nil {
		e.tail = nil
	}
	c.queued, c.next = false, nil
	return c
}

func (e *engine) unqueue(c *conn) {
	if !c.queued {
		return
	}
	var prev *conn
	for p := e.head; p != c; p = p.next {
		prev = p
	}
	if prev == nil {
		e.head = c.next
	} else {
		prev.next = c.next
	}
	if e.tail == c {
		e.tail = prev
	}
	c.queued, c.next = false, nil
}

// pumpRX sends what waits for the guest, one packet or one read for each connection in turn, until the guest's
// buffers run out.
func (e *engine) pumpRX(limit int) error {
	if !e.quiet {
		e.quiet = true
		if err := e.rx.DisableKicks(); err != nil {
			return err
		}
	}
	begin := e.rx.Work()
	for range limit {
		if e.resetsCount == 0 && e.head == nil || e.loop.Enough(e.rx.Queue, begin) {
			return nil
		}
		ok, err := e.popRX(&e.rxChain[0], begin)
		if err != nil {
			return err
		}
		if !ok {
			e.quiet = false
			more, err := e.rx.EnableKicks()
			if err != nil {
				return err
			}
			if more {
				continue
			}
			e.starved = true
			return nil
		}
		if e.resetsCount > 0 {
			r := e.resets[e.resetsFrom]
			e.resetsFrom = (e.resetsFrom + 1) % len(e.resets)
			e.resetsCount--
			h := header{op: opReset, typ: r.typ}
			if err := e.sendFor(&h, r.key); err != nil {
				return err
			}
			continue
		}
		if err := e.serve(e.dequeue()); err != nil {
			return err
		}
	}
	return nil
}

// popRX takes the next receive buffer that can hold a packet with payload. It also returns false after so many that
// cannot that the turn, which began at that value of the queue's work, is over: another vCPU can post them without end.
func (e *engine) popRX(c *virtq.Chain, begin uint64) (bool, error) {
	for {
		ok, err := e.rx.Pop(c)
		if err != nil || !ok {
			return false, err
		}
		if c.Writer.Remaining() > headerSize {
			return true, nil
		}
		e.stats.ShortBuffers.Add(1)
		if err := e.rx.Push(c.Head(), 0); err != nil || e.loop.Enough(e.rx.Queue, begin) {
			return false, err
		}
	}
}

// serve sends one packet, or the result of one read, of a connection. The first receive buffer is already popped.
func (e *engine) serve(c *conn) error {
	say := func(bit uint8, h header) error {
		c.say &^= bit
		if c.say != 0 || c.wantsRead() {
			e.enqueue(c)
		}
		return e.sendOn(c, &h)
	}
	switch {
	case c.say&sayRequest != 0:
		return say(sayRequest, header{op: opRequest})
	case c.say&sayResponse != 0:
		return say(sayResponse, header{op: opResponse})
	}
	if c.wantsRead() {
		sent, err := e.forward(c)
		if err != nil || sent {
			return err
		}
	}
	switch {
	case c.say&sayShutdown != 0:
		c.told = c.toTell
		return say(sayShutdown, header{op: opShutdown, flags: c.told})
	case c.say&sayWantCredit != 0:
		c.say &^= sayCredit
		return say(sayWantCredit, header{op: opCreditRequest})
	case c.say&sayCredit != 0:
		return say(sayCredit, header{op: opCreditUpdate})
	}
	e.rx.Unpop(&e.rxChain[0])
	return nil
}

// forward reads from the client into receive buffers. It reports whether it has used the popped one.
func (e *engine) forward(c *conn) (bool, error) {
	credit := c.credit()
	if credit == 0 {
		if !c.stalled {
			c.stalled = true
			c.say |= sayWantCredit
		}
		return false, nil
	}
	e.ranges = e.ranges[:0]
	chains, total := 0, 0
	for {
		w := &e.rxChain[chains].Writer
		e.writers[chains] = *w
		if err := w.Skip(headerSize); err != nil {
			return false, err
		}
		n := min(w.Remaining(), maxPacket, credit-total)
		before := len(e.ranges)
		rs, err := w.Ranges(e.ranges, n)
		if err != nil {
			return false, err
		}
		if len(rs) > virtq.MaxSegments {
			// One call does not take that many pieces; the buffers so far are enough.
			e.ranges = rs[:before]
			e.rx.Unpop(&e.rxChain[chains])
			break
		}
		e.ranges = rs
		e.space[chains] = n
		total += n
		chains++
		if chains >= c.burst || total >= credit {
			break
		}
		ok, err := e.rx.Pop(&e.rxChain[chains])
		if err != nil {
			return false, err
		}
		if !ok {
			break
		}
		if e.rxChain[chains].Writer.Remaining() <= headerSize {
			// The next popRX gives it back.
			e.rx.Unpop(&e.rxChain[chains])
			break
		}
	}
	n, err := e.mem.Readv(c.fd, e.ranges)
	used := 0
	for left := n; left > 0; used++ {
		k := min(left, e.space[used])
		if err := e.pushData(c, used, k); err != nil {
			return false, err
		}
		left -= k
	}
	for i := chains - 1; i >= max(used, 1); i-- {
		e.rx.Unpop(&e.rxChain[i])
	}
	switch {
	case n == total:
		c.burst = min(2*c.burst, maxBurst)
	default:
		c.burst = 1
	}
	switch {
	case n > 0:
		c.say &^= sayCredit
		e.enqueue(c)
		return true, nil
	case errors.Is(err, unix.EAGAIN):
		c.readable = false
	case err == nil:
		c.eof = true
		c.hup = c.hup || hungUp(c.fd)
		e.ended(c)
	case ofSocket(err):
		c.eof, c.hup = true, true
		e.ended(c)
	default:
		return false, err
	}
	// The first buffer is unused, for another packet.
	e.rxChain[0].Writer = e.writers[0]
	return false, nil
}

// pushData completes a packet whose n bytes of payload are already in place.
func (e *engine) pushData(c *conn, i, n int) error {
	c.sent += uint32(n)
	h := header{op: opData, len: uint32(n)}
	e.address(c, &h)
	h.encode(&e.out)
	w := &e.writers[i]
	if _, err := w.Write(e.out[:]); err != nil {
		return err
	}
	e.stats.PacketsToGuest.Add(1)
	return e.rx.Push(e.rxChain[i].Head(), headerSize+uint32(n))
}

// address completes the header of a packet of a connection.
func (e *engine) address(c *conn, h *header) {
	h.typ = typeStream
	h.srcCID, h.dstCID = HostCID, e.cid
	h.srcPort, h.dstPort = c.key.hostPort, c.key.guestPort
	h.bufAlloc, h.fwdCnt = c.alloc, c.forwarded
	c.toldForwarded = c.forwarded
}

// sendOn puts a packet of a connection into the popped buffer.
func (e *engine) sendOn(c *conn, h *header) error {
	e.address(c, h)
	return e.send(h)
}

// sendFor puts a packet that belongs to no connection into the popped buffer.
func (e *engine) sendFor(h *header, k key) error {
	h.srcCID, h.dstCID = HostCID, e.cid
	h.srcPort, h.dstPort = k.hostPort, k.guestPort
	return e.send(h)
}

func (e *engine) send(h *header) error {
	h.encode(&e.out)
	w := &e.rxChain[0].Writer
	if _, err := w.Write(e.out[:]); err != nil {
		return err
	}
	e.stats.PacketsToGuest.Add(1)
	return e.rx.Push(e.rxChain[0].Head(), headerSize)
}
