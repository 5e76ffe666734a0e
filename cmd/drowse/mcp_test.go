//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/mcp"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// memoryEnv makes this test binary drowse, with VMs in memory.
const memoryEnv = "DROWSE_TEST_IN_MEMORY"

func init() {
	if os.Getenv(memoryEnv) == "" {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	vms := &sandboxtest.VMs{}
	processes = vms
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	vms.Close()
	os.Exit(code)
}

// mcpServer returns the command line of a server in a process of its own, and its state directory.
func mcpServer(t *testing.T, flags ...string) (cmd *exec.Cmd, dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "vms") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	h, err := sandbox.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	l, err := (&sandboxtest.VMs{}).Launcher(h)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(memoryEnv, "1")
	t.Setenv("DROWSE_AGENT", l.Agent)
	return exec.Command(self, append([]string{"--state", dir, "mcp"}, flags...)...), dir
}

func TestMCP_serves_a_client_over_stdin_and_stdout_and_ends_with_it(t *testing.T) {
	for _, how := range []string{"stdin ends", "SIGTERM"} {
		t.Run(how, func(t *testing.T) {
			cmd, dir := mcpServer(t, "--owner", "me", "--max-memory", "128m")
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			session, err := sdk.NewClient(&sdk.Implementation{Name: "test"}, nil).Connect(t.Context(), &sdk.IOTransport{Reader: out, Writer: in}, nil)
			if err != nil {
				t.Fatalf("%v: %s", err, &stderr)
			}
			call := func(tool string, args map[string]any) string {
				t.Helper()
				res, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: tool, Arguments: args})
				if err != nil {
					t.Fatalf("%s: %v: %s", tool, err, &stderr)
				}
				return res.Content[0].(*sdk.TextContent).Text
			}
			if text := call("create_sandbox", map[string]any{"name": "a", "command": []string{"echo", "hi"}}); !strings.Contains(text, `"stdout":"hi\n"`) || !strings.Contains(text, `"memory_mib":128`) {
				t.Errorf("create says %s", text)
			}
			if text := call("create_sandbox", map[string]any{"image": "registry.example/x"}); !strings.Contains(text, "no image") {
				t.Errorf("an image that would have to be pulled: %s", text)
			}
			h, err := sandbox.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			if m, err := h.State.Metadata("a"); err != nil || m.Owner != "me" {
				t.Errorf("its metadata is %+v (%v)", m, err)
			}
			hanging := make(chan struct{})
			go func() {
				defer close(hanging)
				_, _ = session.CallTool(context.Background(), &sdk.CallToolParams{Name: "exec", Arguments: map[string]any{"sandbox": "a", "command": []string{"sleep", "600"}, "timeout_seconds": 3600}})
			}()
			if how == "SIGTERM" {
				err = cmd.Process.Signal(syscall.SIGTERM)
			} else {
				err = in.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
			<-hanging
			_ = session.Close()
			if err := cmd.Wait(); err != nil || stderr.Len() > 0 {
				t.Errorf("the process ends with %v, and says %q", err, &stderr)
			}
		})
	}
}

func TestMCP_refuses_flags_that_cannot_be(t *testing.T) {
	dir, _, _ := inMemory(t)
	for _, tt := range []struct {
		flags, says string
	}{
		{"--owner=", "owner"},
		{"--max-sandboxes 0", "use 1 to 1000"},
		{"--max-memory 1m", "use 64"},
		{"--max-vcpus 9", "use 1 to 8"},
		{"--sleep-after=-1s", "0 for never"},
		{"--allow-net http://x/", "--allow"},
		{"--allow-net open --allow-net :0", "--allow"},
		{"extra", "drowse mcp --help"},
	} {
		code, stdout, stderr := drowse(t, dir, append([]string{"mcp"}, strings.Fields(tt.flags)...)...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.says) {
			t.Errorf("mcp %s: %d, %q, %q", tt.flags, code, stdout, stderr)
		}
	}
}

func TestPolicy_of_a_model_opens_what_it_has_chosen(t *testing.T) {
	inMemory(t)
	p, err := modelPolicy([]string{"pypi.org"})
	if err != nil || len(p.Rules) != 1 || p.Default.Egress != "" || p.DNS == nil {
		t.Errorf("a name: %+v, %v", p, err)
	}
	p, err = modelPolicy([]string{"open", "10.0.0.0/8:5432"})
	if err != nil || len(p.Rules) != 1 || p.Default.Egress != "allow" || p.Default.Ingress != "" {
		t.Errorf("open: %+v, %v", p, err)
	}
}

