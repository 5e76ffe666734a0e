package main

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// Bounds of a copy out of a VM: bytes, entries, and links and directories that are remembered.
const (
	maxCopyBytes   = 64 << 30
	maxCopyEntries = 1 << 20
	maxCopyName    = 4096
	maxCopyDepth   = 255
	maxSkipped     = 100
)

// copyDone says what a copy has done, as guest.CopyResult.
type copyDone struct {
	Entries, Bytes, Kept int64
	At                   string
	Skipped              []string
	SkippedCount         int64
}

func (c *copyDone) skip(name string) {
	if c.SkippedCount++; len(c.Skipped) < maxSkipped {
		c.Skipped = append(c.Skipped, printable(name))
	}
}

func (r *farHost) cp(ctx context.Context, src, dst vmPath, o copyOptions) (any, error) {
	moved, done := r.a.copying(o.total)
	if moved == nil {
		moved = func(int64) {}
	}
	res := &copyDone{}
	var err error
	if src.vm == "" {
		err = copyIn(ctx, r.Sandbox(dst.vm).Files(), src.path, dst.path, res, moved)
	} else {
		err = copyOut(ctx, r.Sandbox(src.vm).Files(), src.path, dst.path, res, moved)
	}
	done(err)
	return res, err
}

// counting counts what passes.
type counting struct {
	io.Writer
	n     int64
	moved func(int64)
}

func (c *counting) Write(p []byte) (int, error) {
	n, err := c.Writer.Write(p)
	c.n += int64(n)
	c.moved(c.n)
	return n, err
}

// copyIn copies a file or directory into a VM: into dst if that is a directory, as cp(1).
func copyIn(ctx context.Context, files client.Files, src, dst string, res *copyDone, moved func(int64)) error {
	src, err := filepath.Abs(src)
	if err != nil {
		return err
	}
	base := filepath.Base(src)
	if src, err = filepath.EvalSymlinks(src); err != nil {
		return fmt.Errorf("copying: %w", err)
	}
	dir, name := dst, base
	fi, err := files.Stat(ctx, dst)
	switch {
	case err == nil && fi.Kind == "dir":
	case err == nil || errors.Is(err, fs.ErrNotExist) || isMissingFile(err):
		dir, name = path.Split(path.Clean(dst))
		if strings.HasSuffix(dst, "/") && err == nil || name == "" {
			return fmt.Errorf("copying to %s: not a directory", dst)
		}
		if _, err := files.Stat(ctx, dir); err != nil { // a server would make it
			return err
		}
	default:
		return err
	}
	res.At = path.Join(dir, name)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := packTree(ctx, &counting{Writer: w, moved: moved}, src, name, res)
		_ = w.CloseWithError(err)
		packed <- err
	}()
	_, err = files.Upload(ctx, dir, r)
	_ = r.CloseWithError(errors.New("the copy has ended"))
	if perr := <-packed; perr != nil && err != nil {
		return errors.Join(perr, err)
	}
	return err
}

// packTree writes a file or directory as a tar stream whose names begin with name.
func packTree(ctx context.Context, w io.Writer, src, name string, res *copyDone) error {
	t := tar.NewWriter(w)
	err := filepath.WalkDir(src, func(at string, d fs.DirEntry, err error) error {
		if err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, at)
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		as, link := path.Join(name, filepath.ToSlash(rel)), ""
		switch fi.Mode().Type() {
		case 0, fs.ModeDir:
		case fs.ModeSymlink:
			if link, err = os.Readlink(at); err != nil {
				return err
			}
			link = filepath.ToSlash(link)
		default:
			res.skip(as)
			return nil
		}
		h, err := tar.FileInfoHeader(fi, link)
		if err != nil {
			return err
		}
		if h.Name = as; fi.IsDir() {
			h.Name += "/"
		}
		if runtime.GOOS == "windows" && fi.Mode().IsRegular() {
			h.Mode = 0o644 // there are no others
		}
		h.Uid, h.Gid, h.Uname, h.Gname, h.Format = 0, 0, "", "", tar.FormatPAX
		res.Entries++
		if !fi.Mode().IsRegular() {
			return t.WriteHeader(h)
		}
		f, err := os.Open(at)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		n, err := io.Copy(t, io.LimitReader(f, h.Size))
		if res.Bytes += n; err == nil && n < h.Size {
			err = fmt.Errorf("%s became shorter while it was read: %w", at, io.ErrUnexpectedEOF)
		}
		return err
	})
	return errors.Join(err, t.Close())
}

