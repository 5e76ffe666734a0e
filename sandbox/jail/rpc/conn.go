package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Handler serves the calls and posts of the peer. Calls are served at the same time, posts one after the other.
//
// The handler owns files: it must close what it does not keep. The reply becomes JSON. The replyFiles, with or without
// an error, belong to the connection afterwards. The context ends when the peer's caller gives up, and with the
// connection. Peer returns the connection, for calls back. The handler must not call Conn.Close, which waits for it.
type Handler func(ctx context.Context, method string, body []byte, files []*os.File) (
	reply any, replyFiles []*os.File, err error)

// Options must be the same at both ends, but for the Handler.
type Options struct {
	Handler    Handler // may be nil: then calls fail
	MaxMessage int     // bytes of an argument or reply as JSON, at least 64 KiB; 0 means 1 MiB
	MaxFiles   int     // files of a message, at most 253; 0 means 16
	MaxCalls   int     // calls of one end in progress, and as many posts; 0 means 32

	// Sentinels are errors that keep their identity (errors.Is) on the way, each with a code. Errors of package
	// context, and numbers of the kernel's errors, always do.
	Sentinels map[string]error
}

// stall is how long the peer may leave a full socket unread, and drainTime how long what it sent before it closed the
// socket is read.
const (
	stall     = 30 * time.Second
	drainTime = time.Second
)

// A Conn is one end of a connection. Its methods may be called at the same time.
type Conn struct {
	o         Options
	sentinels sentinels
	socket    socket
	stall     time.Duration

	ctx    context.Context // of handlers
	cancel context.CancelFunc
	wg     sync.WaitGroup // everything that runs
	done   chan struct{}
	posts  chan job // of the peer. It has room for all that may be in progress.

	// Each has an element for each of our calls and posts that the peer has not answered. Calls that were given up
	// count: the peer still has them.
	calls, posted chan struct{}

	out struct {
		sync.Mutex
		err     error      // why nothing is sent any more
		queue   []*message // what the socket had no room for
		writing bool       // a goroutine sends the queue
	}

	// mu may be taken while out is held, not the reverse.
	mu      sync.Mutex
	err     error // of the connection's end
	nextID  uint64
	waiting map[uint64]*call   // ours, until they are answered
	serving map[uint64]*served // the peer's, until they are answered
	counts  [2]int             // of serving: calls, posts
}

// A call is one of ours. A post has no answer channel.
type call struct {
	answer    chan answer // has room for one
	sent      bool        // so the peer may answer it
	abandoned bool
}

type answer struct {
	m   *message
	err error
}

// served is a call or post of the peer.
type served struct {
	id     uint64
	kind   kind
	ctx    context.Context
	cancel context.CancelFunc
}

type job struct {
	m *message
	s *served
}

// New makes a connection of an end of Pair, which it takes. Handlers may run before it returns. Close must be called,
// also after the connection has ended.
func New(f *os.File, o Options) (*Conn, error) { return newConn(f, o, stall) }

func newConn(f *os.File, o Options, stall time.Duration) (*Conn, error) {
	for _, d := range []struct {
		name                   string
		v                      *int
		otherwise, least, most int
	}{
		{"MaxMessage", &o.MaxMessage, 1 << 20, 64 << 10, 1 << 30}, // the least has room for any wireError
		{"MaxFiles", &o.MaxFiles, 16, 1, maxRights},
		{"MaxCalls", &o.MaxCalls, 32, 1, 1 << 16},
	} {
		if *d.v == 0 {
			*d.v = d.otherwise
		}
		if *d.v < d.least || *d.v > d.most {
			f.Close()
			return nil, fmt.Errorf("rpc: %s is %d: it must be between %d and %d", d.name, *d.v, d.least, d.most)
		}
	}
	name := f.Name()
	s, err := open(f)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("use %s for calls: %w", name, err)
	}
	c := &Conn{
		o: o, sentinels: newSentinels(o.Sentinels), socket: s, stall: stall,
		done: make(chan struct{}), posts: make(chan job, o.MaxCalls),
		calls: make(chan struct{}, o.MaxCalls), posted: make(chan struct{}, o.MaxCalls),
		waiting: map[uint64]*call{}, serving: map[uint64]*served{},
	}
	c.ctx, c.cancel = context.WithCancel(context.WithValue(context.Background(), peerKey{}, c))
	c.wg.Go(c.read)
	c.wg.Go(c.servePosts)
	return c, nil
}

type peerKey struct{}

// Peer returns the connection of the call that a handler's context belongs to.
func Peer(ctx context.Context) *Conn {
	c, _ := ctx.Value(peerKey{}).(*Conn)
	return c
}

