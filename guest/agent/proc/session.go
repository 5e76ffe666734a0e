package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/flow"
)

// session is one connection attached to a process. A process has at most one. A new session replaces the old one,
// whose connection may be dead without the guest knowing it.
type session struct {
	t      *Table
	p      *Process
	stream agentpb.Agent_ExecServer
	ctx    context.Context
	cancel context.CancelCauseFunc
	reader uint64 // this session's right to read the output
	// changes returns what the process has changed on the disk; nil if the host does not ask.
	changes func(context.Context) *agentpb.DiskChanges

	pipe *flow.Pipe // for stdin, and the window of the output
	// ends[n%Window] is the output offset after the n-th message. It is written before the message is sent and
	// read after the host has acknowledged it.
	ends [agentpb.Window]uint64
}

var (
	errTakenOver = status.Error(codes.Aborted, "another connection attached to the process")
	errEnded     = errors.New("the session has ended")
)

// Run starts a command and serves the stream that requested it. changes, if not nil, returns what the command has
// changed on the disk. Run calls it once the command has ended.
func (t *Table) Run(ctx context.Context, stream agentpb.Agent_ExecServer, m *agentpb.ExecStart, changes func(context.Context) *agentpb.DiskChanges) error {
	p, err := t.Start(m)
	var se *startError
	if errors.As(err, &se) {
		exit := &agentpb.ExecExit{Code: se.code, Error: se.Error()}
		return stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Exit{Exit: exit}})
	}
	if err != nil {
		return err
	}
	return t.serve(ctx, stream, p, 0, changes)
}

// Attach serves a stream that attaches to an existing process.
func (t *Table) Attach(ctx context.Context, stream agentpb.Agent_ExecServer, m *agentpb.ExecAttach) error {
	p, err := t.get(m.Id)
	if err != nil {
		return err
	}
	if !p.detach {
		return status.Errorf(codes.FailedPrecondition, "process %q belongs to its connection", p.id)
	}
	return t.serve(ctx, stream, p, m.Offset, nil)
}

// serve attaches the stream to p until the process ends, the connection ends, or another one attaches.
func (t *Table) serve(ctx context.Context, stream agentpb.Agent_ExecServer, p *Process, offset uint64, changes func(context.Context) *agentpb.DiskChanges) error {
	s := &session{t: t, changes: changes, p: p, stream: stream}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.pipe = flow.NewPipe(s.ctx, s.ctx, nil, func(n uint64) error {
		return stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Ack{Ack: n}})
	})
	start := s.attach(offset)
	defer s.detach()
	err := stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Started{Started: &agentpb.ExecStarted{
		Id: p.id, Pid: int32(p.pid), Offset: start, Pty: p.pty,
	}}})
	if err != nil {
		return err
	}
	go func() { s.cancel(s.receive()) }()
	go s.writeInput()
	if err := s.sendOutput(); err != nil {
		if cause := context.Cause(s.ctx); cause != nil {
			return cause
		}
		return err
	}
	return nil
}

// attach makes s the session of its process and returns the offset of the first output that it will see.
func (s *session) attach(offset uint64) uint64 {
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != nil {
		p.session.cancel(errTakenOver)
	}
	p.session = s
	if p.input != nil {
		// Unblock a writer of the old session. It checks its context before it writes again.
		_ = p.input.SetWriteDeadline(longAgo)
		p.inputMu.Lock()
		_ = p.input.SetWriteDeadline(time.Time{})
		p.inputMu.Unlock()
	}
	var start uint64
	start, s.reader = p.out.attach(offset)
	return start
}

// longAgo is a deadline that makes a blocked call return.
var longAgo = time.Unix(1, 0)

// detach leaves the process. A detached process lives on; any other is killed.
func (s *session) detach() {
	s.cancel(errEnded)
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != s {
		return
	}
	p.session = nil
	switch {
	case p.out.hold && !p.forget:
		p.out.detach(held)
	case p.detach:
		p.out.detach(kept)
	default:
		p.out.detach(dropped)
		select {
		case <-p.exited:
		default:
			_ = s.t.reaper.signal(p.pid, syscall.SIGKILL)
		}
	}
	if p.input != nil {
		_ = p.input.SetWriteDeadline(longAgo)
	}
}

// sendOutput sends what the process writes, then its exit.
func (s *session) sendOutput() error {
	buf := make([]byte, firstRead)
	for {
		n, stderr, offset, ended := s.p.out.read(s.reader, buf)
		if n == 0 {
			if ended {
				break
			}
			select {
			case <-s.p.out.readable:
				continue
			case <-s.ctx.Done():
				return s.ctx.Err()
			}
		}
		num, err := s.pipe.Acquire(s.ctx)
		if err != nil {
			return err
		}
		s.ends[num%agentpb.Window] = offset + uint64(n)
		err = s.stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Output{Output: &agentpb.ExecOutput{
			Stderr: stderr, Offset: offset, Data: buf[:n],
		}}})
		if err != nil {
			return err
		}
		if n == len(buf) && n < agentpb.MaxChunk {
			buf = make([]byte, agentpb.MaxChunk)
		}
	}
	select {
	case <-s.p.exited:
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
	s.t.Settle()
	exit := s.p.exit
	if s.changes != nil {
		exit = proto.CloneOf(exit)
		exit.Changes = s.changes(s.ctx)
	}
	return s.stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Exit{Exit: exit}})
}

