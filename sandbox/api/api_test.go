package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// machines are the VMs of a host in memory. All guests have a command "run".
type machines struct {
	sandboxtest.VMs
	host *sandbox.Host

	mu     sync.Mutex // guards what follows
	ran    []*fakeguest.Process
	exec   fakeguest.Command           // the work of "run", if not nil
	fails  func(op, name string) error // errors of starts and captures, if not nil
	starts map[string]int              // number of VMs by kind of start
	flows  []netpolicy.FlowRecord
}

func newMachines(t testing.TB) *machines {
	t.Helper()
	m := &machines{starts: map[string]int{}}
	m.Commands = map[string]fakeguest.Command{"run": m.run}
	m.Fail = func(op, name string) error {
		m.mu.Lock()
		m.starts[op]++
		fails := m.fails
		m.mu.Unlock()
		if fails == nil {
			return nil
		}
		return fails(op, name)
	}
	m.Flows = func(string) []netpolicy.FlowRecord {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.flows
	}
	m.host = m.Host(t)
	return m
}

// run writes hello and its input, and exits with 3.
func (m *machines) run(ctx context.Context, p *fakeguest.Process) int {
	m.mu.Lock()
	m.ran = append(m.ran, p)
	do := m.exec
	m.mu.Unlock()
	if do != nil {
		return do(ctx, p)
	}
	if _, err := io.WriteString(p.Stdout, "hello "); err != nil {
		return 1
	}
	if _, err := io.Copy(p.Stdout, p.Stdin); err != nil {
		return 1
	}
	return 3
}

// set calls change with mu locked.
func (m *machines) set(change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
}

// started returns how many VMs started in this way.
func (m *machines) started(op string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.starts[op]
}

// served is a server and a client on its Unix socket.
type served struct {
	vms    *machines
	server *api.Server
	client *client.Client
	path   string
	end    func() // of the server
}

// serve starts a server over VMs in memory that listens on a Unix socket. The client checks each answer against
// the API's description.
func serve(t *testing.T, change ...func(*api.Options)) *served {
	t.Helper()
	dir := t.TempDir()
	s := &served{vms: newMachines(t), path: filepath.Join(dir, api.SocketFile)}
	o := api.Options{Host: s.vms.host, Version: "test", Tokens: tokens.Open(filepath.Join(dir, tokens.File))}
	for _, c := range change {
		c(&o)
	}
	s.server = api.New(o)
	l, err := api.ListenUnix(s.path)
	if err != nil {
		t.Fatal(err)
	}
	s.run(t, l)
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", s.path)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	s.client = client.New("http://drowse", "", &http.Client{Transport: describedTransport{t, transport}})
	return s
}

// run serves a listener until the test ends.
func (s *served) run(t *testing.T, l net.Listener) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.server.Serve(ctx, l) }()
	s.end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(s.end)
}

// describedTransport checks that answers match the description.
type describedTransport struct {
	t    *testing.T
	next http.RoundTripper
}

