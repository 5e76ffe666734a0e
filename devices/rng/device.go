package rng

import (
	"context"
	"crypto/rand"
	"io"

	"github.com/drowse-vm/drowse/devices"
)

const (
	// QueueSize is the size of the device's only queue.
	QueueSize = 64
	// MaxRequest is the most bytes that one request gets. The device fills a longer buffer only that far, and the
	// driver sees the length.
	MaxRequest = 64 << 10

	// pieceSize is the size of the intermediate buffer: the guest's lengths never size an allocation.
	pieceSize = 4 << 10
)

// Options are the optional settings of New.
type Options struct {
	// Source gives the bytes. Nil means the kernel's getrandom(2).
	Source io.Reader
}

// Device is a virtio entropy device.
type Device struct {
	source io.Reader

	workers devices.Workers // between Activate and Reset
	piece   [pieceSize]byte // the worker's own
}

// New makes an entropy device.
func New(o Options) *Device {
	if o.Source == nil {
		o.Source = rand.Reader
	}
	return &Device{source: o.Source}
}

// ID implements [devices.Device].
func (d *Device) ID() devices.ID { return devices.IDEntropy }

// Features implements [devices.Device]. There are none.
func (d *Device) Features() uint64 { return 0 }

// QueueSizes implements [devices.Device].
func (d *Device) QueueSizes() []uint16 { return []uint16{QueueSize} }

// ReadConfig implements [devices.Device]. There is no configuration space.
func (d *Device) ReadConfig(_ uint32, p []byte) { clear(p) }

// WriteConfig implements [devices.Device].
func (d *Device) WriteConfig(uint32, []byte) {}

// Activate implements [devices.Device].
func (d *Device) Activate(a devices.Activation) error {
	d.workers.Serve(a.Queues[0], a.Interrupt, d.handle)
	return nil
}

// Reset implements [devices.Device].
func (d *Device) Reset() error {
	d.workers.Stop()
	d.workers = nil
	return nil
}

// Pause implements [devices.Pauser].
func (d *Device) Pause(ctx context.Context) error { return d.workers.Pause(ctx) }

// Resume implements [devices.Pauser].
func (d *Device) Resume() error { return d.workers.Resume() }
