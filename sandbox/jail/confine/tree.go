package confine

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// OpenTree returns a directory of the host for a child with shares. It is the root of a mount of its own, from which
// ".." does not lead out, and in which no device and no setuid bit counts. The keeper must hold tree as long as the
// child uses dir.
func OpenTree(path string) (tree, dir *os.File, err error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open_tree", Path: path, Err: err}
	}
	tree = os.NewFile(uintptr(fd), path)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr)
	if err != nil && !errors.Is(err, unix.ENOSYS) { // before Linux 5.12
		return nil, nil, errors.Join(fmt.Errorf("sharing %s: %w", path, os.NewSyscallError("mount_setattr", err)), tree.Close())
	}
	d, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, errors.Join(&os.PathError{Op: "open", Path: path, Err: err}, tree.Close())
	}
	return tree, os.NewFile(uintptr(d), path), nil
}
