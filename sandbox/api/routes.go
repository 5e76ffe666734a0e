package api

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// openAPI is the description of the API. A test generates it from the routes and the types of their bodies: `go
// test ./sandbox/api -update`.
//
//go:embed openapi.json
var openAPI []byte

// OpenAPI returns the description of the API, version 3.1 of the OpenAPI specification.
func OpenAPI() []byte { return slices.Clone(openAPI) }

// route is a path with a method.
type route struct {
	method, path string
	scope        Scope
	// op names the operation in errors and the log; says is its line in the description.
	op, says string
	query    []param
	// takes and gives are the types of the bodies of request and answer, for the description and for reading; nil
	// means no body. kind is the answer's media type if it is not JSON.
	takes, gives any
	kind         string
	// takesKind is the media type of an upload; lines is the type of the lines of an answer that goes on.
	takesKind string
	lines     any
	// partial adds 206 and 304 as statuses of success.
	partial bool
	headers []param
	etag    bool // the answer has an ETag
	// socket serves a WebSocket.
	socket func(*request, *socket) (last *wire.Control, err error)
	// raw writes the answer by itself.
	raw func(*Server, http.ResponseWriter, *http.Request)
	// idempotent means that Idempotency-Key counts.
	idempotent         bool
	noLimit            bool // it may take as long as its client likes
	needsBody, rawBody bool
	// created adds 201 as a status of success, and unready adds 503 with the same answer.
	created, unready, accepted bool
	allOwners                  bool          // it concerns sandboxes of all owners
	checksOwner                bool          // serve itself checks whose sandbox {name} is
	limit                      time.Duration // of a request, if it differs from its scope's
	room                       roomKind      // if it differs from its scope's
	serve                      func(*Server, *request) (status int, answer any, err error)
}

// ifMatch is the header of what can be edited by several.
var ifMatch = []param{{name: "If-Match", says: "only if it still has this ETag; else 412"}}

// roomKind says with which other routes a route shares its bound of simultaneous requests.
type roomKind int

const (
	_             roomKind = iota // with others of its scope
	roomExecs                     // with other commands
	roomStreams                   // with other answers that go on
	roomTransfers                 // with other files and trees
	roomSockets                   // with other WebSockets
	roomNone                      // no bound
)

// param is a parameter of a query.
type param struct {
	name, says string
	integer    bool
	many       bool
	required   bool
	enum       []string
}

// body returns a new value for the body, or nil.
func (rt route) body() any {
	if rt.takes == nil {
		return &wire.Empty{}
	}
	return reflect.New(reflect.TypeOf(rt.takes)).Interface()
}

// request is a request to a route.
type request struct {
	*http.Request
	body   any
	op     string
	w      http.ResponseWriter
	server *Server
}

func (r *request) name() string   { return r.PathValue("name") }
func (r *request) caller() Caller { return CallerOf(r.Context()) }

// ok returns the answer of most routes.
func ok[T any](v T, err error) (int, any, error) { return http.StatusOK, v, err }

// onFleet serves an operation of a Fleet, and onSandbox one of a single sandbox of the host.
func onFleet[T any](do func(ctx context.Context, f *fleet.Fleet, r *request) (T, error)) func(*Server, *request) (int, any, error) {
	return func(s *Server, r *request) (int, any, error) {
		return ok(do(r.Context(), s.fleet, r))
	}
}

func onSandbox[T any](do func(ctx context.Context, b *sandbox.Sandbox, r *request) (T, error)) func(*Server, *request) (int, any, error) {
	return func(s *Server, r *request) (int, any, error) {
		return ok(do(r.Context(), s.o.Host.Sandbox(r.name()), r))
	}
}

const onOne = "/v1/sandboxes/{name}"

