package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// inbox is what a client has sent for stdin and the command has not read. It has a bound: put waits.
type inbox struct {
	mu       sync.Mutex // guards what follows
	changed  *sync.Cond
	parts    [][]byte
	held     int
	eof      bool
	over     bool               // nobody reads or writes any more
	consumed uint64             // bytes
	told     uint64             // the last acknowledgement
	tell     func(bytes uint64) // acknowledges
}

func newInbox(tell func(uint64)) *inbox {
	b := &inbox{tell: tell}
	b.changed = sync.NewCond(&b.mu)
	return b
}

// put adds bytes, which it copies. It waits while there are StdinWindow bytes.
func (b *inbox) put(p []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.eof {
		return fmt.Errorf("%w: stdin after its end", errProtocol)
	}
	if len(p) == 0 {
		return nil
	}
	for b.held >= wire.StdinWindow && !b.over {
		b.changed.Wait()
	}
	if b.over {
		return nil // the command has ended: nobody wants it
	}
	b.parts, b.held = append(b.parts, append([]byte(nil), p...)), b.held+len(p)
	b.changed.Broadcast()
	return nil
}

func (b *inbox) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.eof = true
	b.changed.Broadcast()
}

// close ends put and Read.
func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over, b.parts, b.held = true, nil, 0
	b.changed.Broadcast()
}

// Read implements io.Reader. It acknowledges what the reads before it have taken.
func (b *inbox) Read(p []byte) (n int, err error) {
	b.mu.Lock()
	for b.held == 0 && !b.eof && !b.over {
		b.mu.Unlock()
		b.acknowledge(1)
		b.mu.Lock()
		if b.held == 0 && !b.eof && !b.over {
			b.changed.Wait()
		}
	}
	for n < len(p) && len(b.parts) > 0 {
		m := copy(p[n:], b.parts[0])
		n += m
		if b.parts[0] = b.parts[0][m:]; len(b.parts[0]) == 0 {
			b.parts[0] = nil
			b.parts = b.parts[1:]
		}
	}
	b.held, b.consumed = b.held-n, b.consumed+uint64(n)
	if n == 0 {
		// The end of the stream is not the end of stdin: a process that outlives the stream must not take it for that.
		if err = io.EOF; b.over {
			err = net.ErrClosed
		}
	}
	b.changed.Broadcast()
	b.mu.Unlock()
	b.acknowledge(wire.StdinWindow / 4)
	return n, err
}

// acknowledge tells the client what was consumed if that is at least so much more than it was told.
func (b *inbox) acknowledge(least uint64) {
	b.mu.Lock()
	n := b.consumed
	due := n-b.told >= least && !b.over
	if due {
		b.told = n
	}
	b.mu.Unlock()
	if due {
		b.tell(n)
	}
}

// outbox bounds the output that the client has not acknowledged, if it has set a window.
type outbox struct {
	mu      sync.Mutex // guards what follows
	changed *sync.Cond
	window  uint64 // 0: the connection bounds it
	sent    uint64
	acked   uint64
	begun   bool // before, nothing is sent
	over    bool
}

func newOutbox(window int) *outbox {
	o := &outbox{window: uint64(window)}
	o.changed = sync.NewCond(&o.mu)
	return o
}

// ack notes how much the client has consumed.
func (o *outbox) ack(bytes uint64) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if bytes < o.acked || bytes > o.sent {
		return fmt.Errorf("%w: an ack of %d bytes, after one of %d, and %d were sent", errProtocol, bytes, o.acked, o.sent)
	}
	o.acked = bytes
	o.changed.Broadcast()
	return nil
}

// take waits until some of n bytes may be sent, and returns how many.
func (o *outbox) take(n int) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	for (!o.begun || o.window > 0 && o.sent-o.acked >= o.window) && !o.over {
		o.changed.Wait()
	}
	if o.over {
		return 0
	}
	if o.window > 0 {
		n = int(min(uint64(n), o.window-(o.sent-o.acked)))
	}
	o.sent += uint64(n)
	return n
}

// begin lets output pass.
func (o *outbox) begin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.begun = true
	o.changed.Broadcast()
}

func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.over = true
	o.changed.Broadcast()
}

// output is stdout or stderr of a command.
type output struct {
	c      *socket
	out    *outbox
	number byte
}

