package blk

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// The saved state: capacity in sectors u64, read-only u8. A paused device has no request in flight. What it has
// told the guest about the disk must stay true.
const (
	stateKind    = "virtio-blk"
	stateVersion = 1
)

// Export implements [devices.Stateful].
func (d *Device) Export() (devices.Payload, error) {
	var e devices.Encoder
	e.Uint64(d.sectors)
	e.Bool(d.readOnly)
	return e.Payload(stateKind, stateVersion), nil
}

// Import implements [devices.Stateful]. It refuses the state of a disk with another size, or one that was writable
// if this one is read-only, or the reverse.
func (d *Device) Import(p devices.Payload) error {
	dec := p.Decode(stateKind, stateVersion)
	sectors, readOnly := dec.Uint64(), dec.Bool()
	if err := dec.Finish(); err != nil {
		return err
	}
	if sectors != d.sectors || readOnly != d.readOnly {
		return fmt.Errorf("importing a block device: the guest knows a disk of %d sectors (read-only: %t), this one has %d (read-only: %t): %w: use the disk that belongs to the snapshot",
			sectors, readOnly, d.sectors, d.readOnly, devices.ErrPayload)
	}
	return nil
}
