package fakeguest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"path"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing/fstest"
	"time"

	"github.com/containerd/log"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/flow"
)

// Guest is a guest in memory. Its methods may be called from any goroutine. The fields must not change once it
// serves.
type Guest struct {
	// Commands are programs by the last element of their paths. They come before those of Builtin.
	Commands map[string]Command
	// Changed, if not nil, is called with all files after each change. The change fails with its error.
	Changed func(fstest.MapFS) error
	// Dial, if not nil, connects to what listens in the guest, for guest.Client.Dial. By default nothing listens.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Shutdown, if not nil, is called when the host asks the guest to shut down.
	Shutdown func(reboot bool)

	mu        sync.Mutex // guards what follows; contents of files are replaced, never changed
	files     fstest.MapFS
	bell      chan struct{} // closed by the next change of files; nil if nobody waits for it
	ids       int
	processes map[string]*detached
	services  map[string]*service
	over      bool
	running   sync.WaitGroup // detached processes
	begun     time.Time
}

// New makes a guest with the given files, by paths without the first slash. It adds the usual directories.
func New(files fstest.MapFS) *Guest {
	g := &Guest{files: maps.Clone(files), begun: time.Now()}
	if g.files == nil {
		g.files = fstest.MapFS{}
	}
	for _, dir := range []string{"etc", "home", "root", "run", "tmp", "var"} {
		if g.files[dir] == nil {
			g.files[dir] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
		}
	}
	return g
}

// Serve serves the agent's protocol on ports until they are closed.
func (g *Guest) Serve(p *Ports) error {
	// ttrpc logs broken connections, which every sleep makes, to a global logger.
	quiet.Do(func() { log.L.Logger.SetOutput(io.Discard) })
	server, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(interceptor))
	if err != nil {
		return fmt.Errorf("serving a guest in memory: %w", err)
	}
	agentpb.RegisterAgentService(server, agent{g: g})
	defer g.end()
	defer server.Close()
	if l := p.ports[agentpb.ForwardPort]; l != nil {
		var forwards sync.WaitGroup
		forwards.Go(func() { g.serveForward(l) })
		defer forwards.Wait()
	}
	return server.Serve(context.Background(), p.Port(agentpb.AgentPort))
}

var quiet sync.Once

// Pause blocks all changes of files until the caller calls resume, and returns the files.
func (g *Guest) Pause() (files fstest.MapFS, resume func()) {
	g.mu.Lock()
	return maps.Clone(g.files), sync.OnceFunc(g.mu.Unlock)
}

// Files returns the current files, for package fs. The caller must not change their contents.
func (g *Guest) Files() fstest.MapFS {
	files, resume := g.Pause()
	resume()
	return files
}

// ReadFile returns the content of a file.
func (g *Guest) ReadFile(name string) ([]byte, error) {
	at, err := place(name)
	if err != nil {
		return nil, err
	}
	return g.Files().ReadFile(at)
}

// WriteFile writes a file, and makes missing directories above it.
func (g *Guest) WriteFile(name string, data []byte) error {
	return g.write(&agentpb.WriteFile{Path: name, Parents: true}, data)
}

func (g *Guest) write(m *agentpb.WriteFile, data []byte) error {
	at, err := place(m.Path)
	if err != nil {
		return err
	}
	return g.change(func(files fstest.MapFS) error {
		f := &fstest.MapFile{Mode: fs.FileMode(m.Mode & 0o777), ModTime: time.Now()}
		if was := files[at]; was != nil && !was.Mode.IsDir() {
			if f.Mode == 0 {
				f.Mode = was.Mode
			}
			from := m.Offset
			if m.Append {
				from = int64(len(was.Data))
			}
			if from > 0 {
				whole := make([]byte, max(int64(len(was.Data)), from+int64(len(data))))
				copy(whole, was.Data)
				copy(whole[from:], data)
				data = whole
			}
		}
		if f.Mode == 0 {
			f.Mode = 0o644
		}
		if m.MtimeNanos != 0 {
			f.ModTime = time.Unix(0, m.MtimeNanos)
		}
		f.Data = data
		return put(files, at, f, m.Parents)
	})
}

// change calls f to change files, and then Changed.
func (g *Guest) change(f func(fstest.MapFS) error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := f(g.files); err != nil {
		return err
	}
	if g.bell != nil {
		close(g.bell)
		g.bell = nil
	}
	if g.Changed != nil {
		return g.Changed(g.files)
	}
	return nil
}

// place returns the name in the files for an absolute path.
func place(name string) (string, error) {
	if !path.IsAbs(name) || strings.ContainsRune(name, 0) {
		return "", &fs.PathError{Op: "open", Path: name, Err: syscall.EINVAL}
	}
	if name = path.Clean(name)[1:]; name == "" {
		name = "."
	}
	return name, nil
}

