package builder

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// Limits of a copy from a context. The limits of a tree and of Options apply as well.
const (
	maxContextDepth = 256 // levels of directories
	maxContextFiles = DefaultMaxFiles
	archivePeek     = 1 << 20 // bytes in which the first entry of an archive must show
)

// CopyIn says which files of a directory of the host to copy into an image.
type CopyIn struct {
	// Context is the directory; symlinks are followed only within it. Nil if there are no Sources.
	Context *os.Root
	// Ignore reports whether a file is excluded, by its path in the context; nil excludes none. Deep is set if
	// files below an ignored directory may be included.
	Ignore func(p string) bool
	Deep   bool
	// Sources are paths in the context, or patterns of path.Match. Of a directory its contents are copied.
	Sources []string
	// Inline are files given directly: names and contents.
	Inline []InlineFile
	// Dest is the destination: absolute and clean. It is a directory if DestDir is set, if a directory is there,
	// or if there are several files.
	Dest    string
	DestDir bool
	// Unpack unpacks archives among the sources, detected by their content, into Dest.
	Unpack bool
	// Owner is USER[:GROUP], by name or number; "" is root. Mode has the permissions; -1 keeps those of the files.
	Owner string
	Mode  int64
}

// InlineFile is a file given as text.
type InlineFile struct{ Name, Text string }

// picked is a file to copy.
type picked struct {
	src    string // in the context; "" for a text
	name   string // below the destination; "" for the destination itself
	base   string // its name if the destination is a directory
	mode   fs.FileMode
	size   int64
	link   string
	mtime  time.Time
	sum    string // SHA-256 of the content, in hex
	text   string
	packed bool // an archive
}

// pick finds the files of a copy and hashes them. dir reports that the destination must be a directory.
func (a *Assembly) pick(ctx context.Context, c *CopyIn) (list []picked, dir bool, err error) {
	p := &picker{ctx: ctx, c: c, lim: a.b.newBudget()}
	for _, s := range c.Sources {
		n := len(p.list)
		matches, err := p.matches(s)
		if err != nil {
			return nil, false, fmt.Errorf("copy %q: %w", s, err)
		}
		for _, m := range matches {
			if err := p.source(m); err != nil {
				return nil, false, fmt.Errorf("copy %q: %w", s, err)
			}
		}
		if len(matches) == 0 || n == len(p.list) && !p.dirs {
			return nil, false, fmt.Errorf("copy %q: %w: the context has no such file, or ignores it (.dockerignore)", s, fs.ErrNotExist)
		}
	}
	for _, f := range c.Inline {
		sum := sha256.Sum256([]byte(f.Text))
		p.list = append(p.list, picked{base: f.Name, mode: 0o644, size: int64(len(f.Text)), text: f.Text, mtime: time.Unix(0, 0), sum: hex.EncodeToString(sum[:])})
	}
	return p.list, c.DestDir || p.dirs || p.tops+len(c.Inline) > 1, nil
}

type picker struct {
	ctx  context.Context
	c    *CopyIn
	lim  *layers.Budget
	list []picked
	dirs bool // one of the sources is a directory, or an archive
	tops int
}

func (p *picker) ignored(name string) bool { return p.c.Ignore != nil && p.c.Ignore(name) }

