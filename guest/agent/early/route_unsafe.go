package early

import (
	"net/netip"
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

// defaultRoute adds a default route through a gateway (SIOCADDRT).
func defaultRoute(sock int, gateway [4]byte) error {
	rt := rtentry{
		dst:     unix.RawSockaddrInet4{Family: unix.AF_INET},
		gateway: unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: gateway},
		genmask: unix.RawSockaddrInet4{Family: unix.AF_INET},
		flags:   unix.RTF_UP | unix.RTF_GATEWAY,
	}
	return ioctl(sock, unix.SIOCADDRT, unsafe.Pointer(&rt))
}

// in6Ifreq is struct in6_ifreq of linux/ipv6.h.
type in6Ifreq struct {
	addr      [16]byte
	prefixLen uint32
	index     int32
}

// addAddr6 gives an interface an IPv6 address (SIOCSIFADDR of an IPv6 socket, ipv6(7)).
func addAddr6(sock int, index uint32, a netip.Prefix) error {
	req := in6Ifreq{addr: a.Addr().As16(), prefixLen: uint32(a.Bits()), index: int32(index)}
	return ioctl(sock, unix.SIOCSIFADDR, unsafe.Pointer(&req))
}

// in6Rtmsg is struct in6_rtmsg of linux/ipv6_route.h on 64-bit machines.
type in6Rtmsg struct {
	dst, src, gateway [16]byte
	kind              uint32
	dstLen, srcLen    uint16
	metric            uint32
	info              uint64
	flags             uint32
	index             int32
}

// defaultRoute6 is defaultRoute for IPv6.
func defaultRoute6(sock int, index uint32, gateway [16]byte) error {
	rt := in6Rtmsg{gateway: gateway, flags: unix.RTF_UP | unix.RTF_GATEWAY, index: int32(index)}
	return ioctl(sock, unix.SIOCADDRT, unsafe.Pointer(&rt))
}

// ioctl makes a request of a socket. EEXIST is not an error.
func ioctl(sock int, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(sock), request, uintptr(arg))
	if errno != 0 && errno != unix.EEXIST {
		return errno
	}
	return nil
}
