package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/internal/test/hwkvm/wire"
)

const (
	hostDir       = "/host"
	devicesWithin = 20 * time.Second // how long the drivers may take to find their devices
	pollInterval  = 5 * time.Millisecond
)

func pause() { time.Sleep(pollInterval) }

type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
	optional               bool // the kernel may lack it
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	err := syscall.Mount(m.source, m.target, m.fstype, m.flags, m.data)
	if err != nil && !(m.optional && errors.Is(err, syscall.ENODEV)) {
		return fmt.Errorf("mount %s on %s: %w", m.fstype, m.target, err)
	}
	return nil
}

func mountAll(ms []mount) error {
	for _, m := range ms {
		if err := m.do(); err != nil {
			return err
		}
	}
	return nil
}

// setUp does what must be done before the host can be talked to, and returns the port to the host.
func setUp() (*os.File, error) {
	err := mountAll([]mount{
		{source: "proc", target: "/proc", fstype: "proc"},
		{source: "sysfs", target: "/sys", fstype: "sysfs"},
		{source: "devtmpfs", target: "/dev", fstype: "devtmpfs"},
	})
	if err != nil {
		return nil, err
	}
	index, err := readIndex(wire.ModuleDir)
	if err != nil {
		return nil, err
	}
	for _, name := range index.Boot {
		if err := index.load(wire.ModuleDir, name); err != nil {
			return nil, err
		}
	}
	if err := makeStaticNodes(index); err != nil {
		return nil, err
	}
	return openPort()
}

func openPort() (*os.File, error) {
	for deadline := time.Now().Add(devicesWithin); ; pause() {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, n := range names {
			b, err := os.ReadFile(n)
			if err != nil || strings.TrimSpace(string(b)) != wire.PortName {
				continue
			}
			dev := "/dev/" + filepath.Base(filepath.Dir(n))
			// Blocking on purpose: os.File's poller would take the port's early end of file for the end.
			fd, err := syscall.Open(dev, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
			if err != nil {
				return nil, &os.PathError{Op: "open", Path: dev, Err: err}
			}
			return os.NewFile(uintptr(fd), dev), nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("no virtio-serial port %s after %v", wire.PortName, devicesWithin)
		}
	}
}

// enterHost mounts the host's file system and makes it the root, as switch_root(8) does: a process under a mere chroot
// could not make user namespaces (see current_chrooted in the kernel's fs/namespace.c).
func enterHost() error {
	opts, err := kernelOption("hwkvm.9p")
	if err != nil {
		return err
	}
	options := "trans=virtio,version=9p2000.L," + opts
	const tmp = syscall.MS_NOSUID | syscall.MS_NODEV
	err = mountAll([]mount{
		{source: wire.MountTag, target: hostDir, fstype: "9p", data: options},
		{source: "proc", target: hostDir + "/proc", fstype: "proc"},
		{source: "sysfs", target: hostDir + "/sys", fstype: "sysfs"},
		{source: "devtmpfs", target: hostDir + "/dev", fstype: "devtmpfs"},
		{source: "devpts", target: hostDir + "/dev/pts", fstype: "devpts", data: "mode=620,ptmxmode=666"},
		{source: "tmpfs", target: hostDir + "/dev/shm", fstype: "tmpfs", flags: tmp, data: "size=90%"},
		{source: "tmpfs", target: hostDir + "/run", fstype: "tmpfs", flags: tmp, data: "size=90%,mode=755"},
		{source: "bpf", target: hostDir + "/sys/fs/bpf", fstype: "bpf"},
		{source: "cgroup2", target: hostDir + "/sys/fs/cgroup", fstype: "cgroup2"},
		{source: "tracefs", target: hostDir + "/sys/kernel/tracing", fstype: "tracefs", optional: true},
		{source: wire.ModuleDir, target: hostDir + wire.StateDir + wire.ModuleDir, flags: syscall.MS_BIND},
	})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(hostDir+wire.TempDir, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(hostDir+wire.TempDir, 0o777|os.ModeSticky); err != nil {
		return err
	}
	self, err := os.ReadFile("/init")
	if err != nil {
		return err
	}
	modprobePath := filepath.Join(wire.StateDir, wire.ModprobeArg)
	if err := os.WriteFile(hostDir+modprobePath, self, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/kernel/modprobe", []byte(modprobePath), 0); err != nil {
		return fmt.Errorf("set the kernel's module loader: %w", err)
	}
	if err := os.Chdir(hostDir); err != nil {
		return err
	}
	if err := syscall.Mount(".", "/", "", syscall.MS_MOVE, ""); err != nil {
		return fmt.Errorf("make the host's file system the root: %w", err)
	}
	if err := syscall.Chroot("."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	for link, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0", "/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, link); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return loopbackUp()
}

// kernelOption returns the value of NAME=VALUE on the kernel command line.
func kernelOption(name string) (string, error) {
	b, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return "", err
	}
	for _, f := range strings.Fields(string(b)) {
		if v, ok := strings.CutPrefix(f, name+"="); ok {
			return v, nil
		}
	}
	return "", fmt.Errorf("the kernel command line has no %s", name)
}

// loopbackUp brings interface 1 up with one RTM_NEWLINK (rtnetlink(7)).
func loopbackUp() error {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, syscall.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	defer syscall.Close(fd)
	const loopbackIndex = 1
	msg := make([]byte, syscall.SizeofNlMsghdr+syscall.SizeofIfInfomsg)
	le := binary.LittleEndian
	le.PutUint32(msg[0:], uint32(len(msg)))
	le.PutUint16(msg[4:], syscall.RTM_NEWLINK)
	le.PutUint16(msg[6:], syscall.NLM_F_REQUEST|syscall.NLM_F_ACK)
	info := msg[syscall.SizeofNlMsghdr:]
	le.PutUint32(info[4:], loopbackIndex)
	le.PutUint32(info[8:], syscall.IFF_UP)  // flags
	le.PutUint32(info[12:], syscall.IFF_UP) // which of them change
	if err := syscall.Sendto(fd, msg, 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	reply := make([]byte, 1024)
	n, _, err := syscall.Recvfrom(fd, reply, 0)
	if err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	if n < syscall.SizeofNlMsghdr+4 {
		return fmt.Errorf("bring lo up: answer of %d bytes", n)
	}
	if errno := int32(le.Uint32(reply[syscall.SizeofNlMsghdr:])); errno != 0 {
		return fmt.Errorf("bring lo up: %w", syscall.Errno(-errno))
	}
	return nil
}

func readIndex(dir string) (*index, error) {
	b, err := os.ReadFile(filepath.Join(dir, filepath.Base(wire.IndexFile)))
	if err != nil {
		return nil, fmt.Errorf("module index: %w", err)
	}
	var ix index
	if err := json.Unmarshal(b, &ix.ModuleIndex); err != nil {
		return nil, fmt.Errorf("module index: %w", err)
	}
	return &ix, nil
}