// errUnsafe means that a copy out of a VM has an entry that would lie elsewhere.
var errUnsafe = errors.New("the copy has an unsafe entry")

// copyOut copies a file or directory out of a VM: into dst if that is a directory, as cp(1). The guest and the server
// can make or change only what has the one name of the copy there.
func copyOut(ctx context.Context, files client.Files, src, dst string, res *copyDone, moved func(int64)) error {
	dir, name := filepath.Split(filepath.Clean(dst))
	if dir == "" {
		dir = "."
	}
	if fi, err := os.Stat(dst); err == nil && fi.IsDir() {
		dir = dst
		if name = path.Base(path.Clean(src)); name == "/" || name == "." {
			name = "root"
		}
	}
	if !localName1(name) {
		return fmt.Errorf("copying to %s: %w: %.64q is no name here", dst, errUnsafe, name)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("copying to %s: %w", dst, err)
	}
	defer root.Close()
	if res.At, err = filepath.Abs(filepath.Join(dir, name)); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r, w := io.Pipe()
	got := make(chan error, 1)
	go func() {
		_, err := files.Download(ctx, src, &counting{Writer: w, moved: moved})
		_ = w.CloseWithError(err)
		got <- err
	}()
	err = (&unpacker{root: root, name: name, res: res, links: map[string]string{}}).all(tar.NewReader(r))
	if err == nil {
		_, err = io.Copy(io.Discard, io.LimitReader(r, 1<<20)) // the padding of the end
	}
	_ = r.CloseWithError(errors.New("the copy has ended"))
	if gerr := <-got; gerr != nil && (err == nil || errors.Is(err, gerr)) {
		return gerr
	}
	if err != nil {
		return fmt.Errorf("copying to %s: %w", dst, err)
	}
	return nil
}

// localName1 reports whether a name is one element here, and no device.
func localName1(name string) bool {
	return name != "." && filepath.IsLocal(name) && !strings.ContainsAny(name, `/\0`) && (runtime.GOOS != "windows" || !strings.ContainsAny(name, `\:`))
}

// unpacker makes a tree of a tar stream. It follows no links: it makes them last, and only those that stay in the tree.
type unpacker struct {
	root  *os.Root
	name  string // of the copy, in place of the first element of each name
	res   *copyDone
	links map[string]string
	dirs  []*tar.Header // whose times and modes are set last; Name is here
}

func (u *unpacker) all(t *tar.Reader) error {
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if u.res.Entries++; u.res.Entries > maxCopyEntries {
			return fmt.Errorf("it has more than %d entries", maxCopyEntries)
		}
		name, err := u.place(h.Name)
		if err == nil {
			err = u.entry(t, h, name)
		}
		if err != nil {
			return fmt.Errorf("%.200q: %w", h.Name, err)
		}
	}
	for name, to := range u.links {
		if err := u.link(name, to); err != nil {
			return fmt.Errorf("%.200q: %w", name, err)
		}
	}
	for i := len(u.dirs) - 1; i >= 0; i-- {
		h := u.dirs[i]
		if err := errors.Join(u.root.Chmod(h.Name, h.FileInfo().Mode().Perm()), u.root.Chtimes(h.Name, h.ModTime, h.ModTime)); err != nil {
			return err
		}
	}
	return nil
}

