package mcp_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/mcp"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// hanging tells when the command "hang" begins and ends.
type hanging struct{ begun, ended chan struct{} }

// newVMs returns VMs with the commands of these tests.
func newVMs() (*sandboxtest.VMs, hanging) {
	h := hanging{make(chan struct{}, 100), make(chan struct{}, 100)}
	return &sandboxtest.VMs{Commands: map[string]fakeguest.Command{
		"hang": func(ctx context.Context, _ *fakeguest.Process) int {
			h.begun <- struct{}{}
			<-ctx.Done()
			h.ended <- struct{}{}
			return 1
		},
		"exit3": func(_ context.Context, p *fakeguest.Process) int {
			fmt.Fprint(p.Stderr, "no <such> file & dir\xff")
			return 3
		},
		"flood": func(_ context.Context, p *fakeguest.Process) int {
			for i := range 100_000 {
				fmt.Fprintf(p.Stdout, "line %d\n", i)
			}
			return 0
		},
		"env": func(_ context.Context, p *fakeguest.Process) int {
			fmt.Fprintln(p.Stdout, p.Env, p.Dir, p.User)
			return 0
		},
	}}, h
}

// options are those of most tests.
func options(h *sandbox.Host) mcp.Options {
	return mcp.Options{
		Host: h, Owner: "mcp", Sandboxes: 4, VCPUs: 2, MemoryMiB: 256, DiskMiB: 512, Sleep: time.Hour,
		Image: func(_ context.Context, name string, _ func(string, int64, int64)) (*image.Image, error) {
			s, err := image.OpenStore(h.State.ImageDir())
			if err != nil {
				return nil, err
			}
			return s.Find(name)
		},
		Policy: func(allow []string) (*netpolicy.Policy, error) {
			p := &netpolicy.Policy{DNS: &netpolicy.DNS{Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}}}
			for _, w := range allow {
				p.Rules = append(p.Rules, netpolicy.Rule{
					Name: w, Direction: netpolicy.Egress, Verdict: netpolicy.Allow, Names: []string{w},
					Protocols: []netpolicy.Protocol{netpolicy.TCP}, Ports: []netpolicy.PortRange{{First: 443, Last: 443}},
				})
			}
			return p, nil
		},
	}
}

// client is a client of a server.
type client struct {
	*sdk.ClientSession
	t testing.TB
}

// connect serves a client in memory until the test ends.
func connect(t testing.TB, o mcp.Options, c *sdk.ClientOptions) *client {
	t.Helper()
	s, err := mcp.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := sdk.NewInMemoryTransports()
	served := make(chan error)
	go func() { served <- s.ServeTransport(context.Background(), ours) }()
	session, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, c).Connect(context.Background(), theirs, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = session.Close()
		if err := <-served; err != nil {
			t.Errorf("the server ends with %v", err)
		}
	})
	return &client{session, t}
}

type args = map[string]any

// call calls a tool. Its text must be its structured result, or an error.
func (c *client) call(tool string, a args) (out args, failed string) {
	c.t.Helper()
	res, err := c.CallTool(context.Background(), &sdk.CallToolParams{Name: tool, Arguments: a})
	if err != nil {
		c.t.Fatalf("%s %v is an error of the protocol: %v", tool, a, err)
	}
	if len(res.Content) != 1 {
		c.t.Fatalf("%s: %d contents", tool, len(res.Content))
	}
	text := res.Content[0].(*sdk.TextContent).Text
	if res.IsError {
		return nil, text
	}
	var structured args
	data, err := json.Marshal(res.StructuredContent)
	if err == nil {
		err = json.Unmarshal([]byte(text), &out)
	}
	if err == nil {
		err = json.Unmarshal(data, &structured)
	}
	if err != nil || fmt.Sprint(out) != fmt.Sprint(structured) {
		c.t.Fatalf("%s: the text %s is not the structured result %s (%v)", tool, text, data, err)
	}
	return out, ""
}

// must calls a tool that works.
func (c *client) must(tool string, a args) args {
	c.t.Helper()
	out, failed := c.call(tool, a)
	if failed != "" {
		c.t.Fatalf("%s %v: %s", tool, a, failed)
	}
	return out
}

