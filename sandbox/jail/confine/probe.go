package confine

import (
	"fmt"
	"os"
	"strings"
	"syscall"

	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

// A Wall is one of the things that hold a child, as this host has it.
type Wall struct {
	Name    string
	Present bool
	// Required says that Start, Enter or Lock fails without it. Landlock and cgroups are walls behind walls.
	Required bool
	Detail   string
}

// Support lists all walls.
type Support []Wall

// Missing returns the walls that this host lacks: all, or the required ones.
func (s Support) Missing(required bool) Support {
	var out Support
	for _, w := range s {
		if !w.Present && (w.Required || !required) {
			out = append(out, w)
		}
	}
	return out
}

// Probe looks which walls a child would have.
func Probe() Support {
	var s Support
	add := func(name string, present, required bool, detail string) {
		s = append(s, Wall{name, present, required, detail})
	}

	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	_ = unix.Capget(&head, &caps[0]) // no capabilities if it fails
	var lacks []string
	for _, c := range []struct {
		n    uint
		name string
	}{{unix.CAP_SETUID, "CAP_SETUID"}, {unix.CAP_SETGID, "CAP_SETGID"}, {unix.CAP_SETPCAP, "CAP_SETPCAP"},
		{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}} {
		if caps[c.n/32].Effective&(1<<(c.n%32)) == 0 {
			lacks = append(lacks, c.name)
		}
	}
	switch {
	case os.Geteuid() != 0:
		add("own user id", false, false, fmt.Sprintf("only root can give one: it keeps user id %d", os.Geteuid()))
		if err := probeUser(); err != nil {
			add("user namespace", false, true, fmt.Sprintf("none can be made: %v: have the host allow them to users "+
				"(kernel.unprivileged_userns_clone, user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), "+
				"or run as root", err))
		} else {
			add("user namespace", true, true, "without rights outside, and with no user but its own")
		}
	case len(lacks) > 0:
		add("own user id", false, true, "root lacks "+strings.Join(lacks, ", "))
	default:
		add("own user id", true, true, fmt.Sprintf("%d to %d", FirstID, FirstID+NumIDs-1))
	}

	var none []string
	for _, ns := range []string{"mnt", "pid", "ipc", "uts", "net", "cgroup"} {
		if _, err := os.Stat("/proc/self/ns/" + ns); err != nil {
			none = append(none, ns)
		}
	}
	if len(none) > 0 {
		add("namespaces", false, true, "the kernel lacks "+strings.Join(none, ", "))
	} else {
		add("namespaces", true, true, "mount, pid, ipc, uts, net, cgroup")
	}

	if answersKill() {
		add("seccomp", true, true, "one filter for all threads")
	} else {
		add("seccomp", false, true, "the kernel lacks SECCOMP_RET_KILL_PROCESS (Linux 4.14, CONFIG_SECCOMP_FILTER)")
	}

	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno == unix.ENOTSUP {
		add("threads", false, true, ErrCgo.Error())
	} else {
		add("threads", true, true, "of Go alone")
	}

	switch abi, err := ll.LandlockGetABIVersion(); {
	case err != nil || abi == 0:
		add("Landlock", false, false, "the kernel lacks it, or the boot parameter lsm= does not name it")
	case abi < shareABI:
		add("Landlock", true, false, fmt.Sprintf("ABI %d: too old for shares, which need %d (Linux 6.2)", abi, shareABI))
	default:
		add("Landlock", true, false, fmt.Sprintf("ABI %d", abi))
	}

	h, err := findHierarchies()
	for _, c := range []controller{memory, pids, cpu, blockIO} {
		name := "cgroup: " + controllerNames[c]
		switch {
		case err != nil:
			add(name, false, false, err.Error())
		case h.parent[c] == "":
			add(name, false, false,
				"no hierarchy in which this process may make cgroups has it: mount cgroup2, or have systemd delegate it (Delegate=yes)")
		case h.v2[c]:
			add(name, true, false, "version 2, below "+h.parent[c])
		default:
			add(name, true, false, "version 1, below "+h.parent[c])
		}
	}
	return s
}
