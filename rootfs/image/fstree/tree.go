package fstree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// Limits of a source. They bound what a damaged or hostile tar stream, or a directory tree, can make a build allocate.
const (
	MaxInodes    = 8 << 20 // number of inodes
	MaxPathBytes = 4096    // PATH_MAX of Linux
	MaxNameBytes = 255     // EROFS_NAME_LEN
	maxXattrs    = 256     // of one inode
	// EROFS records the size of an inode's inline extended attributes in 4-byte units in 16 bits; value lengths
	// have 16 bits.
	maxXattrBytes = 64 << 10
	maxSymlink    = 4095 // PATH_MAX less the terminating zero
)

// Errors of trees.
var (
	// ErrTooLarge: the source has more files, or larger ones, than a tree may have.
	ErrTooLarge = errors.New("the image source exceeds a limit")
	// ErrChanged: a content has changed since the tree was made.
	ErrChanged = errors.New("the source changed while it was read")
)

// Content opens the bytes of one regular file.
type Content interface {
	// Open is called once for each image that is written.
	Open() (io.ReadCloser, error)
}

// BytesContent is a Content held in memory, for small files that a build makes itself.
type BytesContent string

// Open implements Content.
func (b BytesContent) Open() (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(string(b))), nil
}

// Inode is a file of a tree. Several names may refer to one inode: they are hard links.
type Inode struct {
	Mode     fs.FileMode // type, permission, setuid, setgid, sticky
	UID, GID uint32
	Mtime    time.Time
	Size     int64   // of a regular file, in bytes
	Data     Content // of a regular file with size > 0
	Target   string  // of a symlink
	Rdev     uint32  // of a device: Linux' 32-bit encoding (new_encode_dev), as EROFS stores it
	Xattrs   map[string]string
	Children map[string]*Inode // of a directory
	Nlink    uint32            // set by Tree.Finish
}

// Mode converts st_mode of inode(7), which tar has too, to Go's form.
func Mode(st int64) fs.FileMode { return (&tar.Header{Mode: st}).FileInfo().Mode() }

// IsDir reports whether n is a directory.
func (n *Inode) IsDir() bool { return n.Mode.IsDir() }

// Tree is a root filesystem under construction. It is not safe for concurrent use.
type Tree struct {
	Root    *Inode
	Inodes  int
	Bytes   int64 // sum of the sizes of regular files
	Skipped Skipped
	// Config has the image's settings for commands, if any, as canonical JSON. It is part of the image's id.
	Config []byte
}

// Skipped counts what a source has and its image does not.
type Skipped struct {
	Sockets int `json:"sockets,omitempty"` // Unix sockets
	Mounts  int `json:"mounts,omitempty"`  // mount points below a directory source, whose content was left out
	Xattrs  int `json:"xattrs,omitempty"`  // extended attributes outside user, trusted, security and POSIX ACLs
	Times   int `json:"times,omitempty"`   // mtimes of archives before 1970 or after 9999, replaced by the nearest
}

// New returns a tree with only a root.
func New() *Tree {
	return &Tree{Root: &Inode{Mode: fs.ModeDir | 0o755, Mtime: time.Unix(0, 0), Children: map[string]*Inode{}}, Inodes: 1}
}

// SplitPath returns the components of a slash-separated path, without "." and empty ones. It refuses "..",
// over-long paths and names, and NUL bytes.
func SplitPath(p string) ([]string, error) {
	if len(p) > MaxPathBytes {
		return nil, fmt.Errorf("path of %d bytes (%.40q...) is longer than %d", len(p), p, MaxPathBytes)
	}
	if strings.IndexByte(p, 0) >= 0 {
		return nil, fmt.Errorf("path %q has a zero byte", p)
	}
	parts := strings.Split(p, "/")
	parts = slices.DeleteFunc(parts, func(s string) bool { return s == "" || s == "." })
	for _, s := range parts {
		if s == ".." {
			return nil, fmt.Errorf("path %q leaves the root by \"..\"", p)
		}
		if len(s) > MaxNameBytes {
			return nil, fmt.Errorf("name of %d bytes in %.80q is longer than %d", len(s), p, MaxNameBytes)
		}
	}
	return parts, nil
}

