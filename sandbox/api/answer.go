package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/fleet"
)

// nothing is an answer without a body.
type nothing struct{}

// streamed is an answer that is written as it comes. An error before the first byte is answered as any other; later
// ones cut the connection, so that the client does not take a part for the whole.
type streamed struct {
	kind  string
	write func(io.Writer) error
	// flush passes on each write at once.
	flush bool
}

// streamWriter writes a streamed answer. The client has sendTime for each part.
type streamWriter struct {
	w      http.ResponseWriter
	out    *http.ResponseController
	ctx    context.Context
	status int
	flush  bool
	begun  bool
}

func (s *streamWriter) begin() {
	if !s.begun {
		s.begun = true
		s.w.WriteHeader(s.status)
	}
}

func (s *streamWriter) Write(p []byte) (int, error) {
	s.begin()
	_ = s.out.SetWriteDeadline(time.Now().Add(sendTime)) // test writers may lack deadlines
	if err := s.ctx.Err(); err != nil {                  // after the deadline, which interrupt sets after this
		return 0, context.Cause(s.ctx)
	}
	n, err := s.w.Write(p)
	if err == nil && s.flush {
		if ferr := s.out.Flush(); ferr != nil && !errors.Is(ferr, http.ErrNotSupported) {
			err = ferr
		}
	}
	return n, err
}

// stream writes a streamed answer.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, op string, status int, doc *streamed) {
	w.Header().Set("Content-Type", doc.kind)
	out := &streamWriter{w: w, out: http.NewResponseController(w), ctx: r.Context(), status: status, flush: doc.flush}
	if doc.flush {
		w.Header().Set("X-Accel-Buffering", "no") // proxies pass lines on
	}
	err := doc.write(out)
	switch {
	case err == nil:
		out.begin()
	case !out.begun:
		for _, name := range []string{"Content-Length", "Content-Range", "ETag", "Last-Modified", "Accept-Ranges"} {
			w.Header().Del(name)
		}
		s.fail(w, r, fleet.Fail(op, r.PathValue("name"), asked(err)))
	case doc.flush:
		// Lines are whole by themselves.
		s.log.Debug("a stream over HTTP has ended", "op", op, "error", err)
	default:
		s.log.Debug("an answer over HTTP was cut", "op", op, "error", err)
		panic(http.ErrAbortHandler)
	}
}

// quietLine is after how long a stream without lines gets an empty one, from which both ends learn whether the other
// still exists.
const quietLine = 15 * time.Second

// quietBegin is after how long an answer begins that has no line yet: until then an error has a status of its own.
const quietBegin = 2 * time.Second

// follow answers with lines of JSON, or server-sent events if Accept asks for them, until f returns. Its context ends
// with the server, the caller's token or the client.
func (s *Server) follow(r *request, f func(ctx context.Context, give func(any) error) error) (int, any, error) {
	sse := strings.Contains(r.Header.Get("Accept"), "text/event-stream")
	kind := "application/x-ndjson"
	if sse {
		kind = "text/event-stream"
	}
	return http.StatusOK, &streamed{kind: kind, flush: true, write: func(w io.Writer) error {
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer s.watch(r.caller(), cancel)()
		var mu sync.Mutex // held while a line is written
		begun, last := false, time.Now()
		line := func(text []byte) error {
			mu.Lock()
			defer mu.Unlock()
			if text == nil && begun && time.Since(last) < quietLine/2 {
				return nil
			}
			begun, last = true, time.Now()
			if sse && text == nil {
				text = []byte(":\n\n")
			} else if sse {
				text = fmt.Appendf(nil, "data: %s\n\n", text)
			} else {
				text = append(text, '\n')
			}
			_, err := w.Write(text)
			if err != nil {
				cancel(err)
			}
			return err
		}
		quiet := make(chan struct{})
		var ticks sync.WaitGroup
		ticks.Go(func() {
			tick := time.NewTimer(quietBegin)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					if line(nil) != nil {
						return
					}
					tick.Reset(quietLine)
				case <-quiet:
					return
				}
			}
		})
		err := f(ctx, func(doc any) error {
			text, err := json.Marshal(doc)
			if err != nil {
				return err
			}
			return line(text)
		})
		close(quiet)
		ticks.Wait()
		if ctx.Err() != nil {
			return nil // it was to go on until then
		}
		return err
	}}, nil
}

// uploaded is the body of an upload. The client has bodyPause for each part.
type uploaded struct {
	r   io.Reader
	out *http.ResponseController
	ctx context.Context
}

// bodyPause is how long a client may send nothing of an upload.
const bodyPause = 2 * time.Minute

func (u uploaded) Read(p []byte) (int, error) {
	_ = u.out.SetReadDeadline(time.Now().Add(bodyPause)) // test writers may lack deadlines
	if u.ctx.Err() != nil {                              // after the deadline, which interrupt sets after this
		return 0, context.Cause(u.ctx)
	}
	n, err := u.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("%w: reading the body: %w", sandbox.ErrSpec, err)
	}
	return n, err
}

// upload returns the body of a request that is read as it comes.
func (r *request) upload() io.Reader {
	return uploaded{r.Body, http.NewResponseController(r.w), r.Context()}
}

// serveSocket serves a route of WebSockets.
func (s *Server) serveSocket(rt route, w http.ResponseWriter, r *http.Request) {
	req := &request{Request: r, op: rt.op, w: w, server: s}
	var err error
	switch {
	case !isWebSocket(r):
		w.Header().Set("Upgrade", "websocket")
		err = own(wire.CodeUpgrade, "open it as a WebSocket", "%s is a stream", r.URL.Path)
	default:
		_, err = s.o.Host.Get(req.name())
	}
	if err != nil {
		unread(w, r)
		s.fail(w, r, fleet.Fail(rt.op, req.name(), err))
		return
	}
	c, done, err := s.upgrade(req)
	if err != nil {
		return // it has its answer
	}
	defer done()
	begin := time.Now()
	last, err := rt.socket(req, c)
	if err != nil {
		err = fleet.Fail(rt.op, req.name(), asked(err))
	}
	s.log.Info("stream over HTTP", "by", req.caller().Name, "op", rt.op, "sandbox", req.name(), "took_ms", time.Since(begin).Milliseconds(), "error", err)
	c.end(last, err)
}
