package audit

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
)

// Process is who has asked for something: the process that uses package guest, as it and
// the kernel of its host say.
type Process struct {
	PID int `json:"pid"`
	// UID and GID are the effective ones.
	UID int `json:"uid"`
	GID int `json:"gid"`
	// LoginUID is who has logged in to the session, whatever was done by su or sudo since;
	// nil where the host does not keep it (proc_pid_loginuid(5)).
	LoginUID *uint32 `json:"login_uid,omitempty"`
	// Comm is the name of the program, at most 15 bytes.
	Comm string `json:"comm"`
	// PPID and Parent are the process that has started it.
	PPID   int    `json:"ppid"`
	Parent string `json:"parent,omitempty"`
	// Start is when it was started, in clock ticks since the host's boot, and Boot which
	// boot that was. They tell it from others that get its number.
	Start uint64 `json:"start"`
	Boot  string `json:"boot"`
}

// self is this process. It is asked for once: the parent may end.
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

// processStat reads a process's name and when it was started, in clock ticks since the boot:
// fields 2 and 22 of proc_pid_stat(5).
func processStat(pid int) (comm string, start uint64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0, err
	}
	s := string(b)
	// The name is in parentheses, and may have some in it.
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

// lives says that the process is there. It takes one in another PID namespace for gone, or
// for whoever has its number there if that was started in the same clock tick.
func (p Process) lives(boot string) bool {
	if p.PID <= 0 || p.Boot != boot || boot == "" {
		return false
	}
	_, start, err := processStat(p.PID)
	return err == nil && start == p.Start
}
