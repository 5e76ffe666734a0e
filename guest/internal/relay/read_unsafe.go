package relay

import (
	"syscall"
	"unsafe"
)

// rawRead reads without the Go scheduler's hooks around system calls: the descriptor is
// non-blocking, and in a guest whose kernel is slow the monitor thread that they wake costs
// more than the call.
func rawRead(fd uintptr, p []byte) (int, syscall.Errno) {
	if len(p) == 0 {
		return 0, 0
	}
	for {
		n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
		if errno != syscall.EINTR {
			return int(n), errno
		}
	}
}
