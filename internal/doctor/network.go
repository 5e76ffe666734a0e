package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/network"
)

func (h host) network(g *group) {
	h.tun(g)
	programs(g)
	if at := h.mounts("bpf"); len(at) > 0 {
		g.add("bpffs", OK, "mounted at "+strings.Join(at, ", "), "")
	} else {
		g.add("bpffs", Missing, "not mounted", "the first VM with a network mounts it")
	}
}

// tun checks what TAP devices can do, without making one.
func (h host) tun(g *group) {
	const lack = "VMs have no link to the host's network; all else works"
	f, err := os.OpenFile(h.path("dev/net/tun"), os.O_RDWR, 0)
	if err != nil {
		g.add("tun", Missing, oneLine(err.Error()), lack)
		return
	}
	defer f.Close()
	const need = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR
	have, err := unix.IoctlGetUint32(int(f.Fd()), unix.TUNGETFEATURES)
	switch {
	case err != nil:
		g.add("tun", Unknown, "ioctl(TUNGETFEATURES): "+err.Error(), lack)
	case have&need != need:
		g.add("tun", Missing, fmt.Sprintf("features %#x, without one of TAP, NO_PI and VNET_HDR", have), lack)
	default:
		g.add("tun", OK, fmt.Sprintf("features %#x", have), "")
	}
}

// noInterface is an index that no network interface has.
const noInterface = 1<<31 - 1

// without judges a program that could not be loaded: a helper at that socket loads those of users without root.
func without(err error, helper string) (Status, string) {
	detail := oneLine("loading a program: " + err.Error())
	switch {
	case !errors.Is(err, fs.ErrPermission):
		return Missing, detail
	case unix.Access(helper, unix.R_OK|unix.W_OK) == nil:
		return OK, "the helper at " + helper + " loads programs for this user"
	}
	return Unknown, detail + ": run as root, or have `drowse net helper` let you use " + helper
}

// programs loads a program for tc that lets everything pass, and asks to attach it to a link that does not exist.
// The kernel's error shows whether it has TCX.
func programs(g *group) {
	const (
		needBPF = "VMs with a network do not start, since eBPF programs cannot filter it; those without one do"
		needTCX = "eBPF programs for a link go in by tc (clsact) instead; Linux 6.6 has TCX"
	)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		status, detail := without(err, network.HelperPath())
		if status == OK {
			g.add("bpf", OK, detail, "")
		} else {
			g.add("bpf", status, detail, needBPF)
		}
		g.add("tcx", Unknown, detail, needTCX)
		return
	}
	defer p.Close()
	g.add("bpf", OK, "programs for tc can be loaded", "")
	l, err := link.AttachTCX(link.TCXOptions{Interface: noInterface, Program: p, Attach: ebpf.AttachTCXIngress})
	switch {
	case err == nil:
		g.add("tcx", Unknown, "a program was attached to an interface that nobody has", needTCX)
		l.Close()
	case errors.Is(err, unix.ENODEV):
		g.add("tcx", OK, "links can be attached by TCX", "")
	case errors.Is(err, ebpf.ErrNotSupported):
		g.add("tcx", Missing, "this kernel does not know it", needTCX)
	default:
		g.add("tcx", Unknown, oneLine("attaching a program: "+err.Error()), needTCX)
	}
}
