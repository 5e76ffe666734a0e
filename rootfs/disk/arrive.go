package disk

import (
	"encoding/binary"
	"fmt"
	"io"
	"sort"
)

// Packed knows of each byte that Pack writes for a layer where it is in the layer's file, for a reader that gets them
// in any order. Its methods may be called from any goroutine.
type Packed struct{ p *packed }

// PackedHead returns how many bytes ReadPacked needs of the beginning of a packed layer, as far as b, which begins it,
// says.
func PackedHead(b []byte) int64 {
	if len(b) < packHeader {
		return packHeader
	}
	return packHeader + packExtent*int64(min(binary.LittleEndian.Uint32(b[12:]), maxPackExtents))
}

// ReadPacked reads the beginning of a packed layer of size bytes. It fails like Unpack.
func ReadPacked(r io.Reader, size int64) (*Packed, error) {
	p, err := readPacked(r)
	if err == nil && p.length() != size {
		err = fmt.Errorf("%w: it has %d bytes, its extents %d", ErrCorrupt, size, p.length())
	}
	if err != nil {
		return nil, fmt.Errorf("unpacking a layer: %w", err)
	}
	return &Packed{p}, nil
}

// FileSize is the length of the layer's file, in bytes.
func (p *Packed) FileSize() int64 { return p.p.size }

// Beginnings are the ranges of a sealed layer's file, as offsets and lengths, that Verify reads: the header and, when
// that is there, the table.
func Beginnings(header io.ReaderAt) (ranges [][2]int64) {
	ranges = [][2]int64{{0, headerSpace}}
	b := make([]byte, headerSpace)
	if _, err := header.ReadAt(b, 0); err != nil {
		return ranges
	}
	if h, err := decodeHeader(b); err == nil && h.tableLen > 0 {
		ranges = append(ranges, [2]int64{h.tableOff, h.tableLen})
	}
	return ranges
}

// Range returns which packed bytes [first, end) a range of the layer's file has; none if it is all holes.
func (p *Packed) Range(off, n int64) (first, end int64) {
	e := p.p.extents
	i := sort.Search(len(e), func(i int) bool { return e[i].off+e[i].length > off })
	j := sort.Search(len(e), func(j int) bool { return e[j].off >= off+n })
	if i >= j {
		return 0, 0
	}
	last := e[j-1]
	return p.p.headLen() + e[i].at + max(off-e[i].off, 0), p.p.headLen() + last.at + min(last.length, off+n-last.off)
}

// each calls do with the pieces of the packed bytes [at, at+n): their place among these, and in the layer's file, or -1
// for those that the file lacks.
func (p *Packed) each(at int64, b []byte, do func(piece []byte, off int64) error) error {
	head := p.p.headLen()
	if n := min(int64(len(b)), max(head-at, 0)); n > 0 {
		if err := do(b[:n], -1); err != nil {
			return err
		}
		at, b = at+n, b[n:]
	}
	at -= head
	e := p.p.extents
	for i := sort.Search(len(e), func(i int) bool { return e[i].at+e[i].length > at }); len(b) > 0; i++ {
		if i == len(e) {
			return fmt.Errorf("%w: %d bytes behind its extents", ErrTruncated, len(b))
		}
		n := min(int64(len(b)), e[i].at+e[i].length-at)
		if err := do(b[:n], e[i].off+at-e[i].at); err != nil {
			return err
		}
		at, b = at+n, b[n:]
	}
	return nil
}

// WriteAt writes the packed bytes b, which begin at at, to their places in the layer's file.
func (p *Packed) WriteAt(f io.WriterAt, b []byte, at int64) error {
	return p.each(at, b, func(piece []byte, off int64) error {
		if off < 0 {
			return nil
		}
		_, err := f.WriteAt(piece, off)
		return ioError("write a layer", err)
	})
}

// ReadAt is the reverse of WriteAt: it fills b.
func (p *Packed) ReadAt(f io.ReaderAt, b []byte, at int64) error {
	begin := at
	return p.each(at, b, func(piece []byte, off int64) error {
		if off < 0 {
			copy(piece, p.p.head()[begin:])
			return nil
		}
		_, err := f.ReadAt(piece, off)
		return ioError("read a layer", err)
	})
}
