package peer

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Host is what the store says of a host that lives.
type Host struct{ Name, Address, Key string }

// Directory knows the hosts of a cluster and their sandboxes: cluster.Node. Its methods may be called from any
// goroutine.
type Directory interface {
	// Peer returns a host of the cluster that lives and has an address. What it says may be some seconds old, unless
	// fresh is set. The error is ErrNoHost if there is none of the name.
	Peer(ctx context.Context, host string, fresh bool) (Host, error)
	// Where returns the other host that has a sandbox and can be asked for it; "" if there is none, so that this host is
	// to do what is to be done. fresh is as above.
	Where(ctx context.Context, sandbox string, fresh bool) (host string, err error)
	// Private reports whether this host has a sandbox that it shares with no other.
	Private(sandbox string) bool
	// Known asks may about a sandbox as it was last published. It returns spec.ErrNotFound if the cluster has none of the
	// name, and what may returns.
	Known(ctx context.Context, sandbox string, may func(spec.Metadata) error) error
}

// ErrNoHost means that the cluster has no living host of a name that can be reached.
var ErrNoHost = errors.New("no host of that name lives and has an address")

// errNotHere means that a host does not have the sandbox any more.
var errNotHere = errors.New("the sandbox is not there any more")

// Caller is who has sent a request, as the host that let him in knows him.
type Caller struct {
	Name   string            `json:"name"`
	Owner  string            `json:"owner,omitempty"`
	Scopes []string          `json:"scopes,omitempty"`
	Hash   [sha256.Size]byte `json:"hash"` // of his token
}

// Passed is what a host asserts of a request that it passes on.
type Passed struct {
	// From is the host. It is not asserted: its key proves it.
	From string `json:"-"`
	// Service is which of the handlers of Serve is to get it.
	Service string `json:"service"`
	Sandbox string `json:"sandbox"`
	Caller  Caller `json:"caller"`
	// Client is the address that the request came from, and TLS reports whether it came so.
	Client string `json:"client"`
	TLS    bool   `json:"tls,omitempty"`

	// Nonce is only known to both hosts: no guest can answer for its host.
	Nonce string `json:"nonce"`
}

// Header fields between hosts.
const (
	headerPassed  = "Drowse-Passed"
	headerNotHere = "Drowse-Not-Here"
	maxPassed     = 8 << 10 // bytes
)

type passedKey struct{}

// From returns what the host asserts that passed a request on; nil if the request came from its client.
func From(ctx context.Context) *Passed {
	p, _ := ctx.Value(passedKey{}).(*Passed)
	return p
}

// NotHere answers a request that was passed on for a sandbox that another host has by now. The first host then asks the
// store once more. Nothing of the body may have been read.
func NotHere(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Connection", "close") // the body is not waited for
	if p := From(r.Context()); p != nil {
		w.Header().Set(headerNotHere, p.Nonce)
	}
	w.WriteHeader(http.StatusMisdirectedRequest)
}

func (p *Passed) encode() (string, error) {
	text, err := json.Marshal(p)
	out := base64.StdEncoding.EncodeToString(text)
	if err == nil && len(out) > maxPassed {
		err = fmt.Errorf("%d bytes say who has sent the request, and %d are allowed", len(out), maxPassed)
	}
	return out, err
}

func decodePassed(text string) (*Passed, error) {
	if len(text) > maxPassed {
		return nil, errors.New("too long")
	}
	plain, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, err
	}
	p := new(Passed)
	if err := json.Unmarshal(plain, p); err != nil {
		return nil, err
	}
	if p.Service == "" || p.Nonce == "" || !spec.ValidName(p.Sandbox) {
		return nil, errors.New("it says neither where to nor for which sandbox")
	}
	return p, nil
}

// Options configure New.
type Options struct {
	Identity  *Identity
	Directory Directory
	// Log gets refused hosts, at most one a second; nil discards them.
	Log *slog.Logger
}

// Peers is a host's part in passing requests on. Its methods may be called from any goroutine.
type Peers struct {
	o      Options
	log    *slog.Logger
	strang *rate.Limiter // looks for hosts that are not known
	logs   *rate.Limiter

	h1, h2 *http.Transport

	mu    sync.Mutex           // guards what follows
	hosts map[string]Host      // that were dialed, by key
	down  map[string]time.Time // until when no host of a key is dialed
}

// Bounds.
const (
	// strangers bounds the looks into the store for those who show a key that is not known, a second.
	strangers = 20
	maxHosts  = 10_000
	// dialTime is how long a host may take to take a connection, and downTime for how long it is left alone after that.
	dialTime, shakeTime = 3 * time.Second, 5 * time.Second
	downTime            = 2 * time.Second
	idleTime            = time.Minute
	maxIdle             = 64 // connections to a host without a request
	maxHeader           = 64 << 10
	// waitTime is how long the body of a request waits at the first host until the second one wants it. After that it
	// is sent, and then the request cannot go to a third one.
	waitTime = time.Minute
)

// New returns a host's part in passing requests on. Close ends it.
func New(o Options) *Peers {
	p := &Peers{o: o, log: o.Log, strang: rate.NewLimiter(strangers, strangers), logs: rate.NewLimiter(1, 5), hosts: map[string]Host{}, down: map[string]time.Time{}}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	p.h1, p.h2 = p.transport(false), p.transport(true)
	return p
}

// Close closes idle connections to other hosts.
func (p *Peers) Close() {
	p.h1.CloseIdleConnections()
	p.h2.CloseIdleConnections()
}

// Directory returns that of the options.
func (p *Peers) Directory() Directory { return p.o.Directory }

// Elsewhere reports whether a request that was passed on to this host must be answered with NotHere: another host has
// the sandbox, or this one does not share it.
func (p *Peers) Elsewhere(ctx context.Context, sandbox string) bool {
	if p.o.Directory.Private(sandbox) {
		return true
	}
	host, err := p.o.Directory.Where(ctx, sandbox, true)
	return err == nil && host != ""
}

// unreachable returns the error for a host that cannot be asked.
func unreachable(sandbox, host string, err error) error {
	return fmt.Errorf("%w: %s is on %s: %w", spec.ErrUnreachable, sandbox, host, err)
}

func nonce() string { return rand.Text() }