// routes returns all routes of this package.
func routes() []route {
	get, post := http.MethodGet, http.MethodPost
	return slices.Concat([]route{
		{
			method: get, path: "/v1/sandboxes", scope: ScopeRead, op: "list", says: "List sandboxes, a page at a time.", gives: wire.List{},
			query: []param{
				{name: "owner", says: "only those of this owner"}, {name: "tag", says: "only those with this tag; may be given several times", many: true},
				{name: "class", says: "only those of this class"}, {name: "status", says: "only those with this status; may be given several times", many: true},
				{name: "limit", says: "at most so many", integer: true}, {name: "after", says: "only those with names after this one: next of the page before"},
			},
			serve: onFleet(list),
		},
		{method: post, path: "/v1/sandboxes", scope: ScopeCreate, op: "create", says: "Make a sandbox and boot it.", takes: wire.Create{}, gives: records.Sandbox{}, needsBody: true, created: true, idempotent: true, serve: create},
		{method: get, path: onOne, scope: ScopeRead, op: "get", says: "Say what is known of a sandbox.", gives: records.Sandbox{}, etag: true, serve: onFleet(func(ctx context.Context, f *fleet.Fleet, r *request) (records.Sandbox, error) {
			row, err := f.Get(ctx, r.name())
			if err == nil {
				r.w.Header().Set("ETag", r.server.editTag(row))
			}
			return row, err
		})},
		{method: http.MethodPatch, path: onOne, scope: ScopeCreate, op: "update", says: "Change a sandbox: what is not there is left as it is.", etag: true, headers: ifMatch, takes: wire.Changes{}, gives: records.Sandbox{}, needsBody: true, serve: func(s *Server, r *request) (int, any, error) {
			c, err := r.body.(*wire.Changes).Fleet()
			if err == nil {
				err = errors.Join(mayPromote(r, c.Persist), s.ownChanges(r.Context(), r.caller(), &c))
			}
			if err != nil {
				return 0, nil, err
			}
			var row records.Sandbox
			err = s.edit(r, func() (string, error) {
				row, err := s.fleet.Get(r.Context(), r.name())
				return s.editTag(row), err
			}, func() (err error) {
				row, err = s.fleet.Update(r.Context(), r.name(), c)
				return err
			})
			if err == nil && c.Owner != nil {
				s.names.end(r.name(), row.Owner)
			}
			if err == nil {
				r.w.Header().Set("ETag", s.editTag(row))
			}
			return ok(row, err)
		}},
		{method: http.MethodDelete, path: onOne, scope: ScopeCreate, op: "delete", says: "Remove a sandbox, also one that runs. One that is not there is left alone.", gives: spec.Freed{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, _ *request) (freed spec.Freed, err error) {
			if err = b.Delete(ctx, sandbox.DeleteOptions{Force: true, Freed: &freed}); errors.Is(err, sandbox.ErrNotFound) {
				err = nil
			}
			return freed, err
		})},
	}, lifecycle(), reading(), streamRoutes(), fileRoutes(), resourceRoutes(), hostRoutes(), templateRoutes(), operationRoutes(), []route{
		{method: get, path: "/v1/snapshots", scope: ScopeRead, op: "list snapshots", says: "List all snapshots.", gives: wire.Snapshots{}, serve: func(s *Server, r *request) (int, any, error) {
			return ok(s.snapshots(r.Context(), r.caller(), func(spec.SnapshotInfo) bool { return true }))
		}},
		{method: post, path: "/v1/snapshots/{id}/tags", scope: ScopeCreate, op: "tag snapshot", says: "Give a snapshot tags, in place of those that it has. While it has any, nothing prunes it.", takes: wire.Tags{}, gives: spec.SnapshotInfo{}, needsBody: true, serve: func(s *Server, r *request) (int, any, error) {
			id, err := s.reachesSnapshot(r.Context(), r.caller(), r.PathValue("id"))
			tags := r.body.(*wire.Tags).Tags
			if err == nil {
				err = s.ownTags(r.caller(), id, tags)
			}
			if err != nil {
				return 0, nil, err
			}
			return ok(s.o.Host.State.TagSnapshot(id, tags))
		}},
		{method: http.MethodDelete, path: "/v1/snapshots/{id}", scope: ScopeCreate, op: "remove snapshot", says: "Remove a snapshot that nothing needs.", gives: wire.Empty{}, serve: func(s *Server, r *request) (int, any, error) {
			id, err := s.reachesSnapshot(r.Context(), r.caller(), r.PathValue("id"))
			if err == nil {
				err = s.o.Host.State.RemoveSnapshot(r.Context(), id)
			}
			return ok(wire.Empty{}, err)
		}},
		{method: get, path: "/v1/images", scope: ScopeRead, op: "list images", says: "List images.", gives: imageList{}, serve: images},
		{method: get, path: "/v1/version", scope: ScopeRead, op: "version", says: "Say what serves, and what the caller may do.", gives: wire.Is{}, serve: func(s *Server, r *request) (int, any, error) {
			c := CallerOf(r.Context())
			return ok(wire.Is{Version: s.o.Version, API: wire.Version, Scope: mayWrite(c.Scopes), Scopes: c.Scopes.Words(), Owner: c.Owner}, nil)
		}},
		{method: post, path: "/v1/prune", scope: ScopeAdmin, op: "prune", says: "Do what metadata say is to be done by now, or say what that would be.", takes: wire.Prune{}, gives: records.Pruned{}, serve: onFleet(func(ctx context.Context, f *fleet.Fleet, r *request) (records.Pruned, error) {
			return f.Prune(ctx, r.body.(*wire.Prune).DryRun)
		})},
		{
			method: get, path: "/v1/events", scope: ScopeRead, op: "events", says: "Give events of sandboxes, the oldest first, a line each: docs/guides/events.md.", lines: events.Event{}, room: roomStreams, raw: followEvents,
			query: []param{
				{name: "since", says: "only those after this cursor, or now"}, {name: "follow", says: "1 goes on"}, {name: "type", says: "only those of this type, such as sandbox.woken or policy.*; may be given several times", many: true},
				{name: "sandbox", says: "only those of this sandbox, by name or id"}, {name: "owner", says: "only those of sandboxes of this owner"}, {name: "tag", says: "only those of sandboxes with this tag; may be given several times", many: true},
			},
		},
		{method: get, path: "/v1/openapi.json", op: "describe", says: "This description.", gives: map[string]any{}, serve: func(*Server, *request) (int, any, error) {
			return http.StatusOK, rawText{"application/json", openAPI}, nil
		}},
		{method: get, path: "/healthz", op: "health", says: "Say whether the server works.", gives: wire.Health{}, unready: true, room: roomNone, serve: func(s *Server, r *request) (int, any, error) {
			return s.health(r, s.o.Live)
		}},
		{method: get, path: "/readyz", op: "health", says: "Say whether sandboxes can be woken on this host.", gives: wire.Health{}, unready: true, room: roomNone, serve: func(s *Server, r *request) (int, any, error) {
			return s.health(r, s.o.Ready)
		}},
	})
}

