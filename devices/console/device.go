package console

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/devices"
)

const (
	// QueueSize is the size of both queues.
	QueueSize = 64
	// InputSize is how many bytes of input wait for the guest.
	InputSize = 64 << 10
)

// featureSize says that the configuration space has the size of the terminal
// (virtio 1.2, 5.3.3).
const featureSize uint64 = 1 << 0

const (
	queueReceive  = 0
	queueTransmit = 1
)

// Offsets in the configuration space (virtio 1.2, 5.3.4).
const (
	configColumns = 0
	configRows    = 2
	configPorts   = 4
	configSize    = 8
)

// Options are what New can do without.
type Options struct {
	// Columns and Rows are the terminal's size; zero if it has none.
	Columns, Rows uint16
}

// Stats counts what went wrong.
type Stats struct {
	// OutputDropped is the number of bytes that a slow or failed writer lost,
	// or that were beyond MaxOutput in one request.
	OutputDropped uint64
	// InputRefused is the number of bytes that Input did not take.
	InputRefused uint64
}

// Device is a virtio console. Input, Resize and Stats may be called at any time
// from any goroutine.
type Device struct {
	out      *devices.Output
	patience time.Duration

	// Between Activate and Reset; each worker alone uses what it needs of the
	// rest.
	workers  devices.Workers
	transmit transmitter
	receive  receiver

	mu            sync.Mutex // guards what follows
	columns, rows uint16
	input         []byte // at most InputSize
	irq           devices.Interrupt
	inputKick     *devices.Event // of the receive queue
	refused       uint64
	tooLong       uint64
}

// New makes a console whose output goes to w, nil for nowhere.
func New(w io.Writer, o Options) *Device {
	return &Device{out: devices.NewOutput(w), patience: defaultPatience, columns: o.Columns, rows: o.Rows}
}

// Close writes out what waits, for a second at most. The device must
// have been reset, as closing its transport does.
func (d *Device) Close() error { return d.out.Close() }

// Input types p at the guest and returns how many bytes of it were taken. Fewer
// than len(p) means that the guest does not read: try the rest later, or drop it.
func (d *Device) Input(p []byte) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := min(len(p), InputSize-len(d.input))
	d.input = append(d.input, p[:n]...)
	d.refused += uint64(len(p) - n)
	if d.inputKick != nil && n > 0 {
		d.inputKick.Signal()
	}
	return n
}

// Resize tells the guest the terminal's size.
func (d *Device) Resize(columns, rows uint16) {
	d.mu.Lock()
	d.columns, d.rows = columns, rows
	irq := d.irq
	d.mu.Unlock()
	if irq != nil {
		irq.Config()
	}
}

// Stats may be called at any time.
func (d *Device) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	return Stats{OutputDropped: d.out.Dropped() + d.tooLong, InputRefused: d.refused}
}

// ID implements [devices.Device].
func (d *Device) ID() devices.ID { return devices.IDConsole }

// Features implements [devices.Device].
func (d *Device) Features() uint64 { return featureSize }

// QueueSizes implements [devices.Device].
func (d *Device) QueueSizes() []uint16 { return []uint16{QueueSize, QueueSize} }

// ReadConfig implements [devices.Device].
func (d *Device) ReadConfig(off uint32, p []byte) {
	clear(p)
	d.mu.Lock()
	defer d.mu.Unlock()
	var c [configSize]byte
	binary.LittleEndian.PutUint16(c[configColumns:], d.columns)
	binary.LittleEndian.PutUint16(c[configRows:], d.rows)
	binary.LittleEndian.PutUint32(c[configPorts:], 1)
	if off < configSize {
		copy(p, c[off:])
	}
}

// WriteConfig implements [devices.Device]; nothing here can be written.
func (d *Device) WriteConfig(uint32, []byte) {}

// Activate implements [devices.Device].
func (d *Device) Activate(a devices.Activation) error {
	if !a.Restored {
		// Import may have left it paused.
		d.out.Resume()
	}
	if q := a.Queues[queueTransmit]; q != nil {
		d.transmit = transmitter{d: d, queue: q, irq: a.Interrupt}
		d.workers = append(d.workers, q.StartWorker(d.transmit.serve))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.irq = a.Interrupt
	if q := a.Queues[queueReceive]; q != nil {
		d.receive = receiver{d: d, queue: q, irq: a.Interrupt}
		d.inputKick = q.Kick
		d.workers = append(d.workers, q.StartWorker(d.receive.serve))
		if len(d.input) > 0 {
			// Typed before the guest was ready.
			q.Kick.Signal()
		}
	}
	return nil
}

// Reset implements [devices.Device]. Input that the guest has not read stays.
func (d *Device) Reset() error {
	d.mu.Lock()
	d.irq, d.inputKick = nil, nil
	d.mu.Unlock()
	d.workers.Stop()
	d.workers, d.transmit, d.receive = nil, transmitter{}, receiver{}
	d.out.Resume()
	return nil
}

// Pause implements [devices.Pauser]. Output that a stuck writer has not taken
// stays in the state.
func (d *Device) Pause(ctx context.Context) error {
	if err := d.workers.Pause(ctx); err != nil {
		return err
	}
	if err := d.out.Pause(ctx); err != nil {
		d.workers.Resume()
		return fmt.Errorf("writing out what the guest has printed: %w", err)
	}
	return nil
}

// Resume implements [devices.Pauser].
func (d *Device) Resume() error {
	d.out.Resume()
	d.workers.Resume()
	return nil
}
