package reset

import (
	"fmt"

	"github.com/drowse-vm/drowse/devices"
)

// The ports of the keyboard controller. What lies between them is not ours: 0x61
// belongs to the interval timer.
const (
	I8042Data    = 0x60
	I8042Command = 0x64
)

// i8042Status is what the status register always reads: output buffer full,
// input buffer empty. A buffer that cannot be emptied makes Linux's probe give up
// after 16 reads ("no controller found"), and an empty input buffer lets its
// reboot code send the reset command at once; 0xff would make it wait.
const i8042Status = 0x01

// Commands 0xf0 to 0xff pulse the lines whose bits are zero; line 0 resets the
// CPU (IBM PC AT Technical Reference, keyboard controller commands).
const (
	i8042Pulse     = 0xf0
	i8042PulseMask = 0xf1
)

// I8042 is a keyboard controller without a keyboard: only its reset line works.
type I8042 struct{ report Report }

// NewI8042 makes one that reports resets.
func NewI8042(report Report) *I8042 { return &I8042{report} }

// AddTo puts its two ports on a bus of I/O ports.
func (k *I8042) AddTo(bus *devices.Bus) error {
	if err := bus.Add(I8042Data, 1, i8042Data{}); err != nil {
		return fmt.Errorf("adding the keyboard controller: %w", err)
	}
	if err := bus.Add(I8042Command, 1, i8042Command{k.report}); err != nil {
		return fmt.Errorf("adding the keyboard controller: %w", err)
	}
	return nil
}

type i8042Data struct{}

func (i8042Data) ReadIO(_ uint64, p []byte) { clear(p) }
func (i8042Data) WriteIO(uint64, []byte)    {}

type i8042Command struct{ report Report }

func (i8042Command) ReadIO(_ uint64, p []byte) {
	clear(p)
	if len(p) > 0 {
		p[0] = i8042Status
	}
}

func (c i8042Command) WriteIO(_ uint64, p []byte) {
	if len(p) > 0 && p[0]&i8042PulseMask == i8042Pulse {
		c.report(Event{Reset, "the keyboard controller's reset line"})
	}
}
