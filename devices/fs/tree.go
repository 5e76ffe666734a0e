package fs

import (
	"math"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// identity tells a file from another one that takes its name later. File systems reuse inode numbers, but not
// times of birth. The device number is left out, because it may change when the host reboots. A share does not
// cross into other file systems.
type identity struct {
	ino   uint64
	birth int64 // nanoseconds; 0 where the file system does not know it
}

// node is a file or directory that the guest knows.
type node struct {
	id       uint64
	parent   *node // nil: it no longer has a name, or it is the root
	name     string
	identity identity
	lookups  uint64 // how often the guest has got it, less what it has forgotten
	children int    // nodes whose parent it is
	handles  map[uint64]*handle
}

// handle is an open file or directory.
type handle struct {
	id    uint64
	node  *node
	flags uint32 // O_ACCMODE
	dir   bool
	fd    int // -1: not opened since the restore
}

const rootID = 1 // FUSE_ROOT_ID

type place struct {
	parent *node
	name   string
}

// tree is what the guest knows of the share.
type tree struct {
	started    bool // FUSE_INIT has been seen
	root       *node
	nodes      map[uint64]*node
	places     map[place]*node
	identities map[identity]*node
	names      int // bytes
	handles    map[uint64]*handle
	nextNode   uint64
	nextHandle uint64
}

// clear forgets everything, and closes open descriptors.
func (t *tree) clear() {
	for _, h := range t.handles {
		h.close()
	}
	root := &node{id: rootID, lookups: 1}
	*t = tree{
		root: root, nodes: map[uint64]*node{rootID: root}, places: map[place]*node{}, identities: map[identity]*node{},
		handles: map[uint64]*handle{}, nextNode: rootID + 1, nextHandle: 1,
	}
}

func (h *handle) close() {
	if h.fd >= 0 {
		_ = unix.Close(h.fd) // the host already has what was written
		h.fd = -1
	}
}

// path returns the path of a node below the root, "." for the root.
func (t *tree) path(n *node) (string, error) {
	if n == t.root {
		return ".", nil
	}
	var parts []string
	for size := 0; n != t.root; n = n.parent {
		if n.parent == nil {
			return "", unix.ESTALE
		}
		if size += len(n.name) + 1; size > MaxPath {
			return "", unix.ENAMETOOLONG
		}
		parts = append(parts, n.name)
	}
	slices.Reverse(parts)
	return strings.Join(parts, "/"), nil
}

// below reports whether n is a, or lies in it. Every path is bounded, so the loop ends.
func below(n, a *node) bool {
	for ; n != nil; n = n.parent {
		if n == a {
			return true
		}
	}
	return false
}

// detach takes a node's name away: its file is gone, or is elsewhere.
func (t *tree) detach(n *node) {
	p := n.parent
	if p == nil {
		return
	}
	delete(t.places, place{p, n.name})
	t.names -= len(n.name)
	n.parent, n.name = nil, ""
	p.children--
	t.drop(p)
}

// attach gives a node a place, and takes that place from the node that had it. It returns false, and leaves the
// node without a place, if a directory would come to lie in itself: the host has moved files meanwhile, and the
// caller must find them anew.
func (t *tree) attach(n, parent *node, name string) bool {
	if n.parent == parent && n.name == name {
		return true
	}
	// Keep the parent while its node moves.
	parent.children++
	defer func() {
		parent.children--
		t.drop(parent)
	}()
	if old := t.places[place{parent, name}]; old != nil {
		t.detach(old)
		t.drop(old)
	}
	n.lookups++ // keep it for now
	t.detach(n)
	n.lookups--
	if below(parent, n) {
		return false
	}
	n.parent, n.name = parent, name
	parent.children++
	t.places[place{parent, name}] = n
	t.names += len(name)
	return true
}

// drop removes a node that nothing refers to.
func (t *tree) drop(n *node) {
	if n == t.root || n.lookups > 0 || n.children > 0 || len(n.handles) > 0 || t.nodes[n.id] != n {
		return
	}
	delete(t.nodes, n.id)
	if t.identities[n.identity] == n {
		delete(t.identities, n.identity)
	}
	t.detach(n)
}

// know returns the node of a file that was found at a place, and counts one lookup.
func (t *tree) know(id identity, parent *node, name string) (*node, error) {
	n := t.identities[id]
	if n == nil {
		if len(t.nodes) >= MaxNodes || t.names+len(name) > MaxNames {
			return nil, errTooMany
		}
		n = &node{id: t.nextNode, identity: id}
		t.nextNode++
		t.nodes[n.id], t.identities[id] = n, n
	} else if t.names+len(name)-len(n.name) > MaxNames {
		return nil, errTooMany
	}
	if n.lookups == math.MaxUint64 {
		return nil, unix.EOVERFLOW
	}
	n.lookups++
	if !t.attach(n, parent, name) {
		n.lookups--
		t.drop(n)
		return nil, unix.ESTALE
	}
	return n, nil
}

// forget takes lookups back. A guest that takes back more than it has loses the node.
func (t *tree) forget(id, lookups uint64) {
	n := t.nodes[id]
	if n == nil || n == t.root {
		return
	}
	n.lookups -= min(lookups, n.lookups)
	t.drop(n)
}

// open makes a handle that takes over the descriptor.
func (t *tree) open(n *node, fd int, flags uint32, dir bool) *handle {
	h := &handle{id: t.nextHandle, node: n, flags: flags & unix.O_ACCMODE, dir: dir, fd: fd}
	t.nextHandle++
	t.keep(h)
	return h
}

func (t *tree) keep(h *handle) {
	t.handles[h.id] = h
	if h.node.handles == nil {
		h.node.handles = map[uint64]*handle{}
	}
	h.node.handles[h.id] = h
}

func (t *tree) release(h *handle) {
	h.close()
	delete(t.handles, h.id)
	delete(h.node.handles, h.id)
	t.drop(h.node)
}
