package disk

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
)

// Limits and units of the format. FORMAT.md describes it byte by byte.
const (
	// BlockSize is the unit of allocation in bytes. It is the block size of the guest's ext4 and the page size of
	// both kernels, so a guest's write never needs a copy from a lower layer. It is also the smallest hole that
	// host file systems can punch.
	BlockSize = 4096
	// MaxSize bounds a disk, in bytes. The layer file, with header and map before the data and the table after it,
	// must be smaller than ext4's largest file (16 TiB).
	MaxSize = 8 << 40
	// MaxLayers bounds a stack, because each layer costs a file descriptor. Open and Fork accept fewer than
	// MaxLayers.
	MaxLayers = 16384

	formatVersion = 1
	magic         = "DROWSEDL"

	headerSize  = 512                     // one sector: the unit that a device writes atomically
	slotStride  = 4096                    // two header slots, at 0 and 4096
	mapOffset   = 2 * 4096                // the map follows the slots
	headerSpace = slotStride + headerSize // bytes read to find the header
	maxRun      = 1<<30 - 1               // blocks in one table entry
	tableEntry  = 8                       // bytes
	bootIDSize  = 16                      // bytes
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// ID names a layer: 16 random bytes.
type ID [16]byte

// String returns the ID as 32 hexadecimal digits.
func (id ID) String() string { return hex.EncodeToString(id[:]) }

// MarshalText returns the text of String, so that an ID is a string in JSON.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText parses the text of MarshalText.
func (id *ID) UnmarshalText(p []byte) error {
	if len(p) != 2*len(id) {
		return fmt.Errorf("layer id %q: want 32 hexadecimal digits", p)
	}
	if _, err := hex.Decode(id[:], p); err != nil {
		return fmt.Errorf("layer id %q: %w", p, err)
	}
	return nil
}

func newID() (id ID) {
	_, _ = rand.Read(id[:]) // documented never to fail
	return id
}

// State is the stage of a layer between being written and being shared.
type State uint32

// The states of a layer.
const (
	StateOpen    State = 1 // writable top; the map is authoritative
	StateFrozen  State = 2 // never written again, but maybe not durable; the map is authoritative
	StateSealed  State = 3 // durable; the table is authoritative
	StateMerging State = 4 // being overwritten by the layer above; usable only below that one
)

func (s State) String() string {
	switch s {
	case StateOpen:
		return "open"
	case StateFrozen:
		return "frozen"
	case StateSealed:
		return "sealed"
	case StateMerging:
		return "merging"
	}
	return fmt.Sprintf("state %d", uint32(s))
}

const (
	flagSyncFailed = 1 << 1 // an fsync failed: pending blocks cannot be trusted
	flagSinking    = 1 << 2 // being merged into the layer below, which relies on this file
	knownFlags     = flagSyncFailed | flagSinking
)

// Block states in the map of a layer, one byte a block.
const (
	blockAbsent        = 0 // look below
	blockData          = 1 // in this layer, durable as of the map's own durability
	blockZero          = 2 // zeros, whatever lies below
	blockPendingAbsent = 3 // in this layer but not flushed; after a power loss: absent
	blockPendingZero   = 4 // in this layer but not flushed; after a power loss: zero
	blockStates        = 5
)

// header is the decoded header of a layer.
type header struct {
	size     int64 // of the disk, bytes
	id       ID
	parent   ID // zero: none
	gen      uint64
	state    State
	flags    uint32
	tableOff int64
	tableLen int64 // bytes
	tableCRC uint32
	boot     [bootIDSize]byte // boot of the host on which the map was written
	merge    ID               // merging: the layer above; sealed: see LayerInfo.Merged, or zero
}

func (h *header) blocks() int64 { return h.size / BlockSize }

// dataOffset returns the offset of block 0 in the file.
func (h *header) dataOffset() int64 {
	return (mapOffset + h.blocks() + BlockSize - 1) / BlockSize * BlockSize
}

// endOfData returns the file length of a layer without a table.
func (h *header) endOfData() int64 { return h.dataOffset() + h.size }

func checkSize(size int64) error {
	if size <= 0 || size > MaxSize || size%BlockSize != 0 {
		return fmt.Errorf("%w: %d bytes; give a multiple of %d up to %d", ErrSize, size, BlockSize, int64(MaxSize))
	}
	return nil
}

// encode writes the header into p, which has headerSize bytes.
func (h *header) encode(p []byte) {
	le := binary.LittleEndian
	clear(p[:headerSize])
	copy(p, magic)
	le.PutUint32(p[8:], formatVersion)
	le.PutUint32(p[12:], BlockSize)
	le.PutUint64(p[16:], uint64(h.size))
	copy(p[24:40], h.id[:])
	copy(p[40:56], h.parent[:])
	le.PutUint64(p[56:], h.gen)
	le.PutUint32(p[64:], uint32(h.state))
	le.PutUint32(p[68:], h.flags)
	le.PutUint64(p[72:], uint64(h.tableOff))
	le.PutUint64(p[80:], uint64(h.tableLen))
	le.PutUint32(p[88:], h.tableCRC)
	copy(p[96:112], h.boot[:])
	copy(p[112:128], h.merge[:])
	le.PutUint32(p[508:], crc32.Checksum(p[:508], crcTable))
}

// decodeSlot reads one header slot of headerSize bytes.
func decodeSlot(p []byte) (h header, err error) {
	le := binary.LittleEndian
	if string(p[:8]) != magic {
		return h, fmt.Errorf("%w: not a drowse disk layer (no magic)", ErrCorrupt)
	}
	if got, want := crc32.Checksum(p[:508], crcTable), le.Uint32(p[508:]); got != want {
		return h, fmt.Errorf("%w: header checksum is %#08x, stored %#08x", ErrCorrupt, got, want)
	}
	if v := le.Uint32(p[8:]); v != formatVersion {
		return h, fmt.Errorf("%w: %d; this build reads version %d", ErrVersion, v, formatVersion)
	}
	if bs := le.Uint32(p[12:]); bs != BlockSize {
		return h, fmt.Errorf("%w: block size %d; this build reads %d", ErrVersion, bs, BlockSize)
	}
	h.size = int64(le.Uint64(p[16:]))
	copy(h.id[:], p[24:40])
	copy(h.parent[:], p[40:56])
	h.gen = le.Uint64(p[56:])
	h.state = State(le.Uint32(p[64:]))
	h.flags = le.Uint32(p[68:])
	h.tableOff = int64(le.Uint64(p[72:]))
	h.tableLen = int64(le.Uint64(p[80:]))
	h.tableCRC = le.Uint32(p[88:])
	copy(h.boot[:], p[96:112])
	copy(h.merge[:], p[112:128])
	return h, h.check()
}

// check returns an error if a decoded header breaks a rule of the format.
func (h *header) check() error {
	switch {
	case checkSize(h.size) != nil:
		return fmt.Errorf("%w: %w", ErrCorrupt, checkSize(h.size))
	case h.id == ID{}:
		return fmt.Errorf("%w: no layer id", ErrCorrupt)
	case h.id == h.parent:
		return fmt.Errorf("%w: layer %v is its own parent", ErrCorrupt, h.id)
	case h.flags&^knownFlags != 0:
		return fmt.Errorf("%w: unknown flags %#x", ErrVersion, h.flags&^knownFlags)
	}
	switch h.state {
	case StateOpen, StateFrozen:
		if h.tableOff != 0 || h.tableLen != 0 || h.tableCRC != 0 || h.merge != (ID{}) {
			return fmt.Errorf("%w: %v layer with a table", ErrCorrupt, h.state)
		}
	case StateSealed, StateMerging:
		if h.tableOff < h.endOfData() || h.tableOff > 2*MaxSize || h.tableLen < 0 ||
			h.tableLen%tableEntry != 0 || h.tableLen > h.blocks()*tableEntry {
			return fmt.Errorf("%w: table of %d bytes at %d", ErrCorrupt, h.tableLen, h.tableOff)
		}
		if h.state == StateMerging && h.merge == (ID{}) {
			return fmt.Errorf("%w: merging with no layer", ErrCorrupt)
		}
	default:
		return fmt.Errorf("%w: unknown %v", ErrVersion, h.state)
	}
	return nil
}

// decodeHeader returns the newer of the two slots. p holds the first headerSpace bytes of the file, fewer if the
// file is shorter. One damaged slot is the trace of an interrupted header write; decodeHeader then returns the
// other one.
func decodeHeader(p []byte) (header, error) {
	if len(p) < headerSpace {
		return header{}, fmt.Errorf("%w: %d bytes, too short for a header", ErrTruncated, len(p))
	}
	a, errA := decodeSlot(p[:headerSize])
	b, errB := decodeSlot(p[slotStride : slotStride+headerSize])
	switch {
	case errors.Is(errA, ErrVersion): // maybe the newer one: the other slot cannot be trusted
		return header{}, errA
	case errors.Is(errB, ErrVersion):
		return header{}, errB
	case errA != nil && errB != nil:
		return header{}, errA
	case errA != nil:
		return b, nil
	case errB != nil, a.gen > b.gen:
		return a, nil
	}
	return b, nil
}

// run is a range of blocks in one state: blockData or blockZero or, from a map, a pending state.
type run struct {
	start, count int64
	state        byte
}

// appendEntry encodes a run as table entries of at most maxRun blocks.
func appendEntry(p []byte, r run) []byte {
	for r.count > 0 {
		n := min(r.count, maxRun)
		p = binary.LittleEndian.AppendUint32(p, uint32(r.start))
		p = binary.LittleEndian.AppendUint32(p, uint32(n)|uint32(r.state)<<30)
		r.start, r.count = r.start+n, r.count-n
	}
	return p
}

// tableDecoder decodes a table piece by piece.
type tableDecoder struct {
	blocks  int64 // of the disk
	end     int64 // of the last run
	entries int
}

func (d *tableDecoder) decode(p []byte, each func(run)) error {
	if len(p)%tableEntry != 0 {
		return fmt.Errorf("%w: table of %d bytes", ErrCorrupt, len(p))
	}
	for i := 0; i < len(p); i += tableEntry {
		v := binary.LittleEndian.Uint32(p[i+4:])
		r := run{start: int64(binary.LittleEndian.Uint32(p[i:])), count: int64(v & maxRun), state: byte(v >> 30)}
		if r.start < d.end || r.count == 0 || r.start+r.count > d.blocks || (r.state != blockData && r.state != blockZero) {
			return fmt.Errorf("%w: table entry %d (blocks %d+%d, state %d)", ErrCorrupt, d.entries, r.start, r.count, r.state)
		}
		d.end = r.start + r.count
		d.entries++
		each(r)
	}
	return nil
}

// decodeMap calls each for the runs of non-absent blocks in a piece of a map that starts at block first.
func decodeMap(p []byte, first int64, each func(run)) error {
	for i := 0; i < len(p); {
		s := p[i]
		if s >= blockStates {
			return fmt.Errorf("%w: block %d has state %d in the map", ErrCorrupt, first+int64(i), s)
		}
		j := i + 1
		for j < len(p) && p[j] == s {
			j++
		}
		if s != blockAbsent {
			each(run{start: first + int64(i), count: int64(j - i), state: s})
		}
		i = j
	}
	return nil
}
