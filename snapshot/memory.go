package snapshot

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"sync/atomic"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Memory is the RAM in an opened snapshot. Its methods may be called from
// several goroutines at once.
type Memory struct {
	slots []Slot
	pages uint64
	files []memoryFile
	root  []byte
	// leaves are read and checked on first use.
	leaves []atomic.Pointer[Leaf]
}

// memoryFile is an open memory file. It consists of the header, frames up to index, leaves up to root, and the
// root.
type memoryFile struct {
	r           io.ReaderAt
	name        string
	number      uint32
	index, root int64
}

// file returns the file of that number, nil if there is none.
func (m *Memory) file(number uint32) *memoryFile {
	lo, hi := 0, len(m.files)
	for lo < hi {
		mid := (lo + hi) / 2
		switch n := m.files[mid].number; {
		case n == number:
			return &m.files[mid]
		case n < number:
			lo = mid + 1
		default:
			hi = mid
		}
	}
	return nil
}

// newMemoryIndex returns a Memory without a root. The files are in ascending
// order of their numbers.
func newMemoryIndex(slots []Slot, files []memoryFile) *Memory {
	pages := pagesOf(slots)
	return &Memory{
		slots: slots, files: files, pages: pages,
		leaves: make([]atomic.Pointer[Leaf], (pages+ChunkPages-1)/ChunkPages),
	}
}

// Slots returns the pieces of RAM in ascending order.
func (m *Memory) Slots() []Slot { return append([]Slot(nil), m.slots...) }

// Pages returns the number of pages of RAM. They are numbered from 0 through all slots, see
// guestmem.Memory.Linear.
func (m *Memory) Pages() uint64 { return m.pages }

// Chunks returns the number of chunks of ChunkPages pages. The last may be shorter.
func (m *Memory) Chunks() int { return len(m.leaves) }

// ZeroChunk reports whether all of a chunk is zeros. It reads no file.
func (m *Memory) ZeroChunk(chunk int) bool {
	return binary.LittleEndian.Uint32(m.root[chunk*rootEntry:]) == 0
}

// Leaf returns the index of a chunk, nil for a chunk of zeros. The first call for each chunk reads it from the
// file (1 to 13 KiB) and checks it. If that fails, with ErrCorrupt, ErrIncomplete or the file's error, the next
// call tries again.
func (m *Memory) Leaf(chunk int) (*Leaf, error) {
	if l := m.leaves[chunk].Load(); l != nil {
		return l, nil
	}
	l := new(Leaf)
	if ok, err := m.readLeaf(chunk, l, nil); err != nil || !ok {
		return nil, err
	}
	m.leaves[chunk].Store(l)
	return l, nil
}

// ref returns the root's entry of a chunk.
func (m *Memory) ref(chunk int) rootRef { return decodeRoot(m.root[chunk*rootEntry:]) }

// checkRef checks that r, which is not zero, refers to a place where a leaf can be. If not, it returns what is
// wrong as a text.
func (m *Memory) checkRef(r rootRef) string {
	f := m.file(r.file)
	switch {
	case f == nil:
		return "is in a file that the manifest does not name"
	case r.frames < 1 || r.frames > ChunkPages || r.offset < f.index || r.offset > f.root || int64(r.length()) > f.root-r.offset:
		return "is not among the leaves of its file"
	}
	return ""
}

// checkRoot checks every entry of the root.
func (m *Memory) checkRoot() error {
	// Most of a large RAM is zeros.
	var zeros [64 * rootEntry]byte
	for c := 0; c < m.Chunks(); c++ {
		if b := m.root[c*rootEntry:]; len(b) >= len(zeros) && bytes.Equal(b[:len(zeros)], zeros[:]) {
			c += len(zeros)/rootEntry - 1
			continue
		}
		r := m.ref(c)
		if r == (rootRef{}) {
			continue
		}
		if wrong := m.checkRef(r); wrong != "" {
			own := &m.files[len(m.files)-1]
			return corrupt(own.name, own.root+int64(c)*rootEntry, "index root: the leaf of chunk %d %s", c, wrong)
		}
	}
	return nil
}

// readLeaf reads the index of a chunk into l and checks it, without the cache of Leaf. It returns false for a
// chunk of zeros. It reads into buf if that is large enough; maxLeaf bytes always are.
func (m *Memory) readLeaf(chunk int, l *Leaf, buf []byte) (bool, error) {
	r := m.ref(chunk)
	if r == (rootRef{}) {
		return false, nil
	}
	if wrong := m.checkRef(r); wrong != "" {
		return false, corrupt(MemoryName, 0, "index root: the leaf of chunk %d %s", chunk, wrong)
	}
	f := m.file(r.file)
	b := slices.Grow(buf[:0], r.length())[:r.length()]
	if n, err := f.r.ReadAt(b, r.offset); n < len(b) {
		return false, readError(f.name, r.offset, len(b), err)
	}
	if got := checksum(b); got != r.crc {
		return false, corrupt(f.name, r.offset, "index leaf of chunk %d: checksum is %08x, the root says %08x", chunk, got, r.crc)
	}
	wrong := decodeLeaf(l, b, uint64(chunk), m.chunkPages(chunk), func(number uint32) int64 {
		// A leaf was written after all frames that it refers to.
		if g := m.file(number); g != nil && number <= r.file {
			return g.index
		}
		return 0
	})
	if wrong != "" {
		return false, corrupt(f.name, r.offset, "index leaf of chunk %d: %s", chunk, wrong)
	}
	return true, nil
}

// chunkPages returns the number of pages in a chunk.
func (m *Memory) chunkPages(chunk int) int {
	return int(min(m.pages-uint64(chunk)*ChunkPages, ChunkPages))
}

// ReadFrame reads a frame, checks it, and returns its pages one after the other, valid until d is used again or
// released. It fails with ErrCorrupt, ErrIncomplete or the file's error, and allocates nothing otherwise.
func (m *Memory) ReadFrame(f *Frame, d *Decoder) ([]byte, error) {
	in, err := m.readStored(f, d)
	if err != nil {
		return nil, err
	}
	out, wrong := d.decode(f, in)
	if wrong != "" {
		return nil, corrupt(m.file(f.file).name, f.offset, "%s", wrong)
	}
	return out, nil
}

// readStored reads the stored bytes of a frame without checking them.
func (m *Memory) readStored(f *Frame, d *Decoder) ([]byte, error) {
	file := m.file(f.file)
	if file == nil {
		return nil, corrupt(MemoryName, 0, "a frame is in file %d, which the manifest does not name", f.file)
	}
	in := d.in[:f.stored]
	if n, err := file.r.ReadAt(in, f.offset); n < len(in) {
		return nil, readError(file.name, f.offset, len(in), err)
	}
	return in, nil
}

// ReadPage copies one page into p, which must be guestmem.PageSize long.
func (m *Memory) ReadPage(page uint64, p []byte, d *Decoder) error {
	if page >= m.pages || len(p) != guestmem.PageSize {
		return fmt.Errorf("reading page %d of a snapshot with %d: %w", page, m.pages, guestmem.ErrRange)
	}
	l, err := m.Leaf(int(page / ChunkPages))
	if err != nil {
		return err
	}
	if l == nil {
		clear(p)
		return nil
	}
	frame, slot, ok := l.Page(int(page % ChunkPages))
	if !ok {
		clear(p)
		return nil
	}
	raw, err := m.ReadFrame(l.Frame(frame), d)
	if err != nil {
		return err
	}
	copy(p, raw[slot*guestmem.PageSize:])
	return nil
}
