package e2b

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/e2b/accounts"
	"github.com/drowse-vm/drowse/sandbox/e2b/e2bpb/process"
)

// processes implements process.Process.
type processes struct{ *Server }

var itoa = strconv.Itoa

// Processes of this wire are those whose id, at the agent, has this prefix. The tag of one is in its id, so the agent
// alone keeps both.
const (
	idPrefix = "e2b-"
	idRandom = 10 // letters
	maxTag   = 36 // bytes
)

// keptOutput is how many bytes of output the agent keeps of a process that nobody follows.
const keptOutput = 64 << 10

// processID returns an id for a new process.
func processID(tag *string) (string, error) {
	id := idPrefix + strings.ToLower(rand.Text()[:idRandom])
	if tag == nil {
		return id, nil
	}
	if *tag == "" || len(*tag) > maxTag {
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the tag has %d bytes: use 1 to %d", len(*tag), maxTag))
	}
	return id + "-" + base64.RawURLEncoding.EncodeToString([]byte(*tag)), nil
}

// tagOf returns the tag in an id. ok reports whether the process is one of this wire.
func tagOf(id string) (tag *string, ok bool) {
	rest, ok := strings.CutPrefix(id, idPrefix)
	if !ok || len(rest) < idRandom {
		return nil, false
	}
	if code, there := strings.CutPrefix(rest[idRandom:], "-"); there {
		b, err := base64.RawURLEncoding.DecodeString(code)
		if err != nil || !utf8.Valid(b) {
			return nil, false
		}
		t := string(b)
		return &t, true
	}
	return nil, len(rest) == idRandom
}

// List implements process.ProcessHandler.
func (p processes) List(ctx context.Context, _ *process.ListRequest) (*process.ListResponse, error) {
	c, err := p.agent(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	all, err := c.List(ctx)
	if err != nil {
		return nil, err
	}
	out := &process.ListResponse{}
	for _, have := range all {
		tag, ok := tagOf(have.ID)
		if !ok || have.Exit != nil {
			continue
		}
		i := &process.ProcessInfo{Config: &process.ProcessConfig{}, Pid: uint32(have.PID), Tag: tag}
		if len(have.Argv) > 0 {
			for i, a := range have.Argv {
				have.Argv[i] = text(a)
			}
			i.Config.Cmd, i.Config.Args = have.Argv[0], have.Argv[1:]
		}
		out.Processes = append(out.Processes, i)
	}
	return out, nil
}

// selected returns the process that a request selects: one that runs, or the last one that did.
func (p processes) selected(ctx context.Context, c *guest.Client, sel *process.ProcessSelector) (guest.Process, error) {
	all, err := c.List(ctx)
	if err != nil {
		return guest.Process{}, err
	}
	var found *guest.Process
	for _, have := range all {
		tag, ok := tagOf(have.ID)
		switch want := sel.GetSelector().(type) {
		case *process.ProcessSelector_Pid:
			ok = ok && want.Pid != 0 && have.PID == int(want.Pid)
		case *process.ProcessSelector_Tag:
			ok = ok && tag != nil && *tag == want.Tag
		default:
			return guest.Process{}, connect.NewError(connect.CodeInvalidArgument, errors.New("the request selects no process"))
		}
		if ok && (found == nil || have.Exit == nil || found.Exit != nil && have.Started.After(found.Started)) {
			found = &have
		}
	}
	if found == nil {
		return guest.Process{}, connect.NewError(connect.CodeNotFound, errors.New("the sandbox has no such process"))
	}
	return *found, nil
}

// command returns the command that a request starts.
func (p processes) command(ctx context.Context, c *guest.Client, m *process.StartRequest) (guest.Cmd, error) {
	config := m.GetProcess()
	if config.GetCmd() == "" {
		return guest.Cmd{}, connect.NewError(connect.CodeInvalidArgument, errors.New("the request has no command"))
	}
	b := boxOf(ctx)
	a, err := accounts.Read(ctx, c)
	if err != nil {
		return guest.Cmd{}, err
	}
	u, err := findUser(ctx, a)
	if err != nil {
		return guest.Cmd{}, err
	}
	dir, err := pathOf(u, config.GetCwd())
	if err != nil {
		return guest.Cmd{}, err
	}
	if fi, err := c.Stat(ctx, dir); config.Cwd == nil || config.GetCwd() == "" {
		if err != nil || !fi.Mode.IsDir() {
			dir = "/" // a user without a home
		}
	} else if err != nil || !fi.Mode.IsDir() {
		return guest.Cmd{}, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd %q is not a directory", dir))
	}
	env := []string{"E2B_SANDBOX=true", "E2B_SANDBOX_ID=" + b.Name(), "E2B_TEMPLATE_ID=" + b.meta.E2B.Template}
	for _, vars := range []map[string]string{b.meta.E2B.EnvVars, config.GetEnvs()} {
		for _, k := range slices.Sorted(maps.Keys(vars)) {
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(vars[k], "\x00") {
				return guest.Cmd{}, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("envs: %q cannot be a variable", k))
			}
			env = append(env, k+"="+vars[k])
		}
	}
	cmd := guest.Cmd{Argv: append([]string{config.GetCmd()}, config.GetArgs()...), Env: env, Dir: dir, User: u.Name, Detach: true, OutputLimit: keptOutput}
	if cmd.ID, err = processID(m.Tag); err != nil {
		return cmd, err
	}
	if m.Pty != nil {
		size := sizeOf(m.Pty)
		cmd.Pty = &guest.Pty{Size: size, Term: "xterm-256color"}
		if config.Envs["TERM"] != "" {
			cmd.Pty.Term = config.Envs["TERM"]
		}
	}
	if at, ok := ctx.Deadline(); ok {
		// The guest kills it then, whoever follows.
		if cmd.Timeout = time.Until(at); cmd.Timeout <= 0 {
			return cmd, context.DeadlineExceeded
		}
	}
	return b.Command(cmd)
}

