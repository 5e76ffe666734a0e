package e2b

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// PeerService is the peer.Passed.Service of requests for a Server.
const PeerService = "e2b"

// errAnswered means that a request has its answer, from another host.
var errAnswered = errors.New("another host has answered")

// passOn passes a request on to the other host that has its sandbox. If it reports no answer, this host answers: with
// away, if that is not nil and it cannot do by itself what is asked. key is that of the control plane: requests to a
// sandbox have its own tokens, which its host knows.
func (s *Server) passOn(w http.ResponseWriter, r *http.Request, id string, key tokens.Token) (answered bool, away error) {
	p := s.o.Peers
	if p == nil || !idRE.MatchString(id) {
		return false, nil
	}
	if is := peer.From(r.Context()); is != nil {
		if is.Sandbox != id || p.Elsewhere(r.Context(), id) {
			peer.NotHere(w, r)
			return true, nil
		}
		return false, nil
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	out := r.WithContext(ctx)
	if key.Name != "" {
		out = r.Clone(ctx)
		out.Header.Del("X-Api-Key")
		out.Header.Del("Authorization")
	}
	answered, err := p.Pass(w, out, peer.Passed{
		Service: PeerService, Sandbox: id,
		Caller: peer.Caller{Name: key.Name, Owner: key.Owner, Scopes: key.Scopes.Words(), Hash: key.Hash},
	})
	if err != nil && !answered && r.Context().Err() == nil {
		s.report("pass on", id, err)
	}
	return answered, err
}

// passedKey returns the key that another host asserts of a request to the control plane. It is for one sandbox.
func (s *Server) passedKey(r *http.Request, is *peer.Passed) (tokens.Token, error) {
	_, pattern := s.mux.Handler(r)
	scopes, err := tokens.ParseScopes(strings.Join(is.Caller.Scopes, ","))
	if err != nil || !strings.Contains(pattern, "/sandboxes/{id}") {
		return tokens.Token{}, answers.Fail(http.StatusForbidden, "the host %s may not ask for that", is.From)
	}
	return tokens.Token{Name: is.Caller.Name, Hash: is.Caller.Hash, Scopes: scopes, Owner: is.Caller.Owner}, nil
}

// locate has the sandbox of a request here, or passes the request on: then the error is errAnswered.
func (s *Server) locate(w http.ResponseWriter, r *http.Request, id string) error {
	key := keyOf(r.Context())
	answered, away := s.passOn(w, r, id, key)
	if answered {
		return errAnswered
	}
	cl := s.host.Cluster
	if cl == nil || !idRE.MatchString(id) {
		return nil
	}
	mine := func(m spec.Metadata) error {
		if m.E2B == nil || key.Owner != "" && m.Owner != key.Owner {
			return fmt.Errorf("%w: %s", sandbox.ErrNotFound, id)
		}
		return nil
	}
	if r.Method != http.MethodGet && !errors.Is(away, peer.ErrUsed) {
		if _, err := s.host.State.Load(id); !errors.Is(err, sandbox.ErrNotFound) {
			if _, err := s.findOf(r.Context(), id); err != nil {
				return err
			}
		}
		err := cl.Claim(r.Context(), id, mine)
		if away != nil && errors.Is(err, spec.ErrElsewhere) {
			err = away
		}
		return err
	}
	if away != nil {
		// Whose it is there is not known now: who does not reach it as it was published learns nothing.
		if err := s.o.Peers.Directory().Known(r.Context(), id, mine); err != nil {
			return err
		}
	}
	return away
}
