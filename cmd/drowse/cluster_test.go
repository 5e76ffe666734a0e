//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// serveCluster runs `drowse serve --cluster` on a host until the test ends.
func serveCluster(t *testing.T, vms *sandboxtest.VMs, store, name string) (state string) {
	t.Helper()
	state, err := os.MkdirTemp("", "cl-"+name) // short, since socket paths are limited
	if err != nil {
		t.Fatal(err)
	}
	h, err := vms.Open(state)
	if err != nil {
		t.Fatal(err)
	}
	if name == "a" { // its snapshots are of a machine like this one
		b, err := h.Create(t.Context(), sandbox.Spec{Name: "facts", Image: sandboxtest.Image}, sandbox.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		res, err := b.Sleep(t.Context(), sandbox.SleepOptions{})
		if err != nil {
			t.Fatal(err)
		}
		m, err := h.State.Manifest(res.Snapshot)
		if err != nil {
			t.Fatal(err)
		}
		instance.NoteGoodFacts(m.Host[instance.FactsKey])
	}
	ctx, cancel := context.WithCancel(context.Background())
	var stderr bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, []string{"--state", state, "serve", "--pool", "0", "--cluster", store, "--cluster-host", name, "--cluster-address", "127.0.0.1:0"}, io.Discard, &stderr)
	}()
	t.Cleanup(func() {
		cancel()
		if code := <-ended; code != 0 {
			t.Errorf("the server of %s has ended with %d: %s", name, code, &stderr)
		}
		if t.Failed() {
			t.Logf("%s: %s", name, &stderr)
		}
		vms.Close()
		_ = os.RemoveAll(state)
	})
	c := client.Unix(filepath.Join(state, api.SocketFile))
	defer c.Close()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := c.List(t.Context(), records.Filter{}); err == nil {
			return state
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func TestCluster_commands_use_a_sandbox_on_either_host(t *testing.T) {
	vms := &sandboxtest.VMs{}
	processes = vms
	t.Cleanup(func() { processes = nil })
	agent := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(agent, []byte("\x7fELF"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DROWSE_AGENT", agent)
	store := t.TempDir()
	a, b := serveCluster(t, vms, store, "a"), serveCluster(t, vms, store, "b")
	says := func(state string, code int, says string, args ...string) {
		t.Helper()
		got, stdout, stderr := drowse(t, state, args...)
		if got != code || !strings.Contains(stdout+stderr, says) {
			t.Fatalf("%s on %s: exit status %d, %q, %q; want %d, %q", args, filepath.Base(state), got, stdout, stderr, code, says)
		}
	}
	says(a, 0, "", "run", "-d", "--name", "box", sandboxtest.Image)
	word := filepath.Join(t.TempDir(), "word")
	if err := os.WriteFile(word, []byte("Linux"), 0o600); err != nil {
		t.Fatal(err)
	}
	says(a, 0, "", "cp", word, "box:/root/word")
	says(b, exitExec, "no such VM", "exec", "box", "cat", "/root/word")
	says(a, 0, "asleep", "sleep", "--durable", "box")
	says(b, 0, "Linux", "exec", "box", "cat", "/root/word")
	says(a, exitExec, "box is on b", "exec", "box", "cat", "/root/word")
	says(a, exitFailed, "box is on b", "rm", "box")
	says(b, 0, "asleep", "sleep", "--durable", "box")
	says(a, 0, "", "update", "box", "--purpose", "moved")
	says(a, 0, "Linux", "exec", "box", "cat", "/root/word")
	says(a, 0, "asleep", "sleep", "--durable", "box")
	says(b, 0, "", "wake", "box")
	says(b, 0, "moved", "ls", "-o", "json")
	// By the API, each host answers for it. Commands of this host do by themselves what is done here.
	c := client.Unix(filepath.Join(a, api.SocketFile))
	defer c.Close()
	done, err := c.Exec(t.Context(), "box", wire.Exec{Command: []string{"cat", "/root/word"}})
	if err != nil || string(done.Stdout) != "Linux" {
		t.Errorf("by the API of the other host: %+v, %v", done, err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		l, err := c.List(t.Context(), records.Filter{Statuses: []records.Status{records.Running}})
		if err == nil && len(l.Sandboxes) == 1 && l.Sandboxes[0].Name == "box" && l.Sandboxes[0].Host == "b" {
			break
		} else if time.Now().After(end) {
			t.Fatalf("its list: %+v, %v", l, err)
		}
	}
	if _, err := c.Here().Exec(t.Context(), "box", wire.Exec{Command: []string{"true"}}); !errors.Is(err, spec.ErrElsewhere) {
		t.Error("asked to answer itself:", err)
	}
	says(a, exitExec, "box is on b", "exec", "box", "true")
	says(a, 0, "box runs on a", "migrate", "box", "--to", "a") // b does it
	says(a, 0, "box runs on b", "migrate", "--all", "--to", "b")
	says(b, exitFailed, "it is there", "migrate", "box", "--to", "b")
	says(b, 0, "Linux", "exec", "box", "cat", "/root/word")
	says(a, exitUsage, "--cluster-address", "serve", "--cluster-address", "127.0.0.1:0")
	says(b, 0, "", "rm", "--force", "box")
	says(a, exitExec, "no such VM", "exec", "box", "true")
	says(t.TempDir(), exitUsage, "--cluster", "serve", "--cluster-host", "c")
}
