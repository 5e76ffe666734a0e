package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Ways are how a caller can run a command: with the command line (a new process for each call), over the HTTP API, or
// with the Go library.
var Ways = []string{wayCLI, wayHTTP, wayGo}

const wayCLI, wayHTTP, wayGo = "cli", "http", "go"

// ExecCommands are what callers can run: a program that prints nothing, what a shell does without another process, and
// an interpreter.
var ExecCommands = []string{"true", "builtin", "python"}

var execCommands = map[string]struct {
	argv []string
	out  string
}{
	"true":    {[]string{"/bin/true"}, ""},
	"builtin": {[]string{"sh", "-c", "echo drowse-$((6*7))"}, printed},
	"python":  {[]string{"python3", "-c", "print('drowse-%d' % (6*7))"}, printed},
}

// serveTime bounds the wait for "drowse serve", and for its end.
const serveTime = time.Minute

// Execs measures what callers wait for when they run a command, from the call to the first bytes of its output, or to
// the end of a command without output:
//
//   - create_exec: a new sandbox and its first command. By command line that is one "drowse run".
//   - exec_asleep: a command in a sandbox that sleeps.
//   - exec_awake: the same command again, at once.
//
// Stage end is when the call has returned. Counts are those of the whole call, by the command line and over HTTP
// without the caller's own. All ways and commands are measured in turn. With o.Serve a "drowse serve"
// runs meanwhile, as on a host in use, and answers the calls over HTTP. o.Beside is another build of drowse, which is
// measured in turn as well, by command line alone. It has its own "drowse serve" and state directory, o.BesideState,
// with the image in it. The parameter build tells the two apart.
func Execs(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	builds := []*build{{name: "this", program: e.Program, state: e.Store.State.Dir(), ways: o.Ways}}
	if o.Beside != "" {
		builds = append(builds, &build{name: "beside", program: o.Beside, state: o.BesideState, ways: []string{wayCLI}})
	}
	m := execs{Env: e, o: o, series: map[string]*series{}, counter: counting()}
	defer m.counter.close()
	defer func() {
		for _, b := range builds {
			err = errors.Join(err, m.leave(ctx, b))
		}
	}()
	for _, b := range builds {
		if err := m.enter(ctx, b); err != nil {
			return nil, fmt.Errorf("%s: %w", b.program, err)
		}
	}
	for i := range o.Warmup + o.N {
		for _, b := range builds {
			for _, way := range b.ways {
				for _, command := range o.ToRun {
					e.say("exec: run %d of %d, %s by %s", i, o.Warmup+o.N, command, way)
					if err := m.once(ctx, b, way, command, i); err != nil {
						return nil, fmt.Errorf("%s, %s by %s: %w", b.program, command, way, err)
					}
				}
			}
		}
		slices.Reverse(builds)
	}
	for _, r := range m.rows {
		rows = append(rows, m.series[r.Name+sorted(r.Params)].row(r.Name, r.Params))
	}
	return rows, nil
}

// build is a build of drowse to measure.
type build struct {
	name, program, state string
	ways                 []string
	serve                *exec.Cmd
	client               *client.Client
}

type execs struct {
	Env
	o       Options
	rows    []Row // names and parameters, in order
	series  map[string]*series
	counter *counter
}

// call is how a caller runs a command. out gets its output.
type call func(ctx context.Context, argv []string, out io.Writer) error

// enter starts the build's server and boots its sandbox.
func (m *execs) enter(ctx context.Context, b *build) error {
	if m.o.Serve {
		b.serve = exec.Command(b.program, "--state", b.state, "serve")
		b.serve.Stderr = os.Stderr
		if !m.o.Template {
			b.serve.Env = append(os.Environ(), control.NoTemplateEnv+"=1")
		}
		// Killed, this process takes it along.
		b.serve.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
		if err := b.serve.Start(); err != nil {
			b.serve = nil
			return err
		}
		b.client = client.Unix(filepath.Join(b.state, "api.sock"))
		until, cancel := context.WithTimeout(ctx, serveTime)
		defer cancel()
		for {
			_, err := b.client.Ready(until)
			if err == nil {
				break
			}
			if perr := wait.For(until, 50*time.Millisecond); perr != nil {
				return fmt.Errorf("its server does not answer: %w", err)
			}
		}
	}
	return m.run(ctx, b, io.Discard, m.create(b, vmName(), "true")...)
}

// leave removes the build's sandbox and ends its server.
func (m *execs) leave(ctx context.Context, b *build) error {
	err := m.run(context.WithoutCancel(ctx), b, io.Discard, "rm", "--force", vmName())
	if b.client != nil {
		b.client.Close()
	}
	if b.serve != nil {
		ended := time.AfterFunc(serveTime, func() { _ = b.serve.Process.Kill() })
		err = errors.Join(err, b.serve.Process.Signal(syscall.SIGTERM), b.serve.Wait())
		ended.Stop()
	}
	return err
}

