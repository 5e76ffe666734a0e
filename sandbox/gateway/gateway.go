package gateway

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Options configure a Gateway. Zero limits are the defaults.
type Options struct {
	// Resolver finds routes. It must be set: Names is one.
	Resolver Resolver
	// Authorizer lets requests in; nil is Owners.
	Authorizer Authorizer
	// Refuse answers HTTP requests that did not reach a guest's server; nil is Refusal.Write.
	Refuse func(w http.ResponseWriter, r *http.Request, f *Refusal)
	// Limits bound what strangers can hold.
	Limits Limits
	// Carried, if not nil, is called for each request and raw connection that is about to reach its guest's server,
	// from many goroutines.
	Carried func(Carried)
	// Peers, if not nil, passes requests on to the hosts of a cluster that have their sandboxes. Those that others pass
	// on come by its Serve: PeerHandlers.
	Peers *peer.Peers
	// Log gets errors of the host, at most one a second; nil discards them.
	Log *slog.Logger
}

// Limits bound what a Gateway holds. A WebSocket or a raw connection counts as a request until it ends.
type Limits struct {
	// Requests bounds the requests of all sandboxes, RequestsOfOwner those of all sandboxes of an owner, by default half
	// of them, and RequestsOf those of one. Further ones are refused with ErrBusy. The agent of a guest serves 768
	// connections, of which some are pooled.
	Requests, RequestsOfOwner, RequestsOf int
	// Waiting bounds the requests that wait for sandboxes to wake, half of which may be an owner's, and WaitingOf
	// those for one sandbox. The body of a waiting request stays with its client, except for what the buffers of its
	// connection take.
	Waiting, WaitingOf int
	// WakeTime is how long a request waits for its sandbox.
	WakeTime time.Duration
	// Linger is how long a sandbox stays held after its last request, with its connections, for the next one. It is
	// less than any idle time.
	Linger time.Duration
}

// DefaultLimits are those that are zero in Options.
var DefaultLimits = Limits{Requests: 16384, RequestsOf: 700, Waiting: 1024, WaitingOf: 128, WakeTime: time.Minute, Linger: 250 * time.Millisecond}

// maxResponseHeader bounds the header of an answer of a guest's server with all interim responses, in bytes.
const maxResponseHeader = 64 << 10

// Carried is a request that is about to reach its guest's server.
type Carried struct {
	Route
	// Came is when the gateway got it, and Ready when its sandbox was held awake for it.
	Came, Ready time.Time
	// Woken reports that the sandbox was not in use by the gateway before: it may have slept.
	Woken bool
}

// Gateway carries requests to sandboxes: an http.Handler. Close ends it.
type Gateway struct {
	host  *sandbox.Host
	o     Options
	log   *slog.Logger
	pages *proxies

	life   context.Context // ends with Close
	end    context.CancelFunc
	rawTLS atomic.Pointer[tls.Config] // of raw connections, once it serves

	mu                    sync.Mutex          // guards what follows
	sessions              map[string]*session // by the id of the sandbox's record
	live                  map[*session]struct{}
	requests              int
	requestsOf, waitingOf map[string]int // by id
	requestsOfOwner       map[string]int
	waitingOfOwner        map[string]int
	waiting               int
	closed                bool
	refused               uint64
	said                  time.Time // when an error was last logged
	all                   sync.WaitGroup
}

// Stats are a Gateway's counters.
type Stats struct {
	// Open and Waiting are the requests that are open now, and of them, those that wait for sandboxes to wake.
	// Sessions are the sandboxes that are held for requests, or have idle streams.
	Open, Waiting, Sessions int
	// Refused is how many requests never reached a guest's server.
	Refused uint64
}

// Stats returns the counters.
func (g *Gateway) Stats() Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Stats{Open: g.requests, Waiting: g.waiting, Sessions: len(g.live), Refused: g.refused}
}

// ErrBusy means that a limit is reached, or that the host has no room to wake a sandbox.
var ErrBusy = errors.New("there is no room for the request now")

// New returns a gateway to the sandboxes of a host that can start VMs (Host.With).
func New(h *sandbox.Host, o Options) (*Gateway, error) {
	if o.Resolver == nil {
		return nil, fmt.Errorf("%w: a gateway without a Resolver: use gateway.Names", sandbox.ErrSpec)
	}
	if o.Authorizer == nil {
		o.Authorizer = Owners{h}
	}
	if o.Refuse == nil {
		o.Refuse = func(w http.ResponseWriter, _ *http.Request, f *Refusal) { f.Write(w) }
	}
	l, d := &o.Limits, DefaultLimits
	l.Requests, l.RequestsOf = cmp.Or(l.Requests, d.Requests), cmp.Or(l.RequestsOf, d.RequestsOf)
	l.RequestsOfOwner = cmp.Or(l.RequestsOfOwner, max(l.Requests/2, 1))
	l.Waiting, l.WaitingOf = cmp.Or(l.Waiting, d.Waiting), cmp.Or(l.WaitingOf, d.WaitingOf)
	l.WakeTime, l.Linger = cmp.Or(l.WakeTime, d.WakeTime), cmp.Or(l.Linger, d.Linger)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	g := &Gateway{host: h, o: o, log: o.Log, sessions: map[string]*session{}, live: map[*session]struct{}{}, requestsOf: map[string]int{}, waitingOf: map[string]int{}, requestsOfOwner: map[string]int{}, waitingOfOwner: map[string]int{}}
	g.life, g.end = context.WithCancel(context.Background())
	g.pages = newProxies(g)
	if by, ok := o.Authorizer.(Revoker); ok {
		g.all.Go(func() { g.review(by) })
	}
	return g, nil
}

