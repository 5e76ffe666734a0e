package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// Times of WebSockets.
const (
	quietTime  = 30 * time.Second // between pings, so that what lies between both ends does not take them for dead
	pongTime   = 20 * time.Second
	watchTime  = 5 * time.Second // between looks at the tokens of what runs long
	startTime  = 30 * time.Second
	maxPings   = 60 // of a client in quietTime
	maxPaths   = 64
	closeSpace = 120 // bytes of a close frame's reason
)

// Causes of the end of a stream, beside those of its work.
var (
	errEnding   = errors.New("the server ends")
	errFlood    = errors.New("too many pings")
	errProtocol = fmt.Errorf("%w: the client broke the rules of the stream", sandbox.ErrSpec)
)

// isWebSocket reports whether a request asks for a WebSocket.
func isWebSocket(r *http.Request) bool {
	for _, v := range r.Header.Values("Connection") {
		for word := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(word), "upgrade") {
				return strings.EqualFold(r.Header.Get("Upgrade"), "websocket")
			}
		}
	}
	return false
}

// bearerOf returns the token in the subprotocols that a client without a header of its own offers.
func bearerOf(r *http.Request) string {
	if !isWebSocket(r) {
		return ""
	}
	for _, v := range r.Header.Values("Sec-WebSocket-Protocol") {
		for word := range strings.SplitSeq(v, ",") {
			if token, ok := strings.CutPrefix(strings.TrimSpace(word), wire.BearerProtocol); ok {
				return token
			}
		}
	}
	return ""
}

// socket is the server's end of a WebSocket. One goroutine may receive; any may send.
type socket struct {
	*websocket.Conn
	// ctx is for the work: it ends with the connection, and before it for a cause that the client is told. conn is
	// for the connection, which ends when an operation with an ended context does.
	ctx    context.Context
	cancel context.CancelCauseFunc
	conn   context.Context

	writing atomic.Int32 // data messages that are being written
	pings   atomic.Int32 // of the client, since the last look
}

// frames are buffers of binary messages of the server.
var frames = sync.Pool{New: func() any { b := make([]byte, 0, 1+wire.MaxChunk); return &b }}

// upgrade makes a request a WebSocket. After an error the client has its answer. The caller calls done at the end.
func (s *Server) upgrade(r *request) (c *socket, done func(), err error) {
	c = &socket{}
	conn, cut := context.WithCancel(r.Context())
	c.conn = conn
	c.ctx, c.cancel = context.WithCancelCause(conn)
	_ = http.NewResponseController(r.w).SetWriteDeadline(time.Time{})
	// Its own check of the origin knows no Host behind a proxy: ServeHTTP has checked it.
	c.Conn, err = websocket.Accept(r.w, r.Request, &websocket.AcceptOptions{
		Subprotocols: []string{wire.StreamProtocol}, InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled,
		OnPingReceived: c.pinged,
	})
	if err != nil {
		cut()
		c.cancel(err)
		return nil, nil, err
	}
	c.SetReadLimit(wire.MaxMessage)
	s.streams.Add(1)
	unwatch := s.watch(r.caller(), c.cancel)
	c.later()
	return c, func() {
		c.cancel(nil)
		cut()
		unwatch()
		_ = c.CloseNow()
		s.streams.Done()
	}, nil
}

// pinged is called for each ping of the client. A pong that would wait behind data that the client does not read
// would end the connection, so such pings, and the first of many, stay without one.
func (c *socket) pinged(context.Context, []byte) bool {
	if c.pings.Add(1) > maxPings {
		c.cancel(errFlood)
		return false
	}
	return c.writing.Load() == 0
}

// later sends a ping after a while, and again while the connection lasts. It holds no goroutine meanwhile.
func (c *socket) later() {
	timer := time.AfterFunc(quietTime, func() {
		c.pings.Store(0)
		if c.writing.Load() == 0 {
			ctx, cancel := context.WithTimeout(c.ctx, pongTime)
			defer cancel()
			// Without a pong it may be that the client's messages wait for the command. A write that fails shows that
			// the client is gone, also then.
			if err := c.Ping(ctx); err != nil && ctx.Err() == nil {
				c.cancel(err)
			}
		}
		if c.ctx.Err() == nil {
			c.later()
		}
	})
	context.AfterFunc(c.ctx, func() { timer.Stop() })
}

// send writes a control.
func (c *socket) send(m wire.Control) error {
	return c.Write(c.conn, websocket.MessageText, m.Encode())
}

// data writes data of a stream, in parts. number is none for a connection to a port.
func (c *socket) data(number int, p []byte) error {
	c.writing.Add(1)
	defer c.writing.Add(-1)
	b := frames.Get().(*[]byte)
	defer frames.Put(b)
	for len(p) > 0 {
		part := p[:min(len(p), wire.MaxChunk)]
		out := (*b)[:0]
		if number != none {
			out = append(out, byte(number))
		}
		if err := c.Write(c.ctx, websocket.MessageBinary, append(out, part...)); err != nil {
			return err
		}
		p = p[len(part):]
	}
	return nil
}

