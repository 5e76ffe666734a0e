package proxy

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

// exchange is a forwarded request and its answer.
type exchange struct {
	target Target
	secure bool
	peer   atomic.Pointer[peerConn] // the peer that got it; nil until there is one
	// injected are the names of the secrets in it. values are the values of all secrets that its host may know.
	injected []string
	values   []string
	// mask is for the answer's body; nil if its host may know nothing.
	mask *mask
	// length is that of the answer's body; -1 if unknown.
	length int64
	// last is set if the connection ends with this exchange.
	last bool
}

// oneConnection are fields that the proxy does not forward (RFC 9110, 7.6.1), besides those that Connection names.
var oneConnection = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Authentication-Info",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings", "Alt-Svc",
}

func strip(h http.Header) {
	for _, v := range h["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			// Connection must not remove the request's host.
			if name = textproto.TrimString(name); name != "" && !strings.EqualFold(name, "Host") {
				h.Del(name)
			}
		}
	}
	for _, name := range oneConnection {
		h.Del(name)
	}
}

// forward forwards a request to a target.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, t Target, scheme string) {
	// A server may answer before it has read the whole request. Otherwise net/http would consume the rest itself.
	_ = http.NewResponseController(w).EnableFullDuplex()
	x := &exchange{target: t, secure: scheme == "https", length: -1, last: len(r.TransferEncoding) > 0}
	ctx, cancel := context.WithTimeout(r.Context(), RequestTimeout)
	defer cancel()
	out := r.Clone(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		c := i.Conn
		if secure, ok := c.(*tls.Conn); ok {
			c = secure.NetConn()
		}
		if p, ok := c.(*peerConn); ok {
			x.peer.Store(p)
		}
	}}))
	out.URL.Scheme, out.URL.Host, out.Host = scheme, t.String(), t.Host
	if deflt := map[string]uint16{"http": 80, "https": 443}[scheme]; t.Port != deflt {
		out.Host = t.String()
	}
	// Trailers would come after the request was judged.
	out.Trailer, out.TransferEncoding, out.Close = nil, nil, false
	strip(out.Header)
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header["User-Agent"] = []string{""} // or the transport would add its own
	}
	a := &answerer{ResponseWriter: w, x: x, patience: s.cfg.heldTimeout}
	defer a.end()
	resp := s.inject(x, out)
	if resp == nil {
		got, err := s.transport.RoundTrip(out)
		resp = s.answer(x, got, err)
	}
	defer resp.Body.Close()
	maps.Copy(a.Header(), resp.Header)
	a.WriteHeader(resp.StatusCode)
	if x.length < 0 && resp.Body != http.NoBody {
		// The header may be all that comes for a while.
		_ = http.NewResponseController(w).Flush()
	}
	if _, err := io.Copy(a, resp.Body); err != nil {
		// The client must not take what was sent so far for the whole answer.
		panic(http.ErrAbortHandler)
	}
	a.giveRest()
}

// inject replaces placeholders by secrets, or answers the request itself.
func (s *Server) inject(x *exchange, r *http.Request) *http.Response {
	if !x.secure {
		return nil
	}
	p := s.policy.Load()
	if !meets(p, x.target) {
		return x.refusal(http.StatusMisdirectedRequest, "the network policy has no secrets for "+x.target.String()+" any more: connect anew")
	}
	for k := range p.Proxy.Inject {
		i := &p.Proxy.Inject[k]
		if !i.Meets(x.target.Host, x.target.Port) {
			continue
		}
		placeholder, err := s.identity.Load().Placeholder(i.Secret)
		if err != nil {
			return x.refusal(http.StatusInternalServerError, err.Error())
		}
		values := r.Header[textproto.CanonicalMIMEHeaderKey(i.Header)]
		wanted := slices.Contains(values, i.Prefix+placeholder)
		value, ok, changed := s.cfg.Secrets.Secret(i.Secret)
		if wanted && !ok {
			if value, ok = s.await(r.Context(), i.Secret, changed); !ok {
				s.report(Event{Reason: netpolicy.ReasonInject, Host: x.target.Host, Port: x.target.Port, Secret: i.Secret, Status: http.StatusServiceUnavailable})
				return x.refusal(http.StatusServiceUnavailable, "the secret "+i.Secret+" is not there: its owner has to hand it in")
			}
		}
		if !ok {
			continue
		}
		if CheckSecret([]byte(value)) != nil {
			return x.refusal(http.StatusServiceUnavailable, "the secret "+i.Secret+" cannot be put into a request")
		}
		if !slices.Contains(x.values, value) {
			x.values = append(x.values, value)
		}
		for n := range values {
			if wanted && values[n] == i.Prefix+placeholder {
				values[n] = i.Prefix + value
			}
		}
		if wanted && !slices.Contains(x.injected, i.Secret) {
			x.injected = append(x.injected, i.Secret)
		}
	}
	if len(x.values) > 0 {
		// An uncompressed answer lets the mask find them.
		r.Header.Set("Accept-Encoding", "identity")
	}
	return nil
}

