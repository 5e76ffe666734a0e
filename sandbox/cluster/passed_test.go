package cluster_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/cluster"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// door is a host that others reach, with servers for clients.
type door struct {
	*host
	id      *peer.Identity
	peers   *peer.Peers
	tokens  *tokens.Store
	api     *api.Server
	url     string       // of the API
	at      net.Listener // for other hosts
	passed  map[string]http.Handler
	endDoor func() // ends what other hosts reach
}

// newDoor starts a host with an address. Its token "root" has all rights.
func newDoor(t testing.TB, name string, store blob.Store, o cluster.Options) *door {
	t.Helper()
	d := &door{}
	var err error
	d.id, err = peer.NewIdentity(name)
	must(t, err)
	d.at, o.Address, err = peer.Listen("127.0.0.1:0")
	must(t, err)
	o.Key = d.id.Key()
	d.host = newHost(t, name, store, o)
	d.peers = peer.New(peer.Options{Identity: d.id, Directory: d.node})
	d.node.Reach(d.peers)
	d.tokens = tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	d.api = api.New(api.Options{Host: d.Host, Tokens: d.tokens, Peers: d.peers, Cluster: d.node.Catalog(d.peers)})
	d.passed = d.node.PeerHandlers()
	d.passed[api.PeerService] = d.api
	front := httptest.NewServer(d.api)
	d.url = front.URL
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.peers.Serve(ctx, d.at, d.passed) }()
	d.endDoor = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		front.CloseClientConnections()
		front.Close()
		d.endDoor()
		d.peers.Close()
	})
	return d
}

// as returns a client with a new token.
func (d *door) as(name, owner string, scopes ...tokens.Scope) *client.Client {
	d.t.Helper()
	if scopes == nil {
		scopes = []tokens.Scope{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}
	}
	secret, err := d.tokens.Create(tokens.Token{Name: name, Owner: owner, Scopes: scopes})
	must(d.t, err)
	tr := &http.Transport{}
	d.t.Cleanup(tr.CloseIdleConnections)
	return client.New(d.url, secret, &http.Client{Transport: tr})
}

// own makes a sandbox of an owner, which runs here and is shared.
func (d *door) own(name, owner string) {
	d.t.Helper()
	d.create(name)
	_, err := d.State.SetMetadata(d.t.Context(), name, func(m *spec.Metadata, _ error) error { m.Owner = owner; return nil })
	must(d.t, err)
	d.sleep(name)
	d.wake(name)
}

func init() {
	commands["echo-in"] = func(_ context.Context, p *fakeguest.Process) int {
		if _, err := io.Copy(p.Stdout, p.Stdin); err != nil {
			return 1
		}
		return 7
	}
	commands["wait"] = func(ctx context.Context, p *fakeguest.Process) int {
		fmt.Fprintln(p.Stdout, "waiting")
		<-ctx.Done()
		return 0
	}
}

