//go:build linux

package audit

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
)

// self returns this process. It is computed once, since the parent may end.
var self = sync.OnceValue(func() Process {
	p := Process{PID: os.Getpid(), UID: os.Geteuid(), GID: os.Getegid(), PPID: os.Getppid(), Boot: bootID()}
	p.Comm, p.Start, _ = processStat(p.PID)
	p.Parent, _, _ = processStat(p.PPID)
	if b, err := os.ReadFile("/proc/self/loginuid"); err == nil {
		const none = 1<<32 - 1
		if n, err := strconv.ParseUint(string(bytes.TrimSpace(b)), 10, 32); err == nil && n != none {
			uid := uint32(n)
			p.LoginUID = &uid
		}
	}
	return p
})

func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(b))
}

// processStat reads a process's name and its start, in clock ticks since the boot: fields 2 and 22 of
// proc_pid_stat(5).
func processStat(pid int) (comm string, start uint64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0, err
	}
	s := string(b)
	// The name is in parentheses, and may itself contain some.
	from, to := strings.IndexByte(s, '('), strings.LastIndexByte(s, ')')
	if from < 0 || to < from {
		return "", 0, fmt.Errorf("/proc/%d/stat: no name", pid)
	}
	const startField = 22 - 3 // after the name and its number
	fields := strings.Fields(s[to+1:])
	if len(fields) <= startField {
		return "", 0, fmt.Errorf("/proc/%d/stat: %d fields", pid, len(fields))
	}
	start, err = strconv.ParseUint(fields[startField], 10, 64)
	return s[from+1 : to], start, err
}

// lives reports whether the process still runs. It takes a process in another PID namespace for gone, or for the one
// with its PID here if both started in the same clock tick.
func (p Process) lives(boot string) bool {
	if p.PID <= 0 || p.Boot != boot || boot == "" {
		return false
	}
	_, start, err := processStat(p.PID)
	return err == nil && start == p.Start
}
