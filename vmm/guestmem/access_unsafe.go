package guestmem

import (
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// loadUint16 is one aligned 16-bit load, which x86 does not tear. It is not
// inlined, so the compiler cannot move it or merge it with another.
//
//go:noinline
func loadUint16(mem []byte, off uint64) uint16 {
	return *(*uint16)(unsafe.Pointer(&mem[off]))
}

// storeUint16 is one aligned 16-bit store. x86 makes stores visible in order, and the function is not inlined, so
// the store comes after all earlier ones.
//
//go:noinline
func storeUint16(mem []byte, off uint64, v uint16) {
	*(*uint16)(unsafe.Pointer(&mem[off])) = v
}

var fence atomic.Uint32

// Fence orders all earlier stores before all later loads. The EVENT_IDX
// handshake of a virtqueue (virtio 1.2, 2.7.10) needs it.
func Fence() { fence.Add(1) }

func setIovec(v *unix.Iovec, mem []byte, off, n uint64) {
	v.Base = &mem[off]
	v.Len = n
}

// vector repeats a system call that a signal has interrupted before the call did anything.
func vector(trap, fd uintptr, iov []unix.Iovec, off int64, flags int) (int, error) {
	for {
		n, _, errno := unix.Syscall6(trap, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iov))), uintptr(len(iov)),
			uintptr(off), uintptr(off>>32), uintptr(flags))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

func preadv(fd int, iov []unix.Iovec, off int64) (int, error) {
	return vector(unix.SYS_PREADV, uintptr(fd), iov, off, 0)
}

func pwritev(fd int, iov []unix.Iovec, off int64) (int, error) {
	return vector(unix.SYS_PWRITEV, uintptr(fd), iov, off, 0)
}

// pwritev2 takes an offset like pwritev. The caller must refuse -1, which would mean the file's own position.
func pwritev2(fd int, iov []unix.Iovec, off int64, flags int) (int, error) {
	return vector(unix.SYS_PWRITEV2, uintptr(fd), iov, off, flags)
}

func readv(fd int, iov []unix.Iovec) (int, error) {
	return vector(unix.SYS_READV, uintptr(fd), iov, 0, 0)
}

func writev(fd int, iov []unix.Iovec) (int, error) {
	return vector(unix.SYS_WRITEV, uintptr(fd), iov, 0, 0)
}

// mapFixed replaces the mapping of mem[off:off+n] by a private mapping of the same range of a file, or of zeros if
// fd is -1. The change is atomic for concurrent accesses to the pages. If it fails it changes nothing.
func mapFixed(mem []byte, off, n uint64, fd int) error {
	flags, at := uintptr(unix.MAP_PRIVATE|unix.MAP_NORESERVE|unix.MAP_FIXED), uintptr(off)
	if fd < 0 {
		flags, at = flags|unix.MAP_ANONYMOUS, 0
	}
	_, _, errno := unix.Syscall6(unix.SYS_MMAP, addressOf(mem)+uintptr(off), uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		flags, uintptr(fd), at)
	if errno != 0 {
		return os.NewSyscallError("mmap guest RAM", errno)
	}
	return nil
}
