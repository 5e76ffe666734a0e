package confine

import (
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What an escape finds: descriptors of a regular file and of a Unix socket and, with shares, of a directory and of a
// file for reading.
const (
	passedFile = firstFile + iota
	passedSocket
	passedDir
	passedRead
)

// An escape is what an attacker tries who runs code in the child. It returns nil if that has gained something.
type escape struct {
	name string
	try  func() error
	// filterOnly means that only the filter refuses it. The others are tried without it as well.
	filterOnly bool
	// ownersOnly means the same for the child of a user, which owns what it was passed.
	ownersOnly bool
	// shares means that the child has shares, and the directory.
	shares bool
	// inside means that it may succeed, and then acts inside the share: ".." at its root is the root.
	inside bool
}

func sys(nr uintptr, args ...uintptr) error {
	_, err := value1(nr, args...)
	return err
}

func value1(nr uintptr, args ...uintptr) (uintptr, error) {
	var a [6]uintptr
	copy(a[:], args)
	n, _, errno := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
	if errno != 0 {
		return n, errno
	}
	return n, nil
}

var keepAlive []any

func ptr[T any](v *T) uintptr {
	keepAlive = append(keepAlive, v)
	return uintptr(unsafe.Pointer(v))
}

func str(s string) uintptr {
	b := append([]byte(s), 0)
	keepAlive = append(keepAlive, b)
	return uintptr(unsafe.Pointer(&b[0]))
}

const (
	cwd  = ^uintptr(99) // AT_FDCWD
	many = 4096
	none = ^uintptr(0)
)

func page() uintptr { return ptr(new([many]byte)) }

// vec returns an iovec of a page.
func vec() uintptr {
	return ptr(&[2]uint64{uint64(page()), many})
}

func call1(nr uintptr, args ...func() uintptr) func() error {
	return func() error {
		var a []uintptr
		for _, f := range args {
			a = append(a, f())
		}
		return sys(nr, a...)
	}
}

func n(v uintptr) func() uintptr   { return func() uintptr { return v } }
func s(text string) func() uintptr { return func() uintptr { return str(text) } }

// open opens a path of the host.
func open(path string, flags uintptr) func() error {
	return call1(unix.SYS_OPENAT, n(cwd), s(path), n(flags), n(0o600))
}

// connect connects to a Unix socket.
func connect(address string, domain, kind uintptr) func() error {
	return func() error {
		fd, err := value1(unix.SYS_SOCKET, domain, kind, 0)
		if err != nil {
			return err
		}
		a := unix.RawSockaddrUnix{Family: unix.AF_UNIX}
		for i := range len(address) {
			a.Path[i] = int8(address[i])
		}
		return sys(unix.SYS_CONNECT, fd, ptr(&a), uintptr(2+len(address)))
	}
}

func socket(domain, kind, protocol uintptr) func() error {
	return call1(unix.SYS_SOCKET, n(domain), n(kind), n(protocol))
}

// hostAddress connects to an address outside, which a namespace of networks does not have.
func hostAddress() error {
	fd, err := value1(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	a := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: 0x3500, Addr: [4]byte{1, 1, 1, 1}}
	return sys(unix.SYS_CONNECT, fd, ptr(&a), unsafe.Sizeof(a))
}

// executable maps memory that can be executed.
func executable(fd uintptr, flags uintptr) func() error {
	return call1(unix.SYS_MMAP, n(0), n(many), n(unix.PROT_READ|unix.PROT_EXEC), n(flags), n(fd), n(0))
}

func protect(nr uintptr) func() error {
	return func() error {
		at, err := value1(unix.SYS_MMAP, 0, many, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, none, 0)
		if err != nil {
			return err
		}
		return sys(nr, at, many, unix.PROT_READ|unix.PROT_EXEC, none)
	}
}

// child makes a process, which ends at once.
func child(nr uintptr, args ...uintptr) func() error {
	return func() error {
		pid, err := value1(nr, args...)
		if err == nil && pid == 0 {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		return err
	}
}

func clone3() error {
	type cloneArgs struct{ flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls uint64 }
	a := cloneArgs{exitSignal: uint64(unix.SIGCHLD)}
	return child(unix.SYS_CLONE3, ptr(&a), unsafe.Sizeof(a))()
}

// memfdExec executes a program from memory.
func memfdExec() error {
	fd, err := value1(unix.SYS_MEMFD_CREATE, str("x"), unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return err
	}
	script := []byte("#!/bin/sh\n")
	keepAlive = append(keepAlive, script)
	if err := sys(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&script[0])), uintptr(len(script))); err != nil {
		return err
	}
	return sys(unix.SYS_EXECVEAT, fd, str(""), ptr(&[1]uintptr{}), ptr(&[1]uintptr{}), unix.AT_EMPTY_PATH)
}

