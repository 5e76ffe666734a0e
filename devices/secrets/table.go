package secrets

import "encoding/binary"

// Bounds of the secrets of one VM.
const (
	MaxSecrets = 64
	MaxName    = 64       // bytes
	MaxValue   = 64 << 10 // bytes
)

// Awaited is the size in the table of a secret whose value has not come.
const Awaited = ^uint32(0)

// The table, little-endian: version and number of entries (a byte each), and for each
// entry in the order of names its id (4 bytes), size or Awaited (4), user (4), group (4),
// permissions (2), length of the name (1) and name.
const (
	tableVersion = 1
)

func (d *Device) encodeTable() []byte {
	b := []byte{tableVersion, 0}
	for _, e := range d.entries {
		b[1]++
		b = binary.LittleEndian.AppendUint32(b, e.id)
		size := Awaited
		if e.present {
			size = uint32(len(e.value))
		}
		b = binary.LittleEndian.AppendUint32(b, size)
		b = binary.LittleEndian.AppendUint32(b, e.UID)
		b = binary.LittleEndian.AppendUint32(b, e.GID)
		b = binary.LittleEndian.AppendUint16(b, e.Mode)
		b = append(b, byte(len(e.Name)))
		b = append(b, e.Name...)
	}
	return b
}