// refused calls a tool that fails with a text that has all words.
func (c *client) refused(tool string, a args, words ...string) {
	c.t.Helper()
	out, failed := c.call(tool, a)
	if failed == "" {
		c.t.Errorf("%s %v works: %v", tool, a, out)
	}
	for _, w := range words {
		if !strings.Contains(failed, w) {
			c.t.Errorf("%s %v: %q does not say %q", tool, a, failed, w)
		}
	}
}

func phase(t *testing.T, h *sandbox.Host, name string, want state.Phase) {
	t.Helper()
	if r, err := h.State.Get(name); err != nil || r.Phase != want {
		t.Errorf("%s is %+v (%v), want %s", name, r, err, want)
	}
}

func TestTools_say_what_they_do_and_take(t *testing.T) {
	v, _ := newVMs()
	o := options(v.Host(t))
	o.Allow, o.Images = []string{"pypi.org"}, []string{sandboxtest.Image}
	res, err := connect(t, o, nil).ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	type hints struct{ readOnly, destructive, idempotent, world bool }
	want := map[string]hints{
		"create_sandbox": {world: true}, "list_sandboxes": {readOnly: true, idempotent: true}, "sleep_sandbox": {idempotent: true},
		"fork_sandbox": {}, "delete_sandbox": {destructive: true, idempotent: true}, "exec": {destructive: true, world: true},
		"read_file": {readOnly: true, idempotent: true}, "write_file": {destructive: true}, "list_dir": {readOnly: true, idempotent: true},
		"stat_file": {readOnly: true, idempotent: true}, "remove_file": {destructive: true, idempotent: true},
		"get_policy": {readOnly: true, idempotent: true}, "set_policy": {destructive: true, idempotent: true}, "list_ports": {readOnly: true, idempotent: true},
	}
	for _, tool := range res.Tools {
		a := tool.Annotations
		if got := (hints{a.ReadOnlyHint, *a.DestructiveHint, a.IdempotentHint, *a.OpenWorldHint}); got != want[tool.Name] {
			t.Errorf("%s has the hints %+v, want %+v", tool.Name, got, want[tool.Name])
		}
		delete(want, tool.Name)
		if n := len(tool.Description); n < 40 || n > 450 {
			t.Errorf("%s has a description of %d bytes", tool.Name, n)
		}
		for kind, schema := range map[string]any{"arguments": tool.InputSchema, "result": tool.OutputSchema} {
			s, ok := schema.(args)
			if !ok || s["type"] != "object" {
				t.Errorf("the %s of %s are %v", kind, tool.Name, schema)
				continue
			}
			properties, _ := s["properties"].(args)
			for name, p := range properties {
				if kind == "arguments" && (p.(args)["description"] == nil && name != "content" || p.(args)["type"] == nil) {
					t.Errorf("argument %s of %s: %v", name, tool.Name, p)
				}
			}
		}
		if tool.Name == "create_sandbox" {
			text, _ := json.Marshal(tool.InputSchema)
			for _, w := range []string{`"enum":["pypi.org"]`, `"enum":["test"]`, `"maximum":256`, `"maximum":2`} {
				if !strings.Contains(string(text), w) {
					t.Errorf("its schema has no %s: %s", w, text)
				}
			}
		}
	}
	if len(want) > 0 {
		t.Errorf("there are no tools %v", want)
	}
}