// Lookup returns the inode at a path, or nil. It does not follow symlinks.
func (t *Tree) Lookup(p string) *Inode {
	parts, err := SplitPath(p)
	if err != nil {
		return nil
	}
	n := t.Root
	for _, s := range parts {
		if n = n.Children[s]; n == nil {
			return nil
		}
	}
	return n
}

// Add puts an inode at a path. It makes missing parents, with mode 0755 and owner root. It replaces what is at the
// path, but a directory put on a directory keeps its children. A parent that is not a directory is an error.
func (t *Tree) Add(p string, n *Inode) error {
	parts, err := SplitPath(p)
	if err != nil {
		return err
	}
	if err := CheckInode(n); err != nil {
		return err
	}
	if n.IsDir() && n.Children == nil {
		n.Children = map[string]*Inode{}
	}
	if len(parts) == 0 {
		if !n.IsDir() {
			return fmt.Errorf("the root is a %v, not a directory", n.Mode.Type())
		}
		n.Children = t.Root.Children
		t.Root = n
		return nil
	}
	dir := t.Root
	for i, s := range parts[:len(parts)-1] {
		next := dir.Children[s]
		if next == nil {
			if err := t.Count(1); err != nil {
				return err
			}
			next = &Inode{Mode: fs.ModeDir | 0o755, Mtime: dir.Mtime, Children: map[string]*Inode{}}
			dir.Children[s] = next
		}
		if !next.IsDir() {
			return fmt.Errorf("%q lies below %q, which is not a directory", p, strings.Join(parts[:i+1], "/"))
		}
		dir = next
	}
	name := parts[len(parts)-1]
	if old := dir.Children[name]; old != nil && old.IsDir() && n.IsDir() {
		n.Children = old.Children
	}
	if err := t.Count(1); err != nil {
		return err
	}
	dir.Children[name] = n
	return nil
}

// ReadText returns the content of a regular file of the tree, or "" if there is none. A file of more than most
// bytes is ErrTooLarge.
func (t *Tree) ReadText(p string, most int64) (string, error) {
	n := t.Lookup(p)
	if n == nil || !n.Mode.IsRegular() || n.Size == 0 {
		return "", nil
	}
	if n.Size > most {
		return "", fmt.Errorf("%w: /%s has %d bytes", ErrTooLarge, p, n.Size)
	}
	r, err := n.Data.Open()
	if err != nil {
		return "", err
	}
	defer func() { _ = r.Close() }() // only read
	b := make([]byte, n.Size)
	if _, err := io.ReadFull(r, b); err != nil {
		return "", fmt.Errorf("read /%s: %w", p, err)
	}
	return string(b), nil
}

// SetFile puts a regular file with the given text, owner root and mode 0644 at a path.
func (t *Tree) SetFile(p, text string) error {
	n := &Inode{Mode: 0o644, Mtime: t.Root.Mtime, Size: int64(len(text))}
	if text != "" {
		n.Data = BytesContent(text)
	}
	if err := t.Add(p, n); err != nil {
		return fmt.Errorf("add /%s: %w", p, err)
	}
	return nil
}

// Count adds to the number of inodes. More than MaxInodes is ErrTooLarge.
func (t *Tree) Count(n int) error {
	if t.Inodes += n; t.Inodes > MaxInodes {
		return fmt.Errorf("%w: it has more than %d files", ErrTooLarge, MaxInodes)
	}
	return nil
}

