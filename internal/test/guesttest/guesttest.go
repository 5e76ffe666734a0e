package guesttest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/jail"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/vmm"
)

// StateEnv names the directory with images and kernels.
const StateEnv = "DROWSE_TEST_STATE"

// AgentEnv names the guest's agent. If it is not set, the agent is built.
const AgentEnv = "DROWSE_AGENT"

// ImageTag is the image of the tests: Debian with python3.
const ImageTag = "debian-python"

// Main runs the tests, or the process of a VM if the test binary was started as one. A package's TestMain calls
// it.
func Main(m *testing.M) { MainOf(m.Run) }

// MainOf is Main for a package that runs its tests by run.
func MainOf(run func() (code int)) {
	if len(os.Args) > 2 && os.Args[1] == vmmArg {
		if last := os.Args[len(os.Args)-1]; last != jail.Argument && last != network.Argument { // they end with their keeper
			endWith(os.Args[2])
		}
		os.Exit(serve(os.Args[3:]))
	}
	EndWithTest()
	if err := becomeUser(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Setenv(processEnv, strconv.Itoa(os.Getpid()))
	code := run()
	for _, dir := range append(bootedDirs, agentDir) {
		if dir != "" {
			os.RemoveAll(dir)
		}
	}
	os.Exit(code)
}

// vmmArg makes a test binary the process of a VM. It is followed by the PID of the test's process.
const vmmArg = "vmm"

// VMCommand returns the pool.Launcher.Command with which a test's binary, self, is the process of a VM. It begins with
// what all tests have in common: templates are for one program.
func VMCommand(self string) []string {
	return []string{"/usr/bin/env", self, vmmArg, os.Getenv(processEnv)}
}

// Process holds the options of the processes of VMs. Set it before Main is called.
var Process process.ProcessOptions

func serve(args []string) int {
	if err := process.ServeProcessWith(context.Background(), args, Process); err != nil {
		slog.New(slog.NewTextHandler(os.Stderr, nil)).Error(err.Error())
		return 1
	}
	return 0
}

// Env is the store of one test.
type Env struct {
	T        testing.TB
	Store    *sandbox.Host
	Launcher pool.Launcher
}

var (
	agentDir  string
	agentLock sync.Mutex // guards agentDir while tests run
)

// New makes a store for a test. The test removes its VMs when it ends.
func New(t testing.TB) *Env {
	t.Helper()
	missing := func(format string, args ...any) {
		t.Helper()
		text := fmt.Sprintf(format, args...)
		if os.Getenv("CI") != "" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
	state := os.Getenv(StateEnv)
	if state == "" {
		missing("$%s names no directory with an image and a kernel: use `make test`", StateEnv)
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		// In CI as well: tests that are skipped there run on an emulated KVM, see .ci/run and testreport.
		t.Skipf("this host cannot run VMs: %v", err)
	}
	if uid := os.Geteuid(); uid != 0 && uid != User {
		missing("running VMs of tests needs root")
	}
	// The path must be short: it contains Unix sockets.
	dir, err := os.MkdirTemp("", "dt")
	if err != nil {
		t.Fatal(err)
	}
	for _, sub := range []string{"images", "kernels", "cache"} {
		if err := os.MkdirAll(filepath.Join(state, sub), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Join(state, sub), filepath.Join(dir, sub)); err != nil {
			t.Fatal(err)
		}
	}
	s, err := sandbox.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	e := &Env{T: t, Store: s, Launcher: pool.Launcher{Command: VMCommand(executable(t)), Agent: agent(t)}}
	t.Cleanup(func() {
		e.cleanUp()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return e
}

// BriefEnv, if it is set, leaves out tests that have guests work for minutes.
const BriefEnv = "DROWSE_TEST_BRIEF"

// Long skips a test that has a guest work for minutes where there is time for little.
func Long(t testing.TB) {
	t.Helper()
	if os.Getenv(BriefEnv) != "" {
		t.Skipf("$%s is set, and a guest works for minutes here", BriefEnv)
	}
}

func executable(t testing.TB) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}

// agent finds or builds the guest's agent.
func agent(t testing.TB) string {
	t.Helper()
	if path := os.Getenv(AgentEnv); path != "" {
		return path
	}
	agentLock.Lock()
	defer agentLock.Unlock()
	if agentDir == "" {
		dir, err := os.MkdirTemp("", "drowse-agent-")
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(dir, "drowse-agent"), "github.com/drowse-vm/drowse/cmd/drowse-agent")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("building the agent: %v\n%s", err, out)
		}
		agentDir = dir
	}
	return filepath.Join(agentDir, "drowse-agent")
}

func (e *Env) cleanUp() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	records, err := e.Store.State.List()
	if err != nil {
		e.T.Error(err)
	}
	for _, r := range records {
		name := r.Spec.Name
		if e.T.Failed() {
			log, _ := os.ReadFile(e.Store.State.ProcessLog(name))
			console, _ := os.ReadFile(e.Store.State.ConsoleLog(name))
			e.T.Logf("VM %s is %s\nits process says:\n%s\nits console says:\n%s", name, r.Phase, tail(log), tail(console))
		}
		if err := e.Store.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil {
			e.T.Error(err)
		}
	}
}

