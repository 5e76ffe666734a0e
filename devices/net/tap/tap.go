package tap

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// HeaderSize is the size in bytes of the struct virtio_net_hdr, with num_buffers, in front of every frame (virtio
// 1.2, 5.1.6).
const HeaderSize = 12

// clone is the device that TAP devices come from.
const clone = "/dev/net/tun"

// Errors for errors.Is. A missing permission is os.ErrPermission. A missing interface or /dev/net/tun is
// os.ErrNotExist.
var (
	ErrName   = errors.New("unusable interface name")
	ErrExists = errors.New("an interface of that name exists")
)

// Device is the wire of a TAP device, in non-blocking mode. One read or write moves one frame with its header.
type Device struct {
	fd    int
	name  string
	index int
}

// Create makes a TAP device of this name, of 1 to 15 bytes, that vanishes when it is closed. Up raises it. It fails
// with ErrExists if an interface of that name exists.
func Create(name string) (*Device, error) {
	d, err := attach(name, unix.IFF_TUN_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return nil, fmt.Errorf("creating TAP device %q: %w: choose another name or remove it", name, ErrExists)
	}
	if err != nil {
		return nil, fmt.Errorf("creating TAP device %q: %w", name, err)
	}
	return d, nil
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
	fd, err := openClone()
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

// unchangeable is the directory of clone in a mount of its own where nothing can be changed, or -1 if this process has
// no right to that.
var unchangeable = sync.OnceValue(func() int {
	fd, err := unix.OpenTree(unix.AT_FDCWD, filepath.Dir(clone), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		unix.Close(fd)
		return -1
	}
	return fd
})

// openClone opens clone so that the mode, owner and times of the host's device cannot be changed by the descriptor: a
// process that gets it may have that right for other files.
func openClone() (int, error) {
	const flags = unix.O_RDWR | unix.O_NONBLOCK | unix.O_CLOEXEC
	if dir := unchangeable(); dir >= 0 {
		if fd, err := unix.Openat(dir, filepath.Base(clone), flags, 0); err == nil {
			return fd, nil
		}
	}
	return unix.Open(clone, flags, 0)
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

// checkName refuses names for which the kernel's error would be unclear.
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

// Of returns the device whose wire another process has passed, and takes the file over. It has no name, and Up does
// not work.
func Of(f *os.File) (*Device, error) {
	d := &Device{fd: -1}
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("taking over a TAP device: %w", err)
	}
	cerr := rc.Control(func(fd uintptr) { d.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, cerr, f.Close()); err != nil {
		return nil, fmt.Errorf("taking over a TAP device: %w", err)
	}
	return d, nil
}

// File returns another descriptor of the wire. The interface stays while either is open.
func (d *Device) File() (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(d.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("copying the wire of TAP device %q: %w", d.name, err)
	}
	return os.NewFile(uintptr(fd), d.name), nil
}

// Name returns the interface's name.
func (d *Device) Name() string { return d.name }

// FD returns the descriptor of the wire, in non-blocking mode. It is valid until Close.
func (d *Device) FD() int { return d.fd }

// SetOffloads sets what the reader of the wire does itself: TUN_F_CSUM and the others of the kernel's if_tun.h.
// The kernel does the rest before the frame reaches the wire.
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

// Close closes the wire. A device from Create is gone when Close returns.
func (d *Device) Close() error {
	if d.fd < 0 {
		return nil
	}
	fd := d.fd
	d.fd = -1
	return os.NewSyscallError("close TAP device", unix.Close(fd))
}
