package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/resolver"
)

// errDenied means that no rule opens a peer, errRate that a connection exceeds the policy's limit.
var (
	errDenied = errors.New("the network policy does not allow it")
	errRate   = errors.New("more connections than the network policy allows in this time")
)

// peerError is why there is no connection to a target.
type peerError struct {
	peer netip.AddrPort // not valid if none was tried
	rule string
	err  error
}

func (e *peerError) Error() string { return e.err.Error() }
func (e *peerError) Unwrap() error { return e.err }

// peerConn is a connection to a peer.
type peerConn struct {
	*net.TCPConn
	s      *Server
	target Target
	peer   netip.AddrPort
	rule   string
	// checked is set if the rules open the peer only for the target's name, which must then be the one in TLS.
	checked bool
}

// Close implements [net.Conn].
func (c *peerConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.peers, c)
	c.s.mu.Unlock()
	return c.TCPConn.Close()
}

func (c *peerConn) cut() { cut(c.TCPConn) }

// reach connects to a target, if the policy lets the endpoint. With secure, the caller must ensure for a checked
// connection that its server name in TLS is the target's host.
func (s *Server) reach(ctx context.Context, t Target, secure bool) (*peerConn, error) {
	ctx, cancel := context.WithTimeout(ctx, ConnectTimeout)
	defer cancel()
	defer context.AfterFunc(s.base, cancel)()
	if !s.admit() {
		return nil, &peerError{err: errRate}
	}
	addresses := []netip.Addr{t.Address}
	if !t.Address.IsValid() {
		var err error
		if addresses, err = s.cfg.Names.Lookup(ctx, t.Host); err != nil {
			return nil, &peerError{err: err}
		}
	}
	var failed, denied error
	tried := 0
	for _, a := range addresses {
		c := &peerConn{s: s, target: t, peer: netip.AddrPortFrom(a, t.Port)}
		name := ""
		var ok bool
		if c.rule, ok = s.cfg.Rules.Opens(c.peer, ""); !ok && secure && !t.Address.IsValid() {
			c.rule, ok = s.cfg.Rules.Opens(c.peer, t.Host)
			c.checked, name = ok, t.Host
		}
		if !ok {
			denied = &peerError{c.peer, c.rule, errDenied}
			continue
		}
		// The first connection was admitted above.
		if tried > 0 && !s.admit() {
			return nil, &peerError{c.peer, c.rule, errRate}
		}
		tried++
		var err error
		if c.TCPConn, err = s.cfg.Dial(ctx, c.peer, name); err != nil {
			failed = &peerError{c.peer, c.rule, err}
			continue
		}
		if s.keep(c) {
			return c, nil
		}
		c.cut()
		denied = &peerError{c.peer, c.rule, errDenied}
	}
	if failed != nil {
		return nil, failed
	}
	return nil, denied
}

// keep registers a connection if the current policy opens it. A later SetPolicy finds it and judges it again.
func (s *Server) keep(c *peerConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !s.opens(c) {
		return false
	}
	s.peers[c] = struct{}{}
	return true
}

// rate applies the policy's limit of connections to those that the proxy opens: the programs see only the
// endpoint's own. It is the same generic cell rate algorithm.
type rate struct{ at time.Time }

func (s *Server) admit() bool {
	limit := s.policy.Load().Limits.Egress.OrDefault().Connections
	s.mu.Lock()
	defer s.mu.Unlock()
	burst := cmp.Or(limit.Burst, max(limit.PerSecond/10, 32))
	each := time.Second / time.Duration(limit.PerSecond)
	now := time.Now()
	next := now
	if s.rate.at.After(now) {
		next = s.rate.at
	}
	next = next.Add(each)
	// A burst may have any length: at most an hour of it counts.
	if next.Sub(now) > time.Duration(min(burst, uint64(time.Hour/max(each, 1))+1))*each {
		return false
	}
	s.rate.at = next
	return true
}

// newTransport makes the transport that sends requests to peers. It uses no other proxy.
func (s *Server) newTransport() *http.Transport {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	return &http.Transport{
		Protocols: p, DisableCompression: true, MaxIdleConns: maxIdlePeers, MaxIdleConnsPerHost: maxIdlePeers, IdleConnTimeout: idlePeer,
		MaxResponseHeaderBytes: MaxAnswerBytes, ExpectContinueTimeout: time.Second, ResponseHeaderTimeout: IdleTimeout,
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			t, err := ParseTarget(addr, 0)
			if err != nil {
				return nil, &peerError{err: err}
			}
			c, err := s.reach(ctx, t, false)
			if err != nil {
				return nil, err
			}
			return c, nil
		},
		DialTLSContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			t, err := ParseTarget(addr, 0)
			if err != nil {
				return nil, &peerError{err: err}
			}
			return s.reachSecurely(ctx, t)
		},
	}
}

// reachSecurely connects to a target over TLS, and verifies its certificate.
func (s *Server) reachSecurely(ctx context.Context, t Target) (net.Conn, error) {
	c, err := s.reach(ctx, t, true)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.HeaderTimeout)
	defer cancel()
	defer context.AfterFunc(s.base, cancel)()
	secure := tls.Client(c, &tls.Config{
		ServerName: t.Host, RootCAs: s.cfg.Roots, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
	})
	if err := secure.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, &peerError{c.peer, c.rule, fmt.Errorf("TLS with %s: %w", t.Host, err)}
	}
	return secure, nil
}

// explain returns the status that refuses a request without an answer of a peer, and the reason if the policy
// refused it.
func explain(err error) (status int, reason netpolicy.Reason) {
	switch {
	case errors.Is(err, errDenied), errors.Is(err, resolver.ErrRefused):
		return http.StatusForbidden, netpolicy.ReasonProxy
	case errors.Is(err, errRate):
		return http.StatusTooManyRequests, netpolicy.ReasonConnRate
	case errors.Is(err, ErrTarget):
		return http.StatusBadRequest, netpolicy.ReasonProxy
	case errors.Is(err, context.DeadlineExceeded):
		return http.StatusGatewayTimeout, 0
	}
	return http.StatusBadGateway, 0
}
