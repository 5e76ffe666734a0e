package osfile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// LockMode says which other locks on the same file are allowed.
type LockMode int

const (
	Shared    LockMode = unix.LOCK_SH // any number of shared locks
	Exclusive LockMode = unix.LOCK_EX // no other lock
)

// ErrLocked means that another open file, of this process or another one, holds the lock. It is also
// unix.EWOULDBLOCK.
var ErrLocked = fmt.Errorf("somebody else has it locked (%w)", unix.EWOULDBLOCK)

// A wait for a lock polls, because a blocked flock(2) cannot be canceled. It polls after an eighth of the time
// waited so far, within these bounds.
const (
	minPoll = 200 * time.Microsecond
	maxPoll = 10 * time.Millisecond
)

// TryLock takes the lock of an open file (flock(2)), or changes its mode, without waiting. If it is not available,
// TryLock returns ErrLocked, and a change has lost the old lock. The lock belongs to the open file: child
// processes and receivers of the descriptor share it, and it ends with the last descriptor.
func TryLock(f *os.File, mode LockMode) error {
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var lerr error
	err = c.Control(func(fd uintptr) {
		for lerr = unix.EINTR; errors.Is(lerr, unix.EINTR); {
			lerr = unix.Flock(int(fd), int(mode)|unix.LOCK_NB)
		}
	})
	if errors.Is(lerr, unix.EWOULDBLOCK) {
		lerr = ErrLocked
	}
	if err == nil && lerr != nil {
		err = &fs.PathError{Op: "lock", Path: f.Name(), Err: lerr}
	}
	return err
}

// Unlock releases the lock of an open file for all that share it. Closing is not always enough: a child process has a
// copy of each descriptor from fork(2) until execve(2), and with the copy the lock, so that the next TryLock would
// fail for as long as that.
func Unlock(f *os.File) error {
	c, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var uerr error
	err = c.Control(func(fd uintptr) { uerr = unix.Flock(int(fd), unix.LOCK_UN) })
	if err == nil && uerr != nil {
		err = &fs.PathError{Op: "unlock", Path: f.Name(), Err: uerr}
	}
	return err
}

// Lock is TryLock that waits until ctx ends, and then returns its cause. It tries at least once.
func Lock(ctx context.Context, f *os.File, mode LockMode) error {
	for begin := time.Now(); ; {
		err := TryLock(f, mode)
		if !errors.Is(err, ErrLocked) {
			return err
		}
		select {
		case <-ctx.Done():
			return &fs.PathError{Op: "lock", Path: f.Name(), Err: context.Cause(ctx)}
		case <-time.After(min(max(time.Since(begin)/8, minPoll), maxPoll)):
		}
	}
}

// OpenLocked opens a file or directory like os.OpenFile and waits for its lock like Lock. The returned file has
// the name path even if the previous holder removed or replaced it. Closing it releases the lock.
func OpenLocked(ctx context.Context, path string, flag int, perm fs.FileMode, mode LockMode) (*os.File, error) {
	return openLocked(path, flag, perm, func(f *os.File) error { return Lock(ctx, f, mode) })
}

// TryOpenLocked is OpenLocked without waiting: it returns ErrLocked if the lock is not available.
func TryOpenLocked(path string, flag int, perm fs.FileMode, mode LockMode) (*os.File, error) {
	return openLocked(path, flag, perm, func(f *os.File) error { return TryLock(f, mode) })
}

func openLocked(path string, flag int, perm fs.FileMode, lock func(*os.File) error) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, flag, perm)
		if err != nil {
			return nil, err
		}
		if err := lock(f); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		mine, merr := f.Stat()
		there, terr := os.Stat(path)
		if merr == nil && terr == nil && os.SameFile(mine, there) {
			return f, nil
		}
		f.Close()
		if err := errors.Join(merr, terr); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
}
