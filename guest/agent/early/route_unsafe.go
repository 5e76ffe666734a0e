package early

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// rtentry is struct rtentry of linux/route.h on 64-bit machines.
type rtentry struct {
	_       uint64
	dst     unix.RawSockaddrInet4
	gateway unix.RawSockaddrInet4
	genmask unix.RawSockaddrInet4
	flags   uint16
	_       int16
	_       [4]byte
	_       uint64
	tos     uint8
	class   uint8
	_       [3]int16
	metric  int16
	_       [6]byte
	dev     uintptr
	mtu     uint64
	window  uint64
	irtt    uint16
	_       [6]byte
}

// defaultRoute adds a route to everywhere by way of a gateway (SIOCADDRT).
func defaultRoute(sock int, gateway [4]byte) error {
	rt := rtentry{
		dst:     unix.RawSockaddrInet4{Family: unix.AF_INET},
		gateway: unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: gateway},
		genmask: unix.RawSockaddrInet4{Family: unix.AF_INET},
		flags:   unix.RTF_UP | unix.RTF_GATEWAY,
	}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(sock), unix.SIOCADDRT, uintptr(unsafe.Pointer(&rt)))
	if errno != 0 && errno != unix.EEXIST {
		return errno
	}
	return nil
}
