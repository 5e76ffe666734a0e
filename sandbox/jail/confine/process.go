package confine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// firstFile is the descriptor of the first of a profile's files in the child.
const firstFile = 3

// A Profile says what to start, and confined how.
type Profile struct {
	// Program is a path and the arguments behind it. /proc/self/exe is the keeper's program.
	Program []string
	// Files are the child's from descriptor 3 on. MayPass has to allow each.
	Files []*os.File
	// Output is the child's stdout and stderr: where it says why it crashed. Nil is /dev/null.
	Output *os.File
	// Name is for people, and usually leads to the same user id.
	Name   string
	Limits Limits
	// Shares allows directories among Files, below which the child may open, make and remove files.
	Shares bool
	// Network makes it the network process of a VM, which has TCP connections, each passed by the keeper, and no guest.
	Network bool
	// LogOnly has the kernel log what Lock would refuse, and do it. It is for finding what a child needs.
	LogOnly bool
	// Started, if not nil, is called as soon as the child runs its program. From then on it no longer shares the keeper's
	// descriptors. If the child does not start, Started is not called.
	Started func()
}

// goDebug is the child's GODEBUG. Names of the heap's mappings would need prctl(2), and the runtime would keep files of
// the host's cgroups open.
const goDebug = "decoratemappings=0,containermaxprocs=0,updatemaxprocs=0"

// ErrUserShares means that a keeper that is not root cannot give its child shares.
var ErrUserShares = errors.New("shared directories need root, which makes each a mount of its own: run as root, " +
	"or copy the files")

// ErrRefused means that the child made a system call that Lock does not leave it, and was killed.
var ErrRefused = errors.New("a system call was refused")

// A Process is a confined child.
type Process struct {
	uid    int
	id     *id // nil if the child has the keeper's user id
	cgroup *cgroup
	cmd    *exec.Cmd
	shares bool
	life   *os.File // kept open: its end tells the child that the keeper has ended
	joined chan struct{}
	unable error // to join its cgroup, after joined
	done   chan struct{}
	err    error // of Wait, after done

	mu     sync.Mutex // guards limits, urgent and closed
	limits Limits
	urgent bool
	closed bool
}

// Start starts a child with a user id and a cgroup of its own in new namespaces of mounts, processes, IPC, host name,
// network and cgroups. If the keeper is not root, the child has a namespace of users instead of a user id. It is
// confined once it has called Enter and Lock. It is killed if the keeper ends. ctx is for the start alone. The caller
// must Close the Process, and may close the profile's files.
func Start(ctx context.Context, p Profile) (_ *Process, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("starting the confined process %q: %w", p.Name, err)
		}
	}()
	switch {
	case len(p.Program) == 0:
		return nil, errors.New("the profile has no program")
	case p.Shares && p.Network:
		return nil, errors.New("a network process has no shares")
	case p.Shares && os.Geteuid() != 0:
		return nil, ErrUserShares
	}
	for i, f := range p.Files {
		if err := mayPass(f, p.Shares); err != nil {
			return nil, fmt.Errorf("file %d: %w", i, err)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	c := &Process{shares: p.Shares, joined: make(chan struct{}), done: make(chan struct{}), limits: p.Limits}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.free())
		}
	}()
	if err := c.prepare(p); err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close()
	c.life = write
	a, err := json.Marshal(assignment{ID: c.uid, User: c.id == nil, Life: firstFile + len(p.Files), Files: len(p.Files),
		Shares: p.Shares, Network: p.Network, LogOnly: p.LogOnly,
		FileBytes: p.Limits.FileBytes, OpenFiles: p.Limits.OpenFiles})
	if err != nil {
		return nil, err
	}
	c.cmd = &exec.Cmd{
		Path:       p.Program[0],
		Args:       p.Program,
		Env:        []string{"GODEBUG=" + goDebug, assignmentEnv + "=" + string(a)},
		Dir:        "/",
		ExtraFiles: append(append([]*os.File(nil), p.Files...), read),
		SysProcAttr: &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS |
				unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP,
			Setsid:    true, // without a terminal
			Pdeathsig: unix.SIGKILL,
		},
	}
	if c.id == nil {
		enterAsUser(c.cmd.SysProcAttr)
	}
	if p.Limits.CPUMax > 0 { // as Go would do it
		c.cmd.Env = append(c.cmd.Env, "GOMAXPROCS="+strconv.Itoa(max(2, int(math.Ceil(p.Limits.CPUMax)))))
	}
	if p.Shares {
		null, err := openNull()
		if err != nil {
			return nil, err
		}
		defer null.Close()
		c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = null, null, null
	}
	if p.Output != nil {
		c.cmd.Stdout, c.cmd.Stderr = p.Output, p.Output
	}
	if err := c.run(p.Started); err != nil {
		return nil, err
	}
	return c, nil
}

