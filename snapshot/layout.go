package snapshot

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// ChunkPages is the number of pages that one leaf of the index describes: 2 MiB of RAM, as one page-table page
// maps.
const ChunkPages = 512

// MaxFramePages is the most pages that a frame may have.
const MaxFramePages = 64

// The memory file, see FORMAT.md.
const (
	memoryMagic = "DROWSEMM"
	fileHeader  = 64
	rootEntry   = 16
	leafHeader  = 8
	frameEntry  = 24
	maxLeaf     = leafHeader + ChunkPages*frameEntry + ChunkPages*2
	// maxFileSize is the bound that the 48 offset bits of a root entry set.
	maxFileSize = 1 << 48

	pagePresent = 1 << 15
	slotBits    = 6
	slotMask    = 1<<slotBits - 1
)

// Codecs of a frame.
const (
	codecRaw  = 0
	codecZstd = 1
)

// CRC-32C, because the processor computes it at more than 10 GB/s, and because it is certain to find every error
// of up to 3 bits and every burst of up to 32 in a frame. A hash finds them only very probably.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(p []byte) uint32 { return crc32.Checksum(p, castagnoli) }

func chunksOf(ram uint64) uint64 {
	return (ram/guestmem.PageSize + ChunkPages - 1) / ChunkPages
}

// encodeFileHeader returns the header of a memory file.
func encodeFileHeader(id [16]byte) []byte {
	b := make([]byte, fileHeader)
	copy(b, memoryMagic)
	binary.LittleEndian.PutUint32(b[8:], Version)
	binary.LittleEndian.PutUint32(b[12:], guestmem.PageSize)
	binary.LittleEndian.PutUint32(b[16:], ChunkPages)
	copy(b[24:40], id[:])
	binary.LittleEndian.PutUint32(b[60:], checksum(b[:60]))
	return b
}

// checkFileHeader compares b with the header that the file must have.
func checkFileHeader(b []byte, name, id string) error {
	if string(b[:8]) != memoryMagic {
		return corrupt(name, 0, "it does not begin like a memory file")
	}
	if got, want := checksum(b[:60]), binary.LittleEndian.Uint32(b[60:]); got != want {
		return corrupt(name, 0, "header checksum is %08x, the file says %08x", got, want)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != Version {
		return fmt.Errorf("%s is of format %d, this version reads format %d: %w: use the version that wrote it", name, v, Version, ErrVersion)
	}
	if got := hex.EncodeToString(b[24:40]); got != id {
		return corrupt(name, 0, "it is file %s, the manifest wants %s", got, id)
	}
	var raw [16]byte
	copy(raw[:], b[24:40])
	if string(encodeFileHeader(raw)) != string(b) {
		return corrupt(name, 0, "it has other units than its manifest")
	}
	return nil
}

// rootRef is an entry of the root: the place of a chunk's leaf. The zero value means a chunk of zeros.
type rootRef struct {
	file   uint32
	crc    uint32
	offset int64
	frames int
}

func decodeRoot(b []byte) rootRef {
	o := binary.LittleEndian.Uint64(b[8:])
	return rootRef{
		file:   binary.LittleEndian.Uint32(b),
		crc:    binary.LittleEndian.Uint32(b[4:]),
		offset: int64(o & (maxFileSize - 1)),
		frames: int(o >> 48),
	}
}

func (r rootRef) put(b []byte) {
	binary.LittleEndian.PutUint32(b, r.file)
	binary.LittleEndian.PutUint32(b[4:], r.crc)
	binary.LittleEndian.PutUint64(b[8:], uint64(r.offset)|uint64(r.frames)<<48)
}

func (r rootRef) length() int { return leafHeader + r.frames*frameEntry + ChunkPages*2 }

// Frame says where and how a group of pages is stored.
type Frame struct {
	offset int64
	stored uint32
	crc    uint32
	file   uint32
	codec  uint8
	pages  uint8
}

// Pages returns the number of pages in the frame.
func (f *Frame) Pages() int { return int(f.pages) }

// StoredBytes returns the size of the frame on disk.
func (f *Frame) StoredBytes() int { return int(f.stored) }

// Offset returns where the frame starts in its file, in bytes.
func (f *Frame) Offset() int64 { return f.offset }

// File returns the number of the frame's file in the manifest.
func (f *Frame) File() uint32 { return f.file }

// Checksum returns the CRC-32C of the frame as stored on disk.
func (f *Frame) Checksum() uint32 { return f.crc }

func (f *Frame) put(b []byte) {
	binary.LittleEndian.PutUint64(b, uint64(f.offset))
	binary.LittleEndian.PutUint32(b[8:], f.stored)
	binary.LittleEndian.PutUint32(b[12:], f.crc)
	binary.LittleEndian.PutUint32(b[16:], f.file)
	b[20], b[21] = f.codec, f.pages
	b[22], b[23] = 0, 0
}

// A Leaf is the index of one chunk. It maps each page to a frame and a position in it. A leaf does not change.
type Leaf struct {
	frames []Frame
	pages  [ChunkPages]uint16
}

// NumFrames returns the number of frames that hold the chunk's pages.
func (l *Leaf) NumFrames() int { return len(l.frames) }

// Frame returns the i-th frame.
func (l *Leaf) Frame(i int) *Frame { return &l.frames[i] }

// Page returns where page i (below ChunkPages) of the chunk is: at position slot of a frame. If ok is false, the
// page is zeros.
func (l *Leaf) Page(i int) (frame, slot int, ok bool) {
	e := l.pages[i]
	return int(e&^pagePresent) >> slotBits, int(e & slotMask), e&pagePresent != 0
}

func (l *Leaf) setPage(i, frame, slot int) {
	l.pages[i] = pagePresent | uint16(frame)<<slotBits | uint16(slot)
}

// leafFrames returns the number of frames in an encoded leaf.
func leafFrames(b []byte) int { return int(binary.LittleEndian.Uint16(b[4:])) }

// encodeLeaf appends the leaf of a chunk to b.
func encodeLeaf(b []byte, chunk uint64, l *Leaf) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(chunk))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(l.frames)))
	b = binary.LittleEndian.AppendUint16(b, 0)
	for i := range l.frames {
		b = append(b, make([]byte, frameEntry)...)
		l.frames[i].put(b[len(b)-frameEntry:])
	}
	for _, e := range l.pages {
		b = binary.LittleEndian.AppendUint16(b, e)
	}
	return b
}

