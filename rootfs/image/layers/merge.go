package layers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// Merger applies layers to a tree, the lowest first. It follows the OCI image specification ("Layer Filesystem
// Changeset", "Applying Changesets"). Where that is silent it does what container runtimes do:
//
//   - Whiteouts hide entries of the layers below, never those of their own layer, at any position in it.
//   - An entry replaces the file at its path, but a directory applied to a directory keeps its contents.
//   - A directory that an entry needs and no layer named is made: mode 0755, owner root, the time of its parent.
//   - Symlinks on the way to an entry, but not at its end, are followed within the tree: ".." stops at its root, an
//     absolute target begins there. So no layer reaches anything outside, whatever links an earlier layer has left.
//   - A hard link refers to what earlier entries, or layers below, have put at its target.
type Merger struct {
	Tree     *fstree.Tree
	maxFiles int64
	files    int64 // added so far, including those replaced again
	paths    int64 // bytes of their paths
	followed int   // components of symlinks so far
}

func NewMerger(maxFiles int) *Merger { return &Merger{Tree: fstree.New(), maxFiles: int64(maxFiles)} }

// count counts a new file, with a path of the given length.
func (m *Merger) count(pathBytes int) error {
	if m.files++; m.files > m.maxFiles {
		return TooManyFiles(m.maxFiles)
	}
	if most := max(pathPerFile*m.maxFiles, leastMeta); m.paths+int64(pathBytes) > most {
		return fmt.Errorf("%w: the paths of its files have more than %d bytes; raise MaxFiles (--max-files) to take it", image.ErrTooLarge, most)
	}
	m.paths += int64(pathBytes)
	return m.Tree.Count(1)
}

// place is a directory of the tree and its position.
type place struct {
	Dir   *fstree.Inode
	depth int // directories above it
	bytes int // of its path
}

var ErrNotThere = errors.New("no such directory")

// Find walks from the root along parts to a directory. With create, it makes missing directories. A symlink at one
// of the paths in replaced (of whiteouts; may be nil) leads nowhere: the layer replaces it.
func (m *Merger) Find(parts []string, create bool, replaced map[string]struct{}) (place, error) {
	stack := append(make([]place, 0, len(parts)+1), place{Dir: m.Tree.Root})
	todo, hops := parts, 0
	own := len(parts) // this many of todo, at the end, are of parts; the others are of link targets
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		if len(todo) < own {
			own = len(todo)
		}
		cur := stack[len(stack)-1]
		switch name {
		case "", ".":
			continue
		case "..":
			stack = stack[:max(len(stack)-1, 1)]
			continue
		}
		next := cur.Dir.Children[name]
		if next == nil {
			if !create {
				return place{}, ErrNotThere
			}
			if len(name) > fstree.MaxNameBytes {
				return place{}, fmt.Errorf("a symlink leads to a name of %d bytes", len(name))
			}
			if err := m.count(cur.bytes + len(name) + 1); err != nil {
				return place{}, err
			}
			next = &fstree.Inode{Mode: fs.ModeDir | 0o755, Mtime: cur.Dir.Mtime, Children: map[string]*fstree.Inode{}}
			cur.Dir.Children[name] = next
		}
		switch {
		case next.IsDir():
			p := place{Dir: next, depth: cur.depth + 1, bytes: cur.bytes + len(name) + 1}
			if err := p.check(); err != nil {
				return place{}, err
			}
			stack = append(stack, p)
		case next.Mode.Type() == fs.ModeSymlink:
			if replaced != nil && len(todo) == own {
				if _, ok := replaced[strings.Join(parts[:len(parts)-own], "/")]; ok {
					return place{}, ErrNotThere
				}
			}
			if hops++; hops > maxLinkHops {
				return place{}, fmt.Errorf("more than %d symlinks lead to it", maxLinkHops)
			}
			target := strings.Split(next.Target, "/")
			if m.followed += len(target); m.followed > maxFollowed {
				return place{}, fmt.Errorf("%w: the symlinks on the ways of its paths have more than %d components", image.ErrTooLarge, maxFollowed)
			}
			if strings.HasPrefix(next.Target, "/") {
				stack = stack[:1]
			}
			todo = append(target, todo...)
		default:
			if !create {
				return place{}, ErrNotThere
			}
			return place{}, fmt.Errorf("it lies below %.200q, which is not a directory", name)
		}
	}
	return stack[len(stack)-1], nil
}

