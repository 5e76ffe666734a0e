package vsock

import (
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
)

// inbox passes sockets between the engine and other goroutines. It outlives the engine.
type inbox struct {
	// calls counts the calls of Config.Connect whose answers the engine has not taken. A driver that resets
	// connections, or the device, does not lower it: only an answer does.
	calls atomic.Int32
	// news reports that answers or dials is not empty.
	news atomic.Bool

	mu        sync.Mutex    // guards what follows; nobody blocks while holding it
	loop      *devices.Loop // of the active engine, or nil
	answers   []answer
	dials     []*dial
	listeners map[uint32]*listener
	closed    bool
}

// answer is the result of a call of Config.Connect.
type answer struct {
	conn *conn // may be gone
	fd   int   // -1 after an error
	own  bool
}

// attach lets an engine take what comes in.
func (in *inbox) attach(l *devices.Loop) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.loop = l
}

// detach ends what no engine has taken. Answers that come later find no engine.
func (in *inbox) detach() {
	in.mu.Lock()
	in.loop = nil
	in.mu.Unlock()
	answers, dials := in.take()
	for _, a := range answers {
		a.drop()
	}
	for _, d := range dials {
		d.fail()
	}
}

// take returns what has come in since the last call.
func (in *inbox) take() (answers []answer, dials []*dial) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.news.Store(false)
	answers, dials = in.answers, in.dials
	in.answers, in.dials = nil, nil
	in.calls.Add(-int32(len(answers)))
	return answers, dials
}

// answer passes the result of a call on to the engine.
func (in *inbox) answer(a answer) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.loop == nil {
		in.calls.Add(-1)
		a.drop()
		return
	}
	in.answers = append(in.answers, a)
	in.tell()
}

// tell wakes the engine. The caller holds mu.
func (in *inbox) tell() {
	in.news.Store(true)
	in.loop.Do()
}

// offer connects to the listener at a port and returns the engine's end, or -1 if the listener's queue is full.
// listening is false if there is no listener.
func (in *inbox) offer(port uint32) (fd int, listening bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	l := in.listeners[port]
	if l == nil {
		return -1, false
	}
	if len(l.waiting) == cap(l.waiting) {
		return -1, true
	}
	pair, err := socketPair()
	if err != nil {
		return -1, true
	}
	l.waiting <- pair[1]
	return pair[0], true
}

// dial passes a socket for a port of the guest on to the engine.
func (in *inbox) dial(d *dial) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return net.ErrClosed
	}
	if in.loop == nil {
		return errNoDriver
	}
	in.dials = append(in.dials, d)
	in.tell()
	return nil
}

// giveUp takes a dial back that the engine may not have taken.
func (in *inbox) giveUp(d *dial) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if i := slices.Index(in.dials, d); i >= 0 {
		in.dials = slices.Delete(in.dials, i, i+1)
		d.fail()
	}
}

func (in *inbox) listen(l *listener) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return net.ErrClosed
	}
	if in.listeners[l.port] != nil {
		return unix.EADDRINUSE
	}
	if in.listeners == nil {
		in.listeners = make(map[uint32]*listener)
	}
	in.listeners[l.port] = l
	return nil
}

// unlisten ends a listener, with the connections that it has not accepted.
func (in *inbox) unlisten(l *listener) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.listeners[l.port] == l {
		delete(in.listeners, l.port)
		l.end()
	}
}

// close ends all listeners, for good.
func (in *inbox) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.closed = true
	for _, l := range in.listeners {
		l.end()
	}
	in.listeners = nil
}

func (a answer) drop() {
	if a.fd >= 0 {
		unix.Close(a.fd)
	}
}

// takeIn serves what has come in for the engine.
func (e *engine) takeIn() {
	if !e.inbox.news.Load() {
		return
	}
	answers, dials := e.inbox.take()
	for _, a := range answers {
		e.answered(a)
	}
	for _, d := range dials {
		if e.loop.Failed() {
			d.fail()
			continue
		}
		if d.park {
			e.park(d.port)
			continue
		}
		c := e.newConn(d.fd, stateRequested, true)
		if c == nil {
			d.result <- errRefused
			continue
		}
		c.dialed = d.result
		if d.fresh || !e.takeOver(c, d.port) {
			e.ask(c, d.port)
		}
	}
}

// park asks the guest for a connection without a client, unless there is one.
func (e *engine) park(port uint32) {
	if e.parked != nil {
		return
	}
	if c := e.newConn(-1, stateRequested, true); c != nil {
		e.parked = c
		e.ask(c, port)
	}
}

// call asks Config.Connect for a connection of the guest.
func (e *engine) call(c *conn) {
	in := e.inbox
	in.calls.Add(1)
	e.setDeadline(c, requestTimeout)
	e.connect(c.key.hostPort, func(fd int, own bool, err error) {
		if err != nil {
			fd = -1
		}
		in.answer(answer{conn: c, fd: fd, own: own})
	})
}

// answered handles an answer of Config.Connect. The guest may have given up meanwhile.
func (e *engine) answered(a answer) {
	c := a.conn
	if int(c.slot) >= len(e.slots) || e.slots[c.slot] != c || c.state != stateConnecting {
		a.drop()
		return
	}
	if a.fd < 0 {
		e.abort(c)
		return
	}
	if err := e.loop.Watch(a.fd, watched, c.slot, c.gen); err != nil {
		a.drop()
		e.abort(c)
		return
	}
	c.fd, c.own, c.state = a.fd, a.own, stateOpen
	e.opened(c)
	e.setDeadline(c, 0)
	c.say |= sayResponse
	e.enqueue(c)
}
