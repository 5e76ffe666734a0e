package process

import (
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// urgentNice is the priority of a VM's process until its guest is ready: it gets nine
// times the processor of one with the priority of 0 (sched(7)).
const urgentNice = -10

// urgency is that of this process, of which there may be several reasons at once.
var urgency struct {
	mu            sync.Mutex
	reasons       int
	nice, session int // without any
}

// prioritize has this process go before others until calm is called, which may be called
// more than once. Somebody waits for it, and guests that have just come back have much to
// catch up with: of VMs that are woken at once, the first would be in the way of the last,
// and all of them in the way of one that is to sleep again.
// It ends after two seconds in any case. It is for a process with a session of its own.
// Without the right to do it, it does nothing.
func prioritize() (calm func()) {
	u := &urgency
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.reasons == 0 {
		before, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
		if err != nil {
			return func() {}
		}
		u.nice = 20 - before // the system call's way of saying it (getpriority(2))
		u.session = u.nice
		if text, err := os.ReadFile(autogroup); err == nil {
			var number int
			_, _ = fmt.Sscanf(string(text), "/autogroup-%d nice %d", &number, &u.session)
		}
		setNice(urgentNice, urgentNice)
	}
	u.reasons++
	undo := sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.reasons--; u.reasons == 0 {
			setNice(u.nice, u.session)
		}
	})
	limit := time.AfterFunc(maxUrgent, undo)
	return func() {
		limit.Stop()
		undo()
	}
}

// maxUrgent is how long a process may go before others, ready or not.
const maxUrgent = 2 * time.Second

// autogroup has the priority of the session of a process, where the kernel shares
// processors out among sessions first (proc_pid_autogroup(5)).
const autogroup = "/proc/self/autogroup"

// setNice sets the priorities of all threads and of the session.
func setNice(nice, session int) {
	_ = os.WriteFile(autogroup, []byte(strconv.Itoa(session)), 0)
	// Threads that come meanwhile have the priority of the one that has made them.
	for range 2 {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return
		}
		for _, t := range threads {
			if tid, err := strconv.Atoi(t.Name()); err == nil {
				_ = unix.Setpriority(unix.PRIO_PROCESS, tid, nice)
			}
		}
	}
}
