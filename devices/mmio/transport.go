package mmio

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// FeatureVersion1 is VIRTIO_F_VERSION_1, which every driver must accept (virtio 1.2, section 6).
const FeatureVersion1 uint64 = 1 << 32

// transportFeatures are the features that the transport offers for every device.
const transportFeatures = FeatureVersion1 | virtq.FeatureIndirectDesc | virtq.FeatureEventIdx

// MaxQueues is the largest number of queues of one device.
const MaxQueues = 64

// ErrorBurst and ErrorEvery bound how often OnError is called.
const (
	ErrorBurst = 4
	ErrorEvery = 10 * time.Second
)

// errNeedsReset stops the queues of a device that had already asked for a reset when it was saved.
var errNeedsReset = errors.New("the device waits to be reset by its driver")

// Options are optional settings for New.
type Options struct {
	// OnError is called for failures of the host, not of the guest. The device then waits for its driver to reset
	// it. A driver that does so at once can repeat failures as fast as it likes. So the transport reports at most
	// ErrorBurst in a row, and then one each ErrorEvery, with the number of unreported ones. OnError must not
	// block, and must not call the transport. Nil ignores failures.
	OnError func(error)
	// Kicks are the kick events, one for each queue: those of ioeventfds at [QueueNotify] with the queue's index as
	// datamatch. If New succeeds the transport owns them and closes them. If Kicks is nil New makes the events, and
	// the register is the only way to kick.
	Kicks []*devices.Event
}

// Stats are counters since New.
type Stats struct {
	// Kicks counts the signals that the device's workers have taken: the driver's kicks, and those by which a
	// worker continues after a batch or a pause.
	Kicks uint64
	// Interrupts counts the interrupts sent to the driver.
	Interrupts uint64
	// BadChains counts the malformed chains that were given back unused.
	BadChains uint64
	// NeedsReset counts how often the device was given up: the guest broke a ring, or the host failed.
	NeedsReset uint64
}

// queue is what the driver has set for a virtqueue before it starts the device.
type queue struct {
	max    uint16
	ready  bool
	layout virtq.Layout
}

// Transport puts one virtio device behind a window of registers. It implements
// [devices.IO], [devices.Pauser] and [devices.Stateful].
//
// A register access waits while the device is being reset or paused, except for reading the interrupt status,
// status and config generation, acknowledging and kicking.
type Transport struct {
	dev     devices.Device
	mem     *guestmem.Memory
	irq     *devices.Event
	onError func(error)
	kicks   []*devices.Event
	offered uint64

	// These change under mu and from the device's goroutines, so they are atomic. Those goroutines never take mu: a
	// caller that waits for them to stop holds it.
	status     atomic.Uint32
	interrupts atomic.Uint32
	generation atomic.Uint32

	interruptCount atomic.Uint64
	resetCount     atomic.Uint64

	errors errorBound

	held atomic.Bool // Hold keeps signals back
	owed atomic.Bool // Release must send one

	mu                sync.Mutex
	deviceFeaturesSel uint32
	driverFeaturesSel uint32
	accepted          uint64
	acceptedBeyond    bool // the driver set a feature bit above 63
	queueSel          uint32
	queues            []queue
	running           []*devices.Queue // while active; nil for a queue not set up
	active            bool             // between Activate and Reset
	paused            bool
	restore           []virtq.Position // of an imported device that waits for Restore
	closed            bool
	badChains         uint64 // of activations that are over
}

// New makes the transport and, unless Options.Kicks has them, one kick event for each queue. The transport signals
// irq for every interrupt; the caller owns irq.
//
// irq is meant for an irqfd on an edge-triggered line: each signal is one edge. The transport always sets a bit of
// the interrupt status before the signal. So the driver's handler runs again after the last change, whatever it has
// read or acknowledged before.
func New(dev devices.Device, mem *guestmem.Memory, irq *devices.Event, o Options) (*Transport, error) {
	sizes := dev.QueueSizes()
	if len(sizes) > MaxQueues {
		return nil, fmt.Errorf("making a virtio-mmio transport: the device has %d queues, at most %d are possible", len(sizes), MaxQueues)
	}
	if o.Kicks != nil && len(o.Kicks) != len(sizes) {
		return nil, fmt.Errorf("making a virtio-mmio transport: %d kick events for %d queues", len(o.Kicks), len(sizes))
	}
	t := &Transport{
		dev:     dev,
		mem:     mem,
		irq:     irq,
		onError: o.OnError,
		offered: dev.Features() | transportFeatures,
		queues:  make([]queue, len(sizes)),
		kicks:   slices.Clone(o.Kicks),
	}
	for i, size := range sizes {
		if size == 0 || size > virtq.MaxSize || size&(size-1) != 0 {
			return nil, errors.Join(
				fmt.Errorf("making a virtio-mmio transport: queue %d has size %d: use a power of two up to %d", i, size, virtq.MaxSize),
				t.closeKicks(len(o.Kicks)))
		}
		t.queues[i].max = size
		if i < len(t.kicks) {
			continue
		}
		kick, err := devices.NewEvent()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("making a virtio-mmio transport: %w", err), t.closeKicks(len(o.Kicks)))
		}
		t.kicks = append(t.kicks, kick)
	}
	return t, nil
}

