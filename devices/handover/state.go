package handover

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

const (
	stateKind    = "handover"
	stateVersion = 1
)

// Export implements [devices.Stateful]: whether the agent stands by.
func (d *Device) Export() (devices.Payload, error) {
	var e devices.Encoder
	e.Bool(d.StandingBy())
	return devices.Payload{Kind: stateKind, Version: stateVersion, Data: e.Data()}, nil
}

// Standing says of a saved state whether the agent stood by.
func Standing(p devices.Payload) (bool, error) {
	if err := p.Check(stateKind, stateVersion); err != nil {
		return false, err
	}
	dec := devices.NewDecoder(p.Data)
	at := dec.Bool()
	if err := dec.Finish(); err != nil {
		return false, fmt.Errorf("importing the handover ports: %w", err)
	}
	return at, nil
}

// Import implements [devices.Stateful].
func (d *Device) Import(p devices.Payload) error {
	at, err := Standing(p)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.release(StatusGoOn)
	d.at = at
	return nil
}
