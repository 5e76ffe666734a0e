package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/guest/internal/flow"
)

// Cmd is a command to run in the guest.
type Cmd struct {
	// Argv is the command and its arguments. A command without a slash is searched for in the PATH of its
	// environment.
	Argv []string
	// Env adds variables (KEY=VALUE) to the user's PATH, HOME, USER, LOGNAME and SHELL. With ReplaceEnv it is the
	// whole environment.
	Env        []string
	ReplaceEnv bool
	// Dir is the working directory, absolute; "" is "/".
	Dir string
	// User is "name" or "uid", with ":group" or ":gid" if need be; "" is root.
	User string
	// Pty, if not nil, gives the command a terminal. All its output, including stderr, then goes to Stdout.
	Pty *Pty
	// Timeout, if positive, is after how long the process group is killed, in the guest's time, which stands still
	// while the guest sleeps.
	Timeout time.Duration
	// Detach lets the process outlive its connection. Its name is ID, or one that the agent chooses if ID is empty.
	// The agent keeps the last OutputLimit bytes of output for Attach (0: 256 KiB, at most 16 MiB).
	Detach      bool
	ID          string
	OutputLimit int
	// HoldOutput has a detached process wait for a reader when it is OutputLimit bytes ahead, whether a session is
	// attached or not: nothing is lost in a sleep, or while nobody reads. Up to half of OutputLimit is what sessions
	// have read, so a client that has lost so much on the way can attach at what it has. Agents of older guests drop the
	// oldest output: Session.Offset tells.
	HoldOutput bool
	// NoStdin gives a detached process without a Pty an empty stdin. Otherwise its stdin is open until a session ends it.
	NoStdin bool
	// Login runs the user's login shell: as one that reads its profile if Argv is empty, else with -c and the single
	// element of Argv. Without Dir the shell starts in the user's home directory, if that exists.
	Login bool
	// Changes asks which paths on the guest's disk change while the command runs. ExitStatus and the audit trail
	// then list them. It cannot be used with Detach. The guest scans all that was ever written to its disk, before
	// and after the command.
	Changes bool
	// Subsystem runs one of the agent's own programs instead: SubsystemSFTP or SubsystemLayer.
	Subsystem string

	IO
}

// IO has the streams of a command. A writer that blocks stalls the command and the end of its session, and nothing
// else.
type IO struct {
	// Stdin is read to its end, which closes the command's stdin. Nil is an empty stdin. When the command ends
	// first, the session does not wait for Stdin: a Read that is under way then ends in its own time.
	Stdin io.Reader
	// Stdout and Stderr are written by one goroutine. Nil discards the output.
	Stdout, Stderr io.Writer
	// Resize delivers new sizes of the terminal.
	Resize <-chan Size
}

// Pty is the terminal of a command.
type Pty struct {
	Size
	Term string // TERM; "" is xterm
	// Modes are encoded as in RFC 4254, section 8; at most 1 KiB. If empty, the kernel's defaults apply.
	Modes []byte
}

// SubsystemSFTP speaks version 3 of the SSH file transfer protocol on its stdin and stdout, with the rights of
// Cmd.User.
const SubsystemSFTP = agentpb.SubsystemSFTP

// SubsystemLayer ends all processes of the guest except the agent, and drops what exists only in memory (/run,
// /dev/shm, further mounts). It writes all changes on the VM's disk to its stdout: a layer by the OCI image
// specification, as a tar stream.
const SubsystemLayer = agentpb.SubsystemLayer

// Size is the size of a terminal in characters, each below 65536. Zero by zero leaves the terminal's size alone.
type Size struct{ Rows, Cols int }

// ExitStatus says how a command ended.
type ExitStatus struct {
	// Code is the exit code in a shell's terms: 128 + Signal if a signal ended the command, 127 if it was not found,
	// 126 if it is not executable.
	Code       int
	Signal     int // 0: it ended by exiting
	CoreDumped bool
	TimedOut   bool
	User, Sys  time.Duration // CPU time
	MaxRSS     int64         // bytes
	// NotStarted says why the command could not be started; "" if it was.
	NotStarted string
	// Changes lists what changed on the disk meanwhile, by this command or another, if Cmd.Changes is set.
	Changes *audit.Changes
}

