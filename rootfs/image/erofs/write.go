package erofs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"time"

	"github.com/erofs/go-erofs"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
)

// Write writes a finished tree as an EROFS image to an empty file, and fsyncs it. onWrite gets the bytes of file
// content written so far and their total.
//
// The same tree gives the same image, byte for byte: its build time is the newest modification time in it, and its
// UUID is derived from the content.
func Write(ctx context.Context, t *fstree.Tree, out *os.File, onWrite func(done, total int64)) error {
	links, err := t.Finish()
	if err != nil {
		return fmt.Errorf("lay out the image: %w", err)
	}
	alias := make(map[string]bool, len(links))
	for _, l := range links {
		alias[l.Path] = true
	}
	var newest time.Time
	if err := t.Walk(func(_ string, n *fstree.Inode) error {
		if n.Mtime.After(newest) {
			newest = n.Mtime
		}
		return nil
	}); err != nil {
		return err
	}
	src := &treeFS{ctx: ctx, t: t, alias: alias, onRead: onWrite}
	sw := sparse.NewWriter(out)
	w := erofs.Create(sw, erofs.WithBlockSize(sparse.BlockSize), erofs.WithBuildTime(uint64(max(newest.Unix(), 0)), 0))
	if err := errors.Join(w.CopyFrom(src)); err != nil {
		return fmt.Errorf("lay out the image: %w", err)
	}
	if err := w.Close(); err != nil {
		if src.err != nil {
			err = src.err // the cause, where go-erofs may have lost it
		}
		return fmt.Errorf("write the image: %w", err)
	}
	if src.err != nil {
		return fmt.Errorf("write the image: %w", src.err)
	}
	if err := sw.Finish(); err != nil {
		return fmt.Errorf("write the image: %w", err)
	}
	if err := finishEROFS(ctx, out, links, t.Config); err != nil {
		return fmt.Errorf("finish the image: %w", err)
	}
	if err := out.Sync(); err != nil {
		return fmt.Errorf("write the image to stable storage: %w", err)
	}
	return nil
}

// treeFS presents a tree to go-erofs, which takes a file's owner, link count, device number and extended attributes
// from a *erofs.Stat in FileInfo.Sys. Further names of an inode appear as empty files: finishEROFS redirects them.
type treeFS struct {
	ctx    context.Context
	t      *fstree.Tree
	alias  map[string]bool
	done   int64
	onRead func(done, total int64)
	err    error // the first error of reading content
}

func (f *treeFS) info(p string) (*treeInfo, error) {
	n := f.t.Lookup(p)
	if n == nil {
		return nil, fs.ErrNotExist
	}
	return &treeInfo{name: path.Base(p), n: n, alias: f.alias[p]}, nil
}

// Stat implements fs.StatFS.
func (f *treeFS) Stat(p string) (fs.FileInfo, error) { return f.info(p) }

// ReadLink returns the target of a symlink.
func (f *treeFS) ReadLink(p string) (string, error) {
	n := f.t.Lookup(p)
	if n == nil {
		return "", fs.ErrNotExist
	}
	return n.Target, nil
}

// ReadDir implements fs.ReadDirFS.
func (f *treeFS) ReadDir(p string) ([]fs.DirEntry, error) {
	if err := context.Cause(f.ctx); err != nil {
		return nil, err
	}
	n := f.t.Lookup(p)
	if n == nil {
		return nil, fs.ErrNotExist
	}
	out := make([]fs.DirEntry, 0, len(n.Children))
	for _, name := range slices.Sorted(maps.Keys(n.Children)) {
		out = append(out, fs.FileInfoToDirEntry(&treeInfo{name: name, n: n.Children[name], alias: f.alias[path.Join(p, name)]}))
	}
	return out, nil
}

// Open implements fs.FS for regular files. go-erofs opens all files before it reads the first, so the content is
// opened only at the first read.
func (f *treeFS) Open(p string) (fs.File, error) {
	i, err := f.info(p)
	if err != nil {
		return nil, err
	}
	return &treeFile{f: f, path: p, info: i, left: i.n.Size}, nil
}

type treeInfo struct {
	name  string
	n     *fstree.Inode
	alias bool
}

func (i *treeInfo) Name() string { return i.name }

func (i *treeInfo) Mode() fs.FileMode { return i.n.Mode }

func (i *treeInfo) ModTime() time.Time { return i.n.Mtime }

func (i *treeInfo) IsDir() bool { return i.n.IsDir() }

func (i *treeInfo) Size() int64 {
	if i.alias {
		return 0
	}
	return i.n.Size
}

// Sys returns what fs.FileInfo cannot express.
func (i *treeInfo) Sys() any {
	st := &erofs.Stat{
		UID: i.n.UID, GID: i.n.GID, Mtime: uint64(i.n.Mtime.Unix()), MtimeNs: uint32(i.n.Mtime.Nanosecond()),
		Nlink: int(i.n.Nlink), Rdev: i.n.Rdev,
	}
	if !i.alias {
		st.Xattrs = erofsXattrs(i.n.Xattrs)
	}
	return st
}

// treeFile reads the content of one file and checks its size: go-erofs would accept a short one in places.
type treeFile struct {
	f    *treeFS
	path string
	info *treeInfo
	r    io.ReadCloser
	left int64
}

func (t *treeFile) Stat() (fs.FileInfo, error) { return t.info, nil }

func (t *treeFile) Read(p []byte) (int, error) {
	if t.left == 0 {
		return 0, io.EOF
	}
	n, err := t.read(p)
	if err != nil && t.f.err == nil {
		t.f.err = err
	}
	return n, err
}

func (t *treeFile) read(p []byte) (int, error) {
	if err := context.Cause(t.f.ctx); err != nil {
		return 0, err
	}
	if t.r == nil {
		var err error
		if t.r, err = t.info.n.Data.Open(); err != nil {
			return 0, err
		}
	}
	n, err := t.r.Read(p[:min(int64(len(p)), t.left)])
	t.left -= int64(n)
	t.f.done += int64(n)
	if t.f.onRead != nil {
		t.f.onRead(t.f.done, t.f.t.Bytes)
	}
	if errors.Is(err, io.EOF) {
		if err = nil; t.left > 0 {
			err = fmt.Errorf("read %s: %d bytes are missing at its end: %w", t.path, t.left, fstree.ErrChanged)
		}
	}
	return n, err
}

// Close implements io.Closer. go-erofs calls it after the last byte.
func (t *treeFile) Close() error {
	if t.r == nil {
		return nil
	}
	r := t.r
	t.r = nil
	return r.Close()
}
