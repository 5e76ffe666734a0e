package osfile

import (
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// TempPrefix begins the name of a file without its final name. After a crash such a file is garbage.
const TempPrefix = ".tmp-"

// SyncDir makes the entries of a directory durable.
func SyncDir(dir string) error { return OS.SyncDir(dir) }

// WriteFile writes a file, or replaces it, durably: after a crash at any instant the file is complete, the old or
// the new one. When WriteFile has returned nil, it is the new one.
func WriteFile(path string, data []byte, perm fs.FileMode) error {
	return WriteFileIn(OS, path, data, perm)
}

// WriteFileIn is WriteFile in a file system.
func WriteFileIn(fsys FS, path string, data []byte, perm fs.FileMode) error {
	temp, err := WriteTemp(fsys, path, data, perm)
	if err != nil {
		return err
	}
	return Put(fsys, temp, path)
}

// Replace is WriteFile with the content that write writes.
func Replace(path string, perm fs.FileMode, write func(f *os.File) error) error {
	temp, err := writeTemp(OS, path, perm, func(f File) error { return write(f.OS()) })
	if err != nil {
		return err
	}
	return Put(OS, temp, path)
}

// WriteNew is WriteFile, but if the file exists it fails with fs.ErrExist and changes nothing.
func WriteNew(path string, data []byte, perm fs.FileMode) error {
	temp, err := WriteTemp(OS, path, data, perm)
	if err != nil {
		return err
	}
	lerr := os.Link(temp, path)
	if err := errors.Join(os.Remove(temp), SyncDir(filepath.Dir(path))); err != nil {
		return err // more important than lerr, which may be fs.ErrExist
	}
	return lerr
}

// WriteTemp durably writes a file under a temporary name beside path. A rename must then give it the name path.
func WriteTemp(fsys FS, path string, data []byte, perm fs.FileMode) (temp string, err error) {
	return writeTemp(fsys, path, perm, func(f File) error {
		_, err := f.WriteAt(data, 0)
		return err
	})
}

// TempPath returns a new temporary name in the directory of path.
func TempPath(path string) string {
	return filepath.Join(filepath.Dir(path), TempPrefix+rand.Text()[:16])
}

func writeTemp(fsys FS, path string, perm fs.FileMode, write func(File) error) (temp string, err error) {
	const private = 0o600
	temp = TempPath(path)
	f, err := fsys.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, private)
	if err != nil {
		return "", err
	}
	if err = write(f); err == nil && perm != private {
		err = f.OS().Chmod(perm) // regardless of the umask
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(err, fsys.Remove(temp))
	}
	return temp, nil
}

// Put durably gives the file of WriteTemp its final name.
func Put(fsys FS, temp, path string) error {
	if err := fsys.Rename(temp, path); err != nil {
		return errors.Join(err, fsys.Remove(temp))
	}
	return fsys.SyncDir(filepath.Dir(path))
}