// String describes the status in words.
func (e ExitStatus) String() string {
	switch {
	case e.NotStarted != "":
		return fmt.Sprintf("exit code %d: %s", e.Code, e.NotStarted)
	case e.TimedOut:
		return fmt.Sprintf("exit code %d: timed out", e.Code)
	case e.Signal != 0:
		return fmt.Sprintf("exit code %d: signal %d", e.Code, e.Signal)
	}
	return fmt.Sprintf("exit code %d", e.Code)
}

func exitStatus(e *agentpb.ExecExit) *ExitStatus {
	if e == nil {
		return nil
	}
	s := &ExitStatus{
		Code: int(e.Code), Signal: int(e.Signal), CoreDumped: e.CoreDumped, TimedOut: e.TimedOut,
		User: time.Duration(e.UserNanos), Sys: time.Duration(e.SystemNanos), MaxRSS: e.MaxRssBytes,
	}
	if e.Error != "" {
		s.NotStarted = printable(e.Error)
	}
	return s
}

// Session is a connection to a command in the guest.
type Session struct {
	id     string
	pid    int
	stream *stream[agentpb.ExecRequest, agentpb.ExecResponse]
	io     IO
	record *audit.Pending
	detach bool
	// changes reports that the caller asked for changes.
	changes bool

	in, out atomic.Int64 // bytes of stdin, and of both outputs

	stdin  flow.Window
	outq   chan *agentpb.ExecOutput // received and not yet written, within a window
	done   chan struct{}
	status *ExitStatus // valid once done is closed
	err    error       // valid once done is closed

	mu     sync.Mutex
	offset uint64
}

// Exec runs a command to its end. The error is an *ExitError if the command ended other than with exit code 0; the
// status is returned then as well. When ctx ends, the agent kills the command unless it is detached.
func (c *Client) Exec(ctx context.Context, cmd Cmd) (*ExitStatus, error) {
	s, err := c.Start(ctx, cmd)
	if err != nil {
		return nil, err
	}
	return s.Wait()
}

// Start starts a command. ctx governs the whole session, not only the start. A command whose file is missing or not
// executable is not an error of Start: its session ends at once, with code 126 or 127.
func (c *Client) Start(ctx context.Context, cmd Cmd) (*Session, error) {
	start := &agentpb.ExecStart{
		Argv: cmd.Argv, Env: cmd.Env, ReplaceEnv: cmd.ReplaceEnv, Cwd: cmd.Dir, User: cmd.User,
		TimeoutNanos: int64(cmd.Timeout), Detach: cmd.Detach, Id: cmd.ID,
		OutputLimit: uint32(min(max(cmd.OutputLimit, 0), agentpb.MaxOutputLimit)),
		NoStdin:     cmd.Stdin == nil && cmd.Pty == nil && (!cmd.Detach || cmd.NoStdin),
		Login:       cmd.Login, Subsystem: cmd.Subsystem, Changes: cmd.Changes, HoldOutput: cmd.HoldOutput,
	}
	if cmd.Pty != nil {
		start.Pty = &agentpb.Pty{Term: cmd.Pty.Term, Size: cmd.Pty.Size.message(), Modes: cmd.Pty.Modes}
	}
	s := &Session{io: cmd.IO, detach: cmd.Detach, changes: cmd.Changes}
	return c.session(ctx, s, cmd.action(), "exec", &agentpb.ExecRequest{Msg: &agentpb.ExecRequest_Start{Start: start}})
}

// Attach connects to a detached process and takes over from any session that is connected to it. Output begins at
// offset, or at the oldest byte that the agent keeps: see Session.Offset. A process that has ended delivers its last
// output and its status. The error is ErrNotFound if no process has that ID.
func (c *Client) Attach(ctx context.Context, id string, offset uint64, streams IO) (*Session, error) {
	m := &agentpb.ExecRequest{Msg: &agentpb.ExecRequest_Attach{Attach: &agentpb.ExecAttach{Id: id, Offset: offset}}}
	s := &Session{io: streams, offset: offset}
	return c.session(ctx, s, audit.Action{Kind: audit.KindAttach, Process: id}, opAttach, m)
}

