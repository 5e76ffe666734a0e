package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// Cmd is a command to run in a sandbox. Its Stdin and Window fields are set by IO.
type Cmd struct {
	wire.ExecStart
	IO
}

// IO has the streams of a command. A writer that blocks stalls the command, and nothing else.
type IO struct {
	// Stdin is read to its end; nil is an empty stdin. When the command ends first, a Read that is under way ends in
	// its own time.
	Stdin          io.Reader
	Stdout, Stderr io.Writer // nil discards
	// Resize delivers new sizes of the terminal.
	Resize <-chan wire.TTY
}

// ExitError is a command that ended other than with exit code 0.
type ExitError struct{ wire.ExitStatus }

// Error implements error.
func (e *ExitError) Error() string {
	switch {
	case e.NotStarted != "":
		return fmt.Sprintf("the command ended with exit code %d: %q", e.ExitCode, e.NotStarted)
	case e.TimedOut:
		return fmt.Sprintf("the command ended with exit code %d: timed out", e.ExitCode)
	case e.Signal != 0:
		return fmt.Sprintf("the command ended with exit code %d: signal %d", e.ExitCode, e.Signal)
	}
	return fmt.Sprintf("the command ended with exit code %d", e.ExitCode)
}

// ErrDetached is the error of a session that was left, or lost its connection, before the process's end. A detached
// process goes on: attach to it with Session.ID and Session.Offset.
var ErrDetached = errors.New("the session ended before its process")

// Session is a stream of a process.
type Session struct {
	op, name string
	conn     *websocket.Conn
	ctx      context.Context
	cancel   context.CancelCauseFunc
	io       IO
	id       string
	pid      int
	done     chan struct{}
	status   *wire.ExitStatus // valid once done is closed, as is err
	err      error

	mu     sync.Mutex // guards what follows
	offset uint64
	acked  uint64        // bytes of stdin
	moved  chan struct{} // closed when acked changes
	left   bool
}

// Exec runs a command to its end, and wakes the sandbox first. The error is an *ExitError if the command ended other
// than with exit code 0; the status is returned then as well. When ctx ends, the command is killed.
func (b *Sandbox) Exec(ctx context.Context, cmd Cmd) (*wire.ExitStatus, error) {
	s, err := b.Start(ctx, cmd)
	if err != nil {
		return nil, err
	}
	return s.Wait()
}

// Start starts a command. ctx governs the whole session. A command whose file is missing is not an error of Start:
// its session ends at once, with code 126 or 127.
func (b *Sandbox) Start(ctx context.Context, cmd Cmd) (*Session, error) {
	cmd.ExecStart.Stdin, cmd.Window = cmd.IO.Stdin != nil, 0
	first := struct {
		Type string `json:"type"`
		wire.ExecStart
	}{wire.ControlStart, cmd.ExecStart}
	return b.session(ctx, "exec", "/exec", first, cmd.IO, 0)
}

// Attach connects to a process that was started with Detach, in the place of any other session. Output begins at
// offset, or at the oldest byte that is kept.
func (b *Sandbox) Attach(ctx context.Context, process string, offset uint64, streams IO) (*Session, error) {
	return b.session(ctx, "attach", "/processes/"+url.PathEscape(process)+"/attach?offset="+strconv.FormatUint(offset, 10), nil, streams, offset)
}

// socket opens a WebSocket.
func (b *Sandbox) socket(ctx context.Context, op, path string) (*websocket.Conn, error) {
	h := http.Header{}
	b.c.show(h)
	c, resp, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(b.c.base+b.path(path), "http"), &websocket.DialOptions{
		HTTPClient: b.c.http, HTTPHeader: h, Subprotocols: []string{wire.StreamProtocol}, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols && resp.Body != nil {
			err = errorOf(resp)
		}
		return nil, fail(op, b.name, err)
	}
	c.SetReadLimit(wire.MaxMessage)
	return c, nil
}