func TestTools_work_together(t *testing.T) {
	v, _ := newVMs()
	h := v.Host(t)
	o := options(h)
	o.Allow = []string{"pypi.org", "example.com"}
	c := connect(t, o, nil)
	made := c.must("create_sandbox", args{"name": "a", "allow": []string{"pypi.org"}, "memory_mib": 64, "command": []string{"echo", "hi"}})
	if made["status"] != "running" || made["result"].(args)["stdout"] != "hi\n" || fmt.Sprint(made["allow"]) != "[pypi.org]" {
		t.Errorf("create says %v", made)
	}
	r, err := h.State.Get("a")
	if err != nil || r.Spec.MemoryMiB != 64 || r.Spec.DiskMiB != 512 || r.Spec.VCPUs != 1 || r.Spec.Idle.SleepSeconds != 3600 || len(r.Spec.Shares) > 0 {
		t.Errorf("the sandbox is %+v (%v)", r, err)
	}
	// Commands.
	out := c.must("exec", args{"sandbox": "a", "command": []string{"exit3"}})
	if out["exit_code"] != 3.0 || out["stderr"] != "no <such> file & dir\uFFFD" {
		t.Errorf("exec says %v", out)
	}
	if out := c.must("exec", args{"sandbox": "a", "command": []string{"cat"}, "stdin": "été"}); out["stdout"] != "été" {
		t.Errorf("cat says %v", out)
	}
	out = c.must("exec", args{"sandbox": "a", "command": []string{"env"}, "env": args{"B": "2", "A": "1"}, "cwd": "/tmp", "user": "nobody"})
	if out["stdout"] != "[PATH=/bin HOME=/root A=1 B=2] /tmp nobody\n" {
		t.Errorf("env says %v", out)
	}
	if out := c.must("exec", args{"sandbox": "a", "command": []string{"nosuch"}}); out["exit_code"] != 127.0 || out["not_started"] == "" {
		t.Errorf("a command that is not there: %v", out)
	}
	out = c.must("exec", args{"sandbox": "a", "command": []string{"flood"}})
	text := out["stdout"].(string)
	if out["truncated"] != true || out["stdout_bytes"] != 1088890.0 || !strings.HasPrefix(text, "line 0\n") || !strings.HasSuffix(text, "line 99999\n") ||
		!strings.Contains(text, fmt.Sprintf("\n[%d bytes left out]\n", 1088890-32<<10)) || len(text) > 33<<10 {
		t.Errorf("a flood is %d bytes of %v: %.40q", len(text), out["stdout_bytes"], text)
	}
	// Files, with a sleep in between.
	c.must("write_file", args{"sandbox": "a", "path": "/work/x/main.py", "content": "print('<&>')\n", "executable": true})
	if out := c.must("sleep_sandbox", args{"sandbox": "a"}); out["status"] != "asleep" {
		t.Errorf("sleep says %v", out)
	}
	phase(t, h, "a", state.Asleep)
	c.must("get_policy", args{"sandbox": "a"})
	c.must("list_sandboxes", nil)
	phase(t, h, "a", state.Asleep)
	if out := c.must("read_file", args{"sandbox": "a", "path": "/work/x/main.py"}); out["content"] != "print('<&>')\n" || out["encoding"] != "utf-8" || out["next_offset"] != nil {
		t.Errorf("read says %v", out)
	}
	phase(t, h, "a", state.Running)
	if out := c.must("stat_file", args{"sandbox": "a", "path": "/work/x/main.py"}); out["mode"] != "0755" || out["kind"] != "file" || out["size"] != 13.0 {
		t.Errorf("stat says %v", out)
	}
	binary := []byte{0, 1, 0xff, 0xfe}
	c.must("write_file", args{"sandbox": "a", "path": "/work/bin", "content": base64.StdEncoding.EncodeToString(binary), "encoding": "base64"})
	if out := c.must("read_file", args{"sandbox": "a", "path": "/work/bin"}); out["encoding"] != "base64" || out["content"] != "AAH//g==" {
		t.Errorf("read of bytes says %v", out)
	}
	if out := c.must("list_dir", args{"sandbox": "a", "path": "/work"}); out["total"] != 2.0 || out["entries"].([]any)[1].(args)["kind"] != "directory" {
		t.Errorf("list says %v", out)
	}
	c.must("remove_file", args{"sandbox": "a", "path": "/work/bin"})
	c.refused("remove_file", args{"sandbox": "a", "path": "/work/x"})
	c.must("remove_file", args{"sandbox": "a", "path": "/work/x", "recursive": true})
	c.refused("read_file", args{"sandbox": "a", "path": "/work/x/main.py"}, "list_dir of /work/x")
	// A fork has an owner too, and is found.
	child := c.must("fork_sandbox", args{"sandbox": "a"})["sandboxes"].([]any)[0].(string)
	c.must("exec", args{"sandbox": child, "command": []string{"true"}})
	list := c.must("list_sandboxes", nil)
	if len(list["sandboxes"].([]any)) != 2 || fmt.Sprint(list["images"]) != "[test]" || fmt.Sprint(list["allow"]) != "[pypi.org example.com]" {
		t.Errorf("list says %v", list)
	}
	// Policy.
	if out := c.must("set_policy", args{"sandbox": "a", "allow": []string{"example.com"}}); out["live"] != true {
		t.Errorf("set_policy says %v", out)
	}
	out = c.must("get_policy", args{"sandbox": "a"})
	if fmt.Sprint(out["rules"]) != "[map[direction:egress name:example.com verdict:allow]]" || out["default"] != "deny" {
		t.Errorf("get_policy says %v", out)
	}
	c.must("set_policy", args{"sandbox": "a", "allow": []string{}})
	if p, err := h.Sandbox("a").Policy(); err != nil || len(p.Rules) > 0 || p.Default.Egress == netpolicy.Allow {
		t.Errorf("the policy is %+v (%v)", p, err)
	}
	// Ports.
	table := "  sl  local_address rem_address   st\n   0: 0100007F:1F90 00000000:0000 0A 0\n   1: 0100007F:1F91 0100007F:1111 01 0\n"
	if err := v.Guest("a").WriteFile("/proc/net/tcp", []byte(table)); err != nil {
		t.Fatal(err)
	}
	out = c.must("list_ports", args{"sandbox": "a"})
	if fmt.Sprint(out["ports"]) != "[map[address:127.0.0.1 port:8080]]" || !strings.Contains(out["reach"].(string), "drowse port-forward a") {
		t.Errorf("list_ports says %v", out)
	}
	c.must("delete_sandbox", args{"sandbox": "a"})
	c.refused("exec", args{"sandbox": "a", "command": []string{"true"}}, "list_sandboxes")
}

