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

// source is the tree to pack: a directory, or a file in one. Even if others change it meanwhile, Pack reads only
// what is in it, since it follows no link.
type source struct {
	*beneath
	top string // name of the tree in the directory: "." for the directory itself
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
	return &source{&beneath{top: f}, top}, err
}

// rename returns the name of rel in an archive in which the whole tree is called name.
func (s *source) rename(rel, name string) string {
	if rel == s.top {
		return name
	}
	return path.Join(name, rel)
}

// goneIsNot returns nil for the error of a file that has vanished since its directory was read.
func (s *source) goneIsNot(rel string, err error) error {
	if rel != s.top && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// walk calls f for rel and everything below it, except unfinished files of copies: in the order of names, a
// directory before its contents.
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

// visit calls f for rel. If rel is a directory, visit returns the names in it.
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
