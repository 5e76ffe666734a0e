//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// awake connects to the agent of a VM. It wakes a sleeping VM first.
func (a *app) awake(ctx context.Context, s *sandbox.Host, name string) (*guest.Client, error) {
	c, err := s.Sandbox(name).Agent(ctx)
	if s.Cluster != nil && errors.Is(err, sandbox.ErrNotFound) {
		if err := s.Cluster.Claim(ctx, name, nil); err != nil {
			return nil, err
		}
		c, err = s.Sandbox(name).Agent(ctx)
	}
	if !errors.Is(err, sandbox.ErrNotRunning) {
		return c, err
	}
	r, gerr := s.State.Get(name)
	if gerr != nil {
		return nil, gerr
	}
	if r.Phase != state.Asleep && r.Phase != state.Starting && r.Phase != state.Running {
		return nil, fmt.Errorf("%w: %s", err, r.Problem)
	}
	if s, err = a.launching(ctx); err != nil {
		return nil, err
	}
	// BringUp, and not Wake: a VM that crashes at this moment must keep its disk.
	rep, err := s.Sandbox(name).BringUp(ctx)
	if err != nil {
		return nil, err
	}
	a.warnHooks(name, rep.Hooks)
	return s.Sandbox(name).Agent(ctx)
}

// localGuest is a VM of this host that is awake.
type localGuest struct {
	*guest.Client
	b *sandbox.Sandbox
}

func (l *local) guest(ctx context.Context, name string) (inGuest, error) {
	c, err := l.a.awake(ctx, l.h, name)
	if err != nil {
		return nil, err
	}
	return &localGuest{c, l.h.Sandbox(name)}, nil
}

// complete completes a command from the VM's image. With --no-image-config it adds only the variables of the VM's
// proxy.
func complete(b *sandbox.Sandbox, c guest.Cmd, noConfig bool) (guest.Cmd, error) {
	if !noConfig {
		return b.Command(c)
	}
	env, err := b.ProxyEnvironment()
	c.Env = slices.Concat(env, c.Env)
	return c, err
}

func (g *localGuest) start(ctx context.Context, c command, s streams) (session, error) {
	cmd := guest.Cmd{
		Argv: c.Command, Env: c.Env, Dir: c.Cwd, User: c.User, Timeout: c.timeout, Changes: c.changes,
		Detach: c.Detach, ID: c.Process, NoStdin: c.Detach && !c.Stdin, IO: guest.IO{Stdin: s.stdin, Stdout: s.stdout, Stderr: s.stderr},
	}
	if c.TTY != nil {
		cmd.Pty = &guest.Pty{Term: c.TTY.Term, Size: guest.Size{Rows: c.TTY.Rows, Cols: c.TTY.Cols}}
	}
	cmd, err := complete(g.b, cmd, c.noConfig)
	if err != nil {
		return nil, err
	}
	return sessionOf(g.Client.Start(ctx, cmd))
}

func (g *localGuest) attach(ctx context.Context, process string, s streams) (session, error) {
	return sessionOf(g.Client.Attach(ctx, process, 0, guest.IO{Stdin: s.stdin, Stdout: s.stdout, Stderr: s.stderr}))
}

func (g *localGuest) processes(ctx context.Context) (out []wire.Process, err error) {
	list, err := g.Client.List(ctx)
	for _, p := range list {
		out = append(out, wire.Process{Process: p.ID, PID: p.PID, TTY: p.Pty})
	}
	return out, err
}

// localSession is a session with a guest of this host.
type localSession struct{ *guest.Session }

func sessionOf(s *guest.Session, err error) (session, error) {
	if err != nil {
		return nil, err
	}
	return localSession{s}, nil
}

func (s localSession) resize(rows, cols int) error {
	return s.Resize(guest.Size{Rows: rows, Cols: cols})
}

func (s localSession) wait() (*exit, error) {
	st, err := s.Wait()
	var is *guest.ExitError
	if errors.As(err, &is) {
		err = nil
	}
	if st == nil {
		return nil, err
	}
	e := &exit{ExitStatus: wire.ExitStatus{ExitCode: st.Code, Signal: st.Signal, TimedOut: st.TimedOut, NotStarted: st.NotStarted}}
	if st.Changes != nil {
		e.changes = st.Changes
	}
	return e, err
}
