package e2btest

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Tests here have guests in memory: they need neither root nor Node.

// control are the routes of the control plane, with S for the id of a sandbox.
var control = []string{
	"POST /sandboxes", "POST /v2/sandboxes", "POST /sandboxes/S/connect", "POST /v2/sandboxes/S/connect", "POST /sandboxes/S/resume",
	"GET /sandboxes", "GET /v2/sandboxes", "GET /sandboxes/S", "DELETE /sandboxes/S", "POST /sandboxes/S/pause", "POST /sandboxes/S/fork", "POST /v2/sandboxes/S/fork",
	"POST /sandboxes/S/timeout", "POST /sandboxes/S/refreshes", "PUT /sandboxes/S/network", "GET /sandboxes/S/metrics", "GET /sandboxes/metrics",
	"GET /sandboxes/S/logs", "GET /v2/sandboxes/S/logs", "POST /sandboxes/S/snapshots", "GET /snapshots", "DELETE /templates/S", "GET /templates",
	"GET /templates/aliases/base", "POST /v3/templates", "POST /v2/templates", "POST /templates", "GET /templates/x/files/y",
	"POST /v2/templates/x/builds/y", "GET /templates/x/builds/y/status", "GET /templates/x/tags", "POST /templates/tags", "DELETE /templates/tags", "GET /v2/templates",
	"GET /volumes", "GET /volumes/x", "DELETE /volumes/x", "PUT /volumecontent/x/file", "GET /secrets/x", "DELETE /secrets/x", "POST /volumes", "GET /secrets", "POST /secrets", "GET /nothing", "POST /sandboxes/S/nothing",
}

// inside are the routes of the protocol in a sandbox.
var inside = []string{
	"GET /metrics", "GET /envs", "GET /files?path=/etc/passwd", "POST /files?path=/tmp/f", "POST /files/compose", "HEAD /files?path=/etc/passwd",
	"POST /init", "POST /freeze", "POST /unfreeze", "POST /collapse", "POST /fsfreeze", "POST /fsthaw", "POST /upgrade", "GET /nothing",
}

func init() {
	for _, m := range strings.Fields("List Start Connect Update SendInput StreamInput SendSignal CloseStdin") {
		inside = append(inside, "POST /process.Process/"+m)
	}
	for _, m := range strings.Fields("Stat MakeDir Move ListDir Remove WatchDir CreateWatcher GetWatcherEvents RemoveWatcher") {
		inside = append(inside, "POST /filesystem.Filesystem/"+m)
	}
}

func TestControl_plane_wants_a_key_on_every_route(t *testing.T) {
	w := begin(t, nil, nil)
	m := w.create(map[string]any{})
	reader, err := w.tokens.CreateE2B(tokens.Token{Name: "reader", Scopes: tokens.Scopes{tokens.ScopeRead}})
	if err != nil {
		t.Fatal(err)
	}
	for _, route := range control {
		method, path, _ := strings.Cut(strings.ReplaceAll(route, "/S", "/"+m.SandboxID), " ")
		for name, header := range map[string][]string{
			"none": {"X-API-KEY", ""}, "wrong": {"X-API-KEY", "e2b_" + strings.Repeat("0", 64)}, "of a sandbox": {"X-API-KEY", m.EnvdAccessToken},
			"empty": {"X-API-KEY", "", "Authorization", "Bearer "}, "two": {"Authorization", "Bearer " + reader},
		} {
			if a := w.ask(method, path, nil, header...); a.status != http.StatusUnauthorized {
				t.Errorf("%s: key %s: %d %s", route, name, a.status, a.body)
			}
		}
		a := w.ask(method, path, nil, "X-API-KEY", reader)
		if method != http.MethodGet && a.status != http.StatusForbidden || method == http.MethodGet && (a.status == http.StatusForbidden || a.status == http.StatusUnauthorized) {
			t.Errorf("%s: a key that may read: %d %s", route, a.status, a.body)
		}
		if strings.Contains(a.body, m.EnvdAccessToken) {
			t.Errorf("%s: a key that may only read gets a token of the sandbox", route)
		}
	}
	if a := w.ask("GET", "/sandboxes/"+m.SandboxID, nil, "X-API-KEY", "", "Authorization", "Bearer "+w.key); a.status != http.StatusOK {
		t.Error("a key as a bearer token:", a)
	}
	if a := w.ask("GET", "/health", nil, "X-API-KEY", ""); a.status != http.StatusNoContent {
		t.Error("health:", a)
	}
}

