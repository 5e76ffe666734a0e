package gateway

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Grant lets a request in.
type Grant struct {
	// Wake also lets it in if the sandbox sleeps: it is woken. Without Wake, the request fails with ErrAsleep.
	Wake bool
	// Host is the Host of the request that the guest sees, in which "${PORT}" stands for the port. Empty is the
	// client's.
	Host string
	// IdleStreams lets the sandbox sleep although the request is open, if it carries nothing: see
	// spec.Gateway.IdleStreams.
	IdleStreams bool
	// Owner is whose requests they are for Limits.RequestsOfOwner; empty is nobody's.
	Owner string
	// HTTPS says that the server in the guest speaks HTTPS. Nobody checks its certificate: the connection is the VM's own.
	HTTPS bool
	// GuestTLS passes a raw connection on as it is, and TLS ends in the guest.
	GuestTLS bool
	// Hide are header fields that the guest must not see, besides HeaderToken, HeaderSandbox and HeaderPort.
	Hide []string

	token string // what Owners has accepted; empty for an open port
}

// Authorizer lets requests in. It is called from many goroutines, once for each request, before anything is done
// for it. header is nil for a raw connection, which has none. The error is ErrNoToken, ErrToken, sandbox.ErrNotFound,
// or another; what wraps none of these is an error of the host.
type Authorizer interface {
	Authorize(ctx context.Context, to Route, header http.Header) (Grant, error)
}

// Revoker is an Authorizer that may take back what it has granted.
type Revoker interface {
	Authorizer
	// Standing returns a function that reports whether a grant for a port of a sandbox, which has an id and a name, is
	// still good. It is called every few seconds for each sandbox that has open requests and connections: those without
	// a grant are cut. After an error all go on.
	Standing(id, name string) (func(Route, Grant) bool, error)
}

var (
	// ErrNoToken means that a request needs a token and has none.
	ErrNoToken = errors.New("the request needs the sandbox's token")
	// ErrToken means that the token of a request is not the sandbox's.
	ErrToken = errors.New("the token is not the sandbox's")
	// ErrAsleep means that the sandbox does not run, and that the request may not wake it.
	ErrAsleep = errors.New("the sandbox does not run")
)

// Owners is the Authorizer by what the owner of a sandbox has set: spec.Metadata.Gateway.
type Owners struct{ Host *sandbox.Host }

var _ Revoker = Owners{}

// Authorize implements Authorizer.
func (o Owners) Authorize(_ context.Context, to Route, header http.Header) (Grant, error) {
	m, err := o.Host.State.Metadata(to.Sandbox)
	if err != nil {
		return Grant{}, err
	}
	w := m.Gateway
	grant := Grant{Wake: true, Host: w.Host, Owner: m.Owner, IdleStreams: w.IdleStreams, GuestTLS: slices.Contains(w.GuestTLS, to.Port)}
	if w.Opens(to.Port) {
		return grant, nil
	}
	shown := header.Values(HeaderToken)
	if len(shown) == 0 {
		return Grant{}, ErrNoToken
	}
	want, err := o.Host.State.GatewayToken(to.Sandbox, w)
	if err != nil {
		return Grant{}, err
	}
	if len(shown) != 1 || subtle.ConstantTimeCompare([]byte(shown[0]), []byte(want)) != 1 {
		return Grant{}, ErrToken
	}
	grant.token = want
	return grant, nil
}

// Standing implements Revoker: a token is good until there is a new one, and an open port until it is closed.
func (o Owners) Standing(id, name string) (func(Route, Grant) bool, error) {
	r, err := o.Host.State.Load(name)
	if err != nil {
		return nil, err
	}
	if r.ID != id {
		return nil, errAgain // the name has passed to another sandbox
	}
	m, err := o.Host.State.Metadata(name)
	if err != nil {
		return nil, err
	}
	want, err := o.Host.State.GatewayToken(name, m.Gateway)
	if err != nil {
		return nil, err
	}
	return func(to Route, g Grant) bool { return m.Gateway.Opens(to.Port) || g.token == want }, nil
}

// openTo lets a request get a sandbox from another host whose port is open without a token: tokens are a host's own.
func (to Route) openTo(m spec.Metadata) error {
	if !m.Gateway.Opens(to.Port) {
		return fmt.Errorf("%w: %s", sandbox.ErrNotFound, to.Sandbox)
	}
	return nil
}

// PublicName reports whether anyone may connect to a port of an existing sandbox. Certificates are only requested
// for such ports: their number is bounded, and so is what strangers can cost.
func PublicName(h *sandbox.Host, to Route) error {
	m, err := h.State.Metadata(to.Sandbox)
	if err != nil {
		return err
	}
	if !slices.Contains(m.Gateway.PublicPorts, to.Port) {
		return fmt.Errorf("%w: port %d of %s is not in its list of public ports", spec.ErrMetadata, to.Port, to.Sandbox)
	}
	return nil
}
