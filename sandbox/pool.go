package sandbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// MaxPool is the most processes that a Pool keeps ready.
const MaxPool = 256

// PoolOptions say what a Pool keeps.
type PoolOptions struct {
	// Processes is how many are ready: 1 to MaxPool.
	Processes int
	// Shape is what VM they are made for. Others can use them as well, and save only the
	// start of the process.
	Shape Shape
	// Log gets what goes wrong; nil discards it.
	Log *slog.Logger
}

// Pool keeps processes ready to be those of VMs that are to be woken, restored or
// forked, each with what KVM has of a machine. A Launcher that has a pool takes a process
// from it if one is ready, and starts one if not. The next is made when no VM of the pool's is
// being started, since making it would be in their way. Processes that nobody has taken end with the
// one that made them; those that were taken do not. The methods may be called from any
// goroutine.
type Pool struct {
	launcher Launcher
	dir      string
	o        PoolOptions
	log      *slog.Logger

	stop context.CancelFunc
	done sync.WaitGroup
	// want is told that something may be to do.
	want chan struct{}

	mu    sync.Mutex
	ready []*standby
	// starting are VMs that are being started with processes of the pool.
	starting int
	closed   bool
	full     *sync.Cond // ready has changed, or making them has failed
	failure  error      // of the last attempt
}

// standby is a process that waits for an order.
type standby struct {
	cmd    *exec.Cmd
	conn   *net.UnixConn
	exited chan struct{} // closed when it has ended
	said   *tail         // what it has said on its standard error
}

// The words on the socket between a pool and one of its processes, which is of type
// SOCK_SEQPACKET: the process sends poolReady once, gets an order, as JSON with
// files (its log, where its Report goes, and the image of a fork if it is one), and sends
// poolTaken before it does anything for it.
const (
	poolReady = "ready"
	poolTaken = "taken"
	// maxOrder bounds an order, in bytes.
	maxOrder      = 64 << 10
	maxOrderFiles = 3
)

// NewPool begins to make processes, which Close ends.
func (s *Store) NewPool(l Launcher, o PoolOptions) (*Pool, error) {
	if o.Processes < 1 || o.Processes > MaxPool {
		return nil, fmt.Errorf("%w: a pool of %d processes: use 1 to %d", ErrSpec, o.Processes, MaxPool)
	}
	if err := o.Shape.check(); err != nil {
		return nil, err
	}
	if len(l.Command) == 0 {
		return nil, errors.New("starting a pool: no program is configured for the process of a VM")
	}
	p := &Pool{launcher: l, dir: s.dir, o: o, log: o.Log, want: make(chan struct{}, 1)}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	p.full = sync.NewCond(&p.mu)
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	p.done.Go(func() { p.keep(ctx) })
	p.wake()
	return p, nil
}

// Launcher is the one that the pool was made with, with the pool.
func (p *Pool) Launcher() Launcher {
	l := p.launcher
	l.Pool = p
	return l
}

// Wait returns when all processes are ready, or with why one could not be made or the error of ctx.
func (p *Pool) Wait(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.full.Broadcast()
	})
	defer stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.ready) < p.o.Processes {
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("waiting for a pool: %w", ctx.Err())
		case p.closed:
			return fmt.Errorf("waiting for a pool: %w", net.ErrClosed)
		case p.failure != nil:
			return p.failure
		}
		p.full.Wait()
	}
	return nil
}

// PIDs are the processes that are ready.
func (p *Pool) PIDs() (pids []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.ready {
		pids = append(pids, s.cmd.Process.Pid)
	}
	return pids
}

// Close ends the processes that nobody has taken, and returns when they are gone.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed = true
	ready := p.ready
	p.ready = nil
	p.full.Broadcast()
	p.mu.Unlock()
	p.stop()
	p.done.Wait()
	for _, s := range ready {
		s.end()
	}
	return nil
}

// wake has the pool look for what there is to do.
func (p *Pool) wake() {
	select {
	case p.want <- struct{}{}:
	default:
	}
}

// How long the pool waits after it could not make a process.
const (
	poolRetry    = time.Second
	poolMaxRetry = time.Minute
)

// keep makes processes.
func (p *Pool) keep(ctx context.Context) {
	retry := poolRetry
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-again:
			again = nil
		case <-p.want:
			if again != nil {
				continue
			}
		}
		for p.short() {
			s, err := p.make(ctx)
			if ctx.Err() != nil {
				if s != nil {
					s.end()
				}
				return
			}
			p.put(s, err)
			if err != nil {
				p.log.Error("making a process for the pool failed", "error", err, "again_in", retry)
				again, retry = time.After(retry), min(2*retry, poolMaxRetry)
				break
			}
			retry = poolRetry
		}
	}
}

// short says whether a process is to be made now.
func (p *Pool) short() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.closed && p.starting == 0 && len(p.ready) < p.o.Processes
}