// none is the number of a stream whose messages have no number.
const none = -1

// receive reads the next message into buf, which it may replace by a larger one.
func (c *socket) receive(buf []byte) (text bool, _ []byte, err error) {
	kind, r, err := c.Reader(c.conn)
	if err != nil {
		return false, buf, heard(err)
	}
	b := bytes.NewBuffer(buf[:0])
	_, err = b.ReadFrom(r)
	return kind == websocket.MessageText, b.Bytes(), heard(err)
}

// heard returns the error of a read, which is the client's: it has sent what is no message, or ended without a close.
func heard(err error) error {
	if err == nil || websocket.CloseStatus(err) != -1 {
		return err
	}
	return fmt.Errorf("%w: %w", errProtocol, err)
}

// readControl reads a text message.
func readControl(text []byte) (m wire.Control, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return m, fmt.Errorf("%w: a control: %s", errProtocol, strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return m, fmt.Errorf("%w: there is more after a control", errProtocol)
	}
	return m, nil
}

// end tells the client how the stream has ended, and closes it. last, if not nil, is its last control.
func (c *socket) end(last *wire.Control, err error) {
	cause := context.Cause(c.ctx)
	code, reason := websocket.StatusNormalClosure, ""
	switch {
	case errors.Is(cause, errEnding):
		code, reason, err = websocket.StatusGoingAway, errEnding.Error(), errEnding
	case errors.Is(cause, tokens.ErrUnknown), errors.Is(cause, tokens.ErrExpired), errors.Is(cause, errFlood):
		code, reason, err = websocket.StatusPolicyViolation, cause.Error(), cause
	case cause != nil:
		return // the connection has ended
	case errors.Is(err, sandbox.ErrSpec):
		code, reason = websocket.StatusPolicyViolation, err.Error()
	case err != nil:
		code, reason = websocket.StatusInternalError, err.Error()
	}
	ctx, cancel := context.WithTimeout(c.conn, pongTime)
	defer cancel()
	if err != nil {
		e := ErrorOf(err)
		last = &wire.Control{Type: wire.ControlError, Error: &e}
	}
	if last != nil && c.Write(ctx, websocket.MessageText, last.Encode()) != nil {
		return
	}
	if len(reason) > closeSpace {
		reason = strings.ToValidUTF8(reason[:closeSpace], "")
	}
	_ = c.Close(code, reason) // an error means that the client has gone
}

// watched are what runs long for callers, so that it ends with the server and with its token.
type watched struct {
	mu   sync.Mutex // guards what follows
	all  map[*watching]struct{}
	runs bool // a goroutine looks at the tokens
	over bool // the server ends
}

type watching struct {
	caller Caller
	end    context.CancelCauseFunc
}

// watch has end called when the server ends, or the caller's token. The caller calls forget before.
func (s *Server) watch(c Caller, end context.CancelCauseFunc) (forget func()) {
	w := &watching{c, end}
	s.watched.mu.Lock()
	defer s.watched.mu.Unlock()
	if s.watched.over {
		end(errEnding)
	}
	if s.watched.all == nil {
		s.watched.all = map[*watching]struct{}{}
	}
	s.watched.all[w] = struct{}{}
	if !s.watched.runs {
		s.watched.runs = true
		time.AfterFunc(watchTime, s.look)
	}
	return func() {
		s.watched.mu.Lock()
		defer s.watched.mu.Unlock()
		delete(s.watched.all, w)
	}
}

// look ends what runs for tokens that are no longer valid, and looks again while there is something.
func (s *Server) look() {
	s.watched.mu.Lock()
	defer s.watched.mu.Unlock()
	valid := map[[sha256.Size]byte]error{} // by the hash of a token
	for w := range s.watched.all {
		if w.caller.Local || w.caller.from != "" { // the first host looks
			continue
		}
		is := w.caller.is
		err, ok := valid[is.Hash]
		if !ok || is.Vouched() { // one identity may have been admitted by different tokens
			err = s.o.Identities.Valid(s.o.Tokens, is)
			valid[is.Hash] = err
		}
		if errors.Is(err, tokens.ErrUnknown) || errors.Is(err, tokens.ErrExpired) {
			w.end(err)
		}
	}
	if s.watched.runs = len(s.watched.all) > 0; s.watched.runs {
		time.AfterFunc(watchTime, s.look)
	}
}

// endAll ends all that runs long.
func (s *Server) endAll() {
	s.watched.mu.Lock()
	defer s.watched.mu.Unlock()
	s.watched.over = true
	for w := range s.watched.all {
		w.end(errEnding)
	}
}
