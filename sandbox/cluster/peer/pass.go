package peer

import (
	"bytes"
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
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Pass passes a request on to the host that has its sandbox, and reports whether it has got its answer. If not, and err
// is nil, no other host has the sandbox. Otherwise err wraps spec.ErrUnreachable: the caller answers. If rest is true,
// nothing of the request was used, and this host may do what is to be done.
//
// The request goes to one host, and to one more if the first does not have the sandbox any more, or does not answer. It
// ends with its context. Of its header, all goes that is not between two hops only; the caller has removed what is for
// this host alone.
func (p *Peers) Pass(w http.ResponseWriter, r *http.Request, is Passed) (answered bool, err error) {
	last := ""
	for try := range 2 {
		host, werr := p.o.Directory.Where(r.Context(), is.Sandbox, try > 0)
		if werr != nil {
			return false, errors.Join(err, werr)
		}
		if host == "" || host == last && !errors.Is(err, errNotHere) {
			return false, err
		}
		again, perr := p.pass(w, r, is, host)
		if perr == nil {
			return true, nil
		}
		err, last = unreachable(is.Sandbox, host, perr), host
		if !again {
			return false, errors.Join(err, ErrUsed)
		}
	}
	return false, err
}

// ErrUsed means that a part of a request has gone to a host that did not answer: nobody knows what has become of it.
var ErrUsed = errors.New("what was asked may be done, or not")

// Ask asks a host itself: one of its handlers, which is no service for clients, by GET, or by POST with a body. most is
// the most bytes of the answer. An error that wraps ErrUsed says that the host may do what was asked.
func (p *Peers) Ask(ctx context.Context, host, service string, body []byte, most int64) ([]byte, error) {
	var to Host
	var err error
	for fresh := range 2 {
		next, derr := p.o.Directory.Peer(ctx, host, fresh > 0)
		if derr != nil || next == to {
			return nil, errors.Join(err, derr)
		}
		to = next
		var text []byte
		var dial *dialError
		if text, err = p.ask(ctx, to, service, body, most); !errors.As(err, &dial) {
			if err != nil {
				err = fmt.Errorf("%w: %w", ErrUsed, err)
			}
			return text, err
		}
	}
	return nil, err
}

func (p *Peers) ask(ctx context.Context, to Host, service string, body []byte, most int64) ([]byte, error) {
	if err := p.known(to); err != nil {
		return nil, err
	}
	is := Passed{Service: service, Sandbox: service, Nonce: nonce()}
	text, err := is.encode()
	if err != nil {
		return nil, err
	}
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
	}
	r, err := http.NewRequestWithContext(ctx, method, "https://"+to.Key+"/", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set(headerPassed, text)
	a, err := p.h1.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the host %s answers %s", to.Name, a.Status)
	}
	said, err := io.ReadAll(io.LimitReader(a.Body, most+1))
	if err == nil && int64(len(said)) > most {
		err = fmt.Errorf("the host %s answers with more than %d bytes", to.Name, most)
	}
	return said, err
}

// carry is a request on its way.
type carry struct {
	to      Host
	header  string
	nonce   string
	err     error
	used    *atomic.Bool
	expects bool
}

type carryKey struct{}

// pass passes a request on to a host. again reports whether the request can go to another one after an error.
func (p *Peers) pass(w http.ResponseWriter, r *http.Request, is Passed, host string) (again bool, err error) {
	c := &carry{nonce: nonce(), used: new(atomic.Bool)}
	for fresh := range 2 {
		to, derr := p.o.Directory.Peer(r.Context(), host, fresh > 0)
		if derr != nil {
			return true, errors.Join(err, derr)
		}
		if fresh > 0 && to == c.to {
			return true, err
		}
		c.to = to
		is.Nonce, is.Client, is.TLS = c.nonce, r.RemoteAddr, r.TLS != nil
		if c.header, err = is.encode(); err != nil {
			return true, err
		}
		c.err = nil
		again, err = p.carry(w, r, c)
		var dial *dialError
		if !again || !errors.As(err, &dial) {
			return again, err
		}
		// A later process of the host has another key, and perhaps another address.
	}
	return again, err
}