// lifecycle returns the routes that change the state of a sandbox.
func lifecycle() []route {
	// act returns a route that does something with a sandbox and answers with its new record.
	act := func(verb, says string, takes any, do func(ctx context.Context, b *sandbox.Sandbox, r *request) error) route {
		return route{
			method: http.MethodPost, path: onOne + "/" + verb, scope: ScopeCreate, op: verb, says: says, takes: takes, gives: records.Sandbox{}, needsBody: takes != any(wire.Empty{}),
			serve: func(s *Server, r *request) (int, any, error) {
				if err := do(r.Context(), s.o.Host.Sandbox(r.name()), r); err != nil {
					return 0, nil, err
				}
				return ok(s.fleet.Get(r.Context(), r.name()))
			},
		}
	}
	return []route{
		act("start", "Bring a sandbox up, whatever it does: wake it or boot it. One that runs is left alone.", wire.Empty{}, func(ctx context.Context, b *sandbox.Sandbox, _ *request) error {
			_, err := b.Start(ctx, sandbox.StartOptions{Awake: true})
			return err
		}),
		act("wake", "Bring a sandbox back from its sleep. One that runs is left alone.", wire.Empty{}, func(ctx context.Context, b *sandbox.Sandbox, _ *request) error {
			_, err := b.Wake(ctx)
			return err
		}),
		{
			method: http.MethodPost, path: onOne + "/sleep", scope: ScopeCreate, op: "sleep", says: "Put a sandbox to sleep. Of one that sleeps it says what its last sleep has done.",
			takes: wire.Sleep{}, gives: spec.SleepResult{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (spec.SleepResult, error) {
				o := r.body.(*wire.Sleep)
				return b.Sleep(ctx, sandbox.SleepOptions{Hooks: o.Hooks, Durable: o.Durable})
			}),
		},
		{
			method: http.MethodPost, path: onOne + "/migrate", scope: ScopeAdmin, op: "migrate", says: "Move a sandbox to another host of the server's cluster, awake if it is. One that sleeps is only published.",
			takes: wire.Migrate{}, gives: spec.MigrateResult{}, needsBody: true, limit: migrateTime,
			serve: func(s *Server, r *request) (int, any, error) {
				o, c := r.body.(*wire.Migrate), s.o.Host.Cluster
				switch {
				case o.To == "":
					return 0, nil, spec.InField("to", fmt.Errorf("%w: to names no host", spec.ErrInvalid))
				case c == nil:
					return 0, nil, fmt.Errorf("%w: this host is in no cluster: run `drowse serve --cluster` here", spec.ErrInvalid)
				}
				return ok(c.Migrate(r.Context(), r.name(), spec.MigrateOptions{To: o.To, Hooks: o.Hooks}))
			},
		},
		{
			method: http.MethodPost, path: onOne + "/stop", scope: ScopeCreate, op: "stop", says: "Shut a sandbox down. One that does not run is left alone.",
			takes: wire.Stop{}, gives: records.Sandbox{}, serve: stop,
		},
		{
			method: http.MethodPost, path: onOne + "/snapshot", scope: ScopeCreate, op: "snapshot", says: "Write a running sandbox to a snapshot that stays until it is removed.", idempotent: true,
			takes: wire.Snapshot{}, gives: spec.SleepResult{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (spec.SleepResult, error) {
				o := r.body.(*wire.Snapshot)
				return b.Snapshot(ctx, sandbox.SnapshotOptions{Note: o.Note, Hooks: o.Hooks, DiskOnly: o.DiskOnly})
			}),
		},
		{
			method: http.MethodPost, path: onOne + "/promote", scope: ScopeCreate, op: "promote", says: "Copy what is to be promoted of a running sandbox to the host now.",
			takes: wire.Empty{}, gives: wire.Promoted{}, limit: control.PromoteTime + writeTime,
			serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, _ *request) (wire.Promoted, error) {
				copies, err := b.Promote(ctx)
				if copies == nil {
					copies = []spec.Promoted{}
				}
				return wire.Promoted{Promoted: copies}, err
			}),
		},
		act("restore", "Take a sandbox that does not run back to one of its snapshots, in which it sleeps then.", wire.Restore{}, func(ctx context.Context, b *sandbox.Sandbox, r *request) error {
			id, err := r.server.reachesSnapshot(ctx, r.caller(), r.body.(*wire.Restore).Snapshot)
			if err != nil {
				return spec.InField("snapshot", err)
			}
			return b.Rewind(ctx, id)
		}),
		{
			method: http.MethodPost, path: onOne + "/fork", scope: ScopeCreate, op: "fork", says: "Make children of a sandbox. Those of the same names that are there already are returned as they are.", idempotent: true,
			takes: wire.Fork{}, gives: wire.Forked{}, needsBody: true, serve: onFleet(func(ctx context.Context, f *fleet.Fleet, r *request) (wire.Forked, error) {
				var children []records.Child
				for _, c := range r.body.(*wire.Fork).Children {
					children = append(children, records.Child{Name: c.Name, Tags: c.Tags})
				}
				names := make([]string, len(children))
				for i, c := range children {
					names[i] = c.Name
				}
				done, err := r.server.makes(ctx, r.server.o.Host.State.Owner(r.name()), names...)
				if err != nil {
					return wire.Forked{}, err
				}
				defer done()
				made, err := f.Fork(ctx, r.name(), children)
				if spec.FieldOf(err) != "children" {
					err = spec.InObject("children", err)
				}
				for _, one := range made {
					if mine := r.caller().Owner; mine != "" && one.Owner != mine { // it was given to another
						return wire.Forked{}, fmt.Errorf("%w: %.64q", sandbox.ErrExists, one.Name)
					}
				}
				return wire.Forked{Sandboxes: made}, err
			}),
		},
		{
			method: http.MethodPost, path: onOne + "/rename", scope: ScopeCreate, op: "rename", says: "Give a sandbox that does not run another name.",
			takes: wire.Rename{}, gives: records.Sandbox{}, needsBody: true, serve: func(s *Server, r *request) (int, any, error) {
				to := r.body.(*wire.Rename).To
				done, err := s.makes(r.Context(), s.o.Host.State.Owner(r.name()), to)
				if err != nil {
					return 0, nil, err
				}
				defer done()
				if err := s.o.Host.State.Rename(r.Context(), r.name(), to); err != nil {
					return 0, nil, err
				}
				return ok(s.fleet.Get(r.Context(), to))
			},
		},
		{
			method: http.MethodPost, path: onOne + "/extend", scope: ScopeCreate, op: "extend", says: "Let a sandbox last until a time at least.",
			takes: wire.Extend{}, gives: records.Sandbox{}, needsBody: true, serve: onFleet(func(ctx context.Context, f *fleet.Fleet, r *request) (records.Sandbox, error) {
				until := r.body.(*wire.Extend).Until
				if until.IsZero() {
					return records.Sandbox{}, spec.InField("until", fmt.Errorf("%w: there is no until: give a time as 2026-11-22T13:25:42Z", sandbox.ErrSpec))
				}
				return f.Extend(ctx, r.name(), until)
			}),
		},
		{
			method: http.MethodPost, path: onOne + "/exec", scope: ScopeExec, op: "exec", says: "Run a command in a sandbox, and wake it first if it sleeps. A command that fails is no error.",
			takes: wire.Exec{}, gives: wire.Executed{}, needsBody: true, limit: wire.MaxExecSeconds*time.Second + writeTime, room: roomExecs,
			serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (wire.Executed, error) {
				return execute(ctx, b, r.body.(*wire.Exec))
			}),
		},
	}
}

