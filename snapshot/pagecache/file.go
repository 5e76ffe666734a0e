package pagecache

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

const (
	pageSize   = guestmem.PageSize
	magic      = "DROWSEPC"
	version    = 2
	headerSize = 80
	entrySize  = 32
	bootAt     = 16
	identityAt = 32
	sumAt      = 76
	suffix     = ".pages"
)

// Bounds.
const (
	// MaxFileBytes is the most content that a file may have.
	MaxFileBytes = 64 << 20
	// MaxBytes is the most that all files of a cache may take. Add evicts the least recently used files first.
	MaxBytes = 1 << 30
	// maxEntries follows from that: an entry has at least one page.
	maxEntries = MaxFileBytes / pageSize
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errUnusable: a file is not a complete cache file of its memory file.
var errUnusable = errors.New("unusable cache file")

// key identifies the frame that an entry was made from.
type key struct {
	offset      int64
	stored, crc uint32
	pages       uint8
}

func keyOf(f *snapshot.Frame) key {
	return key{offset: f.Offset(), stored: uint32(f.StoredBytes()), crc: f.Checksum(), pages: uint8(f.Pages())}
}

type entry struct {
	key
	place uint32 // page of the file
	sum   uint32
}

func (e *entry) size() int { return int(e.pages) * pageSize }

// file is an open cache file. It does not change.
type file struct {
	f       *os.File
	entries []entry
	// waits is true if the file system does not support RWF_NOWAIT, so that reads may wait.
	waits atomic.Bool
}

// contentAt returns the offset of the content of n entries.
func contentAt(n int) int64 {
	return (headerSize + int64(n)*entrySize + pageSize - 1) / pageSize * pageSize
}

// encodeIndex returns everything before the content. The entries must be in order and have their places.
func encodeIndex(id identity, boot [16]byte, entries []entry) []byte {
	b := make([]byte, contentAt(len(entries)))
	copy(b, magic)
	le := binary.LittleEndian
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], uint32(len(entries)))
	copy(b[bootAt:], boot[:])
	copy(b[identityAt:], id[:])
	for i := range entries {
		e, p := &entries[i], b[headerSize+i*entrySize:]
		le.PutUint64(p, uint64(e.offset))
		le.PutUint32(p[8:], e.stored)
		le.PutUint32(p[12:], e.crc)
		le.PutUint32(p[16:], e.place)
		le.PutUint32(p[20:], e.sum)
		p[24] = e.pages
	}
	le.PutUint32(b[sumAt:], indexSum(b[:headerSize+len(entries)*entrySize]))
	return b
}

// indexSum returns the checksum over a header, except the sum itself, and the entries.
func indexSum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:sumAt], castagnoli), castagnoli, b[headerSize:])
}

// checkHeader checks a header and returns its number of entries.
func checkHeader(b []byte, id identity, boot [16]byte) (int, error) {
	le := binary.LittleEndian
	n := le.Uint32(b[12:])
	if string(b[:8]) != magic || le.Uint32(b[8:]) != version || n > maxEntries ||
		[16]byte(b[bootAt:]) != boot || identity(b[identityAt:]) != id {
		return 0, fmt.Errorf("%w: its header is not that of the memory file's", errUnusable)
	}
	return int(n), nil
}

// decodeIndex checks and returns the entries. b is the header and the entries, size is that of the file.
func decodeIndex(b []byte, id identity, boot [16]byte, size int64) ([]entry, error) {
	if len(b) < headerSize {
		return nil, fmt.Errorf("%w: it has no header", errUnusable)
	}
	n, err := checkHeader(b, id, boot)
	if err != nil {
		return nil, err
	}
	if len(b) != headerSize+n*entrySize {
		return nil, fmt.Errorf("%w: it is cut short", errUnusable)
	}
	le := binary.LittleEndian
	if le.Uint32(b[sumAt:]) != indexSum(b) {
		return nil, fmt.Errorf("%w: the checksum of its list is another one", errUnusable)
	}
	entries := make([]entry, n)
	at, before := contentAt(n)/pageSize, int64(-1)
	for i := range entries {
		p := b[headerSize+i*entrySize:]
		e := entry{
			key:   key{offset: int64(le.Uint64(p)), stored: le.Uint32(p[8:]), crc: le.Uint32(p[12:]), pages: p[24]},
			place: le.Uint32(p[16:]), sum: le.Uint32(p[20:]),
		}
		if e.offset <= before || e.pages < 1 || e.pages > snapshot.MaxFramePages || int64(e.place) != at {
			return nil, fmt.Errorf("%w: entry %d is impossible", errUnusable, i)
		}
		entries[i], before, at = e, e.offset, at+int64(e.pages)
	}
	if size != at*pageSize {
		return nil, fmt.Errorf("%w: it has %d bytes instead of %d", errUnusable, size, at*pageSize)
	}
	return entries, nil
}

