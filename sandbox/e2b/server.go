package e2b

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/e2b/series"
	"github.com/drowse-vm/drowse/sandbox/e2b/templates"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// EnvdVersion is the version of E2B's protocol in a sandbox whose every feature is served.
const EnvdVersion = "0.6.4"

// envdPort is the port of that protocol. No request to it reaches the guest.
const envdPort = 49983

// Options configure New.
type Options struct {
	// Host has the sandboxes. It has the Launcher of its VMs.
	Host *sandbox.Host
	// Tokens are the keys. One with the scope read may look; to do anything it needs exec, files and create as well. One
	// with an owner reaches that owner's sandboxes.
	Tokens *tokens.Store
	// Identities have keys that an issuer signs, or certificates, for which Serve asks; nil is none.
	Identities *identity.Store
	// Domain is that of the host names {port}-{sandboxID}.{domain} of ports in sandboxes, with ":port" if need be.
	// Empty leaves clients to E2B_DOMAIN, and sandboxes are reached by header only.
	Domain string
	// Templates are images, and snapshots as SnapshotPrefix with an id or the beginning of one, by the names of
	// templates. All keys make sandboxes of them. Other templates are looked up among a key's snapshots and in the
	// image store.
	Templates map[string]string
	// Spec has size and kernel of new sandboxes; zero fields are Defaults.
	Spec sandbox.Spec
	// Network says that sandboxes have a network. Without it, a request for one is refused.
	Network bool
	// OwnersPrivate lets keys with an owner allow private addresses.
	OwnersPrivate bool
	// DNS is the resolver of sandboxes; nil is one that asks nobody.
	DNS *netpolicy.DNS
	// Pull makes an image of a registry's by its usual name, for a template that a key with the scope admin builds. Nil
	// refuses images that the host does not have.
	Pull func(ctx context.Context, ref string) error
	// Peers, if not nil, passes requests on to the hosts of a cluster that have their sandboxes. Those that others pass
	// on come by its Serve, as PeerService.
	Peers *peer.Peers
	// Cluster, if not nil, knows the sandboxes of other hosts, which lists then have as well.
	Cluster fleet.Cluster
	// Log gets changes, and errors of the host; nil discards them.
	Log *slog.Logger
}

// SnapshotPrefix begins the name of a snapshot in Options.Templates.
const SnapshotPrefix = templates.SnapshotPrefix

// Defaults are the size of a sandbox.
var Defaults = sandbox.Spec{VCPUs: 2, MemoryMiB: 512}

// Bounds of what clients can hold.
const (
	maxHeader    = 64 << 10
	maxControl   = 256  // requests of the control plane at once: see places
	maxStarts    = 32   // creations, resumes, forks and snapshots at once: see places
	maxRequests  = 8192 // requests to sandboxes at once, of which places has those with a token
	maxOfOne     = 512  // of them, to one sandbox
	maxListsOf   = 4    // of them, that list directories, of one sandbox
	maxStreams   = 256  // of one HTTP/2 connection
	headerTime   = 10 * time.Second
	idleTime     = 10 * time.Minute // E2B's clients keep connections
	endTime      = time.Minute      // for a guest to shut down
	drainTime    = 5 * time.Second
	controlTime  = 10 * time.Minute
	maxHostLabel = 64
)

// Server serves E2B's wire: an http.Handler. Make it with New, and end it with Close.
type Server struct {
	o    Options
	host *sandbox.Host
	log  *slog.Logger
	gate *gateway.Gateway
	mux  *http.ServeMux // the control plane
	envd *http.ServeMux // the protocol in a sandbox
	slow time.Duration  // slowTime
	// Places of the control plane, of what starts VMs, and of requests to the protocol in sandboxes.
	slots, start, inside *places

	templates *templates.Templates
	history   series.Store // by the ids of records: a sandbox keeps its own while it sleeps

	life context.Context // ends with Close
	end  context.CancelFunc
	all  sync.WaitGroup // attached processes and watchers

	mu       sync.Mutex // guards what follows
	closed   bool
	hubs     map[hubKey]*hub
	watchers map[string]*watcher
	requests int
	of       map[string]int // requests by sandbox
	said     time.Time      // when an error was last logged
}

