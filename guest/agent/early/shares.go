package early

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Share is a directory of the host's.
type Share struct {
	Tag      string // of the virtio file system device
	Dir      string // absolute
	ReadOnly bool
}

const (
	maxShares = 16
	maxTag    = 36 // bytes (virtio 1.2, 5.11.4)
)

// mountShares mounts the shares that the command line names. One that cannot be mounted ends
// the boot, as with a volume.
func (m *Machine) mountShares() error {
	deadline := time.Now().Add(m.Config.Wait)
	for _, s := range m.Config.Shares {
		if err := os.MkdirAll(s.Dir, 0o755); err != nil {
			return fmt.Errorf("make the directory for a share: %w", err)
		}
		flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
		if s.ReadOnly {
			flags |= unix.MS_RDONLY
		}
		if err := mountShare(s, flags, deadline); err != nil {
			return fmt.Errorf("mount the share %s on %s: %w", s.Tag, s.Dir, err)
		}
	}
	return nil
}

// mountShare waits for the device: until it is found, its tag is unknown (EINVAL).
func mountShare(s Share, flags uintptr, deadline time.Time) error {
	for wait := firstPoll; ; wait = min(2*wait, lastPoll) {
		err := unix.Mount(s.Tag, s.Dir, "virtiofs", flags, "")
		switch {
		case errors.Is(err, unix.ENODEV):
			return fmt.Errorf("the kernel has no virtiofs: %w", err)
		case err == nil || !errors.Is(err, unix.EINVAL) || !time.Now().Before(deadline):
			return err
		}
		time.Sleep(wait)
	}
}

// unmountShares writes back what programs have changed in mapped files.
func (m *Machine) unmountShares() {
	for _, s := range slices.Backward(m.Config.Shares) {
		if unix.Unmount(s.Dir, 0) != nil {
			_ = unix.Mount("", s.Dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
		}
	}
}