func (o output) Write(p []byte) (n int, err error) {
	for n < len(p) {
		m := o.out.take(min(len(p)-n, wire.MaxChunk))
		if m == 0 {
			return n, net.ErrClosed
		}
		if err := o.c.data(int(o.number), p[n:n+m]); err != nil {
			return n, err
		}
		n += m
	}
	return n, nil
}

// conversation is one stream of exec or attach.
type conversation struct {
	c      *socket
	in     *inbox
	out    *outbox
	sizes  chan guest.Size
	detach bool // it may be left running
	left   bool // the client has asked for that
}

func (c *socket) converse(window int) (*conversation, error) {
	if window != 0 && window < wire.MinWindow {
		return nil, spec.InField("window", fmt.Errorf("%w: a window of %d bytes: use %d or more", sandbox.ErrSpec, window, wire.MinWindow))
	}
	v := &conversation{c: c, out: newOutbox(window), sizes: make(chan guest.Size, 1)}
	v.in = newInbox(func(n uint64) {
		_ = c.send(wire.Control{Type: wire.ControlAck, Bytes: n}) // an error shows elsewhere as well
	})
	return v, nil
}

// streams returns the streams for a command.
func (v *conversation) streams(stdin bool) guest.IO {
	o := guest.IO{Stdout: output{v.c, v.out, wire.StreamStdout}, Stderr: output{v.c, v.out, wire.StreamStderr}, Resize: v.sizes}
	if stdin {
		o.Stdin = v.in
	}
	return o
}

// listen handles the client's messages until it closes the connection, leaves or breaks a rule.
func (v *conversation) listen(s *guest.Session, stdin bool) error {
	buf := make([]byte, 0, 4<<10)
	for {
		text, data, err := v.c.receive(buf)
		if err != nil {
			return err
		}
		if cap(data) <= 64<<10 {
			buf = data
		}
		if !text {
			if len(data) == 0 || data[0] != wire.StreamStdin || !stdin {
				return fmt.Errorf("%w: data for a stream that does not take any", errProtocol)
			}
			if err := v.in.put(data[1:]); err != nil {
				return err
			}
			continue
		}
		m, err := readControl(data)
		if err != nil {
			return err
		}
		switch m.Type {
		case wire.ControlEOF:
			v.in.end()
		case wire.ControlAck:
			err = v.out.ack(m.Bytes)
		case wire.ControlSignal:
			if m.Signal < 1 || m.Signal > maxSignal {
				return fmt.Errorf("%w: signal %d: use 1 to %d", errProtocol, m.Signal, maxSignal)
			}
			// It fails when the command has ended, which the client is told.
			_ = s.Signal(m.Signal)
		case wire.ControlResize:
			select {
			case <-v.sizes: // a newer one counts
			default:
			}
			v.sizes <- guest.Size{Rows: m.Rows, Cols: m.Cols} // only this goroutine sends
		case wire.ControlDetach:
			if !v.detach {
				return fmt.Errorf("%w: the process does not outlive its stream", errProtocol)
			}
			v.left = true
			return nil
		default:
			return fmt.Errorf("%w: a control of type %.64q", errProtocol, m.Type)
		}
		if err != nil {
			return err
		}
	}
}

const maxSignal = 64

// run serves a session until it ends.
func (v *conversation) run(s *guest.Session, stdin bool) (*wire.Control, error) {
	heard := make(chan error, 1)
	go func() {
		err := v.listen(s, stdin)
		heard <- err
		// Output that the client does not take must not hold up the end.
		v.out.close()
		_ = s.Close()
		v.in.close()
	}()
	st, err := s.Wait()
	v.in.close()
	v.out.close()
	if _, failed := errors.AsType[*guest.ExitError](err); failed && st != nil {
		err = nil
	}
	if err != nil {
		select {
		case herr := <-heard:
			if v.left {
				return nil, nil
			}
			return nil, herr
		default:
		}
		return nil, err
	}
	return &wire.Control{Type: wire.ControlExit, Exit: exitOf(st), Offset: s.Offset()}, nil
}

func exitOf(st *guest.ExitStatus) *wire.ExitStatus {
	if st == nil {
		return nil
	}
	return &wire.ExitStatus{
		ExitCode: st.Code, Signal: st.Signal, TimedOut: st.TimedOut, NotStarted: st.NotStarted,
		CPUMs: float64(max(st.User, 0).Microseconds()+max(st.Sys, 0).Microseconds()) / 1000,
	}
}

