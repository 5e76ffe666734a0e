package faultfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// Op is a kind of call, for counting and for faults.
type Op string

// The kinds of call that a [Sim] counts and can fail.
const (
	OpOpen      Op = "open"
	OpRename    Op = "rename"
	OpLink      Op = "link"
	OpExchange  Op = "exchange"
	OpRemove    Op = "remove"
	OpMkdir     Op = "mkdir"
	OpSyncDir   Op = "syncdir"
	OpRead      Op = "read"
	OpWrite     Op = "write"
	OpTruncate  Op = "truncate"
	OpSync      Op = "sync" // Sync and Datasync
	OpFallocate Op = "fallocate"
)

// Ops lists every kind.
var Ops = []Op{OpOpen, OpRename, OpLink, OpExchange, OpRemove, OpMkdir, OpSyncDir, OpRead, OpWrite, OpTruncate, OpSync, OpFallocate}

// ErrPowerCut is the error of every call after the power was cut.
var ErrPowerCut = errors.New("faultfs: the power is cut")

// Fault makes calls fail.
type Fault struct {
	Op Op
	// Path limits the fault to paths that contain this string; empty is every path.
	Path string
	// Nth is the first matching call to fail, counted from 1 since Inject.
	Nth int
	// Times is how many calls fail in a row: 0 is one, negative is all until ClearFaults.
	Times int
	// Err is the error that the call returns, for instance unix.ENOSPC.
	Err error
	// Short lets a failing write write its first half before it returns Err.
	Short bool
}

type armed struct {
	Fault
	seen int
}

// Sim is a file system on a real directory that fails on demand and can simulate a loss of power.
// It knows only changes made through it. Safe for concurrent use.
type Sim struct {
	root string

	mu     sync.Mutex // guards all below, and the order of changes
	counts map[Op]int
	faults []*armed
	fired  int
	calls  int // of all kinds
	cutAt  int // the number of the call at which the power is cut; 0: never
	tree   *node
	twins  map[*os.File]*simFile
}

// NewSim returns a file system on the existing directory root. Existing files are durable. Every name given to its
// methods must lie under root.
func NewSim(root string) (*Sim, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	tree, err := load(root)
	if err != nil {
		return nil, err
	}
	return &Sim{root: root, counts: map[Op]int{}, tree: tree, twins: map[*os.File]*simFile{}}, nil
}

// Inject arms a fault.
func (s *Sim) Inject(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, &armed{Fault: f})
}

// ClearFaults disarms all faults, like a disk that has space again.
func (s *Sim) ClearFaults() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = nil
}

// CutAfter lets n more calls of any kind pass and then cuts the power: every call fails with ErrPowerCut and
// changes nothing, neither the directory nor the result of Crash.
func (s *Sim) CutAfter(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cutAt = s.calls + n + 1
}

// Calls returns how many calls of all kinds were made so far.
func (s *Sim) Calls() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

// Fired returns how many calls have failed by faults so far.
func (s *Sim) Fired() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fired
}

// Count returns how many calls of a kind were made so far, with failed ones.
func (s *Sim) Count(op Op) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts[op]
}

// Twin finds the recorded file whose [osfile.File.OS] is f, or nil.
func (s *Sim) Twin(f *os.File) osfile.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.twins[f]; t != nil {
		return t
	}
	return nil
}

// fault counts the call and returns the fault and error that it must fail with. s.mu must be held.
func (s *Sim) fault(op Op, path string) (*Fault, error) {
	s.counts[op]++
	s.calls++
	if s.cutAt > 0 && s.calls >= s.cutAt {
		return &Fault{}, &fs.PathError{Op: string(op), Path: path, Err: ErrPowerCut}
	}
	for _, a := range s.faults {
		if a.Op != op || !strings.Contains(path, a.Path) {
			continue
		}
		a.seen++
		times := a.Times
		if times == 0 {
			times = 1
		}
		if a.seen >= a.Nth && (times < 0 || a.seen < a.Nth+times) {
			s.fired++
			return &a.Fault, &fs.PathError{Op: string(op), Path: path, Err: a.Err}
		}
	}
	return nil, nil
}

