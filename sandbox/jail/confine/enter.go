package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/landlock-lsm/go-landlock/landlock"
	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

// Errors of Enter.
var (
	// ErrCgo means that the program was built with cgo, whose threads the Go runtime cannot reach.
	ErrCgo = errors.New("a program with cgo cannot be confined: build it with CGO_ENABLED=0")
	// ErrNotStarted means that Start did not start this process, or that it has entered already.
	ErrNotStarted = errors.New("this process was not started to be confined, or has entered already")
	// ErrOrphan means that the keeper has ended.
	ErrOrphan = errors.New("the keeper has ended")
)

// An assignment is what Start tells Enter, in the environment.
type assignment struct {
	ID        int    `json:"id"`   // user, and group unless User
	User      bool   `json:"user"` // the keeper is not root: ID and the group stay
	Life      int    `json:"life"` // the read end of a pipe of which the keeper has the other
	Files     int    `json:"files"`
	Shares    bool   `json:"shares,omitempty"`
	Network   bool   `json:"network,omitempty"`
	LogOnly   bool   `json:"log_only,omitempty"`
	FileBytes uint64 `json:"file_bytes,omitempty"`
	OpenFiles uint64 `json:"open_files,omitempty"`
}

// assignmentEnv is the variable with the assignment.
const assignmentEnv = "DROWSE_CONFINED"

// defaultOpenFiles is the limit on descriptors unless the profile has another.
const defaultOpenFiles = 4096

// hostname is what a child sees instead of the host's.
const hostname = "drowse"

// emptyRoot is where the child's root is mounted before it becomes the root: a directory that every host has.
const emptyRoot = "/proc"

// shareRights are what a child may do below a shared directory. Linux has all of them since 6.2.
const shareRights = ll.AccessFSReadFile | ll.AccessFSReadDir | ll.AccessFSWriteFile | ll.AccessFSTruncate |
	ll.AccessFSRefer | ll.AccessFSRemoveDir | ll.AccessFSRemoveFile | ll.AccessFSMakeDir |
	ll.AccessFSMakeReg | ll.AccessFSMakeSym

const shareABI = 3

// Enter takes from this process what it does not need once its files are open: the host's files, its rights and its
// user id. Afterwards its root directory is empty and read-only. It stays possible to use open files, and to get
// others through a socket. If Enter fails, the process must end.
//
// It returns what the keeper has chosen for Lock.
func Enter() (LockOptions, error) {
	a, err := enter()
	if err != nil {
		return LockOptions{}, fmt.Errorf("confining this process: %w", err)
	}
	return LockOptions{Shares: a.Shares, Network: a.Network, LogOnly: a.LogOnly, life: a.Life}, nil
}

