//go:build workloads

package workloads

import (
	"archive/tar"
	"archive/zip"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/forward"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

//go:embed testdata
var testdata embed.FS

func TestMain(m *testing.M) { guesttest.Main(m) }

const (
	vm        = "work"
	imageTag  = "drowse-workloads" // of `make test-workloads`
	memoryMiB = 1536

	// Ports in the guest.
	gitPort    = 9418 // forwarded to the host
	wheelPort  = 7001
	clientPort = 7002
	writerPort = 7003
	nodePort   = 7004
	webPort    = 8000 // published
	appPort    = 8081 // of the container, on the guest's addresses

	// chosenEnv selects some of the workloads while one works on them: git,pip,npm,go,podman,sqlite.
	chosenEnv = "DROWSE_WORKLOADS"

	// appEnv is the built program of testdata/app. If it is not set, the test builds the program.
	appEnv = "DROWSE_WORKLOADS_APP"

	guestAddress = "172.31.255.2"
	hostAddress  = "172.31.255.1"

	// answerLimit is the time that a server in the guest has for an answer, including its start.
	answerLimit = 10 * time.Minute
)

// work is the VM and its counterparts on the host.
type work struct {
	*guesttest.Env
	dir       string // inputs on the host
	published string // address of the web server on the host
	container string // address of the container on the host
	plain     string // address of a server on the host that sends hello, as the guest sees it
}

// with returns a copy for a subtest.
func (w *work) with(t *testing.T) *work {
	own, env := *w, *w.Env
	env.T = t
	own.Env = &env
	return &own
}

// sh runs a shell command in the guest, and logs how long it took.
func (w *work) sh(script string) string {
	w.T.Helper()
	begin := time.Now()
	out := w.Sh(vm, script)
	w.T.Logf("%6.1f s: %s", time.Since(begin).Seconds(), script)
	return out
}

// put writes a file in the guest.
func (w *work) put(path string, data []byte) {
	w.T.Helper()
	if err := w.Agent(vm).WriteFile(w.T.Context(), path, bytes.NewReader(data), guest.WriteOptions{Parents: true}); err != nil {
		w.T.Fatal(err)
	}
}

// putData writes a file of testdata in the guest.
func (w *work) putData(path, from string) {
	w.T.Helper()
	data, err := testdata.ReadFile("testdata/" + from)
	if err != nil {
		w.T.Fatal(err)
	}
	w.put(path, data)
}

// start runs a detached program in the guest. Its output goes to the file log in /root.
func (w *work) start(log, script string) {
	w.T.Helper()
	c := w.Agent(vm)
	p, err := c.Start(w.T.Context(), guest.Cmd{
		Argv: []string{"/bin/sh", "-c", "exec >/root/" + log + ".log 2>&1; " + script}, Dir: "/root", Detach: true,
	})
	if err != nil {
		w.T.Fatal(err)
	}
	if err := p.Close(); err != nil {
		w.T.Fatal(err)
	}
}

// ask sends a line to a server in the guest and returns its answer.
func (w *work) ask(address, line string) string {
	w.T.Helper()
	c := w.Agent(vm)
	for end := time.Now().Add(answerLimit); ; time.Sleep(500 * time.Millisecond) {
		got, err := ask(w.T.Context(), c, address, line)
		if err == nil {
			return got
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(end) {
			w.T.Fatalf("asking %s in the guest: %v\n%s", address, err, w.Sh(vm, "tail -n 20 /root/*.log"))
		}
	}
}

func ask(ctx context.Context, c *guest.Client, address, line string) (string, error) {
	conn, err := c.Dial(ctx, "tcp", address)
	if err != nil {
		return "", err
	}
	return exchange(conn, line)
}

// askHost sends a line from the host and returns the answer.
func (w *work) askHost(address, line string) string {
	w.T.Helper()
	for end := time.Now().Add(answerLimit); ; time.Sleep(500 * time.Millisecond) {
		conn, err := (&net.Dialer{Timeout: answerLimit}).DialContext(w.T.Context(), "tcp4", address)
		if err == nil {
			got, err := exchange(conn, line)
			if err != nil {
				w.T.Fatalf("asking %s: %v", address, err)
			}
			return got
		}
		// The supervisor has not looked yet.
		if !errors.Is(err, syscall.ECONNREFUSED) || time.Now().After(end) {
			w.T.Fatalf("asking %s: %v", address, err)
		}
	}
}

// exchange sends a line and reads one. It closes the connection.
func exchange(conn net.Conn, line string) (string, error) {
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(answerLimit)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(conn, line); err != nil {
		return "", err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSpace(answer), err
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// counted compares two answers that end with a count. The second count must be one more. The rest must be the
// same.
func counted(t testing.TB, what, before, after string) {
	t.Helper()
	split := func(s string) (string, int) {
		i := strings.LastIndexByte(s, ' ')
		n, err := strconv.Atoi(s[i+1:])
		if i < 0 || err != nil {
			t.Fatalf("%s says %q", what, s)
		}
		return s[:i], n
	}
	id, n := split(before)
	if id2, n2 := split(after); id2 != id || n2 != n+1 {
		t.Errorf("%s said %q before the sleep and %q after it", what, before, after)
	}
}

// A workload is one of the things that people do.
type workload struct {
	key    string // name in $DROWSE_WORKLOADS
	name   string
	before func(*work) // does it, and leaves some work in progress
	after  func(*work) // checks that this continues, and does it again
}

func TestWorkloads_go_on_after_sleep_and_are_done_again(t *testing.T) {
	w := &work{Env: guesttest.New(t), dir: t.TempDir()}
	var held []net.Listener
	for _, address := range []*string{&w.published, &w.container} {
		free, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, free)
		*address = free.Addr().String()
	}
	for _, free := range held {
		free.Close()
	}
	policy, err := netpolicy.Parse([]byte(fmt.Sprintf(`
rules: [{direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [any]}]
publish:
  - {listen: %q, port: %d, protocol: tcp}
  - {listen: %q, port: %d, protocol: tcp}
`, w.published, webPort, w.container, appPort)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Store.State.Volumes().Create(t.Context(), "containers", 4<<30); err != nil {
		t.Fatal(err)
	}
	rep := w.Run(sandbox.Spec{
		Name: vm, Image: imageTag, MemoryMiB: memoryMiB, Network: spec.NetworkTAP, Policy: policy,
		Volumes: []spec.VolumeMount{{Name: "containers", Path: "/var/lib/containers"}},
	})
	w.plain = hello(t, rep.Network.TAP)
	w.supervise()
	for name, from := range map[string]string{
		"lines.py": "lines.py", "wheeluser.py": "wheeluser.py", "web.py": "web.py", "webclient.py": "webclient.py", "writer.py": "writer.py", "server.js": "server.js",
	} {
		w.putData("/root/"+name, from)
	}

	all := []workload{gitWorkload(), pipWorkload(), npmWorkload(), goWorkload(), podmanWorkload(), sqliteWorkload(), webWorkload()}
	if keys := os.Getenv(chosenEnv); keys != "" {
		// The web server always runs: a connection to it wakes the VM.
		all = slices.DeleteFunc(all, func(l workload) bool {
			return l.key != "web" && !slices.Contains(strings.Split(keys, ","), l.key)
		})
	}
	done := map[string]bool{}
	for _, l := range all {
		t.Run("before the sleep/"+l.name, func(t *testing.T) {
			l.before(w.with(t))
			done[l.name] = !t.Failed()
		})
	}
	w.sleep(t)
	t.Run("a connection to the published port wakes the VM and is answered", func(t *testing.T) { w.with(t).wakeByPort() })
	for _, l := range all {
		t.Run("after the wake/"+l.name, func(t *testing.T) {
			if !done[l.name] {
				t.Fatal("it has failed before the sleep")
			}
			l.after(w.with(t))
		})
	}
}

// sleep puts the VM to sleep, and waits until its process has exited.
func (w *work) sleep(t *testing.T) {
	r, err := w.Store.State.Get(vm)
	if err != nil {
		t.Fatal(err)
	}
	if r.PID == 0 {
		t.Fatal("a VM that runs has no process")
	}
	begin := time.Now()
	res := w.Sleep(vm)
	t.Logf("asleep after %v: %d pages changed, %d of them free", time.Since(begin).Round(time.Millisecond), res.PagesChanged, res.PagesFree)
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", r.PID)); errors.Is(err, fs.ErrNotExist) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the process of the sleeping VM is still there")
		}
	}
	if r, err := w.Store.State.Get(vm); err != nil || r.Phase != state.Asleep || r.PID != 0 {
		t.Fatalf("it is %+v, %v", r, err)
	}
	if err := w.Store.State.VerifySnapshot(t.Context(), res.Snapshot); err != nil {
		t.Error(err)
	}
}

// supervise listens on the published port, as `drowse serve` does.
func (w *work) supervise() {
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- supervisor.Run(ctx, w.Store, w.Launcher, supervisor.Options{Pool: 1, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	}()
	w.T.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			w.T.Errorf("the supervisor: %v", err)
		}
	})
}

