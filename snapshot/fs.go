package snapshot

import (
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// FS is what Create needs of a file system. Tests use one that fails, or that forgets what was not synced.
type FS interface {
	// Exists reports whether a file or directory has that name.
	Exists(name string) (bool, error)
	// Mkdir makes a directory; it fails with fs.ErrExist if the name is taken.
	Mkdir(name string) error
	// Lock marks a directory as in use until the Closer is closed or the process ends. It fails if the directory
	// is already locked or no longer exists.
	Lock(name string) (io.Closer, error)
	// Create makes a new file; it fails if the name is taken.
	Create(name string) (File, error)
	// Rename renames the directory oldname to newname in one step, and fails with fs.ErrExist if that name is
	// taken.
	Rename(oldname, newname string) error
	// Link gives the file oldname a second name, and fails with fs.ErrExist if
	// that name is taken.
	Link(oldname, newname string) error
	// Exchange swaps the names of two directories in one step.
	Exchange(a, b string) error
	// SyncDir makes the entries of a directory durable.
	SyncDir(name string) error
	// RemoveAll removes a file, or a directory with everything in it. A missing name is not an error.
	RemoveAll(name string) error
	// Free returns how many bytes can still be written to the file system of name.
	Free(name string) (uint64, error)
}

// File is a file being written.
type File interface {
	io.Writer
	Sync() error
	Close() error
}

type osFS struct{}

func (osFS) Exists(name string) (bool, error) {
	_, err := os.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func (osFS) Mkdir(name string) error { return os.Mkdir(name, 0o700) }

func (osFS) Lock(name string) (io.Closer, error) {
	d, err := osfile.TryOpenLocked(name, os.O_RDONLY, 0, osfile.Exclusive)
	if err != nil {
		return nil, err
	}
	return d, nil
}

func (osFS) Create(name string) (File, error) {
	return os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

func (osFS) Rename(oldname, newname string) error {
	err := unix.Renameat2(unix.AT_FDCWD, oldname, unix.AT_FDCWD, newname, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		// The file system has no RENAME_NOREPLACE. Plain rename(2) replaces only an empty directory.
		if _, serr := os.Lstat(newname); serr == nil {
			err = unix.EEXIST
		} else {
			err = unix.Rename(oldname, newname)
		}
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: oldname, New: newname, Err: err}
	}
	return nil
}

func (osFS) Link(oldname, newname string) error { return os.Link(oldname, newname) }

func (osFS) Exchange(a, b string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
		return &os.LinkError{Op: "exchange", Old: a, New: b, Err: err}
	}
	return nil
}

func (osFS) SyncDir(name string) error { return osfile.SyncDir(name) }

func (osFS) RemoveAll(name string) error { return os.RemoveAll(name) }

func (osFS) Free(name string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(name, &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: name, Err: err}
	}
	return st.Bavail * uint64(st.Bsize), nil
}
