package machine

import (
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fiTrim is FITRIM of linux/fs.h: _IOWR('X', 121, struct fstrim_range).
const fiTrim = 0xc0185879

// fstrimRange is struct fstrim_range, in bytes of the device.
type fstrimRange struct {
	start, length, minLength uint64
}

// Trim implements Machine by syncfs(2), since the blocks of removed files are free only once the journal says so,
// and by FITRIM. A device that cannot discard is not an error.
func (k *Kernel) Trim() error {
	if k.Writable == "" {
		return nil
	}
	d, err := os.Open(k.Writable)
	if err != nil {
		return fmt.Errorf("open the writable disk's file system: %w", err)
	}
	defer d.Close()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return fmt.Errorf("write out the writable disk's file system: %w", err)
	}
	r := fstrimRange{length: math.MaxUint64}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, d.Fd(), fiTrim, uintptr(unsafe.Pointer(&r)))
	if errno != 0 && !errors.Is(errno, unix.EOPNOTSUPP) {
		return fmt.Errorf("trim the writable disk's file system: %w", errno)
	}
	return nil
}
