package pool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// MaxSize is the most processes that a Pool keeps ready.
const MaxSize = 256

// Options configure a Pool.
type Options struct {
	// Processes is how many processes it keeps ready: 1 to MaxSize.
	Processes int
	// Shapes are the shapes that processes are made for, each in proportion to its share of the list: 1 to
	// MaxSize. VMs of other shapes can use them as well, and save only the start of the process.
	Shapes []spec.Shape
	// Follow makes the shape of each started VM replace the oldest shape, so the pool adapts to the VMs in use.
	// Shapes may be empty then: the pool begins with the shapes of the VMs that went to sleep last, or with that
	// of a VM whose Spec sets nothing.
	Follow bool
	// Log gets errors; nil discards them.
	Log *slog.Logger
}

// Pool keeps processes ready for VMs that are woken, restored or forked. Each has already set up the KVM part of a
// machine. A Launcher with a pool takes a ready process from it, or starts one if none is ready. The pool makes
// the next one when none of its VMs is being started: making it would slow the start. Unused processes end with
// the process that made them; used ones do not. The methods may be called from any goroutine.
type Pool struct {
	launcher Launcher
	store    *state.Store
	o        Options
	log      *slog.Logger

	stop context.CancelFunc
	done sync.WaitGroup
	// want signals that there may be work.
	want chan struct{}

	mu    sync.Mutex
	ready []*standby
	// shapes are the shapes that processes are wanted for, the oldest first.
	shapes []spec.Shape
	// starting counts VMs that are being started with processes of the pool. calm is until when the pool makes
	// nothing after the last such start.
	starting int
	calm     time.Time
	closed   bool
	full     *sync.Cond // ready has changed, or a process could not be made
	failure  error      // of the last attempt
	// counted holds the counters of Stats.
	counted Stats
}

// Stats are the figures of a Pool since it was made.
type Stats struct {
	// Size is how many processes the pool must keep ready, and Ready how many are ready.
	Size, Ready int
	// Taken counts processes given to VMs that were woken, restored or forked. Missed counts VMs that found none
	// ready and had a process started for them.
	Taken, Missed uint64
	// Failed counts processes that could not be made, or ended while they waited.
	Failed uint64
}

// Stats returns the figures of the pool.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.counted
	out.Size, out.Ready = p.o.Processes, len(p.ready)
	return out
}

// standby is a process that waits for an order.
type standby struct {
	Process
	conn  *net.UnixConn
	said  *control.Tail // the end of its standard error
	pid   int
	shape spec.Shape
	what  program
	own   bool // of no pool, but made for whoever takes it
}