// check enforces the limits of a path: links could lead deeper at every entry.
func (p place) check() error {
	if p.depth > MaxDepth {
		return fmt.Errorf("more than %d directories above each other", MaxDepth)
	}
	if p.bytes > fstree.MaxPathBytes {
		return fmt.Errorf("its path has more than %d bytes", fstree.MaxPathBytes)
	}
	return nil
}

// Split is fstree.SplitPath for a path that has been through it.
func Split(p string) []string {
	if p == "" {
		return nil
	}
	return strings.Split(p, "/")
}

// Apply applies a layer to the tree. Errors are ErrBadArchive or ErrTooLarge, or the context's. After an error the
// tree must not be used.
func (m *Merger) Apply(ctx context.Context, l *Layer) error {
	m.Tree.Skipped.Xattrs += l.skipped.Xattrs
	m.Tree.Skipped.Times += l.skipped.Times
	var named map[string]struct{}
	if len(l.whiteouts) > 0 {
		named = l.named()
	}
	for _, w := range l.whiteouts {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		p, err := m.Find(Split(w.dir), false, named)
		switch {
		case errors.Is(err, image.ErrTooLarge):
			return err
		case err != nil:
			// There is nothing to hide; a loop of links leads nowhere either.
		case w.name == "":
			clear(p.Dir.Children)
		default:
			delete(p.Dir.Children, w.name)
		}
	}
	for _, e := range l.Entries {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := m.put(e); err != nil {
			if errors.Is(err, image.ErrTooLarge) {
				return err
			}
			return fmt.Errorf("%w: entry %.200q: %w", image.ErrBadArchive, e.Path, err)
		}
	}
	return nil
}

func (m *Merger) put(e Entry) error {
	if e.Path == "" {
		e.Inode.Children = m.Tree.Root.Children
		m.Tree.Root = e.Inode
		return nil
	}
	parts := Split(e.Path)
	name := parts[len(parts)-1]
	p, err := m.Find(parts[:len(parts)-1], true, nil)
	if err != nil {
		return err
	}
	at := place{depth: p.depth + 1, bytes: p.bytes + len(name) + 1}
	if err := at.check(); err != nil {
		return err
	}
	n := e.Inode
	if e.Link != "" {
		if n, err = m.linkTarget(e.Link); err != nil {
			return err
		}
	}
	if old := p.Dir.Children[name]; old != nil && old.IsDir() && n.IsDir() {
		n.Children = old.Children
	}
	if err := m.count(at.bytes); err != nil {
		return err
	}
	p.Dir.Children[name] = n
	return nil
}

// linkTarget finds the inode that a hard link refers to.
func (m *Merger) linkTarget(link string) (*fstree.Inode, error) {
	parts := Split(link)
	p, err := m.Find(parts[:len(parts)-1], false, nil)
	if errors.Is(err, image.ErrTooLarge) {
		return nil, err
	}
	var to *fstree.Inode
	if err == nil {
		to = p.Dir.Children[parts[len(parts)-1]]
	}
	switch {
	case to == nil:
		return nil, fmt.Errorf("hard link to %.200q, which no earlier entry or layer has made", link)
	case to.IsDir():
		return nil, fmt.Errorf("hard link to %.200q, which is a directory", link)
	}
	return to, nil
}

// EnsureDir makes a directory and its parents, if nothing is at its path. A file on the way that is neither a
// directory nor a symlink to one is an error.
func (m *Merger) EnsureDir(p string) error {
	parts, err := fstree.SplitPath(p)
	if err != nil {
		return err
	}
	_, err = m.Find(slices.Clip(parts), true, nil)
	return err
}

// ReadTree reads the tar stream of a whole root filesystem into a tree, whose contents are in the spool. Names
// with the prefix .wh. have no special meaning there.
func ReadTree(ctx context.Context, r io.Reader, spool *os.File, b *Budget) (*fstree.Tree, error) {
	l, err := Read(ctx, r, spool, b, false)
	if err != nil {
		return nil, err
	}
	if len(l.Entries) == 0 {
		return nil, fmt.Errorf("%w: it has no entries: %w", image.ErrBadArchive, io.ErrUnexpectedEOF)
	}
	m := NewMerger(int(b.MaxFiles))
	if err := m.Apply(ctx, l); err != nil {
		return nil, err
	}
	return m.Tree, nil
}
