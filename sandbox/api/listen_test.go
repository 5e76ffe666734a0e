package api_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

// serverTLS makes a self-signed certificate for localhost.
func serverTLS(t *testing.T) (*tls.Config, *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	is := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, is, is, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}}}, pool
}

func TestTCP_is_refused_without_tokens_and_without_TLS_where_others_reach_it(t *testing.T) {
	none := tokens.Open(filepath.Join(t.TempDir(), "none"))
	some := tokens.Open(filepath.Join(t.TempDir(), "some"))
	if _, err := some.Create(tokens.Token{Name: "a", Scopes: tokens.Scopes{tokens.ScopeRead}}); err != nil {
		t.Fatal(err)
	}
	config, _ := serverTLS(t)
	for name, tc := range map[string]struct {
		tcp    api.TCP
		tokens *tokens.Store
		ok     bool
	}{
		"loopback without tokens":             {api.TCP{Address: "127.0.0.1:0"}, none, false},
		"loopback with a token":               {api.TCP{Address: "127.0.0.1:0"}, some, true},
		"all addresses":                       {api.TCP{Address: "0.0.0.0:0"}, some, false},
		"all addresses by no host":            {api.TCP{Address: ":0"}, some, false},
		"all addresses, said to be encrypted": {api.TCP{Address: "0.0.0.0:0", Plain: true}, some, true},
		"all addresses with TLS":              {api.TCP{Address: "0.0.0.0:0", TLS: config}, some, true},
		"TLS without tokens":                  {api.TCP{Address: "127.0.0.1:0", TLS: config}, none, false},
		"no port":                             {api.TCP{Address: "127.0.0.1"}, some, false},
	} {
		l, err := tc.tcp.Listen(tc.tokens)
		if err == nil {
			l.Close()
		}
		if (err == nil) != tc.ok || err != nil && !errors.Is(err, api.ErrListen) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUnixSocket_refuses_another_user(t *testing.T) {
	s := serve(t)
	c := statetest.DialAs(t, 65534, unix.SOCK_STREAM, s.path)
	if _, err := io.WriteString(c, "GET /v1/sandboxes HTTP/1.1\r\nHost: drowse\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusForbidden || !strings.Contains(string(text), "user 65534 may not use this socket") {
		t.Errorf("another user gets %s %s, %v", res.Status, text, err)
	}
}

func TestTCP_callers_may_do_what_their_tokens_say_until_these_are_taken_away(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	known := tokens.Open(filepath.Join(filepath.Dir(s.path), tokens.File))
	read, err := known.Create(tokens.Token{Name: "reader", Scopes: tokens.Scopes{tokens.ScopeRead}})
	if err != nil {
		t.Fatal(err)
	}
	write, err := known.Create(tokens.Token{Name: "writer", Scopes: tokens.All()})
	if err != nil {
		t.Fatal(err)
	}
	config, pool := serverTLS(t)
	l, err := api.TCP{Address: "127.0.0.1:0", TLS: config}.Listen(known)
	if err != nil {
		t.Fatal(err)
	}
	base := "https://" + l.Addr().String()
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}
	t.Cleanup(tr.CloseIdleConnections)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	// A Server can serve only once.
	tcp := api.New(api.Options{Host: s.vms.host, Tokens: known, Ready: []api.Check{{Name: "kvm", Do: func(context.Context) error { return errors.New("a secret path") }}}})
	go func() { done <- tcp.Serve(ctx, l) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	as := func(token string) *client.Client { return client.New(base, token, &http.Client{Transport: tr}) }
	for name, tc := range map[string]struct {
		token         string
		reads, writes records.Code
	}{
		"a reader":      {read, "", wire.CodeForbidden},
		"a writer":      {write, "", ""},
		"no token":      {"", wire.CodeUnauthorized, wire.CodeUnauthorized},
		"another token": {write + "x", wire.CodeUnauthorized, wire.CodeUnauthorized},
		"a hash":        {fmt.Sprintf("%x", sha256.Sum256([]byte(write))), wire.CodeUnauthorized, wire.CodeUnauthorized},
		"a long one":    {strings.Repeat("x", 4096), wire.CodeUnauthorized, wire.CodeUnauthorized},
	} {
		code := func(err error) records.Code {
			if err == nil {
				return ""
			}
			return fleet.CodeOf(err)
		}
		if _, err := as(tc.token).List(ctx, records.Filter{}); code(err) != tc.reads {
			t.Errorf("%s reads: %v", name, err)
		}
		if _, err := as(tc.token).Sleep(ctx, "a", sandbox.SleepOptions{}); code(err) != tc.writes {
			t.Errorf("%s writes: %v", name, err)
		}
	}
	if h, err := as("").Ready(ctx); err != nil || h.OK || h.Checks[0].Problem != "" {
		t.Errorf("who has no token is told %+v, %v", h, err)
	}
	if _, err := as(write).Create(ctx, records.Request{Spec: sandbox.Spec{Name: "b", Image: sandboxtest.Image, Kernel: "/etc/shadow"}}); fleet.CodeOf(err) != "invalid" {
		t.Errorf("with a file of the host's for a kernel: %v", err)
	}
	shares := []spec.Share{{Source: "/etc", Path: "/mnt"}}
	if _, err := as(write).Create(ctx, records.Request{Spec: sandbox.Spec{Name: "b", Image: sandboxtest.Image, Shares: shares}}); fleet.CodeOf(err) != "invalid" {
		t.Errorf("a directory of the host is shared over TCP: %v", err)
	}
	persist := lifetime.Persist{Promote: []lifetime.Promotion{{Path: "/work", To: "/etc"}}}
	if _, err := as(write).Create(ctx, records.Request{Spec: sandbox.Spec{Name: "b", Image: sandboxtest.Image}, Metadata: spec.Metadata{Persist: persist}}); fleet.CodeOf(err) != "invalid" {
		t.Errorf("one is made that promotes to a directory of the host over TCP: %v", err)
	}
	if _, err := as(write).Update(ctx, "a", records.Changes{Persist: &persist}); fleet.CodeOf(err) != "invalid" {
		t.Errorf("a directory of the host is promoted to over TCP: %v", err)
	}
	if err := known.Remove("writer"); err != nil {
		t.Fatal(err)
	}
	if _, err := as(write).List(ctx, records.Filter{}); fleet.CodeOf(err) != wire.CodeUnauthorized {
		t.Errorf("with a token that was taken away: %v", err)
	}
	for host, ok := range map[string]bool{"evil.example": false, "evil.example:443": false, "localhost": true, "127.0.0.1": true, "[::1]:443": true, "127.0.0.1.evil.example": false} {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/v1/sandboxes", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		req.Header.Set("Authorization", "Bearer "+read)
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if (resp.StatusCode == http.StatusOK) != ok {
			t.Errorf("asked for as %s: %s", host, resp.Status)
		}
	}
	if err := os.Chmod(known.Path(), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := as(read).List(ctx, records.Filter{}); fleet.CodeOf(err) != wire.CodeForbidden {
		t.Errorf("with a file that others read: %v", err)
	}
}

func TestListenUnix_is_its_owners_alone_replaces_what_was_left_and_is_there_once(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err) // as if an old server had left it
	}
	l, err := api.ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 || st.Mode().Type() != os.ModeSocket {
		t.Errorf("it is %v, %v", st.Mode(), err)
	}
	if _, err := api.ListenUnix(path); !errors.Is(err, api.ErrListen) {
		t.Errorf("a second time: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
	if _, err := api.ListenUnix(filepath.Join(t.TempDir(), strings.Repeat("x", 108))); !errors.Is(err, api.ErrListen) {
		t.Errorf("a long path: %v", err)
	}
}

func TestServe_ends_with_its_context_while_a_stream_goes_on(t *testing.T) {
	begun := make(chan struct{})
	s := serve(t, func(o *api.Options) {
		o.Mounts = []api.Mount{{Pattern: "GET /stream", Scope: api.ScopeRead, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			close(begun)
			<-api.Draining(r.Context())
		})}}
	})
	done := make(chan error, 1)
	go func() {
		resp, err := s.client.Do(context.Background(), http.MethodGet, "/stream", nil)
		if err == nil {
			resp.Body.Close()
		}
		done <- err
	}()
	<-begun
	s.end()
	<-done
}