func TestModel_reaches_nothing_beyond_its_options(t *testing.T) {
	v, _ := newVMs()
	h := v.Host(t)
	if _, err := h.Create(t.Context(), sandbox.Spec{Name: "other", Image: sandboxtest.Image}, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: "someone"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Create(t.Context(), sandbox.Spec{Name: "nobodys", Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c := connect(t, options(h), nil)
	for _, name := range []string{"other", "nobodys", "none", "../other", "", strings.Repeat("x", 64)} {
		for tool, a := range map[string]args{
			"exec": {"command": []string{"true"}}, "read_file": {"path": "/etc/hostname"}, "write_file": {"path": "/x", "content": ""}, "list_dir": {"path": "/"},
			"stat_file": {"path": "/"}, "remove_file": {"path": "/etc/hostname"}, "sleep_sandbox": {}, "fork_sandbox": {}, "delete_sandbox": {},
			"get_policy": {}, "set_policy": {"allow": []string{}}, "list_ports": {},
		} {
			a["sandbox"] = name
			c.refused(tool, a, "there is no sandbox", "list_sandboxes")
		}
	}
	phase(t, h, "other", state.Running)
	if list := c.must("list_sandboxes", nil); len(list["sandboxes"].([]any)) > 0 {
		t.Errorf("it sees %v", list)
	}
	c.refused("create_sandbox", args{"name": "other"}, "taken")
	c.refused("create_sandbox", args{"allow": []string{"evil.example"}})
	c.refused("create_sandbox", args{"image": "registry.example/evil:1"}, "no image", "use one of test")
	c.refused("create_sandbox", args{"image": "../../etc"})
	c.refused("create_sandbox", args{"memory_mib": 257}, "256")
	c.refused("create_sandbox", args{"vcpus": 3}, "2")
	for _, more := range []string{"shares", "volumes", "kernel", "policy", "network", "cmdline", "owner"} {
		c.refused("create_sandbox", args{more: "x"}, more)
	}
	// Its sandboxes have no network, and get none.
	c.must("create_sandbox", args{"name": "mine"})
	if r, err := h.State.Get("mine"); err != nil || r.Spec.Network != spec.NetworkNone {
		t.Errorf("its network is %+v (%v)", r.Spec, err)
	}
	c.refused("set_policy", args{"sandbox": "mine", "allow": []string{"pypi.org"}})
	c.must("set_policy", args{"sandbox": "mine", "allow": []string{}})
	if out := c.must("get_policy", args{"sandbox": "mine"}); out["network"] != false || out["default"] != "deny" {
		t.Errorf("get_policy says %v", out)
	}
	if out := c.must("list_ports", args{"sandbox": "mine"}); len(out["ports"].([]any)) > 0 {
		t.Errorf("list_ports says %v", out)
	}
	// Not more than there may be, by forks neither.
	c.refused("create_sandbox", args{"name": "mine"}, "already")
	c.refused("fork_sandbox", args{"sandbox": "mine", "count": 4}, "delete_sandbox")
	c.must("fork_sandbox", args{"sandbox": "mine", "count": 3})
	c.refused("create_sandbox", nil, "there are 4 sandboxes", "delete_sandbox")
	// The options allow more.
	o := options(h)
	o.All = true
	if list := connect(t, o, nil).must("list_sandboxes", nil); len(list["sandboxes"].([]any)) != 6 {
		t.Errorf("with All it sees %v", list)
	}
	o = options(h)
	o.Allow, o.Images, o.Sandboxes = []string{"pypi.org"}, []string{"test"}, 20
	c = connect(t, o, nil)
	for _, word := range []string{"PyPI.org", "pypi.org:80", "open", "0.0.0.0/0", "*.pypi.org", "pypi.org,evil.example"} {
		c.refused("create_sandbox", args{"allow": []string{word}})
		c.refused("set_policy", args{"sandbox": "mine", "allow": []string{word}})
	}
	c.refused("create_sandbox", args{"image": "test:latest"})
	c.refused("set_policy", args{"sandbox": "mine", "allow": []string{"pypi.org"}}, "without a network")
	c.must("create_sandbox", args{"name": "netted"})
	if p, err := h.Sandbox("netted").Policy(); err != nil || len(p.Rules) > 0 || p.Default.Egress == netpolicy.Allow {
		t.Errorf("without allow its policy is %+v (%v)", p, err)
	}
}

func TestPolicy_of_the_user_keeps_what_the_model_has_no_word_for(t *testing.T) {
	v, _ := newVMs()
	h := v.Host(t)
	const rate = 5
	p := &netpolicy.Policy{
		Publish: []netpolicy.Published{{Listen: netip.MustParseAddrPort("127.0.0.1:8080"), Port: 80, Protocol: netpolicy.TCP}},
		Flows:   100 * rate,
	}
	s := sandbox.Spec{Name: "a", Image: sandboxtest.Image, Network: spec.NetworkTAP, Policy: p}
	if _, err := h.Create(t.Context(), s, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: "mcp"}}); err != nil {
		t.Fatal(err)
	}
	o := options(h)
	o.Allow = []string{"pypi.org"}
	c := connect(t, o, nil)
	c.must("set_policy", args{"sandbox": "a", "allow": []string{"pypi.org"}})
	now, err := h.Sandbox("a").Policy()
	if err != nil || len(now.Publish) != 1 || now.Flows != 500 || len(now.Rules) != 1 {
		t.Errorf("the policy is %+v (%v)", now, err)
	}
	if out := c.must("list_ports", args{"sandbox": "a"}); fmt.Sprint(out["ports"]) != "[map[port:80 published:[127.0.0.1:8080]]]" {
		t.Errorf("list_ports says %v", out)
	}
}

func TestCreations_at_once_make_no_more_than_there_may_be(t *testing.T) {
	v, _ := newVMs()
	o := options(v.Host(t))
	o.Sandboxes = 3
	c := connect(t, o, nil)
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() { _, _ = c.call("create_sandbox", args{"memory_mib": 64}) })
	}
	all.Wait()
	if list := c.must("list_sandboxes", nil); len(list["sandboxes"].([]any)) != 3 {
		t.Errorf("there are %v", list)
	}
}