// Device returns the device behind the transport.
func (t *Transport) Device() devices.Device { return t.dev }

// Stats returns the counters. It may be called at any time.
func (t *Transport) Stats() Stats {
	s := Stats{Interrupts: t.interruptCount.Load(), NeedsReset: t.resetCount.Load()}
	for _, k := range t.kicks {
		s.Kicks += k.Taken()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s.BadChains = t.badChains + t.countBadChains()
	return s
}

func (t *Transport) countBadChains() (n uint64) {
	for _, q := range t.running {
		if q != nil {
			n += q.BadChains()
		}
	}
	return n
}

// setStatus handles a write to the status register. The driver can add bits, in the order of virtio 1.2, 3.1.1, or
// reset the device by writing zero. A write that clears bits is ignored.
func (t *Transport) setStatus(v uint32) {
	if v == 0 {
		t.reset()
		return
	}
	old := t.status.Load()
	driver := old &^ statusNeedsReset
	if t.closed || v&driver != driver || old&statusFailed != 0 {
		return
	}
	added := v &^ old
	if added&statusFailed != 0 {
		t.status.Or(statusFailed)
		return
	}
	if old&statusNeedsReset != 0 {
		return
	}
	if added&statusAcknowledge != 0 {
		t.status.Or(statusAcknowledge)
	}
	if added&statusDriver != 0 && t.has(statusAcknowledge) {
		t.status.Or(statusDriver)
	}
	if added&statusFeaturesOK != 0 && t.has(statusDriver) && t.acceptable() {
		t.status.Or(statusFeaturesOK)
	}
	if added&statusDriverOK != 0 && t.has(statusFeaturesOK) {
		t.status.Or(statusDriverOK)
		if err := t.activate(nil); err != nil {
			t.NeedsReset(fmt.Errorf("starting a virtio device of type %d: %w", t.dev.ID(), err))
		}
	}
}

// Layouts returns the layouts of the queues that are ready.
func (t *Transport) Layouts() (all []virtq.Layout) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, q := range t.queues {
		if q.ready {
			all = append(all, q.layout)
		}
	}
	return all
}

func (t *Transport) has(bits uint32) bool { return t.status.Load()&bits == bits }

// acceptable reports whether the device can work with the features that the driver has chosen.
func (t *Transport) acceptable() bool {
	return t.accepted&^t.offered == 0 && !t.acceptedBeyond && t.accepted&FeatureVersion1 != 0
}

// activate starts the device on the queues that are ready, from the restored positions if there are any. The caller
// holds mu.
func (t *Transport) activate(restored []virtq.Position) error {
	running := make([]*devices.Queue, len(t.queues))
	for i := range t.queues {
		if !t.queues[i].ready {
			continue
		}
		q, err := virtq.New(t.mem, t.queues[i].layout, t.accepted)
		if err != nil {
			return fmt.Errorf("queue %d: %w", i, err)
		}
		if restored != nil {
			q.SetPosition(restored[i])
			if t.has(statusNeedsReset) {
				q.Break(errNeedsReset)
			}
		}
		running[i] = &devices.Queue{Queue: q, Kick: t.kicks[i]}
	}
	t.running, t.active = running, true
	err := t.dev.Activate(devices.Activation{
		Features:  t.accepted,
		Queues:    running,
		Interrupt: t,
		Restored:  restored != nil,
	})
	if err != nil {
		return errors.Join(err, t.stop())
	}
	if p, ok := t.dev.(devices.Pauser); ok && t.paused {
		// There has been no kick yet, so Pause has nothing to wait for.
		if err := p.Pause(context.Background()); err != nil {
			return errors.Join(err, t.stop())
		}
	}
	return nil
}

// reset handles writing zero to the status register. It stops the device and restores the state before the driver
// came, except for the config generation, which continues to count. If the device cannot be stopped, it keeps
// asking for a reset. The caller holds mu.
func (t *Transport) reset() {
	if err := t.stop(); err != nil {
		t.NeedsReset(fmt.Errorf("resetting a virtio device of type %d: %w", t.dev.ID(), err))
		return
	}
	t.deviceFeaturesSel, t.driverFeaturesSel, t.queueSel = 0, 0, 0
	t.accepted, t.acceptedBeyond = 0, false
	for i := range t.queues {
		t.queues[i] = queue{max: t.queues[i].max}
	}
	t.restore = nil
	t.status.Store(0)
	t.interrupts.Store(0)
}

