package vsock

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// How long the device waits for the guest. With interpreted guest kernel code on a busy host, a wake has been seen
// to take 15 seconds. Variables, so that tests need not wait as long.
var (
	// requestTimeout is how long the guest may take to accept a connection.
	requestTimeout = time.Minute
	// ackTimeout is how long new packets wait after a restore for the driver to handle the transport reset. The
	// guest would lose a connection made before that, and the host would never learn of it. So the device gives up
	// only on a driver that is not going to answer.
	ackTimeout = time.Minute
)

// Time limits and amounts of work.
const (
	// handshakeTimeout is how long a host client may take to send its line.
	handshakeTimeout = 5 * time.Second
	// closeTimeout is how long the guest may take to confirm that a connection is over; Linux allows us as much.
	closeTimeout = 8 * time.Second
	// acceptPause is how long the device stops accepting when the host is out of file descriptors.
	acceptPause = 100 * time.Millisecond
	// txNotifyDelay is how long transmitted buffers wait for an interrupt of their own. A driver does not wait for
	// them unless its ring is full.
	txNotifyDelay = 5 * time.Millisecond
	// txNotifyPart: if this fraction of the tx ring is used (1/8), the device announces it at once.
	txNotifyPart = 8

	// turnChains bounds what one turn of the loop takes from each queue, and turnAccepts how many clients it
	// accepts, so that all work gets a turn.
	turnChains  = 256
	turnAccepts = 64
	// maxBurst is the largest number of receive buffers that one read fills.
	maxBurst = 16
	// maxPacket is the largest payload of one packet in bytes, the same as in Linux.
	maxPacket = 64 << 10
	// maxResets is the largest number of resets that wait for receive buffers.
	maxResets = 4096
	// spareBuffers is how many backlog buffers the engine keeps for reuse.
	spareBuffers = 4
)

// tokenListener is the token of the listener. The token of a connection is its slot.
const tokenListener int32 = -1

// reset is a packet that refuses or ends a connection that the device does not
// know (any more).
type reset struct {
	key key
	typ uint16
}

// engine serves the device between Activate and Reset. After newEngine it belongs to the goroutine of its loop, or
// to the caller that has paused that.
type engine struct {
	mem      *guestmem.Memory
	stats    *Stats
	endpoint *endpoint
	inbox    *inbox
	connect  func(uint32, func(int, bool, error)) // Config.Connect
	cid      uint64
	rx, tx   *queue
	event    *queue // or nil
	irq      devices.Interrupt
	loop     *devices.Loop

	start      time.Time
	now        int64
	carried    *state // the engine must announce it to the guest
	nextPort   uint32
	conns      map[key]*conn
	slots      []*conn
	freeSlots  []int32
	generation int32
	open       int   // slots in use by connections that have had a socket
	parked     *conn // the one for Device.Park, also while the guest has not answered yet; or nil
	large      int   // connections that advertise largeBuffer
	spare      [][]byte

	head, tail   *conn // connections that have something for the guest
	resets       []reset
	resetsFrom   int
	resetsCount  int
	txReady      bool
	acceptReady  bool
	acceptAfter  int64
	quiet        bool  // the engine asked the driver not to kick rx
	starved      bool  // rx buffers have run out; the engine waits for a kick
	hold         bool  // send nothing to the guest before it has handled the reset
	holdUntil    int64 // at the latest
	ackIndex     uint16
	nextDeadline int64
	txDeadline   int64

	txChain virtq.Chain
	rxChain [maxBurst]virtq.Chain
	writers [maxBurst]virtq.Writer // at the headers of rxChain
	space   [maxBurst]int
	ranges  []guestmem.Range
	raw     [headerSize]byte
	out     [headerSize]byte
	line    [maxLine]byte
}

func newEngine(d *Device, a devices.Activation) (*engine, error) {
	e := &engine{
		mem:      d.mem,
		stats:    &d.stats,
		endpoint: d.endpoint,
		inbox:    &d.inbox,
		connect:  d.connect,
		cid:      d.cid,
		rx:       newQueue(a.Queues[queueRX]),
		tx:       newQueue(a.Queues[queueTX]),
		event:    newQueue(a.Queues[queueEvent]),
		irq:      a.Interrupt,
		start:    time.Now(),
		now:      1,
		carried:  d.carried,
		nextPort: d.nextPort,
		conns:    make(map[key]*conn),
		resets:   make([]reset, maxResets),
		ranges:   make([]guestmem.Range, 0, virtq.MaxSegments),
	}
	var err error
	if e.loop, err = devices.NewLoop(a); err != nil {
		return nil, err
	}
	if err := e.loop.Watch(e.endpoint.fd, unix.EPOLLIN, tokenListener, 0); err != nil {
		e.loop.Stop()
		return nil, err
	}
	e.inbox.attach(e.loop)
	e.loop.Start(e)
	return e, nil
}

// Rested implements [devices.Looper].
func (e *engine) Rested(d time.Duration) {
	// Time stands still for a paused guest.
	e.start = e.start.Add(d)
	// Kicks may have been lost with the process that took the snapshot.
	e.txReady = true
	e.starved = false
}

