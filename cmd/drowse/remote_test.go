//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
)

// noContexts gives a test a home of its own, without contexts.
func noContexts(t *testing.T) (file string) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", dir)
	for _, name := range []string{"DROWSE_HOST", "DROWSE_TOKEN", "DROWSE_TOKEN_FILE", "DROWSE_CLIENT_CERT", "DROWSE_CLIENT_KEY", "DROWSE_STATE"} {
		t.Setenv(name, "")
	}
	return filepath.Join(dir, "drowse", "contexts.json")
}

// serveTCP serves a host's API on a port of this machine, and returns its URL and a token for everything.
func serveTCP(t *testing.T, h *sandbox.Host) (at, token string) {
	t.Helper()
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	token, err := known.Create(tokens.Token{Name: "all", Scopes: tokens.All()})
	if err != nil {
		t.Fatal(err)
	}
	l, err := api.TCP{Address: "127.0.0.1:0"}.Listen(known)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	s := api.New(api.Options{Host: h, Tokens: known, Version: "test"})
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "http://" + l.Addr().String(), token
}

// far runs a command line with --host.
func far(t *testing.T, at string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs strings.Builder
	code = run(t.Context(), append([]string{"--host", at}, args...), &out, &errs)
	return code, out.String(), errs.String()
}

// same replaces what differs between two hosts: times, ids, sizes on disk and made-up names.
func same(text string) string {
	for _, r := range []struct{ is, as string }{
		{`\b[0-9a-f]{12,}\b`, "ID"}, {`\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\.\d+)?(Z|[+-]\d\d:\d\d)?`, "TIME"}, {`"(pid|disk_bytes|elapsed_ms)": [\d.]+`, `"$1": N`},
		{`\d+(\.\d+)? ([KMG]i)?B\b`, "SIZE"}, {`took \d+\.\d ms`, "took N"}, {`\bby (cli|api)\b`, "by CAUSE"}, {`/tmp/[^\s":]*`, "PATH"}, {`\b198\.18\.\d+\.\d+`, "ADDRESS"}, {` {2,}`, "  "},
	} {
		text = regexp.MustCompile(r.is).ReplaceAllString(text, r.as)
	}
	return text
}

