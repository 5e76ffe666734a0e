package sources

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// CommandTime is how long a command may take.
const CommandTime = 10 * time.Second

const (
	// maxComplaint is how many bytes of a command's stderr the log gets.
	maxComplaint = 4096
	// outputDelay is how long the output of an ended command is read if others hold it open.
	outputDelay = time.Second
)

// Value returns the value of a source for a sandbox of an owner. It has 1 to spec.MaxSecret bytes, and is the
// caller's to wipe. Callers at once share one run of a command. The error names neither paths nor output.
func (s *Store) Value(ctx context.Context, name, owner string) ([]byte, error) {
	src, err := s.Find(name, owner)
	if err != nil {
		return nil, err
	}
	var value []byte
	switch src.Kind() {
	case KindFile:
		value, err = readFile(src.File)
	case KindCommand:
		value, err = s.output(ctx, src.Command)
	case KindEnv:
		value = []byte(os.Getenv(src.Env))
		if len(value) == 0 {
			err = errors.New("the variable is not set")
		}
	case KindCredential:
		dir := os.Getenv("CREDENTIALS_DIRECTORY")
		if dir == "" {
			err = errors.New("this process has no credentials: see LoadCredential= in systemd.exec(5)")
			break
		}
		value, err = readFile(filepath.Join(dir, src.Credential))
	}
	switch {
	case err != nil:
	case len(value) == 0:
		err = errors.New("it is empty") // a file that is just being written, for example
	case len(value) > spec.MaxSecret:
		err = fmt.Errorf("it has more than %d bytes", spec.MaxSecret)
	default:
		return value, nil
	}
	clear(value)
	s.log.Warn("a source of secrets has no value", "source", src.Name, "origin", src.Origin(), "error", err)
	var ce *complaint
	var pe *fs.PathError
	if errors.As(err, &ce) {
		err = ce.error
	} else if errors.As(err, &pe) {
		err = pe.Err
	}
	return nil, fmt.Errorf("%w: the %s of source %s: %w", spec.ErrSecrets, src.Kind(), src.Name, err)
}

// Secrets returns the secrets of awaited that have sources, with their values, for a sandbox of an owner. With an error
// it returns the others. ask, if not nil, has "drowse serve" set one whose value only that has: its Value is nil.
func (s *Store) Secrets(ctx context.Context, owner string, awaited []spec.SecretFile, ask func(context.Context, spec.SecretFile) error) ([]spec.Secret, error) {
	out, errs := make([]spec.Secret, len(awaited)), make([]error, len(awaited))
	var all sync.WaitGroup
	for i, f := range awaited {
		if f.From == "" {
			continue // somebody hands it in
		}
		all.Go(func() {
			src, err := s.Find(f.From, owner)
			one := spec.Secret{SecretFile: f}
			switch {
			case err != nil:
			case src.OfServe() && ask != nil:
				err = ask(ctx, f)
			default:
				one.Value, err = s.Value(ctx, f.From, owner)
			}
			if err != nil {
				errs[i] = fmt.Errorf("secret %s: %w", f.Name, err)
				return
			}
			out[i] = one
		})
	}
	all.Wait()
	return slices.DeleteFunc(out, func(l spec.Secret) bool { return l.Name == "" }), errors.Join(errs...)
}

// readFile reads a file, or one byte more than a secret may have. Links are followed: mounted secrets are links.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe must not hold up a wake
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil {
		return nil, err
	} else if !st.Mode().IsRegular() {
		return nil, errors.New("it is no regular file")
	}
	buf := make([]byte, spec.MaxSecret+1)
	n, err := io.ReadFull(f, buf)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	return buf[:n], err
}

// output returns the output of a command.
func (s *Store) output(ctx context.Context, argv []string) ([]byte, error) {
	done := s.runs.DoChan(strings.Join(argv, "\x00"), func() (any, error) {
		// Not the context of one of several callers.
		ctx, cancel := context.WithTimeoutCause(context.Background(), CommandTime, fmt.Errorf("it has not ended within %v", CommandTime))
		defer cancel()
		return run(ctx, argv)
	})
	select {
	case r := <-done:
		value, _ := r.Val.([]byte)
		if r.Shared {
			value = slices.Clone(value)
		}
		return value, r.Err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// complaint is an error of a command with what it has said.
type complaint struct {
	error
	said string
}

// Error implements error.
func (c *complaint) Error() string { return fmt.Sprintf("%v: %q", c.error, c.said) }

// Unwrap returns the error without the output.
func (c *complaint) Unwrap() error { return c.error }

// run runs a command in the environment of this process, and kills its process group at its end or that of ctx. It
// returns at most one byte more than a secret may have. The command dies with this thread.
func run(ctx context.Context, argv []string) ([]byte, error) {
	out, said := &head{buf: make([]byte, spec.MaxSecret+1)}, &head{buf: make([]byte, maxComplaint)}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir, cmd.WaitDelay = "/", outputDelay
	cmd.Stdout, cmd.Stderr = out, said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	// The signal is sent when the thread ends that has started it (prctl(2), PR_SET_PDEATHSIG).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		// Without taking its status: its number names the group until the signal.
		for errors.Is(unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
		}
	}()
	select {
	case <-exited:
	case <-ctx.Done():
	}
	late := context.Cause(ctx)
	_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) // none of it may be left
	<-exited
	err := cmd.Wait()
	switch {
	case late != nil:
		err = late
	case errors.Is(err, exec.ErrWaitDelay):
		err = nil // it has ended, and something outside its group holds its output open
	}
	if err != nil {
		clear(out.buf)
		return nil, &complaint{err, string(said.buf[:said.n])}
	}
	return out.buf[:out.n], nil
}

// head keeps the beginning of what is written to it, in one place, so that it can be wiped.
type head struct {
	buf []byte
	n   int
}

// Write implements io.Writer.
func (h *head) Write(p []byte) (int, error) {
	h.n += copy(h.buf[h.n:], p)
	return len(p), nil
}
