package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"mime"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sync/singleflight"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sources"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// The scopes of callers and routes: see package tokens.
const (
	ScopeNone   = tokens.ScopeNone
	ScopeRead   = tokens.ScopeRead
	ScopeExec   = tokens.ScopeExec
	ScopeFiles  = tokens.ScopeFiles
	ScopeCreate = tokens.ScopeCreate
	ScopeAdmin  = tokens.ScopeAdmin
)

// Scope is a right of a caller.
type Scope = tokens.Scope

// mayWrite returns "read" for a caller who may only read, else "write".
func mayWrite(s tokens.Scopes) string {
	if len(s) == 1 && s[0] == ScopeRead {
		return string(ScopeRead)
	}
	return "write"
}

// Time limits of a request.
const (
	readTime  = time.Minute      // reads
	writeTime = 10 * time.Minute // starts, saves and removals: a boot with much memory takes minutes on a soft KVM
	// migrateTime bounds a move: what goes ahead may be much, and the network slow.
	migrateTime = time.Hour
	bodyTime    = 30 * time.Second // until the body of a request has arrived
	sendTime    = 2 * time.Minute  // until the client has taken an answer
)

// Options configure New.
type Options struct {
	// Host is what requests work on. It has the Launcher of its VMs and their Observer.
	Host *sandbox.Host
	// Version is the program's.
	Version string
	// Tokens are those of callers that do not use the Unix socket. Identities are such callers for whom others vouch; nil
	// is none.
	Tokens     *tokens.Store
	Identities *identity.Store
	// Sources are where secrets may come from; nil is none. The Launcher of Host gets their values.
	Sources *sources.Store
	// Resolvers are the host's name servers, which clients that write policies are told.
	Resolvers []netip.AddrPort
	// OwnersPrivate lets callers with an owner open private addresses and the host's services in policies.
	OwnersPrivate bool
	// Hosts are the server's names that callers may use, beside addresses and localhost. The server refuses any
	// other Host.
	Hosts []string
	// Live and Ready are the checks of /healthz and /readyz.
	Live, Ready []Check
	// Mounts are additional handlers.
	Mounts []Mount
	// Peers, if not nil, passes requests on to the hosts of a cluster that have their sandboxes. Those that others pass
	// on come by its Serve, as PeerService.
	Peers *peer.Peers
	// Cluster, if not nil, knows the sandboxes of other hosts, which lists then have as well.
	Cluster fleet.Cluster
	// Context, if not nil, makes the context of an accepted request from its header.
	Context func(ctx context.Context, h http.Header) context.Context
	// Log gets changes and errors of the server; nil discards them.
	Log *slog.Logger
}

// Check is one check of /healthz or /readyz. Do may be called from several goroutines; it has 10 s.
type Check struct {
	Name string
	Do   func(ctx context.Context) error
}

// Mount is a handler in addition to those of this package. The server checks a request (tokens, Host, Origin)
// first. The handler sets its own bounds of body and time. It must end long requests when Draining is closed.
type Mount struct {
	// Pattern is a pattern of http.ServeMux.
	Pattern string
	Scope   Scope
	// AllOwners means that the handler does not keep owners apart: callers with an owner are refused.
	AllOwners bool
	Handler   http.Handler
	// Long means that it runs until its client ends it. MaxStreams of such requests run at once.
	Long bool
}

// Server answers requests. Make it with New.
type Server struct {
	o        Options
	fleet    *fleet.Fleet
	log      *slog.Logger
	mux      *http.ServeMux
	checking singleflight.Group // of checks of health, by path
	draining chan struct{}      // closed when the server must end
	refusals refusals
	ops      operations
	keys     keys
	edits    [64]sync.Mutex // held while an edit with If-Match is made, by the hash of the name
	names    names
	watched  watched        // what runs long
	streams  sync.WaitGroup // WebSockets
}

