package fakeguest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/flow"
)

// detached is a process that outlives its connection, but not the guest.
type detached struct {
	m       *agentpb.Process // Exit, OutputStart, OutputEnd and Attached are set when it is asked for
	limit   uint64
	hold    bool            // it waits for a reader
	ctx     context.Context // ends with it
	cancel  context.CancelCauseFunc
	stdin   *io.PipeReader
	toStdin *io.PipeWriter
	sizes   chan *agentpb.WindowSize

	mu      sync.Mutex // guards what follows
	changed chan struct{}
	parts   []part
	start   uint64
	end     uint64
	next    uint64 // what a reader has not had
	exit    *agentpb.ExecExit
	taken   context.CancelCauseFunc // ends the attached session; nil without one
}

// part is a piece of output.
type part struct {
	at     uint64
	stderr bool
	data   []byte
}

var errTaken = status.Error(codes.Aborted, "another connection attached to the process")

// kept is stdout or stderr of a detached process.
type kept struct {
	p      *detached
	stderr bool
}

func (k kept) Write(b []byte) (int, error) {
	k.p.mu.Lock()
	defer k.p.mu.Unlock()
	// As in the agent, half of what is held may have been read.
	for k.p.hold && k.p.end-k.p.next >= k.p.limit/2 {
		changed := k.p.changed
		k.p.mu.Unlock()
		select {
		case <-changed:
		case <-k.p.ctx.Done():
		}
		k.p.mu.Lock()
		if err := k.p.ctx.Err(); err != nil {
			return 0, err
		}
	}
	k.p.parts = append(k.p.parts, part{k.p.end, k.stderr, slices.Clone(b)})
	k.p.end += uint64(len(b))
	for len(k.p.parts) > 1 && k.p.end-k.p.parts[1].at >= k.p.limit && (!k.p.hold || k.p.next-min(k.p.next, k.p.limit/2) >= k.p.parts[1].at) {
		k.p.parts = k.p.parts[1:]
	}
	k.p.start = k.p.parts[0].at
	k.p.ring()
	return len(b), nil
}

// ring tells that something has changed. The caller holds mu.
func (p *detached) ring() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// startDetached runs a command that outlives its connection.
func (g *Guest) startDetached(m *agentpb.ExecStart, id int, argv, env []string, run Command) (*detached, error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	p := &detached{limit: uint64(m.OutputLimit), hold: m.HoldOutput, ctx: ctx, cancel: cancel, changed: make(chan struct{}), sizes: make(chan *agentpb.WindowSize, 1)}
	if p.limit == 0 {
		p.limit = 256 << 10
	}
	p.m = &agentpb.Process{Id: m.Id, Pid: int32(100 + id), Argv: argv, Detached: true, Pty: m.Pty != nil, StartedNanos: time.Now().UnixNano()}
	p.stdin, p.toStdin = io.Pipe()
	if m.NoStdin {
		_ = p.toStdin.Close() // the process reads its end, whoever attaches
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over || g.processes[m.Id] != nil {
		cancel(nil)
		return nil, status.Errorf(codes.AlreadyExists, "there is a process %q", m.Id)
	}
	if g.processes == nil {
		g.processes = map[string]*detached{}
	}
	g.processes[m.Id] = p
	g.running.Go(func() {
		defer cancel(nil)
		if m.TimeoutNanos > 0 {
			var stop context.CancelFunc
			ctx, stop = context.WithTimeout(ctx, time.Duration(m.TimeoutNanos))
			defer stop()
		}
		begin := time.Now()
		code := run(ctx, &Process{Args: argv, Env: env, Dir: m.Cwd, User: m.User, Guest: g, TTY: m.Pty.GetSize(), Resized: p.sizes, Stdin: p.stdin, Stdout: kept{p, false}, Stderr: kept{p, m.Pty == nil}})
		p.mu.Lock()
		defer p.mu.Unlock()
		p.exit = exitOf(ctx, code, begin)
		_ = p.stdin.Close()
		p.ring()
	})
	return p, nil
}

// exitOf describes the end of a command.
func exitOf(ctx context.Context, code int, begin time.Time) *agentpb.ExecExit {
	// The command's elapsed time counts as processor time.
	e := &agentpb.ExecExit{Code: int32(code), UserNanos: int64(time.Since(begin))}
	var sig signalled
	switch cause := context.Cause(ctx); {
	case errors.As(cause, &sig):
		e.Code, e.Signal = 128+int32(sig), int32(sig)
	case errors.Is(cause, context.DeadlineExceeded):
		e.Code, e.Signal, e.TimedOut = 128+int32(syscall.SIGKILL), int32(syscall.SIGKILL), true
	}
	return e
}

// describe returns what List says of it.
func (p *detached) describe() *agentpb.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return &agentpb.Process{
		Id: p.m.Id, Pid: p.m.Pid, Argv: p.m.Argv, Detached: true, Attached: p.taken != nil, Pty: p.m.Pty,
		StartedNanos: p.m.StartedNanos, Exit: p.exit, OutputStart: p.start, OutputEnd: p.end,
	}
}