// put puts a file or directory at a name in files.
func put(files fstest.MapFS, at string, f *fstest.MapFile, parents bool) error {
	fail := func(err error) error { return &fs.PathError{Op: "create", Path: "/" + at, Err: err} }
	if fi, err := files.Stat(at); err == nil && fi.IsDir() && !f.Mode.IsDir() {
		return fail(syscall.EISDIR)
	}
	for dir := path.Dir(at); dir != "."; dir = path.Dir(dir) {
		switch above := files[dir]; {
		case above == nil && parents:
			files[dir] = &fstest.MapFile{Mode: fs.ModeDir | 0o755, ModTime: time.Now()}
		case above == nil:
			return fail(fs.ErrNotExist)
		case !above.Mode.IsDir():
			return fail(syscall.ENOTDIR)
		}
	}
	files[at] = f
	return nil
}

// agent implements agentpb.AgentService for a guest. The embedded service is nil: the guest lacks its other methods.
type agent struct {
	agentpb.AgentService
	g *Guest
}

// interceptor answers missing calls like an older agent, and gives errors the codes that the host expects.
func interceptor(ctx context.Context, u ttrpc.Unmarshaler, info *ttrpc.UnaryServerInfo, method ttrpc.Method) (answer any, err error) {
	_, name, _ := strings.Cut(strings.TrimPrefix(info.FullMethod, "/"), "/")
	switch name {
	case "Ping", "Resume", "Stats", "Hooks", "Freeze", "Thaw", "List", "Stat", "ReadDir", "Mkdir", "Remove", "Rename",
		"Shutdown", "Secrets", "Drop", "Kill", "SetService", "StopService", "ListServices", "WaitService", "ServiceLog", "Changes":
		answer, err = method(ctx, u)
		return answer, toStatus(err)
	}
	return nil, status.Errorf(codes.Unimplemented, "a guest in memory has no %s", name)
}

func toStatus(err error) error {
	if _, ok := status.FromError(err); ok {
		return err // or nil
	}
	code := codes.Unknown
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		code = codes.NotFound
	case errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EISDIR):
		code = codes.FailedPrecondition
	case errors.Is(err, fs.ErrExist):
		code = codes.AlreadyExists
	case errors.Is(err, syscall.ENOSPC):
		code = codes.ResourceExhausted
	case errors.Is(err, syscall.EINVAL):
		code = codes.InvalidArgument
	}
	return status.Error(code, err.Error())
}

func (a agent) Ping(context.Context, *agentpb.PingRequest) (*agentpb.PingResponse, error) {
	return &agentpb.PingResponse{Version: "fakeguest", Pid: 1, UptimeNanos: int64(time.Since(a.g.begun)), WallNanos: time.Now().UnixNano()}, nil
}

func (a agent) Resume(_ context.Context, m *agentpb.ResumeRequest) (*agentpb.ResumeResponse, error) {
	if m.NewIdentity {
		return &agentpb.ResumeResponse{}, a.g.WriteFile("/etc/hostname", []byte(m.Hostname+"\n"))
	}
	return &agentpb.ResumeResponse{}, nil
}

func (a agent) Stats(context.Context, *agentpb.StatsRequest) (*agentpb.StatsResponse, error) {
	used := uint64(0)
	for _, f := range a.g.Files() {
		used += uint64(len(f.Data))
	}
	const size = 1 << 30
	return &agentpb.StatsResponse{
		UptimeNanos: int64(time.Since(a.g.begun)), Cpu: &agentpb.CPUTimes{}, Cpus: 1, Tasks: 1,
		Memory:      &agentpb.MemoryUse{Total: size, Free: size - used, Available: size - used},
		FileSystems: []*agentpb.FileSystem{{Path: "/", Type: "memory", Size: size, Free: size - used, Available: size - used}},
	}, nil
}

func (agent) Secrets(context.Context, *agentpb.SecretsRequest) (*agentpb.Empty, error) {
	return &agentpb.Empty{}, nil
}

func (agent) Hooks(context.Context, *agentpb.HooksRequest) (*agentpb.HooksResponse, error) {
	return &agentpb.HooksResponse{}, nil
}

func (agent) Freeze(context.Context, *agentpb.FreezeRequest) (*agentpb.FreezeResponse, error) {
	return &agentpb.FreezeResponse{}, nil
}

func (agent) Thaw(context.Context, *agentpb.ThawRequest) (*agentpb.ThawResponse, error) {
	return &agentpb.ThawResponse{}, nil
}

func (a agent) Shutdown(_ context.Context, m *agentpb.ShutdownRequest) (*agentpb.Empty, error) {
	if a.g.Shutdown != nil {
		a.g.Shutdown(m.Reboot)
	}
	return &agentpb.Empty{}, nil
}

