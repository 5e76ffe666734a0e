package devicetest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/mmio"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Timeout is how long a driver waits for a device before the test fails.
const Timeout = 30 * time.Second

// Registers of virtio-mmio (virtio 1.2, 4.2.2), for tests that use them directly.
const (
	RegMagic             = 0x000
	RegVersion           = 0x004
	RegDeviceID          = 0x008
	RegDeviceFeatures    = 0x010
	RegDeviceFeaturesSel = 0x014
	RegDriverFeatures    = 0x020
	RegDriverFeaturesSel = 0x024
	RegQueueSel          = 0x030
	RegQueueNumMax       = 0x034
	RegQueueNum          = 0x038
	RegQueueReady        = 0x044
	RegQueueNotify       = 0x050
	RegInterruptStatus   = 0x060
	RegInterruptACK      = 0x064
	RegStatus            = 0x070
	RegQueueDesc         = 0x080
	RegQueueDriver       = 0x090
	RegQueueDevice       = 0x0a0
	RegConfigGeneration  = 0x0fc
	RegConfig            = 0x100
)

// Bits of the status register.
const (
	StatusAcknowledge = 1
	StatusDriver      = 2
	StatusDriverOK    = 4
	StatusFeaturesOK  = 8
	StatusNeedsReset  = 64
	StatusFailed      = 128
)

// Features of the transport and its queues.
const (
	FeatureIndirect uint64 = 1 << 28
	FeatureEventIdx uint64 = 1 << 29
	FeatureVersion1 uint64 = 1 << 32

	// AllFeatures accepts every feature that the device offers.
	AllFeatures = ^uint64(0)
)

// Guest memory as the driver uses it: rings, then buffers, then room for a test's own use from FreeGPA to the end.
const (
	MemorySize  = guestmem.MinSize
	ringsGPA    = guestmem.GPA(1 << 20)
	ringsStride = 64 << 10
	usedOffset  = 32 << 10
	availOffset = 24 << 10
	buffersGPA  = guestmem.GPA(8 << 20)
	buffersSize = 40 << 20
	FreeGPA     = buffersGPA + buffersSize
)

// NewMemory returns guest memory of MemorySize bytes that lasts as long as the test.
func NewMemory(t testing.TB) *guestmem.Memory {
	t.Helper()
	mem, err := guestmem.New(MemorySize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mem.Close(); err != nil {
			t.Error(err)
		}
	})
	return mem
}

// Driver is a guest's virtio driver for one device. Requests may be made from several goroutines. Methods that
// fail the test at once (t.Fatal) must be called from the test's own goroutine.
type Driver struct {
	t   testing.TB
	mem *guestmem.Memory
	irq *devices.Event

	// vcpu is held for reading during each access to the device, and for writing while the machine is stopped.
	vcpu      sync.RWMutex
	transport *mmio.Transport
	hostError atomic.Pointer[error]

	features uint64
	buffers  allocator

	mu     sync.Mutex // guards queues against the interrupt handler
	queues []*Queue

	interrupts    atomic.Uint64
	configChanges atomic.Uint64
	deaf          atomic.Bool // interrupts are lost
	stopped       atomic.Bool
	done          chan struct{}
}

// NewDriver puts dev behind its own transport. Both are closed at the end of the test.
func NewDriver(t testing.TB, dev devices.Device, mem *guestmem.Memory) *Driver {
	t.Helper()
	irq, err := devices.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	d := &Driver{t: t, mem: mem, irq: irq, done: make(chan struct{})}
	if d.transport, err = d.newTransport(dev); err != nil {
		t.Fatal(err)
	}
	go d.handleInterrupts()
	t.Cleanup(d.Close)
	return d
}

func (d *Driver) newTransport(dev devices.Device) (*mmio.Transport, error) {
	return mmio.New(dev, d.mem, d.irq, mmio.Options{OnError: func(err error) { d.hostError.Store(&err) }})
}

// Close stops the device and waits for the driver's goroutine. The test calls it at its end in any case.
func (d *Driver) Close() {
	if d.stopped.Swap(true) {
		return
	}
	d.irq.Signal()
	<-d.done
	if err := errors.Join(d.transport.Close(), d.irq.Close()); err != nil {
		d.t.Error(err)
	}
}

// Mem returns the guest's memory.
func (d *Driver) Mem() *guestmem.Memory { return d.mem }

// Transport returns the current transport; Move replaces it.
func (d *Driver) Transport() *mmio.Transport {
	d.vcpu.RLock()
	defer d.vcpu.RUnlock()
	return d.transport
}

// HostError returns the last error that the transport reported to the machine's owner, or nil.
func (d *Driver) HostError() error {
	if p := d.hostError.Load(); p != nil {
		return *p
	}
	return nil
}

