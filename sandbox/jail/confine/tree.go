package confine

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// OpenTree returns a directory of the host for a child with shares. It is the root of a mount of its own, from which
// ".." does not lead out. No device and no setuid bit counts in it, and nothing can be written unless writable. The
// keeper must hold tree as long as the child uses dir.
func OpenTree(path string, writable bool) (tree, dir *os.File, err error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open_tree", Path: path, Err: err}
	}
	tree = os.NewFile(uintptr(fd), path)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC}
	if !writable {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr)
	if err != nil { // ENOSYS before Linux 5.12, where shares lack Landlock as well
		return nil, nil, errors.Join(fmt.Errorf("sharing %s: %w", path, os.NewSyscallError("mount_setattr", err)), tree.Close())
	}
	d, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, errors.Join(&os.PathError{Op: "open", Path: path, Err: err}, tree.Close())
	}
	return tree, os.NewFile(uintptr(d), path), nil
}