// New returns a Server.
func New(o Options) (*Server, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.DNS == nil {
		o.DNS = &netpolicy.DNS{}
	}
	if o.Spec.VCPUs == 0 {
		o.Spec.VCPUs = Defaults.VCPUs
	}
	if o.Spec.MemoryMiB == 0 {
		o.Spec.MemoryMiB = Defaults.MemoryMiB
	}
	if o.Domain != "" {
		name, port, ok := strings.Cut(o.Domain, ":")
		if _, err := strconv.ParseUint(port, 10, 16); !gateway.ValidDomain(name) || ok && err != nil {
			return nil, fmt.Errorf("%w: domain %q of E2B's wire: use a name in lower case, with :PORT if need be", sandbox.ErrSpec, o.Domain)
		}
	}
	s := &Server{
		o: o, host: o.Host, log: o.Log, mux: http.NewServeMux(), envd: http.NewServeMux(),
		slots: newPlaces(maxControl), start: newPlaces(maxStarts), inside: newPlaces(maxRequests), slow: slowTime,
		hubs: map[hubKey]*hub{}, watchers: map[string]*watcher{}, of: map[string]int{},
	}
	s.life, s.end = context.WithCancel(context.Background())
	var err error
	if s.gate, err = gateway.New(o.Host, gateway.Options{Resolver: s, Authorizer: s, Refuse: s.refuse, Log: o.Log}); err != nil {
		return nil, err
	}
	s.templates = templates.New(templates.Options{
		Host: o.Host, Names: o.Templates, Size: o.Spec, Pull: o.Pull, Make: s.makeForBuild, Process: processID, Key: keyOf, MayAct: mayAct,
		ErrorOf: func(err error) *answers.Error { return asAPI(err, "") }, Report: s.report, Log: o.Log, EnvdVersion: EnvdVersion,
	})
	s.routes()
	s.envdRoutes()
	s.all.Go(s.tidy)
	s.all.Go(s.sample)
	return s, nil
}

// Close cuts all streams, and returns when nothing of the server runs any more.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.end()
	err := s.gate.Close()
	s.templates.Close()
	s.all.Wait()
	return err
}

// Serve serves a listener until ctx ends, and then closes it and the server: with TLS if c is not nil. It may be called
// once.
func (s *Server) Serve(ctx context.Context, l net.Listener, c *tls.Config) error {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(c != nil)
	p.SetUnencryptedHTTP2(c == nil)
	h := &http.Server{
		Handler: s, Protocols: &p, ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeader,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerConnection: 1 << 20, MaxReceiveBufferPerStream: 256 << 10,
			SendPingTimeout: 2 * time.Minute, PingTimeout: headerTime,
		},
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // errors of clients do not fill the log
	}
	in := gateway.Bound(l, 0)
	if c != nil {
		c = c.Clone()
		c.NextProtos = []string{"h2", "http/1.1"}
		in = tls.NewListener(in, s.o.Identities.TLS(c))
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		if err := h.Serve(in); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		s.end()
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
		defer cancel()
		var err error
		if h.Shutdown(end) != nil {
			err = h.Close()
		}
		return errors.Join(err, s.Close())
	})
	return group.Wait()
}

// Header fields that route requests to sandboxes, and those with their tokens.
const (
	headerSandbox = "E2b-Sandbox-Id"
	headerPort    = "E2b-Sandbox-Port"
	headerTraffic = "E2b-Traffic-Access-Token"
	headerEnvd    = "X-Access-Token"
)

// idRE is the form of ids. They are names of sandboxes, and parts of host names before which a hyphen stands.
var idRE = lazyregexp.New(`^[a-z0-9]{1,40}$`)

// ServeHTTP implements http.Handler: requests that name a sandbox go there, and all others to the control plane.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	to, named, err := s.routeOf(r)
	switch {
	case err != nil:
		unread(w, r)
		answers.Fail(http.StatusBadRequest, "the request names no sandbox and port").Write(w)
	case named:
		s.serveSandbox(w, r, to)
	default:
		s.serveControl(w, r)
	}
}

