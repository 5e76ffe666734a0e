package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

const maxBlocks = MaxSize / 4096

func FuzzDecodeHeader(f *testing.F) {
	add := func(a, b *header) {
		p := make([]byte, headerSpace)
		a.encode(p)
		if b != nil {
			b.encode(p[slotStride:])
		}
		// The corpus has only the two slots: the decoder never reads what is between them.
		f.Add(append(bytes.Clone(p[:headerSize]), p[slotStride:slotStride+headerSize]...), true)
	}
	open := &header{size: mib, id: ID{1}, state: StateOpen}
	sealed := &header{size: mib, id: ID{1}, parent: ID{2}, gen: 1, state: StateSealed, tableOff: 2 * mib, tableLen: 8}
	merging := &header{size: mib, id: ID{1}, gen: 2, state: StateMerging, tableOff: 2 * mib, merge: ID{3}}
	add(open, nil)
	add(open, sealed)
	add(merging, sealed)
	// With resum the test makes the checksums right, so that mutations reach the rules behind them.
	f.Fuzz(func(t *testing.T, slots []byte, resum bool) {
		if len(slots) < 2*headerSize {
			if _, err := decodeHeader(slots); err == nil {
				t.Fatal("a short header was accepted")
			}
			return
		}
		p := make([]byte, headerSpace)
		copy(p, slots[:headerSize])
		copy(p[slotStride:], slots[headerSize:2*headerSize])
		for _, slot := range [][]byte{p[:headerSize], p[slotStride:]} {
			if resum {
				binary.LittleEndian.PutUint32(slot[508:], crc32.Checksum(slot[:508], crcTable))
			}
		}
		h, err := decodeHeader(p)
		if err != nil {
			return
		}
		// An accepted header obeys the rules and survives another write.
		if err := h.check(); err != nil {
			t.Fatal(err)
		}
		if h.endOfData() <= 0 || h.tableOff+h.tableLen < 0 || h.tableLen > maxBlocks*tableEntry {
			t.Fatalf("header overflows: %+v", h)
		}
		var again [headerSize]byte
		h.encode(again[:])
		got, err := decodeSlot(again[:])
		if err != nil || got != h {
			t.Fatalf("header reads back as %+v (%v), want %+v", got, err, h)
		}
	})
}

func FuzzDecodeTable(f *testing.F) {
	f.Add([]byte{}, int64(1))
	f.Add(appendEntry(appendEntry(nil, run{0, 3, blockData}), run{5, 1, blockZero}), int64(6))
	f.Add(appendEntry(nil, run{0, maxRun + 7, blockData}), int64(maxBlocks))
	f.Fuzz(func(t *testing.T, p []byte, blocks int64) {
		if blocks <= 0 || blocks > maxBlocks {
			return
		}
		var again []byte
		var end int64
		err := decodeTable(p, blocks, func(r run) {
			if r.start < end || r.count <= 0 || r.start+r.count > blocks {
				t.Fatalf("run %+v after block %d of %d", r, end, blocks)
			}
			end = r.start + r.count
			again = appendEntry(again, r)
		})
		if err == nil && !bytes.Equal(again, p) {
			t.Fatalf("table reads back as %x, want %x", again, p)
		}
	})
}

func FuzzDecodeMap(f *testing.F) {
	f.Add([]byte{0, 1, 1, 2, 3, 3, 4, 0, 0})
	f.Add([]byte{5})
	f.Fuzz(func(t *testing.T, p []byte) {
		again := make([]byte, len(p))
		err := decodeMap(p, 100, func(r run) {
			for i := range r.count {
				again[r.start-100+i] = r.state
			}
		})
		if err == nil && !bytes.Equal(again, p) {
			t.Fatalf("map reads back as %x, want %x", again, p)
		}
	})
}

// FuzzOpenLayer opens a small layer in which the fuzzer has overwritten some bytes, including header and
// checksums. The result must be an error or a disk that can be read to its end.
func FuzzOpenLayer(f *testing.F) {
	dir := f.TempDir()
	s, err := Create(filepath.Join(dir, "0"), 4*BlockSize)
	must(f, err)
	d, err := Open(s, Options{})
	must(f, err)
	mustWrite(f, d, 0, fillBlock(1, 2*BlockSize))
	must(f, d.CloseSealed())
	file, err := os.ReadFile(s.Top())
	must(f, err)
	h, err := decodeHeader(file)
	must(f, err)
	f.Add(uint16(0), []byte{}, uint32(StateSealed), h.tableOff, h.tableLen)
	f.Add(uint16(0), []byte{}, uint32(StateOpen), int64(0), int64(0))
	f.Add(uint16(mapOffset), []byte{1, 2, 3, 4}, uint32(StateFrozen), int64(0), int64(0))
	f.Add(uint16(mapOffset), []byte{9}, uint32(StateFrozen), int64(0), int64(0))
	f.Add(uint16(100), []byte{1}, uint32(StateMerging), h.tableOff, h.tableLen+8)
	f.Fuzz(func(t *testing.T, off uint16, patch []byte, state uint32, tableOff, tableLen int64) {
		p := bytes.Clone(file)
		h := h
		h.state, h.tableOff, h.tableLen = State(state), tableOff, tableLen
		if h.state != StateSealed && h.state != StateMerging {
			h.tableCRC = 0
		}
		h.encode(p)
		h.encode(p[slotStride:])
		copy(p[min(int(off), len(p)):], patch)
		path := filepath.Join(t.TempDir(), "l")
		must(t, os.WriteFile(path, p, 0o600))
		s := Stack{Layers: []string{path}}
		for _, o := range []Options{{ReadOnly: true}, {}} {
			d, err := Open(s, o)
			if err != nil {
				continue
			}
			if _, err := d.ReadAt(make([]byte, d.Size()), 0); err != nil {
				t.Errorf("read: %v", err)
			}
			if !o.ReadOnly {
				mustWrite(t, d, 512, fillBlock(3, 512))
				wantBytes(t, d, 512, fillBlock(3, 512))
			}
			must(t, d.Close())
		}
	})
}