// Close cuts all connections, and waits until the gateway has let go of all sandboxes. New requests are refused.
func (g *Gateway) Close() error {
	g.mu.Lock()
	g.closed = true
	g.end()
	for s := range g.live {
		s.cut(errClosed)
	}
	g.mu.Unlock()
	g.all.Wait()
	return nil
}

var errClosed = fmt.Errorf("%w: the gateway ends", ErrBusy)

// Refusal says why a request did not reach a guest's server.
type Refusal struct {
	// Route is zero if the request has none.
	Route Route
	// Err wraps ErrRoute, ErrNoToken, ErrToken, ErrAsleep, ErrBusy, sandbox.ErrNotFound, ErrClosedPort,
	// ErrBadServer, context.DeadlineExceeded, or is an error of the host. Its text is for the host's log.
	Err error
	// Status is the HTTP status for it, and Message a text for clients.
	Status  int
	Message string
	// RetryAfter is in how many seconds the client may try again; 0 says nothing of that.
	RetryAfter int
}

var (
	// ErrClosedPort means that nothing listens at the port in the guest.
	ErrClosedPort = errors.New("nothing listens at the port")
	// ErrBadServer means that the server in the guest went away, or that its answer is not HTTP.
	ErrBadServer = errors.New("the server in the sandbox gave no valid answer")
)

// refusal returns the refusal for an error.
func refusal(to Route, err error) *Refusal {
	f := &Refusal{Route: to, Err: err}
	is := func(list ...error) bool {
		for _, target := range list {
			if errors.Is(err, target) {
				return true
			}
		}
		return false
	}
	set := func(status int, message string) { f.Status, f.Message = status, message }
	switch {
	case is(ErrRoute):
		set(http.StatusBadRequest, "The host of the request names no sandbox and port")
	case is(errBody):
		set(http.StatusBadRequest, "The body of the request is broken")
	case is(ErrNoToken):
		set(http.StatusUnauthorized, "Send the token of the sandbox as "+HeaderToken)
	case is(ErrToken):
		set(http.StatusForbidden, "The token is not the one of the sandbox")
	case is(sandbox.ErrNotFound, spec.ErrExpired):
		set(http.StatusBadGateway, "The sandbox was not found")
	case is(ErrAsleep, sandbox.ErrNotRunning):
		set(http.StatusBadGateway, "The sandbox does not run")
	case is(ErrClosedPort):
		set(http.StatusBadGateway, "Nothing listens at the port")
	case is(ErrBadServer):
		set(http.StatusBadGateway, "The server in the sandbox gave no valid answer")
	case is(ErrBusy, errAgain):
		set(http.StatusServiceUnavailable, "There is no room for the request now")
		f.RetryAfter = 1
	case is(spec.ErrUnreachable, spec.ErrElsewhere):
		set(http.StatusServiceUnavailable, "The host of the sandbox does not answer")
		f.RetryAfter = 5
	case noRoom(err):
		set(http.StatusServiceUnavailable, "The host has no room to wake the sandbox now")
		f.RetryAfter = 5
	case is(context.DeadlineExceeded, syscall.ETIMEDOUT):
		set(http.StatusGatewayTimeout, "The sandbox did not answer in time")
	default:
		set(http.StatusBadGateway, "The sandbox could not be reached")
	}
	return f
}

// noRoom reports whether a sandbox could not be woken because the host lacks something that it may have again.
func noRoom(err error) bool {
	switch fleet.CodeOf(err) {
	case "host-memory", "addresses-full", "network-full", "no-space", "disk-no-space", "owner-limit":
		return true
	}
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM)
}

// Write answers with the refusal as JSON: sandbox, port, message and code, which is the status.
func (f *Refusal) Write(w http.ResponseWriter) {
	if f.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", HeaderToken)
	}
	f.WriteJSON(w, struct {
		Sandbox string `json:"sandbox,omitempty"`
		Port    uint16 `json:"port,omitempty"`
		Message string `json:"message"`
		Code    int    `json:"code"`
	}{f.Route.Sandbox, f.Route.Port, f.Message, f.Status})
}

