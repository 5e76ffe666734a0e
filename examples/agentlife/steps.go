package main

import (
	"archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// life is one run, with the results that its steps pass on.
type life struct {
	files, program, image string
	slack                 time.Duration
	begun                 time.Time
	out                   io.Writer

	store    *sandbox.Host
	launcher pool.Launcher
	fleet    *fleet.Fleet

	published string // HOST:PORT of the page
	head      string // the commit that was cloned
	used      time.Time
	before    string   // snapshot of the workspace before it was forked
	ids       []string // of all sandboxes so far
	passes    string   // the fork whose tests pass
}

const (
	workspace = "workspace"
	original  = "workspace-before" // the name of the workspace after a fork has taken its place
	port      = 8000
	idleTime  = 15 // seconds
	stepTime  = 10 * time.Minute
)

func (l *life) say(format string, args ...any) {
	fmt.Fprintf(l.out, "%6.1f s  "+format+"\n", append([]any{time.Since(l.begun).Seconds()}, args...)...)
}

// supervise carries connections to published ports, and prunes only on request.
func (l *life) supervise(ctx context.Context) (end func() error) {
	ctx, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- supervisor.Run(ctx, l.store, l.launcher, supervisor.Options{PruneEvery: -1}) }()
	return func() error {
		stop()
		return <-ended
	}
}

// sh runs a shell command in a sandbox and returns its output. A status other than 0 is an error.
func (l *life) sh(ctx context.Context, name, script string) (string, error) {
	agent, err := l.store.Sandbox(name).Agent(ctx)
	if err != nil {
		return "", err
	}
	defer agent.Close()
	var out bytes.Buffer
	if _, err := agent.Exec(ctx, guest.Cmd{Argv: []string{"/bin/sh", "-c", script}, Dir: "/root", Timeout: stepTime, IO: guest.IO{Stdout: &out, Stderr: &out}}); err != nil {
		return "", fmt.Errorf("%s in %s: %w: %s", script, name, err, bytes.TrimSpace(out.Bytes()))
	}
	return strings.TrimSpace(out.String()), nil
}

func (l *life) put(ctx context.Context, name, path string, data []byte) error {
	agent, err := l.store.Sandbox(name).Agent(ctx)
	if err != nil {
		return err
	}
	defer agent.Close()
	return agent.WriteFile(ctx, path, bytes.NewReader(data), guest.WriteOptions{Parents: true})
}

func (l *life) make(ctx context.Context) error {
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return err
	}
	l.published = free.Addr().String()
	free.Close()
	policy, err := l.policy()
	if err != nil {
		return err
	}
	want := sandbox.Spec{
		Name: workspace, Image: l.image, MemoryMiB: 256, Network: spec.NetworkTAP, Policy: policy, Idle: spec.Idle{SleepSeconds: idleTime},
	}
	o := sandbox.CreateOptions{Metadata: &spec.Metadata{Class: lifetime.Resumable, Owner: "agentlife", Keep: lifetime.Keep{Expired: 1}}}
	_, created, err := l.store.GetOrCreate(ctx, want, o)
	if err != nil {
		return err
	}
	_, twice, err := l.store.GetOrCreate(ctx, want, o)
	if err != nil {
		return err
	}
	if !created || twice {
		return fmt.Errorf("it was made: %v, and then again: %v", created, twice)
	}
	s, err := l.fleet.Get(ctx, workspace)
	if err != nil {
		return err
	}
	l.ids = append(l.ids, s.ID)
	return nil
}

// policy admits requests at the published port, and lets nothing out.
func (l *life) policy() (*netpolicy.Policy, error) {
	return netpolicy.Parse(fmt.Appendf(nil, "publish: [{listen: %q, port: %d, protocol: tcp}]\n", l.published, port))
}

// code is the content of the cloned repository.
var code = map[string]string{
	"app.py": `def total(prices):
    return sum(prices)
`,
	"test.py": `import app
assert app.total([1, 2, 3]) == 6, 'without discount'
assert app.total([100, 100]) == 180, 'ten per cent off from 200 on'
print('passed')
`,
	"serve.py": `import socket, greet
s = socket.create_server(('', 8000), backlog=16)
while True:
    c, _ = s.accept()
    try:
        c.settimeout(60)
        c.recv(4096)
        body = greet.page(open('app.py').read())
        c.sendall(b'HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n' % len(body) + body)
    except OSError:
        pass
    c.close()
`,
}

