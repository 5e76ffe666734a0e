package api_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/internal/test/vouch"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// issued returns an issuer, identities with rules for it, and a function that replaces these.
func issued(t *testing.T, rules string) (*vouch.Issuer, *identity.Store, func(rules string)) {
	t.Helper()
	issuer, file := vouch.NewIssuer(t), filepath.Join(t.TempDir(), "identities.yaml")
	write := func(rules string) {
		t.Helper()
		text := fmt.Sprintf("issuers: [{name: idp, url: '%s', audience: drowse, ca: '%s', rules: [%s]}]\n", issuer.URL, issuer.CA, rules)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(rules)
	ids, err := identity.Open(identity.Options{File: file})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.Close)
	return issuer, ids, write
}

func TestStream_of_an_identity_ends_with_its_own_token_and_with_its_rule(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	s.vms.set(func() {
		s.vms.exec = func(ctx context.Context, _ *fakeguest.Process) int { <-ctx.Done(); return 1 }
	})
	const blue = "{match: {sub: x, team: blue}, all_owners: true, scopes: exec}"
	issuer, ids, write := issued(t, "{match: {sub: x, team: red}, all_owners: true, scopes: exec}, "+blue)
	address, _ := overTCP(t, s, api.Options{Identities: ids})
	begin := func(token string) *stream {
		t.Helper()
		c, _, err := websocket.Dial(t.Context(), "ws://"+address+"/v1/sandboxes/a/exec", &websocket.DialOptions{Subprotocols: []string{wire.StreamProtocol, wire.BearerProtocol + token}})
		if err != nil {
			t.Fatal(err)
		}
		out := &stream{t, c}
		out.say(startOf(wire.ExecStart{Command: []string{"run"}}))
		out.started()
		return out
	}
	// Of one identity at the same time: each ends with its own token.
	until := time.Now().Add(time.Hour).Unix()
	long := begin(issuer.Token("x", map[string]any{"team": "red", "exp": until}))
	other := begin(issuer.Token("x", map[string]any{"team": "blue", "exp": until}))
	brief := begin(issuer.Token("x", map[string]any{"team": "blue", "exp": time.Now().Add(2 * time.Second).Unix()}))
	if code := brief.closed(); code != websocket.StatusPolicyViolation {
		t.Errorf("after its token it is closed with %d", code)
	}
	ended, last := make(chan websocket.StatusCode, 1), make(chan websocket.StatusCode, 1)
	go func() { ended <- long.closed() }()
	go func() { last <- other.closed() }()
	if err := long.Ping(t.Context()); err != nil {
		t.Errorf("the other one: %v", err)
	}
	write(blue)
	if code := <-ended; code != websocket.StatusPolicyViolation {
		t.Errorf("after its rule it is closed with %d", code)
	}
	if err := other.Ping(t.Context()); err != nil {
		t.Errorf("the one whose rule is still there: %v", err)
	}
	write("{match: {sub: x}, all_owners: true, scopes: read}")
	if code := <-last; code != websocket.StatusPolicyViolation {
		t.Errorf("after all rules it is closed with %d", code)
	}
}

func TestIssuer_that_is_down_is_told_from_a_bad_token_and_keeps_no_other_token_out(t *testing.T) {
	issuer, ids, _ := issued(t, "{match: {sub: x}, owner: us, scopes: read}")
	issuer.Answer(func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusBadGateway); return true })
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	secret, err := known.Create(tokens.Token{Name: "static", Scopes: tokens.All()})
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	server := api.New(api.Options{Host: &sandbox.Host{}, Tokens: known, Identities: ids, Log: slog.New(slog.NewTextHandler(&log, nil))})
	ask := func(token string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodGet, "http://localhost/v1/version", nil)
		bearer(token)(r)
		w := httptest.NewRecorder()
		server.ServeHTTP(w, r)
		return w
	}
	down := ask(issuer.Token("x", nil))
	if wait, err := strconv.Atoi(down.Header().Get("Retry-After")); down.Code != 503 || err != nil || wait < 1 || !strings.Contains(down.Body.String(), `"code":"issuer"`) || strings.Contains(down.Body.String(), "Bad Gateway") {
		t.Errorf("%d, again after %q: %s", down.Code, down.Header().Get("Retry-After"), down.Body)
	}
	if w := ask(secret); w.Code != 200 {
		t.Errorf("a token of the server: %d %s", w.Code, w.Body)
	}
	if w := ask("eyJh.eyJh.x"); w.Code != 401 || w.Header().Get("WWW-Authenticate") == "" {
		t.Errorf("what is no token: %d %s", w.Code, w.Body)
	}
	if !strings.Contains(log.String(), "the issuer idp of the token does not answer") {
		t.Errorf("the log: %s", &log)
	}
}

func TestIdempotency_keys_are_an_identitys_own_whatever_token_it_shows(t *testing.T) {
	m := newMachines(t)
	issuer, ids, _ := issued(t, "{match: {sub: '*'}, owner: us, scopes: 'read,create'}")
	server := api.New(api.Options{Host: m.host, Identities: ids})
	create := func(subject string, more map[string]any) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodPost, "http://localhost/v1/sandboxes", strings.NewReader(`{"spec":{"name":"a","image":"test"}}`))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Idempotency-Key", "k")
		bearer(issuer.Token(subject, more))(r)
		w := httptest.NewRecorder()
		server.ServeHTTP(w, r)
		return w
	}
	if w := create("x", nil); w.Code != 201 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	if w := create("x", map[string]any{"jti": "another token"}); w.Code != 201 || w.Header().Get("Idempotency-Replayed") == "" {
		t.Errorf("with the next token: %d %s", w.Code, w.Body)
	}
	if w := create("y", nil); w.Code != 409 {
		t.Errorf("somebody else: %d %s", w.Code, w.Body)
	}
}