// attach serves a session of a detached process.
func (p *detached) attach(ctx context.Context, stream agentpb.Agent_ExecServer, offset uint64) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p.mu.Lock()
	if p.taken != nil {
		p.taken(errTaken)
	}
	p.taken = cancel
	offset = min(max(offset, p.start), p.end)
	p.next = offset
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if context.Cause(ctx) != errTaken { //nolint:errorlint // that very one
			p.taken = nil
		}
	}()
	started := &agentpb.ExecStarted{Id: p.m.Id, Pid: p.m.Pid, Offset: offset, Pty: p.m.Pty}
	if err := stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Started{Started: started}}); err != nil {
		return err
	}
	s := &session{stream: stream, offset: offset, sizes: p.sizes, signal: func(sig signalled) error { p.cancel(sig); return nil }}
	s.Pipe = flow.NewPipe(ctx, ctx, s.send, func(n uint64) error {
		return stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Ack{Ack: n}})
	})
	go func() { cancel(s.receive(false)) }()
	go func() {
		if _, err := io.Copy(p.toStdin, s); err == nil && s.closed.Load() {
			_ = p.toStdin.Close()
		}
	}()
	for {
		p.mu.Lock()
		var next part
		for _, is := range p.parts {
			if is.at+uint64(len(is.data)) > offset {
				next = is
				break
			}
		}
		exit, changed := p.exit, p.changed
		p.mu.Unlock()
		switch {
		case next.data != nil:
			data := next.data[offset-next.at:]
			offset += uint64(len(data))
			if _, err := (output{s, next.stderr}).Write(data); err != nil {
				if cause := context.Cause(ctx); cause != nil {
					err = cause
				}
				return err
			}
			p.mu.Lock()
			p.next = offset
			p.ring()
			p.mu.Unlock()
			continue
		case exit != nil:
			return stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Exit{Exit: exit}})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// find returns a detached process.
func (g *Guest) find(id string) (*detached, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.processes[id]; p != nil {
		return p, nil
	}
	return nil, status.Errorf(codes.NotFound, "no process %q", id)
}

// end kills all detached processes, and waits for them.
func (g *Guest) end() {
	g.mu.Lock()
	g.over = true
	for _, p := range g.processes {
		p.cancel(signalled(syscall.SIGKILL))
		_ = p.stdin.Close()
	}
	g.mu.Unlock()
	g.running.Wait()
}

// List implements agentpb.AgentService.
func (a agent) List(context.Context, *agentpb.ListRequest) (*agentpb.ListResponse, error) {
	a.g.mu.Lock()
	defer a.g.mu.Unlock()
	out := &agentpb.ListResponse{}
	for _, p := range a.g.processes {
		out.Processes = append(out.Processes, p.describe())
	}
	slices.SortFunc(out.Processes, func(x, y *agentpb.Process) int { return int(x.Pid - y.Pid) })
	return out, nil
}

// Kill implements agentpb.AgentService.
func (a agent) Kill(_ context.Context, m *agentpb.KillRequest) (*agentpb.Empty, error) {
	p, err := a.g.find(m.Id)
	if err != nil {
		return nil, err
	}
	exited := p.describe().Exit != nil
	if exited && !m.Forget {
		return nil, status.Error(codes.FailedPrecondition, fmt.Sprintf("process %q has ended", m.Id))
	}
	p.cancel(signalled(m.Signal))
	if m.Forget {
		a.g.mu.Lock()
		delete(a.g.processes, m.Id)
		a.g.mu.Unlock()
		_ = p.stdin.Close()
	}
	return &agentpb.Empty{}, nil
}
