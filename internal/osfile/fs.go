package osfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// FS is the set of file-system calls that crash-safe code needs. Implementations are safe for
// concurrent use. Errors are those of package os (*fs.PathError and the like), so errors.Is works
// with fs.ErrNotExist and with unix error numbers. Compare the results of Stat with [SameFile].
type FS interface {
	// OpenFile is os.OpenFile; the file is close-on-exec.
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	// Rename replaces newname atomically. It is durable after SyncDir of both directories.
	Rename(oldname, newname string) error
	// RenameNew is Rename, but fails with fs.ErrExist if newname exists.
	RenameNew(oldname, newname string) error
	// Exchange swaps two names in one step.
	Exchange(a, b string) error
	// Link makes a second name and fails with fs.ErrExist if newname exists.
	Link(oldname, newname string) error
	// Remove deletes a file or an empty directory.
	Remove(name string) error
	// RemoveAll deletes a file, or a directory with all in it. A missing name is no error.
	RemoveAll(name string) error
	// Mkdir makes one directory.
	Mkdir(name string, perm fs.FileMode) error
	// Stat is os.Stat.
	Stat(name string) (fs.FileInfo, error)
	// ReadDir is os.ReadDir: entries sorted by name.
	ReadDir(name string) ([]fs.DirEntry, error)
	// SyncDir makes the directory's entries durable.
	SyncDir(name string) error
	// Lock takes the exclusive lock of an existing file or directory, as TryOpenLocked does, until it is closed.
	Lock(name string) (io.Closer, error)
	// Free returns how many bytes can still be written to the file system that has name.
	Free(name string) (uint64, error)
}

// File is an open file. ReadAt and WriteAt may be called from several goroutines.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Name() string
	Stat() (fs.FileInfo, error)
	// Truncate sets the length in bytes; growing adds a hole.
	Truncate(size int64) error
	// Sync is fsync(2), Datasync fdatasync(2). After a failure the caller must consider the bytes written before
	// it lost, even if a later call succeeds.
	Sync() error
	Datasync() error
	// Fallocate is fallocate(2) with a FALLOC_FL_* mode.
	Fallocate(mode uint32, off, n int64) error
	// OS returns the file that the kernel sees, for flock, lseek and I/O that bypasses this interface.
	OS() *os.File
}

// OS is the machine's own file system.
var OS FS = osFS{}

type osFS struct{}

type osFile struct{ *os.File }

// NewFile returns f as a file of [OS]. Close of the result closes f.
func NewFile(f *os.File) File { return osFile{f} }

// SameFile is os.SameFile for a FileInfo of any [FS]: it compares the device and inode in Sys.
func SameFile(a, b fs.FileInfo) bool {
	x, ok1 := a.Sys().(*syscall.Stat_t)
	y, ok2 := b.Sys().(*syscall.Stat_t)
	return ok1 && ok2 && x.Dev == y.Dev && x.Ino == y.Ino
}

func (osFS) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return NewFile(f), nil
}

func (osFS) Rename(oldname, newname string) error       { return os.Rename(oldname, newname) }
func (osFS) Link(oldname, newname string) error         { return os.Link(oldname, newname) }
func (osFS) Remove(name string) error                   { return os.Remove(name) }
func (osFS) RemoveAll(name string) error                { return os.RemoveAll(name) }
func (osFS) Mkdir(name string, perm fs.FileMode) error  { return os.Mkdir(name, perm) }
func (osFS) Stat(name string) (fs.FileInfo, error)      { return os.Stat(name) }
func (osFS) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(name) }

func (osFS) SyncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	err = d.Sync()
	return errors.Join(err, d.Close())
}

func (osFS) RenameNew(oldname, newname string) error {
	err := unix.Renameat2(unix.AT_FDCWD, oldname, unix.AT_FDCWD, newname, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		// The file system has no RENAME_NOREPLACE. Plain rename(2) replaces only a file or an empty directory.
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

func (osFS) Exchange(a, b string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
		return &os.LinkError{Op: "exchange", Old: a, New: b, Err: err}
	}
	return nil
}

func (osFS) Lock(name string) (io.Closer, error) {
	f, err := TryOpenLocked(name, os.O_RDONLY, 0, Exclusive)
	if err != nil {
		return nil, err
	}
	return unlocker{f}, nil
}

// unlocker is a locked file whose Close unlocks it.
type unlocker struct{ f *os.File }

func (u unlocker) Close() error { return errors.Join(Unlock(u.f), u.f.Close()) }

func (osFS) Free(name string) (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(name, &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: name, Err: err}
	}
	return st.Bavail * uint64(st.Bsize), nil
}

func (f osFile) OS() *os.File { return f.File }

func (f osFile) Datasync() error {
	return f.control("fdatasync", unix.Fdatasync)
}

func (f osFile) Fallocate(mode uint32, off, n int64) error {
	return f.control("fallocate", func(fd int) error { return unix.Fallocate(fd, mode, off, n) })
}

// control runs a system call on the descriptor, and repeats it when a signal interrupts it. The Go runtime sends
// SIGURG to preempt, and fallocate returns EINTR then.
func (f osFile) control(op string, call func(fd int) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var cerr error
	err = rc.Control(func(fd uintptr) {
		for {
			if cerr = call(int(fd)); !errors.Is(cerr, unix.EINTR) {
				return
			}
		}
	})
	if err == nil {
		err = cerr
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: f.Name(), Err: err}
	}
	return nil
}

// NextData returns where the first data of a file from off on begins and ends (lseek(2), SEEK_DATA and SEEK_HOLE),
// both at most end. Both are end if only a hole is left. If the file system has no holes, everything is data.
func NextData(f *os.File, off, end int64) (data, hole int64) {
	data, err := f.Seek(off, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return end, end
	case err != nil:
		return off, end
	}
	hole, err = f.Seek(data, unix.SEEK_HOLE)
	if err != nil || hole <= data {
		hole = end
	}
	return min(data, end), min(hole, end)
}

// CopyRange copies n bytes between two files. If both are files of [OS], the kernel copies, with reflinks where
// the file system has them. Otherwise CopyRange copies through buf, which must not be empty. A source that ends
// early gives io.ErrUnexpectedEOF.
func CopyRange(dst File, dstOff int64, src File, srcOff, n int64, buf []byte) error {
	d, ok1 := dst.(osFile)
	s, ok2 := src.(osFile)
	for ok1 && ok2 && n > 0 {
		so, do := srcOff, dstOff
		var c int
		err := d.control("copy_file_range", func(dfd int) error {
			return s.control("copy_file_range", func(sfd int) (err error) {
				c, err = unix.CopyFileRange(sfd, &so, dfd, &do, int(min(n, 1<<30)), 0)
				return err
			})
		})
		switch {
		case errors.Is(err, unix.EXDEV), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EINVAL):
			ok1 = false // not supported by the file system: copy below
			continue
		case err != nil:
			return err
		case c == 0:
			return fmt.Errorf("copy from %s at %d: %w", src.Name(), srcOff, io.ErrUnexpectedEOF)
		}
		srcOff, dstOff, n = srcOff+int64(c), dstOff+int64(c), n-int64(c)
	}
	for n > 0 {
		p := buf[:min(int64(len(buf)), n)]
		if c, err := src.ReadAt(p, srcOff); c < len(p) {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("copy from %s at %d: %w", src.Name(), srcOff, err)
		}
		if _, err := dst.WriteAt(p, dstOff); err != nil {
			return err
		}
		srcOff, dstOff, n = srcOff+int64(len(p)), dstOff+int64(len(p)), n-int64(len(p))
	}
	return nil
}
