package reset

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// PVPanicPort is the I/O port of the pvpanic device, which the DSDT describes
// with the HID QEMU0001 (QEMU, docs/specs/pvpanic).
const PVPanicPort = 0x505

const (
	pvPanicked    = 1 << 0
	pvCrashLoaded = 1 << 1
)

// PVPanic is the port by which a panicking kernel says so.
type PVPanic struct{ report Report }

// NewPVPanic makes one that reports panics.
func NewPVPanic(report Report) *PVPanic { return &PVPanic{report} }

// AddTo puts its port on a bus of I/O ports.
func (d *PVPanic) AddTo(bus *devices.Bus) error {
	if err := bus.Add(PVPanicPort, 1, d); err != nil {
		return fmt.Errorf("adding the pvpanic port: %w", err)
	}
	return nil
}

// ReadIO implements [devices.IO]: the events that the port understands.
func (d *PVPanic) ReadIO(_ uint64, p []byte) {
	clear(p)
	if len(p) > 0 {
		p[0] = pvPanicked | pvCrashLoaded
	}
}

// WriteIO implements [devices.IO].
func (d *PVPanic) WriteIO(_ uint64, p []byte) {
	if len(p) == 0 {
		return
	}
	if p[0]&pvPanicked != 0 {
		d.report(Event{Panicked, "pvpanic"})
	}
	if p[0]&pvCrashLoaded != 0 {
		d.report(Event{CrashLoaded, "pvpanic"})
	}
}