// npmEnv is a directory with the npm package of the protocol in node_modules.
const npmEnv = "DROWSE_TEST_NPM"

func TestMCP_serves_the_npm_client_unmodified(t *testing.T) {
	node, err := exec.LookPath("node")
	dir := os.Getenv(npmEnv)
	if err != nil || dir == "" {
		t.Skipf("it needs node, and a directory in $%s: use `make test-mcp`", npmEnv)
	}
	cmd, _ := mcpServer(t)
	script := filepath.Join(t.TempDir(), "mcp.mjs")
	text, err := os.ReadFile("testdata/mcp.mjs")
	if err == nil {
		err = errors.Join(os.WriteFile(script, text, 0o600), os.Symlink(filepath.Join(dir, "node_modules"), filepath.Join(filepath.Dir(script), "node_modules")))
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), node, append([]string{script}, cmd.Args...)...).CombinedOutput()
	if err != nil || string(out) != "ok\n" {
		t.Error(fmt.Errorf("%w: %s", err, out))
	}
}

func TestMCP_tools_work_in_a_guest(t *testing.T) {
	e := guesttest.New(t)
	e.Template(sandbox.Spec{})
	h := e.Store.With(e.Launcher)
	s, err := mcp.New(mcp.Options{
		Host: h, Owner: "mcp", Images: []string{guesttest.ImageTag}, Sandboxes: 2, VCPUs: 1, MemoryMiB: 256, DiskMiB: 256, Policy: modelPolicy,
		Image: func(ctx context.Context, name string, _ func(string, int64, int64)) (*image.Image, error) {
			return (&pullFlags{when: pullNever}).image(ctx, nil, h, name)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := sdk.NewInMemoryTransports()
	served := make(chan error)
	go func() { served <- s.ServeTransport(context.Background(), ours) }()
	session, err := sdk.NewClient(&sdk.Implementation{Name: "test"}, nil).Connect(t.Context(), theirs, nil)
	if err != nil {
		t.Fatal(err)
	}
	has := func(tool string, args map[string]any, words ...string) {
		t.Helper()
		res, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: tool, Arguments: args})
		if err != nil {
			t.Fatalf("%s: %v", tool, err)
		}
		text := res.Content[0].(*sdk.TextContent).Text
		for _, w := range words {
			if res.IsError || !strings.Contains(text, w) {
				t.Errorf("%s %v says no %q: %s", tool, args, w, text)
			}
		}
	}
	sh := func(script string) map[string]any {
		return map[string]any{"sandbox": "a", "command": []string{"sh", "-c", script}, "timeout_seconds": 120}
	}
	has("create_sandbox", map[string]any{"name": "a", "command": []string{"id", "-u"}}, `"stdout":"0\n"`)
	// What a command leaves running goes on, also over a sleep.
	has("exec", sh(`mkfifo /tmp/up
		perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1:8080") or die; open(F, ">/tmp/up"); print F "up\n"; close(F); sleep 9999' >/tmp/log 2>&1 &
		read up </tmp/up`), `"exit_code":0`)
	has("list_ports", map[string]any{"sandbox": "a"}, `{"port":8080,"address":"127.0.0.1"}`)
	has("write_file", map[string]any{"sandbox": "a", "path": "/work/x/run", "content": "#!/bin/sh\necho ran\n", "executable": true}, `"bytes":19`)
	has("sleep_sandbox", map[string]any{"sandbox": "a"}, "asleep")
	has("exec", map[string]any{"sandbox": "a", "command": []string{"/work/x/run"}}, `"stdout":"ran\n"`)
	has("list_ports", map[string]any{"sandbox": "a"}, `"port":8080`)
	has("fork_sandbox", map[string]any{"sandbox": "a"}, "box-")
	has("exec", sh("yes | head -c 1000000"), `"truncated":true`, `"stdout_bytes":1000000`)
	has("delete_sandbox", map[string]any{"sandbox": "a"}, `"deleted":"a"`)
	_ = session.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
