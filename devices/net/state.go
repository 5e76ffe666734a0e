package net

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// Kind and version of the saved state: the MAC, whether the link is up, and whether the guest believes it is up.
const (
	stateKind    = "virtio-net"
	stateVersion = 1
)

// Export implements [devices.Stateful]. It fails with [devices.ErrNotPaused] while the device is active and
// running.
func (d *Device) Export() (devices.Payload, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	told := d.told
	if d.engine != nil {
		if err := d.engine.loop.AwaitPaused(); err != nil {
			return devices.Payload{}, fmt.Errorf("exporting %s state: %w", stateKind, err)
		}
		told = d.engine.told
	}
	var e devices.Encoder
	for _, b := range d.mac {
		e.Uint8(b)
	}
	e.Bool(d.link.Load())
	e.Bool(told)
	return e.Payload(stateKind, stateVersion), nil
}

// Import implements [devices.Stateful].
func (d *Device) Import(p devices.Payload) error {
	r := p.Decode(stateKind, stateVersion)
	var mac MAC
	for i := range mac {
		mac[i] = r.Uint8()
	}
	link, told := r.Bool(), r.Bool()
	if mac == (MAC{}) || mac[0]&1 != 0 {
		r.Fail("the MAC is not the address of one host")
	}
	if err := r.Finish(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.engine != nil {
		return fmt.Errorf("importing %s state: the device is active", stateKind)
	}
	d.mac, d.told = mac, told
	d.link.Store(link && !d.config.LinkDown)
	return nil
}
