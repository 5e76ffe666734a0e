package bench

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// missedMemory returns memory whose pages a userfaultfd provides.
func missedMemory(n int) (uffd int, memory []byte, base uint64, err error) {
	memory, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return -1, nil, 0, err
	}
	base = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(memory))))
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if errno != 0 {
		return -1, nil, 0, os.NewSyscallError("userfaultfd", errno)
	}
	api := [3]uint64{0xaa}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, 0xc018aa3f, uintptr(unsafe.Pointer(&api))); errno != 0 {
		return -1, nil, 0, os.NewSyscallError("ioctl(UFFDIO_API)", errno)
	}
	register := [4]uint64{base, uint64(n), 1}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, 0xc020aa00, uintptr(unsafe.Pointer(&register))); errno != 0 {
		return -1, nil, 0, os.NewSyscallError("ioctl(UFFDIO_REGISTER)", errno)
	}
	return int(fd), memory, base, nil
}