func (d describedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := d.next.RoundTrip(r)
	if err != nil {
		return resp, err
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	resp.Body = io.NopCloser(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	if r.URL.Path == "/stream" || r.URL.Path == "/metrics" {
		return resp, nil // of a Mount
	}
	if err := described(r.Method, r.URL.Path, resp.StatusCode, resp.Header.Get("Content-Type"), text); err != nil {
		d.t.Errorf("%s %s answered %d, which is not as the description says: %v\n%.300s", r.Method, r.URL.Path, resp.StatusCode, err, text)
	}
	return resp, nil
}

// description is the part of an OpenAPI document that the tests use.
type description struct {
	OpenAPI    string                          `json:"openapi"`
	Paths      map[string]map[string]operation `json:"paths"`
	Components struct {
		Schemas   map[string]*jsonschema.Schema `json:"schemas"`
		Responses map[string]json.RawMessage    `json:"responses"`
	} `json:"components"`
}

// operation is a method of a path.
type operation struct {
	Parameters []struct {
		Name, In string
		Required bool
		Schema   *jsonschema.Schema
		Example  any
	}
	RequestBody struct {
		Required bool
		Content  map[string]mediaType
	}
	Responses map[string]struct {
		Ref     string `json:"$ref"`
		Content map[string]mediaType
	}
}

type mediaType struct {
	Schema  *jsonschema.Schema
	Example json.RawMessage
}

var theDescription = sync.OnceValues(func() (d description, err error) {
	err = json.Unmarshal(api.OpenAPI(), &d)
	return d, err
})

// described returns an error if an answer does not match the description.
func described(method, path string, status int, kind string, body []byte) error {
	d, err := theDescription()
	if err != nil {
		return err
	}
	for pattern, methods := range d.Paths {
		if !pathIs(pattern, path) {
			continue
		}
		op, ok := methods[strings.ToLower(method)]
		if !ok {
			continue
		}
		name := "Error"
		for code, r := range op.Responses {
			if code != strconv.Itoa(status) {
				continue
			}
			c, ok := r.Content[kind]
			if !ok {
				return errors.New("it has no answer of type " + kind)
			}
			if kind != "application/json" {
				return nil
			}
			name = strings.TrimPrefix(c.Schema.Ref, "#/components/schemas/")
		}
		schema := d.Components.Schemas[name]
		if schema == nil {
			return errors.New("it has no schema " + name)
		}
		resolved, err := schema.CloneSchemas().Resolve(nil)
		if err != nil {
			return err
		}
		var v any
		if err := json.Unmarshal(body, &v); err != nil {
			return err
		}
		return resolved.Validate(v)
	}
	return errors.New("there is no such path")
}

func pathIs(pattern, path string) bool {
	p, q := strings.Split(pattern, "/"), strings.Split(path, "/")
	for i := range min(len(p), len(q)) {
		if p[i] != q[i] && !strings.HasPrefix(p[i], "{") {
			return false
		}
	}
	return len(p) == len(q)
}

func TestConformance_holds_over_HTTP(t *testing.T) {
	s := serve(t)
	fleettest.Conformance(t, fleettest.Subject{
		Fleet: s.client,
		Spec:  sandbox.Spec{Image: sandboxtest.Image},
		Make: func(t *testing.T, spec sandbox.Spec, l spec.Metadata) {
			if _, err := s.client.Create(t.Context(), records.Request{Spec: spec, Metadata: l}); err != nil {
				t.Fatal(err)
			}
		},
		Write: func(t *testing.T, name, word string) {
			if err := s.vms.Guest(name).WriteFile("/run/word", []byte(word)); err != nil {
				t.Fatal(err)
			}
		},
		Read: func(t *testing.T, name string) string {
			word, err := s.vms.Guest(name).ReadFile("/run/word")
			if err != nil {
				t.Fatal(err)
			}
			return string(word)
		},
		Kill: func(t *testing.T, name string) {
			s.vms.Kill(name)
		},
	})
}

// made creates a sandbox.
func (s *served) made(t *testing.T, name string) {
	t.Helper()
	if _, err := s.client.Create(t.Context(), records.Request{Spec: sandbox.Spec{Name: name, Image: sandboxtest.Image, Network: spec.NetworkTAP}}); err != nil {
		t.Fatal(err)
	}
}

func TestPromote_and_sleep_say_what_was_copied(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	artifacts := t.TempDir()
	if err := s.vms.Guest("a").WriteFile("/work/out/x", []byte("x")); err != nil {
		t.Fatal(err)
	}
	persist := lifetime.Persist{Promote: []lifetime.Promotion{{Path: "/work/out", To: artifacts}}}
	got, err := s.client.Update(t.Context(), "a", records.Changes{Persist: &persist})
	if err != nil || len(got.Persist.Promote) != 1 {
		t.Fatalf("got %+v, %v", got, err)
	}
	copies, err := s.client.Promote(t.Context(), "a")
	if err != nil || len(copies) != 1 || copies[0].Path != "/work/out" || !strings.HasPrefix(copies[0].At, artifacts+"/a/") {
		t.Errorf("promoted %+v, %v", copies, err)
	}
	res, err := s.client.Sleep(t.Context(), "a", sandbox.SleepOptions{})
	if err != nil || res.Persist == nil || len(res.Persist.Promoted) != 1 {
		t.Errorf("the sleep says %+v, %v", res.Persist, err)
	}
	if _, err := s.client.Promote(t.Context(), "a"); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("while it sleeps: got %v, want ErrNotRunning", err)
	}
}

func TestExec_wakes_what_sleeps_and_gives_back_output_and_status(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	if _, err := s.client.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := s.client.Exec(t.Context(), "a", wire.Exec{Command: []string{"run", "-"}, User: "dev", Cwd: "/srv", Env: []string{"A=b"}, Stdin: []byte("\x00\xff"), TimeoutSeconds: 7})
	if err != nil || string(got.Stdout) != "hello \x00\xff" || got.ExitCode != 3 || len(got.Stderr) != 0 {
		t.Fatalf("got %+v, %v", got, err)
	}
	c := s.vms.ran[0]
	if !slices.Equal(c.Args, []string{"run", "-"}) || c.User != "dev" || c.Dir != "/srv" || !slices.Contains(c.Env, "A=b") {
		t.Errorf("it ran %+v", c)
	}
	if is, err := s.client.Get(t.Context(), "a"); err != nil || is.Status != records.Running {
		t.Errorf("it is %s, %v", is.Status, err)
	}
}

func TestExec_is_ended_when_its_time_is_up(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	got, err := s.client.Exec(t.Context(), "a", wire.Exec{Command: []string{"sleep", "3600"}, TimeoutSeconds: 1})
	if err != nil || !got.TimedOut {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestExec_output_beyond_the_bound_is_cut_and_said(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	s.vms.set(func() {
		s.vms.exec = func(_ context.Context, p *fakeguest.Process) int {
			for range wire.MaxOutput/1000 + 2 {
				if _, err := p.Stdout.Write(make([]byte, 1000)); err != nil {
					return 1
				}
			}
			return 0
		}
	})
	got, err := s.client.Exec(t.Context(), "a", wire.Exec{Command: []string{"run"}})
	if err != nil || len(got.Stdout) != wire.MaxOutput || !got.Truncated {
		t.Errorf("%d bytes, truncated: %v, %v", len(got.Stdout), got.Truncated, err)
	}
}

func TestGets_never_wake(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	if _, err := s.client.Sleep(t.Context(), "a", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	before := s.vms.started("restore")
	ctx, c := t.Context(), s.client
	for what, err := range map[string]error{
		"get": second(c.Get(ctx, "a")), "list": second(c.List(ctx, records.Filter{})), "history": second(c.History(ctx, "a", records.Span{})),
		"policy": second(c.Policy(ctx, "a")), "console": second(c.Console(ctx, "a", 10)),
		"snapshots": second(c.Snapshots(ctx, "a")), "all snapshots": second(c.Snapshots(ctx, "")), "images": second(c.Images(ctx)),
		"version": second(c.Version(ctx)), "ready": second(c.Ready(ctx)),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, err := range map[string]error{"stats": second(c.Stats(ctx, "a")), "flows": second(c.Flows(ctx, "a"))} {
		if !errors.Is(err, sandbox.ErrNotRunning) {
			t.Errorf("%s: %v, want ErrNotRunning", what, err)
		}
	}
	if after := s.vms.started("restore"); after != before {
		t.Errorf("%d wakes", after-before)
	}
}

func second[T any](_ T, err error) error { return err }

func TestErrors_keep_code_remedy_and_identity_over_the_wire(t *testing.T) {
	var late atomic.Bool
	s := serve(t, func(o *api.Options) {
		o.Context = func(ctx context.Context, _ http.Header) context.Context {
			if late.Load() {
				over, cancel := context.WithDeadline(ctx, time.Now())
				t.Cleanup(cancel)
				return over
			}
			return ctx
		}
	})
	ctx, c := t.Context(), s.client
	for _, name := range []string{"a", "full", "refused"} {
		s.made(t, name)
	}
	full, err := c.Sleep(ctx, "full", sandbox.SleepOptions{})
	if err != nil {
		t.Fatal(err)
	}
	expired := time.Now().Add(-time.Hour)
	s.vms.set(func() {
		s.vms.fails = func(op, name string) error {
			switch name {
			case "full":
				return spec.ErrHooks
			case "refused":
				return &spec.HostHooksError{Failures: []report.HookFailure{{Name: "10-a", Event: "sleep", Problem: "exit status 3", Output: "not now"}}}
			}
			return nil
		}
	})
	late.Store(true)
	_, lateErr := c.Wake(ctx, "full")
	late.Store(false)
	for name, tc := range map[string]struct {
		err  error
		want error
		code records.Code
	}{
		"not there":         {second(c.Get(ctx, "none")), sandbox.ErrNotFound, "not-found"},
		"there already":     {second(c.Create(ctx, records.Request{Spec: sandbox.Spec{Name: "a", Image: sandboxtest.Image}})), sandbox.ErrExists, "exists"},
		"runs":              {second(c.Rename(ctx, "a", "b")), sandbox.ErrRunning, "running"},
		"a bad name":        {second(c.Create(ctx, records.Request{Spec: sandbox.Spec{Name: "-", Image: sandboxtest.Image}})), sandbox.ErrSpec, "invalid"},
		"expires before":    {second(c.Create(ctx, records.Request{Spec: sandbox.Spec{Name: "b", Image: sandboxtest.Image}, Metadata: spec.Metadata{Expires: expired}})), spec.ErrMetadata, "metadata"},
		"a bad filter":      {second(c.List(ctx, records.Filter{Class: "other"})), sandbox.ErrSpec, "invalid"},
		"hooks":             {second(c.Wake(ctx, "full")), spec.ErrHooks, "hooks"},
		"hooks on the host": {second(c.Sleep(ctx, "refused", sandbox.SleepOptions{})), spec.ErrHostHooks, "host-hooks"},
		"time":              {lateErr, context.DeadlineExceeded, "timeout"},
		"snapshot in use":   {c.RemoveSnapshot(ctx, full.Snapshot), spec.ErrSnapshotInUse, "snapshot-in-use"},
		"no such snapshot":  {second(c.TagSnapshot(ctx, "0123", []string{"x"})), nil, "snapshot-not-found"},
		"no command":        {second(c.Exec(ctx, "a", wire.Exec{})), sandbox.ErrSpec, "invalid"},
		"an unlikely time":  {second(c.Exec(ctx, "a", wire.Exec{Command: []string{"x"}, TimeoutSeconds: -1})), sandbox.ErrSpec, "invalid"},
		"extended to never": {second(c.Extend(ctx, "a", time.Time{})), sandbox.ErrSpec, "invalid"},
	} {
		var e *records.Error
		if !errors.As(tc.err, &e) || e.Code != tc.code || e.Error() == "" || e.Op == "" {
			t.Errorf("%s: got %#v, want code %s", name, tc.err, tc.code)
			continue
		}
		if tc.want != nil && tc.code != "invalid" && !errors.Is(tc.err, tc.want) {
			t.Errorf("%s: %v is not %v", name, tc.err, tc.want)
		}
		if e.Remedy == "" {
			t.Errorf("%s: no remedy", name)
		}
		var hooks *spec.HostHooksError
		if tc.code == "host-hooks" && (!errors.As(tc.err, &hooks) || len(hooks.Failures) != 1 || hooks.Failures[0].Output != "not now") {
			t.Errorf("%s: without what they have said: %#v", name, tc.err)
		}
	}
}

func TestRequests_that_are_not_as_described_are_refused(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	long := `{"to":"` + strings.Repeat("x", wire.MaxBody) + `"}`
	for name, tc := range map[string]struct {
		method, path, kind, body string
		header                   [2]string
		status                   int
		code                     records.Code
	}{
		"an unknown field":          {method: "POST", path: "/v1/sandboxes/a/sleep", body: `{"hook":"skip"}`, status: 400, code: "invalid"},
		"an unknown field deep":     {method: "POST", path: "/v1/sandboxes", body: `{"spec":{"title":"x"}}`, status: 400, code: "invalid"},
		"more after the body":       {method: "POST", path: "/v1/sandboxes/a/sleep", body: `{}{}`, status: 400, code: "invalid"},
		"no body where one is due":  {method: "POST", path: "/v1/sandboxes", status: 400, code: "invalid"},
		"a body too large":          {method: "POST", path: "/v1/sandboxes/a/rename", body: long, status: 413, code: wire.CodeTooLarge},
		"a form":                    {method: "POST", path: "/v1/sandboxes/a/sleep", kind: "text/plain", body: `{}`, status: 415, code: wire.CodeMediaType},
		"no such path":              {method: "GET", path: "/v1/nothing", status: 404, code: wire.CodeNoRoute},
		"another method":            {method: "PUT", path: "/v1/sandboxes", status: 405, code: wire.CodeMethod},
		"a limit that is no number": {method: "GET", path: "/v1/sandboxes?limit=x", status: 400, code: "invalid"},
		"an unknown parameter":      {method: "GET", path: "/v1/sandboxes?onwer=x", status: 400, code: "invalid"},
		"an unknown status":         {method: "GET", path: "/v1/sandboxes?status=x", status: 400, code: "invalid"},
		"a policy that is none":     {method: "PUT", path: "/v1/sandboxes/a/policy", body: `{"rules":7}`, status: 400, code: "policy"},
		"a timer and none":          {method: "PATCH", path: "/v1/sandboxes/a", body: `{"wake":{"at":"2100-01-01T00:00:00Z"},"no_wake":true}`, status: 400, code: "invalid"},
		"a timer without a time":    {method: "PATCH", path: "/v1/sandboxes/a", body: `{"wake":{"every_seconds":60}}`, status: 400, code: "invalid"},
		"a timer out of bounds":     {method: "PATCH", path: "/v1/sandboxes/a", body: `{"wake":{"at":"2100-01-01T00:00:00Z","every_seconds":-1}}`, status: 400, code: "metadata"},
		"another origin":            {method: "POST", path: "/v1/sandboxes/a/sleep", body: `{}`, header: [2]string{"Origin", "http://evil.example"}, status: 403, code: wire.CodeForbidden},
		"no origin at all":          {method: "POST", path: "/v1/sandboxes/a/sleep", body: `{}`, header: [2]string{"Origin", "null"}, status: 403, code: wire.CodeForbidden},
		"from another site":         {method: "GET", path: "/v1/sandboxes", header: [2]string{"Sec-Fetch-Site", "cross-site"}, status: 403, code: wire.CodeForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			req, err := http.NewRequestWithContext(t.Context(), tc.method, "http://drowse"+tc.path, strings.NewReader(tc.body))
			if err != nil {
				t.Fatal(err)
			}
			if tc.body != "" {
				req.Header.Set("Content-Type", "application/json")
			}
			if tc.kind != "" {
				req.Header.Set("Content-Type", tc.kind)
			}
			if tc.header[0] != "" {
				req.Header.Set(tc.header[0], tc.header[1])
			}
			tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, "unix", s.path)
			}}
			defer tr.CloseIdleConnections()
			resp, err := tr.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			var e wire.ErrorDoc
			if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || resp.StatusCode != tc.status || e.Error.Code != tc.code {
				t.Errorf("got %d %+v (%v), want %d %s", resp.StatusCode, e.Error, err, tc.status, tc.code)
			}
		})
	}
	if is, err := s.client.Get(t.Context(), "a"); err != nil || is.Status != records.Running {
		t.Errorf("something was done: it is %s, %v", is.Status, err)
	}
}

func TestUpdate_changes_what_is_said_and_nothing_else(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	ctx := t.Context()
	owner, class, until := "web", lifetime.Resumable, time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	got, err := s.client.Update(ctx, "a", records.Changes{Owner: &owner, Class: &class, Expires: &until})
	if err != nil || got.Owner != owner || got.Class != class || !got.Expires.Equal(until) {
		t.Fatalf("got %+v, %v", got, err)
	}
	never := time.Time{}
	got, err = s.client.Update(ctx, "a", records.Changes{Expires: &never})
	if err != nil || got.Owner != owner || !got.Expires.IsZero() {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestUpdate_sets_a_timer_leaves_it_alone_and_takes_it_away(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	ctx := t.Context()
	timer := spec.Timer{At: time.Now().Add(time.Hour).UTC().Truncate(time.Second), Every: 86400}
	label := func(want spec.Timer) {
		t.Helper()
		if l, err := s.vms.host.State.Metadata("a"); err != nil || !l.Wake.At.Equal(want.At) || l.Wake.Every != want.Every {
			t.Fatalf("the metadata has %+v, %v, want %+v", l.Wake, err, want)
		}
	}
	got, err := s.client.Update(ctx, "a", records.Changes{Wake: &timer})
	if err != nil || !got.NextWake.Equal(timer.At) {
		t.Fatalf("got %+v, %v", got, err)
	}
	label(timer)
	owner := "web"
	if got, err = s.client.Update(ctx, "a", records.Changes{Owner: &owner}); err != nil || !got.NextWake.Equal(timer.At) {
		t.Fatalf("after another change: %+v, %v", got, err)
	}
	label(timer)
	got, err = s.client.Update(ctx, "a", records.Changes{Wake: &spec.Timer{}})
	if err != nil || !got.NextWake.IsZero() || got.Owner != owner {
		t.Fatalf("got %+v, %v", got, err)
	}
	label(spec.Timer{})
}

func TestFlows_beyond_the_bound_are_left_out_and_said(t *testing.T) {
	s := serve(t)
	s.vms.flows = slices.Repeat([]netpolicy.FlowRecord{{Type: netpolicy.RecordLost, FlowsLost: &netpolicy.FlowsLost{}}}, wire.MaxFlows+1)
	s.made(t, "a")
	got, err := s.client.Flows(t.Context(), "a")
	if err != nil || len(got.Flows) != wire.MaxFlows || !got.Truncated {
		t.Errorf("%d flows, truncated: %v, %v", len(got.Flows), got.Truncated, err)
	}
}

// Its client has an answer before there is anything to tell, and an error has its status.
func TestFlows_are_followed_before_there_is_one(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	plain := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", s.path)
	}}}
	for name, want := range map[string]int{"a": http.StatusOK, "b": http.StatusNotFound} {
		ctx, cancel := context.WithCancel(t.Context())
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://drowse/v1/sandboxes/"+name+"/flows/follow", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := plain.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != want {
			t.Errorf("%s: %s", name, resp.Status)
		}
		cancel()
		resp.Body.Close()
	}
}