// unread has an answer not wait for the rest of a body.
func unread(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 && r.ProtoMajor == 1 {
		w.Header().Set("Connection", "close")
	}
}

// routeOf returns the sandbox and port that a request names. Host and header must not name different ones: whoever
// judges by one of them must not be misled.
func (s *Server) routeOf(r *http.Request) (to gateway.Route, named bool, err error) {
	byHost, hosted, err := s.routeOfHost(r.Host)
	if err != nil {
		return to, false, err
	}
	id, port := r.Header.Values(headerSandbox), r.Header.Values(headerPort)
	if len(id) == 0 && len(port) == 0 {
		return byHost, hosted, nil
	}
	if len(id) != 1 || len(port) > 1 {
		return to, false, gateway.ErrRoute
	}
	text := strconv.Itoa(envdPort)
	if len(port) == 1 {
		text = port[0]
	}
	if to, err = parseRoute(text, id[0]); err == nil && hosted && to != byHost {
		err = gateway.ErrRoute
	}
	return to, true, err
}

// routeOfHost is routeOf for a host name. Hosts outside the domain name no sandbox.
func (s *Server) routeOfHost(host string) (to gateway.Route, named bool, err error) {
	domain, _, _ := strings.Cut(s.o.Domain, ":")
	name, _, _ := strings.Cut(host, ":")
	name = strings.TrimSuffix(name, ".")
	if domain == "" || len(name) <= len(domain) || !strings.EqualFold(name[len(name)-len(domain)-1:], "."+domain) {
		return to, false, nil
	}
	label := name[:len(name)-len(domain)-1]
	if label == "api" || label == "sandbox" {
		return to, false, nil
	}
	if len(label) > maxHostLabel || strings.Contains(label, ".") {
		return to, false, gateway.ErrRoute
	}
	port, id, _ := strings.Cut(strings.ToLower(label), "-")
	to, err = parseRoute(port, id)
	return to, true, err
}

func parseRoute(port, id string) (gateway.Route, error) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != port || !idRE.MatchString(id) {
		return gateway.Route{}, gateway.ErrRoute
	}
	return gateway.Route{Sandbox: id, Port: uint16(n)}, nil
}

// Resolve implements gateway.Resolver.
func (s *Server) Resolve(r *http.Request) (gateway.Route, error) {
	to, named, err := s.routeOf(r)
	if err == nil && !named {
		err = gateway.ErrRoute
	}
	return to, err
}

// ResolveName implements gateway.Resolver: there are no raw connections.
func (s *Server) ResolveName(string) (gateway.Route, error) { return gateway.Route{}, gateway.ErrRoute }

// Authorize implements gateway.Authorizer.
func (s *Server) Authorize(ctx context.Context, to gateway.Route, header http.Header) (gateway.Grant, error) {
	b, err := s.find(to.Sandbox)
	if err != nil {
		return gateway.Grant{}, err
	}
	if b.meta.E2B.Network.Private {
		shown := header.Values(headerTraffic)
		if len(shown) == 0 {
			return gateway.Grant{}, gateway.ErrToken
		}
		want, err := token(s.host.State, b.record, useTraffic)
		if err != nil {
			return gateway.Grant{}, err
		}
		if len(shown) != 1 || !same(shown[0], want) {
			return gateway.Grant{}, gateway.ErrToken
		}
	}
	if b.paused() {
		if !b.meta.E2B.Resume {
			return gateway.Grant{}, gateway.ErrAsleep
		}
		if err := s.resume(ctx, b, time.Duration(b.meta.E2B.Timeout)*time.Second, false); err != nil {
			return gateway.Grant{}, err
		}
	}
	return gateway.Grant{
		Wake: b.meta.E2B.Resume, Host: b.meta.E2B.Network.Host, HTTPS: slices.Contains(b.meta.E2B.Network.HTTPSPorts, to.Port), Owner: b.meta.Owner,
		Hide: []string{headerSandbox, headerPort, headerTraffic, headerEnvd},
	}, nil
}

