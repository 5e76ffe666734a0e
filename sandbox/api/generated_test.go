package api_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var (
	requestCount = flag.Int("requests", 300, "how many requests to generate from the description")
	requestSeed  = flag.Uint64("seed", 1, "of the generated requests")
)

// world is a server with what the examples of the description name: a running sandbox web with a service, a secret, a
// process and files, and a snapshot of it.
type world struct {
	m        *machines
	server   *api.Server
	token    string
	snapshot string
}

func newWorld(t *testing.T) *world {
	w := &world{m: newMachines(t)}
	w.m.set(func() {
		w.m.exec = func(ctx context.Context, p *fakeguest.Process) int {
			if slices.Contains(p.Args, "-") {
				<-ctx.Done()
			}
			return 0
		}
	})
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	var err error
	if w.token, err = known.Create(tokens.Token{Name: "all", Scopes: tokens.All()}); err != nil {
		t.Fatal(err)
	}
	w.server = api.New(api.Options{Host: w.m.host, Tokens: known})
	return w
}

// reset makes the world new.
func (w *world) reset(t *testing.T) {
	t.Helper()
	all, err := w.m.host.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range all {
		// The VM of a template goes by itself.
		err := b.Delete(t.Context(), sandbox.DeleteOptions{Force: true})
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			t.Fatal(err)
		}
	}
	shots, err := w.m.host.State.Snapshots()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range slices.Backward(shots) {
		_ = w.m.host.State.RemoveSnapshot(t.Context(), s.ID) // those that others need go with these
	}
	if vols, err := w.m.host.State.Volumes().List(); err != nil {
		t.Fatal(err)
	} else {
		for _, v := range vols {
			if err := w.m.host.State.RemoveVolume(t.Context(), v.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
	b, err := w.m.host.Create(t.Context(), sandbox.Spec{Name: "web", Image: sandboxtest.Image, Network: spec.NetworkTAP}, sandbox.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	res, err := b.Snapshot(t.Context(), sandbox.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.snapshot = res.Snapshot
	for path, body := range map[string]string{
		"PUT /v1/sandboxes/web/services/main":            `{"argv":["run"]}`,
		"PUT /v1/sandboxes/web/secrets/key":              `{"value":"eA=="}`,
		"POST /v1/sandboxes/web/processes":               `{"command":["run","-"],"process":"job"}`,
		"POST /v1/volumes":                               `{"name":"data","size_mib":16}`,
		"PUT /v1/sandboxes/web/files?path=/etc/hostname": "web",
	} {
		method, where, _ := strings.Cut(path, " ")
		kind := "application/json"
		if strings.Contains(where, "/files") {
			kind = "application/octet-stream"
		}
		if got := w.ask(t.Context(), method, where, http.Header{"Content-Type": {kind}}, []byte(body)); got.Code/100 != 2 {
			t.Fatalf("%s: %d %s", path, got.Code, got.Body)
		}
	}
}

// ask sends a request with the token, unless the header has another.
func (w *world) ask(ctx context.Context, method, where string, h http.Header, body []byte) *httptest.ResponseRecorder {
	r := httptest.NewRequestWithContext(ctx, method, "http://localhost/", bytes.NewReader(body))
	u, err := url.Parse("http://localhost" + where)
	if err != nil {
		panic(err) // the test's own
	}
	r.URL = u
	maps.Copy(r.Header, h)
	if _, own := r.Header["Authorization"]; !own {
		r.Header.Set("Authorization", "Bearer "+w.token)
	}
	out := httptest.NewRecorder()
	func() {
		defer func() {
			// An answer that is cut after its beginning is cut by this panic of net/http.
			if p := recover(); p != nil && p != http.ErrAbortHandler {
				panic(p)
			}
		}()
		w.server.ServeHTTP(out, r)
	}()
	return out
}

// operation is one of the description.
type operationOf struct {
	method, pattern string
	operation
}

func operationsOf(t testing.TB) (all []operationOf) {
	d, err := theDescription()
	if err != nil {
		t.Fatal(err)
	}
	for _, pattern := range slices.Sorted(maps.Keys(d.Paths)) {
		for _, method := range slices.Sorted(maps.Keys(d.Paths[pattern])) {
			all = append(all, operationOf{strings.ToUpper(method), pattern, d.Paths[pattern][method]})
		}
	}
	return all
}

// goesOn reports whether an answer may last until its client goes.
func (o operationOf) goesOn() bool {
	return o.Responses["200"].Content["application/x-ndjson"].Schema != nil || strings.HasSuffix(o.pattern, "/log") || strings.HasSuffix(o.pattern, "/wait")
}

func (o operationOf) isSocket() bool { _, is := o.Responses["101"]; return is }

// exampleFor fills in what an example cannot know.
func (w *world) example(text string) string {
	return strings.ReplaceAll(text, exampleSnapshot, w.snapshot)
}

// exampleSnapshot is the id of a snapshot in the description's examples.
const exampleSnapshot = "0123456789abcdef0123456789abcdef"

func tarOf(t testing.TB) []byte {
	var b bytes.Buffer
	out := tar.NewWriter(&b)
	if err := errors.Join(out.WriteHeader(&tar.Header{Name: "x", Mode: 0o644, Size: 1}), func() error { _, err := out.Write([]byte("x")); return err }(), out.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestOpenAPI_every_operation_succeeds_when_its_example_is_sent(t *testing.T) {
	w := newWorld(t)
	// What stands for itself in the examples, and is not in the world.
	other := map[string]int{
		"GET /v1/operations/{operation}": 404, "DELETE /v1/operations/{operation}": 404,
		"GET /v1/templates/{template}": 404, "DELETE /v1/templates/{template}": 404,
		"POST /v1/snapshots/import": 400, "POST /v1/images/import": 400,
		"POST /v1/sandboxes/{name}/restore": 409, // it runs
		"POST /v1/sandboxes/{name}/rename":  409,
		"POST /v1/sandboxes/{name}/migrate": 400, // the host is in no cluster
		"POST /v1/sandboxes/{name}/promote": 400, // it has nothing to promote
		"DELETE /v1/images/{ref}":           409, // web needs it
		"DELETE /v1/snapshots/{id}":         0,   // in use or not
	}
	changed := true
	for _, op := range operationsOf(t) {
		if changed {
			w.reset(t)
		}
		changed = op.method != http.MethodGet
		where, query := op.pattern, url.Values{}
		h := http.Header{}
		for _, p := range op.Parameters {
			text := w.example(fmt.Sprint(p.Example))
			switch {
			case p.In == "path" && p.Example == nil:
				t.Errorf("%s %s: %s has no example", op.method, op.pattern, p.Name)
			case p.In == "path":
				where = strings.ReplaceAll(where, "{"+p.Name+"}", url.PathEscape(text))
			case p.Required:
				query.Add(p.Name, text)
			}
		}
		var body []byte
		for kind, c := range op.RequestBody.Content {
			h.Set("Content-Type", kind)
			switch {
			case c.Example != nil:
				body = []byte(w.example(string(c.Example)))
			case kind == "application/x-tar":
				body = tarOf(t)
			case kind == "application/json" && op.RequestBody.Required:
				t.Errorf("%s %s: its body has no example", op.method, op.pattern)
			}
		}
		if op.pattern == "/v1/images/pull" {
			continue // it would ask a registry
		}
		ctx, cancel := context.WithCancel(t.Context())
		if op.goesOn() {
			ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
		}
		got := w.ask(ctx, op.method, where+"?"+query.Encode(), h, body)
		cancel()
		want := other[op.method+" "+op.pattern]
		if op.isSocket() {
			want = http.StatusUpgradeRequired
		}
		switch _, differs := other[op.method+" "+op.pattern]; {
		case !differs && !op.isSocket() && got.Code/100 != 2, want != 0 && got.Code != want:
			t.Errorf("%s %s: %d, want %d: %s", op.method, where, got.Code, want, got.Body)
		}
		if err := op.describes(got.Code, got.Header().Get("Content-Type"), got.Body.Bytes()); err != nil {
			t.Errorf("%s %s: %d is not as described: %v: %.300s", op.method, where, got.Code, err, got.Body)
		}
	}
}

// describes returns an error if an answer of the operation is not as described.
func (o operationOf) describes(status int, kind string, body []byte) error {
	r, ok := o.Responses[fmt.Sprint(status)]
	if !ok {
		if status < 400 {
			return fmt.Errorf("there is no status %d", status)
		}
		r = o.Responses["default"]
	}
	if len(r.Content) == 0 {
		if len(body) != 0 {
			return errors.New("it has a body")
		}
		return nil
	}
	kind, _, _ = strings.Cut(kind, ";")
	c, ok := r.Content[kind]
	if !ok {
		return fmt.Errorf("it has no answer of type %q", kind)
	}
	check := func(text []byte) error {
		var v any
		if err := json.Unmarshal(text, &v); err != nil {
			return err
		}
		is, err := resolvedSchema(c.Schema)
		if err != nil {
			return err
		}
		return is.Validate(v)
	}
	switch kind {
	case "application/json":
		return check(body)
	case "application/x-ndjson":
		for line := range bytes.Lines(body) {
			if len(bytes.TrimSpace(line)) == 0 {
				continue
			}
			if err := check(line); err != nil {
				return err
			}
		}
	}
	return nil
}

var resolvedSchemas = map[string]*jsonschema.Resolved{}

// resolvedSchema returns the schema that a reference names. Only one goroutine of the tests calls it.
func resolvedSchema(s *jsonschema.Schema) (*jsonschema.Resolved, error) {
	if r := resolvedSchemas[s.Ref]; r != nil {
		return r, nil
	}
	d, err := theDescription()
	if err != nil {
		return nil, err
	}
	is := d.Components.Schemas[strings.TrimPrefix(s.Ref, "#/components/schemas/")]
	if is == nil {
		return nil, fmt.Errorf("there is no schema %q", s.Ref)
	}
	r, err := is.CloneSchemas().Resolve(nil)
	if err == nil {
		resolvedSchemas[s.Ref] = r
	}
	return r, err
}

// generator makes requests from the description: valid ones, and such that differ from valid ones in one or more
// places.
type generator struct {
	*rand.Rand
	w *world
	d description
}

func (g *generator) one(of ...string) string { return of[g.IntN(len(of))] }
func (g *generator) chance(percent int) bool { return g.IntN(100) < percent }

// words are texts that a careless server stumbles over.
var words = []string{
	"", "a", "web", "..", ".", "../../etc/passwd", "/", "//", "/etc/hostname", "/none", "/tmp", "a/b", "a b", "%", "%2e%2e%2f", "\x00", "\n", "\u202e", "é", "💤", "'\"<script>", "-1", "0", "1",
	"9223372036854775808", "1e999", "true", "null", "*", "2100-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "99999-01-01T00:00:00Z", "test", "test@sha256:00", "main", "key", "job", "data", strings.Repeat("x", 300), strings.Repeat("../", 400), "\xff\xfe",
}

func (g *generator) word() string { return g.one(words...) }

// value makes a value of a schema; most are valid.
func (g *generator) value(s *jsonschema.Schema, depth int) any {
	if s == nil || g.chance(4) {
		return g.junk(depth)
	}
	if s.Ref != "" {
		return g.value(g.d.Components.Schemas[strings.TrimPrefix(s.Ref, "#/components/schemas/")], depth)
	}
	if len(s.Enum) > 0 && g.chance(85) {
		return s.Enum[g.IntN(len(s.Enum))]
	}
	for _, of := range [][]*jsonschema.Schema{s.OneOf, s.AnyOf} {
		if len(of) > 0 {
			return g.value(of[g.IntN(len(of))], depth)
		}
	}
	types := s.Types
	if s.Type != "" {
		types = []string{s.Type}
	}
	if len(types) == 0 {
		return g.junk(depth)
	}
	switch g.one(types...) {
	case "object":
		out := map[string]any{}
		if depth > 6 {
			return out
		}
		for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
			if g.chance(35) || slices.Contains(s.Required, name) && g.chance(95) {
				out[name] = g.value(s.Properties[name], depth+1)
			}
		}
		if g.chance(3) {
			out[g.word()] = g.junk(depth)
		}
		return out
	case "array":
		out := []any{}
		for range g.IntN(3) {
			out = append(out, g.value(s.Items, depth+1))
		}
		return out
	case "integer":
		return g.number()
	case "number":
		return json.Number(g.one("0", "1.5", "-1", "1e308"))
	case "boolean":
		return g.chance(50)
	case "null":
		return nil
	}
	return g.word()
}

func (g *generator) number() json.Number {
	return json.Number(g.one("0", "1", "2", "3", "7", "64", "128", "4096", "65535", "65536", "-1", "2147483648", "9223372036854775807", "-9223372036854775808", "18446744073709551616", "1.5", "1e3"))
}

// junk makes any value.
func (g *generator) junk(depth int) any {
	switch n := g.IntN(7); {
	case n == 0:
		return nil
	case n == 1:
		return g.chance(50)
	case n == 2:
		return g.number()
	case n == 3 && depth < 8:
		return []any{g.junk(depth + 1)}
	case n == 4 && depth < 8:
		return map[string]any{g.word(): g.junk(depth + 1)}
	}
	return g.word()
}

// like changes an example in some place.
func (g *generator) like(v any) any {
	switch is := v.(type) {
	case map[string]any:
		out := maps.Clone(is)
		for _, k := range slices.Sorted(maps.Keys(out)) {
			switch n := g.IntN(12); n {
			case 0:
				delete(out, k)
			case 1:
				out[k] = g.junk(1)
			default:
				out[k] = g.like(out[k])
			}
		}
		return out
	case []any:
		out := slices.Clone(is)
		for i := range out {
			out[i] = g.like(out[i])
		}
		return out
	}
	if g.chance(10) {
		return g.junk(1)
	}
	return v
}

// request makes a request of an operation.
func (g *generator) request(op operationOf) (where string, h http.Header, body []byte) {
	where, h = op.pattern, http.Header{}
	query := url.Values{}
	for _, p := range op.Parameters {
		text := g.w.example(fmt.Sprint(p.Example))
		if p.Example == nil || g.chance(15) {
			text = g.word()
			if len(p.Schema.Enum) > 0 && g.chance(80) {
				text = fmt.Sprint(p.Schema.Enum[g.IntN(len(p.Schema.Enum))])
			} else if p.Schema.Type == "integer" && g.chance(80) {
				text = g.number().String()
			}
		}
		switch p.In {
		case "path":
			where = strings.ReplaceAll(where, "{"+p.Name+"}", url.PathEscape(text))
		case "query":
			for n := g.IntN(3); n > 0 || p.Required && g.chance(95) && !query.Has(p.Name); n-- {
				query.Add(p.Name, text)
			}
		case "header":
			if g.chance(30) {
				h.Set(p.Name, text)
			}
		}
	}
	if g.chance(3) {
		query.Add(g.word(), g.word())
	}
	if len(query) > 0 {
		where += "?" + query.Encode()
	}
	for kind, c := range op.RequestBody.Content {
		h.Set("Content-Type", kind)
		var v any
		switch {
		case kind == "application/x-tar" && g.chance(60):
			body = slices.Clone(tarBody)
			if g.chance(50) {
				body[g.IntN(len(body))] ^= byte(1 + g.IntN(255))
			}
			continue
		case kind != "application/json":
			body = []byte(strings.Repeat(g.word(), g.IntN(50)))
			continue
		case c.Example != nil && g.chance(60) && json.Unmarshal([]byte(g.w.example(string(c.Example))), &v) == nil:
			v = g.like(v)
		default:
			v = g.value(c.Schema, 0)
		}
		body, _ = json.Marshal(v) // what it cannot write is an empty body
		switch g.IntN(40) {
		case 0:
			body = nil
		case 1:
			body = body[:g.IntN(len(body)+1)]
		case 2:
			body = append(body, body...)
		case 3:
			h.Set("Content-Type", g.one("", "text/plain", "application/json; charset=utf-8", "application/x-www-form-urlencoded"))
		case 4:
			body = []byte(strings.Repeat(`{"spec":[`, 5000))
		}
	}
	if op.pattern == "/v1/images/pull" && (bytes.Contains(body, []byte("docker:")) || bytes.Contains(body, []byte("debian:"))) {
		body = []byte(`{"from":"docker://127.0.0.1:1/none","tag":"x"}`) // nobody is to be asked
	}
	if op.method == http.MethodDelete && op.pattern == "/v1/images/{ref}" {
		where = "/v1/images/none" // the world has one image
	}
	if g.chance(2) {
		h.Set("Authorization", g.one("", "Bearer x", "Basic eDp4", "Bearer "+strings.Repeat("y", 5000)))
	}
	return where, h, body
}

var tarBody []byte

// TestOpenAPI_generated_requests_are_answered_as_described sends requests that are made from the description: none may
// fail by the server's fault, and each answer is as described. `make test-api` sends more.
func TestOpenAPI_generated_requests_are_answered_as_described(t *testing.T) {
	w, ops := newWorld(t), operationsOf(t)
	d, err := theDescription()
	if err != nil {
		t.Fatal(err)
	}
	tarBody = tarOf(t)
	g := &generator{rand.New(rand.NewPCG(*requestSeed, 0)), w, d}
	const round = 150
	statuses, failed := map[int]int{}, map[string]bool{}
	begin := time.Now()
	for i := range *requestCount {
		if i%round == 0 {
			w.reset(t)
		}
		op := ops[g.IntN(len(ops))]
		where, h, body := g.request(op)
		limit := 5 * time.Second
		if op.goesOn() {
			limit = 20 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		got := w.ask(ctx, op.method, where, h, body)
		cancel()
		statuses[got.Code]++
		key := fmt.Sprint(op.method, op.pattern, got.Code)
		if failed[key] {
			continue
		}
		var e wire.ErrorDoc
		unready := op.pattern == "/healthz" || op.pattern == "/readyz"
		switch err := op.describes(got.Code, got.Header().Get("Content-Type"), got.Body.Bytes()); {
		case err != nil:
			failed[key] = true
			t.Errorf("seed %d, request %d: %s %s with %v and %.500q\nis answered %d, which is not as described: %v: %.500s", *requestSeed, i, op.method, where, h, body, got.Code, err, got.Body)
		case got.Code == http.StatusInternalServerError:
			failed[key] = true
			t.Errorf("seed %d, request %d: %s %s with %v and %.500q\nis answered %d: %.500s", *requestSeed, i, op.method, where, h, body, got.Code, got.Body)
		case got.Code >= 400 && !unready && (json.Unmarshal(got.Body.Bytes(), &e) != nil || e.Error.Code == "" || e.Error.Message == ""):
			failed[key] = true
			t.Errorf("seed %d, request %d: %s %s is answered %d without a code: %.500s", *requestSeed, i, op.method, where, got.Code, got.Body)
		}
	}
	var is wire.Operations
	if err := json.Unmarshal(w.ask(t.Context(), "GET", "/v1/operations", nil, nil).Body.Bytes(), &is); err != nil {
		t.Fatal(err)
	}
	for _, o := range is.Operations {
		w.ask(t.Context(), "DELETE", "/v1/operations/"+o.ID, nil, nil)
	}
	t.Logf("%d requests in %v, by status: %v", *requestCount, time.Since(begin).Round(time.Second), statuses)
}
