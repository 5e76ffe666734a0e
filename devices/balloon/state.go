package balloon

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// The saved state: target u32 and actual u32, in pages; statistics wanted u8, a
// statistics buffer is held u8 and its head u16; the latest statistics, 8 times u64
// in the order of their tags.
const (
	stateKind    = "virtio-balloon"
	stateVersion = 1
)

// Export implements [devices.Stateful].
func (d *Device) Export() (devices.Payload, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var head uint16
	held := false
	switch {
	case d.stats != nil && d.stats.held:
		head, held = d.stats.head, true
	case d.restored != nil:
		head, held = *d.restored, true
	}
	var e devices.Encoder
	e.Uint32(d.target.Load())
	e.Uint32(d.actual.Load())
	e.Bool(d.wantStats.Load())
	e.Bool(held)
	e.Uint16(head)
	for _, f := range d.guest.fields() {
		e.Uint64(*f)
	}
	return e.Payload(stateKind, stateVersion), nil
}

// Import implements [devices.Stateful].
func (d *Device) Import(p devices.Payload) error {
	dec := p.Decode(stateKind, stateVersion)
	target, actual := dec.Uint32(), dec.Uint32()
	want, held, head := dec.Bool(), dec.Bool(), dec.Uint16()
	var guest GuestStats
	for _, f := range guest.fields() {
		*f = dec.Uint64()
	}
	if held && head >= QueueSize {
		dec.Fail(fmt.Sprintf("buffer %d is held in a queue of %d", head, QueueSize))
	}
	if !held && head != 0 {
		dec.Fail(fmt.Sprintf("buffer %d is named, and none is held", head))
	}
	if err := dec.Finish(); err != nil {
		return err
	}
	d.target.Store(target)
	d.actual.Store(actual)
	d.wantStats.Store(want)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.guest = guest
	d.restored = nil
	if held {
		d.restored = &head
	}
	return nil
}
