package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/instance"
)

// shellID is the name of the live shell in the snapshot.
const shellID = "bench-shell"

// execTimeout bounds the wait for a command's output: a guest that does not answer ends the benchmark.
const execTimeout = 5 * time.Minute

// ResumeExec measures the time from the call that restores a VM from a snapshot on disk to the output of a command
// in a shell, at the terminal that the shell had before the VM slept. First the agent answers as for resume_ready.
// Then the host connects to it (stage dial), attaches to the shell (stage attach), types a command that the shell
// runs itself, and gets its output (stage command). Nothing forks in the guest. All else is as for resume_ready.
func ResumeExec(ctx context.Context, e Env, o Options) ([]Row, error) {
	r := resumes{
		name: "resume_exec", n: o.N, warmup: o.Warmup, sizes: o.MemoryMiB,
		params: map[string]any{"depth": o.Depth, "session": "pty"}, then: execInShell,
	}
	return r.measure(ctx, e, func(ctx context.Context, mib int) (*sleeper, error) {
		return e.sleeperWith(ctx, mib, o.Depth, func(ctx context.Context, name string) error {
			if err := e.startBusy(ctx, name); err != nil {
				return err
			}
			return e.startShell(ctx, name)
		})
	})
}

// startShell starts a shell with a terminal, and waits until the shell has run a command.
func (e Env) startShell(ctx context.Context, name string) error {
	c, err := guest.Dial(ctx, guest.UnixDialer(e.Store.State.VsockPath(name)))
	if err != nil {
		return err
	}
	defer c.Close()
	p, err := c.Start(ctx, guest.Cmd{Argv: []string{"sh"}, Detach: true, ID: shellID, Pty: &guest.Pty{Size: guest.Size{Rows: 24, Cols: 80}}})
	if err != nil {
		return fmt.Errorf("starting a shell in the guest: %w", err)
	}
	if err := p.Close(); err != nil {
		return err
	}
	_, _, err = typeCommand(ctx, c)
	return err
}

func execInShell(ctx context.Context, in *instance.Instance) (done time.Time, stages map[string]time.Duration, err error) {
	begin := time.Now()
	c, err := in.Agent(ctx)
	if err != nil {
		return done, nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	dialed := time.Since(begin)
	if done, stages, err = typeCommand(ctx, c); err == nil {
		stages["dial"] = dialed
	}
	return done, stages, err
}

// typed is the command, and printed its output, which differs from the terminal's echo.
const typed, printed = "echo drowse-$((6*7))\n", "drowse-42"

// endOfOutput is an offset beyond all output: attaching there returns only later output.
const endOfOutput = math.MaxUint64

// typeCommand attaches to the shell, types a command, and returns when its output came.
func typeCommand(ctx context.Context, c *guest.Client) (done time.Time, stages map[string]time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, execTimeout)
	defer cancel()
	begin := time.Now()
	stdin, keys := io.Pipe()
	defer keys.Close()
	out := &watcher{want: []byte(printed), seen: make(chan struct{})}
	s, err := c.Attach(ctx, shellID, endOfOutput, guest.IO{Stdin: stdin, Stdout: out})
	if err != nil {
		return done, nil, fmt.Errorf("attaching to the shell in the guest: %w", err)
	}
	defer s.Close()
	attached := time.Now()
	if _, err := io.WriteString(keys, typed); err != nil {
		return done, nil, fmt.Errorf("typing in the guest's shell: %w", err)
	}
	select {
	case <-out.seen:
	case <-s.Done():
		_, err := s.Wait()
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		return done, nil, fmt.Errorf("the guest's shell ended before it printed %q: %w", printed, errors.Join(err, ctx.Err()))
	}
	done = out.when
	return done, map[string]time.Duration{"attach": attached.Sub(begin), "command": done.Sub(attached)}, nil
}

// watcher closes seen when someone writes the bytes that it wants.
type watcher struct {
	want []byte
	seen chan struct{}
	when time.Time // valid once seen is closed

	mu   sync.Mutex
	tail []byte
	done bool
}

func (w *watcher) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return len(p), nil
	}
	w.tail = append(w.tail, p...)
	if w.done = bytes.Contains(w.tail, w.want); w.done {
		w.when = time.Now()
		close(w.seen)
		w.tail = nil
		return len(p), nil
	}
	// Keep what may be the beginning of want.
	w.tail = w.tail[max(0, len(w.tail)-len(w.want)+1):]
	return len(p), nil
}
