package net

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Virtqueues of the device without VIRTIO_NET_F_MQ (virtio 1.2, 5.1.2).
const (
	queueRX = iota
	queueTX
	queueCount

	queueSize = 256
)

// Feature bits (virtio 1.2, 5.1.3).
const (
	featureCsum      uint64 = 1 << 0
	featureGuestCsum uint64 = 1 << 1
	featureMAC       uint64 = 1 << 5
	featureGuestTSO4 uint64 = 1 << 7
	featureGuestTSO6 uint64 = 1 << 8
	featureGuestECN  uint64 = 1 << 9
	featureHostTSO4  uint64 = 1 << 11
	featureHostTSO6  uint64 = 1 << 12
	featureHostECN   uint64 = 1 << 13
	featureMrgRxbuf  uint64 = 1 << 15
	featureStatus    uint64 = 1 << 16

	featureGuestTSO = featureGuestTSO4 | featureGuestTSO6
)

// Configuration space (virtio 1.2, 5.1.4).
const (
	configMAC      = 0
	configStatus   = 6
	configMaxPairs = 8
	configSize     = 12 // with an MTU, which is not announced

	statusLinkUp = 1
)

// Backend carries frames. One write to its descriptor sends a frame, and one read receives one. Each frame begins
// with a struct virtio_net_hdr of HeaderSize bytes.
type Backend interface {
	// FD returns a descriptor in non-blocking mode. It is valid until the device is reset.
	FD() int
	// SetOffloads sets what the backend may leave for the guest to do in frames that the guest receives:
	// TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 and TUN_F_TSO_ECN of the kernel's if_tun.h.
	SetOffloads(flags int) error
}

// MAC is an Ethernet address.
type MAC [6]byte

// Config describes a device.
type Config struct {
	// MAC is the guest's address: unicast, not zero. Import replaces it with the one of the saved state, which the
	// guest knows.
	MAC MAC
	// LinkDown makes the device start with its link down, even if it imports the state of one whose link was up: a
	// clone must stay silent until it has its own identity. SetLink(true) raises the link.
	LinkDown bool
	// Held makes the device pass on nothing in either direction until Release, whatever the link. What the guest
	// sends waits in its queue. So a waking guest stays silent until its policy is in place, and loses nothing, as
	// it would with its link down.
	Held bool
}

// Device is a virtio network device. All methods may be called from any
// goroutine.
type Device struct {
	mem     *guestmem.Memory
	backend Backend
	config  Config
	stats   Stats
	link    atomic.Bool
	held    atomic.Bool
	// gone reports that the backend's interface was removed: the link is down for good. It is not part of the state, so
	// that another backend has the link that this one had.
	gone atomic.Bool

	mu     sync.Mutex // guards what follows
	mac    MAC
	engine *engine // nil while the device is not active
	// told is the link state that the guest last learned. The engine keeps it while the device is active.
	told bool
}

var (
	_ devices.Device   = (*Device)(nil)
	_ devices.Pauser   = (*Device)(nil)
	_ devices.Stateful = (*Device)(nil)
)

// New makes a device on backend. The caller keeps the backend, which must outlive the device.
func New(mem *guestmem.Memory, backend Backend, cfg Config) (*Device, error) {
	if (cfg.MAC == MAC{}) || cfg.MAC[0]&1 != 0 {
		return nil, fmt.Errorf("making a network device: %x is not the address of one host", cfg.MAC)
	}
	d := &Device{mem: mem, backend: backend, config: cfg, mac: cfg.MAC, told: !cfg.LinkDown}
	d.link.Store(!cfg.LinkDown)
	d.held.Store(cfg.Held)
	return d, nil
}

// ID implements [devices.Device].
func (d *Device) ID() devices.ID { return devices.IDNet }

// Features implements [devices.Device].
func (d *Device) Features() uint64 {
	return featureCsum | featureGuestCsum | featureMAC | featureStatus | featureMrgRxbuf |
		featureGuestTSO | featureGuestECN | featureHostTSO4 | featureHostTSO6 | featureHostECN
}

// QueueSizes implements [devices.Device].
func (d *Device) QueueSizes() []uint16 { return []uint16{queueSize, queueSize} }

// ReadConfig implements [devices.Device].
func (d *Device) ReadConfig(off uint32, p []byte) {
	var config [configSize]byte
	d.mu.Lock()
	copy(config[configMAC:], d.mac[:])
	d.mu.Unlock()
	if d.up() {
		binary.LittleEndian.PutUint16(config[configStatus:], statusLinkUp)
	}
	binary.LittleEndian.PutUint16(config[configMaxPairs:], 1)
	devices.ReadConfig(config[:], off, p)
}

// WriteConfig implements [devices.Device]. The guest can write nothing here.
func (d *Device) WriteConfig(uint32, []byte) {}

// Activate implements [devices.Device]. After a restore the device stands still
// until Resume.
func (d *Device) Activate(a devices.Activation) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.engine != nil:
		return errors.New("activating a network device: it is active")
	case len(a.Queues) != queueCount || a.Queues[queueRX] == nil || a.Queues[queueTX] == nil:
		return fmt.Errorf("activating a network device: the driver has not set up both queues: %w", virtq.ErrLayout)
	}
	if err := d.backend.SetOffloads(offloads(a.Features)); err != nil {
		return fmt.Errorf("activating a network device: %w", err)
	}
	e, err := newEngine(d, a)
	if err != nil {
		return fmt.Errorf("activating a network device: %w", err)
	}
	d.engine = e
	return nil
}

// offloads translates the driver's features into the offloads of frames that it receives.
func offloads(features uint64) int {
	if features&featureGuestCsum == 0 {
		// The others need it (virtio 1.2, 5.1.3.1).
		return 0
	}
	flags := unix.TUN_F_CSUM
	if features&featureGuestTSO4 != 0 {
		flags |= unix.TUN_F_TSO4
	}
	if features&featureGuestTSO6 != 0 {
		flags |= unix.TUN_F_TSO6
	}
	if features&featureGuestECN != 0 && features&featureGuestTSO != 0 {
		flags |= unix.TUN_F_TSO_ECN
	}
	return flags
}

// Reset implements [devices.Device].
func (d *Device) Reset() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.engine != nil {
		d.engine.loop.Stop()
	}
	d.engine = nil
	// The next driver reads the status for itself.
	d.told = d.up()
	return nil
}

// SetLink raises or lowers the link and tells the guest. While the device is
// paused it takes effect on Resume.
func (d *Device) SetLink(up bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.link.Store(up)
	if d.engine != nil {
		d.engine.loop.Do()
	}
}

// Release lets a held device pass on what waits and all that follows. A second call does nothing.
func (d *Device) Release() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.held.CompareAndSwap(true, false) && d.engine != nil {
		d.engine.loop.Do()
	}
}

// up reports whether the guest has a link.
func (d *Device) up() bool { return d.link.Load() && !d.gone.Load() }

// Link reports whether the link is up.
func (d *Device) Link() bool { return d.up() }

// Pause implements [devices.Pauser]. Before it stops, the device sends the guest's waiting frames as far as the
// backend takes them, and gives the guest the backend's frames as far as it has buffers, a full queue at most.
func (d *Device) Pause(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.engine == nil {
		return nil
	}
	return d.engine.loop.Pause(ctx)
}

// Resume implements [devices.Pauser].
func (d *Device) Resume() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.engine != nil {
		d.engine.loop.Resume()
	}
	return nil
}