// rel returns the path of name below the root, as the elements of a walk.
func (s *Sim) rel(name string) ([]string, error) {
	abs, err := filepath.Abs(name)
	if err != nil {
		return nil, err
	}
	r, err := filepath.Rel(s.root, abs)
	if err != nil || r == ".." || strings.HasPrefix(r, "../") {
		return nil, fmt.Errorf("faultfs: %s is outside of %s", name, s.root)
	}
	if r == "." {
		return nil, nil
	}
	return strings.Split(r, "/"), nil
}

// find walks to the directory that holds name, and to the node itself (nil if there is none).
func (s *Sim) find(name string) (dir *node, base string, n *node, err error) {
	els, err := s.rel(name)
	if err != nil {
		return nil, "", nil, err
	}
	n = s.tree
	for _, el := range els {
		if n == nil || !n.isDir {
			return nil, "", nil, &fs.PathError{Op: "lookup", Path: name, Err: fs.ErrNotExist}
		}
		dir, base, n = n, el, n.entries[el]
	}
	return dir, base, n, nil
}

// OpenFile implements [osfile.FS].
func (s *Sim) OpenFile(name string, flag int, perm fs.FileMode) (osfile.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.fault(OpOpen, name); err != nil {
		return nil, err
	}
	dir, base, n, err := s.find(name)
	if err != nil {
		return nil, err
	}
	f, err := osfile.OS.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	if n == nil {
		n = &node{}
		dir.change(dirOp{add: base, node: n})
	} else if flag&os.O_TRUNC != 0 && !n.isDir {
		n.log = append(n.log, fileOp{kind: opTrunc, off: 0})
	}
	sf := &simFile{File: f, sim: s, node: n}
	s.twins[f.OS()] = sf
	return sf, nil
}

// Rename implements [osfile.FS].
func (s *Sim) Rename(oldname, newname string) error {
	return s.rename(oldname, newname, osfile.OS.Rename)
}

// RenameNew implements [osfile.FS]. It counts as [OpRename].
func (s *Sim) RenameNew(oldname, newname string) error {
	return s.rename(oldname, newname, osfile.OS.RenameNew)
}

func (s *Sim) rename(oldname, newname string, rename func(oldname, newname string) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.fault(OpRename, newname); err != nil {
		return err
	}
	od, ob, n, err := s.find(oldname)
	if err != nil {
		return err
	}
	nd, nb, _, err := s.find(newname)
	if err != nil {
		return err
	}
	if err := rename(oldname, newname); err != nil {
		return err
	}
	if od == nd {
		od.change(dirOp{remove: ob, add: nb, node: n})
		return nil
	}
	nd.change(dirOp{add: nb, node: n})
	od.change(dirOp{remove: ob, movedTo: nd, movedAt: len(nd.dirLog) + nd.synced})
	return nil
}

// Link implements [osfile.FS].
func (s *Sim) Link(oldname, newname string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.fault(OpLink, newname); err != nil {
		return err
	}
	_, _, n, err := s.find(oldname)
	if err != nil {
		return err
	}
	nd, nb, _, err := s.find(newname)
	if err != nil {
		return err
	}
	if err := osfile.OS.Link(oldname, newname); err != nil {
		return err
	}
	nd.change(dirOp{add: nb, node: n})
	return nil
}

// Exchange implements [osfile.FS] for two entries of one directory.
func (s *Sim) Exchange(a, b string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.fault(OpExchange, b); err != nil {
		return err
	}
	ad, ab, an, err := s.find(a)
	if err != nil {
		return err
	}
	bd, bb, bn, err := s.find(b)
	if err != nil {
		return err
	}
	if ad != bd {
		return &fs.PathError{Op: "exchange", Path: b, Err: unix.EXDEV}
	}
	if err := osfile.OS.Exchange(a, b); err != nil {
		return err
	}
	ad.change(dirOp{add: ab, node: bn, add2: bb, node2: an})
	return nil
}

// Remove implements [osfile.FS].
func (s *Sim) Remove(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.fault(OpRemove, name); err != nil {
		return err
	}
	d, b, _, err := s.find(name)
	if err != nil {
		return err
	}
	if err := osfile.OS.Remove(name); err != nil {
		return err
	}
	d.change(dirOp{remove: b})
	return nil
}

// RemoveAll implements [osfile.FS] with a call of Remove for each name.
func (s *Sim) RemoveAll(name string) error {
	st, err := os.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.IsDir() {
		entries, err := s.ReadDir(name)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := s.RemoveAll(filepath.Join(name, e.Name())); err != nil {
				return err
			}
		}
	}
	return s.Remove(name)
}