// place returns where an entry goes, with the separators of this system.
func (u *unpacker) place(name string) (string, error) {
	clean := path.Clean(strings.TrimSuffix(name, "/"))
	if name == "" || len(name) > maxCopyName || path.IsAbs(clean) || strings.Count(clean, "/") >= maxCopyDepth {
		return "", errUnsafe
	}
	parts := strings.Split(clean, "/")
	for _, p := range parts {
		if p == ".." || p != "." && !localName1(p) {
			return "", errUnsafe
		}
	}
	parts[0] = u.name
	return filepath.Join(parts...), nil
}

func (u *unpacker) entry(t *tar.Reader, h *tar.Header, name string) error {
	if err := u.parents(name); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := u.mkdir(name); err != nil {
			return err
		}
		u.dirs = append(u.dirs, &tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: h.Mode, ModTime: h.ModTime})
		return nil
	case tar.TypeReg:
		return u.file(t, h, name)
	case tar.TypeSymlink:
		u.links[name] = h.Linkname
		return nil
	}
	u.res.Entries--
	u.res.skip(h.Name)
	return nil
}

// parents makes missing directories above a name, and refuses one that leads through a link.
func (u *unpacker) parents(name string) error {
	dir := filepath.Dir(name)
	if dir == "." {
		return nil
	}
	if err := u.parents(dir); err != nil {
		return err
	}
	return u.mkdir(dir)
}

func (u *unpacker) mkdir(name string) error {
	if _, is := u.links[name]; is {
		return fmt.Errorf("%w: it leads through a link", errUnsafe)
	}
	fi, err := u.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return u.root.Mkdir(name, 0o700)
	case err != nil:
		return err
	case !fi.IsDir():
		return fmt.Errorf("%w: %.200q is no directory", errUnsafe, name)
	}
	return nil
}

// file writes a file. It has its name only when it is whole.
func (u *unpacker) file(t *tar.Reader, h *tar.Header, name string) (err error) {
	delete(u.links, name)
	if fi, err := u.root.Lstat(name); err == nil && fi.IsDir() {
		return fmt.Errorf("a directory of that name exists: %w", fs.ErrExist)
	}
	if h.Size > maxCopyBytes-u.res.Bytes {
		return fmt.Errorf("the copy has more than %d GiB", maxCopyBytes>>30)
	}
	temp := filepath.Join(filepath.Dir(name), ".drowse-"+rand.Text()[:16])
	f, err := u.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, t)
	u.res.Bytes += n
	if err == nil {
		err = f.Chmod(h.FileInfo().Mode().Perm())
		if runtime.GOOS == "windows" {
			err = nil
		}
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = u.root.Chtimes(temp, h.ModTime, h.ModTime)
	}
	if err == nil {
		err = u.root.Rename(temp, name)
	}
	if err != nil {
		return errors.Join(err, u.root.Remove(temp))
	}
	return nil
}

// link makes a symbolic link, unless it leads out of the tree.
func (u *unpacker) link(name, to string) error {
	at := path.Join(path.Dir(filepath.ToSlash(name)), to)
	if to == "" || path.IsAbs(to) || at != u.name && !strings.HasPrefix(at, u.name+"/") || len(to) > maxCopyName {
		u.res.Entries--
		u.res.skip(name)
		return nil
	}
	if fi, err := u.root.Lstat(name); err == nil {
		if fi.IsDir() {
			return fmt.Errorf("a directory of that name exists: %w", fs.ErrExist)
		}
		if err := u.root.Remove(name); err != nil {
			return err
		}
	}
	err := u.root.Symlink(filepath.FromSlash(to), name)
	if err != nil && runtime.GOOS == "windows" { // only some users may make links there
		u.res.Entries--
		u.res.skip(name)
		return nil
	}
	return err
}

// isMissingFile reports whether a server says that a VM has no such file.
func isMissingFile(err error) bool {
	var e *records.Error
	return errors.As(err, &e) && e.Code == "guest-not-found"
}
