package poll

import (
	"syscall"
	"unsafe"
)

// The calls below skip the Go scheduler's hooks around system calls. They are
// used on non-blocking descriptors only, so they return at once, and they do
// not wake the runtime's monitor thread: in a guest whose kernel is slow, each
// such wake-up costs several milliseconds.

func rawRead(fd uintptr, p []byte) (int, syscall.Errno) {
	if len(p) == 0 {
		return 0, 0
	}
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	return int(n), errno
}

func rawWrite(fd uintptr, p []byte) (int, syscall.Errno) {
	if len(p) == 0 {
		return 0, 0
	}
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	return int(n), errno
}