// receive handles what the host sends until the stream ends. It always
// returns an error.
func (s *session) receive() error {
	for {
		m, err := s.stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = errEnded
			}
			return err
		}
		if s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		switch m := m.Msg.(type) {
		case *agentpb.ExecRequest_Ack:
			if err := s.pipe.Ack(m.Ack); err != nil {
				return status.Error(codes.InvalidArgument, err.Error())
			}
			if m.Ack > 0 && s.p.detach {
				s.p.out.took(s.reader, s.ends[m.Ack%agentpb.Window])
			}
		case *agentpb.ExecRequest_Stdin:
			if len(m.Stdin) > 0 && !s.pipe.Put(m.Stdin) {
				return status.Errorf(codes.ResourceExhausted, "more than %d stdin messages unacknowledged", agentpb.Window)
			}
		case *agentpb.ExecRequest_StdinClose:
			s.pipe.End()
		case *agentpb.ExecRequest_Resize:
			s.p.resize(m.Resize)
		case *agentpb.ExecRequest_Signal:
			// A process that has just ended is not an error: its exit is on the way.
			_ = s.t.reaper.signal(s.p.pid, syscall.Signal(m.Signal))
		default:
			return status.Errorf(codes.InvalidArgument, "unexpected message %T in a session", m)
		}
	}
}

// writeInput writes stdin to the process, and closes it at its end. It discards input that the process does not
// take.
func (s *session) writeInput() {
	for {
		data, err := s.pipe.Next()
		if err != nil && !errors.Is(err, io.EOF) {
			return
		}
		if !s.p.WriteInput(s.ctx, data) || err != nil {
			return
		}
	}
}

// WriteInput writes data, or closes stdin when data is nil. It returns false if ctx ends first.
func (p *Process) WriteInput(ctx context.Context, data []byte) bool {
	if p.input == nil {
		return true
	}
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	switch {
	case data != nil:
		_, _ = p.input.Write(data) // a closed pipe: the process does not want it
	case p.pty:
		_, _ = p.input.Write([]byte{endOfTransmission})
	default:
		p.input.Close()
	}
	return ctx.Err() == nil
}

// resize sets the size of the process's terminal, if it has one.
func (p *Process) resize(size *agentpb.WindowSize) {
	if p.master == nil {
		return
	}
	_ = p.master.Raw().Control(func(fd uintptr) { _ = setWindowSize(int(fd), size) })
}

// info describes the process for List.
func (p *Process) info() *agentpb.Process {
	start, end := p.out.Bounds()
	i := &agentpb.Process{
		Id: p.id, Pid: int32(p.pid), Argv: cutArgv(p.argv), Detached: p.detach, Pty: p.pty,
		StartedNanos: p.started.UnixNano(), OutputStart: start, OutputEnd: end,
	}
	p.mu.Lock()
	i.Attached = p.session != nil
	p.mu.Unlock()
	select {
	case <-p.exited:
		i.Exit = p.exit
	default:
	}
	return i
}

// cutArgv cuts a command line to what List may return.
func cutArgv(argv []string) []string {
	total := 0
	for i, a := range argv {
		if total += len(a) + 1; total > maxListedArgv {
			return argv[:i:i]
		}
	}
	return argv
}

// maxListBytes bounds a List answer, within what the host accepts.
const maxListBytes = agentpb.MaxMessage / 2

// List implements agentpb.AgentService.
func (t *Table) List(context.Context, *agentpb.ListRequest) (*agentpb.ListResponse, error) {
	out := &agentpb.ListResponse{}
	size := 0
	for _, p := range t.all() {
		i := p.info()
		if size += proto.Size(i); size > maxListBytes {
			i.Argv = nil // the answer lists every process, if without its arguments
		}
		out.Processes = append(out.Processes, i)
	}
	return out, nil
}

// Kill implements agentpb.AgentService: it sends a signal to a process, forgets it, or both.
func (t *Table) Kill(_ context.Context, m *agentpb.KillRequest) (*agentpb.Empty, error) {
	p, err := t.get(m.Id)
	if err != nil {
		return nil, err
	}
	if m.Signal != 0 {
		err := t.reaper.signal(p.pid, syscall.Signal(m.Signal))
		if errors.Is(err, syscall.ESRCH) && !m.Forget {
			return nil, status.Errorf(codes.FailedPrecondition, "process %q has ended", m.Id)
		}
		if err != nil && !errors.Is(err, syscall.ESRCH) {
			return nil, fmt.Errorf("signal process %q: %w", m.Id, err)
		}
	}
	if m.Forget {
		select {
		case <-p.exited:
			t.forget(p)
		default:
			if m.Signal == 0 {
				return nil, status.Errorf(codes.FailedPrecondition, "process %q is running", m.Id)
			}
			p.mu.Lock()
			p.forget = true
			if p.session == nil {
				p.out.detach(dropped) // it would wait for a reader of held output
			}
			p.mu.Unlock()
		}
	}
	return &agentpb.Empty{}, nil
}
