package upper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Difference is the result of Compare.
type Difference struct {
	Changes []*agentpb.DiskChange // in the order of a walk
	More    int                   // how many further changes there are
	// Until is the last path that both views cover; "" means that both are complete.
	Until string
	// Partial says what is not known; "" means nothing.
	Partial string
}

// Compare returns the differences between two views, of paths behind after, at most limit of them. A file has
// changed if its inode, size or time of change has. A file of the image has also changed if it was opened for
// writing without a write, since the overlay copied it then. A directory has changed if its owner or mode has.
func (t *Tree) Compare(ctx context.Context, before, now *View, after string, limit int) (Difference, error) {
	c := &comparison{ctx: ctx, t: t, before: before, now: now, after: after, seen: map[string]bool{}, image: map[string]*node{}, buf: make([]byte, nameBuf)}
	for _, v := range []*View{before, now} {
		if !v.done && (c.until == "" || agentpb.ComparePaths(v.last, c.until) < 0) {
			c.until = v.last
		}
		if v.part != "" {
			c.part = v.part
		}
	}
	if err := c.candidates(); err != nil {
		return Difference{}, fmt.Errorf("compare the disk: %w", err)
	}
	d := Difference{Until: c.until}
	for _, p := range c.paths {
		ch, err := c.one(p)
		if err != nil {
			return Difference{}, fmt.Errorf("compare the disk: %w", err)
		}
		switch {
		case ch == nil:
		case len(d.Changes) < limit:
			d.Changes = append(d.Changes, ch)
		default:
			d.More++
		}
	}
	d.Partial = c.part
	return d, nil
}

// maxCandidates bounds the paths of one comparison. Beyond it, Compare reads no further directory of the image.
const maxCandidates = 1 << 19

type comparison struct {
	ctx         context.Context
	t           *Tree
	before, now *View
	after       string
	until       string
	part        string

	paths []string
	seen  map[string]bool
	image map[string]*node // the image's entry at a path; nil: none
	buf   []byte
}

// candidates collects all paths that may differ, in order: those of both views, and the image's entries that a
// directory hides.
func (c *comparison) candidates() error {
	for _, v := range []*View{c.before, c.now} {
		for p := range v.nodes {
			c.candidate(p)
		}
	}
	for _, v := range []*View{c.before, c.now} {
		other := c.now
		if v == c.now {
			other = c.before
		}
		for p, n := range v.nodes {
			if o, ok := other.nodes[p]; !n.opaque || ok && o.opaque {
				continue
			}
			if err := c.children(p); err != nil {
				return err
			}
		}
	}
	slices.SortFunc(c.paths, agentpb.ComparePaths)
	return nil
}

func (c *comparison) candidate(p string) {
	if c.seen[p] || agentpb.ComparePaths(p, c.after) <= 0 || c.until != "" && agentpb.ComparePaths(p, c.until) > 0 {
		return
	}
	c.seen[p] = true
	c.paths = append(c.paths, p)
}

// children adds the entries of a directory of the image.
func (c *comparison) children(p string) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	low, err := c.lower(p)
	if err != nil || low == nil || !low.dir() {
		return err
	}
	fd, err := unix.Openat(c.t.lower, p, dirFlags, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: "the image's /" + p, Err: err}
	}
	defer unix.Close(fd)
	names, all, err := readNames(fd, c.buf)
	if err != nil {
		return &fs.PathError{Op: "readdir", Path: "the image's /" + p, Err: err}
	}
	if !all {
		c.part = fmt.Sprintf("a directory of the image has more than %d names", maxNames)
	}
	for _, name := range names {
		if len(c.paths) >= maxCandidates {
			c.part = fmt.Sprintf("directories that were made anew hide more than %d names", maxCandidates)
			break
		}
		c.candidate(join(p, name))
	}
	return nil
}

// lower returns the image's entry at a path, without following links; nil means none.
func (c *comparison) lower(p string) (*node, error) {
	if n, ok := c.image[p]; ok {
		return n, nil
	}
	if up := parent(p); up != "" {
		// Otherwise Fstatat would follow a link in the place of a directory.
		n, err := c.lower(up)
		if err != nil {
			return nil, err
		}
		if n == nil || !n.dir() {
			c.image[p] = nil
			return nil, nil
		}
	}
	var st unix.Stat_t
	err := unix.Fstatat(c.t.lower, p, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		c.image[p] = nil
		return nil, nil
	}
	if err != nil {
		return nil, &fs.PathError{Op: "lstat", Path: "the image's /" + p, Err: err}
	}
	n := &node{mode: st.Mode, uid: st.Uid, gid: st.Gid, rdev: st.Rdev, size: st.Size, ino: st.Ino}
	c.image[p] = n
	return n, nil
}

// at returns the entry at a path in a view; nil means none. below reports that it is the image's.
func (c *comparison) at(v *View, p string) (n *node, below bool, err error) {
	if n, ok := v.nodes[p]; ok {
		if n.whiteout() {
			return nil, false, nil
		}
		return &n, false, nil
	}
	for up := parent(p); up != ""; up = parent(up) {
		if n, ok := v.nodes[up]; ok && (!n.dir() || n.opaque || n.redirect != "") {
			return nil, false, nil
		}
	}
	n, err = c.lower(p)
	return n, true, err
}

// one returns the change of a path; nil means none.
func (c *comparison) one(p string) (*agentpb.DiskChange, error) {
	if err := c.ctx.Err(); err != nil {
		return nil, err
	}
	was, wasBelow, err := c.at(c.before, p)
	if err != nil {
		return nil, err
	}
	is, isBelow, err := c.at(c.now, p)
	if err != nil {
		return nil, err
	}
	switch {
	case was == nil && is == nil, wasBelow && isBelow:
		return nil, nil
	case is == nil:
		if up := parent(p); up != "" {
			d, _, err := c.at(c.now, up)
			if err != nil || d == nil || !d.dir() {
				return nil, err // the change of the parent says it
			}
		}
		return was.change(agentpb.ChangeRemoved, p), nil
	case was != nil && was.same(is, wasBelow || isBelow):
		return nil, nil
	}
	ch := is.change(agentpb.ChangeAdded, p)
	if was != nil {
		ch.Op, ch.Before = agentpb.ChangeChanged, was.mode
	}
	if is.redirect != "" {
		// Documentation/filesystems/overlayfs.rst, "Redirecting directories": from the root, or in the same directory.
		from := is.redirect
		if !strings.HasPrefix(from, "/") {
			from = "/" + join(parent(p), from)
		}
		ch.From = []byte(from)
		c.part = "a directory of the image was moved: what it contains is not told by itself"
	}
	return ch, nil
}

// same reports whether a path is unchanged. copied is set if one of the two is the image's.
func (n *node) same(o *node, copied bool) bool {
	if n.mode != o.mode || n.uid != o.uid || n.gid != o.gid {
		return false
	}
	if n.dir() {
		return n.redirect == o.redirect
	}
	return !copied && n.ino == o.ino && n.size == o.size && n.rdev == o.rdev && n.mtime == o.mtime && n.ctime == o.ctime
}

// change returns the change of a path whose entry is, or was, n.
func (n *node) change(op uint32, p string) *agentpb.DiskChange {
	ch := &agentpb.DiskChange{Op: op, Path: []byte("/" + p), Mode: n.mode, Uid: n.uid, Gid: n.gid}
	if n.mode&unix.S_IFMT == unix.S_IFREG || n.mode&unix.S_IFMT == unix.S_IFLNK {
		ch.Size = n.size
	}
	return ch
}
