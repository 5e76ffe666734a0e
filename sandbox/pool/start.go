package pool

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// canceled waits for the end of a process whose report has no reader any more. If the process made its VM a
// running one before it noticed, it continues: other callers may have heard of the VM and use it. A process that
// does neither within cancelTime is killed.
func canceled(s *state.Store, proc Process, name string) {
	for end := time.Now().Add(cancelTime); time.Now().Before(end); {
		if proc.Wait(cancelPoll) {
			return
		}
		if r, err := s.Get(name); err == nil && r.Phase == state.Running {
			return
		}
	}
	_ = proc.Kill()
	proc.Wait(0)
}

// How long a process has to notice, and how often canceled looks. Variables, so that tests can shorten them.
var (
	cancelTime = 30 * time.Second
	cancelPoll = 10 * time.Millisecond
)

// Launcher says how a sandbox.Host starts the processes of its VMs: see Host.With.
type Launcher struct {
	// Command is the program with its first arguments. The Launcher appends more arguments, which the program must
	// pass to process.ServeProcess. The program's environment has only the variables that a VM's process reads.
	Command []string
	// Agent is the path of the guest's agent, a static program.
	Agent string
	// Pool, if not nil, holds processes that were started ahead: see Pool.Launcher.
	Pool *Pool
	// Supervised takes such processes from another process that serves a pool for the store (Pool.Serve), if there
	// is one and Pool is nil.
	Supervised bool
	// Processes, if not nil, replaces Command, Pool and Supervised.
	Processes Processes
	// Secrets, if not nil, returns the secrets that a woken or booted VM waits for, and those that Sandbox.SetSecrets
	// gets with a source and without a value. A user of the API may have chosen the source: Secrets must check that
	// the VM may have it. With an error it may return some of the secrets. One with a source and a nil Value is in the VM
	// already. The VM runs on without the others: see control.Report. Secrets may be called from several goroutines,
	// and has SecretsTime.
	Secrets func(ctx context.Context, vm string, awaited []spec.SecretFile) ([]spec.Secret, error)

	ahead *ahead // see Ahead
}

// SecretsTime is how long Launcher.Secrets may take.
const SecretsTime = 30 * time.Second

// Start starts a VM's process and waits for its report. It does not supply the secrets that the VM then waits for.
func Start(ctx context.Context, s *state.Store, l Launcher, shape spec.Shape, ord control.Order, files ...*os.File) (rep control.Report, err error) {
	ord.Cause = cmp.Or(ord.Cause, events.CauseOf(ctx))
	log, err := os.OpenFile(s.ProcessLog(ord.Name), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return rep, fmt.Errorf("starting VM %s: %w", ord.Name, err)
	}
	defer log.Close()
	if err := s.EnsureAudit(ord.Name); err != nil {
		return rep, fmt.Errorf("starting VM %s: %w", ord.Name, err)
	}
	if ord.Ahead() && l.Processes == nil {
		from, done := standbys(s, l)
		defer done()
		for ready := from(shape); ready != nil; ready = from(shape) {
			rep, err := launchBy(ctx, s, ord, log, files, ready.start)
			// The process may have been killed while it waited. Then it has not taken the order.
			again := (errors.Is(err, spec.ErrCrashed) || errors.Is(err, errNoOrder)) && !ready.took()
			ready.close()
			if !again {
				rep.Pooled = !ready.own
				return rep, err
			}
		}
	}
	return launchBy(ctx, s, ord, log, files, func(ord control.Order, files []*os.File) (Process, error) {
		return startProcess(s, l, ord, files)
	})
}

// launchBy gives an order to a process by start, which gets the order's files: the log, the pipe for the report,
// and then files. It waits for the report.
func launchBy(ctx context.Context, s *state.Store, ord control.Order, log *os.File, files []*os.File,
	start func(control.Order, []*os.File) (Process, error)) (rep control.Report, err error) {
	name := ord.Name
	r, w, err := os.Pipe()
	if err != nil {
		return rep, fmt.Errorf("starting VM %s: %w", name, err)
	}
	defer r.Close()
	proc, err := start(ord, append([]*os.File{log, w}, files...))
	w.Close()
	if err != nil {
		return rep, fmt.Errorf("starting the process of VM %s: %w", name, err)
	}
	stop := context.AfterFunc(ctx, func() {
		if !ord.Shared {
			_ = proc.Kill()
		}
		r.Close()
	})
	defer stop()
	err = json.NewDecoder(io.LimitReader(r, 1<<20)).Decode(&rep)
	switch {
	case ctx.Err() != nil:
		canceled(s, proc, name)
		return rep, fmt.Errorf("starting VM %s: %w", name, ctx.Err())
	case err != nil:
		// A process without a proper report must not run on.
		_ = proc.Kill()
		proc.Wait(0)
		return rep, fmt.Errorf("starting VM %s: %w: its log ends with: %s", name, spec.ErrCrashed, control.LastLine(s.ProcessLog(name)))
	case rep.Error != nil:
		proc.Wait(0)
		return rep, fmt.Errorf("starting VM %s: %w", name, rep.Error)
	}
	return rep, nil
}

// startProcess starts a process with an order. The first file is its log.
func startProcess(s *state.Store, l Launcher, ord control.Order, files []*os.File) (Process, error) {
	if l.Processes != nil {
		return l.Processes.Start(s, ord, files)
	}
	if len(l.Command) == 0 {
		return nil, errors.New("no program is configured for it")
	}
	cmd := exec.Command(l.Command[0], append(append([]string(nil), l.Command[1:]...), ord.Args(s.Dir())...)...)
	cmd.Env = vmEnvironment()
	cmd.Stdout, cmd.Stderr = files[0], files[0]
	cmd.ExtraFiles = files[1:] // reportFD and up
	return startChild(cmd, nil)
}