func tail(p []byte) []byte { return p[max(0, len(p)-4000):] }

// Kernels returns the kinds of kernel that exist and that this host can run.
func (e *Env) Kernels() []string {
	if vmm.SoftKVM() {
		// A KVM that interprets the guest cannot run Debian's own kernel.
		return []string{"built"}
	}
	return []string{"built", "debian"}
}

// Boot boots a VM. Only tests that need a boot of their own do so.
func (e *Env) Boot(spec sandbox.Spec) control.Report {
	e.T.Helper()
	return e.create(spec, sandbox.CreateOptions{Boot: true})
}

// Run starts a VM, from a template that this machine's tests share.
func (e *Env) Run(spec sandbox.Spec) control.Report {
	e.T.Helper()
	e.Template(spec)
	return e.create(spec, sandbox.CreateOptions{})
}

// filled returns a Spec with what tests have in place of the program's defaults.
func filled(spec sandbox.Spec) sandbox.Spec {
	spec.Image = cmp.Or(spec.Image, ImageTag)
	spec.MemoryMiB, spec.DiskMiB = cmp.Or(spec.MemoryMiB, 256), cmp.Or(spec.DiskMiB, 256)
	return spec
}

func (e *Env) create(spec sandbox.Spec, o sandbox.CreateOptions) (rep control.Report) {
	e.T.Helper()
	spec = filled(spec)
	begin := time.Now()
	o.Report = &rep
	if _, err := e.Store.With(e.Launcher).Create(e.T.Context(), spec, o); err != nil {
		e.T.Fatal(err)
	}
	how := "booted"
	if r, err := e.Store.State.Get(rep.Name); err == nil && r.Template != "" {
		how = "made from a template"
	}
	e.T.Logf("%s %s in %v", how, rep.Name, time.Since(begin).Round(time.Millisecond))
	return rep
}

// took logs how long something in a guest took. What is slow on an emulated KVM is seldom what is slow elsewhere.
func (e *Env) took(what string) func() {
	begin := time.Now()
	return func() {
		e.T.Helper()
		e.T.Logf("%v %s", time.Since(begin).Round(time.Millisecond), what)
	}
}

// Sleep puts a VM to sleep.
func (e *Env) Sleep(name string) spec.SleepResult {
	e.T.Helper()
	defer e.took("sleep of " + name)()
	res, err := e.Store.Sandbox(name).Sleep(e.T.Context(), sandbox.SleepOptions{})
	if err != nil {
		e.T.Fatal(err)
	}
	return res
}

// Wake wakes a VM.
func (e *Env) Wake(name string) control.Report {
	e.T.Helper()
	defer e.took("wake of " + name)()
	rep, err := e.Store.With(e.Launcher).Sandbox(name).Wake(e.T.Context())
	if err != nil {
		e.T.Fatal(err)
	}
	return rep
}

