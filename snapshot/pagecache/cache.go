package pagecache

import (
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/drowse-vm/drowse/internal/osfile"
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

func (c *Cache) path(name string) string { return filepath.Join(c.dir, name) }

// Open opens the cache files of the memory files of a snapshot, in a file system that has the cache's directory. It
// leaves out those that are missing or unusable. Close the reader after the last Read.
func (c *Cache) Open(fsys osfile.FS, s *snapshot.Snapshot) *Reader {
	files := s.Files()
	r := &Reader{files: make(map[uint32]*file, len(files)), missed: make([]uint64, 0, MaxMissed)}
	for i, mf := range s.Manifest().Memory.Files {
		id, err := identityOf(files[i])
		if err != nil {
			continue
		}
		f, err := openFile(fsys, c.path(id.name()), id, c.boot(), true)
		if err != nil {
			continue
		}
		r.files[mf.Number] = f
	}
	return r
}

// Reader reads from the cache files of one snapshot. Its methods may be called from
// several goroutines at once; Close must be the last.
type Reader struct {
	files map[uint32]*file

	hits, misses, damaged atomic.Uint64

	mu     sync.Mutex
	missed []uint64 // never grows beyond its capacity
	taken  bool     // Missed was called; note no more
}

// MaxMissed bounds the missed frames that a Reader notes, and those that Add adds.
const MaxMissed = 2048

// Read returns the pages of the frame f, which has a page of RAM, in buf, which has room for snapshot.MaxFramePages
// of them. It returns false if the cache does not have them, or has them only on disk, because the snapshot's frame is
// smaller to read there. The returned pages are always those of the snapshot. Read does not wait for a disk and
// allocates nothing.
func (r *Reader) Read(page uint64, f *snapshot.Frame, buf []byte) ([]byte, bool) {
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
		r.missed = append(r.missed, page)
	}
	return nil, false
}

// Missed returns a page of RAM of each frame that was missed so far. The Reader notes no more afterwards.
func (r *Reader) Missed() []uint64 {
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