func (p *Peers) carry(w http.ResponseWriter, r *http.Request, c *carry) (again bool, err error) {
	if err := p.known(c.to); err != nil {
		return true, err
	}
	out := r.WithContext(context.WithValue(bounded1xx(r.Context()), carryKey{}, c))
	if c.expects = r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0; c.expects {
		out.Body = &untouched{body: r.Body, used: c.used}
	}
	proxy := httputil.ReverseProxy{
		Rewrite: rewrite, Transport: p, BufferPool: buffers{},
		ModifyResponse: func(a *http.Response) error {
			mine := a.Header.Get(headerNotHere) == c.nonce
			a.Header.Del(headerNotHere)
			if mine {
				return errNotHere
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, _ *http.Request, err error) { c.err = err },
		ErrorLog:     slog.NewLogLogger(p.log.Handler(), slog.LevelDebug), // clients that go away do not fill the log
	}
	proxy.ServeHTTP(continued{w}, out)
	if c.err == nil {
		return false, nil
	}
	if cause := context.Cause(r.Context()); cause != nil {
		return false, cause
	}
	var dial *dialError
	return !c.used.Load() && (errors.As(c.err, &dial) || errors.Is(c.err, errNotHere)), c.err
}

// rewrite makes the request that the other host gets. The reverse proxy has removed what is between two hops, and the
// client's Forwarded and X-Forwarded fields: the other host knows the client by what is asserted.
func rewrite(o *httputil.ProxyRequest) {
	c := o.In.Context().Value(carryKey{}).(*carry)
	h := o.Out.Header
	h.Del(headerNotHere)
	h.Set(headerPassed, c.header)
	h.Del("Http2-Settings")
	if up := h.Get("Upgrade"); up != "" && !strings.EqualFold(up, "websocket") {
		h.Del("Upgrade")
		h.Del("Connection")
	}
	if h.Del("Expect"); c.expects && h.Get("Upgrade") == "" {
		h.Set("Expect", "100-continue") // until the other host has said that the sandbox is there
	}
	o.Out.URL.Scheme, o.Out.URL.Host = "https", c.to.Key
	o.Out.URL.RawQuery = o.In.URL.RawQuery // as it is
	o.Out.Host = o.In.Host
}

// continued keeps the other host's "100 Continue" from the client, who did not ask for it, or gets it from the server.
type continued struct{ http.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (c continued) WriteHeader(code int) {
	if code != http.StatusContinue {
		c.ResponseWriter.WriteHeader(code)
	}
}

// Unwrap is for http.ResponseController.
func (c continued) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// untouched is a body that notes that something was read of it. Its Close leaves the body as it is, for another try.
type untouched struct {
	body   io.Reader
	used   *atomic.Bool
	closed atomic.Bool
}

func (u *untouched) Read(b []byte) (int, error) {
	if u.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	u.used.Store(true)
	return u.body.Read(b)
}

func (u *untouched) Close() error {
	u.closed.Store(true)
	return nil
}

// maxInterim is how many interim responses (1xx) an answer may have.
const maxInterim = 32

func bounded1xx(ctx context.Context) context.Context {
	n := 0
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
		if n++; n > maxInterim {
			return fmt.Errorf("more than %d interim responses", maxInterim)
		}
		return nil
	}})
}

// RoundTrip implements http.RoundTripper: gRPC goes by HTTP/2, all else by HTTP/1.1, which carries upgrades.
func (p *Peers) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") && r.ProtoMajor == 2 {
		return p.h2.RoundTrip(r)
	}
	return p.h1.RoundTrip(r)
}

// transport returns a transport to other hosts. The host of a URL is the key of a host: connections to an earlier
// process of a host are never used for a later one.
func (p *Peers) transport(h2 bool) *http.Transport {
	var protocols http.Protocols
	protocols.SetHTTP1(!h2)
	protocols.SetHTTP2(h2)
	protocol := "http/1.1"
	if h2 {
		protocol = "h2"
	}
	return &http.Transport{
		Protocols: &protocols, DisableCompression: true, MaxResponseHeaderBytes: 2 * maxHeader,
		MaxIdleConnsPerHost: maxIdle, IdleConnTimeout: idleTime, ExpectContinueTimeout: waitTime,
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerConnection: 1 << 20, MaxReceiveBufferPerStream: 256 << 10},
		DialTLSContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			key, _, _ := net.SplitHostPort(address)
			p.mu.Lock()
			to, ok := p.hosts[key]
			p.mu.Unlock()
			if !ok {
				return nil, &dialError{ErrNoHost}
			}
			return p.dial(ctx, to, protocol)
		},
	}
}

// dialError is the error of a connection that there is not.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// known notes a host, so that it can be dialed. It fails if the host has just not answered.
func (p *Peers) known(to Host) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if until, ok := p.down[to.Key]; ok {
		if time.Now().Before(until) {
			return &dialError{fmt.Errorf("%s does not answer at %s", to.Name, to.Address)}
		}
		delete(p.down, to.Key)
	}
	if len(p.hosts) >= maxHosts {
		clear(p.hosts)
	}
	p.hosts[to.Key] = to
	return nil
}

// dial connects to a host, and proves who both are.
func (p *Peers) dial(ctx context.Context, to Host, protocol string) (net.Conn, error) {
	fail := func(err error) (net.Conn, error) {
		if ctx.Err() == nil {
			p.mu.Lock()
			defer p.mu.Unlock()
			if len(p.down) >= maxHosts {
				clear(p.down)
			}
			p.down[to.Key] = time.Now().Add(downTime)
		}
		return nil, &dialError{fmt.Errorf("connecting to the host %s: %w", to.Name, err)}
	}
	d := net.Dialer{Timeout: dialTime}
	c, err := d.DialContext(ctx, "tcp", to.Address)
	if err != nil {
		return fail(err)
	}
	t := tls.Client(wholeConn{c}, p.o.Identity.client(to.Key, protocol))
	shake, cancel := context.WithTimeout(ctx, shakeTime)
	defer cancel()
	if err := t.HandshakeContext(shake); err != nil {
		return fail(errors.Join(err, c.Close()))
	}
	return t, nil
}

// buffers are the buffers of copies: httputil.BufferPool.
type buffers struct{}

const bufferSize = 32 << 10

var pool = sync.Pool{New: func() any { return new([bufferSize]byte) }}

func (buffers) Get() []byte  { return pool.Get().(*[bufferSize]byte)[:] }
func (buffers) Put(b []byte) { pool.Put((*[bufferSize]byte)(b)) }
