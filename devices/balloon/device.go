package balloon

import (
	"context"
	"encoding/binary"
	"sync"
	"sync/atomic"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// QueueSize is the size of each of its queues.
const QueueSize = 128

// PageSize is the unit of the balloon, in bytes, whatever the guest's own pages
// are (virtio 1.2, 5.5.6).
const PageSize = 4096

// MaxPages bounds how many pages one request can name; a request that names more
// is done so far.
const MaxPages = 64 << 10

// Feature bits (virtio 1.2, 5.5.3).
const (
	featureStats        uint64 = 1 << 1
	featureDeflateOnOOM uint64 = 1 << 2
	featureReporting    uint64 = 1 << 5
)

// The queues, in the order in which they are numbered. Which of the last two
// exist depends on the features that the driver has accepted: Linux numbers
// without gaps, and so do we.
const (
	queueInflate = 0
	queueDeflate = 1
	queueFirst   = 2 // statistics or reporting
	queues       = 4
)

// Offsets in the configuration space (virtio 1.2, 5.5.4).
const (
	configTarget = 0
	configActual = 4
	configSize   = 8
)

// Discarder gives guest memory back to the host: a [guestmem.Memory].
type Discarder interface {
	// Discard drops the whole pages inside [gpa, gpa+n), which read as zeros
	// from then on. It fails with guestmem.ErrRange for what is not RAM.
	Discard(gpa guestmem.GPA, n uint64) error
}

// Options are what New can do without.
type Options struct {
	// OnError is told of the first failure of the host to take pages back.
	// The guest does not notice. It must not block. Nil ignores it.
	OnError func(error)
}

// Stats says what the balloon has done.
type Stats struct {
	// Target and Actual are what the host wants and what the guest says it
	// has given, in bytes.
	Target, Actual uint64
	// Inflated and Reported bytes were given back to the host: pages of the
	// balloon, and those that were only free at the time. A page counts each
	// time.
	Inflated, Reported uint64
	// BadPages are those that the guest named but that are not RAM, or were
	// too many for one request.
	BadPages uint64
	// HostErrors is how often the host failed to take pages.
	HostErrors uint64
}

// Device is a virtio balloon.
type Device struct {
	memory  Discarder
	onError func(error)

	target, actual                           atomic.Uint32 // pages
	inflated, reported, badPages, hostErrors atomic.Uint64
	wantStats                                atomic.Bool

	// Between Activate and Reset.
	workers devices.Workers
	pages   pageList         // the inflate worker's own
	ranges  []guestmem.Range // the reporting worker's own

	mu        sync.Mutex // guards what follows
	irq       devices.Interrupt
	stats     *statsQueue // nil without the feature
	statsKick *devices.Event
	guest     GuestStats
	restored  *uint16 // a statistics buffer that Import has found
}

// New makes an empty balloon in the given memory.
func New(memory Discarder, o Options) *Device { return &Device{memory: memory, onError: o.OnError} }

// SetTarget asks the guest to do without n bytes of its memory, rounded down to
// pages. It answers in its own time, or not at all.
func (d *Device) SetTarget(n uint64) {
	d.target.Store(uint32(min(n/PageSize, 1<<32-1)))
	d.mu.Lock()
	irq := d.irq
	d.mu.Unlock()
	if irq != nil {
		irq.Config()
	}
}

// Stats may be called at any time.
func (d *Device) Stats() Stats {
	return Stats{
		Target:   uint64(d.target.Load()) * PageSize,
		Actual:   uint64(d.actual.Load()) * PageSize,
		Inflated: d.inflated.Load(), Reported: d.reported.Load(),
		BadPages: d.badPages.Load(), HostErrors: d.hostErrors.Load(),
	}
}

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
	binary.LittleEndian.PutUint32(c[configTarget:], d.target.Load())
	binary.LittleEndian.PutUint32(c[configActual:], d.actual.Load())
	devices.ReadConfig(c[:], off, p)
}

// WriteConfig implements [devices.Device]: the driver writes how many pages the
// balloon has.
func (d *Device) WriteConfig(off uint32, p []byte) {
	if off == configActual && len(p) == 4 {
		d.actual.Store(binary.LittleEndian.Uint32(p))
	}
}

// Activate implements [devices.Device].
func (d *Device) Activate(a devices.Activation) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.irq = a.Interrupt
	d.serve(a, queueInflate, d.inflate)
	d.serve(a, queueDeflate, d.deflate)
	next := queueFirst
	if a.Features&featureStats != 0 {
		if q := a.Queues[next]; q != nil {
			d.stats = &statsQueue{d: d, queue: q, irq: a.Interrupt}
			if d.restored != nil {
				d.stats.head, d.stats.held = *d.restored, true
			}
			d.statsKick = q.Kick
			d.workers = append(d.workers, q.StartWorker(d.stats.serve))
		}
		next++
	}
	d.restored = nil
	if a.Features&featureReporting != 0 {
		d.serve(a, next, d.report)
	}
	return nil
}

// serve has handle do the requests of a queue one by one.
func (d *Device) serve(a devices.Activation, i int, handle func(*devices.Queue, *virtq.Chain) error) {
	q := a.Queues[i]
	d.workers.Serve(q, a.Interrupt, func(c *virtq.Chain) error { return handle(q, c) })
}

// Reset implements [devices.Device]. The balloon is empty afterwards, since the
// driver has to start anew; what the host wants stays.
func (d *Device) Reset() error {
	d.workers.Stop()
	d.workers = nil
	d.actual.Store(0)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.irq, d.stats, d.statsKick, d.restored = nil, nil, nil, nil
	d.guest = GuestStats{}
	return nil
}

// Pause implements [devices.Pauser]. A paused balloon gives nothing back.
func (d *Device) Pause(ctx context.Context) error { return d.workers.Pause(ctx) }

// Resume implements [devices.Pauser].
func (d *Device) Resume() error { return d.workers.Resume() }
