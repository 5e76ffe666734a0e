package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/log"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agent/capture"
	"github.com/drowse-vm/drowse/guest/agent/files"
	"github.com/drowse-vm/drowse/guest/agent/machine"
	"github.com/drowse-vm/drowse/guest/agent/proc"
	"github.com/drowse-vm/drowse/guest/agent/service"
	"github.com/drowse-vm/drowse/guest/agent/upper"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Config describes an agent's surroundings.
type Config struct {
	// Version is what Ping answers.
	Version string
	// Init is set if the agent is PID 1: it reaps orphans and stops the machine.
	Init bool
	// Machine is the machine that the agent changes. It is required.
	Machine machine.Machine
	// Ports are where Handover meets the VMM; nil means the machine's own ports.
	Ports capture.Ports
	// HookDir holds the executables that Hooks runs; "" is DefaultHookDir.
	HookDir string
	// ReportHooks, when set, is called when hooks have appeared or the last one has gone. It returns when the host
	// knows.
	ReportHooks func(present bool) error
	// ReportService, when set, is called with each event of a service (agentpb.ServiceEvent), one call at a time.
	// It returns when the host knows.
	ReportService func(line string) error
	// AliveInterval is the least time between two checks of a service that is ready; 0 means 10 s.
	AliveInterval time.Duration
	// Disk opens the directories of the root's overlay; nil means upper.Open.
	Disk func() (*upper.Tree, error)
}

// Server is the agent's service. Create it with New; Serve and Close may be
// called from any goroutine.
type Server struct {
	cfg Config
	rpc *ttrpc.Server

	// The methods of these implement agentpb.AgentService.
	*proc.Table
	*service.Services
	*capture.Standby
	*files.Files

	forwards forwards
	secrets  secretServer
	records  atomic.Int32 // commands whose changes are recorded

	stopping sync.Once
	conns    connections
}

var _ agentpb.AgentService = (*Server)(nil)

// New creates an agent.
func New(cfg Config) (*Server, error) {
	if cfg.Machine == nil {
		return nil, errors.New("agent: no machine to serve")
	}
	if cfg.HookDir == "" {
		cfg.HookDir = capture.DefaultHookDir
	}
	if cfg.Disk == nil {
		cfg.Disk = upper.Open
	}
	if cfg.Ports == nil {
		cfg.Ports = &capture.IOPorts{}
	}
	// ttrpc reports broken connections to a global logger. Here its output would go to the guest's console, where
	// it has no reader.
	quietOnce.Do(func() { log.L.Logger.SetOutput(io.Discard) })
	rpc, err := ttrpc.NewServer(ttrpc.WithUnaryServerInterceptor(safely))
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	procs := proc.NewTable(cfg.Init)
	s := &Server{cfg: cfg, Table: procs, rpc: rpc}
	s.Services = service.New(procs, cfg.AliveInterval, cfg.ReportService)
	s.Standby = capture.New(capture.Config{
		Machine: cfg.Machine, Ports: cfg.Ports, HookDir: cfg.HookDir, Procs: procs, Woken: s.Services.Woken, Report: cfg.ReportHooks,
	})
	s.Files = files.New(s.Standby.Settle, s.Standby.Trim)
	agentpb.RegisterAgentService(rpc, s)
	procs.Settle = s.Standby.Settle
	if cfg.Init {
		procs.Reap()
	}
	return s, nil
}

var quietOnce sync.Once

// safely turns a panic of a method into an error, and an error of the system into a status of the right kind.
func safely(ctx context.Context, unmarshal ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (_ any, err error) {
	defer recovered(&err)
	return method(ctx, unmarshal)
}

// recovered, deferred, turns a panic into an error: one bad request must not
// take the machine's init down. It also gives errors their codes.
func recovered(err *error) {
	if r := recover(); r != nil {
		*err = status.Errorf(codes.Internal, "the agent failed: %v", r)
		return
	}
	*err = toStatus(*err)
}

// toStatus gives an error the code by which the host recognises it.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	code := codes.Unknown
	switch {
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		code = codes.NotFound
	case errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EROFS), errors.Is(err, syscall.ETXTBSY):
		code = codes.FailedPrecondition
	case errors.Is(err, os.ErrExist):
		code = codes.AlreadyExists
	case errors.Is(err, os.ErrPermission):
		code = codes.PermissionDenied
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOMEM):
		code = codes.ResourceExhausted
	case errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP):
		code = codes.InvalidArgument
	}
	return status.Error(code, err.Error())
}

