package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/tlsname"
)

// say answers a request itself and closes the connection: the proxy does not read what follows.
func say(w http.ResponseWriter, status int, format string, args ...any) {
	w.Header().Set("Connection", "close")
	http.Error(w, "drowse proxy: "+fmt.Sprintf(format, args...), status)
}

// refuse is say, for requests that the endpoint must not make.
func (s *Server) refuse(w http.ResponseWriter, status int, format string, args ...any) {
	s.refused.Add(1)
	say(w, status, format, args...)
}

// fits refuses a request that is too large, and sets its deadlines.
func (s *Server) fits(w http.ResponseWriter, r *http.Request) bool {
	s.requests.Add(1)
	fields := 0
	for _, v := range r.Header {
		fields += len(v)
	}
	switch {
	case r.ProtoMajor != 1:
		s.refuse(w, http.StatusHTTPVersionNotSupported, "this is HTTP/1.1")
		return false
	case fields > MaxHeaders:
		s.refuse(w, http.StatusRequestHeaderFieldsTooLarge, "%d header fields: at most %d", fields, MaxHeaders)
		return false
	}
	end := time.Now().Add(RequestTimeout)
	c := http.NewResponseController(w)
	if err := errors.Join(c.SetReadDeadline(end), c.SetWriteDeadline(end)); err != nil {
		panic(http.ErrAbortHandler) // the connection is gone
	}
	return true
}

// serveProxy answers the endpoint's requests to its proxy.
func (s *Server) serveProxy(w http.ResponseWriter, r *http.Request) {
	if !s.fits(w, r) {
		return
	}
	if r.Method == http.MethodConnect {
		s.connect(w, r)
		return
	}
	u := r.URL
	if u.Scheme != "http" || u.Opaque != "" || u.User != nil || u.Host == "" {
		s.refuse(w, http.StatusBadRequest, "this is a proxy: ask for http://HOST/..., or CONNECT HOST:PORT for anything else")
		return
	}
	t, err := ParseTarget(u.Host, 80)
	if err != nil {
		s.refuse(w, http.StatusBadRequest, "%v", err)
		return
	}
	s.forward(w, r, t, "http")
}

// serveEnded answers requests in a tunnel whose TLS ends here.
func (s *Server) serveEnded(w http.ResponseWriter, r *http.Request) {
	if !s.fits(w, r) {
		return
	}
	t, ok := r.Context().Value(targetKey{}).(Target)
	u := r.URL
	switch {
	case !ok:
		panic(http.ErrAbortHandler)
	case r.Method == http.MethodConnect || u.Opaque != "" || u.User != nil || u.Host == "" && !strings.HasPrefix(u.Path, "/") || u.Host != "" && u.Scheme != "https":
		s.refuse(w, http.StatusBadRequest, "in a tunnel a request has a path, and nothing else")
		return
	}
	// For a request target with a host, r.Host is that host.
	if asked, err := ParseTarget(r.Host, 443); err != nil || asked != t {
		s.refuse(w, http.StatusMisdirectedRequest, "this tunnel is for %v, and the request for %.80q", t, r.Host)
		s.report(Event{Reason: netpolicy.ReasonProxy, Host: t.Host, Port: t.Port, Status: http.StatusMisdirectedRequest})
		return
	}
	s.forward(w, r, t, "https")
}

// connect opens a tunnel, or ends it here.
func (s *Server) connect(w http.ResponseWriter, r *http.Request) {
	t, err := ParseTarget(r.RequestURI, 0)
	if err != nil {
		s.refuse(w, http.StatusBadRequest, "%v", err)
		return
	}
	if r.ContentLength != 0 || len(r.TransferEncoding) > 0 {
		s.refuse(w, http.StatusBadRequest, "CONNECT has no body (RFC 9110, 9.3.6)")
		return
	}
	ends := meets(s.policy.Load(), t)
	var peer *peerConn
	if !ends {
		// A client that has closed its sending half still waits for the answer, but then the request's context has
		// ended.
		if peer, err = s.reach(s.base, t, true); err != nil {
			status, reason := explain(err)
			s.fail(t, err, reason, status, "")
			say(w, status, "connecting to %v: %v", t, err)
			return
		}
		defer peer.Close()
	}
	c, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler) // the connection is gone
	}
	defer func() {
		if c != nil {
			c.Close()
		}
	}()
	g, ok := c.(*guestConn)
	if !ok {
		return
	}
	early, _ := buffered.Reader.Peek(buffered.Reader.Buffered())
	early = bytes.Clone(early)
	_ = g.SetDeadline(time.Now().Add(s.cfg.HeaderTimeout))
	if _, err := io.WriteString(g, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	s.tunnels.Add(1)
	if ends {
		if s.end(g, t, early) {
			c = nil // the inner server owns it now
		}
		return
	}
	_ = g.SetDeadline(time.Time{})
	name := ""
	if peer.checked {
		name = t.Host
	}
	ctx, cancel := context.WithTimeout(s.base, TunnelTimeout)
	defer cancel()
	if reason, _ := tlsname.Tunnel(ctx, g.TCPConn, peer.TCPConn, early, name, s.cfg.HeaderTimeout); reason != 0 {
		s.refused.Add(1)
		s.report(Event{Reason: reason, Host: t.Host, Port: t.Port, Peer: peer.peer, Rule: peer.rule})
	}
}

// fail counts and reports a failure to reach a target, if the policy caused it or the request had a secret.
func (s *Server) fail(t Target, err error, reason netpolicy.Reason, status int, secret string) {
	if reason == 0 && secret == "" {
		return
	}
	e := Event{Reason: reason, Host: t.Host, Port: t.Port, Status: status, Secret: secret}
	if reason == 0 {
		e.Reason = netpolicy.ReasonInject
	} else {
		s.refused.Add(1)
	}
	var p *peerError
	if errors.As(err, &p) {
		e.Peer, e.Rule = p.peer, p.rule
	}
	s.report(e)
}

// end does the handshake of a tunnel that ends here, and hands it to the inner server, which answers its requests.
func (s *Server) end(g *guestConn, t Target, early []byte) bool {
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, SessionTicketsDisabled: true,
		GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if !strings.EqualFold(h.ServerName, t.Host) {
				s.refused.Add(1)
				s.report(Event{Reason: netpolicy.ReasonTLSName, Host: t.Host, Port: t.Port})
				return nil, fmt.Errorf("this tunnel is for %s", t.Host)
			}
			return s.identity.Load().certificate(t.Host, time.Now())
		},
	}
	c := tls.Server(&replay{g, io.MultiReader(bytes.NewReader(early), g)}, cfg)
	ctx, cancel := context.WithTimeout(s.base, s.cfg.HeaderTimeout)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		return false
	}
	_ = g.SetDeadline(time.Time{})
	s.mu.Lock()
	g.ends, g.target = true, t
	gone := !meets(s.policy.Load(), t) // a later SetPolicy finds it
	s.mu.Unlock()
	if gone {
		return false
	}
	s.hand(&ended{c, t})
	return true
}

// replay is a connection from which some bytes were already read.
type replay struct {
	*guestConn
	r io.Reader
}

// Read implements [io.Reader].
func (c *replay) Read(p []byte) (int, error) { return c.r.Read(p) }

// WriteTo replaces that of the connection, which would skip the bytes already read.
func (c *replay) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, c.r) }
