package reset

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// The registers of hardware-reduced ACPI, for the FADT (ACPI 6.5, 5.2.9 and
// 4.8.3): all are one byte of I/O ports.
const (
	// ResetPort is the FADT's RESET_REG, ResetValue its RESET_VALUE.
	ResetPort  = 0x600
	ResetValue = 1
	// SleepControlPort is the FADT's SLEEP_CONTROL_REG.
	SleepControlPort = 0x604
	// SleepStatusPort is the FADT's SLEEP_STATUS_REG.
	SleepStatusPort = 0x605
	// SleepTypeOff is the sleep type that switches the machine off: what the
	// DSDT's \_S5 package has to name. No other sleep state exists.
	SleepTypeOff = 5
)

// Bits of the sleep control register (ACPI 6.5, 4.8.3.7).
const (
	sleepTypeShift = 2
	sleepTypeMask  = 7
	sleepEnable    = 1 << 5
)

// Power is the ACPI reset and sleep registers.
type Power struct{ report Report }

// NewPower makes one that reports resets and the power being switched off.
func NewPower(report Report) *Power { return &Power{report} }

// AddTo puts its ports on a bus of I/O ports.
func (d *Power) AddTo(bus *devices.Bus) error {
	for _, r := range []struct {
		port uint64
		io   devices.IO
	}{
		{ResetPort, register(d.writeReset)},
		{SleepControlPort, register(d.writeSleep)},
		// The wake status is never set, so clearing it does nothing.
		{SleepStatusPort, register(func(byte) {})},
	} {
		if err := bus.Add(r.port, 1, r.io); err != nil {
			return fmt.Errorf("adding the ACPI power registers: %w", err)
		}
	}
	return nil
}

func (d *Power) writeReset(v byte) {
	if v == ResetValue {
		d.report(Event{Reset, "the ACPI reset register"})
	}
}

func (d *Power) writeSleep(v byte) {
	if v&sleepEnable != 0 && v>>sleepTypeShift&sleepTypeMask == SleepTypeOff {
		d.report(Event{PowerOff, "the ACPI sleep control register"})
	}
}

// register is one write-only byte; it reads as zero.
type register func(v byte)

// ReadIO implements [devices.IO].
func (register) ReadIO(_ uint64, p []byte) { clear(p) }

// WriteIO implements [devices.IO].
func (r register) WriteIO(_ uint64, p []byte) {
	if len(p) > 0 {
		r(p[0])
	}
}
