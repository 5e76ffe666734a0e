package confine

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrMayNotPass means that a descriptor would give a child more than the file.
var ErrMayNotPass = errors.New("may not be given to a confined process")

// devices are the character devices that a child may have: by them it reaches no more than it must.
var devices = []string{"/dev/kvm", "/dev/userfaultfd", "/dev/null", "/dev/zero", "/dev/urandom"}

// anonymous are the kinds of files without a name that a child may have, as /proc/self/fd calls them.
var anonymous = []string{"[eventfd]", "[timerfd]", "[userfaultfd]",
	"kvm-vm", "kvm-vcpu", "kvm-vm-stats", "kvm-vcpu-stats"}

// kernelFiles are file systems whose files lead to the kernel or to other processes.
var kernelFiles = []int64{unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC,
	unix.DEBUGFS_MAGIC,
	unix.TRACEFS_MAGIC, unix.SECURITYFS_MAGIC, unix.BPF_FS_MAGIC, unix.NSFS_MAGIC,
	unix.PID_FS_MAGIC, unix.EFIVARFS_MAGIC, unix.SELINUX_MAGIC}

// MayPass checks that a descriptor may be handed to a child: a regular file, an image in memory, a pipe, a Unix
// socket, a TAP device, one of KVM or userfaultfd, an eventfd. It fails with ErrMayNotPass for all others, and for
// directories: only Start hands these over, to a child with shares.
func MayPass(f *os.File) error { return mayPass(f, false) }

func mayPass(f *os.File, shares bool) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	var refused error
	err = raw.Control(func(fd uintptr) { refused = judge(int(fd), shares) })
	if err = errors.Join(err, refused); err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	return nil
}

func judge(fd int, shares bool) error {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	refuse := func(why string) error { return fmt.Errorf("%w: %s", ErrMayNotPass, why) }
	kind := st.Mode & unix.S_IFMT
	if flags&unix.O_PATH != 0 {
		return refuse("it is open as a path (O_PATH), which leads to other files")
	}
	if kind == unix.S_IFREG || kind == unix.S_IFDIR {
		var sf unix.Statfs_t
		if err := unix.Fstatfs(fd, &sf); err != nil {
			return os.NewSyscallError("fstatfs", err)
		}
		if slices.Contains(kernelFiles, int64(sf.Type)) && !isPagemap(fd, flags) {
			return refuse("it is a file of the kernel")
		}
	}
	switch kind {
	case unix.S_IFREG:
		if st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 && flags&unix.O_ACCMODE != unix.O_RDONLY {
			return refuse("programs of that file run with their owner's rights")
		}
		return nil
	case unix.S_IFDIR:
		if shares {
			return nil
		}
		return refuse("it is a directory")
	case unix.S_IFIFO:
		return nil
	case unix.S_IFSOCK:
		domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if err != nil {
			return os.NewSyscallError("getsockopt(SO_DOMAIN)", err)
		}
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		if err != nil {
			return os.NewSyscallError("getsockopt(SO_TYPE)", err)
		}
		// A datagram socket could send to any address.
		if domain != unix.AF_UNIX || kind != unix.SOCK_STREAM && kind != unix.SOCK_SEQPACKET {
			return refuse("it is a socket, and not a connected Unix one")
		}
		return nil
	case unix.S_IFCHR:
		for _, name := range devices {
			var d unix.Stat_t
			if unix.Stat(name, &d) == nil && d.Mode&unix.S_IFMT == unix.S_IFCHR && d.Rdev == st.Rdev {
				return nil
			}
		}
		ifr, err := unix.NewIfreq("")
		if err == nil && unix.IoctlIfreq(fd, unix.TUNGETIFF, ifr) == nil {
			if ifr.Uint16()&unix.IFF_TAP != 0 {
				return nil
			}
			return refuse("it is a TUN device, and not a TAP device")
		}
		return refuse("it is another device than KVM, userfaultfd, null, zero, urandom and TAP")
	case unix.S_IFBLK:
		return refuse("it is a block device")
	}
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	is := strings.TrimPrefix(name, "anon_inode:")
	// A vCPU's has a number behind it.
	if slices.Contains(anonymous, is) || strings.HasPrefix(is, "kvm-vcpu:") || strings.HasPrefix(is, "kvm-vcpu-stats:") {
		return nil
	}
	return refuse("it is a " + is)
}

// isPagemap reports whether a file is /proc/PID/pagemap, open for reading: it says of a process which pages it has.
// The keeper must open the child's.
func isPagemap(fd, flags int) bool {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	return err == nil && flags&unix.O_ACCMODE == unix.O_RDONLY && strings.HasPrefix(name, "/proc/") &&
		strings.HasSuffix(name, "/pagemap") &&
		strings.Count(name, "/") == 3
}