// New returns a Server.
func New(o Options) *Server {
	s := &Server{o: o, fleet: fleet.New(o.Host, fleet.Options{Cluster: o.Cluster}), log: o.Log, mux: http.NewServeMux(), draining: make(chan struct{})}
	if s.o.Tokens == nil {
		s.o.Tokens = tokens.Open("") // no file, no token
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	open, execs, streams := newRoom("requests without a token", MaxOpen), newRoom("commands", MaxExecs), newRoom("streams", MaxStreams)
	changes := newRoom("changes", MaxChanges)
	byScope := map[Scope]*room{ScopeNone: open, ScopeRead: newRoom("requests that read", MaxReads)}
	for _, scope := range []Scope{ScopeExec, ScopeFiles, ScopeCreate, ScopeAdmin} {
		byScope[scope] = changes
	}
	transfers, sockets := newRoom("transfers", MaxTransfers), newRoom("WebSockets", MaxSockets)
	for _, r := range routes() {
		if slices.ContainsFunc(o.Mounts, func(m Mount) bool { return m.Pattern == r.method+" "+r.path }) {
			continue // it takes the place of the route
		}
		in := byScope[r.scope]
		switch r.room {
		case roomNone:
			in = nil
		case roomExecs:
			in = execs
		case roomStreams:
			in = streams
		case roomTransfers:
			in = transfers
		case roomSockets:
			in = sockets
		}
		s.mux.Handle(r.method+" "+r.path, s.bounded(r.scope, r.allOwners, in, s.answer(r)))
	}
	for _, m := range o.Mounts {
		in := byScope[m.Scope]
		if m.Long {
			in = streams
		}
		s.mux.Handle(m.Pattern, s.bounded(m.Scope, m.AllOwners, in, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			unread(w, r)
			m.Handler.ServeHTTP(w, r)
		})))
	}
	return s
}

type contextKey int

const (
	keyCaller contextKey = iota
	keyDraining
)

// Draining returns a channel that is closed when the server must end. Long requests must end then.
func Draining(ctx context.Context) <-chan struct{} {
	c, _ := ctx.Value(keyDraining).(chan struct{})
	return c
}

// Caller is the sender of a request.
type Caller struct {
	// Name is that of the token or identity, or "uid N" of a peer of the Unix socket; empty for an unknown caller.
	Name   string
	Scopes tokens.Scopes
	// Owner, if not empty, is whose sandboxes the caller reaches; it does not learn of others.
	Owner string
	// Local reports whether the caller is a peer of the Unix socket.
	Local bool
	is    identity.Identity // unless Local
	from  string            // the host that asserts it; empty if this one has let it in
}

// CallerOf returns the caller of a request that a Mount gets.
func CallerOf(ctx context.Context) Caller {
	c, _ := ctx.Value(keyCaller).(Caller)
	return c
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	if c, ok := r.Context().Value(connKey{}).(*limitedConn); ok {
		defer c.answering()()
	}
	if err := s.checkOrigin(r); err != nil {
		s.refuse(w, r, err)
		return
	}
	if clean := path.Clean("/" + r.URL.Path); clean != r.URL.Path && clean+"/" != r.URL.Path {
		// The mux would redirect to another path.
		s.refuse(w, r, own(wire.CodeNoRoute, "encode the slashes and dots of names", "%.200q is no clean path", r.URL.Path))
		return
	}
	if _, pattern := s.mux.Handler(r); pattern != "" {
		// Through the mux again: it sets the request's path values.
		s.mux.ServeHTTP(w, r)
		return
	}
	if allow := s.methodsOf(r); len(allow) > 0 {
		h.Set("Allow", strings.Join(allow, ", "))
		s.refuse(w, r, own(wire.CodeMethod, "use "+strings.Join(allow, " or "), "%s %s: the path has other methods", r.Method, r.URL.Path))
		return
	}
	s.refuse(w, r, own(wire.CodeNoRoute, "see /v1/openapi.json for what there is", "there is no %s", r.URL.Path))
}

// methodsOf returns the methods of a path.
func (s *Server) methodsOf(r *http.Request) (out []string) {
	for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		other := *r
		other.Method = m
		if _, pattern := s.mux.Handler(&other); pattern != "" {
			out = append(out, m)
		}
	}
	return out
}