// openNull opens /dev/null for a child with shares: see View.
func openNull() (*os.File, error) {
	v, err := NewView()
	if err != nil {
		return nil, err
	}
	defer v.Close()
	return v.Open(os.DevNull, os.O_RDWR)
}

// prepare takes a user id, and makes the cgroup.
func (c *Process) prepare(p Profile) (err error) {
	c.uid = os.Geteuid()
	name := userCgroup()
	if c.uid == 0 {
		if c.id, err = takeID(p.Name); err != nil {
			return err
		}
		if err := c.id.tidy(); err != nil {
			return err
		}
		c.uid, name = c.id.n, strconv.Itoa(c.id.n)
	}
	g, err := planCgroup(name)
	if err != nil {
		return err
	}
	if c.id != nil {
		// A note before the directories are made: a killed keeper leaves none that nobody knows.
		if err := c.id.note(g.dirs()); err != nil {
			return err
		}
	}
	c.cgroup = g
	if err := g.make(); err != nil {
		return err
	}
	return g.limit(p.Limits, Limits{})
}

// run starts the child and waits for it on a thread of its own: a child gets SIGKILL at the end of the thread that
// started it (prctl(2), PR_SET_PDEATHSIG), and Go may end another. That thread is never used again.
func (c *Process) run(running func()) error {
	moved := make(chan struct{})
	go func() {
		defer close(moved)
		c.cgroup.moveNothing()
	}()
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		var err error
		if c.id != nil { // a user has no right to
			err = boundCapabilities(c.shares)
		}
		if err == nil {
			err = c.cmd.Start()
		}
		started <- err
		if err != nil {
			return
		}
		<-c.joined // until it is waited for, no other process has its number
		c.err = errors.Join(c.unable, verdict(c.cmd.Wait()))
		close(c.done)
	}()
	if err := <-started; err != nil {
		<-moved
		c.cmd = nil
		return err
	}
	if running != nil {
		running()
	}
	err := c.limitResource(unix.RLIMIT_MEMLOCK, c.limits.LockedBytes)
	go func() {
		defer close(c.joined)
		<-moved
		c.unable = c.join()
	}()
	return err
}

// join moves the child to its cgroup, and says so to Lock.
func (c *Process) join() error {
	// Wait says why if it has ended so soon.
	if err := c.cgroup.add(c.cmd.Process.Pid); err != nil && !errors.Is(err, unix.ESRCH) {
		return errors.Join(err, c.Kill())
	}
	if _, err := c.life.Write([]byte{1}); err != nil && !errors.Is(err, unix.EPIPE) {
		return errors.Join(err, c.Kill())
	}
	return nil
}

// limitResource sets a limit of the child by prlimit(2); 0 leaves the host's, and so does a keeper that may not:
// raising one needs CAP_SYS_RESOURCE, and so does changing it once the child has its own user id.
func (c *Process) limitResource(which int, n uint64) error {
	if n == 0 {
		return nil
	}
	err := unix.Prlimit(c.cmd.Process.Pid, which, &unix.Rlimit{Cur: n, Max: n}, nil)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EPERM) {
		return nil
	}
	return os.NewSyscallError("prlimit("+strconv.Itoa(which)+")", err)
}

// enterCapabilities are what Enter needs.
var enterCapabilities = []uintptr{unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_SETPCAP, unix.CAP_SYS_ADMIN}

// shareCapabilities are what a child with shares keeps: its guest's root acts on files of any owner. They reach no
// further than what OpenTree has returned.
var shareCapabilities = []uintptr{unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER}

