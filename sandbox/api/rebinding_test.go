package api_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// A page rebinds its name to a forwarded port and asks the server. The browser sends the page's own name in Host
// and, where it sends one, in Origin.
func TestAttack_dns_rebinding_of_a_forwarded_socket(t *testing.T) {
	const evil, named = "evil.example:7070", "box.example"
	s := serve(t, func(o *api.Options) { o.Hosts = []string{named} })
	s.made(t, "a")
	known := tokens.Open(filepath.Join(filepath.Dir(s.path), tokens.File))
	token, err := known.Create(tokens.Token{Name: "writer", Scopes: tokens.All()})
	if err != nil {
		t.Fatal(err)
	}
	l, err := api.TCP{Address: "127.0.0.1:0"}.Listen(known)
	if err != nil {
		t.Fatal(err)
	}
	tcp := &served{vms: s.vms, server: api.New(api.Options{Host: s.vms.host, Tokens: known, Hosts: []string{named}})}
	tcp.run(t, l)
	const unix, both = 1, 3 // bits of the listeners that answer
	rows := map[string]struct {
		host, origin, site string
		answered           int // by which listeners
	}{
		// A browser, through a forwarded port.
		"the page at localhost":                {"localhost:7070", "http://localhost:7070", "same-origin", both},
		"the page at an address":               {"127.0.0.1:7070", "http://127.0.0.1:7070", "same-origin", both},
		"the page at an address of IPv6":       {"[::1]:7070", "http://[::1]:7070", "", both},
		"the page at a name of --host":         {named, "http://" + named, "same-origin", both},
		"the address is typed in":              {"localhost:7070", "", "none", both},
		"a rebound page":                       {evil, "http://" + evil, "", 0},
		"a rebound page, same origin":          {evil, "http://" + evil, "same-origin", 0},
		"a rebound page that only reads":       {evil, "", "", 0},
		"a rebound page, no Origin":            {evil, "", "same-origin", 0},
		"a rebound page that says none":        {evil, "", "none", 0},
		"a rebound page at the default port":   {"evil.example", "http://evil.example", "same-origin", 0},
		"a rebound name like an address":       {"127.0.0.1.evil.example:7070", "http://127.0.0.1.evil.example:7070", "", 0},
		"a rebound name like localhost":        {"localhost.evil.example", "http://localhost.evil.example", "", 0},
		"a rebound name of the local network":  {"printer:7070", "http://printer:7070", "same-origin", 0},
		"a rebound name with a dot at its end": {"evil.:7070", "", "", 0},
		"another page":                         {"localhost:7070", "http://" + evil, "cross-site", 0},
		"another page, no Sec-Fetch":           {"localhost:7070", "http://" + evil, "", 0},
		"another page, no Origin":              {"localhost:7070", "", "cross-site", 0},
		"another port of localhost":            {"localhost:7070", "http://localhost:8080", "same-site", 0},
		"a page without an origin":             {"localhost:7070", "null", "", 0},
		// Programs.
		"curl by a word":    {"drowse", "", "", unix},
		"curl by localhost": {"localhost", "", "", both},
		"curl by address":   {"127.0.0.1:7300", "", "", both},
	}
	address := l.Addr().String()
	for at, dial := range map[int]func(ctx context.Context) (net.Conn, error){
		1: func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "unix", s.path) },
		2: func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", address) },
	} {
		tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
		t.Cleanup(tr.CloseIdleConnections)
		for name, row := range rows {
			for _, ask := range []struct{ method, path, body string }{
				{http.MethodGet, "/v1/sandboxes", ""}, {http.MethodPost, "/v1/sandboxes/a/start", "{}"}, {http.MethodGet, "/healthz", ""}, {http.MethodDelete, "/v1/sandboxes/none", ""},
			} {
				req, err := http.NewRequestWithContext(t.Context(), ask.method, "http://x"+ask.path, strings.NewReader(ask.body))
				if err != nil {
					t.Fatal(err)
				}
				req.Host = row.host
				for key, value := range map[string]string{"Origin": row.origin, "Sec-Fetch-Site": row.site} {
					if value != "" {
						req.Header.Set(key, value)
					}
				}
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("Authorization", "Bearer "+token)
				resp, err := tr.RoundTrip(req)
				if err != nil {
					t.Fatal(err)
				}
				text, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				want := http.StatusForbidden
				if row.answered&at != 0 {
					want = http.StatusOK
				}
				if err != nil || resp.StatusCode != want {
					t.Errorf("%s, listener %d, %s %s: %d, want %d: %.100s", name, at, ask.method, ask.path, resp.StatusCode, want, text)
				}
			}
		}
	}
	if is, err := s.client.Get(t.Context(), "a"); err != nil || is.Status != records.Running {
		t.Errorf("it is %s, %v", is.Status, err)
	}
}