func (b *Sandbox) session(ctx context.Context, op, path string, first any, streams IO, offset uint64) (*Session, error) {
	conn, err := b.socket(ctx, op, path)
	if err != nil {
		return nil, err
	}
	s := &Session{op: op, name: b.name, conn: conn, io: streams, done: make(chan struct{}), moved: make(chan struct{}), offset: offset}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	if first != nil {
		err = s.say(first)
	}
	var m *wire.Control
	if err == nil {
		m, err = s.begun()
	}
	if err != nil {
		s.cancel(err)
		_ = conn.CloseNow()
		return nil, fail(op, b.name, err)
	}
	if m.Type == wire.ControlExit {
		s.finish(m, nil)
		return s, nil
	}
	if m.ExecStart != nil {
		s.id = m.Process
	}
	s.pid, s.offset = m.PID, m.Offset
	go s.run()
	return s, nil
}

func (s *Session) say(m any) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return s.conn.Write(s.ctx, websocket.MessageText, text)
}

// begun returns the first control: started, or exit.
func (s *Session) begun() (*wire.Control, error) {
	kind, text, err := s.conn.Read(s.ctx)
	if err != nil {
		return nil, err
	}
	m := &wire.Control{}
	if kind != websocket.MessageText || json.Unmarshal(text, m) != nil {
		return nil, errors.New("the server's first message is no control")
	}
	switch {
	case m.Type == wire.ControlError && m.Error != nil:
		return nil, m.Error.Err()
	case m.Type == wire.ControlStarted, m.Type == wire.ControlExit && m.Exit != nil:
		return m, nil
	}
	return nil, fmt.Errorf("the server begins with a control of type %.64q", m.Type)
}

// ID is the name of the process, for Attach.
func (s *Session) ID() string { return s.id }

// PID is the process's id in the sandbox; 0 if it could not be started.
func (s *Session) PID() int { return s.pid }

// Offset is the position in the output after the last byte that was written to Stdout or Stderr.
func (s *Session) Offset() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.offset
}

// Done is closed when the session is over.
func (s *Session) Done() <-chan struct{} { return s.done }

// Wait waits for the end of the process and its output. The error is an *ExitError for a status other than 0,
// ErrDetached if the session ended before its process, the context's error, or a writer's.
func (s *Session) Wait() (*wire.ExitStatus, error) {
	<-s.done
	return s.status, s.err
}

// Signal sends a signal to the process and its group.
func (s *Session) Signal(signal int) error {
	return s.say(wire.Control{Type: wire.ControlSignal, Signal: signal})
}

// CloseStdin ends the process's stdin, of a session without IO.Stdin: that of a detached process is open otherwise.
func (s *Session) CloseStdin() error { return s.say(wire.Control{Type: wire.ControlEOF}) }

// Resize sets the size of the terminal.
func (s *Session) Resize(size wire.TTY) error {
	return s.say(wire.Control{Type: wire.ControlResize, Rows: size.Rows, Cols: size.Cols})
}

// Detach ends the session, and leaves a detached process running.
func (s *Session) Detach() error {
	s.mu.Lock()
	s.left = true
	s.mu.Unlock()
	if err := s.say(wire.Control{Type: wire.ControlDetach}); err != nil {
		return err
	}
	<-s.done
	return nil
}

// Close ends the session. A detached process goes on; any other is killed.
func (s *Session) Close() error {
	s.cancel(ErrDetached)
	<-s.done
	return nil
}

func (s *Session) run() {
	go s.feed()
	var resized sync.WaitGroup
	resized.Go(func() {
		for {
			select {
			case size, ok := <-s.io.Resize:
				if !ok || s.Resize(size) != nil {
					return
				}
			case <-s.ctx.Done():
				return
			}
		}
	})
	m, err := s.receive()
	s.cancel(nil)
	resized.Wait()
	s.finish(m, err)
}