func TestArguments_that_are_wrong_are_results_with_a_remedy(t *testing.T) {
	v, _ := newVMs()
	c := connect(t, options(v.Host(t)), nil)
	c.must("create_sandbox", args{"name": "a"})
	in := func(more args) args { more["sandbox"] = "a"; return more }
	for _, tt := range []struct {
		tool string
		a    args
		says string
	}{
		{"exec", in(args{}), "command"},
		{"exec", in(args{"command": []string{}}), "command"},
		{"exec", in(args{"command": []string{""}}), "no command"},
		{"exec", in(args{"command": "ls"}), "array"},
		{"exec", in(args{"command": []string{"a\x00"}}), "zero byte"},
		{"exec", in(args{"command": []string{strings.Repeat("x", 101<<10)}}), "write_file"},
		{"exec", in(args{"command": []string{"true"}, "timeout_seconds": 3601}), "3600"},
		{"exec", in(args{"command": []string{"true"}, "timeout_seconds": 0}), "timeout_seconds"},
		{"exec", in(args{"command": []string{"true"}, "cwd": "work"}), "absolute"},
		{"exec", in(args{"command": []string{"true"}, "env": args{"A=B": "x"}}), "without ="},
		{"exec", in(args{"command": []string{"true"}, "stdin": strings.Repeat("x", 1<<20+1)}), "stdin"},
		{"read_file", in(args{"path": "etc"}), "path"},
		{"read_file", in(args{"path": "/etc/hostname", "offset": -1}), "offset"},
		{"read_file", in(args{"path": "/etc/hostname", "max_bytes": 1 << 30}), "max_bytes"},
		{"read_file", in(args{"path": "/etc"}), ""},
		{"write_file", in(args{"path": "/x", "content": "!", "encoding": "base64"}), "base64"},
		{"write_file", in(args{"path": "/x", "content": "x", "encoding": "latin1"}), "encoding"},
		{"write_file", in(args{"path": "/x", "content": strings.Repeat("x", 1<<20+1)}), "append"},
		{"write_file", in(args{"path": "/etc", "content": "x"}), ""},
		{"list_dir", in(args{"path": "/none"}), "list_dir of /"},
		{"fork_sandbox", in(args{"count": 17}), "16"},
		{"create_sandbox", args{"name": "A b"}, "name"},
	} {
		c.refused(tt.tool, tt.a, tt.says)
	}
	if out := c.must("exec", in(args{"command": []string{"hang"}, "timeout_seconds": 1})); out["timed_out"] != true {
		t.Errorf("a command beyond its time: %v", out)
	}
}

