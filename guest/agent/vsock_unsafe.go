package agent

import (
	"syscall"
	"unsafe"
)

// rawAccept accepts a connection and returns the vsock CID of its peer. It skips the Go scheduler's hooks around
// system calls, as package poll does.
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