// get asks the web server through the published port.
func (w *work) get() string {
	w.T.Helper()
	client := &http.Client{Timeout: answerLimit, Transport: &http.Transport{DisableKeepAlives: true}}
	for end := time.Now().Add(answerLimit); ; time.Sleep(500 * time.Millisecond) {
		r, err := client.Get("http://" + w.published + "/")
		if err == nil {
			body, err := io.ReadAll(r.Body)
			r.Body.Close()
			if err != nil || r.StatusCode != http.StatusOK {
				w.T.Fatalf("%s: %q, %v", r.Status, body, err)
			}
			return strings.TrimSpace(string(body))
		}
		// The supervisor has not looked yet, or the server has not started.
		if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) || time.Now().After(end) {
			w.T.Fatal(err)
		}
	}
}

// web is the last answer of the web server through the published port.
var web string

func (w *work) wakeByPort() {
	begin := time.Now()
	after := w.get()
	w.T.Logf("answered after %v", time.Since(begin).Round(time.Millisecond))
	counted(w.T, "the web server", web, after)
	web = after
	if r, err := w.Store.State.Get(vm); err != nil || r.Phase != state.Running {
		w.T.Fatalf("after an answer it is %+v, %v", r, err)
	}
}

// hello listens at the host's end of the guest's link, and sends hello to each client.
func hello(t *testing.T, tap string) string {
	t.Helper()
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var bound error
		err := c.Control(func(fd uintptr) { bound = unix.BindToDevice(int(fd), tap) })
		return errors.Join(err, bound)
	}}
	l, err := lc.Listen(t.Context(), "tcp4", hostAddress+":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, "hello")
			c.Close()
		}
	}()
	return l.Addr().String()
}

