package treetar

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// source is what is packed: a directory, or something in one. Others may change it meanwhile: what is
// packed is in it all the same, since no link is followed.
type source struct {
	*beneath
	top string // what it is called there: "." for a directory
}

func openSource(src string) (*source, error) {
	fi, err := os.Lstat(src)
	if err != nil {
		return nil, err
	}
	dir, top := src, "."
	if !fi.IsDir() {
		dir, top = filepath.Dir(src), filepath.Base(src)
	}
	f, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	return &source{&beneath{f}, top}, err
}

// rename is what something is called in an archive that calls the whole name.
func (s *source) rename(rel, name string) string {
	if rel == s.top {
		return name
	}
	return path.Join(name, rel)
}

// goneIsNot takes it for no error that something is gone since its directory was read.
func (s *source) goneIsNot(rel string, err error) error {
	if rel != s.top && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// walk calls f for a name, and all that is in it, but unfinished files of copies: in the order of names, a directory
// before what is in it.
func (s *source) walk(ctx context.Context, rel string, f func(rel string, at *spot, fi fs.FileInfo) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	names, err := s.visit(rel, f)
	if err != nil {
		return s.goneIsNot(rel, err)
	}
	for _, name := range names {
		if Unfinished(name) {
			continue
		}
		if err := s.walk(ctx, path.Join(rel, name), f); err != nil {
			return err
		}
	}
	return nil
}

// visit calls f for one thing, and returns the names in it if it is a directory.
func (s *source) visit(rel string, f func(rel string, at *spot, fi fs.FileInfo) error) ([]string, error) {
	at, err := s.find(rel)
	if err != nil {
		return nil, err
	}
	defer at.close()
	fi, err := at.lstat()
	if err != nil {
		return nil, err
	}
	if err := f(rel, at, fi); err != nil || !fi.IsDir() {
		return nil, err
	}
	d, err := at.openDir()
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}
