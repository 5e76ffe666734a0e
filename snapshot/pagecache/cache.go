package pagecache

import (
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/drowse-vm/drowse/snapshot"
)

// Cache is a directory of cache files. Any number of processes may use one at once. It need not exist: the first
// Add creates it.
type Cache struct {
	dir  string
	boot func() [16]byte // bootID, except in tests
	// MaxBytes, MaxFileBytes and minFree, except in tests.
	maxBytes, maxFile int64
	minFree           uint64
}

// New returns the cache in a directory. It does not access the directory.
func New(dir string) *Cache {
	return &Cache{dir: dir, boot: bootID, maxBytes: MaxBytes, maxFile: MaxFileBytes, minFree: minFree}
}

func (c *Cache) path(id string) string { return filepath.Join(c.dir, id+suffix) }

// Open opens the cache files of the memory files of a snapshot. It leaves out those that are missing or unusable.
// Close the reader after the last Read.
func (c *Cache) Open(m *snapshot.Manifest) *Reader {
	r := &Reader{files: make(map[uint32]*file, len(m.Memory.Files)), missed: make([]snapshot.Frame, 0, maxMissed)}
	for _, mf := range m.Memory.Files {
		id, ok := parseID(mf.ID)
		if !ok {
			continue
		}
		f, err := openFile(c.path(mf.ID), id, c.boot(), true)
		if err != nil {
			continue
		}
		r.files[mf.Number] = f
		r.paths = append(r.paths, c.path(mf.ID))
	}
	return r
}

// Reader reads from the cache files of one snapshot. Its methods may be called from
// several goroutines at once; Close must be the last.
type Reader struct {
	files map[uint32]*file
	paths []string

	hits, misses, damaged atomic.Uint64

	mu     sync.Mutex
	missed []snapshot.Frame // never grows beyond its capacity
	taken  bool             // takeMissed was called; note no more
}

// maxMissed bounds the missed frames that a Reader notes, and so those that Add adds.
const maxMissed = 2048

// Read returns the pages of a frame, in buf, which has room for snapshot.MaxFramePages of them. It returns false
// if the cache does not have them, or has them only on disk, because the snapshot's frame is smaller to read
// there. The returned pages are always those of the snapshot. Read does not wait for a disk and allocates nothing.
func (r *Reader) Read(f *snapshot.Frame, buf []byte) ([]byte, bool) {
	if c := r.files[f.File()]; c != nil {
		if e := c.find(keyOf(f)); e != nil && e.size() <= len(buf) {
			p := buf[:e.size()]
			switch c.readNow(e, p) {
			case readGood:
				r.hits.Add(1)
				return p, true
			case readDamaged:
				r.damaged.Add(1)
			}
		}
	}
	r.misses.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.taken && len(r.missed) < cap(r.missed) {
		r.missed = append(r.missed, *f)
	}
	return nil, false
}

// takeMissed returns the frames missed so far. The Reader notes no more afterwards.
func (r *Reader) takeMissed() []snapshot.Frame {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.missed
	r.missed, r.taken = nil, true
	return out
}

// Stats count what a Reader has done.
type Stats struct {
	// Hits and Misses count the frames that Read found, and that it did not.
	Hits, Misses uint64
	// Damaged counts the misses whose content had a wrong checksum.
	Damaged uint64
}

// Stats returns the counters.
func (r *Reader) Stats() Stats {
	return Stats{Hits: r.hits.Load(), Misses: r.misses.Load(), Damaged: r.damaged.Load()}
}

// Close closes the files.
func (r *Reader) Close() error {
	var errs []error
	for _, f := range r.files {
		errs = append(errs, f.f.Close())
	}
	return errors.Join(errs...)
}