// matches returns the files of the context that match a pattern, in byte order.
func (p *picker) matches(pattern string) ([]string, error) {
	if !strings.ContainsAny(pattern, `*?[\`) {
		return []string{pattern}, nil
	}
	found, err := fs.Glob(p.c.Context.FS(), pattern)
	if err != nil {
		return nil, fmt.Errorf("%w: the pattern: %w", image.ErrInvalidOption, err)
	}
	if len(found) > maxContextFiles {
		return nil, layers.TooManyFiles(maxContextFiles)
	}
	return slices.DeleteFunc(found, func(name string) bool {
		if !p.c.Deep || !p.ignored(name) {
			return p.ignored(name)
		}
		st, err := p.c.Context.Lstat(name)
		return err == nil && !st.IsDir()
	}), nil
}

// source picks a source of a COPY. It follows a symlink there.
func (p *picker) source(name string) error {
	if name != "." && p.ignored(name) && !p.c.Deep {
		return fmt.Errorf("%w: it is ignored (.dockerignore)", fs.ErrNotExist)
	}
	st, err := p.c.Context.Stat(name)
	if err != nil {
		return err
	}
	if st.IsDir() {
		p.dirs = true
		return p.below(name, "", 0)
	}
	if p.ignored(name) {
		return fmt.Errorf("%w: it is ignored (.dockerignore)", fs.ErrNotExist)
	}
	p.tops++
	return p.file(name, "", st)
}

// below picks the contents of a directory.
func (p *picker) below(dir, as string, depth int) error {
	if depth > maxContextDepth {
		return fmt.Errorf("%w: more than %d directories above each other", image.ErrTooLarge, maxContextDepth)
	}
	entries, err := fs.ReadDir(p.c.Context.FS(), dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := context.Cause(p.ctx); err != nil {
			return err
		}
		name, to := path.Join(dir, e.Name()), path.Join(as, e.Name())
		ignored := p.ignored(name)
		if ignored && !(p.c.Deep && e.IsDir()) {
			continue
		}
		st, err := p.c.Context.Lstat(name)
		if err != nil {
			return vanished("describe", name, err)
		}
		if !st.IsDir() {
			if err := p.file(name, to, st); err != nil {
				return err
			}
			continue
		}
		at := len(p.list)
		p.list = append(p.list, picked{src: name, name: to, mode: st.Mode(), mtime: st.ModTime()})
		if err := p.take(name, 0); err != nil {
			return err
		}
		if err := p.below(name, to, depth+1); err != nil {
			return err
		}
		if ignored && len(p.list) == at+1 {
			p.list = p.list[:at] // the context includes nothing of it
		}
	}
	return nil
}

func (p *picker) take(name string, size int64) error {
	return p.lim.Take(&tar.Header{Name: name}, size)
}

func (p *picker) file(name, to string, st fs.FileInfo) error {
	f := picked{src: name, name: to, base: path.Base(name), mode: st.Mode(), mtime: st.ModTime()}
	switch st.Mode().Type() {
	case fs.ModeSymlink:
		var err error
		if f.link, err = p.c.Context.Readlink(name); err != nil {
			return vanished("read", name, err)
		}
	case 0:
		f.size = st.Size()
		if err := p.take(name, f.size); err != nil {
			return err
		}
		r, err := p.c.Context.Open(name)
		if err != nil {
			return vanished("open", name, err)
		}
		defer func() { _ = r.Close() }() // only read
		h := sha256.New()
		n, err := io.Copy(h, artifact.NewReader(p.ctx, r))
		if err != nil {
			return err
		}
		if n != f.size {
			return fmt.Errorf("%s has %d bytes of %d: %w", name, n, f.size, image.ErrChanged)
		}
		f.sum = hex.EncodeToString(h.Sum(nil))
		if p.c.Unpack && to == "" {
			if f.packed, err = isArchive(r); err != nil {
				return err
			}
			p.dirs = p.dirs || f.packed
		}
	default:
		return fmt.Errorf("%w: %s is a %v, and only files, directories and symlinks can be copied", image.ErrUnsupportedSource, name, st.Mode().Type())
	}
	p.list = append(p.list, f)
	return nil
}

// isArchive reports whether a file is a tar archive, compressed or not.
func isArchive(f *os.File) (bool, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	u, err := layers.Unpack(f, true, archivePeek)
	if err != nil {
		return false, nil // not an archive after all
	}
	defer func() { _ = u.Close() }() // only read
	h, err := tar.NewReader(u).Next()
	return err == nil && h.Name != "", nil
}

// copyKey returns the key of a copy: the state, what goes where, and the content of all files, but no times.
func (a *Assembly) copyKey(c *CopyIn, list []picked, dir bool) (string, error) {
	type file struct {
		Name, Base, Link, Sum string
		Mode                  fs.FileMode
		Packed                bool
	}
	files := make([]file, 0, len(list))
	for _, f := range list {
		files = append(files, file{f.name, f.base, f.link, f.sum, f.mode, f.packed})
	}
	return a.Key(struct {
		Copy        string
		Dir, Unpack bool
		Owner       string
		Mode        int64
		Files       []file
	}{c.Dest, dir, c.Unpack, c.Owner, c.Mode, files})
}

// Copy copies files into the image, and reports whether the result existed. text describes the step for display.
func (a *Assembly) Copy(ctx context.Context, c CopyIn, text string, noCache bool) (cached bool, err error) {
	if clean := path.Clean(c.Dest); !path.IsAbs(c.Dest) || clean != c.Dest {
		return false, fmt.Errorf("%w: the destination %.200q is not absolute and clean", image.ErrInvalidOption, c.Dest)
	}
	if len(c.Sources) > 0 && c.Context == nil {
		return false, fmt.Errorf("%w: there is no context to take files from", image.ErrInvalidOption)
	}
	list, dir, err := a.pick(ctx, &c)
	if err != nil {
		return false, err
	}
	key, err := a.copyKey(&c, list, dir)
	if err != nil {
		return false, err
	}
	if !noCache && a.Use(key) {
		return true, nil
	}
	m, err := a.tree(ctx)
	if err != nil {
		return false, err
	}
	w := &copyWriter{ctx: ctx, a: a, c: &c, m: m}
	if w.uid, w.gid, err = account(m.Tree, c.Owner); err != nil {
		return false, err
	}
	defer func() {
		for _, f := range w.spools {
			_ = f.Close() // the spool is discarded
		}
	}()
	if err := w.collect(list, dir); err != nil {
		return false, err
	}
	return false, a.commit(ctx, key, text, len(a.layers), func(tw *tar.Writer) error { return w.write(tw) })
}

// MakeDir makes a directory and its parents, if necessary. It reports whether the result existed, and whether it
// changed anything.
func (a *Assembly) MakeDir(ctx context.Context, dir, text string, noCache bool) (cached, changed bool, err error) {
	key, err := a.Key(struct{ Dir string }{dir})
	if err != nil {
		return false, false, err
	}
	before := a.layers
	if !noCache && a.Use(key) {
		return true, len(a.layers) != len(before), nil
	}
	m, err := a.tree(ctx)
	if err != nil {
		return false, false, err
	}
	w := &copyWriter{ctx: ctx, a: a, c: &CopyIn{Mode: -1}, m: m}
	if err := w.parents(dir); err != nil {
		return false, false, err
	}
	if len(w.entries) == 0 {
		return false, false, a.Keep(key, text)
	}
	return false, true, a.commit(ctx, key, text, len(a.layers), func(tw *tar.Writer) error { return w.write(tw) })
}

// copyWriter makes a layer of files.
type copyWriter struct {
	ctx      context.Context
	a        *Assembly
	c        *CopyIn
	m        *layers.Merger // the layers below
	uid, gid uint32
	entries  []layers.Entry
	spools   []*os.File
}

// parents adds the missing directories of a path.
func (w *copyWriter) parents(dir string) error {
	parts, err := fstree.SplitPath(dir)
	if err != nil {
		return err
	}
	mtime := w.m.Tree.Root.Mtime
	for i := range parts {
		p, err := w.m.Find(slices.Clone(parts[:i+1]), false, nil)
		switch {
		case err == nil:
			mtime = p.Dir.Mtime
			continue
		case !errors.Is(err, layers.ErrNotThere):
			return fmt.Errorf("/%s: %w", strings.Join(parts[:i+1], "/"), err)
		}
		if what, err := w.at(parts[:i+1]); err != nil {
			return err
		} else if what != nil {
			return fmt.Errorf("%w: /%s is no directory in the image", image.ErrInvalidOption, strings.Join(parts[:i+1], "/"))
		}
		w.entries = append(w.entries, layers.Entry{Path: strings.Join(parts[:i+1], "/"), Inode: &fstree.Inode{Mode: fs.ModeDir | 0o755, UID: w.uid, GID: w.gid, Mtime: mtime}})
	}
	return nil
}

// at returns the image's file at a path. It follows symlinks on the way, but not at the end.
func (w *copyWriter) at(parts []string) (*fstree.Inode, error) {
	if len(parts) == 0 {
		return w.m.Tree.Root, nil
	}
	p, err := w.m.Find(slices.Clone(parts[:len(parts)-1]), false, nil)
	if errors.Is(err, layers.ErrNotThere) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return p.Dir.Children[parts[len(parts)-1]], nil
}

func (w *copyWriter) collect(list []picked, dir bool) error {
	dest, err := fstree.SplitPath(w.c.Dest)
	if err != nil {
		return err
	}
	if !dir {
		if _, err := w.m.Find(slices.Clone(dest), false, nil); err == nil {
			dir = true
		}
	}
	above := dest
	if !dir {
		above = dest[:max(len(dest)-1, 0)]
	}
	if err := w.parents(strings.Join(above, "/")); err != nil {
		return err
	}
	for _, f := range list {
		if err := context.Cause(w.ctx); err != nil {
			return err
		}
		if f.packed {
			if err := w.archive(f, strings.Join(dest, "/")); err != nil {
				return fmt.Errorf("unpack %s: %w", f.src, err)
			}
			continue
		}
		to := w.c.Dest
		switch {
		case f.name != "":
			to = path.Join(to, f.name)
		case dir:
			to = path.Join(to, f.base)
		}
		if err := w.add(f, to); err != nil {
			return err
		}
	}
	return nil
}

func (w *copyWriter) add(f picked, to string) error {
	parts, err := fstree.SplitPath(to)
	if err != nil {
		return err
	}
	there, err := w.at(parts)
	if err != nil {
		return fmt.Errorf("%s: %w", to, err)
	}
	if f.mode.IsDir() {
		if there != nil && !there.IsDir() {
			if _, err := w.m.Find(slices.Clone(parts), false, nil); err != nil {
				return fmt.Errorf("%w: %s is a directory in the context and none in the image", image.ErrInvalidOption, to)
			}
			return nil // a symlink to a directory: the files are copied there
		}
	} else if there != nil && there.IsDir() {
		return fmt.Errorf("%w: %s is a directory in the image and none in the context", image.ErrInvalidOption, to)
	}
	n := &fstree.Inode{Mode: f.mode, UID: w.uid, GID: w.gid, Mtime: f.mtime, Size: f.size, Target: f.link}
	if w.c.Mode >= 0 && f.mode.Type() != fs.ModeSymlink {
		n.Mode = f.mode.Type() | fstree.Mode(w.c.Mode&0o7777)
	}
	switch {
	case f.size == 0:
	case f.src == "":
		n.Data = fstree.BytesContent(f.text)
	default:
		n.Data = contextContent{w.c.Context, f}
	}
	w.entries = append(w.entries, layers.Entry{Path: strings.Join(parts, "/"), Inode: n})
	return nil
}

// archive adds the contents of an archive, with their own owners and permissions.
func (w *copyWriter) archive(f picked, dest string) error {
	if w.c.Owner != "" || w.c.Mode >= 0 {
		return fmt.Errorf("%w: what an archive has keeps its owners and permissions: leave out --chown and --chmod", image.ErrInvalidOption)
	}
	r, err := contextContent{w.c.Context, f}.Open()
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // only read
	u, err := layers.Unpack(artifact.NewReader(w.ctx, r), true, w.a.b.MaxBytes+layers.MaxTarOverhead)
	if err != nil {
		return err
	}
	defer func() { _ = u.Close() }() // only read
	spool, err := layers.NewSpool(w.a.tmp.Dir)
	if err != nil {
		return err
	}
	w.spools = append(w.spools, spool)
	l, err := layers.Read(w.ctx, u, spool, w.a.b.newBudget(), false)
	if err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, u); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, r); err != nil { // to the end, where the hash is checked
		return err
	}
	for _, e := range l.Entries {
		if e.Path == "" {
			continue // the destination itself stays unchanged
		}
		e.Path = path.Join(dest, e.Path)
		if e.Link != "" {
			e.Link = path.Join(dest, e.Link)
		}
		if there, err := w.at(layers.Split(e.Path)); err == nil && there != nil && !there.IsDir() && e.Inode.IsDir() && e.Link == "" {
			if _, err := w.m.Find(layers.Split(e.Path), false, nil); err == nil {
				continue // a symlink to a directory: the files are unpacked there
			}
		}
		w.entries = append(w.entries, e)
	}
	return nil
}

// contextContent is the content of a file of a context. It insists on what was there when it was hashed.
type contextContent struct {
	root *os.Root
	f    picked
}

func (c contextContent) Open() (io.ReadCloser, error) {
	r, err := c.root.Open(c.f.src)
	if err != nil {
		return nil, vanished("open", c.f.src, err)
	}
	return &sameReader{r: r, h: sha256.New(), f: c.f}, nil
}

type sameReader struct {
	r *os.File
	h hash.Hash
	n int64
	f picked
}

func (s *sameReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.h.Write(p[:n])
	if s.n += int64(n); s.n > s.f.size || errors.Is(err, io.EOF) && (s.n != s.f.size || hex.EncodeToString(s.h.Sum(nil)) != s.f.sum) {
		return 0, fmt.Errorf("read %s: %w", s.f.src, image.ErrChanged)
	}
	return n, err
}

// Close implements io.Closer.
func (s *sameReader) Close() error { return s.r.Close() }

// write writes the layer.
func (w *copyWriter) write(tw *tar.Writer) error {
	for _, e := range w.entries {
		if err := context.Cause(w.ctx); err != nil {
			return err
		}
		if layers.IsWhiteout(e.Path) {
			return fmt.Errorf("/%s: %w: the name would be a whiteout in a layer", e.Path, image.ErrUnsupportedSource)
		}
		if err := layers.WriteEntry(w.ctx, tw, e); err != nil {
			return fmt.Errorf("/%s: %w", e.Path, err)
		}
	}
	return nil
}

// account resolves USER[:GROUP] by the passwd(5) and group(5) of the tree. A number needs no entry. Without a group, a
// numeric user gets the group of the same number, and a named user the group of its entry.
func account(t *fstree.Tree, owner string) (uid, gid uint32, err error) {
	if owner == "" {
		return 0, 0, nil
	}
	user, group, hasGroup := strings.Cut(owner, ":")
	ids, err := accountIDs(t, "user", user, "etc/passwd", 2)
	if err == nil && hasGroup {
		var g []uint32
		if g, err = accountIDs(t, "group", group, "etc/group", 1); err == nil {
			ids[1] = g[0]
		}
	}
	if err != nil {
		return 0, 0, fmt.Errorf("owner %.100q: %w", owner, err)
	}
	return ids[0], ids[1], nil
}

// accountIDs returns n numbers, from the third field on, of the line of a name; a numeric name stands for itself.
func accountIDs(t *fstree.Tree, what, name, file string, n int) ([]uint32, error) {
	if id, err := strconv.ParseUint(name, 10, 32); err == nil {
		return slices.Repeat([]uint32{uint32(id)}, n), nil
	}
	text, err := t.ReadText(file, maxStatusBytes)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), ":")
		if f[0] != name || len(f) < 2+n {
			continue
		}
		ids := make([]uint32, n)
		for i := range ids {
			id, perr := strconv.ParseUint(f[2+i], 10, 32)
			ids[i], err = uint32(id), errors.Join(err, perr)
		}
		if err == nil {
			return ids, nil
		}
		break
	}
	return nil, fmt.Errorf("%w: the %s %.100q is not in the image's /%s", image.ErrInvalidOption, what, name, file)
}
