package bench

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlCopy is UFFDIO_COPY of linux/userfaultfd.h.
const ioctlCopy = 0xc028aa03

// copyPage fills missing pages in another process, and wakes the threads that wait for them.
func copyPage(uffd int, dst uint64, page []byte) error {
	arg := struct {
		dst, src, length, mode uint64
		copied                 int64
	}{dst: dst, src: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(page)))), length: uint64(len(page))}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(uffd), ioctlCopy, uintptr(unsafe.Pointer(&arg)))
	if errno != 0 {
		return errno
	}
	return nil
}