// Read returns the content of files of a VM, without their final line feeds and joined by line feeds. It starts no
// process in the guest: a process takes an interpreted kernel seconds.
func (e *Env) Read(name string, paths ...string) string {
	e.T.Helper()
	defer e.took(name + ": reading " + strings.Join(paths, ", "))()
	c := e.brief(name)
	defer c.Close()
	var texts []string
	for _, path := range paths {
		var b strings.Builder
		if _, err := c.ReadFile(e.T.Context(), path, &b, 0, 0); err != nil {
			e.T.Fatal(err)
		}
		texts = append(texts, strings.TrimSuffix(b.String(), "\n"))
	}
	return strings.Join(texts, "\n")
}

// Write puts a line into each of some files of a VM, also without a process.
func (e *Env) Write(name, line string, paths ...string) {
	e.T.Helper()
	e.write(name, line, guest.WriteOptions{}, paths)
}

// WriteDurably is Write to new files, which are on the guest's disk and not only in its cache when this returns.
func (e *Env) WriteDurably(name, line string, paths ...string) {
	e.T.Helper()
	e.write(name, line, guest.WriteOptions{Atomic: true}, paths)
}

func (e *Env) write(name, line string, o guest.WriteOptions, paths []string) {
	e.T.Helper()
	defer e.took(name + ": writing " + strings.Join(paths, ", "))()
	c := e.brief(name)
	defer c.Close()
	for _, path := range paths {
		if err := c.WriteFile(e.T.Context(), path, strings.NewReader(line+"\n"), o); err != nil {
			e.T.Fatal(err)
		}
	}
}

// Remove removes a file of a VM.
func (e *Env) Remove(name, path string) {
	e.T.Helper()
	c := e.brief(name)
	defer c.Close()
	if err := c.Remove(e.T.Context(), path, false); err != nil {
		e.T.Fatal(err)
	}
}

// Exists reports whether a VM has a file.
func (e *Env) Exists(name, path string) bool {
	e.T.Helper()
	c := e.brief(name)
	defer c.Close()
	_, err := c.Lstat(e.T.Context(), path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.T.Fatal(err)
	}
	return err == nil
}

// brief connects to an agent for a short time: a VM that falls asleep by itself waits for open connections.
func (e *Env) brief(name string) *guest.Client {
	e.T.Helper()
	c, err := e.Store.Sandbox(name).Agent(e.T.Context())
	if err != nil {
		e.T.Fatal(err)
	}
	return c
}

// Agent connects to the agent of a VM until the test ends.
func (e *Env) Agent(name string) *guest.Client {
	e.T.Helper()
	c, err := e.Store.Sandbox(name).Agent(e.T.Context())
	if err != nil {
		e.T.Fatal(err)
	}
	e.T.Cleanup(func() { c.Close() })
	return c
}

// Sh runs a shell command in a VM and returns its output.
func (e *Env) Sh(name, script string) string {
	e.T.Helper()
	return e.Do(name, "/bin/sh", "-c", script)
}

// Do runs a program in a VM and returns its output.
func (e *Env) Do(name string, argv ...string) string {
	e.T.Helper()
	defer e.took(name + ": " + argv[len(argv)-1])()
	c := e.brief(name)
	defer c.Close()
	var out, errs strings.Builder
	cmd := guest.Cmd{Argv: argv}
	cmd.Stdout, cmd.Stderr = &out, &errs
	if _, err := c.Exec(e.T.Context(), cmd); err != nil {
		e.T.Fatalf("%q: %v: %s", argv, err, errs.String())
	}
	return strings.TrimSpace(out.String())
}

// WaitPhase waits until a VM is in a phase.
func (e *Env) WaitPhase(name string, want state.Phase, limit time.Duration) *state.Record {
	e.T.Helper()
	deadline := time.Now().Add(limit)
	for {
		r, err := e.Store.State.Get(name)
		if err != nil {
			e.T.Fatal(err)
		}
		if r.Phase == want {
			return r
		}
		if time.Now().After(deadline) {
			e.T.Fatalf("VM %s is %s after %v, not %s", name, r.Phase, limit, want)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
