package api_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// overTCP serves the VMs of s over TCP as well. as makes a token of a name and returns a client with it.
func overTCP(t *testing.T, s *served, o api.Options) (address string, as func(name string) *client.Client) {
	t.Helper()
	o.Host, o.Tokens = s.vms.host, tokens.Open(filepath.Join(filepath.Dir(s.path), tokens.File))
	if _, err := o.Tokens.Create(tokens.Token{Name: "first", Scopes: tokens.Scopes{tokens.ScopeRead}}); err != nil {
		t.Fatal(err) // Listen requires a token
	}
	l, err := api.TCP{Address: "127.0.0.1:0"}.Listen(o.Tokens)
	if err != nil {
		t.Fatal(err)
	}
	tcp := &served{vms: s.vms, server: api.New(o)}
	tcp.run(t, l)
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return l.Addr().String(), func(name string) *client.Client {
		token, err := o.Tokens.Create(tokens.Token{Name: name, Scopes: tokens.All()})
		if err != nil {
			t.Fatal(err)
		}
		return client.New("http://"+l.Addr().String(), token, &http.Client{Transport: tr})
	}
}

// works makes short requests, like an operator who looks after a full host.
func works(t *testing.T, when string, c *client.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, path := range []string{"/healthz", "/readyz"} {
		resp, err := c.Do(ctx, http.MethodGet, path, nil)
		if err != nil {
			t.Fatalf("%s: %s: %v", when, path, err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %s: %s", when, path, resp.Status)
		}
	}
	for what, err := range map[string]error{"list": second(c.List(ctx, records.Filter{})), "get": second(c.Get(ctx, "a")), "start": second(c.Start(ctx, "a"))} {
		if err != nil {
			t.Errorf("%s: %s: %v", when, what, err)
		}
	}
}

func TestAttack_long_commands_take_health_and_short_requests_down(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	begun, end := make(chan struct{}, api.MaxExecs), make(chan struct{})
	s.vms.set(func() {
		s.vms.exec = func(context.Context, *fakeguest.Process) int {
			begun <- struct{}{}
			<-end
			return 0
		}
	})
	_, as := overTCP(t, s, api.Options{})
	greedy, other, third := as("greedy"), as("other"), as("third")
	run := func(c *client.Client) error {
		return second(c.Exec(t.Context(), "a", wire.Exec{Command: []string{"run"}, TimeoutSeconds: wire.MaxExecSeconds}))
	}
	var wg sync.WaitGroup
	fill := func(c *client.Client) {
		for range api.MaxExecs / 2 {
			wg.Go(func() {
				if err := run(c); err != nil {
					t.Error(err)
					begun <- struct{}{}
				}
			})
		}
		for range api.MaxExecs / 2 {
			<-begun
		}
	}
	fill(greedy)
	works(t, "one caller has all that it may have", greedy)
	refused(t, "one more of the same caller", run(greedy), wire.CodeTooMany)
	fill(other) // it has its own half
	works(t, "no command more is possible", greedy)
	works(t, "no command more is possible", third)
	refused(t, "one more of somebody else", run(third), wire.CodeBusy)
	resp, err := third.Do(t.Context(), http.MethodPost, "/v1/sandboxes/a/exec", wire.Exec{Command: []string{"true"}})
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Errorf("it is refused by %s, Retry-After %q", resp.Status, resp.Header.Get("Retry-After"))
	}
	close(end)
	wg.Wait()
	if err := run(third); err != nil {
		t.Errorf("after all have ended: %v", err)
	}
}

func refused(t *testing.T, what string, err error, want records.Code) {
	t.Helper()
	var e *records.Error
	if fleet.CodeOf(err) != want {
		t.Errorf("%s: %v, want %s", what, err, want)
	} else if e, _ = err.(*records.Error); e == nil || e.Remedy == "" {
		t.Errorf("%s: %#v has no remedy", what, err)
	}
}

func TestAttack_streams_and_slow_changes_take_short_requests_down(t *testing.T) {
	var streams, sleeps atomic.Int64
	end := make(chan struct{})
	s := serve(t)
	s.made(t, "a")
	s.made(t, "b")
	address, as := overTCP(t, s, api.Options{Mounts: []api.Mount{
		{Pattern: "GET /stream", Scope: api.ScopeRead, Long: true, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			streams.Add(1)
			<-end
		})},
		{Pattern: "GET /page", Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 64<<10)) })},
	}})
	s.vms.set(func() {
		s.vms.fails = func(op, _ string) error {
			if op == "capture" {
				sleeps.Add(1)
				<-end
			}
			return nil
		}
	})
	var wg sync.WaitGroup
	for i := range 2 {
		c := as(fmt.Sprint("greedy", i))
		for range api.MaxStreams / 2 {
			wg.Go(func() {
				resp, err := c.Do(t.Context(), http.MethodGet, "/stream", nil)
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					t.Errorf("a stream: %s", resp.Status)
					streams.Add(1)
				}
			})
		}
		for range api.MaxChanges/2 - 1 { // leaves one for works
			wg.Go(func() {
				if _, err := c.Sleep(t.Context(), "b", sandbox.SleepOptions{}); err != nil {
					t.Error(err)
				}
			})
		}
	}
	for streams.Load() < api.MaxStreams || sleeps.Load() < 1 {
		time.Sleep(time.Millisecond)
	}
	c := as("other")
	works(t, "streams and sleeps", c)
	resp, err := c.Do(t.Context(), http.MethodGet, "/stream", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("one stream more: %s", resp.Status)
	}
	// Callers without a token announce a body and send none. The page is too large to wait for the body.
	for range 2 * api.MaxOpen {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		if _, err := io.WriteString(conn, "GET /page HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("the page for somebody who sends no body: %s, %v", resp.Status, err)
		}
	}
	close(end)
	wg.Wait()
}

