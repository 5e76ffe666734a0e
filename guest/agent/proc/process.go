package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agent/poll"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Limits of the processes that the agent keeps account of.
const (
	maxProcesses   = 1024      // running or kept
	maxExitedKept  = 64        // detached ones that have ended; the oldest are forgotten first
	maxArgs        = 4096      // elements of argv and of the environment each
	maxArgBytes    = 1 << 20   // of argv and environment together
	attachedOutput = 256 << 10 // output held for a process that is not detached
	minOutputLimit = 128 << 10 // large enough that acknowledgements keep pace
	maxListedArgv  = 4 << 10   // bytes of argv in a List answer
	maxTimeout     = 365 * 24 * time.Hour
)

// Exit codes as POSIX shells give them (XCU 2.8.2).
const (
	codeNotExecutable = 126
	codeNotFound      = 127
	codeSignal        = 128
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Process is a command that the agent has started.
type Process struct {
	id      string
	pid     int
	argv    []string
	pty     bool
	detach  bool
	started time.Time
	out     *Output
	input   *poll.File // write end of stdin, or the terminal; nil when stdin is /dev/null
	master  *poll.File // the terminal, when there is one
	timer   *time.Timer

	exited chan struct{}     // closed when exit is set and all output is in out
	exit   *agentpb.ExecExit // valid once exited is closed

	mu       sync.Mutex
	timedOut bool
	forget   bool     // remove it from the table once it has ended
	session  *session // the attached session, or nil

	inputMu sync.Mutex // held while stdin is written; taken after mu
}

// Table holds the processes by id.
type Table struct {
	reaper *reaper
	// Settle is called before the host learns that a process has ended.
	Settle func()

	mu     sync.Mutex
	byID   map[string]*Process // nil while it is being started
	exited []*Process          // kept processes that have ended, oldest first
	nextID uint64
	closed bool           // no process starts any more
	starts sync.WaitGroup // starts under way
	wg     sync.WaitGroup // goroutines of processes
}

// NewTable makes an empty table. With init set, its reaper also collects orphans, once Reap is called.
func NewTable(init bool) *Table {
	return &Table{reaper: newReaper(init), byID: make(map[string]*Process)}
}

// Reap begins to collect orphans. It is called before the first process starts.
func (t *Table) Reap() {
	t.reaper.mu.Lock()
	defer t.reaper.mu.Unlock()
	t.reaper.run()
}

// Signal sends a signal to the process's group. It returns ESRCH if the process has ended.
func (t *Table) Signal(p *Process, sig syscall.Signal) error { return t.reaper.signal(p.pid, sig) }

// EndMachine, as PID 1, ends all other processes of the machine: SIGTERM, up to grace to comply, then SIGKILL.
func (t *Table) EndMachine(grace time.Duration) { t.reaper.endAll(grace) }

// startError is the error of a command that could not be started for a reason that a shell reports with an exit
// code.
type startError struct {
	code int32
	err  error
}

func (e *startError) Error() string { return e.err.Error() }

func (e *startError) Unwrap() error { return e.err }

// Done is closed when the process has ended and all its output is in.
func (p *Process) Done() <-chan struct{} { return p.exited }

// Exit returns how the process has ended. It is valid once Done is closed.
func (p *Process) Exit() *agentpb.ExecExit { return p.exit }

// PID returns the process's id in the kernel.
func (p *Process) PID() int { return p.pid }

// KeepNewest keeps the newest output. It is for a process without a reader.
func (p *Process) KeepNewest() { p.out.detach(kept) }

// DropOutput discards all output.
func (p *Process) DropOutput() { p.out.detach(dropped) }

// StartOptions say what the process's message does not.
type StartOptions struct {
	// Path is the program; if empty, Start looks argv[0] up.
	Path string
	// Out receives the output; nil makes a new one.
	Out *Output
}

// Start starts a command. The error is a *startError or a status.
func (t *Table) Start(m *agentpb.ExecStart) (*Process, error) {
	return t.StartWith(m, StartOptions{})
}

// StartWith is Start with options.
func (t *Table) StartWith(m *agentpb.ExecStart, o StartOptions) (*Process, error) {
	if err := CheckStart(m); err != nil {
		return nil, err
	}
	a, err := lookupAccount("/etc", m.User)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "%v", err)
	}
	path := o.Path
	if m.Login || m.Subsystem != "" {
		if a, path, err = login("/etc", m, a); err != nil {
			return nil, err
		}
	}
	env := environment(m, a)
	if err := checkDir(m.Cwd); err != nil {
		return nil, err
	}
	if path == "" {
		if path, err = lookPath(m.Argv[0], env, m.Cwd); err != nil {
			return nil, err
		}
	}
	p := &Process{
		argv:    m.Argv,
		pty:     m.Pty != nil,
		detach:  m.Detach,
		started: time.Now(),
		out:     o.Out,
		exited:  make(chan struct{}),
	}
	if p.out == nil {
		p.out = newOutput(outputLimit(m), m.Detach)
		p.out.hold = m.HoldOutput
	}
	if err := t.reserve(p, m.Id); err != nil {
		return nil, err
	}
	defer t.starts.Done()
	if err := t.launch(p, path, env, m, a); err != nil {
		t.mu.Lock()
		delete(t.byID, p.id)
		t.mu.Unlock()
		return nil, err
	}
	return p, nil
}

