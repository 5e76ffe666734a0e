package confine

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMayPass_is_for_files_that_lead_nowhere_else(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	suid := filepath.Join(dir, "suid")
	if err := errors.Join(os.WriteFile(suid, nil, 0o600), os.Chmod(suid, 0o700|os.ModeSetuid)); err != nil {
		t.Fatal(err)
	}
	fd := func(fd int, err error) func() (int, error) { return func() (int, error) { return fd, err } }
	open := func(path string, flags int) func() (int, error) { return fd(unix.Open(path, flags|unix.O_CLOEXEC, 0)) }
	socket := func(domain, kind int) func() (int, error) { return fd(unix.Socket(domain, kind|unix.SOCK_CLOEXEC, 0)) }
	pipe := func() (int, error) {
		var p [2]int
		err := unix.Pipe2(p[:], unix.O_CLOEXEC)
		if err == nil {
			unix.Close(p[1])
		}
		return p[0], err
	}
	inotify := fd(unix.InotifyInit1(unix.IN_CLOEXEC))
	for _, c := range []struct {
		name string
		open func() (int, error)
		may  bool
	}{
		{"a file", open(path, unix.O_RDWR), true},
		{"a pipe", pipe, true},
		{"memory", fd(unix.MemfdCreate("x", unix.MFD_CLOEXEC)), true},
		{"an eventfd", fd(unix.Eventfd(0, unix.EFD_CLOEXEC)), true},
		{"a Unix socket", socket(unix.AF_UNIX, unix.SOCK_STREAM), true},
		{"/dev/null", open("/dev/null", unix.O_RDWR), true},
		{"/dev/kvm", open("/dev/kvm", unix.O_RDWR), true},
		{"/dev/userfaultfd", open("/dev/userfaultfd", unix.O_RDWR), true},
		{"its pagemap", open("/proc/"+strconv.Itoa(os.Getpid())+"/pagemap", unix.O_RDONLY), true},
		{"a setuid program to read", open(suid, unix.O_RDONLY), true},
		{"a setuid program to write", open(suid, unix.O_RDWR), false},
		{"a directory", open(dir, unix.O_RDONLY), false},
		{"a path", open(path, unix.O_PATH), false},
		{"a link of a namespace", open("/proc/self/ns/net", unix.O_RDONLY), false},
		{"its memory", open("/proc/self/mem", unix.O_RDWR), false},
		{"a sysctl", open("/proc/sys/kernel/hostname", unix.O_RDONLY), false},
		{"a file of sysfs", open("/sys/kernel/mm/transparent_hugepage/enabled", unix.O_RDONLY), false},
		{"a directory of proc", open("/proc", unix.O_RDONLY), false},
		{"/dev/mem", open("/dev/mem", unix.O_RDONLY), false},
		{"a TUN device without a name", open("/dev/net/tun", unix.O_RDWR), false},
		{"a datagram socket", socket(unix.AF_UNIX, unix.SOCK_DGRAM), false},
		{"an internet socket", socket(unix.AF_INET, unix.SOCK_STREAM), false},
		{"a netlink socket", socket(unix.AF_NETLINK, unix.SOCK_RAW), false},
		{"an epoll instance", fd(unix.EpollCreate1(unix.EPOLL_CLOEXEC)), false},
		{"an inotify instance", inotify, false},
		{"a process", fd(unix.PidfdOpen(os.Getpid(), 0)), false},
	} {
		n, err := c.open()
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENXIO) {
			t.Logf("%s: not here: %v", c.name, err)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		f := os.NewFile(uintptr(n), c.name)
		switch err := MayPass(f); {
		case c.may && err != nil, !c.may && !errors.Is(err, ErrMayNotPass):
			t.Errorf("%s: %v", c.name, err)
		}
		if want := c.may || c.name == "a directory"; (mayPass(f, true) == nil) != want {
			t.Errorf("%s, with shares: want %v", c.name, want)
		}
		f.Close()
	}
}

func TestMayPass_knows_a_TAP_device_from_others(t *testing.T) {
	for _, c := range []struct {
		flags uint16
		may   bool
	}{{unix.IFF_TAP, true}, {unix.IFF_TUN, false}} {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			t.Skip(err)
		}
		f := os.NewFile(uintptr(fd), "tun")
		ifr, err := unix.NewIfreq("drowsect%d")
		if err != nil {
			t.Fatal(err)
		}
		ifr.SetUint16(c.flags | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
			f.Close()
			t.Skip(err)
		}
		if err := MayPass(f); (err == nil) != c.may {
			t.Errorf("flags %#x: %v", c.flags, err)
		}
		f.Close()
	}
}

func TestProbe_names_each_wall_once(t *testing.T) {
	seen := map[string]bool{}
	for _, w := range Probe() {
		if seen[w.Name] || w.Name == "" || w.Detail == "" {
			t.Errorf("%+v", w)
		}
		seen[w.Name] = true
		t.Logf("%-16s %-5v %s", w.Name, w.Present, w.Detail)
	}
}
