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

// canceled returns when a process has ended whose report nobody reads any more. One that has made its VM one that runs
// before it noticed goes on: others may have been told, and use it. One that does not notice for a while has not, and
// is killed.
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

// How long a process has to notice, and how often it is looked.
// Variables, so that tests need not wait as long.
var (
	cancelTime = 5 * time.Second
	cancelPoll = 10 * time.Millisecond
)

// Launcher says how a Store starts the processes of VMs.
type Launcher struct {
	// Command is the program with its first arguments; it is called with more after
	// them, and must give those to ServeProcess. Its environment has only what a VM's process reads of this one's.
	Command []string
	// Agent is the path of the guest's agent, a static program.
	Agent string
	// Pool, if not nil, has processes that were started ahead: see Pool.Launcher.
	Pool *Pool
	// Supervised takes such processes from another process that serves a pool for the store
	// (Pool.Serve), if there is one and Pool is nil.
	Supervised bool
	// Processes, if not nil, are in the place of Command, Pool and Supervised.
	Processes Processes
	// Secrets, if not nil, is asked for the secrets of a VM that was woken or booted and
	// waits for them: see Sandbox.SetSecrets. It may be called from several goroutines.
	Secrets func(ctx context.Context, vm string, awaited []spec.SecretFile) ([]spec.Secret, error)
}

// Start is launchWith without what the VM waits for then.
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
			// It may have been killed as it stood by: then nobody has the order.
			again := (errors.Is(err, spec.ErrCrashed) || errors.Is(err, errNoOrder)) && !ready.took()
			ready.close()
			if !again {
				rep.Pooled = true
				return rep, err
			}
		}
	}
	return launchBy(ctx, s, ord, log, files, func(ord control.Order, files []*os.File) (Process, error) {
		return startProcess(s, l, ord, files)
	})
}

// launchBy gives an order to a process by start, which gets the files of the order: the log,
// that for the report, and those that follow. It waits for the report.
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
		// What does not report as it should is not left to itself.
		_ = proc.Kill()
		proc.Wait(0)
		return rep, fmt.Errorf("starting VM %s: %w: its log ends with: %s", name, spec.ErrCrashed, control.LastLine(s.ProcessLog(name)))
	case rep.Error != nil:
		proc.Wait(0)
		return rep, fmt.Errorf("starting VM %s: %w", name, rep.Error)
	}
	return rep, nil
}

// startProcess starts a process with an order. files begin with its log.
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