func (l *life) clone(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "agentlife")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for name, text := range code {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	git := func(args ...string) (string, error) {
		args = append([]string{"-C", dir, "-c", "user.name=agentlife", "-c", "user.email=agentlife@example.com", "-c", "init.defaultBranch=main"}, args...)
		out, err := exec.CommandContext(ctx, "git", args...).CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("git %v: %w: %s", args, err, out)
		}
		return strings.TrimSpace(string(out)), nil
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"commit", "-qm", "A shop"}, {"bundle", "create", "-q", "shop.bundle", "HEAD", "main"}} {
		if _, err := git(args...); err != nil {
			return err
		}
	}
	if l.head, err = git("rev-parse", "HEAD"); err != nil {
		return err
	}
	bundle, err := os.ReadFile(filepath.Join(dir, "shop.bundle"))
	if err != nil {
		return err
	}
	if err := l.put(ctx, workspace, "/root/shop.bundle", bundle); err != nil {
		return err
	}
	begin := time.Now()
	if _, err := l.sh(ctx, workspace, "git clone -q shop.bundle shop"); err != nil {
		return err
	}
	took := time.Since(begin)
	head, err := l.sh(ctx, workspace, "git -C shop rev-parse HEAD")
	if err != nil {
		return err
	}
	if head != l.head {
		return fmt.Errorf("the guest has cloned %s, and the repository is at %s", head, l.head)
	}
	l.say("   a bundle of %d bytes was cloned in %.1f s; both ends are at %.12s", len(bundle), took.Seconds(), head)
	return nil
}

// install unpacks a wheel, as pip does for pure Python. pip itself would take minutes to start where KVM
// interprets the guest's kernel.
func (l *life) install(ctx context.Context) error {
	var wheel bytes.Buffer
	z := zip.NewWriter(&wheel)
	for name, text := range map[string]string{
		"greet.py":                     "def page(code):\n    return b'The shop has %d bytes of code.\\n' % len(code)\n",
		"greet-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: greet\nVersion: 1.0\n",
		"greet-1.0.dist-info/WHEEL":    "Wheel-Version: 1.0\nGenerator: agentlife\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
		"greet-1.0.dist-info/RECORD":   "greet.py,,\n",
	} {
		w, err := z.Create(name)
		if err == nil {
			_, err = io.WriteString(w, text)
		}
		if err != nil {
			return err
		}
	}
	if err := z.Close(); err != nil {
		return err
	}
	if err := l.put(ctx, workspace, "/root/greet-1.0-py3-none-any.whl", wheel.Bytes()); err != nil {
		return err
	}
	out, err := l.sh(ctx, workspace, "python3 -m zipfile -e greet-1.0-py3-none-any.whl site && PYTHONPATH=site python3 -S -c 'import greet; print(greet.__file__)'")
	if err != nil {
		return err
	}
	if !strings.HasSuffix(out, "site/greet.py") {
		return fmt.Errorf("the package is imported from %q", out)
	}
	return nil
}

func (l *life) serve(ctx context.Context) error {
	_, err := l.store.Sandbox(workspace).SetService(ctx, spec.Service{
		Name: "shop", Argv: []string{"python3", "-S", "serve.py"}, Dir: "/root/shop", Env: []string{"PYTHONPATH=/root/site"},
		Check: &spec.ServiceCheck{TCP: fmt.Sprintf("127.0.0.1:%d", port)},
	})
	if err != nil {
		return err
	}
	st, err := l.store.Sandbox(workspace).WaitService(ctx, "shop")
	if err != nil {
		return err
	}
	l.used = time.Now()
	l.say("   the service is ready: process %d of the guest", st.PID)
	return nil
}

