package process

import (
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/jail"
)

// urgentNice is the nice value of a VM's process until its guest is ready. It gives the process nine times the
// processor time of one with 0 (sched(7)).
const urgentNice = -10

// urgency is the raised priority of this process. Several reasons for it may hold at once.
var urgency struct {
	mu            sync.Mutex
	reasons       int
	nice, session int // without any reason
	// confined is the VM's confined process, which has a session and a cgroup of its own; nil without one.
	confined interface {
		PID() int
		Urgent(bool)
	}
}

// prioritize puts this process before others until calm is called, which may be called more than once. A client waits
// for the process, and guests that have just come back have much to catch up on. Of VMs that are woken at once, the
// first would delay the last, and all of them would delay one that must sleep again. It ends after two seconds in any
// case. The process must have its own session. Without the right to raise its priority, prioritize does nothing.
func prioritize() (calm func()) {
	undo := raise()
	limit := time.AfterFunc(maxUrgent, undo)
	return func() {
		limit.Stop()
		undo()
	}
}

// raise is prioritize without an end of its own, for a process that waits for its order: it uses no processor, and has
// its priority when the order comes. To set it takes a quarter of a millisecond.
func raise() (calm func()) {
	u := &urgency
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.reasons == 0 {
		before, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
		if err != nil {
			return func() {}
		}
		u.nice = 20 - before // getpriority(2): the system call returns 20 - nice
		u.session = u.nice
		if text, err := os.ReadFile(autogroup); err == nil {
			var number int
			_, _ = fmt.Sscanf(string(text), "/autogroup-%d nice %d", &number, &u.session)
		}
		setNice(urgentNice, urgentNice, true)
	}
	u.reasons++
	return sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		if u.reasons--; u.reasons == 0 {
			setNice(u.nice, u.session, false)
		}
	})
}

// maxUrgent is how long a process may have priority over others, ready or not.
const maxUrgent = 2 * time.Second

// autogroup has the nice value of the process's session, if the kernel shares processors among sessions first
// (proc_pid_autogroup(5)).
const autogroup = "/proc/self/autogroup"

// hasConfined says which process is confined, and gives it the priority of this one.
func hasConfined(j *jail.Jail) {
	u := &urgency
	u.mu.Lock()
	defer u.mu.Unlock()
	u.confined = j
	if u.reasons > 0 {
		niceConfined(urgentNice, urgentNice, true)
	} else if before, err := unix.Getpriority(unix.PRIO_PROCESS, 0); err == nil {
		_ = unix.Setpriority(unix.PRIO_PGRP, j.PID(), 20-before) // it may have begun in an urgent time
	}
}

// setNice sets the priorities of all threads and of the session, also of the confined process. That one comes first: a
// keeper that had lowered itself would wait behind its guest, which has much to catch up on. urgency.mu is held.
func setNice(nice, session int, urgent bool) {
	niceConfined(nice, session, urgent)
	_ = os.WriteFile(autogroup, []byte(strconv.Itoa(session)), 0)
	_ = unix.Setpriority(unix.PRIO_PGRP, 0, nice) // each thread of each process in the group
}

func niceConfined(nice, session int, urgent bool) {
	if urgency.confined == nil {
		return
	}
	pid := urgency.confined.PID()
	urgency.confined.Urgent(urgent)
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/autogroup", pid), []byte(strconv.Itoa(session)), 0)
	_ = unix.Setpriority(unix.PRIO_PGRP, pid, nice)
}
