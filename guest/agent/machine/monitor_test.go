package machine

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Only the monitor sleeps by nanosleep(2), and it does so while goroutines run.
func TestMonitor_is_the_thread_that_naps_while_a_goroutine_runs(t *testing.T) {
	tid, err := monitor()
	if err != nil {
		t.Fatal(err)
	}
	path := fmt.Sprintf("/proc/self/task/%d/syscall", tid)
	for range 1_000_000 { // this goroutine runs
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(string(b), fmt.Sprint(unix.SYS_NANOSLEEP, " ")) {
			return
		}
	}
	t.Errorf("thread %d never slept by nanosleep(2)", tid)
}

func TestHoldBackMonitor_leaves_other_threads_as_they_are(t *testing.T) {
	tid, err := monitor()
	if err != nil {
		t.Fatal(err)
	}
	nice := func(tid int) int {
		t.Helper()
		n, err := unix.Getpriority(unix.PRIO_PROCESS, tid) // the kernel's own value: 20 - nice
		if err != nil {
			t.Fatal(err)
		}
		return 20 - n
	}
	main := nice(os.Getpid())
	if err := HoldBackMonitor(); err != nil {
		t.Fatal(err)
	}
	if nice(tid) != 19 || nice(os.Getpid()) != main || main == 19 {
		t.Errorf("the monitor is at nice %d, the first thread at %d, before at %d", nice(tid), nice(os.Getpid()), main)
	}
}
