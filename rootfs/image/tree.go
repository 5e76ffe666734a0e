package image

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
)

// Limits of a source. They bound what a damaged or hostile tar stream, or a directory tree, can make this package allocate.
const (
	maxInodes    = 8 << 20 // number of inodes
	maxPathBytes = 4096    // PATH_MAX of Linux
	maxNameBytes = 255     // EROFS_NAME_LEN
	maxXattrs    = 256     // of one inode
	// The record of EROFS counts an inode's inline extended attributes in 4-byte units in 16 bits; value lengths have 16 bits.
	maxXattrBytes = 64 << 10
	maxSymlink    = 4095 // PATH_MAX less the terminating zero
)

// content gives the bytes of one regular file. Open is called once for each image that is written.
type content interface {
	open() (io.ReadCloser, error)
}

// bytesContent is a content held in memory, for small files made by this package.
type bytesContent string

func (b bytesContent) open() (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(string(b))), nil
}

// inode is a file of a tree. Several names may refer to one inode: they are hard links.
type inode struct {
	mode     fs.FileMode // type, permission, setuid, setgid, sticky
	uid, gid uint32
	mtime    time.Time
	size     int64   // of a regular file, in bytes
	data     content // of a regular file with size > 0
	target   string  // of a symlink
	rdev     uint32  // of a device: Linux' 32-bit encoding (new_encode_dev), as EROFS stores it
	xattrs   map[string]string
	children map[string]*inode // of a directory
	nlink    uint32            // set by tree.finish
}

func (n *inode) isDir() bool { return n.mode.IsDir() }

// tree is a root filesystem being put together. It is not safe for concurrent use.
type tree struct {
	root    *inode
	inodes  int
	bytes   int64 // sum of the sizes of regular files
	skipped Skipped
	// config is what the image says about commands, as canonical JSON, if it says anything: a part of the image's id.
	config []byte
}

// Skipped counts what a source holds and its image does not.
type Skipped struct {
	Sockets int `json:"sockets,omitempty"` // Unix sockets
	Mounts  int `json:"mounts,omitempty"`  // mount points below a directory source, whose content was left out
	Xattrs  int `json:"xattrs,omitempty"`  // extended attributes outside user, trusted, security and POSIX ACLs
	Times   int `json:"times,omitempty"`   // modification times of archives before 1970 or after 9999: the nearest of these instead
}

func newTree() *tree {
	return &tree{root: &inode{mode: fs.ModeDir | 0o755, mtime: time.Unix(0, 0), children: map[string]*inode{}}, inodes: 1}
}

// splitPath gives the components of a slash-separated path, "." and empty ones left out. It refuses "..", over-long paths
// and names, and NUL bytes.
func splitPath(p string) ([]string, error) {
	if len(p) > maxPathBytes {
		return nil, fmt.Errorf("path of %d bytes (%.40q...) is longer than %d", len(p), p, maxPathBytes)
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
		if len(s) > maxNameBytes {
			return nil, fmt.Errorf("name of %d bytes in %.80q is longer than %d", len(s), p, maxNameBytes)
		}
	}
	return parts, nil
}

// lookup gives the inode at a path; symlinks are not followed. It returns nil when there is none.
func (t *tree) lookup(p string) *inode {
	parts, err := splitPath(p)
	if err != nil {
		return nil
	}
	n := t.root
	for _, s := range parts {
		if n = n.children[s]; n == nil {
			return nil
		}
	}
	return n
}

// add puts an inode at a path. Missing parents are made, with mode 0755 and owner root. What was at the path before is
// replaced; a directory put on a directory keeps its children. A parent that is not a directory is an error.
func (t *tree) add(p string, n *inode) error {
	parts, err := splitPath(p)
	if err != nil {
		return err
	}
	if err := checkInode(n); err != nil {
		return err
	}
	if n.isDir() && n.children == nil {
		n.children = map[string]*inode{}
	}
	if len(parts) == 0 {
		if !n.isDir() {
			return fmt.Errorf("the root is a %v, not a directory", n.mode.Type())
		}
		n.children = t.root.children
		t.root = n
		return nil
	}
	dir := t.root
	for i, s := range parts[:len(parts)-1] {
		next := dir.children[s]
		if next == nil {
			if err := t.count(1); err != nil {
				return err
			}
			next = &inode{mode: fs.ModeDir | 0o755, mtime: dir.mtime, children: map[string]*inode{}}
			dir.children[s] = next
		}
		if !next.isDir() {
			return fmt.Errorf("%q lies below %q, which is not a directory", p, strings.Join(parts[:i+1], "/"))
		}
		dir = next
	}
	name := parts[len(parts)-1]
	if old := dir.children[name]; old != nil && old.isDir() && n.isDir() {
		n.children = old.children
	}
	if err := t.count(1); err != nil {
		return err
	}
	dir.children[name] = n
	return nil
}

