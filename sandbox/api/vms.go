package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// VMs are what the server asks of VMs besides what a Fleet does. Their contracts are those of the methods of
// sandbox.Store of the same names. All methods may be called from any goroutine.
type VMs interface {
	Stop(ctx context.Context, name string, kill bool) error
	Stats(ctx context.Context, name string) (sandbox.Stats, error)
	Policy(name string) (*netpolicy.Policy, error)
	SetPolicy(ctx context.Context, name string, p *netpolicy.Policy) (control.PolicyResult, error)
	NetworkFlows(ctx context.Context, name string, follow bool, fn func(netpolicy.FlowRecord) error) error
	Snapshots() ([]state.SnapshotInfo, error)
	RemoveSnapshot(ctx context.Context, prefix string) error

	// Console is the end of what a VM has written to its serial port: at most n bytes.
	Console(name string, n int64) ([]byte, error)
	// Exec runs a command in a VM, and wakes one that sleeps. A command that fails is no error.
	Exec(ctx context.Context, name string, c guest.Cmd) (*guest.ExitStatus, error)
	// Images lists images; the error says which cannot be read.
	Images() ([]*image.Image, error)
}

// storeVMs are those of a store.
type storeVMs struct {
	*sandbox.Store
	wake func(ctx context.Context, name string) error
}

// OfStore are the VMs of a store. wake wakes one, for a command.
func OfStore(s *sandbox.Store, wake func(ctx context.Context, name string) error) VMs {
	return storeVMs{s, wake}
}

// wakeTries bounds how often a VM is woken for one command that is put to sleep again in between.
const wakeTries = 5

func (v storeVMs) Exec(ctx context.Context, name string, c guest.Cmd) (*guest.ExitStatus, error) {
	for range wakeTries {
		client, err := v.Agent(ctx, name)
		if errors.Is(err, sandbox.ErrNotRunning) {
			if err := v.wake(ctx, name); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		defer client.Close()
		if c, err = v.Command(name, c); err != nil {
			return nil, err
		}
		st, err := client.Exec(ctx, c)
		var exit *guest.ExitError
		if st != nil && (err == nil || errors.As(err, &exit)) {
			return st, nil
		}
		return nil, err
	}
	return nil, fmt.Errorf("%w: %s was put to sleep %d times as it was woken", sandbox.ErrNotRunning, name, wakeTries)
}

func (v storeVMs) Console(name string, n int64) ([]byte, error) {
	if _, err := v.Get(name); err != nil {
		return nil, err
	}
	f, err := os.Open(v.ConsoleLog(name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // it has not begun
	}
	if err != nil {
		return nil, fmt.Errorf("reading the console of %s: %w", name, err)
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		_, err = f.Seek(max(0, size-n), io.SeekStart)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the console of %s: %w", name, err)
	}
	text, err := io.ReadAll(io.LimitReader(f, n))
	if err != nil {
		return nil, fmt.Errorf("reading the console of %s: %w", name, err)
	}
	return text, nil
}

func (v storeVMs) Images() ([]*image.Image, error) {
	s, err := image.OpenStore(v.ImageDir())
	if err != nil {
		return nil, err
	}
	return s.List()
}

// limited keeps the first wire.MaxOutput bytes.
type limited struct {
	bytes.Buffer
	cut bool
}

func (l *limited) Write(p []byte) (int, error) {
	if room := wire.MaxOutput - l.Len(); len(p) > room {
		l.cut = true
		l.Buffer.Write(p[:room])
		return len(p), nil
	}
	return l.Buffer.Write(p)
}

// execute runs a command and keeps what it says.
func execute(ctx context.Context, v VMs, name string, e *wire.Exec) (wire.Executed, error) {
	if len(e.Command) == 0 || e.Command[0] == "" {
		return wire.Executed{}, fmt.Errorf("%w: there is no command", sandbox.ErrSpec)
	}
	if len(e.Stdin) > wire.MaxStdin {
		return wire.Executed{}, fmt.Errorf("%w: stdin of %d bytes: use %d at most, and `drowse cp` for more", sandbox.ErrSpec, len(e.Stdin), wire.MaxStdin)
	}
	if e.TimeoutSeconds < 0 || e.TimeoutSeconds > wire.MaxExecSeconds {
		return wire.Executed{}, fmt.Errorf("%w: timeout_seconds %d: use 1 to %d", sandbox.ErrSpec, e.TimeoutSeconds, wire.MaxExecSeconds)
	}
	limit := time.Duration(e.TimeoutSeconds) * time.Second
	if limit == 0 {
		limit = wire.DefaultExecSeconds * time.Second
	}
	var stdout, stderr limited
	c := guest.Cmd{Argv: e.Command, User: e.User, Dir: e.Cwd, Env: e.Env, Timeout: limit}
	c.Stdin, c.Stdout, c.Stderr = bytes.NewReader(e.Stdin), &stdout, &stderr
	begin := time.Now()
	st, err := v.Exec(ctx, name, c)
	if err != nil {
		return wire.Executed{}, err
	}
	out := wire.Executed{
		ExitCode: st.Code, Signal: st.Signal, TimedOut: st.TimedOut, NotStarted: st.NotStarted, Truncated: stdout.cut || stderr.cut,
		Stdout: stdout.Bytes(), Stderr: stderr.Bytes(), ElapsedMs: float64(time.Since(begin).Microseconds()) / 1000,
	}
	if out.Stdout == nil {
		out.Stdout = []byte{}
	}
	if out.Stderr == nil {
		out.Stderr = []byte{}
	}
	return out, nil
}
