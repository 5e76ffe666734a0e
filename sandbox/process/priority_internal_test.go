package process

import (
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func TestBeUrgent_lifts_all_threads_and_calm_puts_them_back(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("raising priorities needs root")
	}
	all := func(want int) {
		t.Helper()
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		for _, th := range threads {
			tid, err := strconv.Atoi(th.Name())
			if err != nil {
				t.Fatal(err)
			}
			if got, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err == nil && 20-got != want {
				t.Errorf("thread %d of %d has priority %d, want %d", tid, len(threads), 20-got, want)
			}
		}
	}
	got, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		t.Fatal(err)
	}
	before := 20 - got
	calm := prioritize()
	all(urgentNice)
	more := prioritize()
	calm()
	calm()
	all(urgentNice)
	more()
	all(before)
	calm()
	more()
	all(before)
}