// reading returns the routes that report more of a sandbox. None of them wakes it.
func reading() []route {
	get := http.MethodGet
	return []route{
		{
			method: get, path: onOne + "/history", scope: ScopeRead, op: "history", says: "Say what was run in a sandbox and when it slept, the newest first. One that was removed can be named as well.", checksOwner: true, gives: wire.History{},
			query: []param{{name: "limit", says: "at most so many commands, and so many sleeps", integer: true}, {name: "before", says: "only what was before this time (RFC 3339)"}},
			serve: onFleet(func(ctx context.Context, f *fleet.Fleet, r *request) (wire.History, error) {
				var span records.Span
				limit, err := r.number("limit", records.DefaultPage, 1, records.MaxPage)
				if err != nil {
					return wire.History{}, err
				}
				span.Limit = int(limit)
				if text := r.URL.Query().Get("before"); text != "" {
					if span.Before, err = time.Parse(time.RFC3339Nano, text); err != nil {
						return wire.History{}, spec.InField("before", fmt.Errorf("%w: before %q: use a time as 2026-11-22T13:25:42Z", sandbox.ErrSpec, text))
					}
				}
				h, err := f.History(ctx, r.name(), span)
				if mine := r.caller().Owner; mine != "" && (err != nil || h.Sandbox.Owner != mine) {
					return wire.History{}, noSandbox(r.name())
				}
				if h.Runs == nil {
					h.Runs = []records.Run{}
				}
				if h.Sleeps == nil {
					h.Sleeps = []records.Sleep{}
				}
				return wire.History{Version: 1, History: h}, err
			}),
		},
		{method: get, path: onOne + "/snapshots", scope: ScopeRead, op: "list snapshots", says: "List the snapshots of a sandbox.", gives: wire.Snapshots{}, serve: func(s *Server, r *request) (int, any, error) {
			is, err := s.fleet.Get(r.Context(), r.name())
			if err != nil {
				return 0, nil, err
			}
			return ok(s.snapshots(r.Context(), r.caller(), func(i spec.SnapshotInfo) bool { return i.Owner == is.ID }))
		}},
		{method: get, path: onOne + "/stats", scope: ScopeRead, op: "stats", says: "Say what a running sandbox uses. One that sleeps is not woken.", gives: sandbox.Stats{}, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, _ *request) (sandbox.Stats, error) {
			return b.Stats(ctx)
		})},
		{method: get, path: onOne + "/policy", scope: ScopeRead, op: "policy", says: "Give the network policy of a sandbox.", gives: netpolicy.Policy{}, etag: true, serve: onSandbox(func(_ context.Context, b *sandbox.Sandbox, r *request) (*netpolicy.Policy, error) {
			p, err := b.Policy()
			if err == nil {
				r.w.Header().Set("ETag", tagOf(p))
			}
			return p, err
		})},
		{method: http.MethodPut, path: onOne + "/policy", scope: ScopeCreate, op: "set policy", says: "Replace the network policy of a sandbox. If it runs, the new one is in force when this is answered.", takes: netpolicy.Policy{}, gives: spec.PolicyResult{}, headers: ifMatch, needsBody: true, rawBody: true, serve: onSandbox(func(ctx context.Context, b *sandbox.Sandbox, r *request) (spec.PolicyResult, error) {
			p, err := netpolicy.Parse(r.body.([]byte))
			if err == nil {
				err = r.server.ownPolicy(r.caller(), p)
			}
			if err != nil {
				return spec.PolicyResult{}, err
			}
			var res spec.PolicyResult
			err = r.server.edit(r, func() (string, error) {
				p, err := b.Policy()
				return tagOf(p), err
			}, func() (err error) {
				res, err = b.SetPolicy(ctx, p)
				return err
			})
			return res, err
		})},
		{method: get, path: onOne + "/flows", scope: ScopeRead, op: "flows", says: "List flows of a running sandbox, open ones and the last that have ended or were denied.", gives: wire.Flows{}, serve: onSandbox(flows)},
		{method: get, path: onOne + "/flows/follow", scope: ScopeRead, op: "flows", says: "Give flows of a running sandbox as they open, end or are denied, a line each.", lines: netpolicy.FlowRecord{}, room: roomStreams, noLimit: true, serve: func(s *Server, r *request) (int, any, error) {
			return s.follow(r, func(ctx context.Context, give func(any) error) error {
				return s.o.Host.Sandbox(r.name()).NetworkFlows(ctx, true, func(f netpolicy.FlowRecord) error { return give(f) })
			})
		}},
		{
			method: get, path: onOne + "/console", scope: ScopeRead, op: "console", says: "Give the end of what a sandbox has written to its serial port, and with follow what comes, until it stops.", kind: "application/octet-stream", room: roomStreams, noLimit: true,
			query: []param{{name: "tail", says: "at most so many bytes", integer: true}, {name: "follow", says: "1 goes on"}},
			serve: func(s *Server, r *request) (int, any, error) {
				n, err := r.number("tail", wire.DefaultTail, 1, wire.MaxTail)
				if err != nil {
					return 0, nil, err
				}
				follow, err := r.flag("follow")
				if err != nil {
					return 0, nil, err
				}
				return console(s, r, n, follow)
			},
		},
	}
}