// bounded passes on a request whose caller has the scope want, if in has room; a nil room has no bound.
func (s *Server) bounded(want Scope, allOwners bool, in *room, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := s.caller(r)
		switch {
		case err != nil:
		case !c.Scopes.Has(want):
			err = own(wire.CodeForbidden, "use a token with the scope "+string(want), "%s may only %s", c.Name, c.Scopes)
		case allOwners && c.Owner != "":
			err = own(wire.CodeForbidden, "use a token without an owner", "%s is for sandboxes of one owner", c.Name)
		case c.from != "" && r.PathValue("name") == "":
			err = own(wire.CodeForbidden, "ask this host itself", "the host %s passes on what is for no sandbox", c.from)
		}
		if err != nil && want != ScopeNone {
			s.refusals.log(s.log, r, c.Name, err)
			if late, ok := errors.AsType[later](err); ok {
				w.Header().Set("Retry-After", strconv.Itoa(int(late.wait/time.Second)+1))
			}
			if fleet.CodeOf(err) == wire.CodeUnauthorized {
				w.Header().Set("WWW-Authenticate", `Bearer realm="drowse"`)
			}
			s.refuse(w, r, err)
			return
		}
		if in != nil {
			who := c.Name
			switch {
			case want == ScopeNone:
				who = sourceOf(r.RemoteAddr)
			case c.Owner != "":
				who = "owner " + c.Owner // who may have any number of tokens and identities
			}
			leave, err := in.enter(who)
			if err != nil {
				w.Header().Set("Retry-After", "1")
				s.refuse(w, r, err)
				return
			}
			defer leave()
		}
		if want == ScopeNone {
			// An unknown caller must not keep its place by reading slowly.
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(sendTime))
		}
		ctx := context.WithValue(r.Context(), keyCaller, c)
		ctx = context.WithValue(ctx, keyDraining, s.draining)
		ctx = events.WithCause(ctx, events.API)
		if c.Name != "" {
			ctx = audit.WithVia(ctx, "api:"+c.Name)
		}
		if s.o.Context != nil {
			ctx = s.o.Context(ctx, r.Header)
		}
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// answer returns the handler of a route of this package.
func (s *Server) answer(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !utf8.ValidString(r.URL.Path) { // JSON and messages to guests cannot carry it
			s.refuse(w, r, fleet.Fail(rt.op, "", own("invalid", "use UTF-8", "the path of the request is not UTF-8")))
			return
		}
		if name := r.PathValue("name"); name != "" {
			answered, away := s.passOn(w, r, rt, name)
			if answered {
				return
			}
			err := s.reach(r.Context(), rt, name, away)
			if errors.Is(err, spec.ErrElsewhere) && away == nil { // it has moved meanwhile; nothing of the body was read
				if answered, away = s.passOn(w, r, rt, name); answered {
					return
				}
				err = cmp.Or(away, err)
			}
			if err != nil {
				s.refuse(w, r, fleet.Fail(rt.op, name, err))
				return
			}
		}
		if id := r.PathValue("id"); id != "" && CallerOf(r.Context()).Owner != "" {
			if _, err := s.reachesSnapshot(r.Context(), CallerOf(r.Context()), id); err != nil {
				s.refuse(w, r, fleet.Fail(rt.op, "", err))
				return
			}
		}
		if rt.raw != nil {
			unread(w, r)
			rt.raw(s, w, r)
			return
		}
		if rt.socket != nil {
			r, done, err := s.use(w, r, r.PathValue("name"))
			if err != nil {
				s.refuse(w, r, fleet.Fail(rt.op, r.PathValue("name"), err))
				return
			}
			defer done()
			s.serveSocket(rt, w, r)
			return
		}
		limit := readTime
		if rt.scope != ScopeRead && rt.scope != ScopeNone {
			limit = writeTime
		}
		if rt.limit > 0 {
			limit = rt.limit
		}
		out := http.NewResponseController(w)
		var body any
		var err error
		if rt.takesKind == "" {
			// Test writers may lack deadlines.
			_ = out.SetReadDeadline(time.Now().Add(bodyTime))
			r.Body = http.MaxBytesReader(w, r.Body, wire.MaxBody)
			if rt.scope == ScopeNone {
				// Nor by a body that never arrives.
				unread(w, r)
				r.Body = http.NoBody
			}
			body, err = readBody(r, rt)
		} else {
			err = checkUpload(r, rt)
		}
		if err != nil {
			s.refuse(w, r, fleet.Fail(rt.op, r.PathValue("name"), err))
			return
		}
		// A long operation ends when its client goes, not by this deadline.
		_ = out.SetReadDeadline(time.Time{})
		if name := r.PathValue("name"); name != "" && !rt.checksOwner {
			// Again, and from here on: the body may have come late.
			used, done, err := s.use(w, r, name)
			if err != nil {
				s.refuse(w, r, fleet.Fail(rt.op, name, err))
				return
			}
			defer done()
			r = used
		}
		ctx, cancel := context.WithTimeout(r.Context(), limit)
		if rt.noLimit {
			ends, end := context.WithCancelCause(r.Context())
			ctx, cancel = ends, func() { end(nil) }
			defer s.watch(CallerOf(ctx), func(cause error) {
				if !errors.Is(cause, errEnding) { // a server that ends gives it time
					interrupt(w, end, cause)
				}
			})()
		}
		defer cancel()
		begin := time.Now()
		req := &request{Request: r.WithContext(ctx), body: body, op: rt.op, w: w, server: s}
		do := func() (int, any, error) { return rt.serve(s, req) }
		var status int
		var doc any
		if rt.idempotent {
			status, doc, err = s.once(req, do)
		} else {
			status, doc, err = do()
		}
		if err != nil && errors.Is(context.Cause(ctx), errGone) {
			err = noSandbox(r.PathValue("name"))
		}
		err = asked(err)
		if rt.scope != ScopeRead && rt.scope != ScopeNone {
			s.log.Info("asked over HTTP", "by", CallerOf(r.Context()).Name, "op", rt.op, "sandbox", r.PathValue("name"),
				"took_ms", time.Since(begin).Milliseconds(), "error", err)
		}
		_ = out.SetWriteDeadline(time.Now().Add(sendTime))
		if err != nil {
			if rt.takesKind != "" {
				unread(w, r) // some of the body may not have been read
			}
			s.fail(w, r, fleet.Fail(rt.op, r.PathValue("name"), err))
			return
		}
		switch doc := doc.(type) {
		case nothing:
			w.WriteHeader(status)
			return
		case *streamed:
			s.stream(w, req.Request, rt.op, status, doc)
			return
		}
		if text, ok := doc.(rawText); ok {
			w.Header().Set("Content-Type", text.kind)
			w.WriteHeader(status)
			_, _ = w.Write(text.bytes) // an error means that the client has gone
			return
		}
		s.write(w, r, status, doc)
	})
}