// boundCapabilities leaves the programs that this thread starts what Enter needs, and shares. Enter would take long to
// drop the others from all threads.
func boundCapabilities(shares bool) error {
	for c := uintptr(0); ; c++ {
		if slices.Contains(enterCapabilities, c) || shares && slices.Contains(shareCapabilities, c) {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // beyond the last capability
		}
		if err != nil {
			return os.NewSyscallError("prctl(PR_CAPBSET_DROP)", err)
		}
	}
}

func verdict(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() && ws.Signal() == unix.SIGSYS {
			return fmt.Errorf("%w: %w: the kernel's log has its number (type=1326)", ErrRefused, err)
		}
	}
	return err
}

// PID returns the child's process id, as the keeper sees it.
func (c *Process) PID() int { return c.cmd.Process.Pid }

// UID returns the child's user id: one of its own, or that of a keeper that is not root.
func (c *Process) UID() int { return c.uid }

// Done is closed when the child has ended.
func (c *Process) Done() <-chan struct{} { return c.done }

// Wait returns when the child has ended: nil for exit status 0, ErrRefused if it made a system call that it may not
// make, else an *exec.ExitError. It may be called often.
func (c *Process) Wait() error {
	<-c.done
	return c.err
}

// Kill kills the child. It does not wait.
func (c *Process) Kill() error {
	if err := c.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("killing a confined process: %w", err)
	}
	return nil
}

// Stats reads the counters of the child's cgroup. They stay after its end, until Close.
func (c *Process) Stats() (Stats, error) { return c.cgroup.stats() }

// CPU returns the processor time that the child has used, until now or its end.
func (c *Process) CPU() time.Duration {
	// The clock of a process (clock_getcpuclockid(3)) needs no cgroup, and is gone when the child was waited for.
	const sched = 2 // CPUCLOCK_SCHED of the kernel: all threads, also those that have ended
	clock := int32(^c.cmd.Process.Pid)<<3 | sched
	var used unix.Timespec
	if err := unix.ClockGettime(clock, &used); err == nil && !c.ended() {
		return time.Duration(used.Nano())
	}
	select {
	case <-c.done:
	case <-time.After(time.Second): // it was waited for, or the kernel has no such clock
		return 0
	}
	if s := c.cmd.ProcessState; s != nil {
		return s.UserTime() + s.SystemTime()
	}
	return 0
}

func (c *Process) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// SetLimits changes the limits of memory, processors, threads and block devices, and FileBytes if it is not 0.
func (c *Process) SetLimits(l Limits) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.OpenFiles, l.LockedBytes = c.limits.OpenFiles, c.limits.LockedBytes
	if l.FileBytes == 0 {
		l.FileBytes = c.limits.FileBytes
	} else if err := c.limitResource(unix.RLIMIT_FSIZE, l.FileBytes); err != nil {
		return fmt.Errorf("limiting a confined process: %w", err)
	}
	if err := c.cgroup.limit(l, c.limits); err != nil {
		return fmt.Errorf("limiting a confined process: %w", err)
	}
	c.limits = l
	if c.urgent { // limit has set what is usual
		c.cgroup.urge(l.CPUWeight)
	}
	return nil
}

// Urgent multiplies the child's share of the processors while it is on. Between cgroups, nice values do not count. It
// does nothing where Limits.CPUWeight has no effect.
func (c *Process) Urgent(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || on == c.urgent {
		return
	}
	if c.urgent = on; on {
		c.cgroup.urge(c.limits.CPUWeight)
	} else {
		c.cgroup.share(c.limits.CPUWeight)
	}
}

// Close kills the child if it runs, waits for its end and frees its user id and cgroup.
func (c *Process) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	return c.free()
}

// free undoes what Start has done so far.
func (c *Process) free() error {
	var errs []error
	if c.cmd != nil {
		errs = append(errs, c.Kill())
		<-c.done
	}
	if c.life != nil {
		errs = append(errs, c.life.Close())
	}
	if c.cgroup != nil {
		errs = append(errs, c.cgroup.remove())
	}
	if c.id != nil {
		// If a cgroup is left, the file goes on naming it.
		if err := errors.Join(errs...); err != nil {
			return errors.Join(err, c.id.file.Close())
		}
		errs = append(errs, c.id.release())
	}
	return errors.Join(errs...)
}