// Interrupts returns how many interrupts the driver has handled.
func (d *Driver) Interrupts() uint64 { return d.interrupts.Load() }

// ConfigChanges returns how many interrupts announced a change of the configuration space or of the status.
func (d *Driver) ConfigChanges() uint64 { return d.configChanges.Load() }

// WithDevice calls f with the current device, for what a test does on the host's side. The device does not move
// meanwhile. f must not use the driver.
func (d *Driver) WithDevice(f func(devices.Device)) {
	d.vcpu.RLock()
	defer d.vcpu.RUnlock()
	dev := d.transport.Device()
	if c, ok := dev.(*counted); ok {
		dev = c.Device
	}
	f(dev)
}

// Read32 reads a register.
func (d *Driver) Read32(reg uint64) uint32 {
	var p [4]byte
	d.ReadRaw(reg, p[:])
	return binary.LittleEndian.Uint32(p[:])
}

// Write32 writes a register.
func (d *Driver) Write32(reg uint64, v uint32) {
	var p [4]byte
	binary.LittleEndian.PutUint32(p[:], v)
	d.WriteRaw(reg, p[:])
}

// ReadRaw reads len(p) bytes at an offset of the register window.
func (d *Driver) ReadRaw(off uint64, p []byte) {
	d.vcpu.RLock()
	defer d.vcpu.RUnlock()
	d.transport.ReadIO(off, p)
}

// WriteRaw writes p at an offset of the register window.
func (d *Driver) WriteRaw(off uint64, p []byte) {
	d.vcpu.RLock()
	defer d.vcpu.RUnlock()
	d.transport.WriteIO(off, p)
}

// Config reads n bytes of the configuration space, and again if it changes meanwhile.
func (d *Driver) Config(off uint64, n int) []byte {
	p := make([]byte, n)
	for {
		before := d.Read32(RegConfigGeneration)
		for i := range p {
			d.ReadRaw(RegConfig+off+uint64(i), p[i:i+1])
		}
		if d.Read32(RegConfigGeneration) == before {
			return p
		}
	}
}

// Status reads the status register.
func (d *Driver) Status() uint32 { return d.Read32(RegStatus) }

// AddStatus sets bits of the status register.
func (d *Driver) AddStatus(bits uint32) { d.Write32(RegStatus, d.Status()|bits) }

// Reset resets the device and forgets the requests in flight.
func (d *Driver) Reset() {
	d.t.Helper()
	d.Write32(RegStatus, 0)
	if s := d.Status(); s != 0 {
		d.t.Fatalf("status %#x after a reset", s)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, q := range d.queues {
		q.stop()
	}
	d.queues = nil
	d.buffers.reset()
}

// started returns the queues that the interrupt handler must look at.
func (d *Driver) started() []*Queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.queues
}

// Offered returns the features that the device offers.
func (d *Driver) Offered() uint64 {
	d.Write32(RegDeviceFeaturesSel, 0)
	low := d.Read32(RegDeviceFeatures)
	d.Write32(RegDeviceFeaturesSel, 1)
	return uint64(low) | uint64(d.Read32(RegDeviceFeatures))<<32
}

// Negotiate resets the device, accepts VERSION_1 and those of its features that are in want, and reports whether
// the device has agreed.
func (d *Driver) Negotiate(want uint64) bool {
	d.t.Helper()
	d.Reset()
	return d.accept(d.Offered() & (want | FeatureVersion1))
}

func (d *Driver) accept(features uint64) bool {
	d.AddStatus(StatusAcknowledge)
	d.AddStatus(StatusDriver)
	for i := range uint32(2) {
		d.Write32(RegDriverFeaturesSel, i)
		d.Write32(RegDriverFeatures, uint32(features>>(32*i)))
	}
	d.features = features
	d.AddStatus(StatusFeaturesOK)
	return d.Status()&StatusFeaturesOK != 0
}

// Start takes the device from reset to running, with those of its features that are in want. All its queues have
// their largest size.
func (d *Driver) Start(want uint64) {
	d.t.Helper()
	if !d.Negotiate(want) {
		d.t.Fatalf("the device refuses the features %#x, which it offers", d.features)
	}
	d.SetupQueues()
	d.AddStatus(StatusDriverOK)
	if s := d.Status(); s != StatusAcknowledge|StatusDriver|StatusFeaturesOK|StatusDriverOK {
		d.t.Fatalf("status %#x after DRIVER_OK (host error: %v)", s, d.HostError())
	}
}

// Features returns the features that were negotiated last.
func (d *Driver) Features() uint64 { return d.features }

