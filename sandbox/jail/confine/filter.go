package confine

import (
	"cmp"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// A value is what an argument may be.
type value struct {
	n    uint64
	name string
}

// A check restricts an argument of a system call, counted from 0: to values, or to at most max if there are none.
// The upper half of the argument's 64 bits must be zero.
type check struct {
	arg    int
	is     []value
	max    uint32
	reason string // what the page says of it instead of the values
}

// A call is a system call that a child may make if all checks hold. Others behind it with
// the same number are alternatives.
type call struct {
	nr     uintptr
	name   string
	checks []check
}

// A group has the calls that a child makes for one purpose.
type group struct {
	name  string
	calls []call
	// errno answers the calls instead of the kernel: Go then does without them.
	errno unix.Errno
}

func one(nr uintptr, name string, checks ...check) call { return call{nr, name, checks} }

func among(arg int, values ...value) check { return check{arg: arg, is: values} }

func zero(arg int) check { return among(arg, value{0, "0"}) }

// threadFlags are those of clone(2) by which Go makes a thread (runtime/os_linux.go, cloneFlags).
const threadFlags = unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_FILES | unix.CLONE_SIGHAND |
	unix.CLONE_SYSVSEM | unix.CLONE_THREAD

// noExec allows protections of memory of which PROT_EXEC (4) is none.
var noExec = check{arg: 2, max: unix.PROT_READ | unix.PROT_WRITE, reason: "no PROT_EXEC"}

// threads are the calls by which the child with this id has threads, and clocks those that tell time and the like.
func threads(pid int) group {
	self := among(0, value{uint64(pid), "itself"})
	return group{name: "Threads", calls: []call{
		one(unix.SYS_FUTEX, "futex", among(1, value{128, "WAIT_PRIVATE"}, value{129, "WAKE_PRIVATE"})),
		one(unix.SYS_TGKILL, "tgkill", self),
		one(unix.SYS_CLONE, "clone", check{arg: 0, is: []value{{threadFlags, ""}, {threadFlags | unix.CLONE_SETTLS, ""}},
			reason: "a thread of Go"}),
		one(unix.SYS_SETPRIORITY, "setpriority", among(0, value{unix.PRIO_PROCESS, "PRIO_PROCESS"})),
		one(unix.SYS_GETPID, "getpid"), one(unix.SYS_GETTID, "gettid"), one(unix.SYS_SCHED_YIELD, "sched_yield"),
		one(unix.SYS_SCHED_GETAFFINITY, "sched_getaffinity"), one(unix.SYS_NANOSLEEP, "nanosleep"),
		one(unix.SYS_RT_SIGACTION, "rt_sigaction"), one(unix.SYS_RT_SIGPROCMASK, "rt_sigprocmask"),
		one(unix.SYS_RT_SIGRETURN, "rt_sigreturn"), one(unix.SYS_SIGALTSTACK, "sigaltstack"),
		one(unix.SYS_RESTART_SYSCALL, "restart_syscall"), one(unix.SYS_EXIT, "exit"),
		one(unix.SYS_EXIT_GROUP, "exit_group"),
	}}
}

var clocks = group{name: "Clocks, figures, random numbers", calls: []call{
	one(unix.SYS_CLOCK_GETTIME, "clock_gettime"), one(unix.SYS_GETTIMEOFDAY, "gettimeofday"),
	one(unix.SYS_GETRANDOM, "getrandom"),
	one(unix.SYS_GETRUSAGE, "getrusage"), one(unix.SYS_SYSINFO, "sysinfo"), one(unix.SYS_UNAME, "uname"),
}}

// networkCalls returns the groups of calls of a network process. It can make no socket and no connection: a
// MSG_FASTOPEN, which no flag below has, would make one.
func networkCalls(pid int) []group {
	const quiet = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL
	tcp, sol := among(1, value{unix.IPPROTO_TCP, "IPPROTO_TCP"}), among(1, value{unix.SOL_SOCKET, "SOL_SOCKET"})
	return []group{
		threads(pid),
		{name: "Memory", calls: []call{
			one(unix.SYS_MMAP, "mmap", noExec), one(unix.SYS_MPROTECT, "mprotect", noExec),
			one(unix.SYS_MADVISE, "madvise", among(2, value{unix.MADV_DONTNEED, "DONTNEED"}, value{unix.MADV_FREE, "FREE"},
				value{unix.MADV_HUGEPAGE, "HUGEPAGE"}, value{unix.MADV_NOHUGEPAGE, "NOHUGEPAGE"},
				value{unix.MADV_COLLAPSE, "COLLAPSE"})),
			one(unix.SYS_MUNMAP, "munmap"),
		}},
		{name: "Connections, each passed by the keeper", calls: []call{
			one(unix.SYS_FCNTL, "fcntl", among(1, value{unix.F_DUPFD_CLOEXEC, "F_DUPFD_CLOEXEC"},
				value{unix.F_GETFD, "F_GETFD"}, value{unix.F_SETFD, "F_SETFD"},
				value{unix.F_GETFL, "F_GETFL"}, value{unix.F_SETFL, "F_SETFL"})),
			one(unix.SYS_SENDMSG, "sendmsg", among(2, value{0, "0"}, value{quiet, "DONTWAIT|NOSIGNAL"})),
			one(unix.SYS_GETSOCKOPT, "getsockopt", sol),
			one(unix.SYS_GETSOCKOPT, "getsockopt", tcp, among(2, value{unix.TCP_INFO, "TCP_INFO"})),
			one(unix.SYS_SETSOCKOPT, "setsockopt", sol, among(2, value{unix.SO_LINGER, "SO_LINGER"},
				value{unix.SO_KEEPALIVE, "SO_KEEPALIVE"})),
			one(unix.SYS_SETSOCKOPT, "setsockopt", tcp, among(2, value{unix.TCP_NODELAY, "TCP_NODELAY"},
				value{unix.TCP_KEEPIDLE, "TCP_KEEPIDLE"}, value{unix.TCP_KEEPINTVL, "TCP_KEEPINTVL"},
				value{unix.TCP_KEEPCNT, "TCP_KEEPCNT"})),
			one(unix.SYS_READ, "read"), one(unix.SYS_WRITE, "write"), one(unix.SYS_WRITEV, "writev"),
			one(unix.SYS_CLOSE, "close"), one(unix.SYS_FSTAT, "fstat"), one(unix.SYS_RECVMSG, "recvmsg"),
			one(unix.SYS_SHUTDOWN, "shutdown"), one(unix.SYS_GETSOCKNAME, "getsockname"),
			one(unix.SYS_GETPEERNAME, "getpeername"),
		}},
		{name: "Events", calls: []call{
			one(unix.SYS_EVENTFD2, "eventfd2"), one(unix.SYS_EPOLL_CREATE1, "epoll_create1"),
			one(unix.SYS_EPOLL_CTL, "epoll_ctl"), one(unix.SYS_EPOLL_PWAIT, "epoll_pwait"),
		}},
		clocks,
		{name: "Answered with ENOSYS", errno: unix.ENOSYS, calls: []call{
			one(unix.SYS_SENDFILE, "sendfile"), one(unix.SYS_SPLICE, "splice"), one(unix.SYS_PIPE2, "pipe2"),
		}},
	}
}

// allowed returns the groups of calls that a child may make. Its own id is pid. Calls that need a check come first:
// the kernel does not run the filter for the others (Linux 5.11).
func allowed(pid int, o LockOptions) []group {
	if o.Network {
		return networkCalls(pid)
	}
	groups := []group{
		{name: "Guest: KVM, userfaultfd, TAP", calls: []call{one(unix.SYS_IOCTL, "ioctl", among(1, ioctls...))}},
		threads(pid),
		{name: "Memory", calls: []call{
			one(unix.SYS_MMAP, "mmap", noExec), one(unix.SYS_MPROTECT, "mprotect", noExec),
			one(unix.SYS_MADVISE, "madvise", among(2, value{unix.MADV_DONTNEED, "DONTNEED"}, value{unix.MADV_FREE, "FREE"},
				value{unix.MADV_WILLNEED, "WILLNEED"}, value{unix.MADV_DONTFORK, "DONTFORK"},
				value{unix.MADV_DONTDUMP, "DONTDUMP"},
				value{unix.MADV_HUGEPAGE, "HUGEPAGE"}, value{unix.MADV_NOHUGEPAGE, "NOHUGEPAGE"},
				value{unix.MADV_COLLAPSE, "COLLAPSE"},
				value{unix.MADV_POPULATE_READ, "POPULATE_READ"}, value{unix.MADV_POPULATE_WRITE, "POPULATE_WRITE"})),
			one(unix.SYS_MEMFD_CREATE, "memfd_create", among(1,
				value{unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING, "CLOEXEC|ALLOW_SEALING"},
				value{unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING | unix.MFD_NOEXEC_SEAL, "CLOEXEC|ALLOW_SEALING|NOEXEC_SEAL"})),
			one(unix.SYS_MUNMAP, "munmap"), one(unix.SYS_MINCORE, "mincore"), one(unix.SYS_MSYNC, "msync"),
			one(unix.SYS_MLOCK, "mlock"),
			one(unix.SYS_MUNLOCK, "munlock"),
		}},
		{name: "Open files", calls: []call{
			one(unix.SYS_FCNTL, "fcntl", among(1, value{unix.F_DUPFD_CLOEXEC, "F_DUPFD_CLOEXEC"},
				value{unix.F_GETFD, "F_GETFD"},
				value{unix.F_SETFD, "F_SETFD"}, value{unix.F_GETFL, "F_GETFL"}, value{unix.F_SETFL, "F_SETFL"},
				value{unix.F_ADD_SEALS, "F_ADD_SEALS"}, value{unix.F_GET_SEALS, "F_GET_SEALS"})),
			one(unix.SYS_READ, "read"), one(unix.SYS_WRITE, "write"), one(unix.SYS_READV, "readv"),
			one(unix.SYS_WRITEV, "writev"),
			one(unix.SYS_PREAD64, "pread64"), one(unix.SYS_PWRITE64, "pwrite64"), one(unix.SYS_PREADV, "preadv"),
			one(unix.SYS_PWRITEV, "pwritev"),
			one(unix.SYS_PREADV2, "preadv2"), one(unix.SYS_PWRITEV2, "pwritev2"), one(unix.SYS_LSEEK, "lseek"),
			one(unix.SYS_CLOSE, "close"),
			one(unix.SYS_FSTAT, "fstat"), one(unix.SYS_FSTATFS, "fstatfs"), one(unix.SYS_FTRUNCATE, "ftruncate"),
			one(unix.SYS_FALLOCATE, "fallocate"),
			one(unix.SYS_FSYNC, "fsync"), one(unix.SYS_FDATASYNC, "fdatasync"),
			one(unix.SYS_COPY_FILE_RANGE, "copy_file_range"),
			one(unix.SYS_FLOCK, "flock"),
			one(unix.SYS_STATX, "statx", among(2, value{unix.AT_EMPTY_PATH | unix.AT_SYMLINK_NOFOLLOW, "EMPTY_PATH|SYMLINK_NOFOLLOW"},
				value{unix.AT_EMPTY_PATH | unix.AT_NO_AUTOMOUNT, "EMPTY_PATH|NO_AUTOMOUNT"})),
		}},
		{name: "Events", calls: []call{
			one(unix.SYS_EVENTFD2, "eventfd2"), one(unix.SYS_EPOLL_CREATE1, "epoll_create1"),
			one(unix.SYS_EPOLL_CTL, "epoll_ctl"),
			one(unix.SYS_EPOLL_WAIT, "epoll_wait"), one(unix.SYS_EPOLL_PWAIT, "epoll_pwait"), one(unix.SYS_PPOLL, "ppoll"),
		}},
		{name: "Unix sockets, connected by the keeper or to itself", calls: []call{
			one(unix.SYS_SOCKETPAIR, "socketpair", among(0, value{unix.AF_UNIX, "AF_UNIX"}), check{arg: 1, is: []value{
				{unix.SOCK_STREAM | unix.SOCK_CLOEXEC, ""},
				{unix.SOCK_STREAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK, ""},
			}, reason: "SOCK_STREAM"}, zero(2)),
			one(unix.SYS_SENDTO, "sendto", check{arg: 4, is: []value{{0, ""}}, reason: "no address"}),
			one(unix.SYS_GETSOCKOPT, "getsockopt", among(1, value{unix.SOL_SOCKET, "SOL_SOCKET"})),
			one(unix.SYS_SETSOCKOPT, "setsockopt", among(1, value{unix.SOL_SOCKET, "SOL_SOCKET"}),
				among(2, value{unix.SO_SNDBUF, "SO_SNDBUF"}, value{unix.SO_RCVBUF, "SO_RCVBUF"})),
			one(unix.SYS_RECVFROM, "recvfrom"), one(unix.SYS_SENDMSG, "sendmsg"), one(unix.SYS_RECVMSG, "recvmsg"),
			one(unix.SYS_ACCEPT4, "accept4"),
			one(unix.SYS_SHUTDOWN, "shutdown"), one(unix.SYS_GETSOCKNAME, "getsockname"),
			one(unix.SYS_GETPEERNAME, "getpeername"),
		}},
		clocks,
		{name: "Answered with ENOSYS", errno: unix.ENOSYS, calls: []call{
			// Copies of package io fall back to read and write.
			one(unix.SYS_SENDFILE, "sendfile"), one(unix.SYS_SPLICE, "splice"),
		}},
	}
	if o.Shares {
		groups = append(groups, group{name: "With shares only: files below passed directories", calls: []call{
			one(unix.SYS_OPENAT, "openat"), one(unix.SYS_OPENAT2, "openat2"), one(unix.SYS_STATX, "statx"),
			one(unix.SYS_NEWFSTATAT, "newfstatat"),
			one(unix.SYS_GETDENTS64, "getdents64"), one(unix.SYS_READLINKAT, "readlinkat"),
			one(unix.SYS_SYMLINKAT, "symlinkat"),
			one(unix.SYS_MKDIRAT, "mkdirat"), one(unix.SYS_UNLINKAT, "unlinkat"), one(unix.SYS_RENAMEAT2, "renameat2"),
			one(unix.SYS_LINKAT, "linkat"),
			one(unix.SYS_UTIMENSAT, "utimensat"), one(unix.SYS_FCHOWNAT, "fchownat"),
			one(unix.SYS_FCHMOD, "fchmod", check{arg: 1, max: 0o1777, reason: "no setuid, no setgid"}),
			one(unix.SYS_FCHMODAT, "fchmodat", check{arg: 2, max: 0o1777, reason: "no setuid, no setgid"}),
		}})
	}
	return groups
}

// Offsets in struct seccomp_data (linux/seccomp.h) on a little-endian machine.
const (
	offsetNr   = 0
	offsetArch = 4
	offsetArgs = 16
)

// x32 is the bit of system-call numbers of the x32 ABI, which has the architecture of x86-64.
const x32 = 0x40000000

// assemble makes a filter of groups. refuse is its answer to all other calls.
func assemble(groups []group, refuse uint32) ([]bpf.RawInstruction, error) {
	refused := bpf.RetConstant{Val: refuse}
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offsetArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AUDIT_ARCH_X86_64, SkipTrue: 1},
		refused,
		bpf.LoadAbsolute{Off: offsetNr, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: x32, SkipTrue: 1},
		refused,
	}
	type answered struct {
		call
		answer uint32
	}
	var calls []answered
	for _, g := range groups {
		answer := uint32(unix.SECCOMP_RET_ALLOW)
		if g.errno != 0 {
			answer = unix.SECCOMP_RET_ERRNO | uint32(g.errno)
		}
		for _, c := range g.calls {
			calls = append(calls, answered{c, answer})
		}
	}
	slices.SortStableFunc(calls, func(a, b answered) int {
		return cmp.Compare(min(1, len(b.checks)), min(1, len(a.checks)))
	})
	for i := 0; i < len(calls); {
		c := calls[i]
		var body []bpf.Instruction
		for ; i < len(calls) && calls[i].nr == c.nr; i++ {
			at := len(body)
			for _, k := range calls[i].checks {
				body = append(body, k.assemble(refused)...)
			}
			body = append(body, bpf.RetConstant{Val: calls[i].answer})
			for j := at; j < len(body) && i+1 < len(calls) && calls[i+1].nr == c.nr; j++ {
				if body[j] == bpf.Instruction(refused) { // go on with the alternative
					body[j] = bpf.Jump{Skip: uint32(len(body) - j - 1)}
				}
			}
		}
		program = append(program, bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(c.nr), SkipTrue: 1},
			bpf.Jump{Skip: uint32(len(body))})
		program = append(program, body...)
	}
	return bpf.Assemble(append(program, refused))
}

// assemble ends the program with refused, or goes on behind the check if that holds.
func (k check) assemble(refused bpf.Instruction) []bpf.Instruction {
	low := uint32(offsetArgs + 8*k.arg)
	out := []bpf.Instruction{
		bpf.LoadAbsolute{Off: low + 4, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 1},
		refused,
		bpf.LoadAbsolute{Off: low, Size: 4},
	}
	if k.is == nil {
		return append(out, bpf.JumpIf{Cond: bpf.JumpLessOrEqual, Val: k.max, SkipTrue: 1}, refused)
	}
	for i, v := range k.is {
		out = append(out, bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(v.n), SkipTrue: uint8(len(k.is) - i)})
	}
	return append(out, refused)
}
