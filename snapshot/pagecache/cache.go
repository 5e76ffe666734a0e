package pagecache

import (
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/drowse-vm/drowse/snapshot"
)

// Cache is a directory of cache files. Any number of processes may use one at once. It
// need not exist: the first Add makes it.
type Cache struct {
	dir  string
	boot func() [16]byte // bootID, but in tests
	// What MaxBytes, MaxFileBytes and minFree say, but in tests.
	maxBytes, maxFile int64
	minFree           uint64
}

// New returns the cache in a directory. It touches nothing.
func New(dir string) *Cache {
	return &Cache{dir: dir, boot: bootID, maxBytes: MaxBytes, maxFile: MaxFileBytes, minFree: minFree}
}

func (c *Cache) path(id string) string { return filepath.Join(c.dir, id+suffix) }

// Open opens what there is for the memory files of a snapshot. What cannot be used is
// left out. Close the reader when nobody reads any more.
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
	taken  bool             // and no more are wanted
}

// maxMissed bounds the frames that a Reader notes, and so those that Add looks at.
const maxMissed = 2048

// Read returns the pages of a frame, in buf, which has room for snapshot.MaxFramePages of
// them; false if they are not there, or could be had only from the disk: the frame is smaller there.
// They are what the snapshot has, or are not returned. It waits for nothing and allocates nothing.
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

// takeMissed returns the frames that were not there until now. No more are noted.
func (r *Reader) takeMissed() []snapshot.Frame {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.missed
	r.missed, r.taken = nil, true
	return out
}

// Stats say what a reader has done.
type Stats struct {
	// Hits and Misses are the frames that were there, and that were not.
	Hits, Misses uint64
	// Damaged are those of Misses that were there but not what had been written.
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