func TestKeys_of_an_owner_reach_that_owners_sandboxes_alone(t *testing.T) {
	w := begin(t, nil, nil)
	keys := map[string]string{"all": w.key}
	for _, owner := range []string{"ann", "a man"} {
		var err error
		if keys[owner], err = w.tokens.CreateE2B(tokens.Token{Name: strings.ReplaceAll(owner, " ", "-"), Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}, Owner: owner}); err != nil {
			t.Fatal(err)
		}
	}
	as := func(owner, method, path string, body any) answer {
		t.Helper()
		return w.ask(method, path, body, "X-API-KEY", keys[owner])
	}
	var m, child made
	if a := as("ann", "POST", "/v2/sandboxes", map[string]any{"templateID": "base"}); a.status != http.StatusCreated || json.Unmarshal([]byte(a.body), &m) != nil {
		t.Fatal(a)
	}
	var forks []struct{ Sandbox made }
	if a := as("all", "POST", "/sandboxes/"+m.SandboxID+"/fork", nil); json.Unmarshal([]byte(a.body), &forks) != nil || len(forks) != 1 {
		t.Fatal("fork:", a)
	}
	child = forks[0].Sandbox
	var snap struct{ SnapshotID string }
	if a := as("ann", "POST", "/sandboxes/"+m.SandboxID+"/snapshots", map[string]any{"name": "hers"}); json.Unmarshal([]byte(a.body), &snap) != nil || snap.SnapshotID == "" {
		t.Fatal("snapshot:", a)
	}
	for _, id := range []string{m.SandboxID, child.SandboxID} {
		for _, route := range control {
			if !strings.Contains(route, "/S") {
				continue
			}
			method, path, _ := strings.Cut(strings.ReplaceAll(route, "/S", "/"+id), " ")
			if a := as("a man", method, path, nil); a.status != http.StatusNotFound {
				t.Errorf("%s of another owner's sandbox: %d %s", route, a.status, a.body)
			}
		}
	}
	for _, path := range []string{"/v2/sandboxes", "/snapshots", "/sandboxes/metrics?sandbox_ids=" + m.SandboxID} {
		if a := as("a man", "GET", path, nil); a.status != http.StatusOK || strings.Contains(a.body, m.SandboxID) || strings.Contains(a.body, snap.SnapshotID) {
			t.Errorf("%s shows what is another owner's: %d %s", path, a.status, a.body)
		}
		if a := as("ann", "GET", path, nil); a.status != http.StatusOK || !strings.Contains(a.body, m.SandboxID) && !strings.Contains(a.body, snap.SnapshotID) {
			t.Errorf("%s hides what is the owner's: %d %s", path, a.status, a.body)
		}
	}
	for _, template := range []string{"hers", snap.SnapshotID} {
		if a := as("a man", "POST", "/v2/sandboxes", map[string]any{"templateID": template}); a.status != http.StatusNotFound {
			t.Errorf("another owner's snapshot as template %s: %d %s", template, a.status, a.body)
		}
		if a := as("a man", "DELETE", "/templates/"+template, nil); a.status != http.StatusNotFound {
			t.Errorf("removing another owner's snapshot %s: %d %s", template, a.status, a.body)
		}
	}
	if a := as("ann", "POST", "/v2/sandboxes", map[string]any{"templateID": "hers"}); a.status != http.StatusCreated {
		t.Errorf("the owner's own snapshot as template: %d %s", a.status, a.body)
	}
	if md, err := w.host.State.Metadata(child.SandboxID); err != nil || md.Owner != "ann" {
		t.Errorf("the child's owner is %q, %v", md.Owner, err)
	}
}