func (t *tree) count(n int) error {
	if t.inodes += n; t.inodes > maxInodes {
		return fmt.Errorf("%w: it has more than %d files", ErrTooLarge, maxInodes)
	}
	return nil
}

func checkInode(n *inode) error {
	if len(n.target) > maxSymlink {
		return fmt.Errorf("symlink target of %d bytes is longer than %d", len(n.target), maxSymlink)
	}
	if n.mode.Type() == fs.ModeSymlink && n.target == "" {
		return fmt.Errorf("symlink has an empty target")
	}
	if n.size < 0 {
		return fmt.Errorf("size %d is negative", n.size)
	}
	if len(n.xattrs) > maxXattrs {
		return fmt.Errorf("%d extended attributes, at most %d are possible", len(n.xattrs), maxXattrs)
	}
	total := 0
	for k, v := range n.xattrs {
		total += len(k) + len(v) + 8
		if len(k) > maxNameBytes {
			return fmt.Errorf("extended attribute name of %d bytes is longer than %d", len(k), maxNameBytes)
		}
	}
	if total >= maxXattrBytes {
		return fmt.Errorf("%d bytes of extended attributes, EROFS takes less than %d", total, maxXattrBytes)
	}
	return nil
}

// remove takes a path out of the tree, with all below it. It says whether there was something.
func (t *tree) remove(p string) bool {
	dir, name := path.Split(path.Clean("/" + p))
	d := t.lookup(dir)
	if d == nil || d.children[name] == nil {
		return false
	}
	delete(d.children, name)
	return true
}

// removeIn takes out those entries of a directory that drop says. Nothing happens when the directory is not there.
func (t *tree) removeIn(dir string, drop func(name string, n *inode) bool) {
	d := t.lookup(dir)
	if d == nil {
		return
	}
	maps.DeleteFunc(d.children, drop)
}

// walk calls f for each name of the tree, parents first, siblings in byte order. Paths have no leading slash; the root's
// is ".".
func (t *tree) walk(f func(p string, n *inode) error) error { return walkFrom(".", t.root, f) }

func walkFrom(p string, n *inode, f func(string, *inode) error) error {
	if err := f(p, n); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		if err := walkFrom(path.Join(p, name), n.children[name], f); err != nil {
			return err
		}
	}
	return nil
}

// hardLink says that the name at path is a further name of the inode that is first met at primary.
type hardLink struct{ path, primary string }

// finish computes link counts, the number of inodes and of bytes, and the hard links, after the last change of the tree.
func (t *tree) finish() ([]hardLink, error) {
	// Paths are kept of those inodes only that have several: of all of them they could take gigabytes.
	if err := t.walk(func(_ string, n *inode) error { n.nlink = 0; return nil }); err != nil {
		return nil, err
	}
	if err := t.walk(func(_ string, n *inode) error { n.nlink++; return nil }); err != nil {
		return nil, err
	}
	first := map[*inode]string{}
	var links []hardLink
	t.inodes, t.bytes = 0, 0
	err := t.walk(func(p string, n *inode) error {
		if prev, ok := first[n]; ok {
			if n.isDir() {
				return fmt.Errorf("directory %q has a second name %q", prev, p)
			}
			links = append(links, hardLink{path: p, primary: prev})
			return nil
		}
		if n.nlink > 1 {
			first[n] = p
		}
		t.inodes++
		t.bytes += n.size
		if n.isDir() {
			n.nlink = 2
			for _, c := range n.children {
				if c.isDir() {
					n.nlink++
				}
			}
		}
		return nil
	})
	return links, err
}

// encodeDev gives Linux' 32-bit form of a device number (new_encode_dev in include/linux/kdev_t.h), which EROFS stores.
func encodeDev(major, minor uint32) (uint32, error) {
	if major >= 1<<12 || minor >= 1<<20 {
		return 0, fmt.Errorf("device number %d:%d is out of range (12 bits : 20 bits)", major, minor)
	}
	return minor&0xff | major<<8 | (minor&^0xff)<<12, nil
}