func TestAttack_idle_connections_keep_others_out(t *testing.T) {
	s := serve(t)
	s.made(t, "a")
	s.made(t, "b")
	address, as := overTCP(t, s, api.Options{})
	c := as("other")
	var held []net.Conn
	defer func() {
		for _, conn := range held {
			conn.Close()
		}
	}()
	for i := range 1500 {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
		switch i % 3 {
		case 0: // stays open after an answer
			_ = conn.SetDeadline(time.Now().Add(time.Minute))
			if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatalf("connection %d gets no answer: %v", i, err)
			}
			resp.Body.Close()
		case 1: // an incomplete request
			if _, err := io.WriteString(conn, "GET /healthz HTTP/1.1\r\nHost: local"); err != nil {
				continue // the server has closed it
			}
		}
	}
	works(t, "many connections that ask for nothing", c)
	ended := 0
	for _, conn := range held {
		_ = conn.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, err := conn.Read(make([]byte, 1)); err != nil && !strings.Contains(err.Error(), "timeout") {
			ended++
		}
	}
	if ended < 200 { // an address has 1280
		t.Errorf("%d of %d connections have ended", ended, len(held))
	}
}

func TestHealth_of_many_who_ask_at_once_is_looked_at_once_and_a_check_that_hangs_is_said(t *testing.T) {
	var runs atomic.Int64
	end := make(chan struct{})
	s := serve(t, func(o *api.Options) {
		o.Ready = []api.Check{{Name: "disk", Do: func(context.Context) error {
			runs.Add(1)
			<-end
			return nil
		}}}
	})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if h, err := s.client.Ready(t.Context()); err != nil || h.OK || len(h.Checks) != 1 || h.Checks[0].Problem == "" {
				t.Errorf("while it hangs: %+v, %v", h, err)
			}
		})
	}
	wg.Wait()
	if n := runs.Load(); n != 1 {
		t.Errorf("%d runs", n)
	}
	close(end)
	for {
		if h, err := s.client.Ready(t.Context()); err == nil && h.OK {
			break
		}
	}
}

// One caller gets half of the slots of a kind, and two get all. The server refuses the next request with a remedy.
func TestRequests_beyond_the_bound_of_their_kind_are_refused(t *testing.T) {
	for _, x := range []struct {
		kind  string
		most  int
		mount api.Mount
	}{
		{"reads", api.MaxReads, api.Mount{Scope: api.ScopeRead}},
		{"changes", api.MaxChanges, api.Mount{Scope: api.ScopeCreate}},
		{"streams", api.MaxStreams, api.Mount{Scope: api.ScopeRead, Long: true}},
		{"without a token", api.MaxOpen, api.Mount{Scope: api.ScopeNone}},
	} {
		t.Run(x.kind, func(t *testing.T) {
			begun, end := make(chan struct{}, x.most), make(chan struct{})
			x.mount.Pattern = "GET /hold"
			x.mount.Handler = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				begun <- struct{}{}
				<-end
			})
			o := api.Options{Host: &sandbox.Host{}, Tokens: tokens.Open(filepath.Join(t.TempDir(), tokens.File)), Mounts: []api.Mount{x.mount}}
			var secrets [3]string
			for i := range secrets {
				var err error
				if secrets[i], err = o.Tokens.Create(tokens.Token{Name: fmt.Sprint("caller", i), Scopes: tokens.All()}); err != nil {
					t.Fatal(err)
				}
			}
			server := api.New(o)
			get := func(caller int) *httptest.ResponseRecorder {
				r := httptest.NewRequest(http.MethodGet, "http://localhost/hold", nil)
				r.RemoteAddr = fmt.Sprintf("192.0.2.%d:4000", caller) // identifies callers without a token
				r.Header.Set("Authorization", "Bearer "+secrets[caller])
				w := httptest.NewRecorder()
				server.ServeHTTP(w, r)
				return w
			}
			var wg sync.WaitGroup
			fill := func(caller int) {
				for range x.most / 2 {
					wg.Go(func() {
						if w := get(caller); w.Code != http.StatusOK {
							t.Errorf("one of the first %d of caller %d: %d %s", x.most/2, caller, w.Code, w.Body)
							begun <- struct{}{}
						}
					})
				}
				for range x.most / 2 {
					<-begun
				}
			}
			beyond := func(caller, status int, code records.Code) {
				t.Helper()
				answer := make(chan *httptest.ResponseRecorder, 1)
				wg.Go(func() { answer <- get(caller) })
				select {
				case <-begun:
					t.Errorf("one more of caller %d is let in", caller)
				case w := <-answer:
					var doc wire.ErrorDoc
					err := json.Unmarshal(w.Body.Bytes(), &doc)
					if err != nil || w.Code != status || doc.Error.Code != code || w.Header().Get("Retry-After") == "" {
						t.Errorf("one more of caller %d: %d %s (%v), want %d %s", caller, w.Code, w.Body, err, status, code)
					}
				}
			}
			fill(0)
			beyond(0, http.StatusTooManyRequests, wire.CodeTooMany)
			fill(1)
			beyond(2, http.StatusServiceUnavailable, wire.CodeBusy)
			close(end)
			wg.Wait()
			if w := get(2); w.Code != http.StatusOK {
				t.Errorf("after all have ended: %d %s", w.Code, w.Body)
			}
		})
	}
}