// WriteJSON answers with the refusal's status and a body of the caller's.
func (f *Refusal) WriteJSON(w http.ResponseWriter, body any) {
	f.head(w, "application/json")
	_ = json.NewEncoder(w).Encode(body) // an error means that the client has gone
}

// WriteHTML answers with the refusal's status and a page for people.
func (f *Refusal) WriteHTML(w http.ResponseWriter, title, message string) {
	w.Header().Set("Content-Security-Policy", "default-src 'none'")
	f.head(w, "text/html; charset=utf-8")
	title = html.EscapeString(title)
	fmt.Fprintf(w, "<!doctype html><html><head><title>%s</title></head><body><h1>%s</h1><p>%s</p></body></html>\n", title, title, html.EscapeString(message))
}

func (f *Refusal) head(w http.ResponseWriter, kind string) {
	h := w.Header()
	if f.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(f.RetryAfter))
	}
	h.Set("Content-Type", kind)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(f.Status)
}

// ServeHTTP carries a request to its sandbox.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	came := time.Now()
	to, err := g.route(r)
	if err != nil {
		g.refuse(w, r, refusal(Route{}, err))
		return
	}
	if g.away(r.Context(), to) {
		peer.NotHere(w, r)
		return
	}
	answered, final, away := g.passOn(w, r, to)
	if answered {
		return
	}
	if final {
		g.refuse(w, r, refusal(to, away))
		return
	}
	u, err := g.enter(r.Context(), to, r.Header)
	if err != nil {
		g.refuse(w, r, refusal(to, because(err, away)))
		return
	}
	defer u.leave()
	g.carried(u, to, came)
	g.pages.serve(w, r, u, to)
}

func (g *Gateway) carried(u *use, to Route, came time.Time) {
	if g.o.Carried != nil {
		g.o.Carried(Carried{Route: to, Came: came, Ready: time.Now(), Woken: u.first})
	}
}

// route finds the route of a request that can be carried.
func (g *Gateway) route(r *http.Request) (Route, error) {
	switch {
	case r.Method == http.MethodConnect:
		return Route{}, fmt.Errorf("%w: CONNECT is not carried", ErrRoute)
	case r.URL.Opaque != "":
		return Route{}, fmt.Errorf("%w: its target is neither a path nor a URL with a host", ErrRoute)
	}
	return g.o.Resolver.Resolve(r)
}

// refuse answers a request before its body has been read.
func (g *Gateway) refuse(w http.ResponseWriter, r *http.Request, f *Refusal) {
	if r.ContentLength != 0 && r.ProtoMajor == 1 {
		w.Header().Set("Connection", "close") // the rest of the body is not waited for
	}
	g.report(f)
	g.o.Refuse(w, r, f)
}

// logEvery is how often an error of the host is logged: strangers must not be able to fill the log.
const logEvery = time.Second

// report counts a refusal, and logs one that the host must know of.
func (g *Gateway) report(f *Refusal) {
	g.mu.Lock()
	g.refused++
	g.mu.Unlock()
	if f.Status < http.StatusInternalServerError || errors.Is(f.Err, context.Canceled) ||
		errors.Is(f.Err, sandbox.ErrNotFound) || errors.Is(f.Err, ErrClosedPort) || errors.Is(f.Err, ErrAsleep) {
		return
	}
	g.mu.Lock()
	now := time.Now()
	quiet := now.Sub(g.said) < logEvery
	if !quiet {
		g.said = now
	}
	g.mu.Unlock()
	if !quiet {
		g.log.Warn("a request was not carried", "sandbox", f.Route.Sandbox, "port", f.Route.Port, "status", f.Status, "error", f.Err)
	}
}

// enter lets a request in, and holds its sandbox awake for it until use.leave.
func (g *Gateway) enter(ctx context.Context, to Route, header http.Header) (*use, error) {
	for range enterTries {
		// Names may pass to other sandboxes: the one that is reached must be the one that was judged.
		before, err := g.host.State.Load(to.Sandbox)
		if cl := g.host.Cluster; cl != nil && errors.Is(err, sandbox.ErrNotFound) {
			if err = cl.Claim(ctx, to.Sandbox, to.openTo); err == nil {
				before, err = g.host.State.Load(to.Sandbox)
			}
		}
		if err != nil {
			return nil, err
		}
		grant, err := g.o.Authorizer.Authorize(ctx, to, header)
		if err != nil {
			return nil, err
		}
		u, err := g.use(ctx, before.ID, to, grant)
		switch {
		case err == nil:
			return u, nil
		case !errors.Is(err, errAgain):
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w: %s changed %d times meanwhile", ErrBusy, to.Sandbox, enterTries)
}

// enterTries bounds how often one request begins anew since its sandbox was renamed or put to sleep meanwhile.
const enterTries = 5

var errAgain = errors.New("the sandbox has changed")
