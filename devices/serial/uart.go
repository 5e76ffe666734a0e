package serial

import (
	"context"
	"fmt"
	"io"
	"sync"

	"github.com/drowse-vm/drowse/devices"
)

// COM1 of a PC.
const (
	// Port is the first of its Ports I/O ports.
	Port  = 0x3f8
	Ports = 8
	// IRQ is its interrupt line, which is edge-triggered on ISA.
	IRQ = 4
)

// InputSize is the most bytes of looped-back output that wait for the guest. The host sends no input.
const InputSize = 4 << 10

// fifoSize is the FIFO size of the 16550A: clearing the receive FIFO drops that many bytes.
const fifoSize = 16

// Registers and the bits that are used (National Semiconductor PC16550D, table II).
const (
	regData     = 0 // RBR, THR; divisor low with DLAB
	regIER      = 1 // divisor high with DLAB
	regIIR      = 2 // FCR when written
	regLCR      = 3
	regMCR      = 4
	regLSR      = 5
	regMSR      = 6
	regScratch  = 7
	ierReceive  = 0x01
	ierTransmit = 0x02
	ierMask     = 0x0f
	iirNone     = 0x01
	iirTransmit = 0x02
	iirReceive  = 0x04
	iirFIFO     = 0xc0
	fcrEnable   = 0x01
	fcrClear    = 0x02
	lcrDLAB     = 0x80
	mcrDTR      = 0x01
	mcrRTS      = 0x02
	mcrOut1     = 0x04
	mcrOut2     = 0x08
	mcrLoop     = 0x10
	mcrMask     = 0x1f
	lsrReady    = 0x01
	lsrIdle     = 0x60 // transmitter holding register and shift register empty
	msrCTS      = 0x10
	msrDSR      = 0x20
	msrRI       = 0x40
	msrDCD      = 0x80
)

// registers is the state that the guest can see.
type registers struct {
	ier, lcr, mcr, scratch uint8
	fifo                   bool
	divisor                uint16
	// transmit is the interrupt "transmitter holding register empty". Output and enabling it set it. Reading it
	// from IIR clears it.
	transmit bool
}

var afterReset = registers{mcr: mcrOut2, divisor: 12}

// UART is one serial port. It implements [devices.IO], [devices.Pauser] and [devices.Stateful]. Any goroutine may
// call any method at any time. Register accesses do not block.
type UART struct {
	raise func()
	out   *devices.Output

	mu     sync.Mutex
	regs   registers
	input  []byte // looped-back output that the guest has not read, at most InputSize
	line   bool   // the interrupt line is high
	paused bool
}

// New makes a port whose output goes to w, or nowhere if w is nil. It calls raise for each rising edge of the
// interrupt line. raise must not block, such as the Signal method of an irqfd's event.
func New(w io.Writer, raise func()) *UART {
	return &UART{raise: raise, out: devices.NewOutput(w), regs: afterReset}
}

// Close writes the waiting output, for a second at most.
func (u *UART) Close() error { return u.out.Close() }

// update moves the interrupt line. Only a rising edge is an event: the handler of an edge-triggered UART reads IIR
// until nothing is pending, and then the line falls. The caller holds mu.
func (u *UART) update() {
	line := u.pending() != iirNone
	if line && !u.line && !u.paused {
		u.raise()
	}
	u.line = line
}

// pending returns the interrupt that IIR shows: the most urgent one.
func (u *UART) pending() uint8 {
	switch {
	case u.regs.ier&ierReceive != 0 && len(u.input) > 0:
		return iirReceive
	case u.regs.ier&ierTransmit != 0 && u.regs.transmit:
		return iirTransmit
	}
	return iirNone
}

