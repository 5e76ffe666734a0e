package doctor

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

func (h host) network() []Check {
	g := &group{name: "network"}
	g.put(h.tun())
	g.put(probeBPF())
	g.put(probeTCX())
	if at := h.mounts("bpf"); len(at) > 0 {
		g.add("bpffs", OK, "mounted at "+strings.Join(at, ", "), "")
	} else {
		g.add("bpffs", Missing, "not mounted", "eBPF programs cannot be pinned: mount -t bpf bpf /sys/fs/bpf. VMs of today run without any")
	}
	return g.checks
}

// tun looks at what TAP devices can do, without making one.
func (h host) tun() Check {
	c := Check{Name: "tun", Consequence: "VMs have no link to the host's network; all else works"}
	f, err := os.OpenFile(h.path("dev/net/tun"), os.O_RDWR, 0)
	if err != nil {
		c.Status, c.Detail = Missing, oneLine(err.Error())
		return c
	}
	defer f.Close()
	const need = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR
	have, err := unix.IoctlGetUint32(int(f.Fd()), unix.TUNGETFEATURES)
	switch {
	case err != nil:
		c.Status, c.Detail = Unknown, "ioctl(TUNGETFEATURES): "+err.Error()
	case have&need != need:
		c.Status, c.Detail = Missing, fmt.Sprintf("features %#x, without one of TAP, NO_PI and VNET_HDR", have)
	default:
		c.Status, c.Detail = OK, fmt.Sprintf("features %#x", have)
	}
	return c
}

const (
	needBPF = "the network of guests cannot be filtered with eBPF; VMs of today run without any"
	needTCX = "eBPF programs for a link go in by tc (clsact) instead; Linux 6.6 has TCX"
)

func probeBPF() Check {
	c := Check{Name: "bpf", Status: OK, Detail: "programs for tc can be loaded", Consequence: needBPF}
	fd, err := loadNothing()
	switch {
	case err == nil:
		unix.Close(fd)
	case notAllowed(err):
		c.Status, c.Detail = Unknown, "loading a program: "+err.Error()+": run as root"
	default:
		c.Status, c.Detail = Missing, "loading a program: "+err.Error()
	}
	return c
}

// probeTCX asks to attach a program to a link that does not exist: a kernel that has
// TCX says so, one that has not calls the request invalid.
func probeTCX() Check {
	c := Check{Name: "tcx", Consequence: needTCX}
	fd, err := loadNothing()
	if err != nil {
		c.Status, c.Detail = Unknown, "loading a program: "+err.Error()
		return c
	}
	defer unix.Close(fd)
	switch err := attachTCX(fd, noInterface); {
	case errors.Is(err, unix.ENODEV):
		c.Status, c.Detail = OK, "links can be attached by TCX"
	case errors.Is(err, unix.EINVAL):
		c.Status, c.Detail = Missing, "this kernel does not know it"
	default:
		c.Status, c.Detail = Unknown, fmt.Sprintf("attaching a program: %v", err)
	}
	return c
}

func notAllowed(err error) bool { return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) }
