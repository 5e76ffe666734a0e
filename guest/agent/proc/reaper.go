package proc

import (
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// reaper starts processes and owns wait4(2). Every status passes through it, so that as PID 1 it can collect
// orphans without stealing a status from the code that started a process.
type reaper struct {
	init bool // reap every child: orphans as well

	// mu is held from before a fork until the child is registered, and while children are reaped: the kernel has
	// not reused a pid found in waiting.
	mu      sync.Mutex
	waiting map[int]chan waitStatus
	started bool
	sig     chan os.Signal
	done    chan struct{}
}

type waitStatus struct {
	status syscall.WaitStatus
	usage  syscall.Rusage
}

func newReaper(init bool) *reaper {
	return &reaper{init: init, waiting: make(map[int]chan waitStatus)}
}

// run starts to listen for SIGCHLD. Precondition: r.mu is held.
func (r *reaper) run() {
	if r.started {
		return
	}
	r.started = true
	r.sig = make(chan os.Signal, 1)
	r.done = make(chan struct{})
	signal.Notify(r.sig, syscall.SIGCHLD)
	go func() {
		for {
			select {
			case <-r.sig:
				r.mu.Lock()
				r.reap()
				r.mu.Unlock()
			case <-r.done:
				return
			}
		}
	}()
}

// stop ends the goroutine. It does not deliver later statuses.
func (r *reaper) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.started {
		signal.Stop(r.sig)
		close(r.done)
		r.started = false
	}
}

// start forks and executes path. The status arrives on the returned channel.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (int, <-chan waitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.run()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return 0, nil, err
	}
	ch := make(chan waitStatus, 1)
	r.waiting[pid] = ch
	return pid, ch, nil
}

// reap collects every child that has ended. Precondition: r.mu is held.
func (r *reaper) reap() {
	if r.init {
		for r.wait(-1) {
		}
		return
	}
	for pid := range r.waiting {
		r.wait(pid)
	}
}

// wait collects one status without blocking and reports whether there was one. Precondition: r.mu is held.
func (r *reaper) wait(pid int) bool {
	var ws waitStatus
	for {
		got, err := syscall.Wait4(pid, &ws.status, syscall.WNOHANG, &ws.usage)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || got <= 0 {
			return false
		}
		if ch, ok := r.waiting[got]; ok {
			delete(r.waiting, got)
			ch <- ws // does not block: one status per process
		}
		return true
	}
}

// signal sends sig to the process group that pid leads. It returns ESRCH if pid has been reaped.
func (r *reaper) signal(pid int, sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.waiting[pid]; !ok {
		return syscall.ESRCH
	}
	if err := syscall.Kill(-pid, sig); err != nil {
		return fmt.Errorf("kill(-%d, %d): %w", pid, int(sig), err)
	}
	return nil
}

// endAll, for PID 1 only, ends every other process of the machine: SIGTERM, up to grace to comply, then SIGKILL.
func (r *reaper) endAll(grace time.Duration) {
	_ = unix.Kill(-1, unix.SIGTERM)
	_ = unix.Kill(-1, unix.SIGCONT) // a stopped process cannot comply
	if r.waitNone(grace) {
		return
	}
	_ = unix.Kill(-1, unix.SIGKILL)
	r.waitNone(grace)
}

// waitNone reaps until no child is left or the time is up.
func (r *reaper) waitNone(limit time.Duration) bool {
	const step = 20 * time.Millisecond
	for deadline := time.Now().Add(limit); ; time.Sleep(step) {
		r.mu.Lock()
		r.reap()
		_, err := syscall.Wait4(-1, nil, syscall.WNOHANG|unix.WNOWAIT, nil)
		r.mu.Unlock()
		if err == syscall.ECHILD {
			return true
		}
		if !time.Now().Before(deadline) {
			return false
		}
	}
}