// Done is closed when the connection has ended. Handlers may still run; Close waits for them.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err says why the connection has ended: ErrClosed, ErrPeerClosed, ErrProtocol, ErrStalled, or an error of the
// socket. It is nil until then.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection, cancels the handlers' contexts, and waits for the handlers. Messages for which the socket
// had no room are lost.
func (c *Conn) Close() error {
	c.out.Lock()
	if c.out.err == nil {
		c.out.err = ErrClosed
	}
	c.out.Unlock()
	c.cancel()
	err := c.socket.f.Close()
	c.wg.Wait()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// Call has the peer serve a method, and stores the reply in reply unless that is nil. It takes files, also if it fails;
// the caller owns the files that it returns. When ctx ends, it returns at once, and the peer's handler is cancelled. It
// waits while MaxCalls calls are unanswered.
//
// A handler's error has the text that it has at the peer, and is (errors.Is) what Options.Sentinels says.
func (c *Conn) Call(ctx context.Context, method string, arg, reply any, files ...*os.File) ([]*os.File, error) {
	m, err := c.newMessage(kindCall, method, arg, files)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		m.closeFiles()
		return nil, fmt.Errorf("call %s: %w", method, err)
	}
	select {
	case c.calls <- struct{}{}:
	case <-ctx.Done():
		m.closeFiles()
		return nil, fmt.Errorf("call %s, while %d calls are unanswered: %w", method, c.o.MaxCalls, ctx.Err())
	case <-c.done:
		m.closeFiles()
		return nil, c.ended(method)
	}
	p := &call{answer: make(chan answer, 1)}
	c.begin(m, p)

	var a answer
	select {
	case a = <-p.answer:
	case <-ctx.Done():
		if c.abandon(m.id, p) {
			return nil, fmt.Errorf("call %s: %w", method, ctx.Err())
		}
		a = <-p.answer
	case <-c.done:
		select {
		case a = <-p.answer: // it came before the end
		default:
			return nil, c.ended(method)
		}
	}
	if a.err != nil {
		return nil, fmt.Errorf("call %s: %w", method, a.err)
	}
	if a.m.kind == kindError {
		return nil, c.sentinels.decode(a.m.body)
	}
	if reply != nil {
		if err := json.Unmarshal(a.m.body, reply); err != nil {
			a.m.closeFiles()
			return nil, fmt.Errorf("call %s: read the reply: %s", method, printable(err.Error())) // it quotes the reply
		}
	}
	return a.m.files, nil
}

// Post has the peer serve a method, and does not wait. The peer serves posts in their order, and nobody hears of a
// failure. While MaxCalls posts are unserved, Post fails with ErrBusy.
func (c *Conn) Post(method string, arg any) error {
	m, err := c.newMessage(kindPost, method, arg, nil)
	if err != nil {
		return err
	}
	select {
	case <-c.done:
		return c.ended(method)
	default:
	}
	select {
	case c.posted <- struct{}{}:
	default:
		return fmt.Errorf("post %s: %w", method, ErrBusy)
	}
	c.begin(m, &call{})
	return nil
}

func (c *Conn) ended(method string) error {
	return fmt.Errorf("call %s: the connection has ended: %w", method, c.Err())
}

// newMessage closes the files if it fails.
func (c *Conn) newMessage(k kind, method string, body any, files []*os.File) (*message, error) {
	m := &message{kind: k, method: method, files: files}
	err := func() (err error) {
		if !validMethod(method) {
			return fmt.Errorf("call %q: the name of a method has up to %d letters, digits and ._-/", method, maxMethod)
		}
		if m.body, err = json.Marshal(body); err != nil {
			return fmt.Errorf("call %s: make JSON of its body: %w", method, err)
		}
		switch {
		case len(m.body) > c.o.MaxMessage:
			return fmt.Errorf("call %s: its body has %d bytes, and the limit is %d: split it, or pass a file",
				method, len(m.body), c.o.MaxMessage)
		case len(files) > c.o.MaxFiles:
			return fmt.Errorf("call %s: it has %d files, and the limit is %d", method, len(files), c.o.MaxFiles)
		}
		for _, f := range files {
			if f == nil {
				return fmt.Errorf("call %s: one of its files is nil", method)
			}
		}
		return nil
	}()
	if err != nil {
		m.closeFiles()
		return nil, err
	}
	return m, nil
}

// begin sends a call or post of ours.
func (c *Conn) begin(m *message, p *call) {
	c.mu.Lock()
	c.nextID++
	m.id = c.nextID
	c.waiting[m.id] = p
	c.mu.Unlock()
	c.send(m)
}