// New starts a pool, which begins to make processes. Close ends it.
func New(s *state.Store, l Launcher, o Options) (*Pool, error) {
	if o.Processes < 1 || o.Processes > MaxSize {
		return nil, fmt.Errorf("%w: a pool of %d processes: use 1 to %d", spec.ErrInvalid, o.Processes, MaxSize)
	}
	if o.Follow && len(o.Shapes) == 0 {
		var err error
		if o.Shapes, err = shapesAsleep(s, o.Processes); err != nil {
			return nil, fmt.Errorf("starting a pool: %w", err)
		}
	}
	if n := len(o.Shapes); n < 1 || n > MaxSize {
		return nil, fmt.Errorf("%w: a pool for VMs of %d shapes: name 1 to %d", spec.ErrInvalid, n, MaxSize)
	}
	for _, shape := range o.Shapes {
		if err := shape.Validate(); err != nil {
			return nil, err
		}
	}
	if len(l.Command) == 0 {
		return nil, errors.New("starting a pool: no program is configured for the process of a VM")
	}
	p := &Pool{launcher: l, store: s, o: o, log: o.Log, want: make(chan struct{}, 1)}
	for i := range o.Processes {
		p.shapes = append(p.shapes, o.Shapes[i%len(o.Shapes)])
	}
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

// shapesAsleep returns the shapes of the VMs that went to sleep last, the latest last. If none sleeps, it returns
// that of a default VM.
func shapesAsleep(s *state.Store, most int) (shapes []spec.Shape, err error) {
	all, err := s.List()
	if err != nil && len(all) == 0 {
		return nil, err // one unreadable record is not an error
	}
	type asleep struct {
		shape spec.Shape
		since time.Time
	}
	var found []asleep
	for _, r := range all {
		// The VM's record was written when it went to sleep.
		if st, err := os.Stat(s.RecordPath(r.Spec.Name)); err == nil && r.Phase == state.Asleep {
			found = append(found, asleep{r.Spec.Shape(), st.ModTime()})
		}
	}
	slices.SortFunc(found, func(a, b asleep) int { return a.since.Compare(b.since) })
	for _, a := range found[max(0, len(found)-most):] {
		shapes = append(shapes, a.shape)
	}
	if len(shapes) == 0 {
		shapes = append(shapes, spec.Shape{MemoryMiB: spec.DefaultMemoryMiB, VCPUs: spec.DefaultVCPUs})
	}
	return shapes, nil
}

// Launcher returns the pool's launcher with the pool set.
func (p *Pool) Launcher() Launcher {
	l := p.launcher
	l.Pool = p
	return l
}

// Wait returns when all processes are ready, a process could not be made, or ctx has ended.
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

// PIDs returns the numbers of the ready processes.
func (p *Pool) PIDs() (pids []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.ready {
		pids = append(pids, s.pid)
	}
	return pids
}

// Close ends the unused processes, and returns when they have ended.
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

// wake makes the pool look for work.
func (p *Pool) wake() {
	select {
	case p.want <- struct{}{}:
	default:
	}
}

// poolCalm is how long the pool makes nothing after a VM has started. The caller who woke the VM uses it now, and the
// guest has much to catch up on: making a process would take a processor from it.
const poolCalm = 250 * time.Millisecond

// How long the pool waits after a failure to make a process.
const (
	poolRetry    = time.Second
	poolMaxRetry = time.Minute
)

// keep makes processes until ctx ends.
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
		for {
			shape, surplus, ok := p.short()
			if !ok {
				break
			}
			if surplus != nil {
				surplus.end()
			}
			s, err := p.make(ctx, shape)
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

// short reports whether a process must be made now, and for which shape. surplus, if not nil, was taken out to
// make room.
func (p *Pool) short() (shape spec.Shape, surplus *standby, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.starting > 0 || time.Now().Before(p.calm) {
		return shape, nil, false
	}
	missing := map[spec.Shape]int{}
	for _, s := range p.shapes {
		missing[s]++
	}
	over := -1
	for i, s := range p.ready {
		if missing[s.shape]--; missing[s.shape] < 0 {
			over = i
		}
	}
	// The shape that was asked for last comes first.
	for _, s := range slices.Backward(p.shapes) {
		if missing[s] > 0 {
			shape, ok = s, true
			break
		}
	}
	if !ok {
		return shape, nil, false
	}
	if len(p.ready) >= p.o.Processes {
		surplus = p.ready[over]
		p.ready = slices.Delete(p.ready, over, over+1)
	}
	return shape, surplus, true
}

// put adds a process, or records the error that prevented it.
func (p *Pool) put(s *standby, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failure = err
	if err != nil {
		p.counted.Failed++
	}
	if err == nil && !p.closed {
		p.ready = append(p.ready, s)
		s = nil
	}
	p.full.Broadcast()
	if s != nil {
		go s.end()
	}
}

// make makes a process for the pool.
func (p *Pool) make(ctx context.Context, shape spec.Shape) (*standby, error) {
	return makeStandby(ctx, p.store, p.launcher, shape, p.gone)
}

// makeStandby starts a process for VMs of a shape and waits until it is ready for an order. gone is called when it has
// ended.
func makeStandby(ctx context.Context, store *state.Store, l Launcher, shape spec.Shape, gone func(*standby)) (*standby, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making a process ahead: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "pool")
	defer theirs.Close()
	conn, err := control.FileConn(os.NewFile(uintptr(fds[0]), "pool"))
	if err != nil {
		return nil, fmt.Errorf("making a process ahead: %w", err)
	}
	what, err := programOf(l)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("making a process ahead: %w", err)
	}
	s := &standby{conn: conn, said: &control.Tail{}, shape: shape, what: what}
	cmd := exec.Command(l.Command[0], append(append([]string(nil), l.Command[1:]...), control.StandbyArgs(store.Dir(), shape)...)...)
	cmd.Env = vmEnvironment()
	cmd.Stdout, cmd.Stderr = s.said, s.said
	cmd.ExtraFiles = []*os.File{theirs} // poolFD
	child, err := startChild(cmd, func() { gone(s) })
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("making a process ahead: %w", err)
	}
	theirs.Close()
	s.Process, s.pid = child, child.proc.Pid
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	word := make([]byte, len(control.PoolReady)+1)
	n, err := conn.Read(word)
	if err == nil && string(word[:n]) != control.PoolReady {
		err = fmt.Errorf("it says %q", word[:n])
	}
	if err != nil {
		s.end()
		return nil, fmt.Errorf("making a process ahead: %w: %s", err, s.said.Last())
	}
	return s, nil
}

