package snapshot

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The seeds are pieces of a real snapshot. More are in testdata/fuzz.

// FuzzManifest gives the parser manifests with a right checksum. What the parser takes must be written again bit
// for bit.
func FuzzManifest(f *testing.F) {
	for _, sn := range small {
		dir, _ := sn.make(f)
		data, err := os.ReadFile(filepath.Join(dir, ManifestName))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data[:len(data)-manifestSum])
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		sum := sha256.Sum256(body)
		file := append(bytes.Clone(body), sum[:]...)
		m, ps, err := decodeManifest(file)
		if err != nil {
			if !isTyped(err) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		again, err := encodeManifest(m, ps)
		if err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		if !bytes.Equal(again, file) {
			t.Fatal("what was read is written in another way")
		}
	})
}

// FuzzJSON is FuzzManifest for the document alone. Without the lengths around it, mutations reach it more easily.
func FuzzJSON(f *testing.F) {
	for _, sn := range small {
		dir, _ := sn.make(f)
		s, err := Open(dir)
		if err != nil {
			f.Fatal(err)
		}
		doc, err := s.Manifest().encodeJSON()
		s.Close()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(doc)
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		m, err := decodeJSON(doc)
		if err != nil {
			if !isTyped(err) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		if again, err := m.encodeJSON(); err != nil || !bytes.Equal(again, doc) {
			t.Fatal("what was read is written in another way")
		}
	})
}

// FuzzLeaf gives the parser leaves with a right checksum.
func FuzzLeaf(f *testing.F) {
	l := &Leaf{frames: []Frame{
		{offset: fileHeader, stored: 100, crc: 1, file: 1, codec: codecZstd, pages: 2},
		{offset: fileHeader + 100, stored: guestmem.PageSize, crc: 2, file: 4, codec: codecRaw, pages: 1},
	}}
	l.setPage(0, 0, 0)
	l.setPage(7, 0, 1)
	l.setPage(8, 1, 0)
	f.Add(encodeLeaf(nil, 3, l), uint16(ChunkPages))
	f.Add(encodeLeaf(nil, 3, l), uint16(8))
	const size = 1 << 20
	f.Fuzz(func(t *testing.T, b []byte, pages uint16) {
		n := int(pages%ChunkPages) + 1
		l := new(Leaf)
		wrong := decodeLeaf(l, b, 3, n, func(file uint32) int64 {
			if file == 1 || file == 4 {
				return size
			}
			return 0
		})
		if wrong != "" {
			return
		}
		if !bytes.Equal(encodeLeaf(nil, 3, l), b) {
			t.Fatal("what was read is written in another way")
		}
		for i := range ChunkPages {
			frame, slot, ok := l.Page(i)
			if !ok {
				continue
			}
			fr := l.Frame(frame)
			if i >= n || slot >= fr.Pages() || fr.Offset()+int64(fr.StoredBytes()) > size || fr.StoredBytes() > maxFrameBytes {
				t.Fatalf("page %d is at slot %d of %+v", i, slot, fr)
			}
		}
	})
}

// FuzzRoot opens memory with an arbitrary root and a right checksum.
func FuzzRoot(f *testing.F) {
	dir, _ := smallDelta(f)
	s, err := Open(dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Close() })
	f.Add(bytes.Clone(s.Memory().root[:3*rootEntry]))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := newMemoryIndex(s.Memory().slots, s.Memory().files)
		m.root = make([]byte, len(s.Memory().root))
		copy(m.root, b)
		if err := m.checkRoot(); err != nil && !isTyped(err) {
			t.Fatalf("untyped error: %v", err)
		}
		d, err := NewDecoder()
		if err != nil {
			t.Fatal(err)
		}
		defer d.Release()
		p := make([]byte, guestmem.PageSize)
		for c := range min(len(b)/rootEntry+1, m.Chunks()) {
			if err := m.ReadPage(uint64(c)*ChunkPages, p, d); err != nil && !isTyped(err) {
				t.Fatalf("untyped error: %v", err)
			}
		}
	})
}

// FuzzFrame gives the decoder frames with a right checksum.
func FuzzFrame(f *testing.F) {
	c, err := newCompressor(frameLevel)
	if err != nil {
		f.Fatal(err)
	}
	raw := make([]byte, 2*guestmem.PageSize)
	copy(raw[100:], "a little text")
	zipped, _ := c.append(nil, raw)
	f.Add(zipped, uint8(1), uint8(2))
	f.Add(raw, uint8(0), uint8(2))
	f.Add([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xe0, 0, 0, 0, 0, 1, 0, 0, 0}, uint8(1), uint8(64))
	f.Fuzz(func(t *testing.T, in []byte, codec, pages uint8) {
		// The index parser lets no others through.
		pages = pages%MaxFramePages + 1
		if len(in) > int(pages)*guestmem.PageSize || codec > 1 || codec == codecRaw && len(in) != int(pages)*guestmem.PageSize {
			return
		}
		d, err := NewDecoder()
		if err != nil {
			t.Fatal(err)
		}
		defer d.Release()
		fr := Frame{stored: uint32(len(in)), crc: checksum(in), file: 1, codec: codec, pages: pages}
		if out, wrong := d.decode(&fr, in); wrong == "" && len(out) != int(pages)*guestmem.PageSize {
			t.Fatalf("%d bytes for %d pages", len(out), pages)
		}
		fr.crc ^= 1
		if _, wrong := d.decode(&fr, in); wrong == "" {
			t.Fatal("a wrong checksum was taken")
		}
	})
}

// FuzzManifestHeader tests the lengths that the parser must believe before it can verify the checksum.
func FuzzManifestHeader(f *testing.F) {
	h := append([]byte(manifestMagic), make([]byte, manifestHeader-8)...)
	binary.LittleEndian.PutUint32(h[8:], Version)
	f.Add(h)
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := manifestSize(b)
		if err != nil && !isTyped(err) {
			t.Fatalf("untyped error: %v", err)
		}
		if n > manifestHeader+MaxManifestJSON+MaxStateBytes+manifestSum {
			t.Fatalf("%d bytes would be read", n)
		}
	})
}