// SetupQueues lays out all queues, between Negotiate and DRIVER_OK.
func (d *Driver) SetupQueues() {
	d.t.Helper()
	for i := uint32(0); ; i++ {
		d.Write32(RegQueueSel, i)
		size := d.Read32(RegQueueNumMax)
		if size == 0 {
			return
		}
		q := newQueue(d, i, uint16(size))
		if err := q.clearRings(); err != nil {
			d.t.Fatal(err)
		}
		d.Write32(RegQueueNum, size)
		for _, r := range []struct {
			reg uint64
			gpa guestmem.GPA
		}{{RegQueueDesc, q.desc}, {RegQueueDriver, q.avail}, {RegQueueDevice, q.used}} {
			d.Write32(r.reg, uint32(r.gpa))
			d.Write32(r.reg+4, uint32(r.gpa>>32))
		}
		d.Write32(RegQueueReady, 1)
		if d.Read32(RegQueueReady) != 1 {
			d.t.Fatalf("queue %d does not become ready", i)
		}
		d.mu.Lock()
		d.queues = append(d.queues, q)
		d.mu.Unlock()
	}
}

// Queue returns the i-th queue of a started device.
func (d *Driver) Queue(i int) *Queue { return d.started()[i] }

// Queues returns how many queues the started device has.
func (d *Driver) Queues() int { return len(d.started()) }

// handleInterrupts is the guest's interrupt handler: it reads and acknowledges the status and then looks at the
// queues, as Linux does. No other code looks at them, so an interrupt that is never sent leaves requests
// unfinished.
func (d *Driver) handleInterrupts() {
	defer close(d.done)
	for {
		if err := d.irq.Wait(); err != nil {
			if !errors.Is(err, os.ErrClosed) {
				d.t.Error(err)
			}
			return
		}
		if d.stopped.Load() {
			return
		}
		if d.deaf.Load() {
			continue
		}
		d.vcpu.RLock()
		var p [4]byte
		d.transport.ReadIO(RegInterruptStatus, p[:])
		d.transport.WriteIO(RegInterruptACK, p[:])
		d.vcpu.RUnlock()
		status := binary.LittleEndian.Uint32(p[:])
		if status == 0 {
			continue
		}
		d.interrupts.Add(1)
		if status&2 != 0 {
			d.configChanges.Add(1)
		}
		if status&1 != 0 {
			for _, q := range d.started() {
				q.collect()
			}
		}
	}
}

// Move does what a sleep and a wake do: it stops the machine, saves the device, restores the state into fresh, and
// resumes the machine with fresh. It resets the old device; the device's owner closes it.
func (d *Driver) Move(fresh devices.Device) error {
	d.vcpu.Lock()
	defer d.vcpu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	old := d.transport
	if err := old.Pause(ctx); err != nil {
		return err
	}
	state, err := old.Export()
	if err != nil {
		return err
	}
	next, err := d.newTransport(fresh)
	if err != nil {
		return err
	}
	if err := next.Import(state); err != nil {
		return errors.Join(err, next.Close())
	}
	if err := old.Close(); err != nil {
		return errors.Join(fmt.Errorf("closing the old transport: %w", err), next.Close())
	}
	d.transport = next
	if err := next.Restore(); err != nil {
		return err
	}
	return next.Resume()
}

// PauseAndResume stops the device and resumes it after the given time.
func (d *Driver) PauseAndResume(rest time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	t := d.Transport()
	if err := t.Pause(ctx); err != nil {
		return err
	}
	time.Sleep(rest)
	return t.Resume()
}

// allocator hands out pages of the buffer area.
type allocator struct {
	mu   sync.Mutex
	used [buffersSize / guestmem.PageSize]bool
	next int
}

func (a *allocator) reset() {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.used[:])
}

func pages(n int) int { return max(1, (n+guestmem.PageSize-1)/guestmem.PageSize) }

func (a *allocator) alloc(n int) (guestmem.GPA, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	want, run := pages(n), 0
	for i := range 2 * len(a.used) {
		at := (a.next + i) % len(a.used)
		if at == 0 {
			run = 0
		}
		if run++; a.used[at] {
			run = 0
		}
		if run == want {
			first := at - want + 1
			for p := first; p <= at; p++ {
				a.used[p] = true
			}
			a.next = at + 1
			return buffersGPA + guestmem.GPA(first*guestmem.PageSize), nil
		}
	}
	return 0, fmt.Errorf("no room for a buffer of %d bytes", n)
}

func (a *allocator) free(gpa guestmem.GPA, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	first := int(gpa-buffersGPA) / guestmem.PageSize
	clear(a.used[first : first+pages(n)])
}

// newRand returns a source of random numbers that is the same in every run.
func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0x6472_6f77_7365)) }