// stop ends the device's work. The caller holds mu.
func (t *Transport) stop() error {
	if err := t.dev.Reset(); err != nil {
		return err
	}
	t.badChains += t.countBadChains()
	t.running, t.active = nil, false
	return nil
}

// Close stops the device and releases the kick events. The vCPUs must have stopped. The caller still owns the
// device.
func (t *Transport) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	t.status.Store(0)
	if err := t.stop(); err != nil {
		// Its workers may still be waiting on the events.
		return fmt.Errorf("stopping a virtio device of type %d: %w", t.dev.ID(), err)
	}
	return t.closeKicks(0)
}

// closeKicks closes all but the first but events.
func (t *Transport) closeKicks(but int) error {
	var errs []error
	for _, k := range t.kicks[but:] {
		errs = append(errs, k.Close())
	}
	return errors.Join(errs...)
}

// Queue implements [devices.Interrupt].
func (t *Transport) Queue() { t.interrupt(interruptQueue) }

// Config implements [devices.Interrupt].
func (t *Transport) Config() {
	t.generation.Add(1)
	t.interrupt(interruptConfig)
}

// NeedsReset implements [devices.Interrupt]. An error that does not wrap virtq.ErrDriver is the host's and goes to
// OnError.
func (t *Transport) NeedsReset(reason error) {
	t.resetCount.Add(1)
	t.status.Or(statusNeedsReset)
	if !errors.Is(reason, virtq.ErrDriver) && t.onError != nil {
		if ok, untold := t.errors.take(time.Now()); ok {
			if untold > 0 {
				reason = fmt.Errorf("%w (%d failures before this one were not told)", reason, untold)
			}
			t.onError(reason)
		}
	}
	t.interrupt(interruptConfig)
}

// errorBound limits how often failures are reported.
type errorBound struct {
	mu     sync.Mutex // guards what follows
	told   int        // reported failures, less one each ErrorEvery
	since  time.Time
	untold uint64
}

// take reports whether a failure may be reported, and how many before it were not.
func (b *errorBound) take(now time.Time) (ok bool, untold uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := int(min(now.Sub(b.since)/ErrorEvery, ErrorBurst)); n > 0 {
		b.told, b.since = max(b.told-n, 0), now
	}
	if b.told == ErrorBurst {
		b.untold++
		return false, 0
	}
	b.told++
	untold, b.untold = b.untold, 0
	return true, untold
}

// interrupt interrupts the driver, but not before DRIVER_OK (virtio 1.2, 3.1.1).
func (t *Transport) interrupt(bit uint32) {
	if !t.has(statusDriverOK) {
		return
	}
	t.interrupts.Or(bit)
	t.interruptCount.Add(1)
	t.signal()
}

// signal sends an edge, or lets Release send it.
func (t *Transport) signal() {
	if t.held.Load() {
		t.owed.Store(true)
		// If Release comes in between, exactly one of the two sends the edge.
		if t.held.Load() || !t.owed.Swap(false) {
			return
		}
	}
	t.irq.Signal()
}

// Hold keeps interrupts back until Release. A driver that polls still sees what they are about. Hold and Release
// may be called at any time, from any goroutine.
func (t *Transport) Hold() { t.held.Store(true) }

// Release undoes Hold, and sends one interrupt if Hold has kept any back.
func (t *Transport) Release() {
	t.held.Store(false)
	if t.owed.Swap(false) {
		t.irq.Signal()
	}
}

// Pause implements [devices.Pauser]. A device that cannot pause continues to run.
func (t *Transport) Pause(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.paused {
		return nil
	}
	if p, ok := t.dev.(devices.Pauser); ok && t.active {
		if err := p.Pause(ctx); err != nil {
			return fmt.Errorf("pausing a virtio device of type %d: %w", t.dev.ID(), err)
		}
	}
	t.paused = true
	return nil
}

// Resume implements [devices.Pauser]. It signals again if the driver has not acknowledged an interrupt: the edge
// may have been lost with the process that took the snapshot. Restore must come first on an imported device.
func (t *Transport) Resume() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.restore != nil {
		return fmt.Errorf("resuming a virtio device of type %d: it has been imported but not restored: call Restore first", t.dev.ID())
	}
	if !t.paused {
		return nil
	}
	if p, ok := t.dev.(devices.Pauser); ok && t.active {
		if err := p.Resume(); err != nil {
			return fmt.Errorf("resuming a virtio device of type %d: %w", t.dev.ID(), err)
		}
	}
	t.paused = false
	if t.interrupts.Load() != 0 {
		t.signal()
	}
	return nil
}