// ReadIO implements [devices.IO]. Registers are 8 bits wide. A wider access reads the register where it starts,
// then zeros.
func (u *UART) ReadIO(off uint64, p []byte) {
	clear(p)
	if len(p) == 0 || off >= Ports {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	p[0] = u.read(off)
	u.update()
}

func (u *UART) read(off uint64) uint8 {
	r := &u.regs
	switch off {
	case regData:
		if r.lcr&lcrDLAB != 0 {
			return uint8(r.divisor)
		}
		if len(u.input) == 0 {
			return 0
		}
		b := u.input[0]
		u.consume(1)
		return b
	case regIER:
		if r.lcr&lcrDLAB != 0 {
			return uint8(r.divisor >> 8)
		}
		return r.ier
	case regIIR:
		iir := u.pending()
		if iir == iirTransmit {
			r.transmit = false
		}
		if r.fifo {
			iir |= iirFIFO
		}
		return iir
	case regLCR:
		return r.lcr
	case regMCR:
		return r.mcr
	case regLSR:
		if len(u.input) > 0 {
			return lsrIdle | lsrReady
		}
		return lsrIdle
	case regMSR:
		return u.modemStatus()
	default:
		return r.scratch
	}
}

// consume drops the first n bytes of input and keeps the rest at the start of its
// array, which therefore never grows beyond InputSize.
func (u *UART) consume(n int) { u.input = append(u.input[:0], u.input[n:]...) }

// modemStatus returns the status of a modem that is always there, or of the port's own control lines in loopback
// mode.
func (u *UART) modemStatus() uint8 {
	mcr := u.regs.mcr
	if mcr&mcrLoop == 0 {
		return msrCTS | msrDSR | msrDCD
	}
	var msr uint8
	for _, wire := range [...]struct{ from, to uint8 }{
		{mcrRTS, msrCTS}, {mcrDTR, msrDSR}, {mcrOut1, msrRI}, {mcrOut2, msrDCD},
	} {
		if mcr&wire.from != 0 {
			msr |= wire.to
		}
	}
	return msr
}

// WriteIO implements [devices.IO]. Only the first byte of a wider access counts.
func (u *UART) WriteIO(off uint64, p []byte) {
	if len(p) == 0 || off >= Ports {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.write(off, p[:1])
	u.update()
}

func (u *UART) write(off uint64, p []byte) {
	r, v := &u.regs, p[0]
	switch off {
	case regData:
		if r.lcr&lcrDLAB != 0 {
			r.divisor = r.divisor&0xff00 | uint16(v)
			return
		}
		r.transmit = true
		// Looped-back output becomes input, if there is room.
		if r.mcr&mcrLoop == 0 {
			_, _ = u.out.Write(p)
		} else if len(u.input) < InputSize {
			u.input = append(u.input, v)
		}
	case regIER:
		if r.lcr&lcrDLAB != 0 {
			r.divisor = r.divisor&0x00ff | uint16(v)<<8
			return
		}
		// Enabling the transmit interrupt raises it, since the register is empty. Drivers probe for this.
		if v&^r.ier&ierTransmit != 0 {
			r.transmit = true
		}
		r.ier = v & ierMask
	case regIIR:
		r.fifo = v&fcrEnable != 0
		if v&fcrClear != 0 {
			u.consume(min(fifoSize, len(u.input)))
		}
	case regLCR:
		r.lcr = v
	case regMCR:
		r.mcr = v & mcrMask
	case regScratch:
		r.scratch = v
	}
}

// Pause implements [devices.Pauser]. The port still takes register accesses, but raises no interrupt before
// Resume. Output that a stuck writer has not taken stays in the state.
func (u *UART) Pause(ctx context.Context) error {
	if err := u.out.Pause(ctx); err != nil {
		return fmt.Errorf("pausing the serial port: %w", err)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.paused = true
	return nil
}

// Resume implements [devices.Pauser]. It raises the interrupt again if the line is high, since the edge may have
// been lost.
func (u *UART) Resume() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.paused = false
	u.line = false
	u.update()
	u.out.Resume()
	return nil
}
