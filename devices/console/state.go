package console

import (
	"context"
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// The saved state: columns u16, rows u16, input string, output string that is not
// yet written.
const (
	stateKind    = "virtio-console"
	stateVersion = 1
)

// Export implements [devices.Stateful].
func (d *Device) Export() (devices.Payload, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var e devices.Encoder
	e.Uint16(d.columns)
	e.Uint16(d.rows)
	e.Bytes(d.input)
	e.Bytes(d.out.Pending())
	return devices.Payload{Kind: stateKind, Version: stateVersion, Data: e.Data()}, nil
}

// Import implements [devices.Stateful]. Output that the state has still to write
// is written after Resume.
func (d *Device) Import(p devices.Payload) error {
	if err := p.Check(stateKind, stateVersion); err != nil {
		return err
	}
	dec := devices.NewDecoder(p.Data)
	columns, rows := dec.Uint16(), dec.Uint16()
	input := dec.Bytes(InputSize)
	output := dec.Bytes(devices.OutputSize)
	if err := dec.Finish(); err != nil {
		return fmt.Errorf("importing a console: %w", err)
	}
	if err := d.out.Pause(context.Background()); err != nil {
		return err
	}
	_, _ = d.out.Write(output)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.columns, d.rows = columns, rows
	d.input = append(d.input[:0], input...)
	return nil
}