func bpfCall(cmd uintptr) func() error {
	return func() error {
		a := [16]uint32{0: unix.BPF_MAP_TYPE_ARRAY, 1: 4, 2: 4, 3: 1}
		return sys(unix.SYS_BPF, cmd, ptr(&a), unsafe.Sizeof(a))
	}
}

func perfOpen() error {
	a := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{}))}
	return sys(unix.SYS_PERF_EVENT_OPEN, ptr(&a), none, 0, none, 0) // all processes of processor 0
}

// raise raises a limit that Enter has set.
func raise(nr uintptr, which uintptr, n uint64) func() error {
	return func() error {
		l := unix.Rlimit{Cur: n, Max: n}
		if nr == unix.SYS_SETRLIMIT {
			return sys(nr, which, ptr(&l))
		}
		return sys(nr, 0, which, ptr(&l), 0)
	}
}

func capabilities() error {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	d := [2]unix.CapUserData{{Effective: 1 << unix.CAP_SYS_ADMIN, Permitted: 1 << unix.CAP_SYS_ADMIN}}
	return sys(unix.SYS_CAPSET, ptr(&h), ptr(&d))
}

func handle() error {
	h := struct {
		size  uint32
		kind  int32
		bytes [128]byte
	}{size: 128, kind: 1}
	return sys(unix.SYS_OPEN_BY_HANDLE_AT, cwd, ptr(&h), unix.O_RDONLY)
}

func below(path string, flags uintptr) func() error {
	return call1(unix.SYS_OPENAT, n(passedDir), s(path), n(flags), n(0o600))
}

func below2(path string, flags uint64) func() error {
	return func() error {
		how := unix.OpenHow{Flags: flags}
		return sys(unix.SYS_OPENAT2, passedDir, str(path), ptr(&how), unsafe.Sizeof(how))
	}
}

// otherProcess reports no error if the directory of a process other than this one can be read.
func otherProcess() error {
	fd, err := value1(unix.SYS_OPENAT, cwd, str("/proc"), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	buf := make([]byte, 8<<10)
	k, err := value1(unix.SYS_GETDENTS64, fd, uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)))
	runtime.KeepAlive(buf)
	if err != nil {
		return err
	}
	_, _, names := syscall.ParseDirent(buf[:k], -1, nil)
	for _, name := range names {
		if strings.Trim(name, "0123456789") == "" && name != "1" {
			return nil
		}
	}
	return errors.New("there is only this process")
}

// sendAway sends a message to an address instead of the peer.
func sendAway() error {
	a := unix.RawSockaddrUnix{Family: unix.AF_UNIX, Path: [108]int8{'/', 'x'}}
	return sys(unix.SYS_SENDTO, passedSocket, page(), 1, 0, ptr(&a), unsafe.Sizeof(a))
}

// keeperPID is the keeper's process id as the host sees it: the child's argument.
var keeperPID uintptr

func keeper() uintptr { return keeperPID }

// keeperSocket is the name of an abstract socket of the keeper with this process id.
func keeperSocket(pid uintptr) string { return fmt.Sprintf("\x00drowse-confine-test-%d", pid) }