// followEvents answers with events.
func followEvents(s *Server, w http.ResponseWriter, r *http.Request) {
	c := CallerOf(r.Context())
	if c.Owner != "" {
		q := r.URL.Query()
		if q.Has("owner") && q.Get("owner") != c.Owner {
			s.fail(w, r, fleet.Fail("events", "", notOwnerList(c.Owner)))
			return
		}
		q.Set("owner", c.Owner)
		r.URL.RawQuery = q.Encode()
	}
	// A follower ends with the server, and with its token.
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer s.watch(c, cancel)()
	events.Handler(s.o.Host.State.Events(), func(w http.ResponseWriter, err error) {
		if errors.Is(err, events.ErrInvalid) {
			err = fmt.Errorf("%w: %w", sandbox.ErrSpec, err)
		}
		s.fail(w, r, fleet.Fail("events", "", err))
	}).ServeHTTP(w, r.WithContext(ctx))
}

// number returns an integer parameter of the query.
func (r *request) number(name string, without, least, most int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return without, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < least || n > most {
		return 0, spec.InField(name, fmt.Errorf("%w: %s %q: use %d to %d", sandbox.ErrSpec, name, text, least, most))
	}
	return n, nil
}

// filterOf reads a list's filter from a query.
func filterOf(r *request) (f records.Filter, err error) {
	q := r.URL.Query()
	for key := range q {
		if !slices.Contains([]string{"owner", "tag", "class", "status", "limit", "after"}, key) {
			return f, spec.InField(key, fmt.Errorf("%w: there is no parameter %q", sandbox.ErrSpec, key))
		}
	}
	limit, err := r.number("limit", records.DefaultPage, 1, records.MaxPage)
	owner := q.Get("owner")
	if mine := r.caller().Owner; mine != "" {
		if q.Has("owner") && owner != mine {
			return f, notOwnerList(mine)
		}
		owner = mine
	}
	f = records.Filter{Owner: owner, Class: lifetime.Class(q.Get("class")), Tags: q["tag"], After: q.Get("after"), Limit: int(limit)}
	for _, s := range q["status"] {
		f.Statuses = append(f.Statuses, records.Status(s))
	}
	return f, err
}

