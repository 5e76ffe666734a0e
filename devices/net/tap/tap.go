package tap

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// HeaderSize is the size of the struct virtio_net_hdr that begins every frame, in
// bytes: the one with num_buffers (virtio 1.2, 5.1.6).
const HeaderSize = 12

// clone is the device that TAP devices come from.
const clone = "/dev/net/tun"

// maxTries bounds the race for a free name of a template.
const maxTries = 4096

// What can be wrong, for errors.Is. A missing permission is os.ErrPermission, a
// missing interface or /dev/net/tun is os.ErrNotExist.
var (
	ErrName   = errors.New("unusable interface name")
	ErrExists = errors.New("an interface of that name exists")
)

// Config says what the host's end of a TAP device is to be.
type Config struct {
	// Name is 1 to 15 bytes, or a template with one %d, such as "drowse%d",
	// that the first free number replaces.
	Name string
	// MAC is the host's address on it; nil leaves the kernel's choice.
	MAC net.HardwareAddr
	// MTU in bytes; zero leaves 1500.
	MTU int
	// Addresses of the host on it.
	Addresses []netip.Prefix
	// Down leaves the interface down; Up raises it.
	Down bool
}

// Device is the wire of a TAP device. It is in non-blocking mode, and one read or
// write is one frame with its header.
type Device struct {
	fd    int
	name  string
	index int
}

// Create makes a TAP device that vanishes when it is closed, and sets the host's
// end up. It fails with ErrExists when there is an interface of that name.
func Create(cfg Config) (*Device, error) {
	if !strings.Contains(cfg.Name, "%d") {
		return create(cfg, cfg.Name)
	}
	if strings.Count(cfg.Name, "%") != 1 {
		return nil, fmt.Errorf("creating TAP device %q: %w: a template has one %%d", cfg.Name, ErrName)
	}
	// The kernel knows templates too, but not together with the promise that the
	// device is new.
	for i := range maxTries {
		d, err := create(cfg, strings.Replace(cfg.Name, "%d", fmt.Sprint(i), 1))
		if !errors.Is(err, ErrExists) {
			return d, err
		}
	}
	return nil, fmt.Errorf("creating TAP device %q: %w: the first %d numbers are taken", cfg.Name, ErrExists, maxTries)
}

func create(cfg Config, name string) (_ *Device, err error) {
	if cfg.MTU < 0 || cfg.MTU > 0xffff {
		return nil, fmt.Errorf("creating TAP device %q: an MTU of %d is out of range", name, cfg.MTU)
	}
	d, err := attach(name, unix.IFF_TUN_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return nil, fmt.Errorf("creating TAP device %q: %w: choose another name or remove it", name, ErrExists)
	}
	if err != nil {
		return nil, fmt.Errorf("creating TAP device %q: %w", name, err)
	}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	link, err := netlink.LinkByIndex(d.index)
	if err != nil {
		return nil, fmt.Errorf("looking at TAP device %q: %w", name, err)
	}
	if len(cfg.MAC) > 0 {
		if err := netlink.LinkSetHardwareAddr(link, cfg.MAC); err != nil {
			return nil, fmt.Errorf("setting the address of TAP device %q to %v: %w", name, cfg.MAC, err)
		}
	}
	if cfg.MTU != 0 {
		if err := netlink.LinkSetMTU(link, cfg.MTU); err != nil {
			return nil, fmt.Errorf("setting the MTU of TAP device %q to %d: %w", name, cfg.MTU, err)
		}
	}
	for _, a := range cfg.Addresses {
		ip := a.Addr().Unmap()
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(a.Bits(), ip.BitLen())}}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return nil, fmt.Errorf("giving TAP device %q the address %v: %w", name, a, err)
		}
	}
	if cfg.Down {
		return d, nil
	}
	return d, d.Up()
}

// finish completes a descriptor that is attached to an interface.
func finish(fd int, name string) (*Device, error) {
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, HeaderSize); err != nil {
		return nil, fmt.Errorf("TUNSETVNETHDRSZ: %w", err)
	}
	link, err := net.InterfaceByName(name)
	if err != nil {
		return nil, fmt.Errorf("finding interface %q: %w", name, err)
	}
	return &Device{fd: fd, name: name, index: link.Index}, nil
}

// attach opens the clone device and makes it the wire of the named interface.
func attach(name string, flags uint16) (_ *Device, err error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	fd, err := unix.Open(clone, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", &os.PathError{Op: "open", Path: clone, Err: err}, remedy(err))
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	req, err := unix.NewIfreq(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrName, err)
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR | flags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("TUNSETIFF: %w: %w", err, remedy(err))
		}
		return nil, fmt.Errorf("TUNSETIFF: %w", err)
	}
	return finish(fd, name)
}

func remedy(err error) error {
	switch {
	case errors.Is(err, os.ErrPermission):
		return errors.New("run as root or with CAP_NET_ADMIN, or have the administrator make a persistent TAP device for you")
	case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return errors.New("load the tun module, and let the container have the device")
	}
	return errors.New("look at the limits of the process")
}

// checkName says what the kernel would not say clearly.
func checkName(name string) error {
	switch {
	case name == "" || name == "." || name == "..":
		return fmt.Errorf("%w", ErrName)
	case len(name) >= unix.IFNAMSIZ:
		return fmt.Errorf("%w: it has %d bytes, at most %d are possible", ErrName, len(name), unix.IFNAMSIZ-1)
	case strings.ContainsAny(name, "/: \t\n\v\f\r%"):
		return fmt.Errorf("%w: no slash, colon, percent sign or white space", ErrName)
	}
	return nil
}

// Name is the interface's name.
func (d *Device) Name() string { return d.name }

// Index is the interface's number.
func (d *Device) Index() int { return d.index }

// FD is the descriptor of the wire, in non-blocking mode, valid until Close.
func (d *Device) FD() int { return d.fd }

// SetOffloads says what the reader of the wire does itself: TUN_F_CSUM and the
// others of the kernel's if_tun.h. What it does not do, the kernel does before.
func (d *Device) SetOffloads(flags int) error {
	if err := unix.IoctlSetInt(d.fd, unix.TUNSETOFFLOAD, flags); err != nil {
		return fmt.Errorf("setting the offloads %#x of TAP device %q: TUNSETOFFLOAD: %w", flags, d.name, err)
	}
	return nil
}

// Up raises the host's end.
func (d *Device) Up() error {
	link, err := netlink.LinkByIndex(d.index)
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("raising TAP device %q: %w", d.name, err)
	}
	return nil
}

// Close cuts the wire. A device that Create has made is gone when it returns.
func (d *Device) Close() error {
	if d.fd < 0 {
		return nil
	}
	fd := d.fd
	d.fd = -1
	return os.NewSyscallError("close TAP device", unix.Close(fd))
}
