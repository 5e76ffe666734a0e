package rng

import "github.com/drowse-vm/drowse/devices"

// The saved state is empty.
const (
	stateKind    = "virtio-rng"
	stateVersion = 1
)

// Export implements [devices.Stateful].
func (d *Device) Export() (devices.Payload, error) {
	return devices.Payload{Kind: stateKind, Version: stateVersion}, nil
}

// Import implements [devices.Stateful].
func (d *Device) Import(p devices.Payload) error {
	return p.Decode(stateKind, stateVersion).Finish()
}