// CheckStart refuses a command that cannot or must not be started.
func CheckStart(m *agentpb.ExecStart) error {
	bad := func(format string, args ...any) error { return status.Errorf(codes.InvalidArgument, format, args...) }
	switch {
	case m.Subsystem != "":
		if m.Login || len(m.Argv) > 0 || m.Pty != nil {
			return bad("a subsystem has no command, no login shell and no terminal")
		}
	case m.Login:
		if len(m.Argv) > 1 {
			return bad("%d commands for a login shell, at most one", len(m.Argv))
		}
	case len(m.Argv) == 0 || m.Argv[0] == "":
		return bad("argv is empty")
	}
	if len(m.Argv) > maxArgs || len(m.Env) > maxArgs {
		return bad("%d arguments and %d variables, at most %d each", len(m.Argv), len(m.Env), maxArgs)
	}
	total := 0
	for _, list := range [][]string{m.Argv, m.Env} {
		for _, s := range list {
			if strings.IndexByte(s, 0) >= 0 {
				return bad("an argument or variable contains a zero byte")
			}
			total += len(s) + 1
		}
	}
	switch {
	case total > maxArgBytes:
		return bad("arguments and environment of %d bytes, at most %d", total, maxArgBytes)
	case m.Cwd != "" && !filepath.IsAbs(m.Cwd) || len(m.Cwd) > agentpb.MaxPath || strings.IndexByte(m.Cwd, 0) >= 0:
		return bad("working directory %q is not an absolute path", m.Cwd)
	case m.TimeoutNanos < 0 || m.TimeoutNanos > int64(maxTimeout):
		return bad("timeout of %d ns is out of range", m.TimeoutNanos)
	case len(m.GetPty().GetModes()) > agentpb.MaxTerminalModes:
		return bad("terminal modes of %d bytes, at most %d", len(m.Pty.Modes), agentpb.MaxTerminalModes)
	case m.Changes && m.Detach:
		return bad("changes are told of a command with a connection, not of a detached one")
	case m.HoldOutput && !m.Detach:
		return bad("output is held for a detached process alone")
	case len(m.Id) > agentpb.MaxID:
		return bad("id of %d bytes, at most %d", len(m.Id), agentpb.MaxID)
	}
	return nil
}

// checkDir returns an error of its own for a missing working directory, which exec reports as a missing command.
func checkDir(dir string) error {
	if dir == "" || dir == "/" {
		return nil
	}
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	if err != nil {
		return status.Errorf(codes.InvalidArgument, "working directory %s: %v", dir, err)
	}
	return nil
}

func outputLimit(m *agentpb.ExecStart) int {
	if !m.Detach {
		return attachedOutput
	}
	if m.OutputLimit == 0 {
		return agentpb.DefaultOutputLimit
	}
	return int(min(max(m.OutputLimit, minOutputLimit), agentpb.MaxOutputLimit))
}

// inherited are variables that the kernel may have passed to init for all programs. They say which features of the
// CPU programs must not use.
var inherited = []string{"GODEBUG", "GLIBC_TUNABLES", "OPENSSL_ia32cap"}

// environment returns the process's environment: its own variables over a base that names the account.
func environment(m *agentpb.ExecStart, a account) []string {
	if m.ReplaceEnv {
		return m.Env
	}
	env := []string{"PATH=" + defaultPath, "HOME=" + a.home, "USER=" + a.name, "LOGNAME=" + a.name, "SHELL=" + a.shell}
	for _, key := range inherited {
		if v, ok := os.LookupEnv(key); ok {
			env = append(env, key+"="+v)
		}
	}
	if m.Pty != nil {
		term := m.Pty.Term
		if term == "" {
			term = "xterm"
		}
		env = append(env, "TERM="+term)
	}
	for _, kv := range m.Env {
		key, _, _ := strings.Cut(kv, "=")
		key += "="
		if i := slices.IndexFunc(env, func(have string) bool { return strings.HasPrefix(have, key) }); i >= 0 {
			env[i] = kv
		} else {
			env = append(env, kv)
		}
	}
	return env
}

