package image

import (
	"context"
	"os"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

const lockFlags = os.O_RDWR | os.O_CREATE | unix.O_NOFOLLOW

// tryLock takes the exclusive lock of a file, which is made if needed: osfile.ErrLocked if somebody else has it.
func tryLock(name string) (*os.File, error) {
	return osfile.TryOpenLocked(name, lockFlags, 0o600, osfile.Exclusive)
}

// lock waits for the lock of a file, which is made if needed.
func lock(ctx context.Context, name string, mode osfile.LockMode) (*os.File, error) {
	return osfile.OpenLocked(ctx, name, lockFlags, 0o600, mode)
}
