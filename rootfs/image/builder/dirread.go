package builder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/sparse"
)

// readDir reads a directory tree of the host into a tree. It does not read file contents: the tree refers to the
// files, and reading them later fails with ErrChanged if they have changed.
//
// readDir resolves a symlink given as the root. It does not enter mount points below the root: statx mount ids
// tell them, including bind mounts (before Linux 5.8, which has no such ids, a change of the device number does).
func readDir(ctx context.Context, root string, maxBytes int64, onRead func(int64)) (*fstree.Tree, error) {
	resolved, err := filepath.EvalSymlinks(root)
	if err != nil {
		return nil, fmt.Errorf("open the source directory: %w", err)
	}
	d := &dirReader{ctx: ctx, t: fstree.New(), root: resolved, maxBytes: maxBytes, onRead: onRead, seen: map[devIno]*fstree.Inode{}}
	st, err := statx(resolved)
	if err != nil {
		return nil, fmt.Errorf("open the source directory: %w", &fs.PathError{Op: "statx", Path: resolved, Err: err})
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, fmt.Errorf("%w: %s is not a directory", image.ErrUnsupportedSource, resolved)
	}
	d.mount = mountOf(st)
	if err := d.read(".", st); err != nil {
		return nil, err
	}
	return d.t, nil
}

type devIno struct{ dev, ino uint64 }

type mountID struct {
	id  uint64
	dev uint64
}

type dirReader struct {
	ctx      context.Context
	t        *fstree.Tree
	root     string
	mount    mountID
	maxBytes int64
	onRead   func(int64)
	seen     map[devIno]*fstree.Inode // files with several names
}

// statx returns the attributes of a path without following a symlink.
func statx(p string) (*unix.Statx_t, error) {
	var st unix.Statx_t
	for {
		err := unix.Statx(unix.AT_FDCWD, p, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
		if err != unix.EINTR {
			return &st, err
		}
	}
}

func devOf(st *unix.Statx_t) uint64 { return unix.Mkdev(st.Dev_major, st.Dev_minor) }

func mountOf(st *unix.Statx_t) mountID {
	if st.Mask&unix.STATX_MNT_ID != 0 {
		return mountID{id: st.Mnt_id}
	}
	return mountID{dev: devOf(st)}
}

// read adds the file at rel and, for a directory, its contents.
func (d *dirReader) read(rel string, st *unix.Statx_t) error {
	if err := context.Cause(d.ctx); err != nil {
		return err
	}
	p := filepath.Join(d.root, rel)
	key := devIno{devOf(st), st.Ino}
	if n := d.seen[key]; n != nil {
		return d.add(rel, n)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
		d.t.Skipped.Sockets++
		return nil
	}
	n, err := d.inode(p, st)
	if err != nil {
		return err
	}
	foreign := mountOf(st) != d.mount
	if foreign {
		d.t.Skipped.Mounts++
		n.Size, n.Data = 0, nil
	}
	if d.t.Bytes += n.Size; d.t.Bytes > d.maxBytes {
		return fmt.Errorf("%w: the files of %s have more than %d bytes; leave files out, or raise MaxBytes",
			image.ErrTooLarge, d.root, d.maxBytes)
	}
	if st.Nlink > 1 && !n.IsDir() && !foreign {
		d.seen[key] = n
	}
	if err := d.add(rel, n); err != nil {
		return err
	}
	if d.onRead != nil {
		d.onRead(d.t.Bytes)
	}
	if !n.IsDir() || foreign {
		return nil
	}
	entries, err := os.ReadDir(p)
	if err != nil {
		return vanished("read directory", p, err)
	}
	for _, e := range entries {
		sub := filepath.Join(p, e.Name())
		st, err := statx(sub)
		if err != nil {
			return vanished("describe", sub, err)
		}
		if err := d.read(filepath.Join(rel, e.Name()), st); err != nil {
			return err
		}
	}
	return nil
}

func (d *dirReader) add(rel string, n *fstree.Inode) error {
	if err := d.t.Add(rel, n); err != nil {
		return fmt.Errorf("take %s into the image: %w", filepath.Join(d.root, rel), err)
	}
	return nil
}

func (d *dirReader) inode(p string, st *unix.Statx_t) (*fstree.Inode, error) {
	n := &fstree.Inode{UID: st.Uid, GID: st.Gid, Mtime: time.Unix(st.Mtime.Sec, int64(st.Mtime.Nsec))}
	if st.Mtime.Sec < 0 {
		return nil, fmt.Errorf("take %s into the image: its modification time %v is before 1970, which EROFS cannot hold; "+
			"change it with touch", p, n.Mtime)
	}
	n.Mode = fstree.Mode(int64(st.Mode))
	var err error
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if n.Size = int64(st.Size); n.Size > 0 {
			n.Data = &hostContent{path: p, size: n.Size, mtime: n.Mtime, id: devIno{devOf(st), st.Ino}}
		}
	case unix.S_IFDIR, unix.S_IFIFO:
	case unix.S_IFLNK:
		n.Mode = fs.ModeSymlink | 0o777
		if n.Target, err = os.Readlink(p); err != nil {
			return nil, vanished("read symlink", p, err)
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		if n.Rdev, err = fstree.EncodeDev(st.Rdev_major, st.Rdev_minor); err != nil {
			return nil, fmt.Errorf("take %s into the image: %w", p, err)
		}
	default:
		return nil, fmt.Errorf("take %s into the image: file type %#o is not known", p, st.Mode&unix.S_IFMT)
	}
	if n.Xattrs, err = d.readXattrs(p); err != nil {
		return nil, vanished("read extended attributes of", p, err)
	}
	return n, nil
}

// readXattrs reads the extended attributes of a path that EROFS can hold, and counts the others.
func (d *dirReader) readXattrs(p string) (map[string]string, error) {
	list, err := growing(func(b []byte) (int, error) { return unix.Llistxattr(p, b) })
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil || len(list) == 0 {
		return nil, err
	}
	var out map[string]string
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list), "\x00"), "\x00") {
		if !erofs.KeepXattr(name) {
			d.t.Skipped.Xattrs++
			continue
		}
		value, err := growing(func(b []byte) (int, error) { return unix.Lgetxattr(p, name, b) })
		if errors.Is(err, unix.ENODATA) {
			continue // removed in the meantime
		}
		if err != nil {
			return nil, err
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = string(value)
	}
	return out, nil
}

