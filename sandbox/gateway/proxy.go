package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest"
)

// proxies is the reverse proxy of a gateway.
type proxies struct {
	g *Gateway
	p httputil.ReverseProxy
}

// keyCarry is the context key of the carry of a request.
type keyCarry struct{}

// carry is a request on its way.
type carry struct {
	u    *use
	to   Route
	body *body
	stop func() bool // nobody waits any more for the end of the connection to the guest; nil without a body
}

// body is the body of a request. The transport reads it until it ends, also when the guest is gone, and a client may
// wait for an answer before it goes on: interrupt ends such a read.
type body struct {
	io.ReadCloser
	client        *http.ResponseController
	ended, broken atomic.Bool // it is read; the client broke it off

	mu   sync.Mutex // held to interrupt it; guards over
	over bool       // its connection may have another request
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		b.ended.Store(true)
	case err != nil && !errors.Is(err, http.ErrBodyReadAfterClose) && !errors.Is(err, os.ErrDeadlineExceeded):
		b.broken.Store(true)
	}
	return n, err
}

func (b *body) interrupt() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.over && !b.ended.Load() {
		_ = b.client.SetReadDeadline(time.Unix(1, 0)) // both versions of HTTP can do that
	}
}

func (b *body) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over = true
}

// got notes the connection to the guest that a request has.
func (c *carry) got(i httptrace.GotConnInfo) {
	to := i.Conn
	if t, ok := to.(*tls.Conn); ok {
		to = t.NetConn()
	}
	if k, ok := to.(*conn); ok && c.stop != nil {
		c.stop() // it is tried again
		c.stop = context.AfterFunc(k.gone, c.body.interrupt)
	}
}

// flushTime is how long a part of an answer with a length may wait for more. What has no length does not wait.
const flushTime = 10 * time.Millisecond

func newProxies(g *Gateway) *proxies {
	x := &proxies{g: g}
	x.p = httputil.ReverseProxy{
		Rewrite: rewrite, Transport: x, ModifyResponse: x.answer, ErrorHandler: x.failed, BufferPool: buffers{}, FlushInterval: flushTime,
		// A guest's answers, and clients that go away, do not fill the log.
		ErrorLog: slog.NewLogLogger(g.log.Handler(), slog.LevelDebug),
	}
	return x
}

// serve carries a request, and returns when it has ended.
func (x *proxies) serve(w http.ResponseWriter, r *http.Request, u *use, to Route) {
	c := &carry{u: u, to: to, body: &body{ReadCloser: r.Body, client: http.NewResponseController(w)}}
	ctx, cancel := context.WithCancelCause(context.WithValue(r.Context(), keyCarry{}, c))
	defer cancel(nil)
	cut := func(why error) {
		cancel(why)
		c.body.interrupt()
	}
	u.carries(cut)
	stop := context.AfterFunc(u.s.ctx, func() { cut(context.Cause(u.s.ctx)) })
	defer stop()
	r = r.WithContext(c.traced(ctx))
	if r.Body == http.NoBody {
		c.body.over = true
	} else {
		r.Body, c.stop = c.body, func() bool { return false }
		defer func() {
			c.stop()
			c.body.leave()
		}()
	}
	x.p.ServeHTTP(w, r)
}

// maxInterim is how many interim responses (1xx) an answer may have.
const maxInterim = 16

var errInterim = fmt.Errorf("%w: it sends more than %d interim responses", ErrBadServer, maxInterim)

// traced bounds interim responses. The transport does not, since the reverse proxy passes them on.
func (c *carry) traced(ctx context.Context) context.Context {
	n := 0
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: c.got, Got1xxResponse: func(int, textproto.MIMEHeader) error {
		if n++; n > maxInterim {
			return errInterim
		}
		return nil
	}})
}

// hidden are header fields that the guest must not see, or only as the gateway sets them.
var hidden = []string{HeaderSandbox, HeaderPort, HeaderToken, "X-Real-Ip", "Forwarded"}

const forwarded = "X-Forwarded-"

// hides reports whether the guest must not see a field of the client. Servers that pass fields on as variables, as CGI
// and WSGI do, take "_" for "-".
func (g *Grant) hides(name string) bool {
	name = strings.ReplaceAll(name, "_", "-")
	is := func(other string) bool { return strings.EqualFold(name, other) }
	return is(forwarded+name[min(len(forwarded), len(name)):]) || slices.ContainsFunc(hidden, is) || slices.ContainsFunc(g.Hide, is)
}