// abandon gives a call up, unless its answer has come.
func (c *Conn) abandon(id uint64, p *call) bool {
	c.mu.Lock()
	_, waits := c.waiting[id]
	p.abandoned = true
	c.mu.Unlock()
	if waits {
		c.send(&message{kind: kindCancel, id: id})
	}
	return waits
}

// settle gives a call of ours its answer.
func (c *Conn) settle(id uint64, a answer) error {
	c.mu.Lock()
	p := c.waiting[id]
	if p != nil && !p.sent && a.m != nil {
		p = nil
	} else {
		delete(c.waiting, id)
	}
	wanted := p != nil && p.answer != nil && !p.abandoned
	if wanted {
		p.answer <- a
	}
	c.mu.Unlock()

	if !wanted && a.m != nil {
		a.m.closeFiles()
	}
	switch {
	case p == nil:
		return broken("an answer belongs to no call that has been sent")
	case p.answer == nil:
		<-c.posted
	default:
		<-c.calls
	}
	return nil
}

// send sends a message at once, or leaves it to a goroutine if the socket has no room. So it does not wait for the
// peer. It takes the message's files.
//
// The queue is bounded without a limit of its own: it has what belongs to unanswered calls and posts, ours and the
// peer's, and at most MaxCalls of each are unanswered.
func (c *Conn) send(m *message) {
	if !c.trySend(m) {
		return
	}
	m.closeFiles()
}

// trySend reports whether the message is done with.
func (c *Conn) trySend(m *message) bool {
	c.out.Lock()
	defer c.out.Unlock()
	if c.out.err != nil {
		return true
	}
	if !c.out.writing {
		if c.write(m, false) {
			return true
		}
		c.out.writing = true
		c.wg.Go(c.sendQueue)
	}
	c.out.queue = append(c.out.queue, m)
	return false
}

func (c *Conn) sendQueue() {
	for {
		c.out.Lock()
		if c.out.err != nil || len(c.out.queue) == 0 {
			queue := c.out.queue
			c.out.queue, c.out.writing = nil, false
			_ = c.socket.f.SetWriteDeadline(time.Time{}) // it fails once the socket is closed
			c.out.Unlock()
			for _, m := range queue {
				m.closeFiles()
			}
			return
		}
		m := c.out.queue[0]
		c.out.queue[0] = nil
		c.out.queue = c.out.queue[1:]
		c.out.Unlock()

		_ = c.socket.f.SetWriteDeadline(time.Now().Add(c.stall))
		c.write(m, true)
		m.closeFiles()
	}
}

// write sends a message, and reports false if it may not wait for the room that the message needs. Only one goroutine
// is in it: who has out, or sendQueue.
func (c *Conn) write(m *message, wait bool) bool {
	for {
		var err error
		werr := c.socket.raw.Write(func(fd uintptr) bool {
			err = m.sendTo(int(fd), func() { c.leaves(m) })
			return !wait || !errors.Is(err, unix.EAGAIN)
		})
		var ferr filesError
		switch {
		case errors.As(err, &ferr):
			if c.refuse(m, ferr.error) {
				continue
			}
			return true
		case werr != nil:
			err = werr
		case errors.Is(err, unix.EAGAIN):
			return false
		}
		if err != nil {
			c.breakOff(err, wait)
		}
		return true
	}
}

// leaves is called before the last packet of m is sent. Once the peer has that, it may answer a call, and make another
// if m is an answer.
func (c *Conn) leaves(m *message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.kind == kindCall || m.kind == kindPost {
		if p := c.waiting[m.id]; p != nil {
			p.sent = true
		}
	}
	if s := m.answered; s != nil {
		m.answered = nil
		delete(c.serving, s.id)
		c.counts[s.kind-kindCall]--
	}
}

// refuse is for a message whose files cannot be sent. It reports whether m became an error, which can.
func (c *Conn) refuse(m *message, err error) bool {
	if m.kind == kindCall {
		_ = c.settle(m.id, answer{err: err}) // it is ours, so it is known
		return false
	}
	m.closeFiles()
	m.kind, m.body = kindError, c.sentinels.encode(err)
	return true
}

// breakOff ends a connection on which nothing can be sent. What the peer sent before is still read.
func (c *Conn) breakOff(err error, unlocked bool) {
	switch {
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET):
		err = ErrPeerClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("%w for %v", ErrStalled, c.stall)
	default:
		err = fmt.Errorf("send to the peer: %w", err)
	}
	if unlocked {
		c.out.Lock()
		defer c.out.Unlock()
	}
	if c.out.err == nil {
		c.out.err = err
		_ = c.socket.f.SetReadDeadline(time.Now().Add(drainTime)) // it fails once the socket is closed
	}
}
