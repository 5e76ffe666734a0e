package osfile

import (
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// TempPrefix begins the name of a file that has not got its own yet. After a crash it is garbage.
const TempPrefix = ".tmp-"

// SyncDir makes the entries of a directory durable.
func SyncDir(dir string) error { return OS.SyncDir(dir) }

// WriteFile writes a file, or replaces it, durably: after a crash at any instant it is whole, the old or the new one,
// and when WriteFile has returned nil, the new one.
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

// Replace is WriteFile with what write writes.
func Replace(path string, perm fs.FileMode, write func(f *os.File) error) error {
	temp, err := writeTemp(OS, path, perm, func(f File) error { return write(f.OS()) })
	if err != nil {
		return err
	}
	return Put(OS, temp, path)
}

// WriteNew is WriteFile, but fails with fs.ErrExist, and changes nothing, if there is a file.
func WriteNew(path string, data []byte, perm fs.FileMode) error {
	temp, err := WriteTemp(OS, path, data, perm)
	if err != nil {
		return err
	}
	lerr := os.Link(temp, path)
	if err := errors.Join(os.Remove(temp), SyncDir(filepath.Dir(path))); err != nil {
		return err // no caller passes it over, as it may fs.ErrExist
	}
	return lerr
}

// WriteTemp writes, durably, a file that is to get the name path by a rename, beside it and under another name.
func WriteTemp(fsys FS, path string, data []byte, perm fs.FileMode) (temp string, err error) {
	return writeTemp(fsys, path, perm, func(f File) error {
		_, err := f.WriteAt(data, 0)
		return err
	})
}

func writeTemp(fsys FS, path string, perm fs.FileMode, write func(File) error) (temp string, err error) {
	const private = 0o600
	temp = filepath.Join(filepath.Dir(path), TempPrefix+rand.Text()[:16])
	f, err := fsys.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, private)
	if err != nil {
		return "", err
	}
	if err = write(f); err == nil && perm != private {
		err = f.OS().Chmod(perm) // whatever the umask is
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(err, fsys.Remove(temp))
	}
	return temp, nil
}

// Put gives what WriteTemp has written its name, durably.
func Put(fsys FS, temp, path string) error {
	if err := fsys.Rename(temp, path); err != nil {
		return errors.Join(err, fsys.Remove(temp))
	}
	return fsys.SyncDir(filepath.Dir(path))
}
