//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestServe_answers_at_its_socket_until_it_is_told_to_end(t *testing.T) {
	state, err := os.MkdirTemp("", "drowse-serve") // short, since socket paths are limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(state) }) // leftovers in /tmp must not fail a test
	agent := filepath.Join(state, "agent")
	if err := os.WriteFile(agent, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DROWSE_AGENT", agent)
	ctx, cancel := context.WithCancel(t.Context())
	var stderr bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- run(ctx, []string{"--state", state, "serve", "--pool", "0", "--on-exit", "sleep"}, io.Discard, &stderr)
	}()
	c := client.Unix(filepath.Join(state, api.SocketFile))
	defer c.Close()
	deadline := time.Now().Add(time.Minute)
	for {
		list, err := c.List(t.Context(), records.Filter{})
		if err == nil && len(list.Problems) == 0 && len(list.Sandboxes) == 0 {
			break
		}
		select {
		case code := <-ended:
			t.Fatalf("it ended with %d: %s", code, &stderr)
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("it does not answer: %v", err)
		}
	}
	if _, err := c.Get(t.Context(), "none"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("one that is not there: %v", err)
	}
	for path, want := range map[string]string{"/metrics": `drowse_sandboxes{status="asleep"} 0`, "/healthz": `{"ok":true`, "/v1/openapi.json": `"openapi": "3.1.0"`} {
		resp, err := c.Do(t.Context(), http.MethodGet, path, nil)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(text), want) {
			t.Errorf("%s: %s, %v: %.200s", path, resp.Status, err, text)
		}
	}
	var again bytes.Buffer
	if code := run(t.Context(), []string{"--state", state, "serve", "--pool", "0"}, io.Discard, &again); code != exitFailed || !strings.Contains(again.String(), "another server") {
		t.Errorf("a second one: %d, %s", code, &again)
	}
	cancel()
	if code := <-ended; code != 0 {
		t.Errorf("it ended with %d: %s", code, &stderr)
	}
	if _, err := os.Stat(filepath.Join(state, api.SocketFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its socket: %v", err)
	}
}

func TestServe_that_would_be_open_to_others_is_refused(t *testing.T) {
	state := t.TempDir()
	t.Setenv("DROWSE_AGENT", os.Args[0])
	for name, args := range map[string][]string{
		"TCP without a token":       {"--listen", "127.0.0.1:0"},
		"a host without the API":    {"--host", "example.org", "--no-api"},
		"TCP without the API":       {"--listen", "127.0.0.1:0", "--no-api"},
		"an end that nobody knows":  {"--on-exit", "kill"},
		"no time for the end":       {"--exit-timeout", "0s"},
		"a certificate without TCP": {"--tls-cert", "x"},
	} {
		var stderr bytes.Buffer
		if code := run(t.Context(), append([]string{"--state", state, "serve", "--pool", "0"}, args...), io.Discard, &stderr); code != exitUsage {
			t.Errorf("%s: %d, %s", name, code, &stderr)
		}
	}
}

func TestExit_puts_all_that_run_to_sleep_and_says_which_do_not(t *testing.T) {
	refuses := false
	h := (&sandboxtest.VMs{Fail: func(string, string) error {
		if refuses {
			return errors.New("no sleep is to be had")
		}
		return nil
	}}).Host(t)
	ctx := t.Context()
	for name, class := range map[string]lifetime.Class{"a": "", "b": "", "c": lifetime.Ephemeral} {
		if _, err := h.Create(ctx, sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{Metadata: &spec.Metadata{Class: class}}); err != nil {
			t.Fatal(err)
		}
	}
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, nil))
	leave := exitFlags{on: exitLeave, limit: time.Minute}
	if err := leave.do(ctx, log, h); err != nil || text.Len() > 0 {
		t.Errorf("leaving them: %v, %s", err, &text)
	}
	sleep := exitFlags{on: exitSleep, limit: time.Minute}
	err := sleep.do(ctx, log, h)
	if err == nil || !strings.Contains(err.Error(), "1 of 3") || !strings.Contains(text.String(), "vm=c") {
		t.Errorf("got %v, %s", err, &text)
	}
	for name, want := range map[string]state.Phase{"a": state.Asleep, "b": state.Asleep, "c": state.Running} {
		if r, err := h.State.Get(name); err != nil || r.Phase != want {
			t.Errorf("%s is %s, want %s", name, r.Phase, want)
		}
	}
	refuses = true
	if err := sleep.do(ctx, log, h); err == nil {
		t.Error("nothing is said of what does not sleep")
	}
}