// rawText is an answer that is not the JSON of a Go value.
type rawText struct {
	kind  string
	bytes []byte
}

// checkUpload refuses uploads of another kind. A foreign page cannot make a browser send these without asking first.
func checkUpload(r *http.Request, rt route) error {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != rt.takesKind {
		return own(wire.CodeMediaType, "send "+rt.takesKind, "the body is %.64q", r.Header.Get("Content-Type"))
	}
	return nil
}

// readBody reads the body of a request into a value of the route's type; nil if the route takes no body.
func readBody(r *http.Request, rt route) (any, error) {
	data, err := io.ReadAll(r.Body)
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, own(wire.CodeTooLarge, "send less", "the body has more than %d bytes", large.Limit)
	case err != nil:
		return nil, fmt.Errorf("%w: reading the body: %w", sandbox.ErrSpec, err)
	}
	if len(data) == 0 {
		if rt.needsBody {
			return nil, fmt.Errorf("%w: the request has no body: send a JSON object", sandbox.ErrSpec)
		}
		data = []byte("{}")
	} else if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		// A foreign page cannot make a browser send this type without asking first.
		return nil, own(wire.CodeMediaType, "send application/json", "the body is %q", r.Header.Get("Content-Type"))
	}
	if rt.rawBody {
		return data, nil
	}
	into := rt.body()
	d := json.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		inner := spec.FieldOf(err)
		err = fmt.Errorf("%w: reading the body: %s", sandbox.ErrSpec, strings.TrimPrefix(err.Error(), "json: "))
		if field := within(culprit(data, rt.body), inner); field != "" {
			err = spec.InField(field, err)
		}
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: there is more after the JSON object of the body", sandbox.ErrSpec)
	}
	return into, nil
}

// within returns the place of a field in a value that reads itself, of whose path the last elements may be known.
func within(path []string, inner string) string {
	if inner != "" {
		first := inner[:strings.IndexAny(inner+".", ".[")]
		if i := slices.Index(path, first); i >= 0 {
			path = path[:i]
		}
		path = append(path, inner)
	}
	return strings.Join(path, ".")
}

// culprit returns the path of the field that prevents a body from being read, by reading each alone; nil if it is none.
func culprit(data []byte, into func() any) []string {
	const deepest, longest, most = 8, 64, 256 // no description has such levels, names and numbers of fields
	var path []string
	before, after := "", ""
	fails := func(text string) bool {
		d := json.NewDecoder(strings.NewReader(before + text + after))
		d.DisallowUnknownFields()
		return d.Decode(into()) != nil
	}
	for range deepest {
		var fields map[string]json.RawMessage
		if json.Unmarshal(data, &fields) != nil || len(fields) > most || fails("{}") {
			break
		}
		names := slices.Sorted(maps.Keys(fields))
		i := slices.IndexFunc(names, func(name string) bool {
			return len(name) <= longest && fails(fmt.Sprintf("{%q:%s}", name, fields[name]))
		})
		if i < 0 {
			break
		}
		path, data = append(path, names[i]), fields[names[i]]
		before, after = fmt.Sprintf("%s{%q:", before, names[i]), "}"+after
	}
	return path
}

