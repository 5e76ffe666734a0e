//go:build sdk

package sdktest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/sources"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// commands are programs of the guests.
var commands = map[string]fakeguest.Command{
	// run writes hello to stderr and its stdin to stdout, and exits with 3.
	"run": func(_ context.Context, p *fakeguest.Process) int {
		if _, err := io.WriteString(p.Stderr, "hello"); err != nil {
			return 1
		}
		if _, err := io.Copy(p.Stdout, p.Stdin); err != nil {
			return 1
		}
		return 3
	},
	// where says as whom, where and with what it runs.
	"where": func(_ context.Context, p *fakeguest.Process) int {
		fmt.Fprintf(p.Stdout, "%s %s %s", p.User, p.Dir, p.Env[len(p.Env)-1])
		return 0
	},
	// flood writes 32 MiB, and notes in a file how far it is.
	"flood": func(_ context.Context, p *fakeguest.Process) int {
		mib := make([]byte, 1<<20)
		for i := range 32 {
			if _, err := p.Stdout.Write(mib); err != nil {
				return 1
			}
			if err := p.Guest.WriteFile("/flooded", fmt.Append(nil, i+1)); err != nil {
				return 1
			}
		}
		return 0
	},
	// terminal says how large its terminal is, until it is killed.
	"terminal": func(ctx context.Context, p *fakeguest.Process) int {
		fmt.Fprintf(p.Stdout, "%dx%d ", p.TTY.GetRows(), p.TTY.GetCols())
		for {
			select {
			case n := <-p.Resized:
				fmt.Fprintf(p.Stdout, "%dx%d ", n.Rows, n.Cols)
			case <-ctx.Done():
				return 1
			}
		}
	},
	// forever notes in a file that it runs, and when it was killed.
	"forever": func(ctx context.Context, p *fakeguest.Process) int {
		_ = p.Guest.WriteFile("/forever", []byte("runs"))
		<-ctx.Done()
		_ = p.Guest.WriteFile("/forever", []byte("killed"))
		return 1
	},
	// echo1 returns each byte of stdin as it comes, and ends with 4.
	"echo1": func(_ context.Context, p *fakeguest.Process) int {
		b := make([]byte, 1)
		for {
			if _, err := p.Stdin.Read(b); err != nil || b[0] == 'q' {
				return 4
			}
			if _, err := p.Stdout.Write(b); err != nil {
				return 1
			}
		}
	},
}

// serve starts a server of the API, and returns what a client's tests know of it.
func serve(t *testing.T, r *reached) (env []string) {
	t.Helper()
	vms := &sandboxtest.VMs{Commands: commands, Flows: func(string) []netpolicy.FlowRecord {
		return []netpolicy.FlowRecord{{Type: netpolicy.RecordFlow, FlowInfo: &netpolicy.FlowInfo{Peer: netip.MustParseAddr("192.0.2.1")}}}
	}, Dial: func(_ context.Context, _, _, address string) (net.Conn, error) {
		if address != "127.0.0.1:80" {
			return nil, errors.New("nothing listens")
		}
		client, server := net.Pipe()
		go func() {
			defer server.Close()
			b := make([]byte, 4)
			if _, err := io.ReadFull(server, b); err == nil {
				_, _ = server.Write([]byte(strings.ToUpper(string(b))))
			}
		}()
		return client, nil
	}}
	host := vms.Host(t)
	launcher, err := vms.Launcher(host)
	if err != nil {
		t.Fatal(err)
	}
	secrets := sources.Open(filepath.Join(host.State.Dir(), sources.File), slog.New(slog.DiscardHandler))
	launcher.Secrets = func(ctx context.Context, vm string, awaited []spec.SecretFile) ([]spec.Secret, error) {
		return secrets.Secrets(ctx, host.State.Owner(vm), awaited, nil)
	}
	host = host.With(launcher)
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	for name, token := range map[string]tokens.Token{
		"DROWSE_TOKEN": {Scopes: tokens.All()}, "TEST_READ_TOKEN": {Scopes: tokens.Scopes{api.ScopeRead}},
		"TEST_SLOW_TOKEN": {Scopes: tokens.All(), Rate: 1}, "TEST_OTHER_TOKEN": {Scopes: tokens.Scopes{api.ScopeRead, api.ScopeExec}, Owner: "other"},
	} {
		token.Name = strings.ToLower(strings.ReplaceAll(name, "_", "-"))
		secret, err := known.Create(token)
		if err != nil {
			t.Fatal(err)
		}
		env = append(env, name+"="+secret)
	}
	key := filepath.Join(t.TempDir(), "key")
	if err := errors.Join(os.WriteFile(key, []byte("the-value"), 0o600), secrets.Add(sources.Source{Name: "ours", File: key, Owners: []string{"us"}})); err != nil {
		t.Fatal(err)
	}
	server := api.New(api.Options{Host: host, Version: "test", Tokens: known, Sources: secrets, Log: nil})
	ctx, cancel := context.WithCancel(context.Background())
	l, err := api.TCP{Address: "127.0.0.1:0"}.Listen(known)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	where := "http://" + l.Addr().String()
	return append(env, "DROWSE_URL="+r.proxy(t, where), "TEST_FLAKY_URL="+flaky(t, where))
}

// flaky returns the address of a proxy that cuts the connection instead of the first answer to each idempotency key.
func flaky(t *testing.T, where string) string {
	to, err := url.Parse(where)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex // guards seen
	seen := map[string]bool{}
	cut := errors.New("cut")
	p := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
		ModifyResponse: func(r *http.Response) error {
			mu.Lock()
			defer mu.Unlock()
			if key := r.Request.Header.Get("Idempotency-Key"); key != "" && !seen[key] {
				seen[key] = true
				return cut
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	s := httptest.NewServer(p)
	t.Cleanup(s.Close)
	return s.URL
}

// run runs the tests of a client.
func run(t *testing.T, dir, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	r := newReached(t)
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = dir, append(os.Environ(), serve(t, r)...), time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	var counts []string
	for _, m := range counted.FindAllSubmatch(out, -1) {
		counts = append(counts, string(m[1]))
	}
	if len(counts) == 0 {
		t.Fatalf("it does not say how many tests it ran:\n%s", out)
	}
	fmt.Printf("%s: %s\n", name, strings.Join(counts, ", "))
	r.check(t)
}

// counted is what Python's unittest and Node's runner say at their end.
var counted = regexp.MustCompile(`(?m)^(?:# )?(Ran \d+ tests.*|OK.*|(?:pass|fail|cancelled|skipped) \d+)$`)

func TestPython_does_all_that_its_methods_say(t *testing.T) {
	if exec.Command("python3", "-c", "import sys; sys.exit(sys.version_info < (3, 11))").Run() != nil {
		t.Fatal("there is no python3 of 3.11 or later: make test-sdk")
	}
	run(t, "../python", "python3", "-X", "dev", "-m", "unittest", "discover", "-t", ".", "-s", "tests")
}

func TestTypeScript_does_all_that_its_methods_say(t *testing.T) {
	if _, err := os.Stat("../typescript/dist/test"); err != nil {
		t.Fatal("it is not compiled: make test-sdk")
	}
	args := []string{"--test", "dist/test/"}
	// Node 20 and 21 have a WebSocket when they are asked for it.
	if exec.Command("node", "-e", "process.exit(globalThis.WebSocket?0:1)").Run() != nil {
		args = append([]string{"--experimental-websocket"}, args...)
	}
	run(t, "../typescript", "node", args...)
}
