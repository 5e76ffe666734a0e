package balloon

import (
	"context"
	"encoding/binary"
	"sync/atomic"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// QueueSize is the size of each of the device's queues.
const QueueSize = 128

// PageSize is the unit of the balloon in bytes, whatever the guest's own page size is (virtio 1.2, 5.5.6).
const PageSize = 4096

// MaxPages bounds how many pages one request can name. The device ignores the rest of a longer request.
const MaxPages = 64 << 10

// Feature bits (virtio 1.2, 5.5.3). The host never asks for statistics. The device offers that feature because
// guests in snapshots of older versions have accepted it.
const (
	featureStats        uint64 = 1 << 1
	featureDeflateOnOOM uint64 = 1 << 2
	featureReporting    uint64 = 1 << 5
)

// The queues in the order of their numbers. The driver's features decide which of the last two exist. Linux
// numbers them without gaps, and so does this device.
const (
	queueInflate = 0
	queueDeflate = 1
	queueFirst   = 2 // statistics or reporting
)

// Offsets in the configuration space (virtio 1.2, 5.5.4).
const (
	configTarget = 0
	configActual = 4
	configSize   = 8
)

// Discarder gives guest memory back to the host: a [guestmem.Memory].
type Discarder interface {
	// Discard drops the whole pages inside [gpa, gpa+n), which then read as zeros. It fails with guestmem.ErrRange
	// for memory that is not RAM.
	Discard(gpa guestmem.GPA, n uint64) error
}

// Options are the optional settings of New.
type Options struct {
	// OnError receives the first failure of the host to take pages back. The guest does not notice it. OnError
	// must not block. Nil ignores it.
	OnError func(error)
}

// Stats counts what the balloon has done.
type Stats struct {
	// Inflated and Reported count the bytes given back to the host: pages of the balloon, and pages that were free
	// at the time. A page counts each time.
	Inflated, Reported atomic.Uint64
	// BadPages counts pages that the guest named but that are not RAM, or were too many for one request.
	BadPages atomic.Uint64
	// HostErrors counts how often the host failed to take pages.
	HostErrors atomic.Uint64
}

// Device is a virtio balloon.
type Device struct {
	memory  Discarder
	onError func(error)
	stats   Stats

	// target is how many pages the host wants: none, except in snapshots of older versions. actual is how many
	// pages the guest says it has given.
	target, actual uint32
	statistics     statistics

	// Between Activate and Reset.
	workers devices.Workers
	pages   pageList         // the inflate worker's own
	ranges  []guestmem.Range // the reporting worker's own
}

// New makes an empty balloon in the given memory.
func New(memory Discarder, o Options) *Device { return &Device{memory: memory, onError: o.OnError} }

// Stats returns the live counters. It may be called at any time.
func (d *Device) Stats() *Stats { return &d.stats }

// ID implements [devices.Device].
func (d *Device) ID() devices.ID { return devices.IDBalloon }

// Features implements [devices.Device].
func (d *Device) Features() uint64 { return featureStats | featureDeflateOnOOM | featureReporting }

// QueueSizes implements [devices.Device].
func (d *Device) QueueSizes() []uint16 {
	return []uint16{QueueSize, QueueSize, QueueSize, QueueSize}
}

// ReadConfig implements [devices.Device].
func (d *Device) ReadConfig(off uint32, p []byte) {
	var c [configSize]byte
	binary.LittleEndian.PutUint32(c[configTarget:], d.target)
	binary.LittleEndian.PutUint32(c[configActual:], d.actual)
	devices.ReadConfig(c[:], off, p)
}

// WriteConfig implements [devices.Device]. The driver writes how many pages the balloon has.
func (d *Device) WriteConfig(off uint32, p []byte) {
	if off == configActual && len(p) == 4 {
		d.actual = binary.LittleEndian.Uint32(p)
	}
}

// Activate implements [devices.Device].
func (d *Device) Activate(a devices.Activation) error {
	d.serve(a, queueInflate, d.inflate)
	d.serve(a, queueDeflate, d.deflate)
	next := queueFirst
	if a.Features&featureStats != 0 {
		next++ // the device leaves the driver's buffer in this queue
	}
	if a.Features&featureReporting != 0 {
		d.serve(a, next, d.report)
	}
	return nil
}

// serve makes handle do the requests of a queue one by one.
func (d *Device) serve(a devices.Activation, i int, handle func(*devices.Queue, *virtq.Chain) error) {
	q := a.Queues[i]
	d.workers.Serve(q, a.Interrupt, func(c *virtq.Chain) error { return handle(q, c) })
}

// Reset implements [devices.Device]. The balloon is empty afterwards, since the driver has to start anew. The
// host's target stays.
func (d *Device) Reset() error {
	d.workers.Stop()
	d.workers = nil
	d.actual, d.statistics = 0, statistics{}
	return nil
}

// Pause implements [devices.Pauser]. A paused balloon gives nothing back.
func (d *Device) Pause(ctx context.Context) error { return d.workers.Pause(ctx) }

// Resume implements [devices.Pauser].
func (d *Device) Resume() error { return d.workers.Resume() }
