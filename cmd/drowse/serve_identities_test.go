//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/vouch"
)

// spoken is what a program has written so far.
type spoken struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (s *spoken) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *spoken) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// find waits for what an expression finds.
func (s *spoken) find(t *testing.T, expr string, ended <-chan int) string {
	t.Helper()
	re := regexp.MustCompile(expr)
	for {
		if m := re.FindStringSubmatch(s.String()); m != nil {
			return m[1]
		}
		select {
		case code := <-ended:
			t.Fatalf("it ended with %d: %s", code, s)
		case <-t.Context().Done():
			t.Fatal("it does not say it")
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestServe_lets_in_for_whom_an_issuer_or_an_authority_vouches(t *testing.T) {
	noContexts(t)
	dir, _, _ := inMemory(t)
	issuer, servers, clients := vouch.NewIssuer(t), vouch.NewAuthority(t), vouch.NewAuthority(t)
	rules := filepath.Join(t.TempDir(), "identities.yaml")
	if err := os.WriteFile(rules, fmt.Appendf(nil, `
issuers:
- name: idp
  url: %s
  audience: drowse
  ca: %s
  rules:
  - match: {sub: "ci:*"}
    owner: ci
    scopes: read,exec,files,create
certificates:
  rules:
  - match: {uri: "spiffe://prod/ns/ci/sa/*"}
    owner: ci
    scopes: read
`, issuer.URL, issuer.CA), 0o644); err != nil {
		t.Fatal(err)
	}
	cert, key := vouch.Files(t, servers.Server())
	ctx, cancel := context.WithCancel(t.Context())
	var log spoken
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, []string{
			"--state", dir, "serve", "--pool", "0", "--listen", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key,
			"--identities", rules, "--client-ca", clients.File, "--e2b", "127.0.0.1:0", "--e2b-cert", cert, "--e2b-key", key,
		}, io.Discard, &log)
	}()
	defer func() {
		cancel()
		if code := <-ended; code != 0 {
			t.Errorf("it ended with %d: %s", code, &log)
		}
	}()
	base := "https://" + log.find(t, `answering"? at=(127\S+)`, ended)
	e2b := "https://" + log.find(t, `E2B's clients"? at=(127\S+)`, ended)

	builder := clients.Client(&x509.Certificate{URIs: vouch.URI(t, "spiffe://prod/ns/ci/sa/builder")})
	with := func(show ...tls.Certificate) *http.Client {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: servers.Pool(), Certificates: show}, ForceAttemptHTTP2: len(show) > 0}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	ask := func(c *http.Client, method, url, body string, header ...string) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if body != "" {
			req.Header.Set("Content-Type", "application/json")
		}
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	plain, shows := with(), with(builder)
	foreign := with(vouch.NewAuthority(t).Client(&x509.Certificate{URIs: vouch.URI(t, "spiffe://prod/ns/ci/sa/builder")}))
	good := "Bearer " + issuer.Token("ci:app\n", nil)
	version := base + "/v1/version"
	for name, tc := range map[string]struct {
		client *http.Client
		method string
		url    string
		body   string
		header []string
		code   int
		says   string
	}{
		"nobody":                   {plain, "GET", version, "", nil, 401, "unauthorized"},
		"a token":                  {plain, "GET", version, "", []string{"Authorization", good}, 200, `"owner":"ci"`},
		"a token for others":       {plain, "GET", version, "", []string{"Authorization", "Bearer " + issuer.Token("ci:app", map[string]any{"aud": "x"})}, 401, "audience"},
		"a token without a rule":   {plain, "GET", version, "", []string{"Authorization", "Bearer " + issuer.Token("x", nil)}, 403, "idp:x may do nothing here"},
		"a certificate":            {shows, "GET", version, "", nil, 200, `"scopes":["read"]`},
		"a token beside it":        {shows, "GET", version, "", []string{"Authorization", good}, 200, `"create"`},
		"a foreign certificate":    {foreign, "GET", version, "", nil, 401, "certificate is refused"},
		"a token beside that":      {foreign, "GET", version, "", []string{"Authorization", good}, 200, `"create"`},
		"beyond the certificate":   {shows, "POST", base + "/v1/sandboxes", `{"spec":{"name":"x","image":"test"}}`, nil, 403, "cert:uri:spiffe://prod/ns/ci/sa/builder may only read"},
		"a key of the issuer":      {plain, "GET", e2b + "/v2/sandboxes", "", []string{"X-API-KEY", strings.TrimPrefix(good, "Bearer ")}, 200, "["},
		"a bearer of the issuer":   {plain, "GET", e2b + "/v2/sandboxes", "", []string{"Authorization", good}, 200, "["},
		"a key without a rule":     {plain, "GET", e2b + "/v2/sandboxes", "", []string{"X-API-KEY", issuer.Token("x", nil)}, 403, "idp:x may do nothing here"},
		"an expired key":           {plain, "GET", e2b + "/v2/sandboxes", "", []string{"X-API-KEY", issuer.Token("ci:x", map[string]any{"exp": 1})}, 401, "has expired"},
		"a certificate at E2B's":   {shows, "GET", e2b + "/v2/sandboxes", "", nil, 200, "["},
		"a foreign one at E2B's":   {foreign, "GET", e2b + "/v2/sandboxes", "", nil, 401, "certificate is refused"},
		"a key beside that":        {foreign, "GET", e2b + "/v2/sandboxes", "", []string{"Authorization", good}, 200, "["},
		"beyond it at E2B's":       {shows, "POST", e2b + "/v2/sandboxes", `{"templateID":"test"}`, nil, 403, "does not allow"},
		"a page's at E2B's":        {shows, "GET", e2b + "/v2/sandboxes", "", []string{"Origin", "https://evil.example"}, 403, "needs a key"},
		"neither at E2B's":         {plain, "GET", e2b + "/v2/sandboxes", "", nil, 401, "key is missing"},
		"a sandbox of the owner":   {plain, "POST", base + "/v1/sandboxes", `{"spec":{"name":"dev","image":"test"}}`, []string{"Authorization", good}, 201, `"owner":"ci"`},
		"health, with a bad token": {plain, "GET", base + "/healthz", "", []string{"Authorization", "Bearer " + issuer.Token("x", nil)}, 200, "ok"},
	} {
		if code, text := ask(tc.client, tc.method, tc.url, tc.body, tc.header...); code != tc.code || !strings.Contains(text, tc.says) {
			t.Errorf("%s: %d %s, want %d with %s", name, code, text, tc.code, tc.says)
		}
	}
	if text := log.String(); !strings.Contains(text, "by=idp:ci:app%0A") || !strings.Contains(text, "by=idp:x ") {
		t.Errorf("the log does not say who asked: %s", text)
	}
	if code, _, text := drowse(t, dir, "audit", "dev", "-o", "json"); code != 0 {
		t.Errorf("the trail: %d %s", code, text)
	}

	// The command line shows a token that is replaced, and a certificate.
	roots, _ := http.DefaultTransport.(*http.Transport)
	roots.TLSClientConfig = &tls.Config{RootCAs: servers.Pool()}
	defer func() { roots.TLSClientConfig = nil }()
	token := filepath.Join(t.TempDir(), "token")
	t.Setenv("DROWSE_TOKEN_FILE", token)
	for _, tc := range []struct {
		text string
		code int
		says string
	}{
		{good[len("Bearer "):] + "\n", 0, "dev"},
		{issuer.Token("x", nil), exitFailed, "may do nothing here"},
		{issuer.Token("ci:other", nil), 0, "dev"},
		{"", exitFailed, "has no token"},
		{"a b", exitFailed, "has no token"},
	} {
		if err := os.WriteFile(token, []byte(tc.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if code, out, errs := far(t, base, "ps", "-a"); code != tc.code || !strings.Contains(out+errs, tc.says) {
			t.Errorf("with the token %.10q: %d %s %s", tc.text, code, out, errs)
		}
	}
	if err := os.WriteFile(token, []byte(good[len("Bearer "):]), 0o600); err != nil {
		t.Fatal(err)
	}
	// Over a WebSocket.
	if code, out, errs := far(t, base, "exec", "dev", "both"); code != 0 || !strings.Contains(out, "out") {
		t.Errorf("a command: %d %s %s", code, out, errs)
	}
	t.Setenv("DROWSE_TOKEN", "drowse_x")
	if code, _, errs := far(t, base, "ps"); code != exitUsage {
		t.Errorf("two tokens: %d %s", code, errs)
	}
	t.Setenv("DROWSE_TOKEN", "")
	t.Setenv("DROWSE_TOKEN_FILE", "")
	mine, mineKey := vouch.Files(t, builder)
	var out, errs strings.Builder
	if code := run(t.Context(), []string{"context", "add", "prod", base, "--client-cert", mine}, &out, &errs); code != exitUsage {
		t.Errorf("a certificate without its key: %d %s", code, &errs)
	}
	if code := run(t.Context(), []string{"context", "add", "prod", base, "--client-cert", mine, "--client-key", mineKey}, &out, &errs); code != 0 {
		t.Errorf("%d %s", code, &errs)
	}
	if code, out, errs := far(t, "prod", "ps", "-a"); code != 0 || !strings.Contains(out, "dev") {
		t.Errorf("with a certificate: %d %s %s", code, out, errs)
	}
	vouch.Replace(t, clients.Client(&x509.Certificate{Subject: pkix.Name{CommonName: "x"}}), mine, mineKey)
	if code, _, errs := far(t, "prod", "ps"); code != exitFailed || !strings.Contains(errs, "cert:cn:x may do nothing here") {
		t.Errorf("with one that was replaced: %d %s", code, errs)
	}

	// Certificates and authorities are read again, also for connections that go on.
	other := vouch.NewAuthority(t)
	text, err := os.ReadFile(other.File)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(clients.File, text, 0o600); err != nil {
		t.Fatal(err)
	}
	vouch.Replace(t, other.Server(), cert, key)
	for code := 200; code != 401; time.Sleep(10 * time.Millisecond) {
		code, _ = ask(shows, "GET", version, "")
	}
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: other.Pool(), Certificates: []tls.Certificate{other.Client(&x509.Certificate{URIs: builder.Leaf.URIs})}}, DisableKeepAlives: true}
	for {
		resp, err := (&http.Client{Transport: tr}).Get(version)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				break
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestServe_identities_that_could_let_in_nobody_or_anybody_are_refused(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("DROWSE_AGENT", os.Args[0])
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, ca := write("good", "issuers: []\n", 0o600), vouch.NewAuthority(t)
	cert, key := vouch.Files(t, ca.Server())
	listen := []string{"--listen", "127.0.0.1:0"}
	secure := append(listen[:2:2], "--tls-cert", cert, "--tls-key", key)
	for name, args := range map[string][]string{
		"without a listener":              {"--identities", good},
		"a file that is not there":        append(listen[:2:2], "--identities", dir+"/none"),
		"a file with mistakes":            append(listen[:2:2], "--identities", write("bad", "issuer: x\n", 0o600)),
		"a file that others write":        append(listen[:2:2], "--identities", write("open", "issuers: []\n", 0o666)),
		"an authority without identities": append(secure[:6:6], "--client-ca", ca.File),
		"an authority without TLS":        append(listen[:2:2], "--identities", good, "--client-ca", ca.File),
		"an authority without rules":      append(secure[:6:6], "--identities", good, "--client-ca", ca.File),
		"a key without a certificate":     append(listen[:2:2], "--tls-key", key),
	} {
		var stderr bytes.Buffer
		if code := run(t.Context(), append([]string{"--state", dir, "serve", "--pool", "0"}, args...), io.Discard, &stderr); code != exitUsage {
			t.Errorf("%s: %d, %s", name, code, &stderr)
		}
	}
}