// decodeLeaf fills l, reusing its memory, and checks everything in b that can be checked without reading frames.
// end(file) returns where the frames of a memory file end, 0 if the leaf may not refer to it. pages is the number
// of pages in the chunk. If something is wrong, decodeLeaf returns what as a text, and l is invalid.
func decodeLeaf(l *Leaf, b []byte, chunk uint64, pages int, end func(file uint32) int64) string {
	if len(b) < leafHeader || uint64(binary.LittleEndian.Uint32(b)) != chunk || binary.LittleEndian.Uint16(b[6:]) != 0 {
		return "it is the leaf of another chunk"
	}
	n := int(binary.LittleEndian.Uint16(b[4:]))
	if n < 1 || n > ChunkPages || len(b) != leafHeader+n*frameEntry+ChunkPages*2 {
		return "it states an impossible number of frames"
	}
	l.frames = slices.Grow(l.frames[:0], n)[:n]
	b = b[leafHeader:]
	for i := range l.frames {
		f := &l.frames[i]
		off := binary.LittleEndian.Uint64(b)
		f.stored = binary.LittleEndian.Uint32(b[8:])
		f.crc = binary.LittleEndian.Uint32(b[12:])
		f.file = binary.LittleEndian.Uint32(b[16:])
		f.codec, f.pages = b[20], b[21]
		if b[22] != 0 || b[23] != 0 {
			return "it has bits that this format does not know"
		}
		b = b[frameEntry:]
		end := end(f.file)
		if f.pages < 1 || f.pages > MaxFramePages || off < fileHeader || f.stored < 1 ||
			off > uint64(end) || uint64(f.stored) > uint64(end)-off {
			return "a frame is outside its file or of an impossible length"
		}
		f.offset = int64(off)
		raw := uint32(f.pages) * guestmem.PageSize
		if !(f.codec == codecRaw && f.stored == raw || f.codec == codecZstd && f.stored < raw) {
			return "a frame has an impossible length or an unknown codec"
		}
	}
	var seen [ChunkPages]uint64
	for i := range l.pages {
		e := binary.LittleEndian.Uint16(b[2*i:])
		l.pages[i] = e
		if e == 0 {
			continue
		}
		frame, slot, ok := l.Page(i)
		if !ok || i >= pages || frame >= n || slot >= int(l.frames[frame].pages) || seen[frame]&(1<<slot) != 0 {
			return "a page is in an impossible place"
		}
		seen[frame] |= 1 << slot
	}
	for i := range n {
		if seen[i] == 0 {
			return "a frame has no pages"
		}
	}
	return ""
}

// live returns how many pages of each frame the leaf refers to.
func (l *Leaf) live() (n [ChunkPages]uint16) {
	for i := range l.pages {
		if frame, _, ok := l.Page(i); ok {
			n[frame]++
		}
	}
	return n
}

func pagesOf(slots []Slot) uint64 {
	var n uint64
	for _, s := range slots {
		n += s.Size
	}
	return n / guestmem.PageSize
}

// chunkOf copies the bits of a chunk out of a set and reports whether any is set.
func chunkOf(s *guestmem.PageSet, n uint64, bits *pageBits) bool {
	*bits = pageBits{}
	copy(bits[:], s.Words()[n*(ChunkPages/64):])
	return *bits != pageBits{}
}
