package handover

import "github.com/drowse-vm/drowse/devices"

const (
	stateKind    = "handover"
	stateVersion = 1
)

// Export implements [devices.Stateful]. The state is whether the agent stands by.
func (d *Device) Export() (devices.Payload, error) {
	var e devices.Encoder
	e.Bool(d.StandingBy())
	return e.Payload(stateKind, stateVersion), nil
}

// Standing reports whether the agent stands by in a saved state.
func Standing(p devices.Payload) (bool, error) {
	dec := p.Decode(stateKind, stateVersion)
	return dec.Bool(), dec.Finish()
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