// rewrite makes the request that the guest sees. The reverse proxy has removed what is between two hops.
func rewrite(p *httputil.ProxyRequest) {
	c := p.In.Context().Value(keyCarry{}).(*carry)
	h := p.Out.Header
	for name := range h {
		if c.u.grant.hides(name) {
			delete(h, name)
		}
	}
	p.Out.Trailer = nil // the reverse proxy would announce fields that it does not carry
	if up := h.Get("Upgrade"); up != "" && !strings.EqualFold(up, "websocket") {
		// Requests behind an upgrade to HTTP/2 would pass by all this.
		h.Del("Upgrade")
		h.Del("Connection")
	}
	h.Del("Http2-Settings")
	p.SetXForwarded()
	port := strconv.Itoa(int(c.to.Port))
	p.Out.URL.Scheme, p.Out.URL.Host = "http", net.JoinHostPort("127.0.0.1", port)
	if c.u.grant.HTTPS {
		p.Out.URL.Scheme = "https"
	}
	p.Out.URL.RawQuery = p.In.URL.RawQuery // as it is: the gateway does not read it
	p.Out.Host = p.In.Host
	if c.u.grant.Host != "" {
		p.Out.Host = strings.ReplaceAll(c.u.grant.Host, "${PORT}", port)
	}
}

// RoundTrip implements http.RoundTripper: by the session of the request. gRPC goes by HTTP/2, the rest by HTTP/1.1,
// which all servers speak.
func (x *proxies) RoundTrip(r *http.Request) (*http.Response, error) {
	s := r.Context().Value(keyCarry{}).(*carry).u.s
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") && r.ProtoMajor == 2 {
		return s.h2.RoundTrip(r)
	}
	return s.h1.RoundTrip(r)
}

// answer notes the header of the guest's answer.
func (x *proxies) answer(r *http.Response) error {
	if r.StatusCode == http.StatusSwitchingProtocols && r.Request.Header.Get("Upgrade") == "" {
		return fmt.Errorf("%w: it switches protocols unasked", ErrBadServer)
	}
	if both, ok := r.Body.(io.ReadWriteCloser); ok {
		r.Body = tunnel{both}
	}
	r.Request.Context().Value(keyCarry{}).(*carry).u.stream()
	return nil
}

// tunnel is the body of an upgraded connection. The reverse proxy copies by its methods, which hold little while
// nothing comes: most WebSockets are idle.
type tunnel struct{ io.ReadWriteCloser }

// WriteTo implements io.WriterTo.
func (t tunnel) WriteTo(w io.Writer) (int64, error) { return copyAll(w, t.ReadWriteCloser) }

// ReadFrom implements io.ReaderFrom.
func (t tunnel) ReadFrom(r io.Reader) (int64, error) { return copyAll(t.ReadWriteCloser, r) }

// CloseWrite ends the direction to the guest.
func (t tunnel) CloseWrite() error {
	if half, ok := t.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// errBody means that a client broke off the body of its request, or sent what is none.
var errBody = errors.New("the body of the request is broken")

// failed answers a request whose server gave no answer.
func (x *proxies) failed(w http.ResponseWriter, r *http.Request, err error) {
	c := r.Context().Value(keyCarry{}).(*carry)
	switch cause := context.Cause(r.Context()); {
	case cause != nil:
		err = cause
	case c.body.broken.Load():
		err = fmt.Errorf("%w: %w", errBody, err)
	}
	x.g.refuse(w, r, refusal(c.to, ofServer(err)))
}

// ofServer returns the error of a server's answer.
func ofServer(err error) error {
	switch {
	case errors.Is(err, ErrClosedPort), errors.Is(err, ErrBadServer), errors.Is(err, errBody), errors.Is(err, ErrBusy), errors.Is(err, context.Canceled),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return err
	}
	var fe *guest.ForwardError
	if errors.As(err, &fe) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrBadServer, err)
}

// buffers are the buffers of copies: httputil.BufferPool.
type buffers struct{}

const bufferSize = 32 << 10

var pool = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// idleSize is the buffer of a copy that waits, in bytes.
const idleSize = 2 << 10

// copyAll copies until r ends. It takes one of the buffers only while there is much to copy.
func copyAll(w io.Writer, r io.Reader) (n int64, err error) {
	idle := make([]byte, idleSize)
	buf := idle
	defer func() {
		if len(buf) > idleSize {
			buffers{}.Put(buf)
		}
	}()
	for {
		m, rerr := r.Read(buf)
		if m > 0 {
			k, err := w.Write(buf[:m])
			if n += int64(k); err != nil {
				return n, err
			}
		}
		switch {
		case errors.Is(rerr, io.EOF):
			return n, nil
		case rerr != nil:
			return n, rerr
		case m == idleSize && len(buf) == idleSize:
			buf = buffers{}.Get()
		case m < idleSize && len(buf) > idleSize:
			buffers{}.Put(buf)
			buf = idle
		}
	}
}

func (buffers) Get() []byte  { return pool.Get().(*[bufferSize]byte)[:] }
func (buffers) Put(b []byte) { pool.Put((*[bufferSize]byte)(b)) }
