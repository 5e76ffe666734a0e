package supervisor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/link"
)

const (
	// wakerMetric makes routes to the packet waker worse than those to running VMs: 0, or 1024 with IPv6.
	wakerMetric = 1 << 16
	// maxWakers bounds how many supervisors in a network namespace have a waker, each for its own store.
	maxWakers = 64
)

// wakerDevice is the TUN device for addresses of VMs that have no device of their own. It ends with the process.
type wakerDevice struct {
	file   *os.File
	link   netlink.Link
	routes map[netip.Addr]bool
	out    int // a socket for frames, kept open: the kernel takes 10 ms or more to close one, and a packet would wait
}

// openWakerDevice makes the device. It has the gateway's addresses, so that a connection of the host has the same
// address before and after the VM has woken.
func openWakerDevice(agents, agents6 netip.Prefix) (d *wakerDevice, err error) {
	var tun *netlink.Tuntap
	for i := range maxWakers {
		tun = &netlink.Tuntap{
			LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("%s-waker%d", hostnet.InterfacePrefix, i)},
			Mode:      netlink.TUNTAP_MODE_TUN, Flags: netlink.TUNTAP_NO_PI | netlink.TUNTAP_TUN_EXCL, NonPersist: true, Queues: 1,
		}
		if _, nerr := net.InterfaceByName(tun.Name); nerr == nil {
			err = fmt.Errorf("%d supervisors of this network namespace have one already: end one: %w", maxWakers, unix.EBUSY)
			continue
		}
		if err = netlink.LinkAdd(tun); err == nil {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("making a device for packets to VMs that sleep: %w", err)
	}
	d = &wakerDevice{file: tun.Fds[0], routes: map[netip.Addr]bool{}}
	// Protocol 0: it receives nothing.
	if d.out, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("making a socket for packets to VMs that have slept: %w", err), d.file.Close())
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if d.link, err = netlink.LinkByName(tun.Name); err != nil {
		return nil, fmt.Errorf("looking at %s: %w", tun.Name, err)
	}
	// The host must send nothing of its own on it: no link-local address, no router solicitations.
	for name, value := range map[string]string{"addr_gen_mode": "1", "accept_ra": "0", "autoconf": "0", "router_solicitations": "0"} {
		_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+tun.Name+"/"+name, []byte(value+"\n"), 0o644)
	}
	for _, a := range []netip.Addr{netpolicy.TheWire.Gateway4, netpolicy.TheWire.Gateway6} {
		addr := &netlink.Addr{IPNet: ipNet(a)}
		if a.Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		// A host without IPv6 has VMs without it.
		if err := netlink.AddrReplace(d.link, addr); err != nil && a.Is4() {
			return nil, fmt.Errorf("giving %s the address %v: %w", tun.Name, a, err)
		}
	}
	if err := link.GuardWaker(d.link, agents, agents6); err != nil {
		return nil, err
	}
	if err := netlink.LinkSetUp(d.link); err != nil {
		return nil, fmt.Errorf("raising %s: %w", tun.Name, err)
	}
	return d, nil
}

func ipNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// lead routes these addresses, and no others, to the device.
func (d *wakerDevice) lead(want map[netip.Addr]bool) error {
	var errs []error
	for a := range want {
		if d.routes[a] {
			continue
		}
		src := netpolicy.TheWire.Gateway4
		if a.Is6() {
			src = netpolicy.TheWire.Gateway6
		}
		r := &netlink.Route{LinkIndex: d.link.Attrs().Index, Dst: ipNet(a), Src: src.AsSlice(), Priority: wakerMetric, Scope: netlink.SCOPE_LINK}
		if err := netlink.RouteReplace(r); err != nil {
			errs = append(errs, fmt.Errorf("leading %v to %s: %w", a, d.link.Attrs().Name, err))
			continue
		}
		d.routes[a] = true
	}
	for a := range d.routes {
		if want[a] {
			continue
		}
		r := &netlink.Route{LinkIndex: d.link.Attrs().Index, Dst: ipNet(a), Priority: wakerMetric, Scope: netlink.SCOPE_LINK}
		if err := netlink.RouteDel(r); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("leading %v to %s no more: %w", a, d.link.Attrs().Name, err))
			continue
		}
		delete(d.routes, a)
	}
	return errors.Join(errs...)
}

func (d *wakerDevice) close() error { return errors.Join(d.file.Close(), unix.Close(d.out)) }

// send puts a frame on a device, like the host: the device's programs see it.
func (d *wakerDevice) send(device string, frame []byte) error {
	ifi, err := net.InterfaceByName(device)
	if err != nil {
		return err
	}
	// Without the mark, a packet from another VM is not recognized as that VM's. The other VM then sends it again.
	if mark, err := link.WakerMark(""); err == nil {
		if err := unix.SetsockoptInt(d.out, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
			return fmt.Errorf("marking a packet that was held: %w", err)
		}
	}
	to := &unix.SockaddrLinklayer{Ifindex: ifi.Index, Protocol: uint16(frame[13])<<8 | uint16(frame[12]), Halen: 6}
	copy(to.Addr[:], frame[:6])
	return os.NewSyscallError("sendto", unix.Sendto(d.out, frame, 0, to))
}