// Exec implements agentpb.AgentService.
func (a agent) Exec(ctx context.Context, stream agentpb.Agent_ExecServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if to := first.GetAttach(); to != nil {
		p, err := a.g.find(to.Id)
		if err != nil {
			return err
		}
		return p.attach(ctx, stream, to.Offset)
	}
	m := first.GetStart()
	if m == nil {
		return status.Error(codes.InvalidArgument, "neither a start nor an attach")
	}
	argv := m.Argv
	if m.Login {
		argv = append([]string{"sh", "-c"}, argv...)
	}
	var run Command
	if len(argv) > 0 {
		if run = a.g.Commands[path.Base(argv[0])]; run == nil {
			run = Builtin[path.Base(argv[0])]
		}
	}
	exit := func(e *agentpb.ExecExit) error {
		return stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Exit{Exit: e}})
	}
	if run == nil {
		return exit(&agentpb.ExecExit{Code: 127, Error: fmt.Sprintf("a guest in memory has no command %q: see Guest.Commands", argv)})
	}
	a.g.mu.Lock()
	a.g.ids++
	id := a.g.ids
	a.g.mu.Unlock()
	if m.Id == "" {
		m.Id = strconv.Itoa(id)
	}
	env := m.Env
	if !m.ReplaceEnv {
		env = append([]string{"PATH=/bin", "HOME=/root"}, env...)
	}
	if m.Detach {
		p, err := a.g.startDetached(m, id, argv, env, run)
		if err != nil {
			return err
		}
		return p.attach(ctx, stream, 0)
	}
	started := &agentpb.ExecStarted{Id: m.Id, Pid: int32(100 + id), Pty: m.Pty != nil}
	if err := stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Started{Started: started}}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if m.TimeoutNanos > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, time.Duration(m.TimeoutNanos))
		defer stop()
	}
	s := &session{stream: stream, sizes: make(chan *agentpb.WindowSize, 1)}
	s.Pipe = flow.NewPipe(ctx, ctx, s.send, func(n uint64) error {
		return stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Ack{Ack: n}})
	})
	if m.NoStdin {
		s.End()
	}
	go func() { cancel(s.receive(m.NoStdin)) }()
	begin := time.Now()
	code := run(ctx, &Process{
		Args: argv, Env: env, Dir: m.Cwd, User: m.User, Guest: a.g, TTY: m.Pty.GetSize(), Resized: s.sizes,
		Stdin: s, Stdout: output{s, false}, Stderr: output{s, m.Pty == nil},
	})
	return exit(exitOf(ctx, code, begin))
}

// signalled is the cause of a command's end: the host sent it a signal.
type signalled int32

func (s signalled) Error() string { return fmt.Sprintf("signal %d", int32(s)) }

// session is one Exec stream. Reading it reads standard input.
type session struct {
	stream agentpb.Agent_ExecServer
	*flow.Pipe
	closed atomic.Bool           // by the host
	signal func(signalled) error // nil: the signal ends the command
	sizes  chan *agentpb.WindowSize

	mu     sync.Mutex // held while output is sent; guards what follows
	stderr bool
	offset uint64
}

// receive handles the host's messages, and returns why the command must end.
func (s *session) receive(closed bool) error {
	for {
		m, err := s.stream.Recv()
		if err != nil {
			return err
		}
		switch m := m.Msg.(type) {
		case *agentpb.ExecRequest_Stdin:
			if closed || !s.Put(m.Stdin) {
				return flow.ErrProtocol
			}
		case *agentpb.ExecRequest_StdinClose:
			if !closed {
				s.closed.Store(true)
				s.End()
				closed = true
			}
		case *agentpb.ExecRequest_Signal:
			if s.signal == nil {
				return signalled(m.Signal)
			}
			if err := s.signal(signalled(m.Signal)); err != nil {
				return err
			}
		case *agentpb.ExecRequest_Resize:
			select {
			case s.sizes <- m.Resize:
			default: // nobody looks, or there is no terminal
			}
		case *agentpb.ExecRequest_Ack:
			if err := s.Ack(m.Ack); err != nil {
				return err
			}
		}
	}
}

// send sends output. The caller holds mu.
func (s *session) send(data []byte) error {
	m := &agentpb.ExecOutput{Stderr: s.stderr, Offset: s.offset, Data: data}
	s.offset += uint64(len(data))
	return s.stream.Send(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Output{Output: m}})
}

// output writes standard output or standard error.
type output struct {
	s      *session
	stderr bool
}

func (o output) Write(p []byte) (n int, err error) {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	o.s.stderr = o.stderr
	return o.s.Pipe.Write(p)
}