func notOwnerList(mine string) error {
	return own(wire.CodeForbidden, "leave the owner out", "the token is for sandboxes of %s", mine)
}

func list(ctx context.Context, f *fleet.Fleet, r *request) (wire.List, error) {
	filter, err := filterOf(r)
	if err != nil {
		return wire.List{}, err
	}
	var l records.List
	var others []string
	if r.Header.Get(wire.HeaderHere) != "" {
		l, err = f.List(ctx, filter)
	} else {
		l, others, err = f.ListAll(ctx, filter)
	}
	if l.Sandboxes == nil {
		l.Sandboxes = []records.Sandbox{}
	}
	if r.caller().Owner != "" {
		l.Problems = others // and none of sandboxes whose owner cannot be read
	}
	return wire.List{Version: 1, List: l}, err
}

func create(s *Server, r *request) (int, any, error) {
	b := r.body.(*wire.Create)
	if err := mayBoot(r, b.Spec.Kernel); err != nil {
		return 0, nil, spec.InObject("spec", err)
	}
	if len(b.Spec.Shares) > 0 && !CallerOf(r.Context()).Local {
		// The same holds for the files of a directory, to read and to write.
		return 0, nil, spec.InField("spec.shares", fmt.Errorf("%w: shared directories of the host: ask by the Unix socket", sandbox.ErrSpec))
	}
	if err := errors.Join(spec.InObject("metadata", mayPromote(r, &b.Metadata.Persist)), s.ownSpec(r.caller(), &b.Spec, &b.Metadata)); err != nil {
		return 0, nil, err
	}
	var (
		is   *sandbox.Sandbox
		made = true
		err  error
		o    = sandbox.CreateOptions{Metadata: &b.Metadata, Boot: b.Boot}
	)
	if b.Disk != "" {
		if o.Disk, err = s.reachesSnapshot(r.Context(), r.caller(), b.Disk); err != nil {
			return 0, nil, spec.InField("disk", err)
		}
	}
	if err := s.has(r, b.Spec.Name, b.GetOrCreate); err != nil {
		return 0, nil, err
	}
	done, err := s.makes(r.Context(), b.Metadata.Owner, b.Spec.Name)
	if err != nil {
		return 0, nil, err
	}
	defer done()
	if b.GetOrCreate {
		is, made, err = s.o.Host.GetOrCreate(r.Context(), b.Spec, o)
	} else {
		is, err = s.o.Host.Create(r.Context(), b.Spec, o)
	}
	switch {
	case errors.Is(err, image.ErrNotFound), errors.Is(err, image.ErrAmbiguous):
		return 0, nil, spec.InField("spec.image", err)
	case errors.Is(err, spec.ErrMetadata):
		return 0, nil, spec.InObject("metadata", err)
	case err != nil:
		return 0, nil, spec.InObject("spec", err)
	}
	row, err := s.fleet.Get(r.Context(), is.Name())
	if !made {
		if s.reaches(r.Context(), r.caller(), is.Name()) != nil {
			return 0, nil, fmt.Errorf("%w: %s", sandbox.ErrExists, is.Name())
		}
		return ok(row, err)
	}
	return http.StatusCreated, row, err
}

