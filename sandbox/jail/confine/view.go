package confine

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// A child with shares keeps the right to change the mode, owner and times of files that are not its own
// (shareCapabilities), and the filter cannot tell to which of its descriptors such a call goes. So what such a child
// has besides its shares, and is not its own to write, was opened in mounts where nothing can be changed.

// A View has the files of the host, as this process sees them when it is made. What is opened by it can be read, and
// devices can be used, but nothing about it can be changed.
type View struct{ tree *os.File }

// NewView returns a view. It needs root, and Linux 5.12, as shares do. File systems that are mounted later are not in
// it.
func NewView() (*View, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return nil, &os.PathError{Op: "open_tree", Path: "/", Err: err}
	}
	v := &View{os.NewFile(uintptr(fd), "/")}
	if err := unchangeable(fd, "", unix.AT_EMPTY_PATH); err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

func unchangeable(dir int, path string, flags uint) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	return os.NewSyscallError("mount_setattr(MOUNT_ATTR_RDONLY)", unix.MountSetattr(dir, path, flags|unix.AT_RECURSIVE, &attr))
}

// Open opens a path with flags of open(2), of which none makes a file. Only devices can be opened for writing.
func (v *View) Open(path string, flags int) (*os.File, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	for {
		fd, err := unix.Openat2(int(v.tree.Fd()), abs, &how)
		switch err {
		case nil:
			return os.NewFile(uintptr(fd), path), nil
		case unix.EINTR, unix.EAGAIN: // EAGAIN: a rename or mount meanwhile
		default:
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
	}
}

// Close ends the view. What was opened by it stays as it is.
func (v *View) Close() error { return v.tree.Close() }

// ViewOnly makes all that a child with shares opens by path from now on like what a View opens. The child calls it
// before it opens anything, and before Enter.
func ViewOnly() error {
	var a assignment
	if err := json.Unmarshal([]byte(os.Getenv(assignmentEnv)), &a); err != nil || a.ID == 0 {
		return fmt.Errorf("confining this process: %w", ErrNotStarted)
	}
	if !a.Shares {
		return nil
	}
	// They are copies of the keeper's, in a namespace of this process.
	if err := unchangeable(unix.AT_FDCWD, "/", 0); err != nil {
		return fmt.Errorf("confining this process: making the host's files unchangeable: %w", err)
	}
	return nil
}