// Mkdir implements [osfile.FS].
func (s *Sim) Mkdir(name string, perm fs.FileMode) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.fault(OpMkdir, name); err != nil {
		return err
	}
	d, b, _, err := s.find(name)
	if err != nil {
		return err
	}
	if err := osfile.OS.Mkdir(name, perm); err != nil {
		return err
	}
	d.change(dirOp{add: b, node: newDir()})
	return nil
}

// Stat implements [osfile.FS].
func (s *Sim) Stat(name string) (fs.FileInfo, error) { return osfile.OS.Stat(name) }

// ReadDir implements [osfile.FS].
func (s *Sim) ReadDir(name string) ([]fs.DirEntry, error) { return osfile.OS.ReadDir(name) }

// Lock implements [osfile.FS].
func (s *Sim) Lock(name string) (io.Closer, error) { return osfile.OS.Lock(name) }

// Free implements [osfile.FS].
func (s *Sim) Free(name string) (uint64, error) { return osfile.OS.Free(name) }

// SyncDir implements [osfile.FS].
func (s *Sim) SyncDir(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ferr := s.fault(OpSyncDir, name)
	if ferr != nil {
		return ferr // the entries stay undecided: the next commit retries a directory's log
	}
	_, _, n, err := s.find(name)
	if err != nil {
		return err
	}
	if n == nil || !n.isDir {
		return &fs.PathError{Op: "syncdir", Path: name, Err: fs.ErrNotExist}
	}
	n.syncDir()
	return nil
}

type simFile struct {
	osfile.File
	sim  *Sim
	node *node
}

func (f *simFile) ReadAt(p []byte, off int64) (int, error) {
	f.sim.mu.Lock()
	_, err := f.sim.fault(OpRead, f.Name())
	f.sim.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

func (f *simFile) WriteAt(p []byte, off int64) (int, error) {
	f.sim.mu.Lock()
	defer f.sim.mu.Unlock()
	fault, ferr := f.sim.fault(OpWrite, f.Name())
	if ferr != nil {
		if !fault.Short {
			return 0, ferr
		}
		p = p[:len(p)/2]
	}
	n, err := f.File.WriteAt(p, off)
	if n > 0 {
		f.node.log = append(f.node.log, fileOp{kind: opWrite, off: off, data: append([]byte(nil), p[:n]...)})
	}
	return n, errors.Join(ferr, err)
}

func (f *simFile) Truncate(size int64) error {
	f.sim.mu.Lock()
	defer f.sim.mu.Unlock()
	if _, err := f.sim.fault(OpTruncate, f.Name()); err != nil {
		return err
	}
	if err := f.File.Truncate(size); err != nil {
		return err
	}
	f.node.log = append(f.node.log, fileOp{kind: opTrunc, off: size})
	return nil
}

func (f *simFile) Sync() error     { return f.sync() }
func (f *simFile) Datasync() error { return f.sync() }

// sync does no real fsync: the simulation decides what is durable, and tests stay fast.
func (f *simFile) sync() error {
	f.sim.mu.Lock()
	defer f.sim.mu.Unlock()
	if _, err := f.sim.fault(OpSync, f.Name()); err != nil {
		if !errors.Is(err, ErrPowerCut) {
			f.node.lose()
		}
		return err
	}
	f.node.sync()
	return nil
}

func (f *simFile) Fallocate(mode uint32, off, n int64) error {
	f.sim.mu.Lock()
	defer f.sim.mu.Unlock()
	if _, err := f.sim.fault(OpFallocate, f.Name()); err != nil {
		return err
	}
	if err := f.File.Fallocate(mode, off, n); err != nil {
		return err
	}
	if mode&(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_ZERO_RANGE) != 0 {
		f.node.log = append(f.node.log, fileOp{kind: opZero, off: off, n: n})
	}
	if mode&unix.FALLOC_FL_KEEP_SIZE == 0 {
		f.node.log = append(f.node.log, fileOp{kind: opGrow, off: off + n})
	}
	return nil
}

func (f *simFile) Close() error {
	f.sim.mu.Lock()
	delete(f.sim.twins, f.OS())
	f.sim.mu.Unlock()
	return f.File.Close()
}