// refuse answers requests to ports that no server in the guest answers, as clients know it.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, f *gateway.Refusal) {
	type answer struct {
		ID      string `json:"sandboxId"`
		Message string `json:"message"`
		Port    uint16 `json:"port,omitempty"`
		Code    int    `json:"code"`
	}
	a := answer{ID: f.Route.Sandbox, Message: f.Message, Code: f.Status}
	title := "Sandbox Error"
	switch {
	case errors.Is(f.Err, gateway.ErrToken):
		f.Status, a.Code, a.Message = http.StatusForbidden, http.StatusForbidden, "The traffic access token is missing or wrong"
	case errors.Is(f.Err, gateway.ErrClosedPort):
		a.Port, a.Message, title = f.Route.Port, "The sandbox is running but port is not open", "Closed Port Error"
	case errors.Is(f.Err, gateway.ErrAsleep), errors.Is(f.Err, sandbox.ErrNotFound), errors.Is(f.Err, sandbox.ErrNotRunning), errors.Is(f.Err, spec.ErrExpired):
		f.Status, a.Code, a.Message = http.StatusBadGateway, http.StatusBadGateway, notThere
		title = "Sandbox Not Found"
	}
	// Pages of other origins may know why there is no answer.
	w.Header().Set("Access-Control-Allow-Origin", "*")
	if !strings.HasPrefix(r.UserAgent(), "Mozilla/") {
		f.WriteJSON(w, a)
		return
	}
	f.WriteHTML(w, title, fmt.Sprintf("%s (sandbox %s, port %d).", a.Message, a.ID, f.Route.Port))
}

// notThere is E2B's message for a sandbox that does not run.
const notThere = "The sandbox was not found"

// box is a sandbox of this wire, as it was when it was looked up.
type box struct {
	*sandbox.Sandbox
	record *state.Record
	meta   spec.Metadata
}

// find looks a sandbox up. Those that have no spec.Metadata.E2B do not exist here.
func (s *Server) find(id string) (*box, error) {
	if !idRE.MatchString(id) {
		return nil, sandbox.ErrNotFound
	}
	r, err := s.host.State.Get(id)
	if err != nil {
		return nil, err
	}
	m, err := s.host.State.Metadata(id)
	if err != nil {
		return nil, err
	}
	b := &box{s.host.Sandbox(id), r, m}
	if m.E2B == nil || r.Creating() || b.gone(time.Now()) {
		return nil, fmt.Errorf("%w: %s is not one of E2B's wire", sandbox.ErrNotFound, id)
	}
	return b, nil
}

// gone reports whether the sandbox is only there until it is removed.
func (b *box) gone(now time.Time) bool {
	if b.meta.EffectiveClass() != "ephemeral" {
		return false
	}
	over := !b.meta.Expires.IsZero() && !now.Before(b.meta.Expires)
	return over || b.record.Phase == state.Stopped || b.record.Phase == state.Crashed
}

// paused reports whether the sandbox has to be brought up for a use.
func (b *box) paused() bool {
	return b.record.Phase != state.Running && b.record.Phase != state.Starting
}

// ending reports whether the guest shuts down because the sandbox's time is over.
func (b *box) ending(now time.Time) bool {
	return b.meta.E2B.Pause && b.meta.E2B.DiskOnly && !b.paused() && !b.meta.Expires.IsZero() && !now.Before(b.meta.Expires)
}

// ended waits until a sandbox that is ending has ended.
func (s *Server) ended(ctx context.Context, b *box) (*box, error) {
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	for b.ending(time.Now()) {
		if wait.For(ctx, listWait) != nil {
			return nil, answers.Fail(http.StatusConflict, "the sandbox is being paused")
		}
		var err error
		if b, err = s.find(b.Name()); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// report logs an error of the host, at most one a second: clients must not fill the log.
func (s *Server) report(what, id string, err error) {
	s.mu.Lock()
	now := time.Now()
	quiet := now.Sub(s.said) < time.Second
	if !quiet {
		s.said = now
	}
	s.mu.Unlock()
	if !quiet {
		s.log.Warn("a request of E2B's wire has failed", "request", what, "sandbox", id, "error", err)
	}
}