// host runs a program on the host.
func (w *work) host(dir string, argv ...string) string {
	w.T.Helper()
	cmd := exec.CommandContext(w.T.Context(), argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null", "CGO_ENABLED=0",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.org")
	out, err := cmd.CombinedOutput()
	if err != nil {
		w.T.Fatalf("%q: %v\n%s", argv, err, out)
	}
	return strings.TrimSpace(string(out))
}

// carry forwards a port of the guest to the host, as `drowse port-forward --reverse` does, until the end of the
// test or a sleep.
func (w *work) carry(port int, to string) {
	w.T.Helper()
	c := w.Agent(vm)
	var l *guest.Listener
	// After a wake the agent frees the address of a listener that the sleep has cut.
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		var err error
		if l, err = c.Listen(w.T.Context(), "tcp", loopback(port)); err == nil {
			break
		}
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(end) {
			w.T.Fatal(err)
		}
	}
	f := forward.Forward{
		Accept: l.Accept,
		Dial:   func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp", to) },
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = f.Serve(ctx) })
	w.T.Cleanup(func() {
		stop()
		l.Close()
		wg.Wait()
	})
}

func gitWorkload() workload {
	const blob = "the content of a file\n"
	var daemon, bare, src, first, said string
	// serveGit starts a server for the repositories on the host. It ends with the subtest.
	serveGit := func(w *work) {
		free, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			w.T.Fatal(err)
		}
		daemon = free.Addr().String()
		_, port, _ := net.SplitHostPort(daemon)
		free.Close()
		cmd := exec.Command("git", "daemon", "--reuseaddr", "--export-all", "--informative-errors", "--listen=127.0.0.1", "--port="+port, "--base-path="+w.dir, w.dir)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			w.T.Fatal(err)
		}
		w.T.Cleanup(func() {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			_ = cmd.Wait()
		})
		for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			c, err := net.Dial("tcp4", daemon)
			if err == nil {
				c.Close()
				return
			}
			if time.Now().After(end) {
				w.T.Fatal(err)
			}
		}
	}
	const url = "git://127.0.0.1/repo.git"
	return workload{
		"git", "git clones a repository of the host over a forwarded port, with a reader of it left open",
		func(w *work) {
			src, bare = filepath.Join(w.dir, "src"), filepath.Join(w.dir, "repo.git")
			w.host(w.dir, "git", "init", "-q", "-b", "main", src)
			for i := range 40 {
				text := blob
				if i > 0 {
					text = strings.Repeat(fmt.Sprintf("line of file %d\n", i), 200)
				}
				if err := os.WriteFile(filepath.Join(src, fmt.Sprintf("file%d", i)), []byte(text), 0o644); err != nil {
					w.T.Fatal(err)
				}
			}
			w.host(src, "git", "add", ".")
			w.host(src, "git", "commit", "-q", "-m", "one")
			first = w.host(src, "git", "rev-parse", "HEAD")
			w.host(w.dir, "git", "clone", "-q", "--bare", src, bare)
			serveGit(w)
			w.carry(gitPort, daemon)
			w.sh("cd /root && git clone -q " + url + " repo")
			if got := w.sh("cd /root/repo && git rev-parse HEAD && git status --porcelain"); got != first {
				w.T.Errorf("the clone is at %q, the repository at %s", got, first)
			}
			// A process that has the pack mapped, and waits for the names of objects to read.
			w.sh("mkfifo /run/git.in /run/git.out")
			w.start("git", "cd /root/repo && exec 3<>/run/git.in 4<>/run/git.out && exec git cat-file --batch <&3 >&4")
			said = w.sh("echo HEAD:file0 > /run/git.in; head -n 3 < /run/git.out")
			if !strings.HasSuffix(said, strings.TrimSpace(blob)) {
				w.T.Errorf("the reader says %q", said)
			}
		},
		func(w *work) {
			if got := w.sh("echo HEAD:file0 > /run/git.in; head -n 3 < /run/git.out"); got != said {
				w.T.Errorf("the reader said %q before the sleep, %q after it", said, got)
			}
			if err := os.WriteFile(filepath.Join(src, "file0"), []byte("another content\n"), 0o644); err != nil {
				w.T.Fatal(err)
			}
			w.host(src, "git", "commit", "-q", "-a", "-m", "two")
			w.host(src, "git", "push", "-q", bare, "main")
			second := w.host(src, "git", "rev-parse", "HEAD")
			serveGit(w)
			w.carry(gitPort, daemon)
			if got := w.sh("cd /root/repo && git pull -q --ff-only && git rev-parse HEAD && git fsck --strict 2>&1 && cat file0"); got != second+"\nanother content" {
				w.T.Errorf("after a pull: %q, want %s", got, second)
			}
			if got := w.sh("cd /root && git clone -q " + url + " again && cd again && git rev-parse HEAD && ls | wc -l"); got != second+"\n40" {
				w.T.Errorf("a second clone: %q, want %s", got, second)
			}
		},
	}
}

