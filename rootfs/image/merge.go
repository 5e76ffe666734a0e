package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/image/fstree"
)

// merger puts layers on a tree, the lowest first. It follows the OCI image specification ("Layer Filesystem Changeset",
// "Applying Changesets"), and where that says nothing does what container runtimes do:
//
//   - Whiteouts hide what layers below have, never what their own layer has, wherever in it they stand.
//   - An entry replaces what is at its path, except that a directory put on a directory keeps what is in it.
//   - A directory that an entry needs and nobody named is made: mode 0755, owner root, the time of its parent.
//   - Symlinks on the way to an entry, but not at its end, are followed within the tree: ".." stops at its root, an absolute
//     target begins there. So no layer reaches anything outside, whatever links an earlier one has left.
//   - A hard link refers to what earlier entries, or layers below, have put at its target.
type merger struct {
	t        *fstree.Tree
	maxFiles int64
	files    int64 // put so far, those replaced again included
	paths    int64 // bytes of their paths
	followed int   // components of symlinks so far
}

func newMerger(maxFiles int) *merger { return &merger{t: fstree.New(), maxFiles: int64(maxFiles)} }

// count takes a file into account that is to be put at a path of so many bytes.
func (m *merger) count(pathBytes int) error {
	if m.files++; m.files > m.maxFiles {
		return tooManyFiles(m.maxFiles)
	}
	if most := max(pathPerFile*m.maxFiles, leastMeta); m.paths+int64(pathBytes) > most {
		return fmt.Errorf("%w: the paths of its files have more than %d bytes; raise MaxFiles (--max-files) to take it", ErrTooLarge, most)
	}
	m.paths += int64(pathBytes)
	return m.t.Count(1)
}

// place is a directory of the tree and where it is.
type place struct {
	dir   *fstree.Inode
	depth int // directories above it
	bytes int // of its path
}

var errNotThere = errors.New("no such directory")

// find walks from the root along parts to a directory. With make, directories that are missing are made. With replaced
// (of whiteouts; may be nil), a symlink that stands at one of these paths is no way to anything: the layer replaces it.
func (m *merger) find(parts []string, create bool, replaced map[string]struct{}) (place, error) {
	stack := append(make([]place, 0, len(parts)+1), place{dir: m.t.Root})
	todo, hops := parts, 0
	own := len(parts) // of todo, this many at the end are of parts; the others of link targets
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
		next := cur.dir.Children[name]
		if next == nil {
			if !create {
				return place{}, errNotThere
			}
			if len(name) > fstree.MaxNameBytes {
				return place{}, fmt.Errorf("a symlink leads to a name of %d bytes", len(name))
			}
			if err := m.count(cur.bytes + len(name) + 1); err != nil {
				return place{}, err
			}
			next = &fstree.Inode{Mode: fs.ModeDir | 0o755, Mtime: cur.dir.Mtime, Children: map[string]*fstree.Inode{}}
			cur.dir.Children[name] = next
		}
		switch {
		case next.IsDir():
			p := place{dir: next, depth: cur.depth + 1, bytes: cur.bytes + len(name) + 1}
			if err := p.check(); err != nil {
				return place{}, err
			}
			stack = append(stack, p)
		case next.Mode.Type() == fs.ModeSymlink:
			if replaced != nil && len(todo) == own {
				if _, ok := replaced[strings.Join(parts[:len(parts)-own], "/")]; ok {
					return place{}, errNotThere
				}
			}
			if hops++; hops > maxLinkHops {
				return place{}, fmt.Errorf("more than %d symlinks lead to it", maxLinkHops)
			}
			target := strings.Split(next.Target, "/")
			if m.followed += len(target); m.followed > maxFollowed {
				return place{}, fmt.Errorf("%w: the symlinks on the ways of its paths have more than %d components", ErrTooLarge, maxFollowed)
			}
			if strings.HasPrefix(next.Target, "/") {
				stack = stack[:1]
			}
			todo = append(target, todo...)
		default:
			if !create {
				return place{}, errNotThere
			}
			return place{}, fmt.Errorf("it lies below %.200q, which is not a directory", name)
		}
	}
	return stack[len(stack)-1], nil
}