func TestSleep_of_all_names_those_that_run_on(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	for name, class := range map[string]lifetime.Class{"a": "", "b": "", "c": lifetime.Ephemeral} {
		if _, err := h.Create(t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{Metadata: &spec.Metadata{Class: class}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Sandbox("b").Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	a := &app{stdout: &out, stderr: io.Discard, log: slog.New(slog.DiscardHandler), output: "json"}
	err := a.sleepAll(t.Context(), &local{a: a, h: h}, sandbox.SleepOptions{})
	var got map[string][]string
	if jerr := json.Unmarshal(out.Bytes(), &got); jerr != nil || err == nil || !strings.Contains(err.Error(), "1 of 2 VMs were not put to sleep and run on: c") {
		t.Errorf("%v, %v: %s", jerr, err, &out)
	}
	if !slices.Equal(got["asleep"], []string{"a"}) || !slices.Equal(got["awake"], []string{"c"}) {
		t.Errorf("got %v", got)
	}
}

func TestToken_is_printed_once_and_kept_as_a_hash(t *testing.T) {
	state := t.TempDir()
	drowse := func(args ...string) (int, string) {
		var out, stderr bytes.Buffer
		code := run(t.Context(), append([]string{"--state", state, "token"}, args...), &out, &stderr)
		return code, out.String() + stderr.String()
	}
	code, token := drowse("create", "ci")
	if code != 0 || !strings.HasPrefix(token, "drowse_") {
		t.Fatalf("%d, %s", code, token)
	}
	if got, err := tokens.Open(filepath.Join(state, tokens.File)).Find(strings.TrimSpace(token)); err != nil || got.Scopes.String() != "read" {
		t.Errorf("it is %+v, %v", got, err)
	}
	if _, text := drowse("ls"); strings.Contains(text, strings.TrimSpace(token)) || !strings.Contains(text, "ci    read   -") {
		t.Errorf("the list says %s", text)
	}
	if code, text := drowse("rm", "ci"); code != 0 {
		t.Errorf("%d, %s", code, text)
	}
	if code, text := drowse("create", "x", "--scope", "all"); code != exitUsage {
		t.Errorf("another scope: %d, %s", code, text)
	}
	if code, text := drowse("create", "x", "--scope", "admin", "--owner", "o"); code != exitFailed {
		t.Errorf("an owner with the scope admin: %d, %s", code, text)
	}
	drowse("create", "y", "--scope", "create,exec", "--owner", "an owner", "--expires", "30d", "--rate", "7")
	if _, text := drowse("ls"); !strings.Contains(text, "exec,create  an owner") || !strings.Contains(text, "7/s") {
		t.Errorf("the list says %s", text)
	}
}

func TestUnits_are_as_systemd_wants_them(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Log("there is no systemd-analyze, so nothing is shown") // a skipped test fails in CI
		return
	}
	dir := t.TempDir()
	args := []string{"verify"}
	for _, name := range []string{"drowse.service", "drowse.socket", "drowse-sleep-all.service", "drowse-net.service", "drowse-net.socket"} {
		args = append(args, filepath.Join(dir, name))
		text, err := os.ReadFile(filepath.Join("../../contrib/systemd", name))
		if err != nil {
			t.Fatal(err)
		}
		// The program is not installed on the machine of the test.
		text = bytes.ReplaceAll(text, []byte("/usr/local/bin/drowse"), []byte("/bin/true"))
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.CommandContext(t.Context(), "systemd-analyze", args...).CombinedOutput()
	if err != nil || strings.Contains(string(out), "drowse.") || strings.Contains(string(out), "drowse-net.") {
		t.Errorf("%v: %s", err, out)
	}
}