func TestApi_of_any_host_answers_for_a_sandbox_that_another_one_runs(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	b.own("box", "alice")
	c := a.as("ci", "alice")
	ctx := t.Context()
	box := c.Sandbox("box")

	done, err := c.Exec(ctx, "box", wire.Exec{Command: []string{"count"}})
	must(t, err)
	if string(done.Stdout) != "1" {
		t.Errorf("exec: %+v", done)
	}
	large := bytes.Repeat([]byte("drowse "), 1<<18)
	if _, err := box.Files().WriteFile(ctx, "/root/large", bytes.NewReader(large), client.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	var back bytes.Buffer
	if _, err := box.Files().ReadFile(ctx, "/root/large", &back); err != nil || !bytes.Equal(back.Bytes(), large) {
		t.Errorf("%d bytes come back of %d: %v", back.Len(), len(large), err)
	}
	var out bytes.Buffer
	status, err := box.Exec(ctx, client.Cmd{ExecStart: wire.ExecStart{Command: []string{"echo-in"}}, IO: client.IO{Stdin: bytes.NewReader(large), Stdout: &out}})
	if status == nil || status.ExitCode != 7 || !bytes.Equal(out.Bytes(), large) {
		t.Errorf("a stream: %+v, %d bytes, %v", status, out.Len(), err)
	}
	row, err := c.Get(ctx, "box")
	if err != nil || row.Status != records.Running {
		t.Errorf("%+v, %v", row, err)
	}
	if row, _, err := c.GetOrCreate(ctx, records.Request{Spec: spec.VM{Name: "box", Image: sandboxtest.Image}}); !errors.Is(err, spec.ErrElsewhere) {
		t.Errorf("a creation of one that is there: %+v, %v", row, err)
	}
	if a.phase("box") != "" {
		t.Error("a has it as well")
	}
	// What was done is in the trail of its host, by the name of the one who asked.
	var trail []string
	must(t, b.as("ci2", "alice").Sandbox("box").Audit(ctx, client.AuditOptions{}, func(m json.RawMessage) error {
		trail = append(trail, string(m))
		return nil
	}))
	if n := strings.Count(strings.Join(trail, "\n"), `"api:ci"`); n < 4 {
		t.Errorf("%d entries by him: %s", n, trail)
	}
	if _, err := c.Sleep(ctx, "box", spec.SleepOptions{Durable: true}); err != nil {
		t.Error(err)
	}
	a.counts("box", "2")
	// b has an old copy of it, and reads go to a all the same.
	if row, err := b.as("ci", "alice").Get(ctx, "box"); err != nil || row.Status != records.Running {
		t.Errorf("%+v, %v", row, err)
	}
	if _, err := b.as("ci3", "alice").Delete(ctx, "box"); err != nil || a.phase("box") != "" {
		t.Errorf("removed from b: %v; on a it is %q", err, a.phase("box"))
	}
}

// said is an answer without what differs by its host.
func (d *door) said(method, path, token, body string) string {
	d.t.Helper()
	r, err := http.NewRequestWithContext(d.t.Context(), method, d.url+path, strings.NewReader(body))
	must(d.t, err)
	r.Header.Set("Authorization", "Bearer "+token)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	got, err := (&http.Client{Transport: tr}).Do(r)
	must(d.t, err)
	defer got.Body.Close()
	text, err := io.ReadAll(got.Body)
	must(d.t, err)
	return fmt.Sprintf("%d %s", got.StatusCode, text)
}

func TestApi_tells_another_owner_the_same_at_each_host(t *testing.T) {
	store := dir(t)
	o := cluster.Options{TTL: 3 * time.Second}
	a, b := newDoor(t, "a", store, o), newDoor(t, "b", store, cluster.Options{})
	b.own("box", "alice")
	scopes := tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}
	token := map[*door]string{}
	for _, d := range []*door{a, b} {
		var err error
		token[d], err = d.tokens.Create(tokens.Token{Name: "bob", Owner: "bob", Scopes: scopes})
		must(t, err)
	}
	all := func(when string) {
		t.Helper()
		for _, ask := range [][3]string{
			{"GET", "", ""}, {"GET", "/history", ""}, {"GET", "/console", ""}, {"GET", "/policy", ""}, {"GET", "/exec", ""},
			{"POST", "/exec", `{"command":["count"]}`}, {"POST", "/sleep", `{}`}, {"PATCH", "", `{"purpose":"x"}`}, {"DELETE", "", ""},
			{"GET", "/files?path=/run/count", ""},
		} {
			here, there := a.said(ask[0], "/v1/sandboxes/box"+ask[1], token[a], ask[2]), b.said(ask[0], "/v1/sandboxes/box"+ask[1], token[b], ask[2])
			none := strings.ReplaceAll(a.said(ask[0], "/v1/sandboxes/nix"+ask[1], token[a], ask[2]), "nix", "box")
			if here != there || !strings.HasPrefix(here, "404 ") {
				t.Errorf("%s: %s %s: %s\nat its host: %s", when, ask[0], ask[1], here, there)
			}
			if here != none {
				t.Errorf("%s: %s %s: %s\nof none: %s", when, ask[0], ask[1], here, none)
			}
		}
	}
	all("it runs on b")
	b.sleep("box")
	all("it sleeps in the store")
	if a.phase("box") != "" {
		t.Error("a stranger has got it to a")
	}
	_, err := b.Sandbox("box").Wake(t.Context())
	must(t, err)
	must(t, b.tokens.Remove("bob"))
	b.endDoor()
	// Its host does not answer. Who reaches it is told so.
	here := a.said("POST", "/v1/sandboxes/box/exec", token[a], `{"command":["count"]}`)
	if !strings.HasPrefix(here, "404 ") {
		t.Error("its host does not answer:", here)
	}
	alice, err := a.tokens.Create(tokens.Token{Name: "alice", Owner: "alice", Scopes: scopes})
	must(t, err)
	for _, ask := range [][3]string{{"POST", "/exec", `{"command":["count"]}`}, {"GET", "", ""}} {
		if here := a.said(ask[0], "/v1/sandboxes/box"+ask[1], alice, ask[2]); !strings.HasPrefix(here, "503 ") || !strings.Contains(here, `"unreachable"`) {
			t.Error("to its owner:", here)
		}
	}
}