// end ends a process that got no order.
func (s *standby) end() {
	s.conn.Close()
	if s.Wait(poolPatience) {
		return
	}
	_ = s.Kill()
	s.Wait(0)
}

// poolPatience is how long a process has to end by itself.
const poolPatience = 10 * time.Second

// errNoOrder means that a process could not be given an order.
var errNoOrder = errors.New("it takes no order")

// start gives the process an order.
func (s *standby) start(ord control.Order, files []*os.File) (Process, error) {
	if err := control.SendOrder(s.conn, ord, files...); err != nil {
		_ = s.Kill()
		return nil, fmt.Errorf("%w: %w", errNoOrder, err)
	}
	return s.Process, nil
}

// close releases what this process holds of it. It does not end the process.
func (s *standby) close() {
	s.conn.Close()
	s.Process.Close()
}

// took reports whether a process that has ended had taken the order. Only then may it have changed the VM.
func (s *standby) took() bool {
	word := make([]byte, len(control.PoolTaken)+1)
	n, err := s.conn.Read(word)
	return err == nil && string(word[:n]) == control.PoolTaken
}

// gone removes a process that has ended, and makes another one some time later: the cause of its end may end the
// next one as well.
func (p *Pool) gone(s *standby) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.ready, s)
	if i < 0 {
		return
	}
	p.ready = slices.Delete(p.ready, i, i+1)
	p.counted.Failed++
	s.conn.Close()
	p.log.Warn("a process of the pool has ended", "pid", s.pid, "it_says", s.said.Last())
	time.AfterFunc(poolRetry, p.wake)
}

// pop takes a process out of the pool for a VM; it returns nil if none is ready.
func (p *Pool) pop(shape spec.Shape) *standby { return p.popIf(shape, nil) }

// popIf is pop among the processes of a program, or among all if of is nil.
func (p *Pool) popIf(shape spec.Shape, of *program) *standby {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.o.Follow && shape.Validate() == nil {
		p.shapes = append(p.shapes[1:], shape)
	}
	// Prefer the one that has waited least: what it needs is most likely in caches.
	found, fits := -1, false
	for i, s := range slices.Backward(p.ready) {
		if of != nil && s.what != *of {
			continue
		}
		if s.shape == shape {
			found = i
			break
		}
		if same := s.shape.Machine() == shape.Machine(); found < 0 || same && !fits {
			found, fits = i, same
		}
	}
	if found < 0 {
		p.counted.Missed++
		return nil
	}
	p.counted.Taken++
	s := p.ready[found]
	p.ready = slices.Delete(p.ready, found, found+1)
	return s
}

// starts tells the pool that a VM is being started, and started that the start has ended. The pool makes no
// process in between.
func (p *Pool) starts() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starting++
}

func (p *Pool) started() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starting--
	// Not after each of many starts, or a steady stream of them would keep the pool from making any process.
	if now := time.Now(); now.Sub(p.calm) > 4*poolCalm {
		p.calm = now.Add(poolCalm)
	}
	time.AfterFunc(poolCalm, p.wake)
}
