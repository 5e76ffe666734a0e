package confine

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// LockOptions are those of Lock.
type LockOptions struct {
	// Shares adds the calls that serve shared directories.
	Shares bool
	// Network leaves the calls of a network process instead.
	Network bool
	// LogOnly has the kernel log what the filter would refuse, and do it. It is for finding what a child needs.
	LogOnly bool

	life int // of the assignment; 0 without Enter
}

// Lock leaves all threads of this process, and those to come, the system calls of docs/JAIL.md. Any other kills the
// process by SIGSYS. It is the child's last preparation, after Enter: it also waits until the child is in its cgroup.
func Lock(o LockOptions) error {
	refuse := uint32(unix.SECCOMP_RET_KILL_PROCESS)
	if o.LogOnly {
		refuse = unix.SECCOMP_RET_LOG
	}
	return lock(o, refuse)
}

func lock(o LockOptions, refuse uint32) error {
	program, err := assemble(allowed(os.Getpid(), o), refuse)
	if err != nil {
		return fmt.Errorf("making the filter of system calls: %w", err)
	}
	if o.life == 0 { // else Enter has done it
		// For all threads, because Go may make the next call in another one.
		if err := prctlAll("PR_SET_NO_NEW_PRIVS", unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
			return fmt.Errorf("locking system calls: %w", err)
		}
	}
	switch thread, err := loadFilter(program); {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("locking system calls: seccomp: %w: the host needs a kernel with CONFIG_SECCOMP_FILTER", err)
	case err != nil:
		return fmt.Errorf("locking system calls: %w", os.NewSyscallError("seccomp", err))
	case thread != 0:
		return fmt.Errorf("locking system calls: thread %d has another filter: call Lock once", thread)
	}
	if o.life == 0 {
		return nil
	}
	if err := await(o.life); err != nil {
		return fmt.Errorf("waiting for the cgroup of this process: %w", err)
	}
	return nil
}

// await returns when the keeper has moved this process to its cgroup, which takes the kernel 10 ms, and more on a busy
// host. Memory from before does not count there, and threads may be more than the limit: work must not begin earlier.
func await(life int) error {
	for {
		switch n, err := unix.Read(life, make([]byte, 1)); {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return os.NewSyscallError("read", err)
		case n == 0:
			return ErrOrphan
		default:
			return os.NewSyscallError("close", unix.Close(life))
		}
	}
}