// check holds the bounds of a path: links could lead deeper at every entry.
func (p place) check() error {
	if p.depth > maxDepth {
		return fmt.Errorf("more than %d directories above each other", maxDepth)
	}
	if p.bytes > fstree.MaxPathBytes {
		return fmt.Errorf("its path has more than %d bytes", fstree.MaxPathBytes)
	}
	return nil
}

// split is splitPath for what has been through it.
func split(p string) []string {
	if p == "" {
		return nil
	}
	return strings.Split(p, "/")
}

// apply puts a layer on the tree. Errors are ErrBadArchive or ErrTooLarge, or the context's; the tree is of no use
// then.
func (m *merger) apply(ctx context.Context, l *layer) error {
	m.t.Skipped.Xattrs += l.skipped.Xattrs
	m.t.Skipped.Times += l.skipped.Times
	var named map[string]struct{}
	if len(l.whiteouts) > 0 {
		named = l.named()
	}
	for _, w := range l.whiteouts {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		p, err := m.find(split(w.dir), false, named)
		switch {
		case errors.Is(err, ErrTooLarge):
			return err
		case err != nil:
			// There is nothing to hide; a loop of links leads to nothing as well.
		case w.name == "":
			clear(p.dir.Children)
		default:
			delete(p.dir.Children, w.name)
		}
	}
	for _, e := range l.entries {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := m.put(e); err != nil {
			if errors.Is(err, ErrTooLarge) {
				return err
			}
			return fmt.Errorf("%w: entry %.200q: %w", ErrBadArchive, e.path, err)
		}
	}
	return nil
}

func (m *merger) put(e layerEntry) error {
	if e.path == "" {
		e.n.Children = m.t.Root.Children
		m.t.Root = e.n
		return nil
	}
	parts := split(e.path)
	name := parts[len(parts)-1]
	p, err := m.find(parts[:len(parts)-1], true, nil)
	if err != nil {
		return err
	}
	at := place{depth: p.depth + 1, bytes: p.bytes + len(name) + 1}
	if err := at.check(); err != nil {
		return err
	}
	n := e.n
	if e.link != "" {
		if n, err = m.linkTarget(e.link); err != nil {
			return err
		}
	}
	if old := p.dir.Children[name]; old != nil && old.IsDir() && n.IsDir() {
		n.Children = old.Children
	}
	if err := m.count(at.bytes); err != nil {
		return err
	}
	p.dir.Children[name] = n
	return nil
}

// linkTarget finds the inode that a hard link refers to.
func (m *merger) linkTarget(link string) (*fstree.Inode, error) {
	parts := split(link)
	p, err := m.find(parts[:len(parts)-1], false, nil)
	if errors.Is(err, ErrTooLarge) {
		return nil, err
	}
	var to *fstree.Inode
	if err == nil {
		to = p.dir.Children[parts[len(parts)-1]]
	}
	switch {
	case to == nil:
		return nil, fmt.Errorf("hard link to %.200q, which no earlier entry or layer has made", link)
	case to.IsDir():
		return nil, fmt.Errorf("hard link to %.200q, which is a directory", link)
	}
	return to, nil
}

// ensureDir makes a directory, and those above it, if there is nothing at its path. It says nothing of other files
// there.
func (m *merger) ensureDir(p string) error {
	parts, err := fstree.SplitPath(p)
	if err != nil {
		return err
	}
	_, err = m.find(slices.Clip(parts), true, nil)
	return err
}

// readTree reads the tar stream of a whole root filesystem into a tree, whose contents are in the spool. Names with the
// prefix .wh. are names like others there.
func readTree(ctx context.Context, r io.Reader, spool *os.File, b *budget) (*fstree.Tree, error) {
	l, err := readLayer(ctx, r, spool, b, false)
	if err != nil {
		return nil, err
	}
	if len(l.entries) == 0 {
		return nil, fmt.Errorf("%w: it has no entries: %w", ErrBadArchive, io.ErrUnexpectedEOF)
	}
	m := newMerger(int(b.maxFiles))
	if err := m.apply(ctx, l); err != nil {
		return nil, err
	}
	return m.t, nil
}