// lookPath finds the command as execvp(3) does.
func lookPath(name string, env []string, cwd string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil // execve(2) itself says what is wrong
	}
	dirs := defaultPath
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			dirs = v
		}
	}
	found := error(nil)
	for _, dir := range filepath.SplitList(dirs) {
		if dir == "" {
			dir = "."
		}
		path := dir + "/" + name
		probe := path
		if !filepath.IsAbs(dir) {
			probe = filepath.Join("/", cwd, path)
		}
		var st unix.Stat_t
		if errno := rawStat(probe, &st); errno != 0 || st.Mode&unix.S_IFMT == unix.S_IFDIR {
			continue
		}
		if st.Mode&0o111 != 0 {
			return probe, nil
		}
		found = unix.EACCES
	}
	if found != nil {
		return "", &startError{codeNotExecutable, fmt.Errorf("%s: %w", name, found)}
	}
	return "", &startError{codeNotFound, fmt.Errorf("%s: command not found", name)}
}

// reserve enters p under an id of its own, so that no other start can use it.
func (t *Table) reserve(p *Process, id string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return ErrStopping
	}
	if len(t.byID) >= maxProcesses {
		return status.Errorf(codes.ResourceExhausted, "%d processes are known, the limit", len(t.byID))
	}
	if id == "" {
		for {
			t.nextID++
			id = "p" + strconv.FormatUint(t.nextID, 10)
			if _, taken := t.byID[id]; !taken {
				break
			}
		}
	} else if _, taken := t.byID[id]; taken {
		return status.Errorf(codes.AlreadyExists, "a process with id %q exists", id)
	}
	p.id = id
	t.byID[id] = nil
	t.starts.Add(1)
	return nil
}

// forget removes p, which has ended, from the table.
func (t *Table) forget(p *Process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byID[p.id] == p {
		delete(t.byID, p.id)
	}
	if i := slices.Index(t.exited, p); i >= 0 {
		t.exited = slices.Delete(t.exited, i, i+1)
	}
}

// all returns the started processes.
func (t *Table) all() []*Process {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Collect(maps.Values(t.byID)), func(p *Process) bool { return p == nil })
}

// get returns the process with that id.
func (t *Table) get(id string) (*Process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.byID[id]
	if p == nil {
		return nil, status.Errorf(codes.NotFound, "no process with id %q", id)
	}
	return p, nil
}

// childFiles are the descriptors that a process starts with, and our ends.
//
// Up to the fork they are made without waking the scheduler's monitor thread. Once awake, it looks for blocked
// threads every 20 us during the fork, and in a slow guest that takes the child's time.
type childFiles struct {
	child [3]int // the child's stdin, stdout, stderr
	ours  [3]int // our ends of them; -1 for none
	// Once the process has started, our ends are on the poller.
	input *poll.File   // nil for /dev/null
	outs  []*poll.File // one for a terminal, or stdout and stderr
}

// closeAll closes each of the given descriptors once.
func closeAll(fds *[3]int) {
	for i, fd := range fds {
		if fd >= 0 && !slices.Contains(fds[:i], fd) {
			unix.Close(fd)
		}
	}
	*fds = [3]int{-1, -1, -1}
}

// close closes everything, for a process that was not started.
func (c *childFiles) close() {
	closeAll(&c.child)
	closeAll(&c.ours)
}

// openFiles makes the terminal or the pipes.
func openFiles(m *agentpb.ExecStart, a account) (*childFiles, error) {
	c := &childFiles{child: [3]int{-1, -1, -1}, ours: [3]int{-1, -1, -1}}
	if m.Pty != nil {
		master, slave, err := openPty(m.Pty, a)
		if err != nil {
			return nil, err
		}
		c.child = [3]int{slave, slave, slave}
		c.ours[0] = master
		return c, nil
	}
	for i := range c.child {
		var err error
		switch {
		case i > 0:
			c.ours[i], c.child[i], err = pipe()
		case m.NoStdin:
			c.child[0], err = devNull()
		default:
			c.child[0], c.ours[0], err = pipe()
		}
		if err == nil && c.ours[i] >= 0 {
			err = setNonblock(c.ours[i])
		}
		if err != nil {
			c.close()
			return nil, fmt.Errorf("make the pipes of a process: %w", err)
		}
	}
	return c, nil
}