// put adds a process, or why it could not be made.
func (p *Pool) put(s *standby, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failure = err
	if err == nil && !p.closed {
		p.ready = append(p.ready, s)
		s = nil
	}
	p.full.Broadcast()
	if s != nil {
		go s.end()
	}
}

// make starts a process and waits until it stands by.
func (p *Pool) make(ctx context.Context) (*standby, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making a process for the pool: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "pool")
	defer theirs.Close()
	conn, err := fileConn(os.NewFile(uintptr(fds[0]), "pool"))
	if err != nil {
		return nil, fmt.Errorf("making a process for the pool: %w", err)
	}
	l := p.launcher
	s := &standby{conn: conn, exited: make(chan struct{}), said: &tail{}}
	s.cmd = exec.Command(l.Command[0], append(append([]string(nil), l.Command[1:]...), standbyArgs(p.dir, p.o.Shape)...)...)
	s.cmd.Stdout, s.cmd.Stderr = s.said, s.said
	s.cmd.ExtraFiles = []*os.File{theirs} // poolFD
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := s.cmd.Start(); err != nil {
		conn.Close()
		return nil, fmt.Errorf("making a process for the pool: %w", err)
	}
	theirs.Close()
	go func() {
		_ = s.cmd.Wait() // so that it does not stay a zombie
		close(s.exited)
	}()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	word := make([]byte, len(poolReady)+1)
	n, err := conn.Read(word)
	if err == nil && string(word[:n]) != poolReady {
		err = fmt.Errorf("it says %q", word[:n])
	}
	if err != nil {
		s.end()
		return nil, fmt.Errorf("making a process for the pool: %w: %s", err, s.said.last())
	}
	return s, nil
}

// end ends a process that has no order.
func (s *standby) end() {
	s.conn.Close()
	select {
	case <-s.exited:
		return
	case <-time.After(poolPatience):
	}
	_ = s.cmd.Process.Kill()
	<-s.exited
}

// poolPatience is how long a process has to end by itself.
const poolPatience = 10 * time.Second

// errNoOrder says that a process could not be given an order.
var errNoOrder = errors.New("it takes no order")

// start gives it an order.
func (s *standby) start(ord order, files []*os.File) (*os.Process, <-chan struct{}, error) {
	if err := sendOrder(s.conn, ord, files...); err != nil {
		_ = s.cmd.Process.Kill()
		return nil, nil, fmt.Errorf("%w: %w", errNoOrder, err)
	}
	return s.cmd.Process, s.exited, nil
}

// took says whether a process that has ended has taken the order. Only then may anything
// of the VM have changed.
func (s *standby) took() bool {
	word := make([]byte, len(poolTaken)+1)
	n, err := s.conn.Read(word)
	return err == nil && string(word[:n]) == poolTaken
}

// pop takes a process out of the pool; nil if none is ready.
func (p *Pool) pop() *standby {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ready) == 0 {
		return nil
	}
	// The one that has waited least: what it needs is most likely to be in caches.
	s := p.ready[len(p.ready)-1]
	p.ready = p.ready[:len(p.ready)-1]
	return s
}

// starts says that a VM is being started, and started that it is there, or will not be.
// Meanwhile no process is made.
func (p *Pool) starts() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starting++
}

func (p *Pool) started() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starting--
	p.wake()
}

// fileConn makes a file that is a socket a connection, and closes the file.
func fileConn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("a socket of type %T, not a Unix socket", c)
	}
	return uc, nil
}

func sendOrder(c *net.UnixConn, ord order, files ...*os.File) error {
	text, err := json.Marshal(ord)
	if err != nil {
		return err
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	_, _, err = c.WriteMsgUnix(text, unix.UnixRights(fds...), nil)
	return err
}

// receiveOrder returns the order and its files, as poolReady says; io.EOF if there will be none.
func receiveOrder(c *net.UnixConn) (ord order, files []*os.File, err error) {
	text, oob := make([]byte, maxOrder), make([]byte, unix.CmsgSpace(4*maxOrderFiles))
	n, oobn, flags, _, err := c.ReadMsgUnix(text, oob)
	defer func() {
		if err != nil {
			for _, f := range files {
				f.Close()
			}
			files = nil
		}
	}()
	if err != nil {
		return ord, nil, err
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return ord, nil, fmt.Errorf("an order's files: %w", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "order"))
		}
	}
	if n == 0 {
		return ord, files, io.EOF
	}
	if err := json.Unmarshal(text[:n], &ord); err != nil {
		return ord, files, fmt.Errorf("an order: %w", err)
	}
	want := 2
	if ord.Fork {
		want++
	}
	if len(files) != want || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return ord, files, fmt.Errorf("an order with %d files, not %d", len(files), want)
	}
	return ord, files, nil
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const maxTail = 4 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if over := len(t.text) - maxTail; over > 0 {
		t.text = append(t.text[:0], t.text[over:]...)
	}
	return len(p), nil
}

// last is the last line.
func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := bytes.Split(bytes.TrimSpace(t.text), []byte("\n"))
	return string(lines[len(lines)-1])
}