// FuzzUnpack gives streams to Unpack beside a file that must not change. Unpack refuses a stream and leaves
// nothing behind, or makes a file that has the stream's extents and zeros, holds no more of the disk than came,
// and packs again to the same content.
func FuzzUnpack(f *testing.F) {
	// Use memory if possible: Unpack syncs.
	dir, err := os.MkdirTemp("/dev/shm", "drowse-unpack-")
	if err != nil {
		dir = f.TempDir()
	}
	f.Cleanup(func() { os.RemoveAll(dir) })
	pack := func(size uint64, extents [][2]uint64, data string) []byte {
		b := append([]byte(packMagic), make([]byte, 16)...)
		binary.LittleEndian.PutUint32(b[8:], packVersion)
		binary.LittleEndian.PutUint32(b[12:], uint32(len(extents)))
		binary.LittleEndian.PutUint64(b[16:], size)
		for _, e := range extents {
			b = binary.LittleEndian.AppendUint64(b, e[0])
			b = binary.LittleEndian.AppendUint64(b, e[1])
		}
		return append(b, data...)
	}
	f.Add(pack(0, nil, ""))
	f.Add(pack(3*BlockSize, [][2]uint64{{0, 5}, {2 * BlockSize, 3}}, "firstend"))
	f.Add(pack(1<<40, [][2]uint64{{1<<40 - 3, 3}}, "far"))
	f.Add(pack(100, [][2]uint64{{90, 11}}, "beyond the end"))
	f.Add(pack(100, [][2]uint64{{0, 1 << 63}, {1 << 63, 1 << 63}}, "overflow"))
	f.Add(pack(100, [][2]uint64{{10, 5}, {14, 5}}, "overlapping"))
	f.Add(pack(1<<63, nil, ""))
	f.Add(append(pack(8, [][2]uint64{{0, 8}}, "12345678"), 'x'))
	beside := filepath.Join(dir, "beside")
	must(f, os.WriteFile(beside, []byte("another layer"), 0o600))
	path := filepath.Join(dir, "layer")
	f.Fuzz(func(t *testing.T, stream []byte) {
		defer os.Remove(path)
		p, herr := readPacked(bytes.NewReader(stream))
		if herr == nil && packExtent*len(p.extents) > len(stream) {
			t.Fatalf("%d extents of %d bytes", len(p.extents), len(stream))
		}
		err := Unpack(t.Context(), bytes.NewReader(stream), path)
		if ents, derr := os.ReadDir(dir); derr != nil || len(ents) != 1 && err != nil || len(ents) > 2 {
			t.Fatalf("after %v there is %v (%v)", err, ents, derr)
		}
		if b, berr := os.ReadFile(beside); berr != nil || string(b) != "another layer" {
			t.Fatalf("the file beside has %q (%v)", b, berr)
		}
		if err != nil {
			if herr == nil && int64(len(stream)) == p.length() && !errors.Is(err, fs.ErrInvalid) && !errors.Is(err, ErrIO) && !errors.Is(err, ErrNoSpace) {
				t.Fatalf("a whole stream is refused: %v", err)
			}
			return
		}
		file, err := os.Open(path)
		must(t, err)
		defer file.Close()
		st, err := file.Stat()
		must(t, err)
		held, err := allocated(file)
		must(t, err)
		if herr != nil || st.Size() != p.size || int64(len(stream)) != p.length() || held > int64(len(stream))+2*BlockSize*int64(len(p.extents)+1) {
			t.Fatalf("%d bytes became a file of %d that holds %d (%v)", len(stream), st.Size(), held, herr)
		}
		at := packHeader + packExtent*len(p.extents)
		for _, e := range p.extents {
			got := make([]byte, e.length)
			if _, err := file.ReadAt(got, e.off); err != nil || !bytes.Equal(got, stream[at:at+int(e.length)]) {
				t.Fatalf("at %d there is %q (%v)", e.off, got, err)
			}
			at += int(e.length)
		}
		if held > 1<<20 {
			return
		}
		var again bytes.Buffer
		must(t, Pack(t.Context(), &again, path))
		q, err := readPacked(bytes.NewReader(again.Bytes()))
		must(t, err)
		if q.size != p.size {
			t.Fatalf("packed again it has %d bytes, not %d", q.size, p.size)
		}
		// The new packing covers what was written, with zeros around it.
		at = packHeader + packExtent*len(q.extents)
		for _, e := range q.extents {
			want := make([]byte, e.length)
			if _, err := file.ReadAt(want, e.off); err != nil || !bytes.Equal(again.Bytes()[at:at+int(e.length)], want) {
				t.Fatalf("packed again it differs at %d (%v)", e.off, err)
			}
			at += int(e.length)
		}
	})
}

// decodeTable checks a table whose checksum has been verified, and calls each for its runs in order.
func decodeTable(p []byte, blocks int64, each func(run)) error {
	d := tableDecoder{blocks: blocks}
	return d.decode(p, each)
}