// TestRemote_commands_say_what_local_ones_say runs the same lines in a state directory and in another through a server.
func TestRemote_commands_say_what_local_ones_say(t *testing.T) {
	noContexts(t)
	here, _, _ := inMemory(t)
	there, h, vms := inMemory(t) // local commands too have these VMs
	vms.Flows = someFlows
	at, token := serveTCP(t, h)
	t.Setenv("DROWSE_TOKEN", token)
	files := t.TempDir()
	hub := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer hub.Close()
	app := strings.TrimPrefix(hub.URL, "http://") + "/app:v1"
	push(t, app)
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(files, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	policy := write("policy.yaml", "rules:\n  - direction: egress\n    verdict: allow\n    names: [pypi.org]\n    ports: [443]\n")
	content, value := write("content", "some text"), write("value", "swordfish")
	tree := filepath.Join(files, "tree")
	if err := os.MkdirAll(filepath.Join(tree, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"tree/a", "tree/sub/b"} {
		write(name, name)
	}
	// Their errors name what each has asked.
	inOwnWords := []string{"run --rm nosuch", "run --rm --pull never nosuch", "cp a:/nothing", "cp " + files + "/nothing", "run -d --name p", "pull ", "image inspect nosuch", "image export nosuch", "image export --format bogus", "volume create Bad", "volume create small", "volume inspect nosuch", "template rm 0123", "service wait main"}
	var volumes []string
	if _, err := exec.LookPath("mkfs.ext4"); err == nil {
		volumes = []string{
			"volume create data --size 16", "volume create data --size 16", "volume create Bad", "volume create small --size 0", "volume create more --size 16 -o json", "volume ls", "volume ls -o json", "volume inspect data", "volume inspect nosuch",
			"volume resize data 20", "volume resize data 2x", "volume resize nosuch 20", "run -d --name v -v data:/data test", "volume ls", "volume inspect data", "volume resize data 30", "volume rm data", "rm -f v", "volume rm data nosuch more", "volume ls",
		}
	}
	// first returns the first thing in the list that a command gives as JSON; of snapshots, that of VM a.
	first := func(field string, args ...string) string {
		var list []map[string]any
		_, stdout, _ := drowse(t, here, args...)
		if args[0] == "--host" {
			_, stdout, _ = far(t, at, args[2:]...)
		}
		if err := json.Unmarshal([]byte(stdout), &list); err != nil {
			t.Fatalf("%v: %v, %s", args, err, stdout)
		}
		for _, is := range list {
			if vm, ok := is["vm"]; !ok || vm == "a" {
				return fmt.Sprint(is[field])
			}
		}
		t.Fatalf("%v: there is none: %s", args, stdout)
		return ""
	}
	// resolve puts what a host has in the place of words.
	resolve := func(line string, where ...string) string {
		if strings.Contains(line, "SNAPSHOT") {
			line = strings.ReplaceAll(line, "SNAPSHOT", first("id", append(where, "snapshot", "ls", "-o", "json")...))
		}
		if strings.Contains(line, "TEMPLATE") {
			line = strings.ReplaceAll(line, "TEMPLATE", first("key", append(where, "template", "ls", "-o", "json")...))
		}
		return line
	}
	for _, line := range slices.Concat([]string{
		"ps", "ls", "images", "image ls -q", "snapshot ls", "events -o json --since now", "version --bogus",
		// run
		"run -d --name a test", "run -d --name a test", "run --name b test echo hi there", "run --rm test exit3", "run --rm test both", "run --rm test nothing",
		"run --rm -e A=1 -w /srv -u dev test env", "run --rm -i test cat", "run --rm test cat", "run -d --rm test", "run -d --name quiet test echo", "attach quiet", "attach quiet none", "rm -f quiet", "run -d --name main test cat", "run --rm test -x", "run --rm nosuch",
		"run --rm --pull never nosuch", "run -d --name n --policy " + policy + " test", "run --rm --vcpus 99 test true", "run -d --name Bad test",
		"run -d --name p --net open -p 127.0.0.1:8080:80 test",
		// exec
		"exec a echo hi", "exec a exit3", "exec a nothing", "exec -o json a echo hi", "exec -o json a both", "exec nobody true", "exec -e A=1 a env", "exec a -- echo -n x", "exec --secret s=@" + value + " a true",
		// what there is
		"ps", "ps -q", "ps -aq", "ps --filter name=b", "ps --filter status=running -q", "ps --filter status=exited", "ls", "ls --status asleep", "ls -o json --limit 1", "history nobody", "inspect nobody", "logs a", "logs nobody", "logs -n 1 a", "port p", "port a", "port p 81",
		"policy show n", "policy set n " + policy, "policy diff n " + policy, "policy show a", "stats nobody", "stats a", "info",
		// services
		"service ls a", "service set a web sleep 1000", "service set a web", "service set --env A=1 -w /srv -u dev --restart never --ready tcp:80 a job sleep 9", "service set --ready bogus a web true", "service set --no-image-config a plain true",
		"service ls a", "service ls -o json a", "service status a web", "service status a nosuch", "service wait a web", "service stop a web", "service wait main web", "service start a web", "service restart a web", "service restart a nosuch", "service logs a web",
		"service logs -o json a web", "service logs a nosuch", "service logs -f -o json a web", "service rm a plain", "service rm a nosuch", "service ls nobody", "service set nobody web true", "service start nobody web", "service set b late true", "sleep b", "service ls b", "service set b later true", "exec b true", "service ls b",
		// what was done, what has changed, and what the network did
		"audit a", "audit -o json a", "audit --since 1h a", "audit --since 2999-01-01T00:00:00Z a", "audit --since bogus a", "audit nobody", "exec a true", "diff a", "diff -o json a", "diff --limit 1 a", "diff --limit 0 a", "diff nobody", "watch a relative", "watch nobody /tmp",
		"policy flows p", "policy flows -o json p", "policy events p", "policy stats p", "policy flows a", "policy events a", "policy stats nobody",
		// images
		"pull " + app, "image inspect " + app, "image inspect nosuch", "image export " + app + " " + files + "/OUTIMAGE", "image export --format tar " + app + " " + files + "/OUTTAR", "image export --format bogus " + app + " " + files + "/OUTNONE", "image export nosuch " + files + "/OUTNONE", "run -d --name app " + app, "service set app one true", "service set --no-image-config app two true", "service set -e B=2 -u me app three true", "service ls -o json app", "rm -f app", "rmi " + app,
		// sleep and wake
		"sleep nobody", "sleep b", "wake b", "wake b", "wake nobody", "wake b --in 10m", "sleep b", "secret set b s=@" + value, "secret rm b s", "start nobody", "start a", "stop b", "service start b web", "secret set b s=@" + value, "watch b /tmp", "diff b", "stop nobody", "ps -a", "start b", "sleep b", "start b", "exec b echo awake",
		"kill -s TERM main", "kill -s TERM nobody", "kill main", "kill nobody", "ps",
		// copies
		"cp " + content + " a:/tmp/f", "cp a:/tmp/f " + files + "/OUT", "exec a cat /tmp/f", "cp " + tree + " a:/tmp/tree", "cp a:/tmp/tree " + files + "/OUTTREE", "cp a:/nothing " + files + "/OUT2", "cp " + files + "/nothing a:/tmp", "cp " + content + " a:/tmp", "cp " + content + " a:/no/dir/f", "cp " + content + " nobody:/f",
		// snapshots, forks
		"snapshot main2", "snapshot a --note kept", "snapshot inspect nosuch", "snapshot export SNAPSHOT --to " + files + "/OUTEXPORT", "snapshot export nosuch --to " + files + "/OUTNONE", "snapshot rm SNAPSHOT", "snapshot import " + files + "/OUTEXPORT", "snapshot import " + content, "snapshot import " + files + "/none", "snapshot ls",
		"snapshot nobody", "snapshot ls -o yaml", "fork a --name child", "fork a --count 2 --name more", "fork a --count 0", "fork nobody", "rm child", "rm -f child more-1 more-2", "rm nobody", "restore 0123abcd", "snapshot rm 0123abcd",
		// the rest
		"rename b c", "stop b", "rename b c", "update c --owner me --tag x --ttl 1h", "ls --owner me", "update nobody --owner x", "update a --sleep-after 10m", "secret set a s=@" + value, "secret ls a", "secret rm a s", "secret ls nobody", "secret rm a none",
		"prune --dry-run", "rmi nosuch", "image rm test", "rm c", "rm -f a n p main", "ps -a", "info --bogus", "contxt",
	}, volumes, []string{"template ls", "template make", "template make test --memory 300", "template ls", "template make nosuch", "template rm 0123", "template rm TEMPLATE", "template rm TEMPLATE", "template ls"}) {
		code, stdout, stderr := drowse(t, here, replaced(strings.Fields(resolve(line)), "OUT", "HERE")...)
		fcode, fstdout, fstderr := far(t, at, replaced(strings.Fields(resolve(line, "--host", at)), "OUT", "THERE")...)
		if strings.HasPrefix(line, "audit ") {
			stdout, fstdout = audited(stdout), audited(fstdout)
		}
		if line == "info" || strings.HasPrefix(line, "stats") { // what is measured, and what is of one place
			stdout, fstdout = measured(stdout), measured(fstdout)
		}
		if slices.ContainsFunc(inOwnWords, func(w string) bool { return strings.HasPrefix(line, w) }) {
			stderr, fstderr = "", ""
		}
		if code != fcode || same(strings.ReplaceAll(stdout, "/HERE", "/THERE")) != same(strings.ReplaceAll(fstdout, there, here)) || same(stderr) != same(fstderr) {
			t.Errorf("drowse %s: %d, and with --host %d\n%s%s--- with --host\n%s%s", line, code, fcode, stdout, stderr, fstdout, fstderr)
		}
	}
	for _, name := range []string{"OUT", "OUTTREE/a", "OUTTREE/sub/b", "OUTIMAGE", "OUTTAR"} {
		a, err := os.ReadFile(filepath.Join(files, strings.Replace(name, "OUT", "HERE", 1)))
		b, ferr := os.ReadFile(filepath.Join(files, strings.Replace(name, "OUT", "THERE", 1)))
		if err != nil || ferr != nil || !bytes.Equal(a, b) || len(a) == 0 {
			t.Errorf("%s was copied as %q (%v), and with --host as %q (%v)", name, a, err, b, ferr)
		}
	}
}

// someFlows are the flows of each VM with a network.
func someFlows(string) []netpolicy.FlowRecord {
	begin := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	return []netpolicy.FlowRecord{
		{Type: netpolicy.RecordFlow, First: begin, Last: begin.Add(time.Second), FlowInfo: &netpolicy.FlowInfo{Verdict: netpolicy.Allow, Direction: netpolicy.Egress, Protocol: "tcp", Guest: netip.MustParseAddr("198.18.0.1"), GuestPort: 4000, Peer: netip.MustParseAddr("192.0.2.7"), PeerPort: 443, Name: "pypi.org"}},
		{Type: netpolicy.RecordLost, First: begin, Last: begin, FlowsLost: &netpolicy.FlowsLost{Flows: 3}},
	}
}

// audited leaves of a trail what two places have in common.
func audited(text string) string {
	text = strings.ReplaceAll(text, " by api:all", "")
	text = regexp.MustCompile(`(?m)^ *"(via|start|elapsed_ms|cpu_ms|id|vm)": .*\n`).ReplaceAllString(text, "")
	text = regexp.MustCompile(`,(\s*[}\]])`).ReplaceAllString(text, "$1")
	return regexp.MustCompile(`\b[\d.]+m?s\b`).ReplaceAllString(text, "N")
}

// measured leaves of a command's output what does not change by itself, and is not of one place.
func measured(text string) string {
	text = regexp.MustCompile(`(?m)^(drowse|host|state|server) .*\n`).ReplaceAllString(text, "")
	return regexp.MustCompile(`[\d.]+ ?(ms|s|m\ds|[KMG]i?B|B)?\b`).ReplaceAllString(text, "N")
}

func replaced(args []string, old, new string) (out []string) {
	for _, a := range args {
		out = append(out, strings.ReplaceAll(a, "/"+old, "/"+new))
	}
	return out
}

// growing is output that a test waits for.
type growing struct {
	mu   sync.Mutex
	text strings.Builder
	more chan struct{} // has room for one
}

func (g *growing) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case g.more <- struct{}{}:
	default:
	}
	return g.text.Write(p)
}

