package early

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Directories in the root file system that the agent starts from.
const (
	newRoot  = "/newroot"
	imageDir = "/image"
	rwDir    = "/rw"
	modDir   = "/modules"
)

// Limits of the agent's processes: enough descriptors for servers, and few enough for programs that close every
// possible descriptor.
const (
	softFiles = 65536
	hardFiles = 1 << 20
)

// Machine is the machine that Start has set up.
type Machine struct {
	Config Config

	started time.Time
	rw      int // O_PATH descriptor of the writable disk's mount; -1 for a tmpfs
}

// Start brings the machine from a bare kernel to its final root. PID 1 may call it once. The error says which step
// failed and why.
func Start() (*Machine, error) {
	m := &Machine{rw: -1, started: time.Now()}
	for _, step := range []func() error{mountBase, m.configure, loadModules, m.mountRoot, switchRoot, m.settle} {
		if err := step(); err != nil {
			return m, err
		}
	}
	return m, nil
}

// configure reads the machine's configuration.
func (m *Machine) configure() error {
	openConsole()
	line, err := readSmall("/proc/cmdline")
	if err != nil {
		return fmt.Errorf("read the kernel command line: %w", err)
	}
	m.Config, err = ParseCmdline(line)
	return err
}

// mountBase mounts what the first steps need.
func mountBase() error {
	// With CONFIG_DEVTMPFS_MOUNT the kernel has mounted it already: EBUSY.
	if err := unix.Mount("devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"); err != nil && err != unix.EBUSY {
		return fmt.Errorf("mount devtmpfs on /dev: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil && err != unix.EBUSY {
		return fmt.Errorf("mount proc on /proc: %w", err)
	}
	return nil
}

// openConsole makes sure that messages reach the console: the kernel opens it for its first process only if the
// root has a device node for it.
func openConsole() {
	var st unix.Stat_t
	if unix.Fstat(2, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev != unix.Mkdev(1, 3) {
		return
	}
	fd, err := unix.Open("/dev/console", unix.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return
	}
	for i := range 3 {
		_ = unix.Dup3(fd, i, 0)
	}
	if fd > 2 {
		unix.Close(fd)
	}
}

// readSmall reads a file of at most one page, such as those of /proc.
func readSmall(path string) (string, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	buf := make([]byte, 4096)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// loadModules loads the kernel modules that modDir/order lists. Without that file all the kernel needs is built
// in.
func loadModules() error {
	order, err := os.ReadFile(modDir + "/order")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the list of kernel modules: %w", err)
	}
	for name := range strings.FieldsSeq(string(order)) {
		if err := loadModule(modDir + "/" + name); err != nil {
			return fmt.Errorf("load kernel module %s: %w", name, err)
		}
	}
	return nil
}

func loadModule(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.FinitModule(fd, "", 0); err != nil && err != unix.EEXIST {
		return err
	}
	return nil
}

// mountRoot mounts the image, the writable layer and their overlay.
func (m *Machine) mountRoot() error {
	deadline := time.Now().Add(m.Config.Wait)
	for _, dir := range []string{imageDir, rwDir, newRoot} {
		// A read-only root disk has them; an initramfs may not.
		if err := unix.Mkdir(dir, 0o755); err != nil && err != unix.EEXIST && err != unix.EROFS {
			return fmt.Errorf("make %s: %w", dir, err)
		}
	}
	if err := mountDevice(m.Config.Image, imageDir, "erofs", unix.MS_RDONLY, deadline); err != nil {
		return fmt.Errorf("mount the image %s (is it an EROFS image?): %w", m.Config.Image, err)
	}
	if m.Config.RW == "" {
		if err := unix.Mount("rw", rwDir, "tmpfs", 0, "mode=0755"); err != nil {
			return fmt.Errorf("mount a tmpfs for the writable layer: %w", err)
		}
	} else {
		if err := mountDevice(m.Config.RW, rwDir, "ext4", unix.MS_NOATIME, deadline); err != nil {
			return fmt.Errorf("mount the writable disk %s (is it formatted as ext4?): %w", m.Config.RW, err)
		}
		// After the switch of roots no path reaches it; the descriptor is kept for the end.
		fd, err := unix.Open(rwDir, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", rwDir, err)
		}
		m.rw = fd
	}
	for _, dir := range []string{rwDir + "/upper", rwDir + "/work"} {
		if err := unix.Mkdir(dir, 0o755); err != nil && err != unix.EEXIST {
			return fmt.Errorf("make %s on the writable disk: %w", dir, err)
		}
	}
	opts := "lowerdir=" + imageDir + ",upperdir=" + rwDir + "/upper,workdir=" + rwDir + "/work"
	if err := unix.Mount("overlay", newRoot, "overlay", 0, opts); err != nil {
		return fmt.Errorf("mount the overlay of image and writable layer: %w", err)
	}
	return nil
}

// firstPoll and lastPoll are the first and the longest pause between two looks for a missing disk.
const (
	firstPoll = time.Millisecond
	lastPoll  = 50 * time.Millisecond
)

// await calls f until it returns again = false, or the time is up.
func await(deadline time.Time, f func() (again bool, err error)) error {
	for wait := firstPoll; ; wait = min(2*wait, lastPoll) {
		if again, err := f(); !again || !time.Now().Before(deadline) {
			return err
		}
		time.Sleep(wait)
	}
}

// mountDevice mounts a device, and waits for it to appear. It just tries to mount: a device that exists costs one
// system call. The tag of a share that does not exist yet gives EINVAL.
func mountDevice(dev, dir, fstype string, flags uintptr, deadline time.Time) error {
	missing := false
	err := await(deadline, func() (bool, error) {
		err := unix.Mount(dev, dir, fstype, flags, "")
		missing = err == unix.ENOENT || err == unix.ENXIO || err == unix.EINVAL && fstype == virtiofs
		return missing, err
	})
	switch {
	case missing:
		return fmt.Errorf("the device did not appear: %w", err)
	case err == unix.ENODEV:
		return fmt.Errorf("the kernel has no %s: %w", fstype, err)
	}
	return err
}

// switchRoot makes the overlay the root of everything, as switch_root(8) does, and frees the initramfs if there
// was one.
func switchRoot() error {
	for _, dir := range []string{"/dev", "/proc"} {
		p := mountPoint{source: dir, dir: newRoot + dir, flags: unix.MS_MOVE}
		if err := p.mount(); err != nil {
			return fmt.Errorf("move %s to the new root: %w", dir, err)
		}
	}
	freeInitramfs()
	if err := unix.Chdir(newRoot); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the new root to /: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change to the new root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("change to the new root: %w", err)
	}
	return nil
}

// freeInitramfs removes the files of an initramfs, which would take memory as long as the machine runs. It changes
// no other file system.
func freeInitramfs() {
	var fs unix.Statfs_t
	if unix.Statfs("/", &fs) != nil || fs.Type != unix.RAMFS_MAGIC && fs.Type != unix.TMPFS_MAGIC {
		return
	}
	// These are the archive's known contents. The mount points stay: they are empty.
	_ = os.RemoveAll(modDir)
	_ = unix.Unlink("/init")
}

// mountPoint is one of the usual file systems.
type mountPoint struct {
	source, dir, fstype string
	flags               uintptr
	opts                string
	optional            bool
}

const secure = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

var usual = []mountPoint{
	{"sysfs", "/sys", "sysfs", secure, "", false},
	{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=0620,ptmxmode=0666", false},
	{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777", false},
	{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755", false},
	{"cgroup2", "/sys/fs/cgroup", "cgroup2", secure, "nsdelegate", true},
}

var tmpMount = mountPoint{"tmpfs", "/tmp", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777", false}

func (p *mountPoint) mount() error {
	err := unix.Mount(p.source, p.dir, p.fstype, p.flags, p.opts)
	if errors.Is(err, unix.ENOENT) {
		if err = os.MkdirAll(p.dir, 0o755); err == nil {
			err = unix.Mount(p.source, p.dir, p.fstype, p.flags, p.opts)
		}
	}
	if err != nil && !p.optional {
		return fmt.Errorf("mount %s on %s: %w", p.source, p.dir, err)
	}
	return nil
}

// devLinks are the links that programs expect in /dev besides its nodes.
var devLinks = [][2]string{
	{"/proc/self/fd", "/dev/fd"},
	{"/proc/self/fd/0", "/dev/stdin"},
	{"/proc/self/fd/1", "/dev/stdout"},
	{"/proc/self/fd/2", "/dev/stderr"},
}

// settle does the remaining steps in the new root.
func (m *Machine) settle() error {
	mounts := usual
	if m.Config.TmpInRAM {
		mounts = append(mounts[:len(mounts):len(mounts)], tmpMount)
	}
	for i := range mounts {
		if err := mounts[i].mount(); err != nil {
			return err
		}
	}
	if !m.Config.TmpInRAM {
		if err := unix.Mkdir("/tmp", 0o1777); err == nil {
			_ = unix.Chmod("/tmp", 0o1777) // whatever the umask is
		} else if err != unix.EEXIST {
			return fmt.Errorf("make /tmp: %w", err)
		}
	}
	for _, l := range devLinks {
		if err := unix.Symlink(l[0], l[1]); err != nil && err != unix.EEXIST {
			return fmt.Errorf("make %s: %w", l[1], err)
		}
	}
	fewPagesAside()
	if m.Config.Hostname != "" {
		if err := unix.Sethostname([]byte(m.Config.Hostname)); err != nil {
			return fmt.Errorf("set the hostname: %w", err)
		}
	}
	if err := m.mountOthers(); err != nil {
		return err
	}
	if err := network(m.Config.Net, m.Config.Net6); err != nil {
		return err
	}
	if err := resolvConf(m.Config.Net); err != nil {
		return fmt.Errorf("write /etc/resolv.conf: %w", err)
	}
	// Ctrl-Alt-Del and the like send SIGINT rather than reset the machine.
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF); err != nil {
		return fmt.Errorf("take over Ctrl-Alt-Del: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: softFiles, Max: hardFiles}); err != nil {
		return fmt.Errorf("set the limit of open files: %w", err)
	}
	return nil
}

// fewPagesAside makes the kernel keep as few free pages in the lists of each CPU as it can: four batches, half a
// MiB. Those pages are free, but the host does not know it, and would store them with every snapshot: up to 3 MiB
// of a guest of 512 MiB. A kernel without this knob works as well.
func fewPagesAside() {
	fd, err := unix.Open("/proc/sys/vm/percpu_pagelist_high_fraction", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	// The largest part of RAM would be 1/8; a fraction this small gives the least.
	_, _ = unix.Write(fd, []byte("1000000\n"))
}

// Announce prints on the console that the agent serves, unless the command line says drowse.quiet.
func (m *Machine) Announce(version string) {
	if m.Config.Quiet {
		return
	}
	var up unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &up)
	_, _ = io.WriteString(os.Stderr, fmt.Sprintf("drowse-agent %s: ready, %d ms after the kernel's start, %d ms of them here\n",
		version, up.Nano()/1e6, time.Since(m.started).Milliseconds()))
}

// ReadOnly makes the file systems read-only as far as possible, so that their journals are clean. Call it after
// all other processes have ended.
func (m *Machine) ReadOnly() {
	unix.Sync()
	m.unmountOthers()
	_ = unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
	if m.rw >= 0 {
		_ = unix.Mount("", m.Writable(), "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOATIME, "")
	}
}

// Writable returns a path to the writable disk's file system, which no other path reaches. It is empty if the
// writable layer is a tmpfs.
func (m *Machine) Writable() string {
	if m.rw < 0 {
		return ""
	}
	return fmt.Sprintf("/proc/self/fd/%d", m.rw)
}

// Fail prints one line on the console and turns the machine off: a machine that hangs silently helps no one.
func Fail(err error) {
	line := "drowse-agent: the VM cannot start: " + strings.ReplaceAll(err.Error(), "\n", " ") + "\n"
	_, _ = io.WriteString(os.Stderr, line)
	unix.Sync()
	_ = PowerOff()
}

// PowerOff ends the machine. Without ACPI the kernel cannot power off: it would halt for ever, unseen by the host.
// Then only a reset shows: a VMM told not to reboot takes it as the end.
func PowerOff() error {
	cmd := unix.LINUX_REBOOT_CMD_POWER_OFF
	if !hasACPI() {
		cmd = unix.LINUX_REBOOT_CMD_RESTART
	}
	return unix.Reboot(cmd)
}

// hasACPI reports whether the kernel found ACPI tables. sysfs may not be mounted if the machine fails early.
func hasACPI() bool {
	const dir = "/sys/firmware/acpi"
	var st unix.Stat_t
	if unix.Stat(dir, &st) == nil {
		return true
	}
	_ = unix.Mount("sysfs", "/sys", "sysfs", secure, "")
	return unix.Stat(dir, &st) == nil
}
