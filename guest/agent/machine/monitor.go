package machine

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// HoldBackMonitor gives the monitor thread of the Go runtime the least share of the processor, nice 19. While a
// goroutine runs, that thread wakes every 20 us to see whether it runs for too long, 27 times for a command. In a guest
// whose kernel is interpreted each time takes 5 ms, which the command then waits for. What the monitor is needed for,
// other goroutines' turn during a system call that blocks, finds the processor idle.
func HoldBackMonitor() error {
	tid, err := monitor()
	if err == nil {
		err = unix.Setpriority(unix.PRIO_PROCESS, tid, 19)
	}
	if err != nil {
		return fmt.Errorf("hold back the runtime's monitor thread: %w", err)
	}
	return nil
}

// monitor returns the id of the monitor thread: the first that the runtime makes (runtime/proc.go, main). The kernel
// lists threads as they were made.
func monitor() (tid int, err error) {
	d, err := os.Open("/proc/self/task")
	if err != nil {
		return 0, err
	}
	defer d.Close()
	names, err := d.Readdirnames(2)
	if err == nil && len(names) < 2 {
		err = unix.ESRCH
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(names[1])
}