// mayBoot refuses kernels by their paths to callers without a right to the host's files.
func mayBoot(r *request, kernel string) error {
	if !strings.Contains(kernel, "/") || r.caller().Local {
		return nil
	}
	return spec.InField("kernel", fmt.Errorf("%w: a kernel by its path: name one of the cache, or ask by the Unix socket", sandbox.ErrSpec))
}

// mayPromote refuses directories of the host to callers without a right to its files.
func mayPromote(r *request, p *lifetime.Persist) error {
	if p == nil || len(p.Promote) == 0 || CallerOf(r.Context()).Local {
		return nil
	}
	return spec.InField("persist.promote", fmt.Errorf("%w: directories of the host to promote to: ask by the Unix socket", sandbox.ErrSpec))
}

func stop(s *Server, r *request) (int, any, error) {
	b := r.body.(*wire.Stop)
	if b.TimeoutSeconds < 0 || b.TimeoutSeconds > wire.MaxStopSeconds {
		return 0, nil, spec.InField("timeout_seconds", fmt.Errorf("%w: timeout_seconds %d: use 1 to %d", sandbox.ErrSpec, b.TimeoutSeconds, wire.MaxStopSeconds))
	}
	limit := time.Duration(b.TimeoutSeconds) * time.Second
	if limit == 0 {
		limit = wire.DefaultStopSeconds * time.Second
	}
	ctx, cancel := context.WithTimeout(r.Context(), limit)
	defer cancel()
	end := s.o.Host.Sandbox(r.name()).Stop
	if b.Kill {
		end = s.o.Host.Sandbox(r.name()).Kill
	}
	if err := end(ctx); err != nil {
		return 0, nil, err
	}
	return ok(s.fleet.Get(r.Context(), r.name()))
}

