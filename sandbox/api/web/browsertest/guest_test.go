//go:build browser

package browsertest

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/test/chromium"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// programEnv names the drowse program. Its agent must be beside it.
const programEnv = "DROWSE_TEST_PROGRAM"

func TestMain(m *testing.M) { guesttest.Main(m) }

// The test runs the page and the API of the program itself, with a guest behind them.
func TestPage_of_drowse_serve_with_a_guest(t *testing.T) {
	program := os.Getenv(programEnv)
	if program == "" {
		t.Skipf("$%s names no drowse program: use `make test-browser`", programEnv)
	}
	e := guesttest.New(t)
	e.Run(sandbox.Spec{Name: "real", MemoryMiB: 256})

	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := free.Addr().String()
	free.Close()
	h := &host{events: true, url: "http://" + at}
	if h.writes, err = tokens.Open(filepath.Join(e.Store.State.Dir(), tokens.File)).Create(tokens.Token{Name: "writer", Scopes: tokens.All()}); err != nil {
		t.Fatal(err)
	}
	serve := exec.Command(program, "--state", e.Store.State.Dir(), "serve", "--pool", "1", "--listen", at)
	serve.Stdout, serve.Stderr = os.Stderr, os.Stderr
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := serve.Process.Signal(unix.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := serve.Wait(); err != nil {
			t.Errorf("drowse serve: %v", err)
		}
	})
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		resp, err := http.Get(h.url + "/healthz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				break
			}
		}
		if time.Now().After(end) {
			t.Fatalf("drowse serve does not answer: %v", err)
		}
	}

	path, err := chromium.Find()
	if err != nil {
		t.Fatal(err)
	}
	b, err := chromium.Start(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	p := open(t, b, h, "", 1280, 720)
	p.lists("real")
	p.wait(`document.querySelector('#link').textContent === 'live'`)
	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/real/console'`, nil))
	p.sees("drowse-agent") // the agent prints this when it is ready

	say := func(what, want string) {
		t.Helper()
		body, err := json.Marshal(map[string]any{"command": []string{"/bin/sh", "-c", what}})
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.url+"/v1/sandboxes/real/exec", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+h.writes)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var got struct {
			ExitCode int    `json:"exit_code"`
			Stdout   []byte `json:"stdout"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&got); err != nil || resp.StatusCode != http.StatusOK || string(got.Stdout) != want || got.ExitCode != 0 {
			t.Fatalf("%s: %s, %d, %q (%v), want %q", what, resp.Status, got.ExitCode, got.Stdout, err, want)
		}
	}
	say("echo kept > /run/kept; echo hello", "hello\n")
	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/real/history'`, nil))
	p.sees("echo hello")

	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/real'`, nil))
	p.wait(`document.querySelector('.heading [data-status=running]')`)
	p.click("[data-op=sleep]")
	p.wait(`document.querySelector('.heading [data-status=asleep]')`)
	e.WaitPhase("real", state.Asleep, patience)
	p.click("[data-op=wake]")
	p.wait(`document.querySelector('.heading [data-status=running]')`)
	p.sees("Awake, in")
	// The wake keeps what was only in memory.
	say("read x < /run/kept; echo $x", "kept\n")
}
