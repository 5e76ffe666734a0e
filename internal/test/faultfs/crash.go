package faultfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	sectorSize = 512
	pageSize   = 4096
)

type opKind uint8

const (
	opWrite opKind = iota
	opZero
	opTrunc // set the length to off
	opGrow  // the length is at least off
)

// fileOp is one change of a file that no sync has made durable yet.
type fileOp struct {
	kind opKind
	off  int64
	n    int64 // of opZero
	data []byte
}

// dirOp is one change of a directory's entries; a rename within the directory removes and adds at once.
type dirOp struct {
	remove string
	add    string
	node   *node
	// The second entry of an exchange.
	add2  string
	node2 *node
	// A file renamed into another directory leaves this one only if it has arrived there.
	movedTo *node
	movedAt int // the number of changes of movedTo, ever, that include the arrival
}

// node is an inode: its durable state, and the changes since.
type node struct {
	// File: durable pages and length, and the changes since.
	pages map[int64]*[pageSize]byte
	size  int64
	log   []fileOp

	isDir   bool
	entries map[string]*node // as the program sees them
	durable map[string]*node
	dirLog  []dirOp
	synced  int // how many changes are no longer in dirLog
}

func newDir() *node {
	return &node{isDir: true, entries: map[string]*node{}, durable: map[string]*node{}}
}

func (o dirOp) apply(m map[string]*node) {
	if o.remove != "" {
		delete(m, o.remove)
	}
	if o.add != "" {
		m[o.add] = o.node
	}
	if o.add2 != "" {
		m[o.add2] = o.node2
	}
}

func (n *node) change(o dirOp) {
	o.apply(n.entries)
	n.dirLog = append(n.dirLog, o)
}

func (n *node) syncDir() {
	n.durable = maps.Clone(n.entries)
	n.synced += len(n.dirLog)
	n.dirLog = nil
}

func (n *node) write(p []byte, off int64) {
	if n.pages == nil {
		n.pages = map[int64]*[pageSize]byte{}
	}
	n.size = max(n.size, off+int64(len(p)))
	for len(p) > 0 {
		pg := n.pages[off/pageSize]
		if pg == nil {
			pg = new([pageSize]byte)
			n.pages[off/pageSize] = pg
		}
		c := copy(pg[off%pageSize:], p)
		p, off = p[c:], off+int64(c)
	}
}

func (n *node) zero(off, end int64) {
	for no, pg := range n.pages {
		lo, hi := max(off, no*pageSize), min(end, (no+1)*pageSize)
		if lo < hi {
			clear(pg[lo-no*pageSize : hi-no*pageSize])
		}
	}
}

func (n *node) sync() {
	for _, o := range n.log {
		switch o.kind {
		case opWrite:
			n.write(o.data, o.off)
		case opZero:
			n.zero(o.off, o.off+o.n)
		case opTrunc:
			n.zero(o.off, 1<<62)
			n.size = o.off
		case opGrow:
			n.size = max(n.size, o.off)
		}
	}
	n.log = nil
}

// lose drops the data of changes that a failed sync should have written. Lengths survive, because the journal of
// the file system carries them.
func (n *node) lose() {
	for _, o := range n.log {
		switch o.kind {
		case opWrite:
			n.size = max(n.size, o.off+int64(len(o.data)))
		case opTrunc:
			n.zero(o.off, 1<<62)
			n.size = o.off
		case opGrow:
			n.size = max(n.size, o.off)
		}
	}
	n.log = nil
}

// cut picks how many of n changes have happened: often none, often all, else a number in between.
func cut(r *rand.Rand, n int) int {
	switch r.IntN(4) {
	case 0:
		return 0
	case 1:
		return n
	}
	return r.IntN(n + 1)
}

// Crash builds in dest, an empty existing directory, what a loss of power at this instant could have left of the
// simulated directory. Equal seeds give equal results for equal histories. The Sim itself does not change.
func (s *Sim) Crash(seed uint64, dest string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := crasher{r: rand.New(rand.NewPCG(seed, 0x9e3779b97f4a7c15)), cuts: map[*node]int{}, done: map[*node]string{}}
	c.cutDirs(s.tree)
	return c.dir(s.tree, dest)
}

type crasher struct {
	r    *rand.Rand
	cuts map[*node]int
	done map[*node]string // where a file's first name was built, for hard links
}