func TestTemplates_of_the_host_are_for_all_keys_and_removed_by_none(t *testing.T) {
	var templates map[string]string
	w := begin(t, nil, func(o *e2b.Options) { templates = o.Templates })
	key, err := w.tokens.CreateE2B(tokens.Token{Name: "ann", Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}, Owner: "ann"})
	if err != nil {
		t.Fatal(err)
	}
	var m made
	if a := w.ask("POST", "/v2/sandboxes", map[string]any{"templateID": "base"}); json.Unmarshal([]byte(a.body), &m) != nil || a.status != http.StatusCreated {
		t.Fatal(a)
	}
	var snap struct{ SnapshotID string }
	if a := w.ask("POST", "/sandboxes/"+m.SandboxID+"/snapshots", map[string]any{"name": "warm"}); json.Unmarshal([]byte(a.body), &snap) != nil || snap.SnapshotID == "" {
		t.Fatal(a)
	}
	create := func(template string) answer {
		return w.ask("POST", "/v2/sandboxes", map[string]any{"templateID": template}, "X-API-KEY", key)
	}
	if a := create("warm"); a.status != http.StatusNotFound {
		t.Errorf("before it is shared: %v", a)
	}
	id := strings.TrimSuffix(snap.SnapshotID, ":default")
	templates["shared"], templates["lost"] = e2b.SnapshotPrefix+id[:12], e2b.SnapshotPrefix+strings.Repeat("0", 32)
	if a := create("shared"); a.status != http.StatusCreated || json.Unmarshal([]byte(a.body), &m) != nil {
		t.Errorf("shared: %v", a)
	} else if md, err := w.host.State.Metadata(m.SandboxID); err != nil || md.Owner != "ann" {
		t.Errorf("the owner is %q, %v", md.Owner, err)
	}
	if a := create("lost"); a.status != http.StatusNotFound {
		t.Errorf("a snapshot that is not there: %v", a)
	}
	for _, name := range []string{"shared", snap.SnapshotID, id} {
		if a := w.ask("DELETE", "/templates/"+name, nil, "X-API-KEY", key); a.status != http.StatusNotFound {
			t.Errorf("removing %s: %v", name, a)
		}
	}
	// A snapshot of the name of one of the host's templates does not take its place.
	if a := w.ask("POST", "/sandboxes/"+m.SandboxID+"/snapshots", map[string]any{"name": "base"}, "X-API-KEY", key); a.status >= 300 {
		t.Fatal(a)
	}
	if a := create("base"); json.Unmarshal([]byte(a.body), &m) != nil || a.status != http.StatusCreated {
		t.Fatal(a)
	}
	if r, err := w.host.State.Get(m.SandboxID); err != nil || r.Parent != "" {
		t.Errorf("base became a snapshot: %+v, %v", r, err)
	}
}