// Settle implements [devices.Looper]: it finishes all that the guest believes to be done.
func (e *engine) Settle() error {
	e.now = e.clock()
	if e.carried != nil {
		return nil
	}
	begin := e.tx.Work()
	err := e.drainTX(txSize)
	// All connections together may hold 64 MiB for sockets that can take it now.
	for _, c := range e.slots {
		if e.loop.Enough(e.tx.Queue, begin) {
			break
		}
		if c != nil && c.backlog.n > 0 {
			before := c.backlog.n
			e.flush(c)
			begin -= uint64(max(before-c.backlog.n, 0)) // counts as work
		}
	}
	e.txDeadline = e.now
	if err != nil {
		return err
	}
	return e.notify()
}

func (e *engine) clock() int64 { return int64(time.Since(e.start)) + 1 }

// End implements [devices.Looper]: it closes all connections.
func (e *engine) End() {
	for _, c := range e.slots {
		if c != nil {
			e.drop(c)
		}
	}
}

// Turn implements [devices.Looper].
func (e *engine) Turn() (time.Duration, error) {
	e.now = e.clock()
	if e.loop.Failed() {
		e.takeIn()
		if e.acceptReady {
			e.accept()
		}
		switch {
		case !e.acceptReady:
			return -1, nil
		case e.acceptAfter != 0:
			return time.Duration(max(0, e.acceptAfter-e.now)), nil
		}
		return 0, nil // more clients wait
	}
	if err := e.turn(); err != nil {
		return 0, err
	}
	return e.timeout(), nil
}

// timeout returns how long no work is due.
func (e *engine) timeout() time.Duration {
	if e.txReady || e.acceptReady && e.acceptAfter == 0 || e.work() {
		return 0
	}
	next := e.nextDeadline
	for _, t := range [...]int64{e.txDeadline, e.acceptAfter, e.holdUntil} {
		if t != 0 && (next == 0 || t < next) {
			next = t
		}
	}
	if next == 0 {
		return -1
	}
	return time.Duration(max(0, next-e.now))
}

// work reports whether the engine can send something to the guest right now.
func (e *engine) work() bool {
	return !e.hold && !e.starved && (e.head != nil || e.resetsCount > 0)
}

// Ready implements [devices.Looper].
func (e *engine) Ready(token, generation int32, events uint32) {
	e.now = e.clock()
	if token == tokenListener {
		e.acceptReady = true
	} else if c := e.slots[token]; c != nil && c.gen == generation {
		e.ready(c, events)
	}
}

// Kicked implements [devices.Looper]. Every turn looks at the event queue while that matters.
func (e *engine) Kicked(queue int) {
	switch queue {
	case queueTX:
		e.txReady = true
	case queueRX:
		e.starved = false
	}
}

// turn does the pending work, in bounded amounts, and interrupts the guest at most once.
func (e *engine) turn() error {
	if e.carried != nil {
		if err := e.announce(); err != nil {
			return err
		}
	}
	if e.nextDeadline != 0 && e.now >= e.nextDeadline {
		e.expire()
	}
	if e.acceptReady {
		e.accept()
	}
	e.takeIn()
	if e.txReady {
		if err := e.drainTX(turnChains); err != nil {
			return err
		}
	}
	if e.hold {
		if err := e.checkHold(); err != nil {
			return err
		}
	}
	if e.work() {
		if err := e.pumpRX(turnChains); err != nil {
			return err
		}
	}
	return e.notify()
}

// queue remembers how many used buffers the driver knows of. The virtq gives malformed chains back itself, so
// counting pushes would miss some.
type queue struct {
	*devices.Queue
	announced uint16
}

func newQueue(q *devices.Queue) *queue {
	if q == nil {
		return nil
	}
	return &queue{q, q.Position().NextUsed}
}

func (q *queue) unannounced() uint16 { return q.Position().NextUsed - q.announced }

func (q *queue) news() bool { return q.unannounced() != 0 }

// ask sets need if the driver wants an interrupt for the news.
func (q *queue) ask(need *bool) error {
	q.announced = q.Position().NextUsed
	wanted, err := q.NeedsInterrupt()
	*need = *need || wanted
	return err
}

// notify interrupts the guest at most once for all queues.
func (e *engine) notify() error {
	need := false
	if e.event != nil && e.event.news() {
		if err := e.event.ask(&need); err != nil {
			return err
		}
	}
	if e.rx.news() {
		if err := e.rx.ask(&need); err != nil {
			return err
		}
	}
	if used := e.tx.unannounced(); used > 0 {
		if e.txDeadline == 0 {
			e.txDeadline = e.now + int64(txNotifyDelay)
		}
		if need || e.now >= e.txDeadline || used >= e.tx.Layout().Size/txNotifyPart {
			if err := e.tx.ask(&need); err != nil {
				return err
			}
		}
	}
	if !e.tx.news() {
		e.txDeadline = 0
	}
	if need {
		e.irq.Queue()
	}
	return nil
}

// setDeadline makes the state of c expire after d, or never if d is zero.
func (e *engine) setDeadline(c *conn, d time.Duration) {
	if d == 0 {
		c.deadline = 0
		return
	}
	c.deadline = e.now + int64(d)
	if e.nextDeadline == 0 || c.deadline < e.nextDeadline {
		e.nextDeadline = c.deadline
	}
}

// expire ends connections whose state has expired.
func (e *engine) expire() {
	e.nextDeadline = 0
	for _, c := range e.slots {
		if c == nil || c.deadline == 0 {
			continue
		}
		if c.deadline > e.now {
			if e.nextDeadline == 0 || c.deadline < e.nextDeadline {
				e.nextDeadline = c.deadline
			}
			continue
		}
		if c.state == stateHandshake || c.state == stateRequested {
			e.refuse(c)
		} else {
			e.abort(c)
		}
	}
}