// run runs a command of the build.
func (m *execs) run(ctx context.Context, b *build, out io.Writer, args ...string) error {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, b.program, append([]string{"--state", b.state}, args...)...)
	cmd.Stdout, cmd.Stderr = out, &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("drowse %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// create returns the arguments of a command that makes a sandbox and runs a command in it.
func (m *execs) create(b *build, name, command string) []string {
	args := []string{"run", "--name", name, "--memory", fmt.Sprint(m.o.mib())}
	if m.Kernel != "" {
		args = append(args, "--kernel", m.Kernel)
	}
	if !m.o.Template && b.name == "this" {
		args = append(args, "--no-template")
	}
	return append(append(args, m.Image, "--"), execCommands[command].argv...)
}

// creator returns a call that makes a sandbox of this name.
func (m *execs) creator(b *build, way, name string) call {
	vm := sandbox.Spec{Name: name, MemoryMiB: m.o.mib(), Image: m.Image, Kernel: m.Kernel}
	return func(ctx context.Context, argv []string, out io.Writer) error {
		switch way {
		case wayGo:
			b, err := m.Store.With(m.Launcher).Create(ctx, vm, sandbox.CreateOptions{Boot: !m.o.Template})
			if err != nil {
				return err
			}
			_, err = b.Exec(ctx, guest.Cmd{Argv: argv, IO: guest.IO{Stdout: out}})
			return err
		case wayHTTP:
			if _, err := b.client.Create(ctx, records.Request{Spec: vm}); err != nil {
				return err
			}
			return m.executor(b, way, name)(ctx, argv, out)
		}
		return nil
	}
}

// executor returns a call that runs a command in the sandbox of this name.
func (m *execs) executor(b *build, way, name string) call {
	return func(ctx context.Context, argv []string, out io.Writer) error {
		switch way {
		case wayGo:
			_, err := m.Store.With(m.Launcher).Sandbox(name).Exec(ctx, guest.Cmd{Argv: argv, IO: guest.IO{Stdout: out}})
			return err
		case wayHTTP:
			done, err := b.client.Exec(ctx, name, wire.Exec{Command: argv})
			if err == nil && done.ExitCode != 0 {
				err = fmt.Errorf("exit code %d: %s%s", done.ExitCode, done.NotStarted, done.Stderr)
			}
			_, werr := out.Write(done.Stdout)
			return errors.Join(err, werr)
		}
		return m.run(ctx, b, out, append([]string{"exec", name}, argv...)...)
	}
}

// once measures each of the rows once.
func (m *execs) once(ctx context.Context, b *build, way, command string, i int) error {
	name, fresh := vmName(), vmName(i)
	if m.o.Create {
		do := m.creator(b, way, fresh)
		if way == wayCLI {
			do = func(ctx context.Context, _ []string, out io.Writer) error {
				return m.run(ctx, b, out, m.create(b, fresh, command)...)
			}
		}
		err := m.measure(ctx, "create_exec", b, way, command, i, do)
		if err = errors.Join(err, m.run(context.WithoutCancel(ctx), b, io.Discard, "rm", "--force", fresh)); err != nil {
			return err
		}
	}
	if err := m.run(ctx, b, io.Discard, "sleep", name); err != nil {
		return err
	}
	if err := wait.For(ctx, m.o.Settle); err != nil {
		return err
	}
	if err := m.measure(ctx, "exec_asleep", b, way, command, i, m.executor(b, way, name)); err != nil {
		return err
	}
	return m.measure(ctx, "exec_awake", b, way, command, i, m.executor(b, way, name))
}

// measure makes a call and records how long it took.
func (m *execs) measure(ctx context.Context, row string, b *build, way, command string, i int, do call) error {
	ctx, cancel := context.WithTimeout(ctx, execTimeout)
	defer cancel()
	c := execCommands[command]
	out := &watcher{want: []byte(c.out), seen: make(chan struct{})}
	counts := m.counter.begin(i >= m.o.Warmup)
	begin := time.Now()
	err := do(ctx, c.argv, out)
	end := time.Now()
	counts = m.counter.since(counts)
	if err != nil {
		return err
	}
	seen := end
	if c.out != "" {
		select {
		case <-out.seen:
			seen = out.when
		default:
			return fmt.Errorf("the command did not print %q", c.out)
		}
	}
	params := map[string]any{"by": way, "command": command, "memory_mib": m.o.mib(), "vcpus": spec.DefaultVCPUs, "serve": m.o.Serve}
	if m.o.Beside != "" {
		params["build"] = b.name
	}
	if row == "create_exec" {
		params["template"] = m.o.Template && b.name == "this"
	}
	key := row + sorted(params)
	if m.series[key] == nil {
		m.series[key] = newSeries(inMs)
		m.rows = append(m.rows, Row{Name: row, Params: params})
	}
	m.series[key].counted(m.counter, counts, way == wayGo)
	if i < m.o.Warmup {
		return nil
	}
	m.series[key].add(int64(seen.Sub(begin)))
	m.series[key].stage("end", int64(end.Sub(begin)))
	return nil
}