// await waits until a secret is available, or until SecretTimeout.
func (s *Server) await(ctx context.Context, name string, changed <-chan struct{}) (value string, ok bool) {
	limit := time.NewTimer(s.cfg.SecretTimeout)
	defer limit.Stop()
	for {
		select {
		case <-ctx.Done():
			return "", false
		case <-limit.C:
			return "", false
		case <-changed:
		}
		if value, ok, changed = s.cfg.Secrets.Secret(name); ok {
			return value, true
		}
	}
}

// refusal makes an answer of the proxy itself.
func (x *exchange) refusal(status int, why string) *http.Response {
	x.last = true
	body := "drowse proxy: " + why + "\n"
	x.length = int64(len(body))
	return &http.Response{
		StatusCode: status, Body: io.NopCloser(strings.NewReader(body)),
		Header: http.Header{"Content-Type": {"text/plain; charset=utf-8"}, "X-Content-Type-Options": {"nosniff"}},
	}
}

// answer makes the endpoint's answer from a peer's answer.
func (s *Server) answer(x *exchange, resp *http.Response, err error) *http.Response {
	if resp != nil && resp.StatusCode < http.StatusOK {
		// The request asked for no other protocol.
		resp.Body.Close()
		resp, err = nil, fmt.Errorf("%v has answered with status %d", x.target, resp.StatusCode)
	}
	if resp == nil {
		status, reason := explain(err)
		s.fail(x.target, err, reason, status, strings.Join(x.injected, ","))
		why := err.Error()
		if m := newMask(x.values); m != nil {
			// It may quote the server, with escapes that hide a secret from the mask.
			if why = m.hide(why); x.peer.Load() != nil && status == http.StatusBadGateway {
				why = "its answer is not HTTP, or broke off"
			}
		}
		return x.refusal(status, fmt.Sprintf("asking %v: %s", x.target, why))
	}
	for _, name := range x.injected {
		s.injected.Add(1)
		e := Event{Reason: netpolicy.ReasonInject, Sent: true, Host: x.target.Host, Port: x.target.Port, Secret: name, Status: resp.StatusCode}
		if c := x.peer.Load(); c != nil {
			e.Peer, e.Rule = c.peer, c.rule
		}
		s.report(e)
	}
	strip(resp.Header)
	maskHeader(resp.Header, x.values)
	if resp.Body == http.NoBody {
		return resp // which may answer HEAD, and has its length in a field
	}
	resp.Header.Del("Content-Length") // the answerer sets it
	x.length, x.mask = resp.ContentLength, newMask(x.values)
	return resp
}

// answerer writes an answer, with secrets masked. It sends a body of known length with that length, and any other
// as it comes. After a pause it also passes on what the mask holds back of a body of unknown length, so that a
// client does not wait forever for the end of a line.
type answerer struct {
	http.ResponseWriter
	x        *exchange
	patience time.Duration

	mu    sync.Mutex // guards what follows, the mask, and, once there is a timer, the writer
	timer *time.Timer
	turn  uint64 // counts writes: the timer of an earlier write does nothing
}

// WriteHeader implements [http.ResponseWriter].
func (a *answerer) WriteHeader(status int) {
	if a.x.length >= 0 {
		a.Header().Set("Content-Length", strconv.FormatInt(a.x.length, 10))
	}
	if a.x.last {
		a.Header().Set("Connection", "close")
	}
	a.ResponseWriter.WriteHeader(status)
}

// Write implements [io.Writer].
func (a *answerer) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.x.mask == nil {
		return len(p), a.give(p)
	}
	a.stop()
	err := a.give(a.x.mask.take(p))
	if a.x.length < 0 {
		turn := a.turn
		a.timer = time.AfterFunc(a.patience, func() {
			a.mu.Lock()
			defer a.mu.Unlock()
			if turn == a.turn {
				_ = a.give(a.x.mask.rest()) // if it fails, the next write fails as well
			}
		})
	}
	return len(p), err
}

// stop stops the timer of the last write.
func (a *answerer) stop() {
	a.turn++
	if a.timer != nil {
		a.timer.Stop()
	}
}

// end stops the answerer after its last write.
func (a *answerer) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stop()
}

// giveRest writes what is held back of an answer that is complete.
func (a *answerer) giveRest() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stop(); a.x.mask != nil {
		_ = a.give(a.x.mask.rest()) // if it fails, the client is gone
	}
}

// give writes p. It flushes an answer of unknown length or a stream of events.
func (a *answerer) give(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	_, err := a.ResponseWriter.Write(p)
	if err == nil && (a.x.length < 0 || strings.HasPrefix(a.Header().Get("Content-Type"), "text/event-stream")) {
		_ = http.NewResponseController(a.ResponseWriter).Flush()
	}
	return err
}
