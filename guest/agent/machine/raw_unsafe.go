package machine

import (
	"syscall"
	"unsafe"
)

// The calls below skip the Go scheduler's hooks around system calls, as those of package poll do.

func rawClockSettime(sec, nsec int64) syscall.Errno {
	ts := [2]int64{sec, nsec}
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_SETTIME, 0 /* CLOCK_REALTIME */, uintptr(unsafe.Pointer(&ts)), 0)
	return errno
}

// randPoolInfo is struct rand_pool_info of linux/random.h with room for the
// largest delivery.
type randPoolInfo struct {
	entropyCount int32 // bits
	bufSize      int32 // bytes
	buf          [512]byte
}

func rawAddEntropy(fd uintptr, info *randPoolInfo) syscall.Errno {
	const rndAddEntropy = 0x40085203 // _IOW('R', 0x03, int[2])
	_, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, fd, rndAddEntropy, uintptr(unsafe.Pointer(info)))
	return errno
}

func rawReseed(fd uintptr) syscall.Errno {
	const rndReseedCRNG = 0x5207 // _IO('R', 0x07)
	_, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, fd, rndReseedCRNG, 0)
	return errno
}

// rekeySize is the size of RNDREKEYCRNG's argument, in bytes.
const rekeySize = 64

// rawRekey is RNDREKEYCRNG, which the kernels that drowse builds have.
func rawRekey(fd uintptr, p *[rekeySize]byte) syscall.Errno {
	const rndRekeyCRNG = 0x40405244 // _IOW('R', 0x44, __u8[64])
	_, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, fd, rndRekeyCRNG, uintptr(unsafe.Pointer(p)))
	return errno
}
