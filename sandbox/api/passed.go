package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// PeerService is the peer.Passed.Service of requests for a Server.
const PeerService = "api"

// passedCaller returns the caller that another host asserts. He reaches nothing of this host but the sandbox: not its
// files, as users of its Unix socket do.
func passedCaller(is *peer.Passed) (Caller, error) {
	scopes, err := tokens.ParseScopes(strings.Join(is.Caller.Scopes, ","))
	if err != nil {
		return Caller{}, own(wire.CodeForbidden, "use the same version of drowse on all hosts", "the host %s asserts scopes that this one does not know", is.From)
	}
	return Caller{
		Name: is.Caller.Name, Scopes: scopes, Owner: is.Caller.Owner, from: is.From,
		is: identity.Identity{Token: tokens.Token{Name: is.Caller.Name, Hash: is.Caller.Hash, Scopes: scopes, Owner: is.Caller.Owner}},
	}, nil
}

// passOn passes a request on to the other host that has its sandbox. If it does not report an answer, this host
// answers: with away, if that is not nil and what this host can do by itself does not go through.
func (s *Server) passOn(w http.ResponseWriter, r *http.Request, rt route, name string) (answered bool, away error) {
	p := s.o.Peers
	if p == nil {
		return false, nil
	}
	if is := peer.From(r.Context()); is != nil {
		if is.Sandbox != name || p.Elsewhere(r.Context(), name) {
			peer.NotHere(w, r)
			return true, nil
		}
		return false, nil
	}
	if r.Header.Get(wire.HeaderHere) != "" {
		return false, nil
	}
	c := CallerOf(r.Context())
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer s.watch(c, func(cause error) {
		// A server that ends gives a request time, unless it may go on for ever.
		if rt.socket != nil || rt.room == roomStreams || !errors.Is(cause, errEnding) {
			interrupt(w, cancel, cause)
		}
	})()
	s.streams.Add(1)
	defer s.streams.Done()
	out := r.Clone(ctx)
	bare(out.Header)
	control := http.NewResponseController(w)
	if out.Body != nil && out.Body != http.NoBody {
		out.Body = passedBody{uploaded{r.Body, control, ctx}}
	}
	begin := time.Now()
	answered, err := p.Pass(slowly{w, control}, out, peer.Passed{
		Service: PeerService, Sandbox: name,
		Caller: peer.Caller{Name: c.Name, Owner: c.Owner, Scopes: c.Scopes.Words(), Hash: c.is.Hash},
	})
	if answered || err != nil {
		s.log.Info("passed on to another host", "by", c.Name, "op", rt.op, "sandbox", name, "took_ms", time.Since(begin).Milliseconds(), "error", err)
	}
	if cause := context.Cause(ctx); cause != nil && !answered {
		err = cause
	}
	return answered, err
}

// bare removes what a client shows this host alone.
func bare(h http.Header) {
	h.Del("Authorization")
	h.Del("Cookie")
	const protocols = "Sec-Websocket-Protocol"
	var keep []string
	for _, v := range h.Values(protocols) {
		for word := range strings.SplitSeq(v, ",") {
			if word = strings.TrimSpace(word); !strings.HasPrefix(word, wire.BearerProtocol) {
				keep = append(keep, word)
			}
		}
	}
	if h.Del(protocols); len(keep) > 0 {
		h.Set(protocols, strings.Join(keep, ", "))
	}
}

// passedBody is the body of a request that is passed on.
type passedBody struct{ uploaded }

func (passedBody) Close() error { return nil } // the server's

// slowly gives a client sendTime for each part of an answer that comes from another host.
type slowly struct {
	http.ResponseWriter
	out *http.ResponseController
}

// Write implements http.ResponseWriter.
func (s slowly) Write(p []byte) (int, error) {
	_ = s.out.SetWriteDeadline(time.Now().Add(sendTime)) // test writers may lack deadlines
	return s.ResponseWriter.Write(p)
}

// Unwrap is for http.ResponseController.
func (s slowly) Unwrap() http.ResponseWriter { return s.ResponseWriter }

// mine reports whether metadata are of a sandbox that a caller reaches.
func (c Caller) mine(name string) func(m spec.Metadata) error {
	return func(m spec.Metadata) error {
		if c.Owner != "" && m.Owner != c.Owner {
			return noSandbox(name)
		}
		return nil
	}
}

// reach lets a request reach a sandbox of its caller's, which this host gets from the cluster if need be. away is why
// the host that has it could not be asked.
func (s *Server) reach(ctx context.Context, rt route, name string, away error) error {
	c := CallerOf(ctx)
	err := s.reached(ctx, c, rt, name, away)
	if c.Owner != "" && errors.Is(err, sandbox.ErrNotFound) {
		err = noSandbox(name) // with one text, whatever is known of others'
	}
	return err
}

func (s *Server) reached(ctx context.Context, c Caller, rt route, name string, away error) error {
	if away != nil && (rt.scope == ScopeRead || rt.checksOwner || errors.Is(away, peer.ErrUsed) || ctx.Err() != nil) {
		// Whose it is there is not known now: who does not reach it as it was published learns nothing.
		if err := s.o.Peers.Directory().Known(ctx, name, c.mine(name)); err != nil {
			return err
		}
		return away
	}
	if rt.checksOwner {
		return nil
	}
	err := s.claim(ctx, rt, name)
	if away != nil && errors.Is(err, spec.ErrElsewhere) {
		return away
	}
	if err == nil {
		err = s.reaches(ctx, c, name)
	}
	return err
}

// has finds the sandbox that a caller wants to get or make, if another host has it or it sleeps in the store. made is
// false if it is there.
func (s *Server) has(r *request, name string, get bool) error {
	p, c := s.o.Peers, r.caller()
	if p == nil || name == "" || !spec.ValidName(name) || r.Header.Get(wire.HeaderHere) != "" {
		return nil
	}
	if _, err := s.o.Host.State.Load(name); !errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	taken := fmt.Errorf("%w: %s: the cluster has it", sandbox.ErrExists, name)
	switch err := p.Directory().Known(r.Context(), name, c.mine(name)); {
	case errors.Is(err, sandbox.ErrNotFound):
		if p.Directory().Known(r.Context(), name, nil) == nil {
			return taken // another owner's
		}
		return nil
	case err != nil:
		return err
	case !get:
		return taken
	}
	return s.o.Host.Cluster.Claim(r.Context(), name, c.mine(name))
}