func TestConsole_is_never_taken_for_a_page(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	if err := os.WriteFile(s.vms.host.State.ConsoleLog("a"), []byte("Linux version\n<script>\x1b[2J"), 0o600); err != nil {
		t.Fatal(err)
	}
	resp, err := s.client.Do(t.Context(), http.MethodGet, "/v1/sandboxes/a/console", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if kind, sniff := resp.Header.Get("Content-Type"), resp.Header.Get("X-Content-Type-Options"); kind != "application/octet-stream" || sniff != "nosniff" {
		t.Errorf("it is %q, %q", kind, sniff)
	}
	if tail, err := s.client.Console(t.Context(), "a", 4); err != nil || string(tail) != "\x1b[2J" {
		t.Errorf("the last 4 bytes are %q, %v", tail, err)
	}
}

func TestHealth_fails_with_its_checks_and_says_which(t *testing.T) {
	broken := errors.New("there is no /dev/kvm")
	s := serve(t, func(o *api.Options) {
		o.Ready = []api.Check{{Name: "store", Do: func(context.Context) error { return nil }}, {Name: "kvm", Do: func(context.Context) error { return broken }}}
	})
	got, err := s.client.Ready(t.Context())
	if err != nil || got.OK || len(got.Checks) != 2 || !got.Checks[0].OK || got.Checks[1].OK || got.Checks[1].Problem != broken.Error() {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestMounts_get_their_callers_and_are_refused_to_others(t *testing.T) {
	s := serve(t, func(o *api.Options) {
		o.Mounts = []api.Mount{{Pattern: "GET /metrics", Scope: api.ScopeRead, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, api.CallerOf(r.Context()).Name)
		})}}
	})
	resp, err := s.client.Do(t.Context(), http.MethodGet, "/metrics", nil)
	if err == nil {
		resp.Body.Close()
	}
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("got %v, %v", resp, err)
	}
}

func TestGetOrCreate_of_several_at_once_makes_one(t *testing.T) {
	s := serve(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	made := 0
	for range 8 {
		wg.Go(func() {
			_, created, err := s.client.GetOrCreate(t.Context(), records.Request{Spec: sandbox.Spec{Name: "one", Image: sandboxtest.Image}})
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			if created {
				made++
			}
		})
	}
	wg.Wait()
	if boots := s.vms.started("boot"); made != 1 || boots != 1 {
		t.Errorf("%d were told that they made it, %d boots", made, boots)
	}
}