// devNull returns a copy of a descriptor of /dev/null. It opens /dev/null once.
func devNull() (int, error) {
	fd, err := openNull()
	if err != nil {
		return -1, err
	}
	dup, _, errno := unix.RawSyscall(unix.SYS_FCNTL, uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if errno != 0 {
		return -1, errno
	}
	return int(dup), nil
}

var openNull = sync.OnceValues(func() (int, error) {
	return unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
})

// pipe makes a pipe. Both its ends block, as programs expect.
func pipe() (r, w int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil { // a raw call in this package
		return -1, -1, err
	}
	return fds[0], fds[1], nil
}

// setNonblock makes an end of a fresh pipe non-blocking.
func setNonblock(fd int) error {
	_, _, errno := unix.RawSyscall(unix.SYS_FCNTL, uintptr(fd), unix.F_SETFL, unix.O_NONBLOCK)
	if errno != 0 {
		return errno
	}
	return nil
}

// poll closes the child's ends and puts ours on the poller.
func (c *childFiles) poll() error {
	closeAll(&c.child)
	var files [3]*poll.File
	var err error
	for i, fd := range c.ours {
		if fd >= 0 && err == nil {
			files[i], err = poll.New(fd, "stdio")
			c.ours[i] = -1 // the file owns it now
		}
	}
	if err != nil {
		closeAll(&c.ours)
		for _, f := range files {
			if f != nil {
				f.Close()
			}
		}
		return err
	}
	c.input = files[0]
	if c.outs = files[1:]; files[1] == nil {
		c.outs = files[:1] // a terminal
	}
	return nil
}

// launch starts the process and the goroutines that serve it.
func (t *Table) launch(p *Process, path string, env []string, m *agentpb.ExecStart, a account) error {
	files, err := openFiles(m, a)
	if err != nil {
		return status.Errorf(codes.ResourceExhausted, "%v", err)
	}
	cwd := m.Cwd
	if cwd == "" {
		cwd = "/"
	}
	attr := &syscall.ProcAttr{
		Dir:   cwd,
		Env:   env,
		Files: []uintptr{uintptr(files.child[0]), uintptr(files.child[1]), uintptr(files.child[2])},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: p.pty},
	}
	if m.User != "" {
		attr.Sys.Credential = &syscall.Credential{Uid: a.uid, Gid: a.gid, Groups: a.groups}
	}
	pid, ended, err := t.reaper.start(path, m.Argv, attr)
	if err != nil {
		files.close()
		return startFailure(path, err)
	}
	if err := files.poll(); err != nil {
		_ = t.reaper.signal(pid, syscall.SIGKILL)
		return status.Errorf(codes.ResourceExhausted, "poll the streams of %s: %v", path, err)
	}
	p.pid, p.input = pid, files.input
	if p.pty {
		p.master = files.input
	}
	t.mu.Lock()
	t.byID[p.id] = p
	t.mu.Unlock()
	if m.TimeoutNanos > 0 {
		p.timer = time.AfterFunc(time.Duration(m.TimeoutNanos), func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.timedOut = t.reaper.signal(p.pid, syscall.SIGKILL) == nil
		})
	}
	pumps := make([]*pump, len(files.outs))
	for i, f := range files.outs {
		pumps[i] = &pump{f: f, out: p.out, stderr: i == 1, drained: make(chan struct{})}
		t.wg.Go(pumps[i].run)
	}
	t.wg.Go(func() { t.await(p, pumps, ended) })
	return nil
}

// startFailure turns the error of a fork and exec into what a shell would say.
func startFailure(path string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG):
		return &startError{codeNotFound, fmt.Errorf("%s: %w", path, err)}
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		return status.Errorf(codes.ResourceExhausted, "start %s: %v", path, err)
	}
	return &startError{codeNotExecutable, fmt.Errorf("%s: %w", path, err)}
}

// await waits for the process to end, gathers what it has written by then, and publishes its exit.
func (t *Table) await(p *Process, pumps []*pump, ended <-chan waitStatus) {
	ws := <-ended
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, pm := range pumps {
		pm.processEnded()
	}
	for _, pm := range pumps {
		<-pm.drained
	}
	if p.input != nil && p.input != p.master {
		p.input.Close()
	}
	p.mu.Lock()
	timedOut, forget := p.timedOut, p.forget
	p.mu.Unlock()
	p.exit = exitOf(ws, timedOut)
	p.out.finish()
	close(p.exited)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !p.detach || forget {
		delete(t.byID, p.id)
		return
	}
	t.exited = append(t.exited, p)
	if len(t.exited) > maxExitedKept {
		if old := t.exited[0]; t.byID[old.id] == old {
			delete(t.byID, old.id)
		}
		t.exited = slices.Delete(t.exited, 0, 1)
	}
}