// cutDirs decides for every directory that exists or existed how far its log got.
func (c *crasher) cutDirs(d *node) {
	if _, ok := c.cuts[d]; ok {
		return
	}
	c.cuts[d] = cut(c.r, len(d.dirLog))
	visit := func(m map[string]*node) {
		for _, name := range slices.Sorted(maps.Keys(m)) {
			if m[name].isDir {
				c.cutDirs(m[name])
			}
		}
	}
	visit(d.durable)
	for _, o := range d.dirLog {
		if o.node != nil && o.node.isDir {
			c.cutDirs(o.node)
		}
		if o.node2 != nil && o.node2.isDir {
			c.cutDirs(o.node2)
		}
		if o.movedTo != nil {
			c.cutDirs(o.movedTo)
		}
	}
}

func (c *crasher) dir(d *node, path string) error {
	m := maps.Clone(d.durable)
	for _, o := range d.dirLog[:c.cuts[d]] {
		if o.movedTo != nil && o.movedTo.synced+c.cuts[o.movedTo] < o.movedAt {
			continue
		}
		o.apply(m)
	}
	for _, name := range slices.Sorted(maps.Keys(m)) {
		n, p := m[name], filepath.Join(path, name)
		switch first, linked := c.done[n]; {
		case n.isDir:
			if err := os.Mkdir(p, 0o755); err != nil {
				return err
			}
			if err := c.dir(n, p); err != nil {
				return err
			}
		case linked:
			if err := os.Link(first, p); err != nil {
				return err
			}
		default:
			c.done[n] = p
			if err := c.file(n, p); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *crasher) file(n *node, path string) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()

	touched := map[int64]bool{}
	for no := range n.pages {
		for i := range int64(pageSize / sectorSize) {
			touched[no*(pageSize/sectorSize)+i] = true
		}
	}
	for _, o := range n.log {
		for s := o.off / sectorSize; o.kind == opWrite && s*sectorSize < o.off+int64(len(o.data)); s++ {
			touched[s] = true
		}
	}
	var size = n.size
	for _, o := range n.log[:cut(c.r, len(n.log))] {
		switch o.kind {
		case opWrite:
			size = max(size, o.off+int64(len(o.data)))
		case opTrunc:
			size = o.off
		case opGrow:
			size = max(size, o.off)
		}
	}
	for _, s := range slices.Sorted(maps.Keys(touched)) {
		var sec [sectorSize]byte
		base := s * sectorSize
		if pg := n.pages[base/pageSize]; pg != nil {
			copy(sec[:], pg[base%pageSize:])
		}
		for _, o := range n.log[:cut(c.r, len(n.log))] {
			o.onSector(&sec, base)
		}
		end := min(base+sectorSize, size)
		if end <= base || sec == [sectorSize]byte{} {
			continue
		}
		if _, err := f.WriteAt(sec[:end-base], base); err != nil {
			return err
		}
	}
	return f.Truncate(size)
}

// onSector applies the part of a change that falls on the sector at base.
func (o fileOp) onSector(sec *[sectorSize]byte, base int64) {
	off, end := o.off, o.off+o.n
	switch o.kind {
	case opWrite:
		end = off + int64(len(o.data))
	case opTrunc:
		end = 1 << 62
	case opGrow:
		return
	}
	lo, hi := max(off, base), min(end, base+sectorSize)
	if lo >= hi {
		return
	}
	if o.kind == opWrite {
		copy(sec[lo-base:hi-base], o.data[lo-off:hi-off])
	} else {
		clear(sec[lo-base : hi-base])
	}
}

// load reads an existing tree as durable.
func load(root string) (*node, error) {
	d := newDir()
	ents, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	for _, e := range ents {
		p := filepath.Join(root, e.Name())
		var n *node
		switch {
		case e.IsDir():
			n, err = load(p)
		case e.Type().IsRegular():
			n, err = loadFile(p)
		default:
			err = fmt.Errorf("faultfs: %s is neither a file nor a directory", p)
		}
		if err != nil {
			return nil, err
		}
		d.entries[e.Name()] = n
	}
	d.syncDir()
	return d, nil
}

func loadFile(path string) (*node, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read from
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	n := &node{}
	var zero, buf [pageSize]byte
	for off := int64(0); off < st.Size(); off += pageSize {
		if d, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA); errors.Is(err, unix.ENXIO) {
			break
		} else if err == nil {
			off = d &^ (pageSize - 1)
		}
		c, err := f.ReadAt(buf[:], off)
		if err != nil && err != io.EOF {
			return nil, err
		}
		if !bytes.Equal(buf[:c], zero[:c]) {
			n.write(buf[:c], off)
		}
	}
	n.size = st.Size()
	return n, nil
}