func (s Size) message() *agentpb.WindowSize {
	const limit = 1<<16 - 1
	return &agentpb.WindowSize{Rows: uint32(min(max(s.Rows, 0), limit)), Cols: uint32(min(max(s.Cols, 0), limit))}
}

// session opens a connection for one command and waits for its start.
func (c *Client) session(ctx context.Context, s *Session, a audit.Action, op string, first *agentpb.ExecRequest) (_ *Session, err error) {
	if s.record, err = c.record(ctx, op, a); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.record.End(audit.Outcome{Error: text(err)})
		}
	}()
	s.outq, s.done = make(chan *agentpb.ExecOutput, agentpb.Window), make(chan struct{})
	if s.stream, err = begin(ctx, c, op, agentpb.AgentClient.Exec, first); err != nil {
		return nil, err
	}
	started, err := s.begun()
	if err != nil {
		s.stream.close()
		return nil, s.stream.fail(err)
	}
	if started == nil {
		s.stream.close()
		s.recordEnd()
		close(s.done)
		return s, nil
	}
	s.id, s.pid, s.offset = started.Id, int(started.Pid), started.Offset
	go s.run(op)
	return s, nil
}

// begun reads the answer to the first message. If the command could not be started, it sets the status and returns
// nil.
func (s *Session) begun() (*agentpb.ExecStarted, error) {
	m, err := s.stream.Recv()
	if err != nil {
		return nil, err
	}
	switch m := m.Msg.(type) {
	case *agentpb.ExecResponse_Started:
		if len(m.Started.Id) > agentpb.MaxID {
			return nil, fmt.Errorf("%w: an id of %d bytes", ErrProtocol, len(m.Started.Id))
		}
		return m.Started, nil
	case *agentpb.ExecResponse_Exit:
		s.status = exitStatus(m.Exit)
		if s.status.Code == 0 {
			return nil, fmt.Errorf("%w: a command that was not started ended well", ErrProtocol)
		}
		s.err = &ExitError{*s.status}
		return nil, nil
	}
	return nil, fmt.Errorf("%w: %T in answer to a start", ErrProtocol, m.Msg)
}

// ID is the name of the process, for Attach and Kill.
func (s *Session) ID() string { return s.id }

// PID is the process's id in the guest; 0 if the process could not be started.
func (s *Session) PID() int { return s.pid }

// Offset is the session's position in the command's output: after the last byte that was written to Stdout or
// Stderr. Pass it to Attach.
func (s *Session) Offset() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.offset
}

// Done is closed when the session is over.
func (s *Session) Done() <-chan struct{} { return s.done }

// Wait waits for the end of the command and of its output. The error is an *ExitError for a status other than 0,
// ErrConnectionLost or ErrTakenOver if the session ended before its command, the context's error, or a writer's.
func (s *Session) Wait() (*ExitStatus, error) {
	<-s.done
	return s.status, s.err
}

// Signal sends a signal to the command's process group.
func (s *Session) Signal(sig int) error {
	return s.send(&agentpb.ExecRequest{Msg: &agentpb.ExecRequest_Signal{Signal: int32(sig)}})
}

// Resize sets the size of the command's terminal.
func (s *Session) Resize(size Size) error {
	return s.send(&agentpb.ExecRequest{Msg: &agentpb.ExecRequest_Resize{Resize: size.message()}})
}

// errDetached ends a session that the caller closes.
var errDetached = errors.New("detached")

// Close ends the session without waiting for the command. A detached process runs on; any other is killed. Wait then
// returns ErrConnectionLost.
func (s *Session) Close() error {
	s.stream.cancel(errDetached)
	<-s.done
	return nil
}

func (s *Session) send(m *agentpb.ExecRequest) error {
	select {
	case <-s.done:
		return fmt.Errorf("guest: %w", ErrNotRunning)
	default:
	}
	return fail("exec", s.stream.Send(m))
}