func TestFiles_are_read_in_parts_that_cut_no_character(t *testing.T) {
	v, _ := newVMs()
	c := connect(t, options(v.Host(t)), nil)
	c.must("create_sandbox", args{"name": "a"})
	want := strings.Repeat("ä€😀x", 100)
	c.must("write_file", args{"sandbox": "a", "path": "/tmp/t", "content": want[:300]})
	c.must("write_file", args{"sandbox": "a", "path": "/tmp/t", "content": want[300:], "append": true})
	for _, size := range []int{5, 7, 64, 1000} {
		got, next := "", any(0)
		for next != nil {
			out := c.must("read_file", args{"sandbox": "a", "path": "/tmp/t", "offset": next, "max_bytes": size})
			if out["encoding"] != "utf-8" {
				t.Fatalf("a part is %v", out)
			}
			got, next = got+out["content"].(string), out["next_offset"]
		}
		if got != want {
			t.Errorf("in parts of %d: %q", size, got)
		}
	}
}

func TestCall_that_is_canceled_ends_its_command(t *testing.T) {
	v, hang := newVMs()
	c := connect(t, options(v.Host(t)), nil)
	c.must("create_sandbox", args{"name": "a"})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-hang.begun
		cancel()
	}()
	_, err := c.CallTool(ctx, &sdk.CallToolParams{Name: "exec", Arguments: args{"sandbox": "a", "command": []string{"hang"}}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("the call ends with %v", err)
	}
	<-hang.ended
	c.must("exec", args{"sandbox": "a", "command": []string{"true"}}) // the session goes on
}

