package snapshot

import (
	"fmt"
	"io"
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
	// leaves are read and checked when they are first needed.
	leaves []atomic.Pointer[Leaf]
}

type memoryFile struct {
	r    io.ReaderAt
	name string
	size int64
}

// newMemoryIndex returns a Memory without a root.
func newMemoryIndex(slots []Slot, files []memoryFile) *Memory {
	var ram uint64
	for _, s := range slots {
		ram += s.Size
	}
	return &Memory{
		slots: slots, files: files,
		pages:  ram / guestmem.PageSize,
		leaves: make([]atomic.Pointer[Leaf], chunksOf(ram)),
	}
}

// Slots returns the pieces of RAM in ascending order.
func (m *Memory) Slots() []Slot { return append([]Slot(nil), m.slots...) }

// Pages is the number of pages of RAM; they are numbered from 0 through all
// slots, see guestmem.Memory.Linear.
func (m *Memory) Pages() uint64 { return m.pages }

// Chunks is the number of chunks of ChunkPages pages; the last may be shorter.
func (m *Memory) Chunks() int { return len(m.leaves) }

// ZeroChunk reports whether all of a chunk is zeros. It reads nothing.
func (m *Memory) ZeroChunk(chunk int) bool {
	return decodeRoot(m.root[chunk*rootEntry:]).file == 0
}

// Leaf returns the index of a chunk, nil for a chunk of zeros. The first call
// for each chunk reads it from the file (1 to 13 KiB) and checks it; it fails
// with ErrCorrupt, ErrIncomplete or the file's error, and the next call tries
// again.
func (m *Memory) Leaf(chunk int) (*Leaf, error) {
	if l := m.leaves[chunk].Load(); l != nil {
		return l, nil
	}
	r := decodeRoot(m.root[chunk*rootEntry:])
	if r.file == 0 {
		return nil, nil
	}
	if r.file > uint32(len(m.files)) || r.frames > ChunkPages {
		return nil, corrupt(MemoryName, 0, "index root: chunk %d is in an impossible place", chunk)
	}
	f := &m.files[r.file-1]
	if r.offset < fileHeader || r.offset > f.size || int64(r.length()) > f.size-r.offset {
		return nil, corrupt(f.name, r.offset, "index leaf of chunk %d is outside the file", chunk)
	}
	b := make([]byte, r.length())
	if n, err := f.r.ReadAt(b, r.offset); n < len(b) {
		return nil, readError(f.name, r.offset, len(b), err)
	}
	if got := checksum(b); got != r.crc {
		return nil, corrupt(f.name, r.offset, "index leaf of chunk %d: checksum is %08x, the root says %08x", chunk, got, r.crc)
	}
	pages := min(m.pages-uint64(chunk)*ChunkPages, ChunkPages)
	l, wrong := decodeLeaf(b, uint64(chunk), int(pages), m.fileSize)
	if l == nil {
		return nil, corrupt(f.name, r.offset, "index leaf of chunk %d: %s", chunk, wrong)
	}
	m.leaves[chunk].Store(l)
	return l, nil
}

func (m *Memory) fileSize(file uint32) int64 {
	if file < 1 || file > uint32(len(m.files)) {
		return 0
	}
	return m.files[file-1].size
}

// ReadFrame reads a frame, checks it, and returns its pages one after the
// other, valid until d is used again or released. It allocates nothing unless
// it fails: with ErrCorrupt, ErrIncomplete or the file's error.
func (m *Memory) ReadFrame(f *Frame, d *Decoder) ([]byte, error) {
	file := &m.files[f.file-1]
	in := d.in[:f.stored]
	if n, err := file.r.ReadAt(in, f.offset); n < len(in) {
		return nil, readError(file.name, f.offset, len(in), err)
	}
	out, wrong := d.decode(f, in)
	if out == nil {
		return nil, corrupt(file.name, f.offset, "%s", wrong)
	}
	return out, nil
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