// CheckInode returns an error if EROFS cannot hold an inode.
func CheckInode(n *Inode) error {
	if len(n.Target) > maxSymlink {
		return fmt.Errorf("symlink target of %d bytes is longer than %d", len(n.Target), maxSymlink)
	}
	if n.Mode.Type() == fs.ModeSymlink && n.Target == "" {
		return fmt.Errorf("symlink has an empty target")
	}
	if n.Size < 0 {
		return fmt.Errorf("size %d is negative", n.Size)
	}
	if len(n.Xattrs) > maxXattrs {
		return fmt.Errorf("%d extended attributes, at most %d are possible", len(n.Xattrs), maxXattrs)
	}
	total := 0
	for k, v := range n.Xattrs {
		total += len(k) + len(v) + 8
		if len(k) > MaxNameBytes {
			return fmt.Errorf("extended attribute name of %d bytes is longer than %d", len(k), MaxNameBytes)
		}
	}
	if total >= maxXattrBytes {
		return fmt.Errorf("%d bytes of extended attributes, EROFS takes less than %d", total, maxXattrBytes)
	}
	return nil
}

// Remove removes a path and everything below it from the tree. It reports whether the path existed.
func (t *Tree) Remove(p string) bool {
	dir, name := path.Split(path.Clean("/" + p))
	d := t.Lookup(dir)
	if d == nil || d.Children[name] == nil {
		return false
	}
	delete(d.Children, name)
	return true
}

// RemoveIn removes those entries of a directory for which drop returns true. A missing directory is not an error.
func (t *Tree) RemoveIn(dir string, drop func(name string, n *Inode) bool) {
	if d := t.Lookup(dir); d != nil {
		maps.DeleteFunc(d.Children, drop)
	}
}

// Walk calls f for each name of the tree, parents first, siblings in byte order. Paths have no leading slash; the
// root's is ".".
func (t *Tree) Walk(f func(p string, n *Inode) error) error { return walkFrom(".", t.Root, f) }

func walkFrom(p string, n *Inode, f func(string, *Inode) error) error {
	if err := f(p, n); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(n.Children)) {
		if err := walkFrom(path.Join(p, name), n.Children[name], f); err != nil {
			return err
		}
	}
	return nil
}

// HardLink means that Path is a further name of the inode first met at Primary.
type HardLink struct{ Path, Primary string }

// Finish computes link counts, the numbers of inodes and bytes, and the hard links. Call it after the last change
// of the tree.
func (t *Tree) Finish() ([]HardLink, error) {
	// Keep the paths only of inodes with several names: all paths could take gigabytes.
	if err := t.Walk(func(_ string, n *Inode) error { n.Nlink = 0; return nil }); err != nil {
		return nil, err
	}
	if err := t.Walk(func(_ string, n *Inode) error { n.Nlink++; return nil }); err != nil {
		return nil, err
	}
	first := map[*Inode]string{}
	var links []HardLink
	t.Inodes, t.Bytes = 0, 0
	err := t.Walk(func(p string, n *Inode) error {
		if prev, ok := first[n]; ok {
			if n.IsDir() {
				return fmt.Errorf("directory %q has a second name %q", prev, p)
			}
			links = append(links, HardLink{Path: p, Primary: prev})
			return nil
		}
		if n.Nlink > 1 {
			first[n] = p
		}
		t.Inodes++
		t.Bytes += n.Size
		if n.IsDir() {
			n.Nlink = 2
			for _, c := range n.Children {
				if c.IsDir() {
					n.Nlink++
				}
			}
		}
		return nil
	})
	return links, err
}

// EncodeDev returns Linux' 32-bit device number (new_encode_dev in include/linux/kdev_t.h), which EROFS stores.
func EncodeDev(major, minor uint32) (uint32, error) {
	if major >= 1<<12 || minor >= 1<<20 {
		return 0, fmt.Errorf("device number %d:%d is out of range (12 bits : 20 bits)", major, minor)
	}
	return minor&0xff | major<<8 | (minor&^0xff)<<12, nil
}
