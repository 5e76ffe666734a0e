package boot

import "encoding/binary"

// The part of ACPI Machine Language that the DSDT needs (ACPI 20.2). Names are four characters.

func amlPkgLength(n int) []byte {
	// The length counts itself (ACPI 20.2.4).
	switch {
	case n+1 < 1<<6:
		return []byte{byte(n + 1)}
	case n+2 < 1<<12:
		n += 2
		return []byte{1<<6 | byte(n&0xf), byte(n >> 4)}
	default:
		n += 3
		return []byte{2<<6 | byte(n&0xf), byte(n >> 4), byte(n >> 12)}
	}
}

func amlBlock(op []byte, body []byte) []byte {
	out := append([]byte(nil), op...)
	out = append(out, amlPkgLength(len(body))...)
	return append(out, body...)
}

func join(parts ...[]byte) []byte {
	var out []byte
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

// amlPath encodes a name: one segment, or a root and up to two segments of four
// characters each.
func amlPath(name string) []byte {
	var out []byte
	if name[0] == '\\' {
		out, name = append(out, '\\'), name[1:]
	}
	if len(name) == 8 {
		out = append(out, 0x2e) // DualNamePrefix
	}
	return append(out, name...)
}

func amlScope(name string, body []byte) []byte {
	return amlBlock([]byte{0x10}, join(amlPath(name), body))
}

func amlDevice(name string, parts ...[]byte) []byte {
	return amlBlock([]byte{0x5b, 0x82}, join(amlPath(name), join(parts...)))
}

func amlMethod(name string, args byte, serialized bool, body []byte) []byte {
	flags := args
	if serialized {
		flags |= 1 << 3
	}
	return amlBlock([]byte{0x14}, join(amlPath(name), []byte{flags}, body))
}

func amlNotify(path string, value uint64) []byte {
	return join([]byte{0x86}, amlPath(path), amlInt(value))
}

func amlName(name string, value []byte) []byte {
	return join([]byte{0x08}, amlPath(name), value)
}

func amlString(s string) []byte {
	return append(append([]byte{0x0d}, s...), 0)
}

func amlInt(v uint64) []byte {
	le := binary.LittleEndian
	switch {
	case v == 0 || v == 1:
		return []byte{byte(v)}
	case v <= 0xff:
		return []byte{0x0a, byte(v)}
	case v <= 0xffff:
		return le.AppendUint16([]byte{0x0b}, uint16(v))
	case v <= 0xffffffff:
		return le.AppendUint32([]byte{0x0c}, uint32(v))
	}
	return le.AppendUint64([]byte{0x0e}, v)
}

func amlPackage(elements ...[]byte) []byte {
	return amlBlock([]byte{0x12}, join([]byte{byte(len(elements))}, join(elements...)))
}

// amlResources encodes a buffer with resource descriptors and an end tag (ACPI 6.4.2.9).
func amlResources(descriptors ...[]byte) []byte {
	body := append(join(descriptors...), 0x79, 0)
	return amlBlock([]byte{0x11}, join(amlInt(uint64(len(body))), body))
}

// memory32 encodes a 32-bit fixed memory range, read-write (ACPI 6.4.3.4).
func memory32(base, size uint32) []byte {
	le := binary.LittleEndian
	out := []byte{0x86, 9, 0, 1}
	out = le.AppendUint32(out, base)
	return le.AppendUint32(out, size)
}

// edge encodes an edge-triggered, active-high, exclusive interrupt (ACPI 6.4.3.6).
func edge(gsi uint32) []byte {
	const consumerEdge = 0x3
	return binary.LittleEndian.AppendUint32([]byte{0x89, 6, 0, consumerEdge, 1}, gsi)
}

// ioPorts encodes a fixed range of I/O ports with 16-bit decoding (ACPI 6.4.2.5).
func ioPorts(base uint16, n byte) []byte {
	le := binary.LittleEndian
	out := []byte{0x47, 1}
	out = le.AppendUint16(out, base)
	out = le.AppendUint16(out, base)
	return append(out, 1, n)
}

// eisaID packs an id such as PNP0501 (ACPI 19.6.36).
func eisaID(id string) uint32 {
	hex := func(c byte) uint32 {
		if c >= 'A' {
			return uint32(c-'A') + 10
		}
		return uint32(c - '0')
	}
	v := uint32(id[0]-'@')<<26 | uint32(id[1]-'@')<<21 | uint32(id[2]-'@')<<16 |
		hex(id[3])<<12 | hex(id[4])<<8 | hex(id[5])<<4 | hex(id[6])
	return v>>24 | v>>8&0xff00 | v<<8&0xff0000 | v<<24
}