func sizeOf(m *process.PTY) guest.Size {
	const limit = 1<<16 - 1
	return guest.Size{Rows: int(min(m.GetSize().GetRows(), limit)), Cols: int(min(m.GetSize().GetCols(), limit))}
}

// Start implements process.ProcessHandler. The process outlives the stream.
func (p processes) Start(ctx context.Context, m *process.StartRequest, out *connect.ServerStream[process.StartResponse]) error {
	c, err := p.agent(ctx)
	if err != nil {
		return err
	}
	cmd, err := p.command(ctx, c, m)
	if err != nil {
		c.Close()
		return err
	}
	h, f, leave, err := p.hubOf(ctx, hubKey{boxOf(ctx).record.ID, cmd.ID}, true, func(life context.Context, h *hub) (err error) {
		h.pty = cmd.Pty != nil
		cmd.Stdout, cmd.Stderr, cmd.Stdin = output{h, false}, output{h, true}, h.stdin
		if m.Stdin != nil && !*m.Stdin && cmd.Pty == nil {
			cmd.Stdin = strings.NewReader("")
			h.closeStdin()
		}
		if h.session, err = c.Start(life, cmd); err != nil {
			return err
		}
		if h.pid = h.session.PID(); h.pid == 0 {
			st, _ := h.session.Wait()
			return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the command could not be started: %s", st.NotStarted))
		}
		h.closing(life, c)
		return nil
	})
	if err != nil {
		c.Close()
		return err
	}
	defer leave()
	return p.follow(ctx, h, f, out.Conn().RequestHeader(), func(e *process.ProcessEvent) error {
		return out.Send(&process.StartResponse{Event: e})
	})
}

// closing closes a client when the session's life is over.
func (h *hub) closing(life context.Context, c *guest.Client) {
	h.s.all.Go(func() {
		<-life.Done()
		if h.session != nil {
			<-h.session.Done()
		}
		c.Close()
	})
}

// attached returns the hub of a process that exists already.
func (p processes) attached(ctx context.Context, sel *process.ProcessSelector, follow bool) (*hub, *sub, func(), error) {
	c, err := p.agent(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	have, err := p.selected(ctx, c, sel)
	if err != nil {
		c.Close()
		return nil, nil, nil, err
	}
	if have.Exit != nil && !follow {
		c.Close()
		return nil, nil, nil, connect.NewError(connect.CodeNotFound, errors.New("the process has ended"))
	}
	used := false
	h, f, leave, err := p.hubOf(ctx, hubKey{boxOf(ctx).record.ID, have.ID}, follow, func(life context.Context, h *hub) (err error) {
		used = true
		h.pty, h.pid = have.Pty, have.PID
		h.session, err = c.Attach(life, have.ID, have.OutputEnd, guest.IO{Stdin: h.stdin, Stdout: output{h, false}, Stderr: output{h, true}})
		if err == nil {
			h.closing(life, c)
		}
		return err
	})
	if !used || err != nil {
		c.Close()
	}
	return h, f, leave, err
}

// Connect implements process.ProcessHandler. Output from now on follows, and the end of a process that has ended.
func (p processes) Connect(ctx context.Context, m *process.ConnectRequest, out *connect.ServerStream[process.ConnectResponse]) error {
	h, f, leave, err := p.attached(ctx, m.GetProcess(), true)
	if err != nil {
		return err
	}
	defer leave()
	return p.follow(ctx, h, f, out.Conn().RequestHeader(), func(e *process.ProcessEvent) error {
		return out.Send(&process.ConnectResponse{Event: e})
	})
}

// Times between keepalives of a stream.
const (
	defaultKeepalive = 90 * time.Second
	minKeepalive     = time.Second
	maxKeepalive     = time.Hour
)

// keepalive returns how often a stream says that it lives.
func keepalive(header http.Header) time.Duration {
	n, err := strconv.Atoi(header.Get("Keepalive-Ping-Interval"))
	if err != nil || n <= 0 || n > int(maxKeepalive/time.Second) {
		return defaultKeepalive
	}
	return max(time.Duration(n)*time.Second, minKeepalive)
}

// follow sends what happens to a process until its end.
func (p processes) follow(ctx context.Context, h *hub, f *sub, header http.Header, send func(*process.ProcessEvent) error) error {
	start := &process.ProcessEvent_StartEvent{Pid: uint32(h.pid)}
	if err := send(&process.ProcessEvent{Event: &process.ProcessEvent_Start{Start: start}}); err != nil {
		return err
	}
	alive := time.NewTicker(keepalive(header))
	defer alive.Stop()
	for {
		select {
		case e, ok := <-f.events:
			if !ok {
				h.mu.Lock()
				end, lost := h.end, h.lost
				h.mu.Unlock()
				if end == nil {
					return p.cut(ctx, lost)
				}
				return send(end)
			}
			if err := send(e); err != nil {
				return err
			}
		case <-f.slow:
			return errSlow
		case <-alive.C:
			if err := send(&process.ProcessEvent{Event: &process.ProcessEvent_Keepalive{Keepalive: &process.ProcessEvent_KeepAlive{}}}); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-p.life.Done():
			return connect.NewError(connect.CodeUnavailable, errors.New("the server ends"))
		}
	}
}

// cutTime is how long a pause or removal may take after it has cut the streams.
const cutTime = 5 * time.Second

// cut is the error of a stream whose sandbox was paused or removed. Clients know it by the words of a broken
// connection, and then ask whether the sandbox runs: so it waits until it does not.
func (s *Server) cut(ctx context.Context, err error) error {
	if !gone(err) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, cutTime)
	defer cancel()
	for ctx.Err() == nil {
		if b, err := s.find(boxOf(ctx).Name()); err != nil || b.running() != nil {
			break
		}
		select {
		case <-ctx.Done():
		case <-s.life.Done():
			cancel()
		case <-time.After(listWait):
		}
	}
	return connect.NewError(connect.CodeUnknown, errors.New("terminated: the sandbox was paused or removed"))
}

