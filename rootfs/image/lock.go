package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockPoll is how often a lock held by someone else is tried again. flock(2) cannot be waited for and cancelled at once.
const lockPoll = 50 * time.Millisecond

// errLocked: someone else holds the lock.
var errLocked = errors.New("locked")

// tryLock takes an exclusive flock(2) on a file, which is made if needed. Closing the file gives it back, as does the death
// of the process: locks are no garbage.
func tryLock(name string) (*os.File, error) { return tryLockHow(name, unix.LOCK_EX) }

// tryLockHow is tryLock for a shared lock (unix.LOCK_SH) as well.
func tryLockHow(name string, how int) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errLocked
		}
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
}

// lock is tryLock that waits. onWait, when not nil, is called once if there is a wait.
func lock(ctx context.Context, name string, onWait func()) (*os.File, error) {
	return lockHow(ctx, name, unix.LOCK_EX, onWait)
}

func lockHow(ctx context.Context, name string, how int, onWait func()) (*os.File, error) {
	for {
		f, err := tryLockHow(name, how)
		if !errors.Is(err, errLocked) {
			return f, err
		}
		if onWait != nil {
			onWait()
			onWait = nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(lockPoll):
		}
	}
}

// unlock gives a lock back. Closing the file does it, whatever close says.
func unlock(f *os.File) { _ = f.Close() }