// Serve serves connections from l until ctx ends or Close is called, and closes l. A process that is not detached
// ends with its connection.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, s.Close)
	defer stop()
	// ttrpc does not see the end of a connection on which it stops to read because it is closed.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	err := s.rpc.Serve(ctx, &trackedListener{Listener: l, s: s})
	if errors.Is(err, ttrpc.ErrServerClosed) {
		return nil
	}
	return err
}

// Close stops serving and ends every process.
func (s *Server) Close() {
	if !s.conns.close() {
		return
	}
	s.rpc.Close()
	s.forwards.close()
	s.Files.Close()
	s.Standby.Close()
	s.Services.Retire(false)
	s.Table.EndAll()
	s.Services.Retire(true)
}

// maxConnections bounds the connections served at the same time. The agent closes more.
const maxConnections = 1024

// trackedListener lets Close close connections that are in use, which
// ttrpc.Server.Close leaves open.
type trackedListener struct {
	net.Listener
	s *Server
}

func (l *trackedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.s.conns.add(c, maxConnections) == agentpb.CodeOK {
			return &trackedConn{Conn: c, s: l.s}, nil
		}
		c.Close()
	}
}

type trackedConn struct {
	net.Conn
	s *Server
}

// Read makes every broken connection end alike: ttrpc keeps a connection whose error it does not know, and with it
// the processes that should end.
func (c *trackedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		err = io.EOF
	}
	return n, err
}

func (c *trackedConn) Close() error { return c.s.conns.remove(c.Conn) }

// connections are the connections that are served. The zero value is ready.
type connections struct {
	mu     sync.Mutex
	closed bool
	open   map[net.Conn]struct{}
}

// add adds c. It returns CodeLimit at the limit, and CodeFailed after close.
func (s *connections) add(c net.Conn, most int) agentpb.ForwardCode {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return agentpb.CodeFailed
	case len(s.open) >= most:
		return agentpb.CodeLimit
	case s.open == nil:
		s.open = make(map[net.Conn]struct{})
	}
	s.open[c] = struct{}{}
	return agentpb.CodeOK
}

// remove closes and removes c.
func (s *connections) remove(c net.Conn) error {
	s.mu.Lock()
	delete(s.open, c)
	s.mu.Unlock()
	return c.Close()
}

// close closes all connections, and reports whether it is the first call.
func (s *connections) close() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := !s.closed
	s.closed = true
	for c := range s.open {
		c.Close()
	}
	return first
}

// Transfer implements agentpb.AgentService.
func (s *Server) Transfer(ctx context.Context, stream agentpb.Agent_TransferServer) (err error) {
	defer recovered(&err)
	return s.Files.Transfer(ctx, stream)
}

// Watch implements agentpb.AgentService.
func (s *Server) Watch(ctx context.Context, stream agentpb.Agent_WatchServer) (err error) {
	defer recovered(&err)
	return s.Files.Watch(ctx, stream)
}

// Ping implements agentpb.AgentService.
func (s *Server) Ping(context.Context, *agentpb.PingRequest) (*agentpb.PingResponse, error) {
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return nil, fmt.Errorf("read the uptime: %w", err)
	}
	return &agentpb.PingResponse{
		Version:     s.cfg.Version,
		BootId:      s.Standby.BootID(),
		UptimeNanos: up.Nano(),
		Pid:         int32(os.Getpid()),
		WallNanos:   time.Now().UnixNano(),
	}, nil
}
