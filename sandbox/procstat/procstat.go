package procstat

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// PIDs returns a process and its children. A kernel without CONFIG_PROC_CHILDREN does not tell the children. The error
// is fs.ErrNotExist if the process has ended.
func PIDs(pid int) ([]int, error) {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	threads, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	pids := []int{pid}
	for _, t := range threads {
		// Each thread has its own children (proc_tid_children(5)), and may have ended by now.
		list, err := os.ReadFile(filepath.Join(dir, t.Name(), "children"))
		if err != nil {
			continue
		}
		for _, child := range strings.Fields(string(list)) {
			if n, err := strconv.Atoi(child); err == nil {
				pids = append(pids, n)
			}
		}
	}
	return pids, nil
}

// Use is what a process and its children use.
type Use struct {
	// PIDs are the processes, the parent first.
	PIDs []int
	// Age is that of the parent.
	Age time.Duration
	// User and System are the processor time since then, in steps of 10 ms. That of children that have ended counts.
	User, System time.Duration
	// Resident is the memory in RAM in bytes. Each process counts what it shares.
	Resident int64
}

// Of returns what a process and its children use. The error is fs.ErrNotExist or unix.ESRCH if the process has ended.
func Of(pid int) (Use, error) {
	pids, err := PIDs(pid)
	if err != nil {
		return Use{}, err
	}
	var all Use
	for _, p := range pids {
		u, err := one(p)
		if p != pid && Ended(err) {
			continue
		}
		if err != nil {
			return Use{}, err
		}
		if p == pid {
			all.Age = u.Age
		}
		all.PIDs = append(all.PIDs, p)
		all.User, all.System, all.Resident = all.User+u.User, all.System+u.System, all.Resident+u.Resident
	}
	return all, nil
}

// Ended reports whether an error of a file of /proc means that the process has ended.
func Ended(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// tick is a step of times: USER_HZ, the same on all x86-64.
const tick = time.Second / 100

// one reads proc_pid_stat(5) of one process.
func one(pid int) (u Use, err error) {
	name := fmt.Sprintf("/proc/%d/stat", pid)
	stat, err := os.ReadFile(name)
	if err != nil {
		return u, err
	}
	// The second field, the program's name, may contain any character. No later field has a parenthesis.
	text := string(stat)
	f := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const state, utime, stime, cutime, cstime, start, rss = 3, 14, 15, 16, 17, 22, 24 // numbers of fields
	if len(f) <= rss-state {
		return u, fmt.Errorf("reading %s: it has %d fields after the name", name, len(f))
	}
	number := func(field int) int64 {
		n, nerr := strconv.ParseInt(f[field-state], 10, 64)
		if nerr != nil {
			err = fmt.Errorf("reading %s: %w", name, nerr)
		}
		return n
	}
	ticks := func(field int) time.Duration { return time.Duration(number(field)) * tick }
	u.User, u.System = ticks(utime)+ticks(cutime), ticks(stime)+ticks(cstime)
	u.Resident = number(rss) * int64(os.Getpagesize())
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return u, os.NewSyscallError("clock_gettime", err)
	}
	u.Age = max(time.Duration(up.Nano())-ticks(start), 0)
	return u, err
}
