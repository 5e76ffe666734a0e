package early

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// The ioctls of netdevice(7) set up the network: for one address and one route they need fewer system calls, and
// far less code, than rtnetlink.

// linkUp brings an interface up, through any socket.
func linkUp(sock int, name string) error {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(sock, unix.SIOCGIFFLAGS, ifr); err != nil {
		return err
	}
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	return unix.IoctlIfreq(sock, unix.SIOCSIFFLAGS, ifr)
}

// setAddr gives an interface its address and netmask.
func setAddr(sock int, name string, n *Net) error {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	addr := n.Addr.Addr().As4()
	if err := ifr.SetInet4Addr(addr[:]); err != nil {
		return err
	}
	if err := unix.IoctlIfreq(sock, unix.SIOCSIFADDR, ifr); err != nil {
		return err
	}
	if err := ifr.SetInet4Addr(netmask(n.Addr.Bits())); err != nil {
		return err
	}
	return unix.IoctlIfreq(sock, unix.SIOCSIFNETMASK, ifr)
}

func netmask(bits int) []byte {
	m := ^uint32(0) << (32 - bits)
	return []byte{byte(m >> 24), byte(m >> 16), byte(m >> 8), byte(m)}
}

// network brings up the loopback interface and, if configured, eth0.
func network(n, n6 *Net) error {
	sock, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a socket to set up the network: %w", err)
	}
	defer unix.Close(sock)
	if err := linkUp(sock, "lo"); err != nil {
		return fmt.Errorf("bring up lo: %w", err)
	}
	if n == nil && n6 == nil {
		return nil
	}
	if n6 != nil {
		quiet6("eth0") // before it is up: then it would solicit routers
	}
	if n != nil {
		if err := network4(sock, n); err != nil {
			return err
		}
	}
	if n6 != nil {
		return network6(n6)
	}
	return nil
}

func network4(sock int, n *Net) error {
	if err := setAddr(sock, "eth0", n); err != nil {
		return fmt.Errorf("give eth0 the address %v: %w", n.Addr, err)
	}
	if err := linkUp(sock, "eth0"); err != nil {
		return fmt.Errorf("bring up eth0: %w", err)
	}
	if n.Gateway.IsValid() {
		if err := defaultRoute(sock, n.Gateway.As4()); err != nil {
			return fmt.Errorf("route by way of %v: %w", n.Gateway, err)
		}
	}
	return nil
}

// quiet6 stops an interface from asking for routes and addresses, and makes it use its own address at once:
// everything is configured, and no other machine is on the link. A kernel without one of these settings only sends
// more.
func quiet6(name string) {
	for _, s := range []string{"accept_ra", "autoconf", "dad_transmits", "accept_dad", "router_solicitations"} {
		_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/"+s, []byte("0\n"), 0o644)
	}
}

// network6 gives eth0 its IPv6 address and route.
func network6(n *Net) error {
	sock, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open a socket to set up IPv6: %w", err)
	}
	defer unix.Close(sock)
	ifr, err := unix.NewIfreq("eth0")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(sock, unix.SIOCGIFINDEX, ifr); err != nil {
		return fmt.Errorf("look for eth0: %w", err)
	}
	index := ifr.Uint32()
	if err := linkUp(sock, "eth0"); err != nil {
		return fmt.Errorf("bring up eth0: %w", err)
	}
	if err := addAddr6(sock, index, n.Addr); err != nil {
		return fmt.Errorf("give eth0 the address %v: %w", n.Addr, err)
	}
	if n.Gateway.IsValid() {
		if err := defaultRoute6(sock, index, n.Gateway.As16()); err != nil {
			return fmt.Errorf("route by way of %v: %w", n.Gateway, err)
		}
	}
	return nil
}

// resolvConf replaces /etc/resolv.conf, which may be a link to a file that no program will make.
func resolvConf(n *Net) error {
	if n == nil || len(n.DNS) == 0 {
		return nil
	}
	var b strings.Builder
	for _, dns := range n.DNS {
		b.WriteString("nameserver " + dns.String() + "\n")
	}
	_ = unix.Mkdir("/etc", 0o755)
	_ = unix.Unlink("/etc/resolv.conf")
	return os.WriteFile("/etc/resolv.conf", []byte(b.String()), 0o644)
}
