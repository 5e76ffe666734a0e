package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// console gives the last n bytes of the console of a sandbox. The guest has written it: browsers must not interpret it.
func console(s *Server, r *request, n int64, follow bool) (int, any, error) {
	store, name := s.o.Host.State, r.name()
	if _, err := store.Get(name); err != nil {
		return 0, nil, err
	}
	path := store.ConsoleLog(name)
	text, at, err := state.ReadLog(path)
	if err != nil {
		return 0, nil, fmt.Errorf("the console of %s: %w", name, err)
	}
	text = text[max(0, int64(len(text))-n):]
	const kind = "application/octet-stream"
	if !follow {
		return http.StatusOK, rawText{kind, text}, nil
	}
	return http.StatusOK, &streamed{kind: kind, flush: true, write: func(w io.Writer) error {
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer s.watch(r.caller(), cancel)()
		if _, err := w.Write(text); err != nil {
			return err
		}
		err := store.FollowLog(ctx, name, path, at, w)
		if ctx.Err() != nil {
			return nil
		}
		return err
	}}, nil
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

// execute runs a command and keeps its output.
func execute(ctx context.Context, b *sandbox.Sandbox, e *wire.Exec) (wire.Executed, error) {
	if len(e.Command) == 0 || e.Command[0] == "" {
		return wire.Executed{}, spec.InField("command", fmt.Errorf("%w: there is no command", sandbox.ErrSpec))
	}
	if len(e.Stdin) > wire.MaxStdin {
		return wire.Executed{}, spec.InField("stdin", fmt.Errorf("%w: stdin of %d bytes: use %d at most, and copy a file for more", sandbox.ErrSpec, len(e.Stdin), wire.MaxStdin))
	}
	if e.TimeoutSeconds < 0 || e.TimeoutSeconds > wire.MaxExecSeconds {
		return wire.Executed{}, spec.InField("timeout_seconds", fmt.Errorf("%w: timeout_seconds %d: use 1 to %d", sandbox.ErrSpec, e.TimeoutSeconds, wire.MaxExecSeconds))
	}
	limit := time.Duration(e.TimeoutSeconds) * time.Second
	if limit == 0 {
		limit = wire.DefaultExecSeconds * time.Second
	}
	var stdout, stderr limited
	c := guest.Cmd{Argv: e.Command, User: e.User, Dir: e.Cwd, Env: e.Env, Timeout: limit}
	c.Stdin, c.Stdout, c.Stderr = bytes.NewReader(e.Stdin), &stdout, &stderr
	begin := time.Now()
	st, err := b.Exec(ctx, c)
	if _, failed := errors.AsType[*guest.ExitError](err); err != nil && !(failed && st != nil) {
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