func (s *Server) write(w http.ResponseWriter, r *http.Request, status int, doc any) {
	text, err := json.Marshal(doc)
	if err != nil {
		s.log.Error("an answer cannot be written as JSON", "path", r.URL.Path, "error", err)
		status, text = http.StatusInternalServerError, []byte(`{"error":{"code":"error","message":"the answer cannot be written as JSON"}}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n')) // an error means that the client has gone
}

// fail answers with an error.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	e := ErrorOf(err)
	s.write(w, r, StatusOf(e.Code), wire.ErrorDoc{Error: e})
}

// refuse answers with an error before the body of a request has been read.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	unread(w, r)
	s.fail(w, r, err)
}

// own returns an error of the server itself.
func own(code records.Code, remedy, format string, args ...any) error {
	return &records.Error{Op: "request", Code: code, Remedy: remedy, Err: fmt.Errorf(format, args...)}
}

// statuses are the HTTP statuses of error codes. Codes that are missing are the host's fault, and get 500.
var statuses = byCode(map[int][]records.Code{
	http.StatusBadRequest: {
		"invalid", "import", "metadata", "policy", "not-a-kernel", "no-room", "image-ambiguous", "guest-invalid",
	},
	http.StatusUnauthorized: {wire.CodeUnauthorized},
	http.StatusForbidden:    {wire.CodeForbidden},
	http.StatusNotFound: {
		"not-found", "snapshot-not-found", "volume-not-found", "image-not-found", "kernel-not-found", wire.CodeNoRoute, codeGuestMissing,
	},
	http.StatusMethodNotAllowed: {wire.CodeMethod},
	// The state does not allow it.
	http.StatusConflict: {
		"exists", "running", "not-running", "expired", "crashed", "ended", "stopped", "hooks", "host-hooks", "promote", "drop", "persist-limit", "secrets",
		"snapshot-exists", "snapshot-in-use", "image-in-use", "snapshot-foreign", "foreign-snapshot", "foreign", "version", "disk-only", "disk-in-use", "disk-version",
		"kernel-feature", "volume-in-use", "volume-stale", "volume-dirty", "volume-read-only", "share-unusable", "elsewhere", "unclaimed", "no-key", "arriving", "target", "not-frozen", "network-busy", "guest-too-old",
		codeGuestExists, codeGuestDenied, codeGuestRefused,
	},
	http.StatusPreconditionFailed:           {wire.CodePrecondition},
	http.StatusRequestedRangeNotSatisfiable: {wire.CodeRange},
	http.StatusUpgradeRequired:              {wire.CodeUpgrade},
	http.StatusUnprocessableEntity:          {wire.CodeKeyUsed},
	http.StatusRequestEntityTooLarge:        {wire.CodeTooLarge},
	http.StatusUnsupportedMediaType:         {wire.CodeMediaType},
	http.StatusTooManyRequests:              {wire.CodeTooMany, "owner-limit"},
	// Errors of the guest.
	http.StatusBadGateway: {"guest-lost", "guest-protocol", "guest-limit", "guest-unsafe", "guest-failed"},
	// The host or the guest has no room or no means at present.
	http.StatusServiceUnavailable: {
		"host-memory", "addresses-full", "address-range", "network-full", "network-nat", "network-pins", "policy-kernel", "no-kvm", "no-permission", "guest-full", "guest-unavailable",
		"unreachable", records.CodeCanceled, wire.CodeBusy, wire.CodeIssuer,
	},
	http.StatusGatewayTimeout:      {records.CodeTimeout},
	http.StatusInsufficientStorage: {"no-space", "disk-no-space"},
})

func byCode(byStatus map[int][]records.Code) map[records.Code]int {
	out := map[records.Code]int{}
	for status, codes := range byStatus {
		for _, c := range codes {
			out[c] = status
		}
	}
	return out
}

// StatusOf returns the HTTP status for an error code.
func StatusOf(code records.Code) int {
	if s := statuses[code]; s != 0 {
		return s
	}
	return http.StatusInternalServerError
}

// ErrorOf returns the description of an error.
func ErrorOf(err error) wire.Error {
	out := wire.Error{Code: fleet.CodeOf(err), Message: requests.In(err.Error()), Field: spec.FieldOf(err)}
	var fe *records.Error
	if errors.As(err, &fe) {
		out.Remedy, out.Op, out.Sandbox = requests.In(fe.Remedy), fe.Op, fe.Sandbox
	}
	var he *spec.HooksError
	var hhe *spec.HostHooksError
	var re *control.ErrorReport
	switch {
	case errors.As(err, &he):
		out.Hooks = he.Failures
	case errors.As(err, &hhe):
		out.HostHooks = hhe.Failures
	case errors.As(err, &re):
		out.Hooks, out.HostHooks = re.Hooks, re.HostHooks
	}
	return out
}