// wheel returns a wheel of the module drowse_probe (PEP 427).
func wheel(t testing.TB, version string) []byte {
	t.Helper()
	var buf bytes.Buffer
	z := zip.NewWriter(&buf)
	info := "drowse_probe-" + version + ".dist-info/"
	var record strings.Builder
	for _, f := range [][2]string{
		{"drowse_probe/__init__.py", fmt.Sprintf("def version():\n    return %q\n", version)},
		{info + "METADATA", "Metadata-Version: 2.1\nName: drowse-probe\nVersion: " + version + "\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
	} {
		put(t, z, f[0], f[1])
		sum := sha256.Sum256([]byte(f[1]))
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f[0], base64.RawURLEncoding.EncodeToString(sum[:]), len(f[1]))
	}
	put(t, z, info+"RECORD", record.String()+info+"RECORD,,\n")
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func put(t testing.TB, z *zip.Writer, name, text string) {
	t.Helper()
	f, err := z.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(f, text); err != nil {
		t.Fatal(err)
	}
}

func pipWorkload() workload {
	install := func(w *work, version string) {
		file := "/root/drowse_probe-" + version + "-py3-none-any.whl"
		w.put(file, wheel(w.T, version))
		w.sh("pip install -q --no-index --no-deps --no-cache-dir --disable-pip-version-check --root-user-action ignore --break-system-packages " + file)
	}
	var said string
	return workload{
		"pip", "pip installs a wheel, with a process that has the module in its memory",
		func(w *work) {
			install(w, "1.0")
			w.start("wheel", fmt.Sprintf("exec python3 wheeluser.py %d", wheelPort))
			if said = w.ask(loopback(wheelPort), ""); !strings.HasSuffix(said, " 1.0 1") {
				w.T.Errorf("the module says %q", said)
			}
		},
		func(w *work) {
			counted(w.T, "the process with the module", said, w.ask(loopback(wheelPort), ""))
			install(w, "2.0")
			if got := w.sh("python3 -c 'import drowse_probe; print(drowse_probe.version())'"); got != "2.0" {
				w.T.Errorf("after another install the module says %q", got)
			}
			if got := w.ask(loopback(wheelPort), ""); !strings.HasSuffix(got, " 1.0 3") {
				w.T.Errorf("the process that has the old one says %q", got)
			}
		},
	}
}

// tgz returns an npm package.
func tgz(t testing.TB, files map[string]string) []byte {
	t.Helper()
	var buf bytes.Buffer
	z := gzip.NewWriter(&buf)
	w := tar.NewWriter(z)
	for name, text := range files {
		if err := w.WriteHeader(&tar.Header{Name: "package/" + name, Mode: 0o644, Size: int64(len(text)), ModTime: time.Unix(1e9, 0)}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func npmWorkload() workload {
	install := func(w *work, version string) {
		file := "/root/drowse-probe-" + version + ".tgz"
		w.put(file, tgz(w.T, map[string]string{
			"package.json": fmt.Sprintf(`{"name": "drowse-probe", "version": %q, "main": "index.js"}`, version),
			"index.js":     fmt.Sprintf("exports.version = () => %q;\n", version),
		}))
		w.sh("cd /root && npm install --offline --no-audit --no-fund --no-update-notifier --ignore-scripts --loglevel=error " + file)
	}
	var said string
	return workload{
		"npm", "npm installs a tarball, with a process that has the package in its memory",
		func(w *work) {
			install(w, "1.0.0")
			w.start("node", fmt.Sprintf("exec node server.js %d", nodePort))
			if said = w.ask(loopback(nodePort), ""); !strings.HasSuffix(said, " 1.0.0 1") {
				w.T.Errorf("the package says %q", said)
			}
		},
		func(w *work) {
			counted(w.T, "the process with the package", said, w.ask(loopback(nodePort), ""))
			install(w, "2.0.0")
			if got := w.sh(`cd /root && node -p 'require("drowse-probe").version()'`); got != "2.0.0" {
				w.T.Errorf("after another install the package says %q", got)
			}
		},
	}
}

func goWorkload() workload {
	const build = "cd /root/job && CGO_ENABLED=0 GOPROXY=off GOFLAGS=-mod=mod HOME=/root go build -o /root/job/job . && echo built"
	const question = "echo x > /run/job.in; head -n 1 < /run/job.out"
	var said string
	return workload{
		"go", "go builds a module, with the program that it made under way",
		func(w *work) {
			w.putData("/root/job/go.mod", "job/go.mod.txt")
			w.putData("/root/job/main.go", "job/main.go")
			w.putData("/root/job/count/count.go", "job/count/count.go")
			if got := w.sh(build); got != "built" {
				w.T.Fatalf("go says %q", got)
			}
			w.sh("mkfifo /run/job.in /run/job.out; cp /root/job/job /root/job1")
			w.start("job", "exec 3<>/run/job.in 4<>/run/job.out && exec /root/job1 <&3 >&4")
			if said = w.sh(question); !strings.HasSuffix(said, " v1 1") {
				w.T.Errorf("the program says %q", said)
			}
		},
		func(w *work) {
			counted(w.T, "the program", said, w.sh(question))
			text, err := testdata.ReadFile("testdata/job/count/count.go")
			if err != nil {
				w.T.Fatal(err)
			}
			w.put("/root/job/count/count.go", bytes.Replace(text, []byte(`"v1"`), []byte(`"v2"`), 1))
			if got := w.sh(build); got != "built" {
				w.T.Fatalf("go says %q", got)
			}
			if got := w.sh("echo | /root/job/job"); !strings.HasSuffix(got, " v2 1") {
				w.T.Errorf("the new program says %q", got)
			}
			// The build cache has the packages, so nothing is compiled again.
			if got := w.sh("{ " + strings.Replace(build, "go build", "go build -x", 1) + "; } 2>&1 | grep -c '/compile ' || :"); got != "0" {
				w.T.Errorf("%s packages were compiled again", got)
			}
		},
	}
}

func sqliteWorkload() workload {
	const db, log = "/root/load.db", "/root/load.done"
	// state returns the writer's pid and its number of committed transactions.
	state := func(w *work) (pid string, n int) {
		answer := w.ask(loopback(writerPort), "")
		f := strings.Fields(answer)
		if len(f) != 3 || f[2] != "ok" {
			w.T.Fatalf("the writer says %q", answer)
		}
		n, err := strconv.Atoi(f[1])
		if err != nil {
			w.T.Fatal(err)
		}
		return f[0], n
	}
	check := func(w *work, least int) {
		got := w.sh("sqlite3 -cmd '.timeout 600000' " + db + " 'SELECT (SELECT count(*) FROM move), (SELECT max(n) FROM move), (SELECT amount FROM account WHERE id = 2), (SELECT sum(amount) FROM account)'")
		f := strings.Split(got, "|")
		if len(f) != 4 || f[0] != f[1] || f[1] != f[2] || f[3] != "1000000" {
			w.T.Errorf("rows, last row, moved, sum: %q: a transaction is there in part, or a row is missing", got)
		}
		if n, err := strconv.Atoi(f[0]); err != nil || n < least {
			w.T.Errorf("%s rows, and %d had been committed before", f[0], least)
		}
		// The writer's list of commits must have no gap.
		if got := w.sh("awk '$1 != NR { print \"line\", NR, \"is\", $1; exit } END { print (NR >= " + strconv.Itoa(least) + ") }' " + log); got != "1" {
			w.T.Errorf("the list of commits: %q", got)
		}
	}
	var pid string
	var n int
	return workload{
		"sqlite", "sqlite writes transactions without end, and has one half done",
		func(w *work) {
			w.start("writer", fmt.Sprintf("exec python3 writer.py %d %s %s", writerPort, db, log))
			for pid, n = state(w); n < 20; _, n = state(w) {
				time.Sleep(time.Second)
			}
			check(w, n)
			w.sh("mkfifo /run/sql.in")
			w.start("half", "exec 3<>/run/sql.in && exec sqlite3 -batch /root/half.db <&3")
			w.sh("echo 'CREATE TABLE t (x); INSERT INTO t VALUES (1); BEGIN IMMEDIATE; INSERT INTO t VALUES (2); SELECT 700000 + changes();' > /run/sql.in; until grep -q 700001 /root/half.log; do sleep 1; done")
			_, n = state(w)
		},
		func(w *work) {
			pid2, n2 := state(w)
			if pid2 != pid || n2 < n {
				w.T.Errorf("the writer was %s with %d transactions, and is %s with %d", pid, n, pid2, n2)
			}
			check(w, n2)
			for n3 := n2; n3 <= n2+10; _, n3 = state(w) { // the writer continues
				time.Sleep(time.Second)
			}
			if got := w.sh("sqlite3 /root/half.db 'SELECT count(*) FROM t'"); got != "1" {
				w.T.Errorf("of a transaction that is half done others see %q rows, want 1", got)
			}
			w.sh("echo 'INSERT INTO t VALUES (3); COMMIT; SELECT 800000 + count(*) FROM t;' > /run/sql.in; until grep -q 800003 /root/half.log; do sleep 1; done")
			if got := w.sh("sqlite3 /root/half.db 'SELECT sum(x) FROM t; PRAGMA integrity_check'"); got != "6\nok" {
				w.T.Errorf("after its end: %q", got)
			}
			w.sh("kill " + pid)
			if got := w.sh("sqlite3 -cmd '.timeout 600000' " + db + " 'PRAGMA integrity_check'"); got != "ok" {
				w.T.Errorf("the database of the writer: %q", got)
			}
			check(w, n2)
			if got := w.sh("sqlite3 /root/new.db 'CREATE TABLE t (x); INSERT INTO t VALUES (7); SELECT x FROM t'"); got != "7" {
				w.T.Errorf("a new database: %q", got)
			}
		},
	}
}

func webWorkload() workload {
	var kept string
	return workload{
		"web", "a web server answers through a published port, with a connection from the guest to itself kept open",
		func(w *work) {
			w.start("web", fmt.Sprintf("exec python3 web.py %d", webPort))
			web = w.get()
			w.start("webclient", fmt.Sprintf("exec python3 webclient.py %d %d", webPort, clientPort))
			kept = w.ask(loopback(clientPort), "")
			if strings.HasPrefix(kept, "broken") {
				w.T.Fatal(kept)
			}
			// The published port leads to the same server, which has one process and one count.
			web = w.get()
			counted(w.T, "the web server", kept[strings.IndexByte(kept, ' ')+1:], web)
		},
		func(w *work) {
			// The same local port means the same connection. The request that woke the VM counts as well.
			before, after := strings.Fields(kept), strings.Fields(w.ask(loopback(clientPort), ""))
			if len(after) != 3 || after[0] != before[0] || after[1] != before[1] {
				w.T.Fatalf("the client with an open connection said %q before the sleep, %q after it", before, after)
			}
			counted(w.T, "the web server", web, after[1]+" "+after[2])
			web = w.get()
			counted(w.T, "the web server", after[1]+" "+after[2], web)
		},
	}
}

// archive returns a container image of one static program, as `docker save` writes it.
func (w *work) archive() []byte {
	w.T.Helper()
	// On an emulated processor, the program is built outside.
	program := os.Getenv(appEnv)
	if program == "" {
		program = filepath.Join(w.dir, "app")
		source, err := filepath.Abs("testdata/app/main.go")
		if err != nil {
			w.T.Fatal(err)
		}
		w.host(w.dir, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, source)
	}
	text, err := os.ReadFile(program)
	if err != nil {
		w.T.Fatal(err)
	}
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	if err := tw.WriteHeader(&tar.Header{Name: "app", Mode: 0o755, Size: int64(len(text)), ModTime: time.Unix(1e9, 0)}); err != nil {
		w.T.Fatal(err)
	}
	if _, err := tw.Write(text); err != nil {
		w.T.Fatal(err)
	}
	if err := tw.Close(); err != nil {
		w.T.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil })
	if err != nil {
		w.T.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		w.T.Fatal(err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		w.T.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", "amd64"
	cfg.Config = v1.Config{Entrypoint: []string{"/app"}, Env: []string{"PATH=/"}}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		w.T.Fatal(err)
	}
	tag, err := name.NewTag("localhost/app:v1")
	if err != nil {
		w.T.Fatal(err)
	}
	var out bytes.Buffer
	if err := tarball.Write(tag, img, &out); err != nil {
		w.T.Fatal(err)
	}
	return out.Bytes()
}

// containersConf is for a guest without systemd. With env_host, programs in a container avoid AVX where those of
// the guest must.
const containersConf = `
[containers]
env_host = true
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
`

const storageConf = `
[storage]
driver = "overlay"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
`

func podmanWorkload() workload {
	const run = "podman run -d --pull never --name %s --memory 128m --pids-limit 50 "
	const bridge, image = "--network podman -p %d:8080 ", "localhost/app:v1"
	const inspect = "podman inspect -f '{{.Id}} {{.State.Status}} {{.State.Pid}} {{.State.StartedAt}} {{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' app"
	var id, state, said, address string
	published := func(port int) string { return net.JoinHostPort(guestAddress, strconv.Itoa(port)) }
	return workload{
		"podman", "podman runs a container of an archive, on a bridge with a published port",
		func(w *work) {
			w.put("/etc/containers/containers.conf", []byte(containersConf))
			w.put("/etc/containers/storage.conf", []byte(storageConf))
			w.put("/etc/containers/policy.json", []byte(`{"default": [{"type": "insecureAcceptAnything"}]}`))
			w.put("/root/app.tar", w.archive())
			w.sh("podman load -q -i /root/app.tar 2>&1")
			id = w.sh(fmt.Sprintf(run+bridge, "app", appPort) + image + " 2>/root/podman.log || echo failed")
			if strings.HasSuffix(id, "failed") {
				w.T.Fatalf("podman: %s\n%s", w.sh("cat /root/podman.log"), w.sh("dmesg | tail -n 20"))
			}
			state = w.sh(inspect)
			f := strings.Fields(state)
			if len(f) < 4 || f[0] != id || f[1] != "running" {
				w.T.Fatalf("podman says %q of container %s", state, id)
			}
			address = net.JoinHostPort(f[len(f)-1], "8080")
			if said = w.ask(address, ""); !strings.HasSuffix(said, " 1 1") || !strings.HasPrefix(said, id[:12]) {
				w.T.Errorf("the container says %q; its id is %s, and its program its first process", said, id)
			}
			// Requests over the bridge, through the guest's port that leads to it, from within and from the host,
			// and from the container to the host.
			before := said
			said = w.ask(published(appPort), "")
			counted(w.T, "the container by its published port", before, said)
			before = said
			said = w.askHost(w.container, "")
			counted(w.T, "the container by its published port and the guest's", before, said)
			if got := w.ask(address, "fetch "+w.plain); got != "hello" {
				w.T.Errorf("from the container to the host: %q", got)
			}
		},
		func(w *work) {
			after := w.ask(address, "")
			counted(w.T, "the container", said, after)
			if got := w.sh(inspect); got != state {
				w.T.Errorf("podman said %q before the sleep, %q after it", state, got)
			}
			byPort := w.ask(published(appPort), "")
			counted(w.T, "the container by its published port", after, byPort)
			counted(w.T, "the container by its published port and the guest's", byPort, w.askHost(w.container, ""))
			// After the wake, the VM's link is another device on the host.
			info, err := w.Store.Sandbox(vm).Info(w.T.Context())
			if err != nil || info.Report.Network == nil {
				w.T.Fatalf("the VM's network: %+v, %v", info.Report.Network, err)
			}
			if got := w.ask(address, "fetch "+hello(w.T.(*testing.T), info.Report.Network.TAP)); got != "hello" {
				w.T.Errorf("from the container to the host: %q", got)
			}
			if got := w.sh("podman rm -f -t 0 app"); got != "app" && got != id {
				w.T.Errorf("podman rm says %q", got)
			}
			// A new container gets the port, with a new bridge, links and rules.
			second := w.sh(fmt.Sprintf(run+bridge, "app2", appPort) + image)
			if got := w.ask(published(appPort), ""); second == id || !strings.HasPrefix(got, second[:min(12, len(second))]) || !strings.HasSuffix(got, " 1 1") {
				w.T.Errorf("a new container %s says %q", second, got)
			}
			if got := w.askHost(w.container, ""); !strings.HasPrefix(got, second[:min(12, len(second))]) || !strings.HasSuffix(got, " 1 2") {
				w.T.Errorf("a new container %s says %q to the host", second, got)
			}
			w.sh("podman rm -f -t 0 app2")
		},
	}
}