func escapes() []escape {
	all := []escape{
		// Files of the host.
		{name: "open /etc/passwd", try: open("/etc/passwd", unix.O_RDONLY)},
		{name: "open /dev/kvm again", try: open("/dev/kvm", unix.O_RDWR)},
		{name: "open /dev/mem", try: open("/dev/mem", unix.O_RDWR)},
		{name: "open /proc/1/environ", try: open("/proc/1/environ", unix.O_RDONLY)},
		{name: "open /proc/self/mem", try: open("/proc/self/mem", unix.O_RDWR)},
		{name: "open /proc/sysrq-trigger", try: open("/proc/sysrq-trigger", unix.O_WRONLY)},
		{name: "open /sys/kernel/uevent_helper", try: open("/sys/kernel/uevent_helper", unix.O_WRONLY)},
		{name: "open /run/drowse", try: open("/run/drowse", unix.O_RDONLY|unix.O_DIRECTORY)},
		{name: "open the root's parent", try: open("/../../etc/shadow", unix.O_RDONLY)},
		{name: "write into the root", try: open("/new", unix.O_RDWR|unix.O_CREAT)},
		{name: "make a directory in the root", try: call1(unix.SYS_MKDIR, s("/new"), n(0o700))},
		{name: "make a device", try: call1(unix.SYS_MKNOD, s("/sda"), n(unix.S_IFBLK|0o600), n(8<<8))},
		{name: "read a link of /proc", try: call1(unix.SYS_READLINK, s("/proc/self/exe"), page, n(many))},
		{name: "stat /etc", try: call1(unix.SYS_STAT, s("/etc"), page)},
		{name: "access /bin/sh", try: call1(unix.SYS_ACCESS, s("/bin/sh"), n(0))},
		{name: "stat by statx", try: call1(unix.SYS_STATX, n(cwd), s("/etc"), n(0), n(0x7ff), page)},
		{name: "stat a file system", try: call1(unix.SYS_STATFS, s("/etc"), page)},
		{name: "truncate by name", try: call1(unix.SYS_TRUNCATE, s("/etc/passwd"), n(0))},
		{name: "open_by_handle_at", try: handle},
		{name: "name_to_handle_at", try: call1(unix.SYS_NAME_TO_HANDLE_AT, n(cwd), s("/etc"), page, page, n(0))},
		{name: "chroot", try: call1(unix.SYS_CHROOT, s("/"))},
		{name: "leave the root by fchdir", try: call1(unix.SYS_FCHDIR, n(passedFile))},
		{name: "pivot_root", try: call1(unix.SYS_PIVOT_ROOT, s("/"), s("/"))},
		{name: "mount proc", try: call1(unix.SYS_MOUNT, s("proc"), s("/"), s("proc"), n(0), n(0))},
		{name: "remount the root writable", try: call1(unix.SYS_MOUNT, n(0), s("/"), n(0), n(unix.MS_REMOUNT), n(0))},
		{name: "umount", try: call1(unix.SYS_UMOUNT2, s("/"), n(unix.MNT_DETACH))},
		{name: "fsopen", try: call1(unix.SYS_FSOPEN, s("proc"), n(0))},
		{name: "open_tree", try: call1(unix.SYS_OPEN_TREE, n(cwd), s("/"), n(unix.OPEN_TREE_CLONE))},
		{name: "statmount", try: call1(unix.SYS_STATMOUNT, page, page, n(many), n(0))},
		{name: "inotify", try: call1(unix.SYS_INOTIFY_INIT1, n(0)), filterOnly: true},
		{name: "fanotify of the host", try: call1(unix.SYS_FANOTIFY_INIT, n(0), n(0))},
		{name: "quotactl", try: call1(unix.SYS_QUOTACTL, n(0), s("/dev/vda"), n(0), page)},
		{name: "swapon", try: call1(unix.SYS_SWAPON, s("/none"), n(0))},
		{name: "acct", try: call1(unix.SYS_ACCT, s("/none"))},
		// Passed files.
		{name: "make a passed file setuid", try: call1(unix.SYS_FCHMOD, n(passedFile), n(0o4755)), ownersOnly: true},
		{name: "give a passed file away", try: call1(unix.SYS_FCHOWN, n(passedFile), n(1), n(1))},
		{name: "set an attribute of a passed file", try: call1(unix.SYS_FSETXATTR, n(passedFile), s("trusted.x"), s("y"), n(1), n(0))},
		{name: "have signals of a passed socket sent", try: call1(unix.SYS_FCNTL, n(passedSocket), n(unix.F_SETOWN), keeper)},
		{name: "lease a passed file", try: call1(unix.SYS_FCNTL, n(passedFile), n(unix.F_SETLEASE), n(unix.F_WRLCK)), ownersOnly: true},
		{name: "set flags of a passed file", try: call1(unix.SYS_IOCTL, n(passedFile), n(0x40086602), page), ownersOnly: true},
		{name: "execute a passed file", try: call1(unix.SYS_EXECVEAT, n(passedFile), s(""), page, page, n(unix.AT_EMPTY_PATH))},
		{name: "map a passed file executable", try: executable(passedFile, unix.MAP_PRIVATE), filterOnly: true},
		{name: "link a passed file", try: call1(unix.SYS_LINKAT, n(passedFile), s(""), n(cwd), s("/x"), n(unix.AT_EMPTY_PATH))},
		{name: "open above a passed file", try: call1(unix.SYS_OPENAT, n(passedFile), s(".."), n(0), n(0))},
		{name: "make files of a passed file by io_uring", try: call1(unix.SYS_IO_URING_SETUP, n(8), page), filterOnly: true},
		{name: "io_setup", try: call1(unix.SYS_IO_SETUP, n(8), page), filterOnly: true},
		// Other processes.
		{name: "signal the keeper", try: call1(unix.SYS_KILL, keeper, n(0))},
		{name: "signal a thread of the keeper", try: call1(unix.SYS_TGKILL, keeper, keeper, n(0))},
		{name: "signal all", try: call1(unix.SYS_KILL, n(none), n(0))},
		{name: "tkill", try: call1(unix.SYS_TKILL, keeper, n(0))},
		{name: "queue a signal", try: call1(unix.SYS_RT_SIGQUEUEINFO, keeper, n(10), page)},
		{name: "pidfd_open of the keeper", try: call1(unix.SYS_PIDFD_OPEN, keeper, n(0))},
		{name: "pidfd_getfd", try: call1(unix.SYS_PIDFD_GETFD, n(passedFile), n(0), n(0))},
		{name: "pidfd_send_signal", try: call1(unix.SYS_PIDFD_SEND_SIGNAL, n(passedFile), n(9), n(0), n(0))},
		{name: "ptrace the keeper", try: call1(unix.SYS_PTRACE, n(unix.PTRACE_ATTACH), keeper, n(0), n(0))},
		{name: "ptrace seize", try: call1(unix.SYS_PTRACE, n(unix.PTRACE_SEIZE), keeper, n(0), n(0))},
		{name: "process_vm_readv", try: call1(unix.SYS_PROCESS_VM_READV, keeper, vec, n(1), vec, n(1), n(0))},
		{name: "process_vm_writev", try: call1(unix.SYS_PROCESS_VM_WRITEV, keeper, vec, n(1), vec, n(1), n(0))},
		{name: "process_madvise", try: call1(unix.SYS_PROCESS_MADVISE, n(passedFile), page, n(1), n(4), n(0))},
		{name: "kcmp", try: call1(unix.SYS_KCMP, keeper, keeper, n(0), n(0), n(0))},
		{name: "migrate_pages", try: call1(unix.SYS_MIGRATE_PAGES, keeper, n(1), page, page)},
		{name: "limits of the keeper", try: call1(unix.SYS_PRLIMIT64, keeper, n(unix.RLIMIT_NOFILE), n(0), page)},
		{name: "perf_event_open", try: perfOpen},
		{name: "raise its own priority", try: call1(unix.SYS_SETPRIORITY, n(unix.PRIO_PROCESS), n(0), n(^uintptr(9)))},
		{name: "priority of another user", try: call1(unix.SYS_SETPRIORITY, n(unix.PRIO_USER), n(1), n(10))},
		{name: "real-time scheduling", try: call1(unix.SYS_SCHED_SETSCHEDULER, n(0), n(1), func() uintptr { return ptr(&[1]int32{50}) })},
		{name: "fork", try: child(unix.SYS_FORK), filterOnly: true},
		{name: "vfork", try: child(unix.SYS_CLONE, uintptr(unix.SIGCHLD)), filterOnly: true},
		{name: "clone3", try: clone3, filterOnly: true},
		{name: "clone with a namespace of users", try: child(unix.SYS_CLONE, unix.CLONE_NEWUSER|uintptr(unix.SIGCHLD)), filterOnly: true},
		{name: "unshare mounts", try: call1(unix.SYS_UNSHARE, n(unix.CLONE_NEWNS))},
		{name: "unshare users", try: call1(unix.SYS_UNSHARE, n(unix.CLONE_NEWUSER)), filterOnly: true},
		{name: "setns", try: call1(unix.SYS_SETNS, n(passedFile), n(0))},
		{name: "execve", try: call1(unix.SYS_EXECVE, s("/bin/sh"), page, page)},
		{name: "execve of itself", try: call1(unix.SYS_EXECVE, s("/proc/self/exe"), page, page)},
		{name: "execute from memory", try: memfdExec, filterOnly: true},
		// Rights.
		{name: "setuid 0", try: call1(unix.SYS_SETUID, n(0))},
		{name: "setresuid 0", try: call1(unix.SYS_SETRESUID, n(0), n(0), n(0))},
		{name: "setgid 0", try: call1(unix.SYS_SETGID, n(0))},
		{name: "setgroups", try: call1(unix.SYS_SETGROUPS, n(1), page)},
		{name: "capset", try: capabilities},
		{name: "ambient capability", try: call1(unix.SYS_PRCTL, n(unix.PR_CAP_AMBIENT), n(unix.PR_CAP_AMBIENT_RAISE), n(unix.CAP_NET_ADMIN))},
		{name: "keep capabilities, by securebits", try: call1(unix.SYS_PRCTL, n(unix.PR_SET_SECUREBITS), n(1))},
		{name: "drop no_new_privs", try: call1(unix.SYS_PRCTL, n(unix.PR_SET_NO_NEW_PRIVS), n(0))},
		{name: "become dumpable", try: call1(unix.SYS_PRCTL, n(unix.PR_SET_DUMPABLE), n(1)), filterOnly: true},
		{name: "outlive the keeper", try: call1(unix.SYS_PRCTL, n(unix.PR_SET_PDEATHSIG), n(0)), filterOnly: true},
		{name: "limit of descriptors", try: raise(unix.SYS_PRLIMIT64, unix.RLIMIT_NOFILE, 1<<19)},
		{name: "limit of core dumps", try: raise(unix.SYS_SETRLIMIT, unix.RLIMIT_CORE, 1<<30)},
		{name: "personality", try: call1(unix.SYS_PERSONALITY, n(0x0400000)), filterOnly: true},
		{name: "another filter", try: call1(unix.SYS_SECCOMP, n(unix.SECCOMP_SET_MODE_STRICT), n(0), n(0)), filterOnly: true},
		{name: "another Landlock ruleset", try: call1(unix.SYS_LANDLOCK_CREATE_RULESET, func() uintptr { return ptr(&[3]uint64{1, 0, 0}) }, n(8), n(0)), filterOnly: true},
		// The kernel.
		{name: "bpf map", try: bpfCall(unix.BPF_MAP_CREATE)},
		{name: "bpf program", try: bpfCall(unix.BPF_PROG_LOAD)},
		{name: "userfaultfd", try: call1(unix.SYS_USERFAULTFD, n(0))},
		{name: "userfaultfd of user faults", try: call1(unix.SYS_USERFAULTFD, n(1)), filterOnly: true},
		{name: "keyctl", try: call1(unix.SYS_KEYCTL, n(0), n(none-2), n(1)), filterOnly: true},
		{name: "add_key", try: call1(unix.SYS_ADD_KEY, s("user"), s("x"), s("y"), n(1), n(none-3)), filterOnly: true},
		{name: "init_module", try: call1(unix.SYS_INIT_MODULE, page, n(many), s(""))},
		{name: "finit_module", try: call1(unix.SYS_FINIT_MODULE, n(passedFile), s(""), n(0))},
		{name: "kexec_load", try: call1(unix.SYS_KEXEC_LOAD, n(0), n(0), n(0), n(0))},
		{name: "reboot", try: call1(unix.SYS_REBOOT, n(0), n(0), n(0), n(0))},
		{name: "settimeofday", try: call1(unix.SYS_SETTIMEOFDAY, n(0), func() uintptr { return ptr(&[2]int32{}) })},
		{name: "adjtimex", try: call1(unix.SYS_ADJTIMEX, func() uintptr { return ptr(&unix.Timex{Modes: unix.ADJ_TICK, Tick: 10000}) })},
		{name: "sethostname", try: call1(unix.SYS_SETHOSTNAME, s("x"), n(1))},
		{name: "setdomainname", try: call1(unix.SYS_SETDOMAINNAME, s("x"), n(1))},
		{name: "syslog", try: call1(unix.SYS_SYSLOG, n(4), page, n(0))},
		{name: "sysctl", try: call1(unix.SYS__SYSCTL, page)},
		{name: "ioperm", try: call1(unix.SYS_IOPERM, n(0x80), n(1), n(1))},
		{name: "iopl", try: call1(unix.SYS_IOPL, n(3))},
		{name: "modify_ldt", try: call1(unix.SYS_MODIFY_LDT, n(0), page, n(many)), filterOnly: true},
		{name: "arch_prctl", try: call1(unix.SYS_ARCH_PRCTL, n(0x1003), page), filterOnly: true},
		{name: "vhangup", try: call1(unix.SYS_VHANGUP)},
		{name: "executable memory", try: executable(none, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS), filterOnly: true},
		{name: "memory made executable", try: protect(unix.SYS_MPROTECT), filterOnly: true},
		{name: "memory made executable, with a key", try: protect(unix.SYS_PKEY_MPROTECT), filterOnly: true},
		{name: "shared memory of System V", try: call1(unix.SYS_SHMGET, n(1), n(many), n(0o1600)), filterOnly: true},
		{name: "message queue of System V", try: call1(unix.SYS_MSGGET, n(1), n(0o1600)), filterOnly: true},
		{name: "semaphores of System V", try: call1(unix.SYS_SEMGET, n(1), n(1), n(0o1600)), filterOnly: true},
		{name: "message queue of POSIX", try: call1(unix.SYS_MQ_OPEN, s("x"), n(unix.O_CREAT|unix.O_RDWR), n(0o600), n(0))},
		{name: "secret memory", try: call1(unix.SYS_MEMFD_SECRET, n(0)), filterOnly: true},
		{name: "huge pages in memory files", try: call1(unix.SYS_MEMFD_CREATE, s("x"), n(unix.MFD_HUGETLB)), filterOnly: true},
		{name: "poison memory", try: call1(unix.SYS_MADVISE, func() uintptr { return page() &^ (many - 1) }, n(many), n(unix.MADV_HWPOISON))},
		// Sockets.
		{name: "network", try: hostAddress},
		{name: "raw socket", try: socket(unix.AF_INET, unix.SOCK_RAW, 1)},
		{name: "packet socket", try: socket(unix.AF_PACKET, unix.SOCK_RAW, 0x0300)},
		{name: "netlink", try: socket(unix.AF_NETLINK, unix.SOCK_RAW, 0), filterOnly: true},
		{name: "vsock", try: socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0), filterOnly: true},
		{name: "crypto socket", try: socket(unix.AF_ALG, unix.SOCK_SEQPACKET, 0), filterOnly: true},
		{name: "Unix socket by path", try: connect("/run/drowse-confine-test\x00", unix.AF_UNIX, unix.SOCK_STREAM)},
		{name: "abstract Unix socket", try: connect(keeperSocket(keeperPID), unix.AF_UNIX, unix.SOCK_STREAM)},
		{name: "send to another address", try: sendAway},
		{name: "pair of internet sockets", try: call1(unix.SYS_SOCKETPAIR, n(unix.AF_INET), n(unix.SOCK_STREAM), n(0), page)},
		{name: "datagram Unix sockets", try: call1(unix.SYS_SOCKETPAIR, n(unix.AF_UNIX), n(unix.SOCK_DGRAM), n(0), page), filterOnly: true},
		{name: "bind a passed socket", try: call1(unix.SYS_BIND, n(passedSocket), func() uintptr { return ptr(&unix.RawSockaddrUnix{Family: 1, Path: [108]int8{'/', 'x'}}) }, n(110))},
		{name: "be somebody else for a socket's peer", try: call1(unix.SYS_SETSOCKOPT, n(passedSocket), n(unix.SOL_SOCKET), n(unix.SO_PRIORITY), func() uintptr { return ptr(&[1]int32{7}) }, n(4))},
		{name: "push input into a terminal", try: call1(unix.SYS_IOCTL, n(0), n(unix.TIOCSTI), s("x"))},
		{name: "take a terminal", try: call1(unix.SYS_IOCTL, n(0), n(unix.TIOCSCTTY), n(1))},
		{name: "a TAP device", try: call1(unix.SYS_IOCTL, n(passedFile), n(unix.TUNSETIFF), page)},
		// Shares.
		{name: "share: ..", try: below("..", unix.O_RDONLY|unix.O_DIRECTORY), shares: true, inside: true},
		{name: "share: a file above", try: below("../secret", unix.O_RDONLY), shares: true},
		{name: "share: write above", try: below("../new", unix.O_WRONLY|unix.O_CREAT), shares: true, inside: true},
		{name: "share: /etc/passwd", try: below("../../../../../../etc/passwd", unix.O_RDONLY), shares: true},
		{name: "share: openat2 without bounds", try: below2("../secret", unix.O_RDONLY), shares: true},
		{name: "share: a link that leads out", try: below("out", unix.O_RDONLY), shares: true},
		{name: "share: an absolute link", try: below("absolute", unix.O_RDONLY), shares: true},
		{name: "share: remove above", try: call1(unix.SYS_UNLINKAT, n(passedDir), s("../secret"), n(0)), shares: true},
		{name: "share: rename out", try: call1(unix.SYS_RENAMEAT2, n(passedDir), s("file"), n(passedDir), s("../file"), n(0)), shares: true, inside: true},
		{name: "share: link in from above", try: call1(unix.SYS_LINKAT, n(passedDir), s("../secret"), n(passedDir), s("mine"), n(0)), shares: true},
		{name: "share: directory above", try: call1(unix.SYS_MKDIRAT, n(passedDir), s("../new"), n(0o700)), shares: true, inside: true},
		{name: "share: symbolic link above", try: call1(unix.SYS_SYMLINKAT, s("x"), n(passedDir), s("../new")), shares: true, inside: true},
		{name: "share: a device", try: call1(unix.SYS_MKNODAT, n(passedDir), s("sda"), n(unix.S_IFBLK|0o600), n(8<<8)), shares: true},
		{name: "share: a FIFO", try: call1(unix.SYS_MKNODAT, n(passedDir), s("fifo"), n(unix.S_IFIFO|0o600), n(0)), shares: true},
		{name: "share: setuid", try: call1(unix.SYS_FCHMODAT, n(passedDir), s("file"), n(0o4755)), shares: true, filterOnly: true},
		// Inside, the guest's root acts on files of any owner.
		{name: "share: mode above", try: call1(unix.SYS_FCHMODAT, n(passedDir), s("../secret"), n(0o777)), shares: true},
		{name: "share: owner above", try: call1(unix.SYS_FCHOWNAT, n(passedDir), s("../secret"), n(0), n(0), n(0)), shares: true},
		{name: "share: times above", try: call1(unix.SYS_UTIMENSAT, n(passedDir), s("../secret"), n(0), n(0)), shares: true},
		{name: "share: attributes above", try: call1(unix.SYS_NEWFSTATAT, n(passedDir), s("../secret"), s(strings.Repeat(" ", 256)), n(0)), shares: true},
		// Its right to change files of any owner is for the shares alone. The values are those that these files have.
		{name: "share: mode of a device of the host", try: call1(unix.SYS_FCHMOD, n(0), n(0o666)), shares: true},
		{name: "share: owner of a device of the host", try: call1(unix.SYS_FCHOWNAT, n(0), s(""), n(none), n(none), n(unix.AT_EMPTY_PATH)), shares: true},
		{name: "share: times of a device of the host", try: call1(unix.SYS_UTIMENSAT, n(0), n(0), n(0), n(0)), shares: true},
		{name: "share: mode of a device by /proc", try: call1(unix.SYS_FCHMODAT, n(cwd), s("/proc/self/fd/0"), n(0o666)), shares: true},
		{name: "share: mode of a file passed for reading", try: call1(unix.SYS_FCHMOD, n(passedRead), n(0o600)), shares: true},
		{name: "share: owner of a file passed for reading", try: call1(unix.SYS_FCHOWNAT, n(passedRead), s(""), n(0), n(0), n(unix.AT_EMPTY_PATH)), shares: true},
		{name: "share: times of a file passed for reading", try: call1(unix.SYS_UTIMENSAT, n(passedRead), n(0), n(0), n(0)), shares: true},
		{name: "share: mode of a file opened ahead", try: call1(unix.SYS_FCHMOD, func() uintptr { return uintptr(openedAhead) }, n(0o666)), shares: true},
		{name: "share: write to a file passed for reading", try: open("/proc/self/fd/"+strconv.Itoa(passedRead), unix.O_WRONLY), shares: true},
		{name: "share: memory by /proc", try: open("/proc/self/mem", unix.O_RDWR), shares: true},
		{name: "share: root by /proc", try: open("/proc/self/root/etc/passwd", unix.O_RDONLY), shares: true},
		{name: "share: the program by /proc", try: open("/proc/self/exe", unix.O_RDONLY), shares: true},
		{name: "share: other processes in /proc", try: otherProcess, shares: true},
		{name: "share: sysctl by /proc", try: open("/proc/sys/kernel/hostname", unix.O_WRONLY), shares: true},
	}
	return all
}