// idle waits until the workspace sleeps, and measures what it still costs.
func (l *life) idle(ctx context.Context) error {
	r, err := l.store.State.Get(workspace)
	if err != nil {
		return err
	}
	processes, ram, err := l.costs()
	if err != nil {
		return err
	}
	if len(processes) != 1 || processes[0] != r.PID || ram == 0 {
		return fmt.Errorf("it runs as %d, and there are processes %v with %d bytes", r.PID, processes, ram)
	}
	l.say("   awake it is process %d with %.1f MiB of RAM", r.PID, float64(ram)/(1<<20))
	for {
		if r, err = l.store.State.Get(workspace); err != nil {
			return err
		}
		// The record is written before the process has ended.
		if processes, ram, err = l.costs(); err != nil {
			return err
		}
		if r.Phase == state.Asleep && len(processes) == 0 {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
		if time.Since(l.used) > stepTime {
			return fmt.Errorf("it is %s %v after its last use", r.Phase, time.Since(l.used))
		}
	}
	took := time.Since(l.used)
	last := r.Sleeps[len(r.Sleeps)-1]
	l.say("   asleep %.1f s after its last use: %d processes and %d bytes of RAM, %.1f MiB on disk", took.Seconds(), len(processes), ram, float64(last.Stored)/(1<<20))
	if limit := idleTime*time.Second + l.slack; took > limit {
		return fmt.Errorf("it took %v to be asleep, and was to take %v at most: -slack says how much longer it may take on a busy machine", took, limit)
	}
	return nil
}

// get requests the page once.
func (l *life) get(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+l.published+"/", nil)
	if err != nil {
		return "", err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return string(body), err
}

func page(text string) string { return fmt.Sprintf("The shop has %d bytes of code.\n", len(text)) }

func (l *life) touch(ctx context.Context) error {
	begin := time.Now()
	body, err := l.get(ctx)
	if err != nil {
		return err
	}
	if body != page(code["app.py"]) {
		return fmt.Errorf("the page says %q", body)
	}
	l.say("   the first request was answered after %.0f ms: %q", float64(time.Since(begin).Microseconds())/1000, body)
	return nil
}

// changes are the forks' changes to the code. One is right.
var changes = map[string]string{
	"fork-half":  "def total(prices):\n    t = sum(prices)\n    return t // 2 if t >= 200 else t\n",
	"fork-tenth": "def total(prices):\n    t = sum(prices)\n    return t * 9 // 10 if t >= 200 else t\n",
	"fork-wrong": "def total(prices):\n    return sum(prices) * 9 // 10\n",
}

func (l *life) forkThree(ctx context.Context) error {
	snap, err := l.store.Sandbox(workspace).Snapshot(ctx, sandbox.SnapshotOptions{Note: "before the discount"})
	if err != nil {
		return err
	}
	l.before = snap.Snapshot
	// The forks publish nothing: the port is the workspace's.
	closed, err := netpolicy.Parse([]byte("rules: []\n"))
	if err != nil {
		return err
	}
	o := sandbox.ForkOptions{Policy: closed}
	for name := range changes {
		o.Children = append(o.Children, sandbox.ForkChild{Name: name})
	}
	begin := time.Now()
	res, err := l.store.Sandbox(workspace).Fork(ctx, o)
	if err != nil {
		return err
	}
	if !res.Durable || len(res.Children) != len(changes) {
		return fmt.Errorf("%d children, on disk: %v: %s", len(res.Children), res.Durable, res.Problem)
	}
	l.say("   three forks after %.0f ms; the workspace stood still for %.1f ms", float64(time.Since(begin).Microseconds())/1000, res.Stages["pause"])
	var all sync.WaitGroup
	var mu sync.Mutex // guards errs and passes
	var errs []error
	for name, text := range changes {
		if r, err := l.store.State.Get(name); err == nil {
			l.ids = append(l.ids, r.ID)
		}
		all.Go(func() {
			verdict, err := l.try(ctx, name, text)
			mu.Lock()
			defer mu.Unlock()
			l.say("   %s: %s", name, verdict)
			errs = append(errs, err)
			if err == nil && verdict == "passed" {
				if l.passes != "" {
					errs = append(errs, fmt.Errorf("%s and %s pass", l.passes, name))
				}
				l.passes = name
			}
		})
	}
	all.Wait()
	if l.passes != "fork-tenth" {
		errs = append(errs, fmt.Errorf("the fork that passes is %q", l.passes))
	}
	return errors.Join(errs...)
}

// try changes the code of a fork and runs its tests. Failing tests are not an error.
func (l *life) try(ctx context.Context, name, text string) (string, error) {
	if err := l.put(ctx, name, "/root/shop/app.py", []byte(text)); err != nil {
		return "", err
	}
	out, err := l.sh(ctx, name, "cd shop && { python3 -S -B test.py 2>&1 || true; } | tail -n 1")
	if err != nil {
		return "", err
	}
	if out != "passed" && !strings.HasPrefix(out, "AssertionError") {
		return "", fmt.Errorf("the tests in %s say %q", name, out)
	}
	return out, nil
}

func (l *life) promote(ctx context.Context) error {
	var others []string
	for name := range changes {
		if name != l.passes {
			others = append(others, name)
		}
	}
	if err := takePlace(ctx, l.store, l.passes); err != nil {
		return err
	}
	// The forks' writes reach the disk when they sleep.
	for _, name := range others {
		if _, err := l.store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{}); err != nil {
			return err
		}
	}
	policy, err := l.policy()
	if err != nil {
		return err
	}
	if _, err := l.store.Sandbox(original).SetPolicy(ctx, &netpolicy.Policy{}); err != nil {
		return err
	}
	if _, err := l.store.Sandbox(workspace).SetPolicy(ctx, policy); err != nil {
		return err
	}
	full, err := l.store.State.Usage(ctx)
	if err != nil {
		return err
	}
	var said int64
	for _, name := range others {
		var freed spec.Freed
		if err := l.store.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Freed: &freed}); err != nil {
			return err
		}
		said += freed.Bytes
	}
	rest, err := l.store.State.Usage(ctx)
	if err != nil {
		return err
	}
	gone := full.Layers + full.Snapshots + full.Kept + full.Pages - rest.Layers - rest.Snapshots - rest.Kept - rest.Pages
	l.say("   two forks had %.1f MiB on disk, and gave back %.1f MiB", float64(said)/(1<<20), float64(gone)/(1<<20))
	if said <= 0 || gone <= 0 {
		return fmt.Errorf("their deletion has freed %d bytes, and the store has %d less", said, gone)
	}
	// Within half a second the supervisor listens for the sandbox that now has the name and the port.
	for end := time.Now().Add(stepTime); ; {
		body, err := l.get(ctx)
		if err == nil && body == page(changes[l.passes]) {
			l.say("   the page is of the fork that took its place: %q", body)
			return nil
		}
		if err == nil || time.Now().After(end) {
			return fmt.Errorf("the page says %q (%w)", body, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// takePlace gives a fork the name of the workspace, which continues under another name.
func takePlace(ctx context.Context, h *sandbox.Host, fork string) error {
	for _, name := range []string{workspace, fork} {
		if _, err := h.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{}); err != nil {
			return err
		}
	}
	for _, names := range [][2]string{{workspace, original}, {fork, workspace}} {
		if err := h.State.Rename(ctx, names[0], names[1]); err != nil {
			return err
		}
	}
	r, err := h.State.Get(workspace)
	if err == nil && r.Fork == nil {
		err = fmt.Errorf("%s is no fork", workspace)
	}
	return err
}

// back spoils the original, and takes it back to the snapshot before that.
func (l *life) back(ctx context.Context) error {
	was := l.store.Sandbox(original)
	if _, err := was.Wake(ctx); err != nil {
		return err
	}
	if _, err := l.sh(ctx, original, "rm -rf shop && sync"); err != nil {
		return err
	}
	if _, err := was.Sleep(ctx, sandbox.SleepOptions{}); err != nil {
		return err
	}
	if err := was.Rewind(ctx, l.before); err != nil {
		return err
	}
	if _, err := was.Wake(ctx); err != nil {
		return err
	}
	text, err := l.sh(ctx, original, "cat shop/app.py")
	if err != nil {
		return err
	}
	if text+"\n" != code["app.py"] {
		return fmt.Errorf("its code is %q", text)
	}
	return nil
}

func (l *life) expire(ctx context.Context) error {
	removed, err := expireAll(ctx, l.fleet, time.Now)
	if err != nil {
		return err
	}
	l.say("   %d sandboxes have expired and are removed", removed)
	// Pruning leaves a snapshot that was taken by name.
	return l.store.State.RemoveSnapshot(ctx, l.before)
}

// expireAll makes all sandboxes expire, and prunes until none are left. now is the clock.
func expireAll(ctx context.Context, f *fleet.Fleet, now func() time.Time) (removed int, err error) {
	all, err := f.List(ctx, records.Filter{})
	if err != nil {
		return 0, err
	}
	soon := now().Add(time.Second).Truncate(time.Second)
	for _, s := range all.Sandboxes {
		if _, err := f.Update(ctx, s.Name, records.Changes{Expires: &soon}); err != nil {
			return 0, err
		}
	}
	for end := now().Add(stepTime); ; {
		p, err := f.Prune(ctx, false)
		if err != nil || len(p.Problems) > 0 {
			return removed, errors.Join(err, errors.New(strings.Join(p.Problems, "; ")))
		}
		left, err := f.List(ctx, records.Filter{})
		if err != nil {
			return removed, err
		}
		removed = len(all.Sandboxes) - len(left.Sandboxes)
		if len(left.Sandboxes) == 0 {
			return removed, nil
		}
		if now().After(end) {
			return removed, fmt.Errorf("%d have expired and are there", len(left.Sandboxes))
		}
		select {
		case <-ctx.Done():
			return removed, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}