func TestClient_that_goes_ends_its_commands_and_leaves_its_sandboxes(t *testing.T) {
	for _, how := range []string{"stdin ends", "the server is told to end"} {
		t.Run(how, func(t *testing.T) {
			v, hang := newVMs()
			h := v.Host(t)
			s, err := mcp.New(options(h))
			if err != nil {
				t.Fatal(err)
			}
			in, toServer := io.Pipe()
			fromServer, out := io.Pipe()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			served := make(chan error)
			go func() { served <- s.Serve(ctx, in, out); out.Close() }()
			session, err := sdk.NewClient(&sdk.Implementation{Name: "test"}, nil).Connect(t.Context(), &sdk.IOTransport{Reader: fromServer, Writer: toServer}, nil)
			if err != nil {
				t.Fatal(err)
			}
			c := &client{session, t}
			c.must("create_sandbox", args{"name": "a"})
			go func() {
				_, _ = session.CallTool(context.Background(), &sdk.CallToolParams{Name: "exec", Arguments: args{"sandbox": "a", "command": []string{"hang"}}})
			}()
			<-hang.begun
			if how == "stdin ends" {
				toServer.Close()
			} else {
				cancel()
			}
			<-hang.ended
			if err := <-served; err != nil {
				t.Errorf("the server ends with %v", err)
			}
			_ = session.Close()
			toServer.Close()
			in.Close()
			phase(t, h, "a", state.Running) // until it is idle
		})
	}
}

