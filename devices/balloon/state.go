package balloon

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// The saved state: target u32 and actual u32, in pages; statistics wanted u8; a statistics buffer is held u8 and
// its head u16; the latest statistics, 8 times u64 in the order of their tags.
const (
	stateKind    = "virtio-balloon"
	stateVersion = 1
)

// statistics is what older versions saved of a queue that this version does not use. Import and Export pass it on.
type statistics struct {
	wanted, held bool
	head         uint16
	values       [8]uint64
}

// Export implements [devices.Stateful].
func (d *Device) Export() (devices.Payload, error) {
	var e devices.Encoder
	e.Uint32(d.target)
	e.Uint32(d.actual)
	e.Bool(d.statistics.wanted)
	e.Bool(d.statistics.held)
	e.Uint16(d.statistics.head)
	for _, v := range d.statistics.values {
		e.Uint64(v)
	}
	return e.Payload(stateKind, stateVersion), nil
}

// Import implements [devices.Stateful].
func (d *Device) Import(p devices.Payload) error {
	dec := p.Decode(stateKind, stateVersion)
	target, actual := dec.Uint32(), dec.Uint32()
	s := statistics{wanted: dec.Bool(), held: dec.Bool(), head: dec.Uint16()}
	for i := range s.values {
		s.values[i] = dec.Uint64()
	}
	if s.held && s.head >= QueueSize {
		dec.Fail(fmt.Sprintf("buffer %d is held in a queue of %d", s.head, QueueSize))
	}
	if !s.held && s.head != 0 {
		dec.Fail(fmt.Sprintf("buffer %d is named, and none is held", s.head))
	}
	if err := dec.Finish(); err != nil {
		return err
	}
	d.target, d.actual, d.statistics = target, actual, s
	return nil
}
