package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
)

// peerKey is the context key for the peer of a Unix socket.
type peerKey struct{}

// socketPeer is the process at the other end of a Unix socket.
type socketPeer struct {
	uid uint32
	err error
}

// connKey is the context key for a connection of a bounded listener.
type connKey struct{}

// connContext notes the peer of a connection: http.Server.ConnContext.
func connContext(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	if l, ok := c.(*limitedConn); ok {
		ctx = context.WithValue(ctx, connKey{}, l)
		c = l.Conn
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	uid, err := osfile.PeerUser(u)
	return context.WithValue(ctx, peerKey{}, socketPeer{uid, err})
}

// caller returns the sender of a request. An error says why the sender is not known.
func (s *Server) caller(r *http.Request) (Caller, error) {
	if is := peer.From(r.Context()); is != nil {
		return passedCaller(is)
	}
	if p, ok := r.Context().Value(peerKey{}).(socketPeer); ok {
		switch {
		case p.err != nil:
			return Caller{}, own(wire.CodeForbidden, "", "the kernel does not say who has connected: %w", p.err)
		case p.uid != 0 && int64(p.uid) != int64(os.Geteuid()):
			return Caller{}, own(wire.CodeForbidden, "ask as root", "user %d may not use this socket", p.uid)
		}
		return Caller{Name: fmt.Sprintf("uid %d", p.uid), Scopes: tokens.All(), Local: true}, nil
	}
	id, wait, err := s.admit(r)
	known := Caller{Name: id.Name}
	switch {
	case err == tokens.ErrUnknown: //nolint:errorlint // without a cause
		return Caller{}, own(wire.CodeUnauthorized, showToken, "the request has no token that is known")
	case errors.Is(err, tokens.ErrUnknown):
		return Caller{}, own(wire.CodeUnauthorized, showToken, "%w", err)
	case err == tokens.ErrExpired: //nolint:errorlint // without a cause
		return known, own(wire.CodeUnauthorized, showToken, "the token %s has expired", id.Name)
	case errors.Is(err, tokens.ErrExpired):
		return known, own(wire.CodeUnauthorized, showToken, "%w", err)
	case errors.Is(err, identity.ErrUnmapped):
		return known, own(wire.CodeForbidden, "have a rule for it added to the file of `drowse serve --identities`", "%w", err)
	case errors.Is(err, identity.ErrIssuer):
		return Caller{}, own(wire.CodeIssuer, "try again: see Retry-After", "%w", later{err, identity.RetryAfter})
	case errors.Is(err, tokens.ErrRate):
		err = later{fmt.Errorf("%s has %d requests a second", id.Name, id.Rate), wait}
		return known, own(wire.CodeTooMany, "ask less often: see Retry-After", "%w", err)
	case err != nil:
		s.log.Error("nobody is let in over TCP", "error", err)
		return Caller{}, own(wire.CodeForbidden, "see the log of `drowse serve`", "the server cannot read its tokens or identities")
	}
	return Caller{Name: id.Name, Scopes: id.Scopes, Owner: id.Owner, is: id}, nil
}

// admit admits the sender of a request over TCP. If it shows a token, that decides, whatever its certificate is: a bad
// token beside a good certificate is refused.
func (s *Server) admit(r *http.Request) (identity.Identity, time.Duration, error) {
	text := shown(r)
	if text == "" && len(r.Header.Values("Authorization")) == 0 && r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		return s.o.Identities.AdmitCertificate(r.TLS)
	}
	return s.o.Identities.Admit(r.Context(), s.o.Tokens, text)
}

const showToken = "show a token of `drowse token create` or of a known issuer as \"Authorization: Bearer TOKEN\""

// later is an error of a request that may be repeated after a while.
type later struct {
	error
	wait time.Duration
}

func (l later) Unwrap() error { return l.error }

// shown returns the token that a request shows.
func shown(r *http.Request) string {
	kind, text, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(kind, "Bearer") {
		return bearerOf(r)
	}
	return strings.TrimSpace(text)
}

// refusals bounds the lines that the log gets for refused requests.
type refusals struct {
	mu   sync.Mutex // guards what follows
	rate *rate.Limiter
	left int // refusals without a line since the last one
}

// Refusals in the log: at once, and each second afterwards.
const (
	refusalBurst = 20
	refusalRate  = 1
)

// log logs a refusal, or counts it for the next line.
func (f *refusals) log(to *slog.Logger, r *http.Request, name string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rate == nil {
		f.rate = rate.NewLimiter(refusalRate, refusalBurst)
	}
	if !f.rate.Allow() {
		f.left++
		return
	}
	to.Warn("refused over HTTP", "by", name, "from", r.RemoteAddr, "method", r.Method, "path", cut(r.URL.Path), "error", err, "not_logged", f.left)
	f.left = 0
}

// cut returns the beginning of a text that a stranger has sent.
func cut(text string) string {
	const most = 200
	return fmt.Sprintf("%.*s", most, text)
}

var errOrigin = errors.New("the request comes from a page of another origin")

// checkOrigin refuses requests that a foreign page makes a browser send. It checks Origin and Sec-Fetch-Site, and
// refuses a Host that is a foreign name pointed at this server (DNS rebinding). A browser also reaches the Unix
// socket, through a port that ssh forwards to it. And a read of a rebound page has no Origin and, over plain HTTP,
// no Sec-Fetch header (https://www.w3.org/TR/fetch-metadata/, section 2).
func (s *Server) checkOrigin(r *http.Request) error {
	if peer.From(r.Context()) != nil {
		return nil // the first host has
	}
	_, local := r.Context().Value(peerKey{}).(socketPeer)
	// Programs name the Unix socket by any word, such as http://drowse. A word without a dot cannot be a foreign
	// name that was pointed here.
	word := local && !fromBrowser(r) && !strings.Contains(r.Host, ".")
	if !word && !s.ourHost(r.Host) {
		return own(wire.CodeForbidden, "use an address or localhost, or name it with `drowse serve --host`", "%.200q is no name of this server", r.Host)
	}
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" && site != "none" {
		return own(wire.CodeForbidden, "", "%w: %s", errOrigin, site)
	}
	for _, origin := range r.Header.Values("Origin") {
		u, err := url.Parse(origin)
		scheme := "http"
		if r.TLS != nil {
			scheme = "https"
		}
		// If another program forwards to the socket, TLS may have ended there.
		if err != nil || u.Host == "" || !strings.EqualFold(u.Host, r.Host) || u.Scheme != scheme && !local {
			return own(wire.CodeForbidden, "", "%w: %.200q", errOrigin, origin)
		}
	}
	return nil
}

// fromBrowser reports whether a request has headers that only browsers send and that pages cannot leave out.
func fromBrowser(r *http.Request) bool {
	for name := range r.Header {
		if name == "Origin" || strings.HasPrefix(name, "Sec-Fetch-") {
			return true
		}
	}
	return false
}

// ourHost reports whether a Host is an address, localhost or one of the configured names. Any address is safe: a
// page can point a name elsewhere, but it cannot choose where an address leads.
func (s *Server) ourHost(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	name = strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")
	if _, err := netip.ParseAddr(name); err == nil {
		return true
	}
	return slices.ContainsFunc(append([]string{"localhost"}, s.o.Hosts...), func(ours string) bool { return strings.EqualFold(ours, name) })
}