// cmdOf returns a command for the guest.
func cmdOf(e *wire.ExecStart) (cmd guest.Cmd, err error) {
	bad := func(field, format string, args ...any) (guest.Cmd, error) {
		return guest.Cmd{}, spec.InField(field, fmt.Errorf("%w: %s", sandbox.ErrSpec, fmt.Sprintf(format, args...)))
	}
	const maxKiB, maxSize = 16 << 10, 1<<16 - 1
	switch {
	case len(e.Command) == 0 || e.Command[0] == "":
		return bad("command", "there is no command")
	case e.TimeoutSeconds < 0 || e.TimeoutSeconds > int(time.Duration(1<<62)/time.Second):
		return bad("timeout_seconds", "timeout_seconds %d: use 1 or more", e.TimeoutSeconds)
	case e.OutputKiB < 0 || e.OutputKiB > maxKiB:
		return bad("output_kib", "output_kib %d: use 1 to %d", e.OutputKiB, maxKiB)
	case !e.Detach && (e.Process != "" || e.OutputKiB != 0 || e.HoldOutput):
		return bad("detach", "process, output_kib and hold_output go with detach")
	case e.NoStdin && (!e.Detach || e.Stdin || e.TTY != nil):
		return bad("no_stdin", "no_stdin goes with detach, and not with stdin or tty")
	case len(e.Process) > 64:
		return bad("process", "a process's name of %d bytes: use 64 at most", len(e.Process))
	}
	cmd = guest.Cmd{
		Argv: e.Command, User: e.User, Dir: e.Cwd, Env: e.Env, Timeout: time.Duration(e.TimeoutSeconds) * time.Second,
		Detach: e.Detach, ID: e.Process, OutputLimit: e.OutputKiB << 10, NoStdin: e.NoStdin, HoldOutput: e.HoldOutput,
	}
	if t := e.TTY; t != nil {
		if t.Rows < 0 || t.Rows > maxSize || t.Cols < 0 || t.Cols > maxSize {
			return bad("tty", "a terminal of %d rows and %d columns: use 0 to %d", t.Rows, t.Cols, maxSize)
		}
		cmd.Pty = &guest.Pty{Size: guest.Size{Rows: t.Rows, Cols: t.Cols}, Term: t.Term}
	}
	return cmd, nil
}