func TestKeys_that_have_expired_or_are_used_too_often_are_refused(t *testing.T) {
	w := begin(t, nil, nil)
	key, err := w.tokens.CreateE2B(tokens.Token{Name: "slow", Scopes: tokens.All(), Rate: 1})
	if err != nil {
		t.Fatal(err)
	}
	refused := false
	for range 5 {
		switch a := w.ask("GET", "/v2/sandboxes", nil, "X-API-KEY", key); a.status {
		case http.StatusOK:
		case http.StatusTooManyRequests:
			refused = true
		default:
			t.Fatal(a)
		}
	}
	if !refused {
		t.Error("five requests at once of a key that has one a second")
	}
	key, err = w.tokens.CreateE2B(tokens.Token{Name: "brief", Scopes: tokens.All(), Expires: time.Now().Add(time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	w.until("the key has expired", func() bool {
		return w.ask("GET", "/v2/sandboxes", nil, "X-API-KEY", key).status == http.StatusUnauthorized
	})
}

func TestSandbox_wants_its_own_token_on_every_route(t *testing.T) {
	w := begin(t, nil, nil)
	m, other := w.create(map[string]any{"network": map[string]any{"allowPublicTraffic": false}}), w.create(map[string]any{})
	child := made{}
	var forks []struct{ Sandbox made }
	if a := w.ask("POST", "/sandboxes/"+m.SandboxID+"/fork", nil); json.Unmarshal([]byte(a.body), &forks) != nil || len(forks) != 1 {
		t.Fatal("fork:", a)
	}
	child = forks[0].Sandbox
	for _, route := range inside {
		method, path, _ := strings.Cut(route, " ")
		for name, token := range map[string]string{
			"none": "", "another sandbox's": other.EnvdAccessToken, "its fork's": child.EnvdAccessToken, "for traffic": m.TrafficAccessToken, "a key": w.key,
			"longer": m.EnvdAccessToken + "0", "shorter": m.EnvdAccessToken[1:],
		} {
			a := w.ask(method, path, "{}", "X-API-KEY", "", "E2b-Sandbox-Id", m.SandboxID, "X-Access-Token", token)
			if a.status != http.StatusUnauthorized {
				t.Errorf("%s: token %s: %d %s", route, name, a.status, a.body)
			}
		}
		if a := w.ask(method, path, "{}", "E2b-Sandbox-Id", "inothing", "X-Access-Token", m.EnvdAccessToken); a.status != http.StatusBadGateway {
			t.Errorf("%s: of no sandbox: %d %s", route, a.status, a.body)
		}
	}
	for _, path := range []string{"/init", "/freeze", "/upgrade", "/x"} {
		if a := w.ask("POST", path, "{}", "E2b-Sandbox-Id", m.SandboxID, "X-Access-Token", m.EnvdAccessToken); a.status != http.StatusNotFound {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	if a := w.ask("GET", "/", nil, "E2b-Sandbox-Id", m.SandboxID, "E2b-Sandbox-Port", "8000"); a.status != http.StatusForbidden {
		t.Error("a private port without the token:", a)
	}
	for _, token := range []string{other.TrafficAccessToken + "x", m.EnvdAccessToken, w.key} {
		if a := w.ask("GET", "/", nil, "E2b-Sandbox-Id", m.SandboxID, "E2b-Sandbox-Port", "8000", "E2b-Traffic-Access-Token", token); a.status != http.StatusForbidden {
			t.Error("a private port with another token:", a)
		}
	}
	if a := w.ask("GET", "/", nil, "E2b-Sandbox-Id", m.SandboxID, "E2b-Sandbox-Port", "8000", "E2b-Traffic-Access-Token", m.TrafficAccessToken); a.status != http.StatusBadGateway || !strings.Contains(a.body, "8000") {
		t.Error("a closed port:", a)
	}
}

func TestServer_knows_only_sandboxes_of_its_wire(t *testing.T) {
	w := begin(t, nil, nil)
	m := w.create(map[string]any{})
	if _, err := w.host.Clone(t.Context(), w.pause(m), cloneAs("mine")); err != nil {
		t.Fatal(err)
	}
	for _, route := range control {
		if !strings.Contains(route, "/sandboxes/S") {
			continue
		}
		method, path, _ := strings.Cut(strings.ReplaceAll(route, "/S", "/mine"), " ")
		if a := w.ask(method, path, nil); a.status != http.StatusNotFound {
			t.Errorf("%s: %d %s", route, a.status, a.body)
		}
	}
	if a := w.ask("GET", "/health", nil, "E2b-Sandbox-Id", "mine"); a.status != http.StatusBadGateway {
		t.Error(a)
	}
	if a := w.ask("GET", "/v2/sandboxes", nil); strings.Contains(a.body, `"mine"`) {
		t.Error(a)
	}
}

func TestRequest_must_name_one_sandbox(t *testing.T) {
	w := begin(t, nil, nil)
	m := w.create(map[string]any{})
	for _, c := range []struct{ host, id, port string }{
		{"", "../../etc", "49983"}, {"", "UPPER", "1"}, {"", "a-b", "1"}, {"", strings.Repeat("a", 41), "1"}, {"", "a/b", "1"}, {"", m.SandboxID, "0"}, {"", m.SandboxID, "65536"},
		{"", m.SandboxID, "049983"}, {"", m.SandboxID, "+1"}, {"", m.SandboxID, "x"}, {"49983-other." + domain, m.SandboxID, "49983"},
		{"80-" + m.SandboxID + "." + domain, m.SandboxID, "49983"}, {"a.49983-x." + domain, "", ""}, {"49983." + domain, "", ""}, {"-x." + domain, "", ""},
	} {
		r, err := http.NewRequestWithContext(t.Context(), "GET", w.url+"/health", nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Host = c.host
		if c.id != "" {
			r.Header.Set("E2b-Sandbox-Id", c.id)
			r.Header.Set("E2b-Sandbox-Port", c.port)
		}
		if a := w.do(r); a.status != http.StatusBadRequest {
			t.Errorf("%v: %d %s", c, a.status, a.body)
		}
	}
	r, err := http.NewRequestWithContext(t.Context(), "GET", w.url+"/health", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header["E2b-Sandbox-Id"] = []string{m.SandboxID, "inothing"}
	if a := w.do(r); a.status != http.StatusBadRequest {
		t.Error("two ids:", a)
	}
}

func TestBody_is_refused_by_the_name_of_the_field(t *testing.T) {
	w := begin(t, nil, func(o *e2b.Options) { o.Network = true })
	for body, want := range map[string]string{
		`{"templateID":"base","iam":{"tokens":{"a":{"audience":"b"}}}}`:                                "400 iam",
		`{"templateID":"base","volumeMounts":[{"name":"v","path":"/v"}]}`:                              "400 volumeMounts",
		`{"templateID":"base","autoPauseMemory":false}`:                                                "400 autoPauseMemory",
		`{"templateID":"base","autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}}`: "400 autoPauseMemory",
		`{"templateID":"base","autoResume":{"enabled":true}}`:                                          "400 autoResume",
		`{"templateID":"base","autoResume":{"enabled":true,"after":1}}`:                                "400 after",
		`{"templateID":"base","network":{"egressProxy":{"address":"a:1"}}}`:                            "400 egressProxy",
		`{"templateID":"base","network":{"httpsPorts":[0]}}`:                                           "400 httpsPorts",
		`{"templateID":"base","network":{"httpsPorts":[65536]}}`:                                       "400 body",
		`{"templateID":"base","network":{"rules":{"a.b":[{"transform":{}}]}}}`:                         "400 rules",
		`{"templateID":"base","network":{"denyOut":["example.com"]}}`:                                  "400 denyOut",
		`{"templateID":"base","network":{"allowOut":["example.com"]}}`:                                 "400 allowOut",
		`{"templateID":"base","network":{"allowOut":["a b"]}}`:                                         "400 allowOut",
		`{"templateID":"base","new":1}`:                                                                "400 new",
		`{"templateID":"base"} {}`:                                                                     "400 more",
		`{"templateID":"base","timeout":-1}`:                                                           "400 timeout",
		`{"templateID":"base","timeout":1e30}`:                                                         "400 timeout",
		`{"templateID":"base","envVars":{"A=B":"c"}}`:                                                  "400 envVars",
		`{"templateID":"base","envVars":{"A":"b\u0000"}}`:                                              "400 envVars",
		`{"templateID":"base","metadata":{"a":"` + strings.Repeat("x", 70000) + `"}}`:                  "400 metadata",
		`{"templateID":"base","a":"` + strings.Repeat("x", 2<<20) + `"}`:                               "413 bytes",
		`{}`:                               "400 templateID",
		``:                                 "400 templateID",
		`[]`:                               "400 body",
		`{"templateID":"../../etc"}`:       "404 template",
		`{"templateID":"nothing"}`:         "404 template",
		`{"templateID":"nothing:default"}`: "404 template",
	} {
		code, word, _ := strings.Cut(want, " ")
		if a := w.ask("POST", "/v2/sandboxes", body); fmt.Sprint(a.status) != code || !strings.Contains(a.body, word) {
			t.Errorf("%.80s: %d %s", body, a.status, a.body)
		}
	}
	if a := w.ask("POST", "/v2/sandboxes", "{}", "Content-Type", "text/plain"); a.status != http.StatusUnsupportedMediaType {
		t.Error(a)
	}
	if a := w.ask("GET", "/v2/sandboxes", nil); strings.TrimSpace(a.body) != "[]" {
		t.Error("a refused request has made a sandbox:", a)
	}
}

// signed returns a query for a file.
func signed(m made, path, operation, user, expiry string) url.Values {
	text := path + ":" + operation + ":" + user + ":" + m.EnvdAccessToken
	q := url.Values{"path": {path}}
	if expiry != "" {
		text += ":" + expiry
		q.Set("signature_expiration", expiry)
	}
	if user != "" {
		q.Set("username", user)
	}
	sum := sha256.Sum256([]byte(text))
	q.Set("signature", "v1_"+base64.RawStdEncoding.EncodeToString(sum[:]))
	return q
}

func TestSignature_is_for_one_file_one_operation_and_one_user(t *testing.T) {
	w := begin(t, nil, nil)
	m, other := w.create(map[string]any{}), w.create(map[string]any{})
	put := func(q url.Values, header ...string) answer {
		return w.ask("POST", "/files?"+q.Encode(), "text", append([]string{"X-API-KEY", "", "E2b-Sandbox-Id", m.SandboxID, "Content-Type", "application/octet-stream"}, header...)...)
	}
	root := "Basic " + base64.StdEncoding.EncodeToString([]byte("daemon:"))
	later, before := fmt.Sprint(time.Now().Add(time.Hour).Unix()), fmt.Sprint(time.Now().Add(-time.Hour).Unix())
	if a := put(signed(m, "f", "write", "", later), "Authorization", root); a.status != http.StatusOK || !strings.Contains(a.body, `"/root/f"`) {
		t.Error("a signature, and a user who was not signed:", a)
	}
	if a := put(signed(m, "f", "write", "root", "")); a.status != http.StatusOK {
		t.Error(a)
	}
	twice := signed(m, "f", "write", "", later)
	twice.Add("path", "g")
	changed := signed(m, "f", "write", "", "")
	changed.Set("path", "/etc/passwd")
	named := signed(m, "f", "write", "", "")
	named.Set("username", "root")
	renewed := signed(m, "f", "write", "", before)
	renewed.Set("signature_expiration", later)
	endless := signed(m, "f", "write", "", before)
	endless.Del("signature_expiration")
	for name, q := range map[string]url.Values{
		"expired": signed(m, "f", "write", "", before), "to read": signed(m, "f", "read", "", later), "another sandbox's": signed(other, "f", "write", "", later),
		"two paths": twice, "another path": changed, "another user": named, "renewed": renewed, "without its end": endless, "an end that is no time": signed(m, "f", "write", "", "x"),
	} {
		if a := put(q); a.status != http.StatusUnauthorized {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	if a := put(signed(m, "f", "write", "", later), "E2b-Sandbox-Id", ""); a.status != http.StatusBadRequest || !strings.Contains(a.body, "names no sandbox") {
		t.Error("without a sandbox:", a)
	}
	if a := put(signed(m, "f", "write", "", later), "X-Access-Token", "wrong"); a.status != http.StatusUnauthorized {
		t.Error("beside a wrong token:", a)
	}
	if a := w.ask("GET", "/files?"+signed(m, "f", "read", "", "").Encode(), nil, "E2b-Sandbox-Id", m.SandboxID); a.body != "text" {
		t.Error(a)
	}
}

func TestSandbox_through_its_life(t *testing.T) {
	w := begin(t, nil, nil)
	m := w.create(map[string]any{"timeout": 600, "metadata": map[string]string{"k": "a b", "l": "m"}})
	id := "/sandboxes/" + m.SandboxID
	token := []string{"E2b-Sandbox-Id", m.SandboxID, "X-Access-Token", m.EnvdAccessToken, "Content-Type", "application/octet-stream"}
	step := func(want int, method, path string, body any, header ...string) answer {
		t.Helper()
		a := w.ask(method, path, body, header...)
		if a.status != want {
			t.Errorf("%s %s: %d %s, want %d", method, path, a.status, a.body, want)
		}
		return a
	}
	step(200, "POST", "/files?path=/tmp/kept", "kept", token...)
	for query, want := range map[string]bool{
		"metadata=k%3Da%2520b": true, "metadata=k%3Da%2520b%26l%3Dm": true, "metadata=k%3Dother": false, "state=paused": false, "state=running,paused": true,
		"template=base": true, "template=other": false, "startedAfter=2100-01-01T00:00:00Z": false, "order=asc&limit=1": true,
	} {
		if a := step(200, "GET", "/v2/sandboxes?"+query, nil); strings.Contains(a.body, m.SandboxID) != want {
			t.Errorf("%s: %s", query, a.body)
		}
	}
	for _, query := range []string{"state=asleep", "limit=0", "limit=x", "nextToken=*", "order=up", "startedAfter=now"} {
		step(400, "GET", "/v2/sandboxes?"+query, nil)
	}
	step(204, "POST", id+"/pause", nil)
	step(409, "POST", id+"/pause", map[string]any{})
	step(502, "GET", "/health", nil, token...)
	step(502, "GET", "/files?path=/tmp/kept", nil, token...)
	step(404, "POST", id+"/timeout", map[string]any{"timeout": 10})
	step(409, "POST", id+"/snapshots", nil)
	step(409, "PUT", id+"/network", map[string]any{})
	for field, value := range map[string]any{"allowPublicTraffic": false, "maskRequestHost": "a", "httpsPorts": []int{443}} {
		if a := step(400, "PUT", id+"/network", map[string]any{field: value}); !strings.Contains(a.body, field) {
			t.Error(a)
		}
	}
	// It has a new time, which may be a shorter one.
	var again made
	a := step(201, "POST", "/v2"+id+"/connect", map[string]any{"timeout": 60})
	if err := json.Unmarshal([]byte(a.body), &again); err != nil || again != m {
		t.Errorf("resumed: %v, %v, want %v", again, err, m)
	}
	ends := func() time.Duration {
		var d struct{ EndAt time.Time }
		if err := json.Unmarshal([]byte(step(200, "GET", id, nil).body), &d); err != nil {
			t.Fatal(err)
		}
		return time.Until(d.EndAt)
	}
	if left := ends(); left > 61*time.Second {
		t.Error("resumed for 60 s, ends in", left)
	}
	step(204, "GET", "/health", nil, token...)
	if a := step(200, "GET", "/files?path=/tmp/kept", nil, token...); a.body != "kept" {
		t.Error(a)
	}
	step(200, "POST", id+"/connect", map[string]any{"timeout": 1})
	step(204, "POST", id+"/refreshes", map[string]any{"duration": 3600})
	step(400, "POST", id+"/refreshes", map[string]any{"duration": 3601})
	if left := ends(); left < 50*time.Minute {
		t.Error("refreshed for an hour, ends in", left)
	}
	step(204, "POST", id+"/timeout", map[string]any{"timeout": 100})
	step(400, "POST", id+"/timeout", nil)
	if left := ends(); left > 101*time.Second {
		t.Error("shortened to 100 s, ends in", left)
	}
	step(400, "POST", id+"/fork", map[string]any{"count": 101})
	step(400, "POST", id+"/fork", map[string]any{"count": 0})
	step(204, "POST", id+"/pause", map[string]any{"memory": false})
	step(201, "POST", id+"/connect", map[string]any{"timeout": 60})
	step(201, "POST", id+"/snapshots", map[string]any{"name": "snap"})
	step(400, "POST", id+"/snapshots", map[string]any{"name": "../x"})
	copied := w.create(map[string]any{"templateID": "snap"})
	if copied.SandboxID == m.SandboxID || copied.EnvdAccessToken == m.EnvdAccessToken {
		t.Error("a copy is the same:", copied)
	}
	step(409, "DELETE", "/templates/snap", nil)
	step(204, "DELETE", "/sandboxes/"+copied.SandboxID, nil)
	step(204, "DELETE", "/templates/snap", nil)
	step(404, "DELETE", "/templates/snap", nil)
	step(204, "POST", id+"/pause", nil)
	step(204, "DELETE", id, nil)
	step(404, "DELETE", id, nil)
	step(502, "GET", "/health", nil, token...)
}

func TestSandbox_whose_time_is_over_pauses_and_is_resumed_by_traffic(t *testing.T) {
	w := begin(t, nil, nil)
	m := w.create(map[string]any{"timeout": 1, "autoPause": true, "autoResume": map[string]any{"enabled": true}})
	stays := w.create(map[string]any{"timeout": 1, "autoPause": true})
	for _, s := range []made{m, stays} {
		w.until("paused", func() bool {
			return strings.Contains(w.ask("GET", "/sandboxes/"+s.SandboxID, nil).body, `"state":"paused"`)
		})
	}
	ask := func(s made, token string) answer {
		return w.ask("GET", "/envs", nil, "E2b-Sandbox-Id", s.SandboxID, "X-Access-Token", token)
	}
	if a := ask(m, stays.EnvdAccessToken); a.status != http.StatusUnauthorized {
		t.Error(a)
	}
	if a := w.ask("GET", "/health", nil, "E2b-Sandbox-Id", m.SandboxID); a.status != http.StatusBadGateway {
		t.Error("whoever has no token must not resume it:", a)
	}
	if a := ask(m, m.EnvdAccessToken); a.status != http.StatusOK {
		t.Error(a)
	}
	if a := ask(stays, stays.EnvdAccessToken); a.status != http.StatusBadGateway {
		t.Error("resumed unasked:", a)
	}
}

func TestSandbox_whose_pause_keeps_the_disk_only_boots_when_it_is_resumed(t *testing.T) {
	w := begin(t, nil, nil)
	slow, fast := w.create(map[string]any{"timeout": 1, "autoPause": true, "autoPauseMemory": false}), w.create(map[string]any{"timeout": 1, "autoPause": true, "autoPauseMemory": false})
	for _, m := range []made{slow, fast} {
		w.until("paused", func() bool {
			return strings.Contains(w.ask("GET", "/sandboxes/"+m.SandboxID, nil).body, `"state":"paused"`)
		})
		// It may still be shutting down: nothing makes its time longer any more, and whoever connects waits.
		if a := w.ask("POST", "/sandboxes/"+m.SandboxID+"/timeout", map[string]any{"timeout": 600}); a.status != http.StatusNotFound {
			t.Error(a)
		}
		stopped := func() bool {
			r, err := w.host.State.Get(m.SandboxID)
			return err == nil && r.Phase == state.Stopped && r.Snapshot == ""
		}
		if m == slow {
			w.until("stopped, without a snapshot of its memory", stopped)
		}
		if a := w.ask("POST", "/v2/sandboxes/"+m.SandboxID+"/connect", map[string]any{"timeout": 60}); a.status != http.StatusCreated {
			t.Error(a)
		}
		if a := w.ask("GET", "/health", nil, "E2b-Sandbox-Id", m.SandboxID); a.status != http.StatusNoContent {
			t.Error(a)
		}
	}
}

// The agents of guests in memory have no attributes of files, as those of sandboxes that sleep since before.
func TestMetadata_that_an_older_agent_drops_are_an_error(t *testing.T) {
	w := begin(t, nil, nil)
	m := w.create(map[string]any{})
	put := func(header ...string) answer {
		return w.ask("POST", "/files?path=f", "text", append([]string{"X-API-KEY", "", "E2b-Sandbox-Id", m.SandboxID, "X-Access-Token", m.EnvdAccessToken, "Content-Type", "application/octet-stream"}, header...)...)
	}
	if a := put("X-Metadata-A", "b"); a.status != http.StatusBadRequest || !strings.Contains(a.body, `"code":400`) || !strings.Contains(a.body, "too old") {
		t.Error(a)
	}
	if a := put(); a.status != http.StatusOK {
		t.Error(a)
	}
}
