package fs

import (
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
)

// The saved state: tag string, writable u8, started u8, next node u64, next handle u64; the number of nodes
// without the root u32, and for each, in the order of their ids: id u64, parent's id u64 (0: it has no name), name
// string, inode number u64, time of birth u64, lookups u64; the number of handles u32, and for each, in the order
// of their ids: id u64, node's id u64, access u8, directory u8. A paused device has no request in flight. Content
// is not saved: the device finds files again by their names.
const (
	stateKind    = "virtio-fs"
	stateVersion = 1
)

// Export implements [devices.Stateful].
func (d *Device) Export() (devices.Payload, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var e devices.Encoder
	e.Bytes([]byte(d.tag))
	e.Bool(d.dir.writable)
	e.Bool(d.started)
	e.Uint64(d.nextNode)
	e.Uint64(d.nextHandle)
	e.Uint32(uint32(len(d.nodes) - 1))
	for _, id := range slices.Sorted(maps.Keys(d.nodes)) {
		n := d.nodes[id]
		if n == d.root {
			continue
		}
		parent := uint64(0)
		if n.parent != nil {
			parent = n.parent.id
		}
		e.Uint64(id)
		e.Uint64(parent)
		e.Bytes([]byte(n.name))
		e.Uint64(n.identity.ino)
		e.Uint64(uint64(n.identity.birth))
		e.Uint64(n.lookups)
	}
	e.Uint32(uint32(len(d.handles)))
	for _, id := range slices.Sorted(maps.Keys(d.handles)) {
		h := d.handles[id]
		e.Uint64(id)
		e.Uint64(h.node.id)
		e.Uint8(uint8(h.flags))
		e.Bool(h.dir)
	}
	return e.Payload(stateKind, stateVersion), nil
}

// Import implements [devices.Stateful]. It refuses the state of a share with another tag, or of one that was
// writable if this one is read-only, or the reverse. It opens nothing: the device looks for an open file on its
// next use, and fails with ESTALE if it is gone or is another file.
func (d *Device) Import(p devices.Payload) error {
	dec := p.Decode(stateKind, stateVersion)
	tag, writable := string(dec.Bytes(TagSize)), dec.Bool()
	var t tree
	t.clear()
	t.read(dec)
	if err := dec.Finish(); err != nil {
		return err
	}
	if tag != d.tag || writable != d.dir.writable {
		return fmt.Errorf("importing a shared directory: the guest knows share %q (writable: %t), this one is %q (writable: %t): %w: use the same shares as the VM in the snapshot",
			tag, writable, d.tag, d.dir.writable, devices.ErrPayload)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.tree.clear()
	d.tree = t
	return nil
}

// read fills an empty tree from a saved state.
func (t *tree) read(dec *devices.Decoder) {
	t.started, t.nextNode, t.nextHandle = dec.Bool(), dec.Uint64(), dec.Uint64()
	count := dec.Uint32()
	if count >= MaxNodes {
		dec.Fail("it has too many files")
		return
	}
	parents := make(map[*node]uint64)
	last := uint64(rootID)
	for range count {
		id, parent, name := dec.Uint64(), dec.Uint64(), string(dec.Bytes(MaxName))
		n := &node{id: id, name: name, identity: identity{dec.Uint64(), int64(dec.Uint64())}, lookups: dec.Uint64()}
		switch {
		case id <= last || id >= t.nextNode:
			dec.Fail("its files are not in order")
			return
		case parent == 0 && name != "" || parent != 0 && checkName(name) != nil:
			dec.Fail("a file has an impossible name")
			return
		case t.identities[n.identity] != nil:
			dec.Fail("a file is there twice")
			return
		}
		last = id
		t.nodes[id], t.identities[n.identity] = n, n
		if t.names += len(name); parent != 0 {
			parents[n] = parent
		}
	}
	if t.names > MaxNames {
		dec.Fail("its names are too long")
		return
	}
	for n, id := range parents {
		n.parent = t.nodes[id]
		if n.parent == nil || t.places[place{n.parent, n.name}] != nil {
			dec.Fail("a file is nowhere, or where another one is")
			return
		}
		n.parent.children++
		t.places[place{n.parent, n.name}] = n
	}
	if !t.acyclic() {
		dec.Fail("a directory lies in itself")
		return
	}
	t.readHandles(dec)
	for _, n := range t.nodes {
		if n != t.root && n.lookups == 0 && n.children == 0 && len(n.handles) == 0 {
			dec.Fail("nobody knows one of its files")
			return
		}
	}
}

func (t *tree) readHandles(dec *devices.Decoder) {
	count := dec.Uint32()
	if count > MaxHandles {
		dec.Fail("it has too many open files")
		return
	}
	last := uint64(0)
	for range count {
		h := &handle{id: dec.Uint64(), node: t.nodes[dec.Uint64()], flags: uint32(dec.Uint8()), dir: dec.Bool(), fd: -1}
		if h.id <= last || h.id >= t.nextHandle || h.node == nil || h.flags > unix.O_RDWR {
			dec.Fail("an open file is impossible")
			return
		}
		last = h.id
		t.keep(h)
	}
}

// acyclic reports whether every way up ends. It walks over each node once.
func (t *tree) acyclic() bool {
	const visiting, done = 1, 2
	state := make(map[*node]int, len(t.nodes))
	for _, n := range t.nodes {
		var way []*node
		for ; n != nil && state[n] == 0; n = n.parent {
			state[n] = visiting
			way = append(way, n)
		}
		if n != nil && state[n] == visiting {
			return false
		}
		for _, w := range way {
			state[w] = done
		}
	}
	return true
}
