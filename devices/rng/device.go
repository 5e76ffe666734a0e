package rng

import (
	"context"
	"crypto/rand"
	"io"

	"github.com/drowse-vm/drowse/devices"
)

const (
	// QueueSize is the size of its only queue.
	QueueSize = 64
	// MaxRequest bounds what one request gets, in bytes. A longer buffer is
	// filled only so far, which the driver can tell.
	MaxRequest = 64 << 10

	// pieceSize is that of the buffer by which they go: nothing is ever
	// allocated by a length that the guest has chosen.
	pieceSize = 4 << 10
)

// Options are what New can do without.
type Options struct {
	// Source of the bytes; nil means the kernel's getrandom(2).
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

// Features implements [devices.Device]; there are none.
func (d *Device) Features() uint64 { return 0 }

// QueueSizes implements [devices.Device].
func (d *Device) QueueSizes() []uint16 { return []uint16{QueueSize} }

// ReadConfig implements [devices.Device]; there is no configuration space.
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
