//go:build linux

package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

func TestSources_give_their_values_at_each_wake_by_the_command_line_and_by_serve(t *testing.T) {
	dir, h, _ := inMemory(t)
	key := filepath.Join(t.TempDir(), "key")
	put := func(value string) {
		t.Helper()
		if err := os.WriteFile(key, []byte(value), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("one")
	t.Setenv("DROWSE_TEST_SOURCE", "four")
	does := func(want int, says string, args ...string) string {
		t.Helper()
		code, out, errs := drowse(t, dir, args...)
		if code != want || !strings.Contains(out+errs, says) {
			t.Errorf("%v: %d, %s%s", args, code, out, errs)
		}
		return out
	}
	is := func(want ...string) {
		t.Helper()
		lines := strings.Split(strings.TrimSpace(does(0, "", "secret", "ls", "a")), "\n")[1:]
		for i, line := range lines {
			lines[i] = strings.Join(strings.Fields(line), " ")
		}
		if strings.Join(lines, "; ") != strings.Join(want, "; ") {
			t.Errorf("secrets are %q, want %q", lines, want)
		}
	}
	does(0, "db", "secret", "source", "add", "db", "file:"+key)
	does(0, "cmd", "secret", "source", "add", "--owner", "alice", "cmd", "command:/bin/echo", "-n", "--owner", "x")
	does(0, "serving", "secret", "source", "add", "serving", "env:DROWSE_TEST_SOURCE")
	does(exitUsage, "absolute path", "secret", "source", "add", "bad", "file:key")
	does(0, "command:/bin/echo -n --owner x", "secret", "source", "ls")
	if _, err := h.Create(t.Context(), sandbox.Spec{Name: "a", Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	does(exitFailed, `no source "none"`, "secret", "set", "a", "x=from:none")
	does(exitUsage, "from:SOURCE", "secret", "set", "a", "x=from:")
	does(0, "", "secret", "set", "a", "db=from:db", "cmd=from:cmd")
	is("cmd 9 B 0444 0:0 from cmd", "db 3 B 0444 0:0 from db")
	does(0, "", "sleep", "a")
	is("cmd awaited 0444 0:0 from cmd", "db awaited 0444 0:0 from db")
	put("three")
	does(0, "", "wake", "a")
	is("cmd 9 B 0444 0:0 from cmd", "db 5 B 0444 0:0 from db")
	does(0, "", "sleep", "a")
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	does(0, "no value", "wake", "a")
	is("cmd 9 B 0444 0:0 from cmd", "db awaited 0444 0:0 from db")
	does(0, "sandbox.secrets_failed", "events", "--sandbox", "a")
	put("twelve bytes")
	does(0, "", "secret", "set", "a", "db=from:db")
	does(0, "", "secret", "rm", "a", "cmd")
	is("db 12 B 0444 0:0 from db")

	// What is in the environment of "drowse serve" comes from there.
	does(exitFailed, "drowse serve", "secret", "set", "a", "x=from:serving")
	ctx, cancel := context.WithCancel(t.Context())
	var stderr bytes.Buffer
	ended := make(chan int, 1)
	go func() { ended <- run(ctx, []string{"--state", dir, "serve", "--pool", "0"}, io.Discard, &stderr) }()
	defer func() {
		cancel()
		if code := <-ended; code != 0 && code != exitFailed {
			t.Errorf("serve ended with %d: %s", code, &stderr)
		}
	}()
	c := client.Unix(filepath.Join(dir, api.SocketFile))
	defer c.Close()
	for {
		if _, err := c.Version(t.Context()); err == nil {
			break
		}
		select {
		case code := <-ended:
			ended <- code
			t.Fatalf("serve ended with %d: %s", code, &stderr)
		case <-time.After(10 * time.Millisecond):
		}
	}
	does(0, "", "secret", "set", "a", "x=from:serving")
	is("db 12 B 0444 0:0 from db", "x 4 B 0444 0:0 from serving")
	does(0, "", "sleep", "a")
	t.Setenv("DROWSE_TEST_SOURCE", "twelve")
	does(0, "", "wake", "a")
	is("db 12 B 0444 0:0 from db", "x 6 B 0444 0:0 from serving")
	does(0, "", "sleep", "a")
	if _, err := c.Wake(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	is("db 12 B 0444 0:0 from db", "x 6 B 0444 0:0 from serving")
	does(0, "", "secret", "source", "rm", "db", "serving")
	does(0, "", "rm", "-f", "a")
}