// finish sets the result.
func (s *Session) finish(m *wire.Control, err error) {
	cause := context.Cause(s.ctx)
	s.cancel(nil)
	if err == nil {
		s.status = m.Exit
		if m.Exit.ExitCode != 0 {
			s.err = &ExitError{*m.Exit}
		}
		_ = s.conn.Close(websocket.StatusNormalClosure, "")
	} else {
		s.mu.Lock()
		left := s.left
		s.mu.Unlock()
		var known *records.Error
		switch {
		case errors.As(err, &known):
		case left, errors.Is(cause, ErrDetached):
			err = ErrDetached
		case cause != nil && !errors.Is(cause, context.Canceled):
			err = cause
		case s.ctx.Err() != nil && errors.Is(err, context.Canceled):
			err = context.Canceled
		default:
			err = fmt.Errorf("%w: %w", ErrDetached, err)
		}
		s.err = fail(s.op, s.name, err)
		_ = s.conn.CloseNow()
	}
	close(s.done)
}

// receive handles the server's messages until the process's exit.
func (s *Session) receive() (*wire.Control, error) {
	var buf bytes.Buffer
	for {
		kind, r, err := s.conn.Reader(s.ctx)
		if err != nil {
			return nil, err
		}
		buf.Reset()
		if _, err := buf.ReadFrom(r); err != nil {
			return nil, err
		}
		p := buf.Bytes()
		if kind == websocket.MessageBinary {
			if err := s.deliver(p); err != nil {
				return nil, err
			}
			continue
		}
		var m wire.Control
		if err := json.Unmarshal(p, &m); err != nil {
			return nil, fmt.Errorf("reading the server's answer: %w", err)
		}
		switch {
		case m.Type == wire.ControlAck:
			s.mu.Lock()
			s.acked = max(s.acked, m.Bytes)
			close(s.moved)
			s.moved = make(chan struct{})
			s.mu.Unlock()
		case m.Type == wire.ControlExit && m.Exit != nil:
			return &m, nil
		case m.Type == wire.ControlError && m.Error != nil:
			return nil, m.Error.Err()
		}
	}
}

// deliver writes output.
func (s *Session) deliver(p []byte) error {
	if len(p) == 0 || p[0] != wire.StreamStdout && p[0] != wire.StreamStderr {
		return errors.New("the server sends data of an unknown stream")
	}
	w := s.io.Stdout
	if p[0] == wire.StreamStderr {
		w = s.io.Stderr
	}
	if w != nil {
		if _, err := w.Write(p[1:]); err != nil {
			err = fmt.Errorf("write the command's output: %w", err)
			s.cancel(err)
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.offset += uint64(len(p) - 1)
	return nil
}

// feed sends Stdin, within the window of the server, so that signals get through.
func (s *Session) feed() {
	if s.io.Stdin == nil {
		return
	}
	buf := make([]byte, 1+wire.MaxChunk)
	buf[0] = wire.StreamStdin
	for sent := uint64(0); ; {
		n, err := s.io.Stdin.Read(buf[1:])
		for sent += uint64(n); ; {
			s.mu.Lock()
			room, moved := s.acked+wire.StdinWindow >= sent, s.moved
			s.mu.Unlock()
			if room {
				break
			}
			select {
			case <-moved:
			case <-s.ctx.Done():
				return
			}
		}
		if n > 0 && s.conn.Write(s.ctx, websocket.MessageBinary, buf[:1+n]) != nil {
			return
		}
		if errors.Is(err, io.EOF) {
			_ = s.say(wire.Control{Type: wire.ControlEOF})
			return
		}
		if err != nil {
			s.cancel(fmt.Errorf("read the command's input: %w", err))
			return
		}
	}
}

// Dial connects to an address as the sandbox sees it: network "tcp", and a port of 127.0.0.1 or localhost. It wakes
// a sandbox that sleeps. ctx bounds the connecting only.
func (b *Sandbox) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	const op = "connect"
	host, port, err := net.SplitHostPort(address)
	if err != nil || network != "tcp" || host != "127.0.0.1" && host != "localhost" && host != "" {
		return nil, fail(op, b.name, fmt.Errorf("%s %s: use tcp and a port of 127.0.0.1", network, address))
	}
	ws, err := b.socket(ctx, op, "/ports/"+url.PathEscape(port))
	if err != nil {
		return nil, err
	}
	s := &Session{conn: ws, ctx: ctx}
	m, err := s.begun()
	if err == nil && m.Type != wire.ControlStarted {
		err = errors.New("the server does not begin the connection")
	}
	if err != nil {
		_ = ws.CloseNow()
		return nil, fail(op, b.name, err)
	}
	c := &portConn{ws: ws, address: address}
	c.ctx, c.end = context.WithCancel(context.Background())
	return c, nil
}

// portConn is a connection to a port of a sandbox.
type portConn struct {
	ws      *websocket.Conn
	address string
	ctx     context.Context
	end     context.CancelFunc
	late    atomic.Bool // a deadline has passed

	reading sync.Mutex // guards rest and eof
	rest    io.Reader
	eof     bool

	mu      sync.Mutex // guards what follows
	readBy  time.Time
	writeBy time.Time
}

// by ends the connection when a deadline passes, until the returned function is called.
func (c *portConn) by(at *time.Time) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at.IsZero() {
		return func() bool { return true }
	}
	return time.AfterFunc(time.Until(*at), func() {
		c.late.Store(true)
		_ = c.ws.CloseNow()
	}).Stop
}