// growing calls a system call that fills a buffer, with the size that it reports, until the size fits (it may
// change meanwhile).
func growing(call func([]byte) (int, error)) ([]byte, error) {
	const tries = 8
	for range tries {
		n, err := call(nil)
		if err != nil || n == 0 {
			return nil, err
		}
		b := make([]byte, n)
		n, err = call(b)
		if errors.Is(err, unix.ERANGE) {
			continue
		}
		return b[:max(n, 0)], err
	}
	return nil, unix.EBUSY
}

// vanished describes an error of a path below the source. A missing path existed when its directory was read.
func vanished(doing, p string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s %s: %w: it vanished; stop what changes the directory and try again", doing, p, image.ErrChanged)
	}
	return fmt.Errorf("%s %s: %w", doing, p, err)
}

// hostContent is the content of a file of the host, which must not change after the tree was read.
type hostContent struct {
	path  string
	size  int64
	mtime time.Time
	id    devIno
}

func (c *hostContent) Open() (io.ReadCloser, error) {
	// O_NONBLOCK: if the file has become a FIFO, opening must not wait for a writer.
	f, err := os.OpenFile(c.path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, vanished("open", c.path, err)
	}
	r := &hostFile{f: f, r: sparse.NewReader(f, c.size), want: c}
	if err := r.check(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return r, nil
}

// hostFile compares the file with the tree's record of it when it is opened and at its end.
type hostFile struct {
	f    *os.File
	r    *sparse.Reader
	want *hostContent
	read int64
}

func (f *hostFile) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if f.read += int64(n); f.read >= f.want.size || errors.Is(err, io.EOF) {
		if cerr := f.check(); cerr != nil {
			return n, cerr
		}
	}
	return n, err
}

func (f *hostFile) Close() error { return f.f.Close() }

func (f *hostFile) check() error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.f.Fd()), &st); err != nil {
		return &fs.PathError{Op: "fstat", Path: f.want.path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || (devIno{st.Dev, st.Ino}) != f.want.id || st.Size != f.want.size ||
		!time.Unix(st.Mtim.Unix()).Equal(f.want.mtime) {
		return fmt.Errorf("read %s: %w; stop what changes the directory and try again", f.want.path, image.ErrChanged)
	}
	return nil
}
