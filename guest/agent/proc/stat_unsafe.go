package proc

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawStat is stat(2) for a path whose directories the kernel usually has cached: an access to the disk blocks the
// agent for as long as it takes.
func rawStat(path string, st *unix.Stat_t) syscall.Errno {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return syscall.EINVAL
	}
	_, _, errno := syscall.RawSyscall(syscall.SYS_STAT, uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(st)), 0)
	return errno
}