func TestClient_hears_of_the_progress_of_a_pull(t *testing.T) {
	v, _ := newVMs()
	o := options(v.Host(t))
	find := o.Image
	o.Images = []string{sandboxtest.Image}
	o.Image = func(ctx context.Context, name string, progress func(string, int64, int64)) (*image.Image, error) {
		for i := range int64(1000) { // in no time, so most are left out
			progress("download", i, 1000)
		}
		progress("write", 0, 0)
		return find(ctx, name, progress)
	}
	var mu sync.Mutex
	var heard []string
	last := 0.0
	c := connect(t, o, &sdk.ClientOptions{ProgressNotificationHandler: func(_ context.Context, r *sdk.ProgressNotificationClientRequest) {
		mu.Lock()
		defer mu.Unlock()
		if heard = append(heard, r.Params.Message); r.Params.Progress <= last || r.Params.ProgressToken != "p" {
			t.Errorf("progress %+v after %v", r.Params, last)
		}
		last = r.Params.Progress
	}})
	p := &sdk.CallToolParams{Name: "create_sandbox", Arguments: args{}}
	p.SetProgressToken("p")
	if res, err := c.CallTool(t.Context(), p); err != nil || res.IsError {
		t.Fatalf("%+v, %v", res, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(heard) > 50 || !slices.Contains(heard, "download: 0 of 1000") || !slices.Contains(heard, "write") || !slices.Contains(heard, "boot") {
		t.Errorf("it hears %q", heard)
	}
}

func TestOptions_that_cannot_be_are_refused(t *testing.T) {
	v, _ := newVMs()
	h := v.Host(t)
	for what, change := range map[string]func(*mcp.Options){
		"no owner":        func(o *mcp.Options) { o.Owner = "" },
		"a long owner":    func(o *mcp.Options) { o.Owner = strings.Repeat("x", 200) },
		"no sandboxes":    func(o *mcp.Options) { o.Sandboxes = 0 },
		"CPUs":            func(o *mcp.Options) { o.VCPUs = 9 },
		"memory":          func(o *mcp.Options) { o.MemoryMiB = 1 },
		"a disk":          func(o *mcp.Options) { o.DiskMiB = 1 },
		"a negative time": func(o *mcp.Options) { o.Sleep = -time.Second },
	} {
		o := options(h)
		change(&o)
		if _, err := mcp.New(o); err == nil {
			t.Errorf("%s is accepted", what)
		}
	}
}

// FuzzCall calls tools with any arguments: no call is an error of the protocol, and the session goes on.
func FuzzCall(f *testing.F) {
	v, _ := newVMs()
	o := options(v.Host(f))
	o.Allow = []string{"pypi.org"}
	c := connect(f, o, nil)
	c.must("create_sandbox", args{"name": "a"})
	f.Add("exec", `{"sandbox":"a","command":["echo","x"],"env":{"A":"1"},"cwd":"/","timeout_seconds":5}`)
	f.Add("read_file", `{"sandbox":"a","path":"/etc/hostname","offset":1,"max_bytes":3}`)
	f.Add("write_file", `{"sandbox":"a","path":"/tmp/x","content":"eA==","encoding":"base64"}`)
	f.Add("list_dir", `{"sandbox":"a","path":"/"}`)
	f.Add("stat_file", `{"sandbox":"a","path":"/../x"}`)
	f.Add("remove_file", `{"sandbox":"a","path":"/tmp/x","recursive":null}`)
	f.Add("set_policy", `{"sandbox":"a","allow":["pypi.org"]}`)
	f.Add("list_ports", `{"sandbox":"a"}`)
	f.Add("get_policy", `{"sandbox":1e400}`)
	f.Add("list_sandboxes", `{"x":[[[[{}]]]]}`)
	f.Add("fork_sandbox", `{"sandbox":"b","count":1.5}`)
	f.Fuzz(func(t *testing.T, tool, text string) {
		switch tool {
		case "exec", "read_file", "write_file", "list_dir", "stat_file", "remove_file", "set_policy", "list_ports", "get_policy", "list_sandboxes":
		default:
			return // others make sandboxes, or take the one there is
		}
		if !json.Valid([]byte(text)) || len(text) > 1<<20 {
			return
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		res, err := c.CallTool(ctx, &sdk.CallToolParams{Name: tool, Arguments: json.RawMessage(text)})
		if err != nil {
			t.Fatalf("%s %s: %v", tool, text, err)
		}
		if res.IsError && len(res.Content[0].(*sdk.TextContent).Text) > 16<<10 {
			t.Errorf("%s %s: an endless error", tool, text)
		}
	})
}

// FuzzServe reads any bytes as a client's lines: it ends with them, does not wait for tools, and answers in lines that
// are JSON-RPC, of bounded length.
func FuzzServe(f *testing.F) {
	v, _ := newVMs()
	o := options(v.Host(f))
	connect(f, o, nil).must("create_sandbox", args{"name": "a"})
	const hello = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}` + "\n" +
		`{"jsonrpc":"2.0","method":"notifications/initialized"}` + "\n"
	call := func(tool, arguments string) string {
		return `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"` + tool + `","arguments":` + arguments + `,"_meta":{"progressToken":"p"}}}` + "\n"
	}
	for _, seed := range []string{
		hello + `{"jsonrpc":"2.0","id":2,"method":"tools/list"}` + "\n", hello + call("exec", `{"sandbox":"a","command":["echo","x"]}`), hello + call("exec", `{"sandbox":"a","command":["hang"]}`),
		hello + call("exec", `{"sandbox":"a","command":["flood"]}`) + `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":2}}` + "\n",
		hello + call("none", `{}`), hello + call("read_file", `[]`), hello + "[" + strings.TrimSpace(call("list_sandboxes", `{}`)) + "]\n", `{"jsonrpc":"2.0","id":{},"method":"ping"}` + "\n",
		"{}\n", "null\n", "\x00\n", "", hello + hello, `{"jsonrpc":"2.0","id":1,"result":{}}` + "\n", strings.Repeat("[", 20_000) + "\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		if len(input) > 64<<10 {
			return
		}
		s, err := mcp.New(o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		var out lockedBuffer
		err = s.Serve(ctx, strings.NewReader(string(input)), &out)
		if ctx.Err() != nil {
			t.Fatalf("it has not ended with its client: %q", input)
		}
		if err != nil && (err.Error() == "" || len(err.Error()) > 1<<10+2*len(input)) {
			t.Errorf("ends with %v", err)
		}
		answers := out.String()
		// A call has an answer of at most 256 KiB: 64 KiB of output, twice, in JSON.
		if most := 2<<20 + (len(input)/64)*(256<<10); len(answers) > most {
			t.Errorf("%d bytes are the answer to %d", len(answers), len(input))
		}
		for line := range strings.Lines(answers) {
			type message struct{ JSONRPC string }
			all := make([]message, 1)
			var err error
			if strings.HasPrefix(line, "[") { // to a batch
				err = json.Unmarshal([]byte(line), &all)
			} else {
				err = json.Unmarshal([]byte(line), &all[0])
			}
			if err != nil || len(all) == 0 || slices.ContainsFunc(all, func(m message) bool { return m.JSONRPC != "2.0" }) {
				t.Errorf("line %.200q: %v", line, err)
			}
		}
	})
}

// lockedBuffer is a buffer that several goroutines write to.
type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
