package freepages

import (
	"encoding/binary"
	"fmt"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Version is the version of the encoding of a Map.
const Version = 1

// Sizes of the encoding, in bytes: seven numbers of 4 bytes, then extents of four numbers
// of 8 bytes, all little-endian.
const (
	encodedHeader = 7 * 4
	encodedExtent = 4 * 8
)

// Encode returns the map as bytes, to store with a snapshot.
func (m *Map) Encode() []byte {
	b := make([]byte, 0, encodedHeader+encodedExtent*len(m.extents))
	for _, v := range []uint32{m.stride, m.refcount, m.mapcount, m.private, m.buddy, m.orders, m.levels} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	for _, e := range m.extents {
		for _, v := range []uint64{e.pfn, e.pages, uint64(e.gpa), e.va} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
	}
	return b
}

// Decode decodes the bytes of Encode, for the RAM in mem. It checks them, so they may come from any source. With
// those of another guest, Holds returns false.
func Decode(b []byte, mem *guestmem.Memory) (*Map, error) {
	bad := func(what string) (*Map, error) {
		return nil, fmt.Errorf("reading where struct pages are: %w: %s", ErrUnknown, what)
	}
	if len(b) < encodedHeader || (len(b)-encodedHeader)%encodedExtent != 0 {
		return bad(fmt.Sprintf("%d bytes", len(b)))
	}
	m := &Map{}
	for i, to := range []*uint32{&m.stride, &m.refcount, &m.mapcount, &m.private, &m.buddy, &m.orders, &m.levels} {
		*to = binary.LittleEndian.Uint32(b[4*i:])
	}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("reading where struct pages are: %w", err)
	}
	if b = b[encodedHeader:]; len(b) == 0 || len(b) > maxExtents*encodedExtent {
		return bad("the number of pieces")
	}
	const most = guestmem.MaxSize / guestmem.PageSize * 2 // page numbers, with the hole
	total := uint64(0)
	for ; len(b) > 0; b = b[encodedExtent:] {
		e := extent{
			pfn: binary.LittleEndian.Uint64(b), pages: binary.LittleEndian.Uint64(b[8:]),
			gpa: guestmem.GPA(binary.LittleEndian.Uint64(b[16:])), va: binary.LittleEndian.Uint64(b[24:]),
		}
		if e.pfn > most || e.pages == 0 || e.pages > most ||
			!mem.Contains(guestmem.GPA(e.pfn*guestmem.PageSize), e.pages*guestmem.PageSize) || !mem.Contains(e.gpa, e.pages*uint64(m.stride)) {
			return bad("a piece that is not RAM")
		}
		// Free looks at each page of each piece while the guest stands still.
		if total += e.pages; total > mem.Size()/guestmem.PageSize {
			return bad("pieces that overlap")
		}
		m.extents = append(m.extents, e)
	}
	return m, nil
}