func enter() (a assignment, err error) {
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_GETPID, 0, 0, 0); errno == unix.ENOTSUP {
		return a, ErrCgo
	}
	if err := json.Unmarshal([]byte(os.Getenv(assignmentEnv)), &a); err != nil || a.ID == 0 {
		return a, ErrNotStarted
	}
	if err := os.Unsetenv(assignmentEnv); err != nil {
		return a, err
	}
	_ = time.Now().Local().String() // reads the host's time zone, which a log needs later
	if abi, _ := ll.LandlockGetABIVersion(); a.Shares && abi < shareABI {
		return a, fmt.Errorf("the kernel has Landlock's ABI %d, and shares need %d (Linux 6.2), "+
			"or '..' would lead out of them: update the kernel, or have no shares", abi, shareABI)
	}
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"limiting resources", a.limit},
		{"taking the host's files away", a.changeRoot},
		{"dropping rights", a.dropRights},
		{"tying it to the keeper", a.tie},
		{"restricting it by Landlock", a.restrict},
	} {
		if err := step.do(); err != nil {
			return a, fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return a, nil
}

func (a *assignment) limit() error {
	files := a.OpenFiles
	if files == 0 {
		files = defaultOpenFiles
	}
	limits := map[int]uint64{unix.RLIMIT_CORE: 0, unix.RLIMIT_MSGQUEUE: 0, unix.RLIMIT_NOFILE: files}
	if a.User {
		limits[unix.RLIMIT_NPROC] = userThreads
	}
	signal.Ignore(unix.SIGXFSZ) // so that a write beyond FileBytes, which may be set later, fails with EFBIG
	if a.FileBytes > 0 {
		limits[unix.RLIMIT_FSIZE] = a.FileBytes
	}
	for which, n := range limits {
		if err := syscall.Setrlimit(which, &syscall.Rlimit{Cur: n, Max: n}); err != nil {
			return os.NewSyscallError("setrlimit("+strconv.Itoa(which)+")", err)
		}
	}
	return os.NewSyscallError("sethostname", unix.Sethostname([]byte(hostname)))
}

// changeRoot needs the namespace of mounts that Start has made.
func (a *assignment) changeRoot() error {
	const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return os.NewSyscallError("mount(MS_PRIVATE)", err)
	}
	if err := unix.Mount("drowse", emptyRoot, "tmpfs", safe, "mode=0755,size=4096,nr_inodes=4"); err != nil {
		return os.NewSyscallError("mount(tmpfs)", err)
	}
	if a.Shares {
		// devices/fs opens files that it has as /proc/self/fd/N. This procfs shows only the child.
		if err := os.Mkdir(emptyRoot+"/proc", 0o555); err != nil {
			return err
		}
		if err := unix.Mount("proc", emptyRoot+"/proc", "proc", safe|unix.MS_RDONLY, "subset=pid,hidepid=2"); err != nil {
			return os.NewSyscallError("mount(proc)", err)
		}
	}
	if err := unix.Chdir(emptyRoot); err != nil {
		return os.NewSyscallError("chdir", err)
	}
	// The old root is put above the new one, and then taken away: pivot_root(2), "pivot_root(".", ".")".
	if err := unix.PivotRoot(".", "."); err != nil {
		return os.NewSyscallError("pivot_root", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return os.NewSyscallError("umount", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return os.NewSyscallError("chdir", err)
	}
	return os.NewSyscallError("mount(MS_RDONLY)", unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY|safe, ""))
}

func (a *assignment) dropRights() error {
	for c := uintptr(0); ; c++ {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			break // beyond the last capability
		}
		if err != nil {
			return os.NewSyscallError("prctl(PR_CAPBSET_READ)", err)
		}
		if has == 0 {
			continue
		}
		if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0, 0); errno != 0 {
			return os.NewSyscallError("prctl(PR_CAPBSET_DROP)", errno)
		}
	}
	var kept []uintptr
	if a.Shares {
		kept = shareCapabilities
		if err := prctlAll("PR_SET_KEEPCAPS", unix.PR_SET_KEEPCAPS, 1); err != nil {
			return err
		}
	}
	if !a.User {
		if err := a.becomeID(); err != nil {
			return err
		}
	}
	if err := setCapabilities(kept); err != nil {
		return os.NewSyscallError("capset", err)
	}
	return prctlAll("PR_SET_NO_NEW_PRIVS", unix.PR_SET_NO_NEW_PRIVS, 1)
}

func (a *assignment) becomeID() error {
	if err := syscall.Setgroups(nil); err != nil {
		return os.NewSyscallError("setgroups", err)
	}
	if err := syscall.Setresgid(a.ID, a.ID, a.ID); err != nil {
		return os.NewSyscallError("setresgid", err)
	}
	return os.NewSyscallError("setresuid", syscall.Setresuid(a.ID, a.ID, a.ID))
}

// tie makes the child end with the keeper, and unreadable for others. The change of the user id has undone both.
func (a *assignment) tie() error {
	if err := prctlAll("PR_SET_PDEATHSIG", unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL)); err != nil {
		return err
	}
	if err := prctlAll("PR_SET_DUMPABLE", unix.PR_SET_DUMPABLE, 0); err != nil {
		return err
	}
	// The keeper may have ended before. Then nobody has the other end.
	p := []unix.PollFd{{Fd: int32(a.Life)}} // POLLHUP needs no asking
	for {
		switch _, err := unix.Poll(p, 0); {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return os.NewSyscallError("poll", err)
		case p[0].Revents != 0:
			return ErrOrphan
		default:
			return nil
		}
	}
}

// restrict is the wall behind the empty root and the filter: nothing can be opened, no abstract Unix socket reached.
func (a *assignment) restrict() error {
	var rules []landlock.Rule
	for fd := firstFile; a.Shares && fd < firstFile+a.Files; fd++ {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return os.NewSyscallError("fstat", err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			rules = append(rules, landlock.PathAccess(shareRights, "/proc/self/fd/"+strconv.Itoa(fd)))
		}
	}
	// BestEffort, because it is the second wall: Probe reports a kernel that lacks it.
	return landlock.V11.BestEffort().Restrict(rules...)
}

func prctlAll(name string, option, arg uintptr) error {
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, option, arg, 0, 0, 0, 0); errno != 0 {
		return os.NewSyscallError("prctl("+name+")", errno)
	}
	return nil
}