// openFile opens the cache file of a memory file, and checks all but the content. With now, it fails if reading
// the list would have to wait for the disk.
func openFile(fsys osfile.FS, path string, id identity, boot [16]byte, now bool) (*file, error) {
	f, err := fsys.OpenFile(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	c := &file{f: f.OS()}
	if c.entries, err = c.readIndex(id, boot, now); err != nil {
		f.Close()
		return nil, err
	}
	return c, nil
}

func (c *file) readIndex(id identity, boot [16]byte, now bool) ([]entry, error) {
	st, err := c.f.Stat()
	if err != nil {
		return nil, err
	}
	// Most lists are short, and one read gets all of it. For a longer list the header says how long it is.
	const guess = headerSize + 510*entrySize
	b := make([]byte, min(guess, max(st.Size(), 0)))
	if len(b) < headerSize || !c.readAt(b, 0, now) {
		return nil, fmt.Errorf("%w: it is cut short", errUnusable)
	}
	n, err := checkHeader(b, id, boot)
	if err != nil {
		return nil, err
	}
	if want := headerSize + n*entrySize; want <= len(b) {
		b = b[:want]
	} else {
		b = make([]byte, want)
		if !c.readAt(b, 0, now) {
			return nil, fmt.Errorf("%w: it is cut short", errUnusable)
		}
	}
	return decodeIndex(b, id, boot, st.Size())
}

// find returns the entry that was made from k, nil if there is none.
func (c *file) find(k key) *entry {
	i, ok := slices.BinarySearchFunc(c.entries, k.offset, func(e entry, offset int64) int {
		switch {
		case e.offset < offset:
			return -1
		case e.offset > offset:
			return 1
		}
		return 0
	})
	if !ok || c.entries[i].key != k {
		return nil
	}
	return &c.entries[i]
}

// readAt reports whether it could read all of p; with now, without waiting.
func (c *file) readAt(p []byte, at int64, now bool) bool {
	if now && !c.waits.Load() {
		n, err := unix.Preadv2(int(c.f.Fd()), [][]byte{p}, at, unix.RWF_NOWAIT)
		switch {
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			// The file system cannot tell whether a read would wait.
			c.waits.Store(true)
		default:
			return err == nil && n == len(p)
		}
	}
	n, _ := c.f.ReadAt(p, at)
	return n == len(p)
}

// readResult is what readNow has found.
type readResult int

const (
	readNothing readResult = iota // not there, or only by waiting
	readDamaged
	readGood
)

// readNow reads the content of an entry into p, which has its size, if the content is in the page cache.
func (c *file) readNow(e *entry, p []byte) readResult {
	switch {
	case !c.readAt(p, int64(e.place)*pageSize, true):
		return readNothing
	case crc32.Checksum(p, castagnoli) != e.sum:
		return readDamaged
	}
	return readGood
}

// read reads the content of an entry even from disk, and reports whether it is what was written.
func (c *file) read(e *entry, p []byte) bool {
	return c.readAt(p, int64(e.place)*pageSize, false) && crc32.Checksum(p, castagnoli) == e.sum
}

// bootID identifies this boot of the host (random(4)). If the host has no boot id, each process uses a random one.
var bootID = sync.OnceValue(func() (id [16]byte) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err == nil {
		var ok bool
		if id, ok = parseHex(strings.ReplaceAll(strings.TrimSpace(string(text)), "-", "")); ok {
			return id
		}
	}
	_, _ = rand.Read(id[:]) // it never fails
	return id
})

// OpenAhead reads what caches need of the host by path, for a process that can open no path later.
func OpenAhead() { bootID() }

// parseHex returns false if text is not 32 hex digits.
func parseHex(text string) (id [16]byte, ok bool) {
	if len(text) != 2*len(id) {
		return id, false
	}
	_, err := hex.Decode(id[:], []byte(text))
	return id, err == nil && hex.EncodeToString(id[:]) == text
}
