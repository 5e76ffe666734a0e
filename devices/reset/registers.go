package reset

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// The ports of the keyboard controller, of which only the reset line works. The ports between them are not part of
// it: 0x61 belongs to the interval timer.
const (
	I8042Data    = 0x60
	I8042Command = 0x64
)

// i8042Status is the constant value of the status register: output buffer full, input buffer empty. A buffer that
// never empties makes Linux's probe give up after 16 reads ("no controller found"). An empty input buffer lets
// Linux's reboot code send the reset command at once. 0xff would make it wait.
const i8042Status = 0x01

// Commands 0xf0 to 0xff pulse the lines whose bits are zero; line 0 resets the
// CPU (IBM PC AT Technical Reference, keyboard controller commands).
const (
	i8042Pulse     = 0xf0
	i8042PulseMask = 0xf1
)

// The registers of hardware-reduced ACPI, for the FADT (ACPI 6.5, 5.2.9 and 4.8.3). Each is one byte of I/O ports.
const (
	// ResetPort is the FADT's RESET_REG, ResetValue its RESET_VALUE.
	ResetPort  = 0x600
	ResetValue = 1
	// SleepControlPort is the FADT's SLEEP_CONTROL_REG.
	SleepControlPort = 0x604
	// SleepStatusPort is the FADT's SLEEP_STATUS_REG.
	SleepStatusPort = 0x605
	// SleepTypeOff is the sleep type that switches the machine off. The DSDT's \_S5 package must name it. No other
	// sleep state exists.
	SleepTypeOff = 5
)

// Bits of the sleep control register (ACPI 6.5, 4.8.3.7).
const (
	sleepTypeShift = 2
	sleepTypeMask  = 7
	sleepEnable    = 1 << 5
)

// PVPanicPort is the I/O port of the pvpanic device, which the DSDT describes
// with the HID QEMU0001 (QEMU, docs/specs/pvpanic).
const PVPanicPort = 0x505

// The events that pvpanic understands.
const (
	pvPanicked    = 1 << 0
	pvCrashLoaded = 1 << 1
)

// AddTo puts all registers on a bus of I/O ports. They call report for what the guest writes to them.
func AddTo(bus *devices.Bus, report Report) error {
	for _, r := range []struct {
		device string
		port   uint64
		register
	}{
		{"keyboard controller", I8042Data, register{}},
		{"keyboard controller", I8042Command, register{value: i8042Status, write: func(v byte) {
			if v&i8042PulseMask == i8042Pulse {
				report(Event{Reset, "the keyboard controller's reset line"})
			}
		}}},
		{"ACPI power registers", ResetPort, register{write: func(v byte) {
			if v == ResetValue {
				report(Event{Reset, "the ACPI reset register"})
			}
		}}},
		{"ACPI power registers", SleepControlPort, register{write: func(v byte) {
			if v&sleepEnable != 0 && v>>sleepTypeShift&sleepTypeMask == SleepTypeOff {
				report(Event{PowerOff, "the ACPI sleep control register"})
			}
		}}},
		// The wake status is never set, so a write that clears it does nothing.
		{"ACPI power registers", SleepStatusPort, register{}},
		{"pvpanic port", PVPanicPort, register{value: pvPanicked | pvCrashLoaded, write: func(v byte) {
			if v&pvPanicked != 0 {
				report(Event{Panicked, "pvpanic"})
			}
			if v&pvCrashLoaded != 0 {
				report(Event{CrashLoaded, "pvpanic"})
			}
		}}},
	} {
		if err := bus.Add(r.port, 1, r.register); err != nil {
			return fmt.Errorf("adding the %s: %w", r.device, err)
		}
	}
	return nil
}

// register is one byte that always reads as the same value. It calls write, if not nil, with each written byte.
type register struct {
	value byte
	write func(v byte)
}

// ReadIO implements [devices.IO].
func (r register) ReadIO(_ uint64, p []byte) {
	clear(p)
	if len(p) > 0 {
		p[0] = r.value
	}
}

// WriteIO implements [devices.IO].
func (r register) WriteIO(_ uint64, p []byte) {
	if len(p) > 0 && r.write != nil {
		r.write(p[0])
	}
}
