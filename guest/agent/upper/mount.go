package upper

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agent/early"
)

// Tree has the two directories of an overlay. One goroutine at a time may use it.
type Tree struct {
	upper, lower int // directories, open
}

// Open mounts the machine's writable disk and its image a second time, without a mount point: no path reaches the
// mounts of the boot. All mounts of a disk show the same files. Open needs root.
func Open() (*Tree, error) {
	c, err := disks()
	if err != nil {
		return nil, err
	}
	rw, err := mount("ext4", c.RW, false)
	if err != nil {
		return nil, err
	}
	defer unix.Close(rw)
	image, err := mount("erofs", c.Image, true)
	if err != nil {
		return nil, err
	}
	up, err := unix.Openat(rw, "upper", dirFlags, 0)
	if err != nil {
		unix.Close(image)
		return nil, fmt.Errorf("open the upper directory: %w", err)
	}
	return &Tree{upper: up, lower: image}, nil
}

// OpenAt is Open for directories that have a path.
func OpenAt(upper, lower string) (*Tree, error) {
	up, err := unix.Open(upper, dirFlags, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: upper, Err: err}
	}
	low, err := unix.Open(lower, dirFlags, 0)
	if err != nil {
		unix.Close(up)
		return nil, &os.PathError{Op: "open", Path: lower, Err: err}
	}
	return &Tree{upper: up, lower: low}, nil
}

const dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC

// Close unmounts the disks.
func (t *Tree) Close() { unix.Close(t.upper); unix.Close(t.lower) }

// OpenWritten mounts the writable disk alone. It returns a path of the upper directory that is valid until done is
// called.
func OpenWritten() (dir string, done func(), err error) {
	c, err := disks()
	if err != nil {
		return "", nil, err
	}
	fd, err := mount("ext4", c.RW, false)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/upper", fd), func() { unix.Close(fd) }, nil
}

// disks returns the disks of the root.
func disks() (early.Config, error) {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return early.Config{}, fmt.Errorf("find the writable disk: %w", err)
	}
	c, err := early.ParseCmdline(string(line))
	if err != nil {
		return early.Config{}, fmt.Errorf("find the writable disk: %w", err)
	}
	if c.RW == "" {
		return early.Config{}, errors.New("find the writable disk: the VM has none")
	}
	return c, nil
}

// mount mounts a disk without a mount point, and returns its root.
func mount(fstype, dev string, readOnly bool) (fd int, err error) {
	fail := func(what string, err error) (int, error) { return -1, fmt.Errorf("mount %s: %s: %w", dev, what, err) }
	fsfd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fail("fsopen", err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigSetString(fsfd, "source", dev); err != nil {
		return fail("source", err)
	}
	// As at boot: all mounts of one disk must agree in this. The overlay writes to the writable one.
	if readOnly {
		if err := unix.FsconfigSetFlag(fsfd, "ro"); err != nil {
			return fail("ro", err)
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return fail("create", err)
	}
	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return fail("fsmount", err)
	}
	return mfd, nil
}
