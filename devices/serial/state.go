package serial

import (
	"context"

	"github.com/drowse-vm/drowse/devices"
)

// The saved state: IER, LCR, MCR, scratch (u8 each), FIFO enabled u8, divisor u16, transmit interrupt u8, input
// string, unwritten output string.
const (
	stateKind    = "serial"
	stateVersion = 1
)

// Export implements [devices.Stateful].
func (u *UART) Export() (devices.Payload, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	var e devices.Encoder
	e.Uint8(u.regs.ier)
	e.Uint8(u.regs.lcr)
	e.Uint8(u.regs.mcr)
	e.Uint8(u.regs.scratch)
	e.Bool(u.regs.fifo)
	e.Uint16(u.regs.divisor)
	e.Bool(u.regs.transmit)
	e.Bytes(u.input)
	e.Bytes(u.out.Pending())
	return e.Payload(stateKind, stateVersion), nil
}

// Import implements [devices.Stateful]. The port is paused afterwards. Resume raises an interrupt that is pending
// in the state.
func (u *UART) Import(p devices.Payload) error {
	d := p.Decode(stateKind, stateVersion)
	var r registers
	r.ier = d.Uint8()
	r.lcr = d.Uint8()
	r.mcr = d.Uint8()
	r.scratch = d.Uint8()
	r.fifo = d.Bool()
	r.divisor = d.Uint16()
	r.transmit = d.Bool()
	input := d.Bytes(InputSize)
	output := d.Bytes(devices.OutputSize)
	if r.ier&^ierMask != 0 || r.mcr&^mcrMask != 0 {
		d.Fail("a register has bits that do not exist")
	}
	if err := d.Finish(); err != nil {
		return err
	}
	if err := u.Pause(context.Background()); err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.regs = r
	u.input = append(u.input[:0], input...)
	u.line = false
	_, _ = u.out.Write(output)
	return nil
}