// imageList is wire.Images with the complete records of images.
type imageList struct {
	Version  int            `json:"version"`
	Images   []*image.Image `json:"images"`
	Problems []string       `json:"problems,omitempty"`
}

func images(s *Server, _ *request) (int, any, error) {
	store, err := image.OpenStore(s.o.Host.State.ImageDir())
	if err != nil {
		return 0, nil, err
	}
	all, err := store.List()
	if err != nil && len(all) == 0 {
		return 0, nil, err
	}
	out := imageList{Version: 1, Images: all}
	if all == nil {
		out.Images = []*image.Image{}
	}
	if err != nil {
		out.Problems = []string{err.Error()}
	}
	return ok(out, nil)
}

func flows(ctx context.Context, b *sandbox.Sandbox, _ *request) (wire.Flows, error) {
	out := wire.Flows{Flows: []netpolicy.FlowRecord{}}
	err := b.NetworkFlows(ctx, false, func(f netpolicy.FlowRecord) error {
		if len(out.Flows) == wire.MaxFlows {
			out.Flows, out.Truncated = slices.Delete(out.Flows, 0, 1), true
		}
		out.Flows = append(out.Flows, f)
		return nil
	})
	return out, err
}

// checkTime bounds one check, and how long a caller waits for all of them.
const checkTime = 10 * time.Second

// health runs the checks. Simultaneous callers share one run, so many callers cost no more than one.
func (s *Server) health(r *request, checks []Check) (int, any, error) {
	run := s.checking.DoChan(r.URL.Path, func() (any, error) {
		out := wire.Health{OK: true, Checks: []wire.Check{}}
		for _, c := range checks {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), checkTime)
			err := c.Do(ctx)
			cancel()
			is := wire.Check{Name: c.Name, OK: err == nil}
			if err != nil {
				out.OK, is.Problem = false, err.Error()
			}
			out.Checks = append(out.Checks, is)
		}
		return out, nil
	})
	limit := time.NewTimer(checkTime)
	defer limit.Stop()
	var out wire.Health
	select {
	case done := <-run:
		out = done.Val.(wire.Health)
	case <-limit.C:
		out.Checks = []wire.Check{{Name: "time", Problem: fmt.Sprintf("the checks have not ended within %v", checkTime)}}
	case <-r.Context().Done():
		return 0, nil, r.Context().Err()
	}
	if !CallerOf(r.Context()).Scopes.Has(ScopeRead) {
		out.Checks = slices.Clone(out.Checks) // other callers share them
		for i := range out.Checks {
			out.Checks[i].Problem = ""
		}
	}
	if !out.OK {
		return http.StatusServiceUnavailable, out, nil
	}
	return http.StatusOK, out, nil
}