// agentOf connects to the agent of a sandbox, and wakes it first. It looks again whose sandbox it is: the name may
// have become another's.
func (r *request) agentOf(ctx context.Context) (*guest.Client, error) {
	c, err := r.server.o.Host.Sandbox(r.name()).Connect(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.server.reaches(r.Context(), r.caller(), r.name()); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// execStream runs a command whose start is the client's first message.
func execStream(r *request, c *socket) (*wire.Control, error) {
	first, cancel := context.WithTimeout(c.conn, startTime)
	kind, text, err := c.Read(first)
	cancel()
	if err != nil {
		return nil, heard(err)
	}
	m, err := readControl(text)
	if err == nil && (kind != websocket.MessageText || m.Type != wire.ControlStart || m.ExecStart == nil) {
		err = fmt.Errorf("%w: the first message is not a start", errProtocol)
	}
	if err != nil {
		return nil, err
	}
	cmd, err := cmdOf(m.ExecStart)
	if err != nil {
		return nil, err
	}
	v, err := c.converse(m.Window)
	if err != nil {
		return nil, err
	}
	defer v.in.close()
	g, err := r.agentOf(c.ctx)
	if err != nil {
		return nil, err
	}
	defer g.Close()
	if cmd, err = r.server.o.Host.Sandbox(r.name()).Command(cmd); err != nil {
		return nil, err
	}
	stdin := m.Stdin || m.TTY != nil || m.Detach && !m.NoStdin
	cmd.IO, v.detach = v.streams(stdin), cmd.Detach
	s, err := g.Start(c.ctx, cmd)
	if err != nil {
		return nil, err
	}
	return v.serve(s, stdin)
}

// attachStream connects to a process that runs on its own.
func attachStream(r *request, c *socket) (*wire.Control, error) {
	offset, err := r.number("offset", 0, 0, 1<<62)
	if err != nil {
		return nil, err
	}
	window, err := r.number("window", 0, wire.MinWindow, 1<<30)
	if err != nil {
		return nil, err
	}
	v, err := c.converse(int(window))
	if err != nil {
		return nil, err
	}
	defer v.in.close()
	v.detach = true
	g, err := r.agentOf(c.ctx)
	if err != nil {
		return nil, err
	}
	defer g.Close()
	s, err := g.Attach(c.ctx, r.PathValue("process"), uint64(offset), v.streams(true))
	if err != nil {
		return nil, err
	}
	return v.serve(s, true)
}

// serve tells the client of the start, and serves the session.
func (v *conversation) serve(s *guest.Session, stdin bool) (*wire.Control, error) {
	if s.ID() != "" { // otherwise it could not be started
		started := wire.Control{Type: wire.ControlStarted, ExecStart: &wire.ExecStart{Process: s.ID()}, PID: s.PID(), Offset: s.Offset()}
		if err := v.c.send(started); err != nil {
			v.out.close()
			_ = s.Close()
			return nil, err
		}
	}
	v.out.begin()
	return v.run(s, stdin)
}

// processes lists what was started through the agent of a running sandbox.
func processes(ctx context.Context, b *sandbox.Sandbox, _ *request) (wire.Processes, error) {
	out := wire.Processes{Processes: []wire.Process{}}
	c, err := b.Agent(ctx)
	if err != nil {
		return out, err
	}
	defer c.Close()
	list, err := c.List(ctx)
	for _, p := range list {
		is := wire.Process{
			Process: p.ID, PID: p.PID, Command: p.Argv, Detached: p.Detached, Attached: p.Attached, TTY: p.Pty,
			Started: p.Started.UTC().Format(time.RFC3339Nano), Exit: exitOf(p.Exit), OutputStart: p.OutputStart, OutputEnd: p.OutputEnd,
		}
		if is.Command == nil {
			is.Command = []string{}
		}
		out.Processes = append(out.Processes, is)
	}
	return out, err
}

// startProcess starts a detached process, and leaves it.
func startProcess(s *Server, r *request) (int, any, error) {
	e := r.body.(*wire.ExecStart)
	for field, has := range map[string]bool{"stdin": e.Stdin, "window": e.Window != 0} {
		if has {
			return 0, nil, spec.InField(field, fmt.Errorf("%w: %s is for streams", sandbox.ErrSpec, field))
		}
	}
	e.Detach = true
	cmd, err := cmdOf(e)
	if err != nil {
		return 0, nil, err
	}
	g, err := r.agentOf(r.Context())
	if err != nil {
		return 0, nil, err
	}
	defer g.Close()
	if cmd, err = s.o.Host.Sandbox(r.name()).Command(cmd); err != nil {
		return 0, nil, err
	}
	p, err := g.Start(r.Context(), cmd)
	if err != nil {
		return 0, nil, err
	}
	if p.ID() == "" { // it has ended without a start
		_, err := p.Wait()
		return 0, nil, &records.Error{Op: r.op, Sandbox: r.name(), Code: "guest-invalid", Remedy: "see what programs the guest has", Err: err}
	}
	return http.StatusCreated, wire.Started{Process: p.ID(), PID: p.PID()}, p.Close()
}

// portStream carries a connection to a TCP port of the guest. Messages have no stream's number.
func portStream(r *request, c *socket) (*wire.Control, error) {
	port, err := strconv.ParseUint(r.PathValue("port"), 10, 16)
	if err != nil || port == 0 {
		return nil, spec.InField("port", fmt.Errorf("%w: port %.64q: use 1 to 65535", sandbox.ErrSpec, r.PathValue("port")))
	}
	g, err := r.agentOf(c.ctx)
	if err != nil {
		return nil, err
	}
	defer g.Close()
	conn, err := g.Dial(c.ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.FormatUint(port, 10)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(c.ctx, func() { _ = conn.Close() })
	defer stop()
	if err := c.send(wire.Control{Type: wire.ControlStarted}); err != nil {
		return nil, err
	}
	in, eof := make(chan error, 1), make(chan struct{})
	go func() {
		in <- c.toPort(conn, eof)
		_ = conn.Close() // now, so that the reader below finds the cause
	}()
	buf := make([]byte, wire.MaxChunk)
	for {
		n, err := conn.Read(buf)
		if n > 0 {
			if werr := c.data(none, buf[:n]); werr != nil {
				return nil, werr
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			select {
			case err = <-in:
			default:
			}
			return nil, err
		}
	}
	// The guest has sent all; the client may have more.
	if err := c.send(wire.Control{Type: wire.ControlEOF}); err != nil {
		return nil, err
	}
	select {
	case <-eof:
		return nil, nil
	case err := <-in:
		return nil, err
	case <-c.ctx.Done():
		return nil, context.Cause(c.ctx)
	}
}

// toPort writes the client's messages to a connection, and closes eof when the client has sent their end. It goes on
// until the client closes, which it would not see otherwise, or breaks a rule.
func (c *socket) toPort(conn net.Conn, eof chan<- struct{}) error {
	var buf []byte
	over := false
	for {
		text, data, err := c.receive(buf)
		if err != nil {
			return err
		}
		if cap(data) <= 64<<10 {
			buf = data
		}
		if over {
			return fmt.Errorf("%w: a message after the end", errProtocol)
		}
		if !text {
			if _, err := conn.Write(data); err != nil {
				return err
			}
			continue
		}
		m, err := readControl(data)
		if err != nil {
			return err
		}
		if m.Type != wire.ControlEOF {
			return fmt.Errorf("%w: a control of type %.64q", errProtocol, m.Type)
		}
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			if err := half.CloseWrite(); err != nil {
				return err
			}
		}
		over = true
		close(eof)
	}
}

// streamRoutes returns the routes of commands, processes and ports. They wake a sandbox that sleeps, except for the
// list.
func streamRoutes() []route {
	const base = onOne + "/processes"
	signal := func(ctx context.Context, c *guest.Client, r *request) (wire.Empty, error) {
		n := r.body.(*wire.Signal).Signal
		if n < 1 || n > maxSignal {
			return wire.Empty{}, spec.InField("signal", fmt.Errorf("%w: signal %d: use 1 to %d", sandbox.ErrSpec, n, maxSignal))
		}
		return wire.Empty{}, c.Kill(ctx, r.PathValue("process"), n)
	}
	forget := func(ctx context.Context, c *guest.Client, r *request) (wire.Empty, error) {
		return wire.Empty{}, c.Forget(ctx, r.PathValue("process"))
	}
	return []route{
		{
			method: http.MethodGet, path: onOne + "/exec", scope: ScopeExec, op: "exec", room: roomSockets, socket: execStream,
			says: "Run a command over a WebSocket: docs/reference/http-api.md describes its messages. The first is a start.",
		},
		{method: http.MethodGet, path: base, scope: ScopeExec, op: "list processes", says: "List what was started in a running sandbox, and is not forgotten.", gives: wire.Processes{}, serve: onSandbox(processes)},
		{
			method: http.MethodPost, path: base, scope: ScopeExec, op: "start process", says: "Start a process that goes on by itself.", room: roomExecs, idempotent: true,
			takes: wire.ExecStart{}, needsBody: true, gives: wire.Started{}, created: true, serve: startProcess,
		},
		{
			method: http.MethodGet, path: base + "/{process}/attach", scope: ScopeExec, op: "attach", room: roomSockets, socket: attachStream,
			says:  "Attach to a process over a WebSocket, in the place of any other client. Messages are those of exec, without a start.",
			query: []param{{name: "offset", says: "output from this position on, as far as it is kept", integer: true}, {name: "window", says: "as in a start", integer: true}},
		},
		{
			method: http.MethodPost, path: base + "/{process}/signal", scope: ScopeExec, op: "signal", says: "Send a signal to a process and its group.",
			takes: wire.Signal{}, needsBody: true, gives: wire.Empty{}, serve: onFiles(signal),
		},
		{method: http.MethodDelete, path: base + "/{process}", scope: ScopeExec, op: "remove process", says: "Kill a process if it runs, and forget it.", gives: wire.Empty{}, serve: onFiles(forget)},
		{
			method: http.MethodGet, path: onOne + "/ports/{port}", scope: ScopeExec, op: "connect", room: roomSockets, socket: portStream,
			says: "Connect to a TCP port of the sandbox over a WebSocket. After a control \"started\", binary messages are what is sent; a control \"eof\" ends one direction.",
		},
	}
}