// Update implements process.ProcessHandler: it resizes a terminal.
func (p processes) Update(ctx context.Context, m *process.UpdateRequest) (*process.UpdateResponse, error) {
	h, _, leave, err := p.attached(ctx, m.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	defer leave()
	if m.Pty == nil {
		return &process.UpdateResponse{}, nil
	}
	if !h.pty {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no terminal"))
	}
	return &process.UpdateResponse{}, h.session.Resize(sizeOf(m.Pty))
}

// input writes an input of a client.
func (h *hub) input(ctx context.Context, in *process.ProcessInput) error {
	switch in := in.GetInput().(type) {
	case *process.ProcessInput_Stdin:
		if h.pty {
			return connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has a terminal: send pty"))
		}
		return h.write(ctx, in.Stdin)
	case *process.ProcessInput_Pty:
		if !h.pty {
			return connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no terminal: send stdin"))
		}
		return h.write(ctx, in.Pty)
	}
	return connect.NewError(connect.CodeInvalidArgument, errors.New("the request has no input"))
}

// SendInput implements process.ProcessHandler.
func (p processes) SendInput(ctx context.Context, m *process.SendInputRequest) (*process.SendInputResponse, error) {
	h, _, leave, err := p.attached(ctx, m.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	defer leave()
	return &process.SendInputResponse{}, h.input(ctx, m.GetInput())
}

// StreamInput implements process.ProcessHandler.
func (p processes) StreamInput(ctx context.Context, in *connect.ClientStream[process.StreamInputRequest]) (*process.StreamInputResponse, error) {
	var h *hub
	for in.Receive() {
		switch m := in.Msg().GetEvent().(type) {
		case *process.StreamInputRequest_Start:
			if h != nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the stream selects two processes"))
			}
			var leave func()
			var err error
			if h, _, leave, err = p.attached(ctx, m.Start.GetProcess(), false); err != nil {
				return nil, err
			}
			defer leave()
		case *process.StreamInputRequest_Data:
			if h == nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the stream selects no process first"))
			}
			if err := h.input(ctx, m.Data.GetInput()); err != nil {
				return nil, err
			}
		}
	}
	return &process.StreamInputResponse{}, in.Err()
}

// SendSignal implements process.ProcessHandler.
func (p processes) SendSignal(ctx context.Context, m *process.SendSignalRequest) (*process.SendSignalResponse, error) {
	if m.Signal != process.Signal_SIGNAL_SIGKILL && m.Signal != process.Signal_SIGNAL_SIGTERM {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the signal is neither SIGKILL nor SIGTERM"))
	}
	c, err := p.agent(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	have, err := p.selected(ctx, c, m.GetProcess())
	if err != nil {
		return nil, err
	}
	if have.Exit != nil {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("the process has ended"))
	}
	return &process.SendSignalResponse{}, c.Kill(ctx, have.ID, int(m.Signal))
}

// CloseStdin implements process.ProcessHandler.
func (p processes) CloseStdin(ctx context.Context, m *process.CloseStdinRequest) (*process.CloseStdinResponse, error) {
	h, _, leave, err := p.attached(ctx, m.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	defer leave()
	if h.pty {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has a terminal: send it Ctrl+D"))
	}
	h.closeStdin()
	return &process.CloseStdinResponse{}, nil
}
