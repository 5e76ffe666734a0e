package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"

	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// The peer.Passed.Service of requests and of raw connections for a Gateway.
const (
	peerService    = "gateway"
	rawPeerService = "gateway-raw"
)

// PeerHandlers returns the handlers of what other hosts of a cluster pass on to this one's gateway: for peer.Serve.
func (g *Gateway) PeerHandlers() map[string]http.Handler {
	return map[string]http.Handler{peerService: g, rawPeerService: http.HandlerFunc(g.servePassedRaw)}
}

// away reports whether a request that another host has passed on is not for this one.
func (g *Gateway) away(ctx context.Context, to Route) bool {
	is := peer.From(ctx)
	return is != nil && g.o.Peers != nil && (is.Sandbox != to.Sandbox || g.o.Peers.Elsewhere(ctx, to.Sandbox))
}

// passing counts a request that may go to another host, until the returned function is called. Its context ends with
// the gateway.
func (g *Gateway) passing(ctx context.Context, name string) (context.Context, func(), error) {
	id := "elsewhere " + name // no id of a record
	l := g.o.Limits
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return nil, nil, errClosed
	case g.requests >= l.Requests || g.requestsOf[id] >= l.RequestsOf:
		return nil, nil, fmt.Errorf("%w: %d requests are open, %d of them of %s", ErrBusy, g.requests, g.requestsOf[id], name)
	}
	g.requests++
	g.requestsOf[id]++
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(g.life, func() { cancel(errClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
		g.mu.Lock()
		defer g.mu.Unlock()
		g.requests--
		less(g.requestsOf, id)
	}, nil
}

// passOn passes a request on to the other host that has its sandbox. What this host's gateway asks of a client, it does
// not: the other one does. If answered is false this host is to carry the request, unless final is set. Then, and if
// that fails because the sandbox is elsewhere, err says why.
func (g *Gateway) passOn(w http.ResponseWriter, r *http.Request, to Route) (answered, final bool, err error) {
	if g.o.Peers == nil || peer.From(r.Context()) != nil {
		return false, false, nil
	}
	ctx, done, err := g.passing(r.Context(), to.Sandbox)
	if err != nil {
		return false, true, err
	}
	defer done()
	answered, err = g.o.Peers.Pass(w, r.WithContext(ctx), peer.Passed{Service: peerService, Sandbox: to.Sandbox})
	if cause := context.Cause(ctx); cause != nil && !answered {
		return false, true, cause
	}
	return answered, errors.Is(err, peer.ErrUsed), err
}

// passOnRaw is passOn for a raw connection, of which hello has been read.
func (g *Gateway) passOnRaw(ctx context.Context, c net.Conn, hello []byte, to Route) (carried bool, err error) {
	if g.o.Peers == nil || peer.From(ctx) != nil {
		return false, nil
	}
	ctx, done, err := g.passing(ctx, to.Sandbox)
	if err != nil {
		return false, err
	}
	defer done()
	shake, cancel := context.WithTimeout(ctx, headerTime)
	there, err := g.o.Peers.Dial(shake, peer.Passed{
		Service: rawPeerService, Sandbox: to.Sandbox, Client: c.RemoteAddr().String(), TLS: true,
	})
	cancel()
	if there == nil {
		return false, err
	}
	cut := context.AfterFunc(ctx, func() {
		reset(c)
		_ = there.Abort()
	})
	defer cut()
	relay(&begun{Conn: c, first: bytes.NewReader(hello)}, there, func() { reset(c) })
	return true, nil
}

// servePassedRaw carries a raw connection that another host has passed on.
func (g *Gateway) servePassedRaw(w http.ResponseWriter, r *http.Request) {
	is := peer.From(r.Context())
	if is == nil || g.away(r.Context(), Route{Sandbox: is.Sandbox}) {
		peer.NotHere(w, r)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	g.mu.Lock()
	closed := g.closed
	if !closed {
		g.all.Add(1)
	}
	g.mu.Unlock()
	if closed {
		peer.NotHere(w, r)
		return
	}
	defer g.all.Done()
	defer context.AfterFunc(g.life, cancel)()
	c, err := peer.Accept(w, r)
	if err != nil {
		return
	}
	defer c.Close()
	to, err := g.raw(ctx, c, g.rawTLS.Load())
	if err != nil {
		reset(c) // also if the gateway ends
	}
	if err != nil && ctx.Err() == nil {
		g.report(refusal(to, err))
	}
}

// because returns the error of a request that this host could not carry, since another one has the sandbox and does not
// answer.
func because(err, away error) error {
	if away != nil && errors.Is(err, spec.ErrElsewhere) {
		return away
	}
	return err
}