func TestApi_stream_through_another_host_ends_with_its_token_and_its_host(t *testing.T) {
	store := dir(t)
	o := cluster.Options{TTL: 3 * time.Second}
	a, b := newDoor(t, "a", store, o), newDoor(t, "b", store, o)
	b.own("box", "")
	start := func(c *client.Client) *client.Session {
		t.Helper()
		r, w := io.Pipe()
		t.Cleanup(func() { r.Close() })
		s, err := c.Sandbox("box").Start(t.Context(), client.Cmd{ExecStart: wire.ExecStart{Command: []string{"wait"}}, IO: client.IO{Stdout: w}})
		must(t, err)
		line := make([]byte, len("waiting\n"))
		_, err = io.ReadFull(r, line)
		must(t, err)
		return s
	}
	s := start(a.as("leaves", ""))
	must(t, a.tokens.Remove("leaves"))
	if _, err := s.Wait(); err == nil {
		t.Error("the stream of a token that was removed has ended well")
	}
	c := a.as("stays", "")
	s = start(c)
	// The host dies: what it serves, its node, its VM.
	b.endDoor()
	b.stop()
	b.stop = nil
	if _, err := s.Wait(); err == nil {
		t.Error("the stream from a host that has died has ended well")
	}
	_, err := c.Exec(t.Context(), "box", wire.Exec{Command: []string{"count"}})
	if !errors.Is(err, spec.ErrUnreachable) {
		t.Error("at once:", err)
	}
	eventually(t, "a wakes it", func() bool {
		done, err := c.Exec(t.Context(), "box", wire.Exec{Command: []string{"count"}})
		return err == nil && string(done.Stdout) == "1" && a.phase("box") == state.Running
	})
}

func TestApi_follows_a_sandbox_that_has_gone_from_host_to_host(t *testing.T) {
	store := dir(t)
	a, b, c := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{}), newDoor(t, "c", store, cluster.Options{})
	b.own("box", "")
	client := a.as("ci", "")
	for i, from := range []*door{b, c, b} {
		from.counts("box", fmt.Sprint(2*i+1))
		done, err := client.Exec(t.Context(), "box", wire.Exec{Command: []string{"count"}})
		if err != nil || string(done.Stdout) != fmt.Sprint(2*i+2) {
			t.Fatalf("on %s: %+v, %v", from.name, done, err)
		}
		from.sleep("box")
	}
	if a.phase("box") != "" {
		t.Error("a has it")
	}
}

