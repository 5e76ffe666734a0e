package agent

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
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

// rawAccept accepts a connection and returns the vsock CID of its peer.
func rawAccept(fd uintptr) (nfd int, cid uint32, errno syscall.Errno) {
	var sa rawSockaddrVM
	size := uint32(unsafe.Sizeof(sa))
	n, _, errno := syscall.RawSyscall6(syscall.SYS_ACCEPT4, fd, uintptr(unsafe.Pointer(&sa)), uintptr(unsafe.Pointer(&size)),
		syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0, 0)
	return int(n), sa.cid, errno
}

// rawSockaddrVM is struct sockaddr_vm of linux/vm_sockets.h.
type rawSockaddrVM struct {
	family    uint16
	reserved1 uint16
	port      uint32
	cid       uint32
	zero      [4]uint8
}

// rawStat is stat(2), for a path whose directories the kernel has cached as a
// rule: a look at the disk holds up the agent for as long as it takes.
func rawStat(path string, st *unix.Stat_t) syscall.Errno {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return syscall.EINVAL
	}
	_, _, errno := syscall.RawSyscall(syscall.SYS_STAT, uintptr(unsafe.Pointer(p)), uintptr(unsafe.Pointer(st)), 0)
	return errno
}

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

// rekeySize is what RNDREKEYCRNG takes, in bytes.
const rekeySize = 64

// rawRekey is RNDREKEYCRNG, which the kernels that drowse builds have.
func rawRekey(fd uintptr, p *[rekeySize]byte) syscall.Errno {
	const rndRekeyCRNG = 0x40405244 // _IOW('R', 0x44, __u8[64])
	_, _, errno := syscall.RawSyscall(syscall.SYS_IOCTL, fd, rndRekeyCRNG, uintptr(unsafe.Pointer(p)))
	return errno
}