func (g *growing) String() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.text.String()
}

// TestRemote_streams_give_what_comes_until_they_are_interrupted follows with the same lines in two places.
func TestRemote_streams_give_what_comes_until_they_are_interrupted(t *testing.T) {
	noContexts(t)
	dir, h, vms := inMemory(t)
	vms.Flows = someFlows
	vms.Dial = func(_ context.Context, name, _, address string) (net.Conn, error) {
		guest, host := net.Pipe()
		go func() {
			defer guest.Close()
			fmt.Fprintf(guest, "%s %s says hello\n", name, address)
		}()
		return host, nil
	}
	at, token := serveTCP(t, h)
	t.Setenv("DROWSE_TOKEN", token)
	do := func(line string) {
		t.Helper()
		if code, _, stderr := drowse(t, dir, strings.Fields(line)...); code != 0 {
			t.Fatalf("%s: %d, %s", line, code, stderr)
		}
	}
	do("run -d --name a test")
	do("run -d --name n --net open test")
	do("service set a web first")
	console := func(text string) {
		t.Helper()
		f, err := os.OpenFile(h.State.ConsoleLog("a"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	console("begin\n")
	value := filepath.Join(t.TempDir(), "value")
	if err := os.WriteFile(value, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	words := 0
	for _, tt := range []struct {
		line  string
		begun string // what it gives first; empty if that is nothing
		then  func(word string)
		gives string // after it, besides the word
	}{
		{"logs -f a", "begin", func(word string) { console(word + "\n") }, ""},
		{"logs -f -n 1 a", "\n", func(word string) { console(word + "\n") }, ""},
		{"events -f", "sandbox.", func(word string) { do("run -d --name " + word + " test") }, "by cli"},
		{"events -f -o json", "sandbox.", func(word string) { do("run -d --name " + word + " test") }, `"cursor"`},
		{"service logs -f a web", "first", func(word string) { do("service set a web " + word); do("service restart a web") }, ""},
		{"audit -f a", "service-set", func(word string) { do("exec a echo " + word) }, "exit 0"},
		{"watch a /tmp", "", func(word string) { do("cp " + value + " a:/tmp/" + word) }, "/tmp/"},
		{"watch -o json -r a /tmp", "", func(word string) { do("cp " + value + " a:/tmp/" + word) }, `"event"`},
		{"policy flows -f n", "pypi.org", nil, "3 flows"},
		{"policy flows -f -o json n", "pypi.org", nil, `"flows"`},
		{"port-forward a 127.0.0.1:0:80", "127.0.0.1:", nil, "\n"},
	} {
		for _, where := range []string{"--state " + dir, "--host " + at} {
			t.Run(tt.line+" "+where[:6], func(t *testing.T) {
				ctx, interrupt := context.WithCancel(t.Context())
				defer interrupt()
				out, errs := &growing{more: make(chan struct{}, 1)}, &growing{more: make(chan struct{}, 1)}
				ended := make(chan int, 1)
				go func() { ended <- run(ctx, strings.Fields(where+" "+tt.line), out, errs) }()
				await := func(text string) {
					t.Helper()
					for !strings.Contains(out.String(), text) {
						select {
						case <-out.more:
						case code := <-ended:
							if ended <- code; !strings.Contains(out.String(), text) {
								t.Fatalf("it has ended with %d, %s%s", code, out, errs)
							}
						}
					}
				}
				await(tt.begun)
				if tt.then != nil {
					words++
					word := fmt.Sprintf("word%d", words)
					tt.then(word)
					for tt.begun == "" && !strings.Contains(out.String(), word) { // it does not say when it begins
						time.Sleep(50 * time.Millisecond)
						tt.then(word)
					}
					await(word)
				}
				await(tt.gives)
				if strings.HasPrefix(tt.line, "port") {
					c, err := net.Dial("tcp", strings.Fields(strings.NewReplacer("->", " ", ": ", " ").Replace(out.String()))[0])
					if err != nil {
						t.Fatalf("%v: %s", err, out)
					}
					text, err := io.ReadAll(c)
					c.Close()
					if string(text) != "a 127.0.0.1:80 says hello\n" {
						t.Errorf("the port says %q, %v: %s", text, err, errs)
					}
				}
				interrupt()
				if code := <-ended; code != 0 {
					t.Errorf("interrupted: %d, %s", code, errs)
				}
			})
		}
	}
}

// hostile is a server that answers as a test likes, and notes what it was asked.
type hostile struct {
	*httptest.Server
	mu   sync.Mutex
	auth []string
	urls []string
}

func newHostile(t *testing.T, answer http.HandlerFunc) *hostile {
	t.Helper()
	s := &hostile{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.auth, s.urls = append(s.auth, r.Header.Get("Authorization")), append(s.urls, r.URL.String())
		s.mu.Unlock()
		answer(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *hostile) asked() (n int, auth string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.urls), strings.Join(s.auth, " ")
}

func TestAttack_server_redirects_token_and_bodies_to_another_host(t *testing.T) {
	noContexts(t)
	t.Setenv("DROWSE_TOKEN", "swordfish")
	thief := newHostile(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"version":1,"sandboxes":[]}`) })
	for _, status := range []int{http.StatusMovedPermanently, http.StatusFound, http.StatusTemporaryRedirect, http.StatusPermanentRedirect} {
		s := newHostile(t, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, thief.URL+r.URL.Path, status) })
		for _, line := range []string{"ps", "exec a true", "rm -f a", "run -d test", "sleep a", "logs -f a", "events", "cp a:/x /tmp/nothing", "secret set a s=@/dev/null", "stats a", "service ls a", "service set a s true", "service logs -f a s", "audit -f a", "diff a", "watch a /x", "policy flows -f a", "policy events a", "policy stats a", "volume create v", "template make x", "snapshot export 0123", "snapshot import /dev/null", "image export x -", "image inspect x"} {
			code, _, stderr := far(t, s.URL, strings.Fields(line)...)
			if code == 0 || !strings.Contains(stderr, "redirects to") && !strings.Contains(stderr, "answered 30") ||
				strings.Contains(stderr, "swordfish") {
				t.Errorf("%s, %d: %d, %s", line, status, code, stderr)
			}
		}
		if _, auth := s.asked(); !strings.Contains(auth, "Bearer swordfish") {
			t.Errorf("the server itself got %q", auth)
		}
	}
	if n, auth := thief.asked(); n != 0 {
		t.Errorf("the other host got %d requests, with %q", n, auth)
	}
}

func TestContext_sends_its_token_to_its_server_alone_and_shows_it_nowhere(t *testing.T) {
	file := noContexts(t)
	empty := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"version":1,"sandboxes":[]}`) }
	mine, other := newHostile(t, empty), newHostile(t, empty)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("swordfish\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	do := func(want int, args ...string) string {
		t.Helper()
		var out strings.Builder
		if code := run(t.Context(), args, &out, &out); code != want {
			t.Errorf("%v: %d, %s", args, code, &out)
		}
		if strings.Contains(out.String(), "swordfish") {
			t.Errorf("%v shows the token: %s", args, &out)
		}
		return out.String()
	}
	do(0, "context", "add", "--token-file", token, "prod", mine.URL)
	do(0, "context", "add", "other", other.URL)
	if fi, err := os.Stat(file); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file: %v, %v", fi, err)
	}
	for _, line := range []string{"context ls", "context show prod", "context ls -o json", "context show prod -o json", "--host prod ls -o json", "--host prod ps --verbose", "context use prod", "ps"} {
		do(0, strings.Fields(line)...)
	}
	do(0, "--host", "other", "ps")
	do(0, "--host", other.URL, "ps")
	if _, auth := mine.asked(); !strings.Contains(auth, "Bearer swordfish") || strings.Contains(auth, "  ") {
		t.Errorf("its server got %q", auth)
	}
	if n, auth := other.asked(); n != 2 || strings.TrimSpace(auth) != "" {
		t.Errorf("the other server got %d requests, %q", n, auth)
	}
	// $DROWSE_TOKEN is of $DROWSE_HOST, and a context does not send it.
	t.Setenv("DROWSE_HOST", mine.URL)
	t.Setenv("DROWSE_TOKEN", "swordfish")
	do(0, "--host", other.URL, "ps")
	do(0, "--host", "other", "ps")
	if _, auth := other.asked(); strings.TrimSpace(auth) != "" {
		t.Errorf("the other server got %q", auth)
	}
	t.Setenv("DROWSE_HOST", "")
	do(0, "context", "use", localName)
	do(exitUsage, "--host", "nothing", "ps")
	do(exitUsage, "--host", other.URL, "--state", t.TempDir(), "ps")
	do(0, "context", "rm", "prod", "other")
	if text, err := os.ReadFile(file); err != nil || strings.Contains(string(text), "swordfish") {
		t.Errorf("the file after all are removed: %s, %v", text, err)
	}
	if err := os.WriteFile(file, []byte(`{"contexts":{"x":{"token":"swordfish"`), 0o600); err != nil {
		t.Fatal(err)
	}
	do(exitFailed, "context", "ls")
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	if says := do(exitFailed, "context", "ls"); !strings.Contains(says, "chmod 600") {
		t.Errorf("others may read it: %s", says)
	}
}

func TestHost_is_an_encrypted_server_or_on_this_machine(t *testing.T) {
	noContexts(t)
	for at, says := range map[string]string{
		"http://192.0.2.1:7300": "--insecure-http", "http://vms.example.com": "--insecure-http", "http://localhost.example.com": "--insecure-http", "http://127.0.0.1.example.com:1": "--insecure-http",
		"https://u:swordfish@vms.example.com": "a user or a password", "https://vms.example.com?token=swordfish": "a query", "ftp://x:1": "another form", "unix://x/y": "another form", "https://": "another form", "http://[::1": "no URL",
	} {
		for _, args := range [][]string{{"--host", at, "ps"}, {"context", "add", "x", at}} {
			var out strings.Builder
			if code := run(t.Context(), args, &out, &out); code != exitUsage || !strings.Contains(out.String(), says) || strings.Contains(out.String(), "swordfish") {
				t.Errorf("%v: %d, %s, want %s", args, code, &out, says)
			}
		}
	}
	for _, at := range []string{"http://localhost:1", "http://127.1.2.3", "http://[::1]:7300", "https://vms.example.com:7300/drowse", "unix:///x/api.sock"} {
		if _, err := parseServer(at, false); err != nil {
			t.Errorf("%s: %v", at, err)
		}
	}
	if _, err := parseServer("http://192.0.2.1", true); err != nil {
		t.Error(err)
	}
}

func TestHost_flags_stand_before_the_command(t *testing.T) {
	for line, want := range map[string]string{
		"--host u ps":                       "u|ps",
		"--host=u -o json ps -a":            "u|-o json ps -a",
		"-o json --host u --verbose ps":     "u|-o json --verbose ps",
		"exec a echo --host x":              "|exec a echo --host x",
		"--insecure-http --host u exec a x": "u!|exec a x",
		"serve --host name":                 "|serve --host name",
		"__complete --host u ps -":          "u|__complete ps -",
		"__complete --host u":               "|__complete --host u",
		"-- --host":                         "|-- --host",
		"--host":                            "|--host",
	} {
		var h hostFlags
		rest, err := h.take(strings.Fields(line))
		got := h.host + map[bool]string{true: "!"}[h.insecure] + "|" + strings.Join(rest, " ")
		if err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", line, got, err, want)
		}
	}
}

func TestAttack_server_answers_without_end_or_drives_the_terminal(t *testing.T) {
	noContexts(t)
	pages := 0
	long := strings.Repeat("x", 1<<20)
	const runs = `{"name":"a","status":"running"}`
	for name, tt := range map[string]struct {
		line   string
		answer http.HandlerFunc
		says   string
	}{
		"pages for ever": {"ps", func(w http.ResponseWriter, _ *http.Request) {
			pages++
			fmt.Fprintf(w, `{"version":1,"sandboxes":[{"name":"n%06d"}],"problems":["%s"],"next":"n%06d"}`, pages, long, pages)
		}, "a list of more than 64 MiB"},
		"the same page": {"ls --all", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"version":1,"sandboxes":[{"name":"a"}],"next":"a"}`)
		}, "does not end"},
		"an answer for ever": {"ps", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"version":1,"sandboxes":[`)
			for line := bytes.Repeat([]byte(`{"name":"a"},`), 10_000); ; {
				if _, err := w.Write(line); err != nil {
					return
				}
			}
		}, "more than 67108864 bytes"},
		"a line for ever": {"events", func(w http.ResponseWriter, _ *http.Request) {
			for {
				if _, err := w.Write([]byte(long)); err != nil {
					return
				}
			}
		}, "too long"},
		"an error that drives the terminal": {"inspect a", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusConflict)
			fmt.Fprint(w, `{"error":{"code":"running","message":"\u001b]0;owned\u0007\u001b[2J`+strings.Repeat("y", 1<<18)+`"}}`)
		}, "owned"},
		"more paths than were asked for": {"diff --limit 2 a", func(w http.ResponseWriter, r *http.Request) {
			if !strings.HasSuffix(r.URL.Path, "/diff") {
				fmt.Fprint(w, runs)
				return
			}
			for range 1000 {
				fmt.Fprintln(w, `{"op":"added","path":"/\u001b[2J","kind":"file","mode":"\u001b[2J"}`)
			}
		}, "more than the 2 paths"},
		"half a list": {"diff a", func(w http.ResponseWriter, r *http.Request) {
			if !strings.HasSuffix(r.URL.Path, "/diff") {
				fmt.Fprint(w, runs)
				return
			}
			fmt.Fprintln(w, `{"op":"added","path":"/a","kind":"file"}`)
		}, "was cut after 1 paths"},
		"a trail for ever": {"audit a", func(w http.ResponseWriter, _ *http.Request) {
			for {
				if _, err := fmt.Fprintf(w, `{"kind":"exec","user":"%s"}`+"\n", long); err != nil {
					return
				}
			}
		}, "a trail of more than 64 MiB"},
		"half a snapshot": {"snapshot export 0123 --to " + filepath.Join(t.TempDir(), "snapshot"), func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "10")
			fmt.Fprint(w, "half")
		}, "unexpected EOF"},
		"no drowse": {"ps", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusTeapot)
			fmt.Fprint(w, "<html>\x1b[2J")
		}, "is it drowse that serves there"},
		"an older server": {"secret ls a", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"error":{"code":"no-route","message":"no such path"}}`)
		}, "is older than this drowse"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newHostile(t, tt.answer)
			code, stdout, stderr := far(t, s.URL, strings.Fields(tt.line)...)
			if code == 0 || !strings.Contains(stderr, tt.says) || strings.ContainsAny(stdout+stderr, "\x1b\x07") || len(stderr) > 2*maxServerText {
				t.Errorf("%d, %d bytes: %.300s", code, len(stderr), stderr)
			}
		})
	}
	short := newHostile(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"templates":[{"key":"k"}],"volumes":[{"name":"v"}],"services":[{"name":"s","problem":"\u001b[2J"}],"flows":[{}],"id":"i"}`)
	})
	for _, line := range []string{"template ls", "template rm k", "volume ls", "volume inspect v", "service ls a", "service wait a s", "policy flows a", "policy stats a", "image inspect i", "snapshot inspect i", "diff a", "audit a"} {
		if _, stdout, stderr := far(t, short.URL, strings.Fields(line)...); strings.ContainsAny(stdout+stderr, "\x1b\x07") {
			t.Errorf("%s: %q %q", line, stdout, stderr)
		}
	}
	s := newHostile(t, func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"version":1,"sandboxes":[{"name":"\u001b[2J"},{"name":"a\nb"},{"name":"good","status":"running"}]}`)
	})
	var out, errs strings.Builder
	if code := run(t.Context(), []string{cobra.ShellCompRequestCmd, "--host", s.URL, "rm", ""}, &out, &errs); code != 0 || !strings.HasPrefix(out.String(), "good\trunning\n:") {
		t.Errorf("completion: %d, %q, %s", code, &out, &errs)
	}
}

func TestAttack_tree_of_a_server_is_unpacked_elsewhere(t *testing.T) {
	type entry struct {
		name, link string
		kind       byte
	}
	for name, tt := range map[string]struct {
		entries []entry
		fails   bool
		there   []string // what the directory then has
	}{
		"a tree":              {[]entry{{"t", "", tar.TypeDir}, {"t/a", "", tar.TypeReg}, {"t/l", "a", tar.TypeSymlink}}, false, []string{"copy", "copy/a", "copy/l", "other"}},
		"a file":              {[]entry{{"t", "", tar.TypeReg}}, false, []string{"copy", "other"}},
		"above":               {[]entry{{"../x", "", tar.TypeReg}}, true, []string{"other"}},
		"above in the middle": {[]entry{{"t/../../x", "", tar.TypeReg}}, true, []string{"other"}},
		"absolute":            {[]entry{{"/x", "", tar.TypeReg}}, true, []string{"other"}},
		"beside it":           {[]entry{{"other", "", tar.TypeReg}}, false, []string{"copy", "other"}},
		"a link out of it":    {[]entry{{"t", "", tar.TypeDir}, {"t/l", "../other", tar.TypeSymlink}, {"t/m", "/etc/passwd", tar.TypeSymlink}}, false, []string{"copy", "other"}},
		"through a link":      {[]entry{{"t", "", tar.TypeDir}, {"t/d", "", tar.TypeDir}, {"t/l", "d", tar.TypeSymlink}, {"t/l/x", "", tar.TypeReg}}, true, []string{"copy", "copy/d", "other"}},
		"a device":            {[]entry{{"t", "", tar.TypeChar}}, false, []string{"other"}},
		"a hard link":         {[]entry{{"t", "other", tar.TypeLink}}, false, []string{"other"}},
		"over a directory":    {[]entry{{"t", "", tar.TypeDir}, {"t/d", "", tar.TypeDir}, {"t/d", "", tar.TypeReg}}, true, []string{"copy", "copy/d", "other"}},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for _, e := range tt.entries {
				h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: 0o4755}
				if e.kind == tar.TypeReg {
					h.Size = 4
				}
				if err := w.WriteHeader(h); err != nil {
					t.Fatal(err)
				}
				if h.Size > 0 {
					_, _ = w.Write([]byte("evil"))
				}
			}
			_ = w.Close()
			noContexts(t)
			s := newHostile(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(b.Bytes()) })
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "other"), []byte("mine"), 0o600); err != nil {
				t.Fatal(err)
			}
			code, _, stderr := far(t, s.URL, "cp", "vm:/t", filepath.Join(dir, "copy"))
			if (code != 0) != tt.fails {
				t.Errorf("%d: %s", code, stderr)
			}
			var there []string
			_ = filepath.WalkDir(dir, func(at string, d fs.DirEntry, _ error) error {
				if rel, _ := filepath.Rel(dir, at); rel != "." {
					there = append(there, rel)
				}
				if fi, err := d.Info(); err == nil && fi.Mode()&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
					t.Errorf("%s is %v", at, fi.Mode())
				}
				return nil
			})
			if !slices.Equal(there, tt.there) {
				t.Errorf("there is %v, want %v", there, tt.there)
			}
			if text, err := os.ReadFile(filepath.Join(dir, "other")); err != nil || string(text) != "mine" {
				t.Errorf("another file: %q, %v", text, err)
			}
		})
	}
}

// A command works with a server, or says why not.
func TestEvery_command_works_with_a_server_or_says_why_not(t *testing.T) {
	a := &app{}
	works := map[string]bool{"help": true, "completion": true}
	for _, c := range a.verbs() {
		works[c.Name()] = true
	}
	noContexts(t)
	for _, c := range a.root().Commands() {
		if works[c.Name()] == (hostWork[c.Name()] != "") {
			t.Errorf("drowse %s: it works: %v; why not: %q", c.Name(), works[c.Name()], hostWork[c.Name()])
		}
	}
	for path := range hostWork {
		if c, rest, err := a.root().Find(strings.Fields(path)); err != nil || len(rest) > 0 {
			t.Errorf("there is no command %q: %v, %v", path, c.Name(), err)
		}
	}
	for path, flags := range hostFlagsOf {
		c, _, err := a.root().Find(strings.Fields(path))
		for name := range flags {
			if err != nil || c.Flags().Lookup(name) == nil {
				t.Errorf("%s has no flag --%s (%v)", path, name, err)
			}
		}
	}
	for _, line := range []string{"kernel ls", "image build --from dir:/x", "top", "template prune", "snapshot import --trust f", "policy tag --add x a", "fork a --early", "exec --changes a true", "port-forward --reverse a 1:2", "port-forward a 1:unix:/x"} {
		code, _, stderr := far(t, "http://127.0.0.1:1", strings.Fields(line)...)
		if code != exitUsage && !strings.HasPrefix(line, "port-forward a") || !strings.Contains(stderr, "on that host") && !strings.HasPrefix(line, "port-forward a") {
			t.Errorf("%s: %d, %s", line, code, stderr)
		}
	}
}