// run serves the session until it is over.
func (s *Session) run(op string) {
	var delivered, resized sync.WaitGroup
	delivered.Go(s.deliver)
	resized.Go(s.resizes)
	go s.feed()
	status, err := s.receive()
	close(s.outq)
	if err != nil {
		s.stream.cancel(err)
	}
	delivered.Wait()
	if cause := context.Cause(s.stream.ctx); cause != nil {
		err = cause
	}
	s.stream.cancel(errDetached)
	resized.Wait()
	s.stream.close()
	switch {
	case errors.Is(err, errDetached):
		s.err = fmt.Errorf("guest: %s: the session was closed: %w", op, ErrConnectionLost)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		s.err = fmt.Errorf("guest: %s: %w", op, err)
	case err != nil:
		s.err = s.stream.fail(err)
	default:
		s.status = status
		if status.Code != 0 {
			s.err = &ExitError{*status}
		}
	}
	s.recordEnd()
	close(s.done)
}

// receive handles the guest's messages until the command's exit. It does not wait for Stdout, so that
// acknowledgements of stdin get through.
func (s *Session) receive() (*ExitStatus, error) {
	for {
		m, err := s.stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = ErrConnectionLost
			}
			return nil, err
		}
		switch m := m.Msg.(type) {
		case *agentpb.ExecResponse_Output:
			if len(m.Output.Data) > agentpb.MaxChunk {
				return nil, fmt.Errorf("%w: %d bytes of output in one message", ErrProtocol, len(m.Output.Data))
			}
			s.out.Add(int64(len(m.Output.Data)))
			select {
			case s.outq <- m.Output:
			default:
				return nil, fmt.Errorf("%w: more than %d messages of output unacknowledged", ErrProtocol, agentpb.Window)
			}
		case *agentpb.ExecResponse_Ack:
			if err := s.stdin.Ack(m.Ack); err != nil {
				return nil, err
			}
		case *agentpb.ExecResponse_Exit:
			st := exitStatus(m.Exit)
			if s.changes {
				st.Changes = recordOfChanges(m.Exit.GetChanges())
			}
			return st, nil
		default:
			return nil, fmt.Errorf("%w: unexpected message %T", ErrProtocol, m)
		}
	}
}

// deliver writes output to Stdout and Stderr, and acknowledges it.
func (s *Session) deliver() {
	var acker flow.Acker
	failed := false
	for out := range s.outq {
		if failed || s.stream.ctx.Err() != nil {
			continue
		}
		w := s.io.Stdout
		if out.Stderr {
			w = s.io.Stderr
		}
		if w != nil {
			if _, err := w.Write(out.Data); err != nil {
				s.stream.cancel(fmt.Errorf("write the command's output: %w", err))
				failed = true
				continue
			}
		}
		s.mu.Lock()
		s.offset = out.Offset + uint64(len(out.Data))
		s.mu.Unlock()
		if n, due := acker.Consumed(len(out.Data)); due {
			// A failure to send shows in receive as well.
			_ = s.stream.Send(&agentpb.ExecRequest{Msg: &agentpb.ExecRequest_Ack{Ack: n}})
		}
	}
}

// resizes forwards the caller's new sizes.
func (s *Session) resizes() {
	for {
		select {
		case size, ok := <-s.io.Resize:
			if !ok {
				return
			}
			if s.Resize(size) != nil {
				return
			}
		case <-s.stream.ctx.Done():
			return
		}
	}
}

// feed sends Stdin. The session does not wait for it, since nothing can end a Read that is under way.
func (s *Session) feed() {
	if s.io.Stdin == nil {
		return
	}
	buf := make([]byte, agentpb.MaxChunk)
	for {
		n, err := s.io.Stdin.Read(buf)
		if n > 0 {
			if _, aerr := s.stdin.Acquire(s.stream.ctx); aerr != nil {
				return
			}
			if s.stream.Send(&agentpb.ExecRequest{Msg: &agentpb.ExecRequest_Stdin{Stdin: buf[:n]}}) != nil {
				return
			}
			s.in.Add(int64(n))
		}
		if errors.Is(err, io.EOF) {
			_ = s.stream.Send(&agentpb.ExecRequest{Msg: &agentpb.ExecRequest_StdinClose{StdinClose: &agentpb.Empty{}}})
			return
		}
		if err != nil {
			s.stream.cancel(fmt.Errorf("read the command's input: %w", err))
			return
		}
	}
}