func (c *portConn) fail(err error) error {
	switch {
	case c.ctx.Err() != nil:
		return net.ErrClosed
	case c.late.Load():
		return os.ErrDeadlineExceeded
	case websocket.CloseStatus(err) == websocket.StatusNormalClosure:
		return io.EOF
	}
	return err
}

// Read implements net.Conn. A deadline that passes ends the connection.
func (c *portConn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	defer c.by(&c.readBy)()
	for !c.eof {
		if c.rest == nil {
			kind, r, err := c.ws.Reader(c.ctx)
			if err != nil {
				return 0, c.fail(err)
			}
			if kind == websocket.MessageText {
				var m wire.Control
				if err := json.NewDecoder(r).Decode(&m); err != nil {
					return 0, err
				}
				_, _ = io.Copy(io.Discard, r)
				if m.Type == wire.ControlError && m.Error != nil {
					return 0, m.Error.Err()
				}
				c.eof = m.Type == wire.ControlEOF
				continue
			}
			c.rest = r
		}
		n, err := c.rest.Read(p)
		if errors.Is(err, io.EOF) {
			c.rest, err = nil, nil
		}
		if err != nil {
			return n, c.fail(err)
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, io.EOF
}

// Write implements net.Conn.
func (c *portConn) Write(p []byte) (n int, err error) {
	defer c.by(&c.writeBy)()
	for n < len(p) {
		m := min(len(p)-n, wire.MaxChunk)
		if err := c.ws.Write(c.ctx, websocket.MessageBinary, p[n:n+m]); err != nil {
			return n, c.fail(err)
		}
		n += m
	}
	return n, nil
}

// CloseWrite ends what is sent; what the other end still sends can be read.
func (c *portConn) CloseWrite() error {
	return c.ws.Write(c.ctx, websocket.MessageText, wire.Control{Type: wire.ControlEOF}.Encode())
}

// Close implements net.Conn.
func (c *portConn) Close() error {
	c.end()
	return c.ws.CloseNow()
}

type portAddr string

func (portAddr) Network() string  { return "tcp" }
func (a portAddr) String() string { return string(a) }

func (c *portConn) LocalAddr() net.Addr  { return portAddr("") }
func (c *portConn) RemoteAddr() net.Addr { return portAddr(c.address) }

// SetDeadline implements net.Conn: for the calls that begin after it.
func (c *portConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *portConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.readBy = t
	return nil
}

func (c *portConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writeBy = t
	return nil
}
