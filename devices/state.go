package devices

import (
	"encoding/binary"
	"fmt"
)

// Encoder writes the Data of a [Payload]: little-endian integers, and byte strings after their length (a 32-bit
// integer). The zero value is ready.
type Encoder struct{ b []byte }

// Data returns what has been written.
func (e *Encoder) Data() []byte { return e.b }

// Payload returns what has been written, as the state of a kind of device.
func (e *Encoder) Payload(kind string, version uint32) Payload {
	return Payload{Kind: kind, Version: version, Data: e.b}
}

// Bool writes one byte, 0 or 1.
func (e *Encoder) Bool(v bool) {
	if v {
		e.Uint8(1)
	} else {
		e.Uint8(0)
	}
}

// Uint8 writes one byte.
func (e *Encoder) Uint8(v uint8) { e.b = append(e.b, v) }

// Uint16 writes two bytes.
func (e *Encoder) Uint16(v uint16) { e.b = binary.LittleEndian.AppendUint16(e.b, v) }

// Uint32 writes four bytes.
func (e *Encoder) Uint32(v uint32) { e.b = binary.LittleEndian.AppendUint32(e.b, v) }

// Uint64 writes eight bytes.
func (e *Encoder) Uint64(v uint64) { e.b = binary.LittleEndian.AppendUint64(e.b, v) }

// Bytes writes the length of p and then p.
func (e *Encoder) Bytes(p []byte) {
	e.Uint32(uint32(len(p)))
	e.b = append(e.b, p...)
}

// Decoder reads what an Encoder has written. The first error sticks: later reads return zeros, and Finish returns
// the error. So a caller can read a state whole and check it once.
type Decoder struct {
	b    []byte
	err  error
	kind string // "" unless it decodes a Payload
}

// NewDecoder returns a decoder of data, which must not change meanwhile.
func NewDecoder(data []byte) *Decoder { return &Decoder{b: data} }

// Decode returns a decoder of p. Its first error is that of Check, if any.
func (p Payload) Decode(kind string, version uint32) *Decoder {
	return &Decoder{b: p.Data, err: p.Check(kind, version), kind: kind}
}

func (d *Decoder) take(n int) []byte {
	if n > len(d.b) {
		d.Fail("the state ends early")
	}
	if d.err != nil {
		return nil
	}
	p := d.b[:n]
	d.b = d.b[n:]
	return p
}

// Bool reads one byte that must be 0 or 1.
func (d *Decoder) Bool() bool {
	v := d.Uint8()
	if v > 1 {
		d.Fail("a flag is neither 0 nor 1")
	}
	return v == 1
}

// Uint8 reads one byte.
func (d *Decoder) Uint8() uint8 {
	if p := d.take(1); p != nil {
		return p[0]
	}
	return 0
}

// Uint16 reads two bytes.
func (d *Decoder) Uint16() uint16 {
	if p := d.take(2); p != nil {
		return binary.LittleEndian.Uint16(p)
	}
	return 0
}

// Uint32 reads four bytes.
func (d *Decoder) Uint32() uint32 {
	if p := d.take(4); p != nil {
		return binary.LittleEndian.Uint32(p)
	}
	return 0
}

// Uint64 reads eight bytes.
func (d *Decoder) Uint64() uint64 {
	if p := d.take(8); p != nil {
		return binary.LittleEndian.Uint64(p)
	}
	return 0
}

// Bytes reads a byte string of at most limit bytes. The result aliases the data of the decoder.
func (d *Decoder) Bytes(limit int) []byte {
	n := d.Uint32()
	if d.err == nil && uint64(n) > uint64(limit) {
		d.Fail(fmt.Sprintf("a string of %d bytes where %d are allowed", n, limit))
	}
	if d.err != nil {
		return nil
	}
	return d.take(int(n))
}

// Fail marks the state as unusable for the reason why, unless it already is.
func (d *Decoder) Fail(why string) {
	if d.err == nil && d.kind != "" {
		why = "importing " + d.kind + " state: " + why
	}
	if d.err == nil {
		d.err = fmt.Errorf("%s: %w", why, ErrPayload)
	}
}

// Finish returns the first error, which wraps ErrPayload. Left-over bytes are an error, too.
func (d *Decoder) Finish() error {
	if d.err == nil && len(d.b) > 0 {
		d.Fail(fmt.Sprintf("%d bytes are left over", len(d.b)))
	}
	return d.err
}