// A host may do to a sandbox what its callers may. It gets nothing else, and no rights of a user of the socket.
func TestApi_gives_another_host_sandboxes_alone(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	b.own("box", "")
	send := func(method, path, body string, is peer.Passed) (code int) {
		t.Helper()
		var w httptest.ResponseRecorder
		w.Body = &bytes.Buffer{}
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		answered, err := a.peers.Pass(&w, r, is)
		must(t, err)
		if !answered {
			t.Fatal("no answer")
		}
		return w.Code
	}
	root := peer.Caller{Name: "uid 0", Scopes: tokens.All().Words()}
	is := peer.Passed{Service: api.PeerService, Sandbox: "box", Caller: root}
	if code := send("GET", "/v1/sandboxes/box", "", is); code != http.StatusOK {
		t.Error("its sandbox:", code)
	}
	for _, path := range []string{"/v1/sandboxes", "/v1/snapshots", "/v1/host", "/v1/events", "/v1/images", "/v1/version"} {
		if code := send("GET", path, "", is); code != http.StatusForbidden {
			t.Errorf("%s: %d", path, code)
		}
	}
	if code := send("PATCH", "/v1/sandboxes/box", `{"persist":{"promote":[{"from":"/root","to":"/etc"}]}}`, is); code != http.StatusBadRequest {
		t.Error("a directory of the host:", code)
	}
	is.Caller.Scopes = []string{"superuser"}
	if code := send("GET", "/v1/sandboxes/box", "", is); code != http.StatusForbidden {
		t.Error("an unknown right:", code)
	}
	is.Caller.Scopes = []string{"read"}
	if code := send("POST", "/v1/sandboxes/box/exec", `{"command":["count"]}`, is); code != http.StatusForbidden {
		t.Error("more than its rights:", code)
	}
	is.Caller = root
	// One that b does not share: a cannot even be led there.
	b.create("private")
	var lost httptest.ResponseRecorder
	if answered, err := a.peers.Pass(&lost, httptest.NewRequestWithContext(t.Context(), "GET", "/v1/sandboxes/private", nil), peer.Passed{Service: api.PeerService, Sandbox: "private", Caller: root}); answered || err != nil {
		t.Error("one that is not shared:", answered, err)
	}
	if !b.peers.Elsewhere(t.Context(), "private") || b.peers.Elsewhere(t.Context(), "box") {
		t.Error("b serves what it does not share, or not what it does")
	}
	// A request for one sandbox under the name of another.
	a.own("mine", "")
	var w httptest.ResponseRecorder
	if _, err := a.peers.Pass(&w, httptest.NewRequestWithContext(t.Context(), "GET", "/v1/sandboxes/mine", nil), is); !errors.Is(err, spec.ErrUnreachable) {
		t.Error("another sandbox than it asserts:", err)
	}
}

func TestCreation_of_a_name_that_the_cluster_has(t *testing.T) {
	store := dir(t)
	a, b := newDoor(t, "a", store, cluster.Options{}), newDoor(t, "b", store, cluster.Options{})
	b.own("box", "alice")
	b.sleep("box")
	want(t, "one that sleeps in the store", func() error {
		_, err := a.as("one", "alice").Create(t.Context(), records.Request{Spec: spec.VM{Name: "box", Image: sandboxtest.Image}})
		return err
	}(), sandbox.ErrExists)
	_, _, err := a.as("two", "bob").GetOrCreate(t.Context(), records.Request{Spec: spec.VM{Name: "box", Image: sandboxtest.Image}})
	want(t, "that of another owner", err, sandbox.ErrExists)
	row, made, err := a.as("three", "alice").GetOrCreate(t.Context(), records.Request{Spec: spec.VM{Name: "box", Image: sandboxtest.Image}})
	if err != nil || made || row.Owner != "alice" {
		t.Errorf("%+v, %v, %v", row, made, err)
	}
}
