package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

const (
	// tailLines is how many lines of a failed command's output the error has.
	tailLines = 15
	// maxTailLine bounds each of these lines, in bytes.
	maxTailLine = 400
	// killDelay is how long a cancelled command has to end before it is killed. make(1) uses the time to remove
	// half-written targets.
	killDelay = 5 * time.Second
)

// CommandError means that a program of a build or fetch has failed.
type CommandError struct {
	Doing   string // its purpose: "compiling the kernel"
	Command string
	Tail    []string // the last lines of its output
	LogPath string   // a file with all of the output, or ""
	Err     error
}

// Error returns the cause on the first line, and then the end of the output. For a command stopped because its
// context ended, it returns only that.
func (e *CommandError) Error() string {
	if errors.Is(e.Err, context.Canceled) || errors.Is(e.Err, context.DeadlineExceeded) {
		return fmt.Sprintf("%s: %v", e.Doing, e.Err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s: %v", e.Doing, e.Command, e.Err)
	if e.LogPath != "" {
		fmt.Fprintf(&b, " (its whole output is in %s)", e.LogPath)
	}
	for _, l := range e.Tail {
		b.WriteString("\n  ")
		b.WriteString(l)
	}
	return b.String()
}

// Unwrap returns the underlying error, which is the context's if the context has ended.
func (e *CommandError) Unwrap() error { return e.Err }

// command is a program to run, and the destination of its output.
type command struct {
	doing   string
	dir     string
	env     []string // added to the environment
	log     io.Writer
	logPath string
	onLine  func(line string) // called for each line of standard output and standard error, if set
	stdin   io.Reader
}

// run runs the program and returns its standard output. All output goes to the log. When ctx ends, the program and
// all its children get SIGTERM, and SIGKILL after killDelay.
func (c command) run(ctx context.Context, name string, args ...string) (string, error) {
	var stdout bytes.Buffer
	err := c.stream(ctx, &stdout, name, args...)
	return stdout.String(), err
}

func (c command) stream(ctx context.Context, stdout io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = c.dir
	cmd.Env = append(environment(), c.env...)
	cmd.Stdin = c.stdin
	// One writer for both, so that os/exec calls it from one goroutine at a time.
	tail := newTailWriter(c.log, c.onLine)
	if stdout == nil {
		cmd.Stdout, cmd.Stderr = tail, tail
	} else {
		cmd.Stdout, cmd.Stderr = stdout, tail
	}
	// The program has its own group, so that cancelling reaches the compilers, and does not outlive this process.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = killDelay

	// PDEATHSIG fires when the thread that started the child ends: keep it (prctl(2)).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	if ctx.Err() != nil {
		if cmd.Process != nil {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // processes of the group that ignored the first signal
		}
		err = ctx.Err()
	}
	if err == nil {
		return nil
	}
	if errors.Is(err, exec.ErrNotFound) {
		err = fmt.Errorf("%w: the program %s is not installed", ErrUnsupported, name)
	}
	return &CommandError{
		Doing: c.doing, Command: strings.Join(append([]string{name}, args...), " "), Tail: tail.last(), LogPath: c.logPath, Err: err,
	}
}

// exited reports whether a program has run to its end and failed by itself.
func exited(ctx context.Context, err error) bool {
	var exit *exec.ExitError
	return ctx.Err() == nil && errors.As(err, &exit)
}

// environment returns the programs' part of this process's environment. It omits MAKEFLAGS, CC, ARCH, KCFLAGS and
// the like, which would change the result and are in no hash, and the locale, since we parse the output.
func environment() []string {
	env := []string{"LC_ALL=C"}
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "http_proxy", "https_proxy", "no_proxy", "ftp_proxy", "all_proxy"} {
		for _, n := range []string{name, strings.ToUpper(name)} {
			if v, ok := os.LookupEnv(n); ok && !slices.Contains(env, n+"="+v) {
				env = append(env, n+"="+v)
			}
		}
	}
	return env
}

// tailWriter keeps the last lines written to it, and passes everything on.
type tailWriter struct {
	artifact.LineWriter
	log   io.Writer
	lines []string
}

func newTailWriter(log io.Writer, onLine func(string)) *tailWriter {
	t := &tailWriter{log: log}
	t.LineWriter = artifact.LineWriter{Max: maxTailLine, Line: func(line string) {
		if onLine != nil {
			onLine(line)
		}
		if strings.TrimSpace(line) != "" {
			t.lines = append(t.lines[max(0, len(t.lines)+1-tailLines):], line)
		}
	}}
	return t
}

func (t *tailWriter) Write(p []byte) (int, error) {
	if t.log != nil {
		// A log that cannot be written must not end a build that otherwise works.
		_, _ = t.log.Write(p)
	}
	return t.LineWriter.Write(p)
}

func (t *tailWriter) last() []string {
	t.Flush()
	return t.lines
}