func exitOf(ws waitStatus, timedOut bool) *agentpb.ExecExit {
	e := &agentpb.ExecExit{
		TimedOut:    timedOut,
		UserNanos:   ws.usage.Utime.Nano(),
		SystemNanos: ws.usage.Stime.Nano(),
		MaxRssBytes: ws.usage.Maxrss << 10,
	}
	if ws.status.Signaled() {
		e.Signal = int32(ws.status.Signal())
		e.Code = codeSignal + e.Signal
		e.CoreDumped = ws.status.CoreDump()
	} else {
		e.Code = int32(ws.status.ExitStatus())
	}
	return e
}

// pump moves a process's output into its Output. When the process has ended, the pump drains the pipe and closes
// drained. From then on it discards what surviving children write, so that they neither block nor get SIGPIPE.
type pump struct {
	f       *poll.File
	out     *Output
	stderr  bool
	drained chan struct{}
}

const (
	firstRead = 4 << 10 // bytes of the first read buffer, doubled when it fills
	// maxDrain bounds what pump reads after the end, in bytes. It is the most that a pipe can hold
	// (fs.pipe-max-size).
	maxDrain = 1 << 20
)

func (pm *pump) run() {
	defer pm.f.Close()
	buf := make([]byte, firstRead)
	for {
		n, err := pm.f.Read(buf)
		if n > 0 {
			pm.out.Write(pm.stderr, buf[:n])
			if n == len(buf) && n < agentpb.MaxChunk {
				buf = make([]byte, 2*n)
			}
		}
		if err == nil {
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		close(pm.drained)
		return
	}
	for total := 0; total < maxDrain; {
		n, err := pm.f.ReadNow(buf)
		if err != nil {
			break // EAGAIN: empty; or the end
		}
		pm.out.Write(pm.stderr, buf[:n])
		total += n
	}
	close(pm.drained)
	if pm.f.SetReadDeadline(time.Time{}) != nil {
		return
	}
	for {
		if _, err := pm.f.Read(buf); err != nil {
			return
		}
	}
}

// processEnded makes run stop waiting for more.
func (pm *pump) processEnded() {
	_ = pm.f.SetReadDeadline(time.Unix(1, 0))
}

// EndAll kills every process that the agent has started and waits for them. No process starts from then on. EndAll
// also waits for starts under way and kills what they start: a service may be about to restart.
func (t *Table) EndAll() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.starts.Wait()
	all := t.all()
	for _, p := range all {
		p.out.detach(dropped)
		_ = t.reaper.signal(p.pid, syscall.SIGKILL)
	}
	for _, p := range all {
		<-p.exited
	}
	t.reaper.stop()
}

// Problem returns the text of an error, without its code for the host.
func Problem(err error) string {
	if st, ok := status.FromError(err); ok {
		return st.Message()
	}
	return err.Error()
}

// ErrStopping means that no process starts any more.
var ErrStopping = status.Error(codes.Unavailable, "the machine is being stopped")

// LastOutput returns the end of the process's output, at most n bytes.
func (p *Process) LastOutput(n int) string {
	_, end := p.out.Bounds()
	buf := make([]byte, n)
	k, _, _ := p.out.Look(end-min(end, uint64(n)), buf)
	return strings.ToValidUTF8(strings.TrimSpace(string(buf[:k])), "?")
}

// AwaitOutput waits until the output of a process without a reader begins with want. If it does not, the error is
// io.EOF, and said is the output, at most the given number of bytes.
func (p *Process) AwaitOutput(ctx context.Context, want string, most int) (said string, err error) {
	_, reader := p.out.attach(0)
	buf := make([]byte, most)
	n := 0
	for {
		k, _, _, ended := p.out.read(reader, buf[n:])
		n += k
		switch {
		case strings.HasPrefix(string(buf[:n]), want):
			return "", nil
		case k > 0 && n < len(buf):
			continue
		case ended || n == len(buf):
			return strings.ToValidUTF8(strings.TrimSpace(string(buf[:n])), "?"), io.EOF
		}
		select {
		case <-p.out.readable:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}
