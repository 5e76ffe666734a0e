package vsock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Virtqueues of the device (virtio 1.2, 5.10.2), and their largest sizes. Linux
// posts receive buffers of 4 KiB until the ring is full, and 8 event buffers.
const (
	queueRX = iota
	queueTX
	queueEvent
	queueCount

	rxSize    = 256
	txSize    = 256
	eventSlot = 16
)

// featureStream says that stream sockets are supported (virtio 1.2, 5.10.3).
const featureStream uint64 = 1 << 0

// Limits on the context ID of a guest: 0 to 2 are reserved, and the field has 32 bits that are not all ones (virtio
// 1.2, 5.10.4).
const (
	MinCID = 3
	MaxCID = 1<<32 - 2
)

// Config is the configuration of a device.
type Config struct {
	// CID is the guest's context ID, MinCID to MaxCID. Guests of different VMs may share one. Import replaces it by
	// the ID in the saved state, which the guest knows.
	CID uint64
	// Path is the Unix socket for host clients; the guest reaches port P at Path_P. Its last element is at most 96
	// bytes long when Path itself fits in a Unix socket address; longer paths need /proc. With Listener, Path may be
	// empty; with Connect too, the device does not use it.
	Path string
	// Listener, if not nil, is a Unix socket that already listens for host clients. The device takes a duplicate of
	// it, and neither creates nor removes a file.
	Listener *os.File
	// Connect, if not nil, connects the guest to a port of the host in place of Path_P. The device calls it on its
	// own goroutine, so it must not block. It calls done exactly once, from any goroutine. Without an error fd is a
	// connected stream socket that does not block, and that the device then owns. own says that the connection does
	// not count as use: see [Stats].
	Connect func(port uint32, done func(fd int, own bool, err error))
}

// Device is a virtio socket device. Any goroutine may call its methods.
type Device struct {
	mem   *guestmem.Memory
	stats Stats
	inbox inbox
	// connect is Config.Connect.
	connect func(uint32, func(int, bool, error))

	mu       sync.Mutex // guards what follows
	cid      uint64
	endpoint *endpoint
	engine   *engine // nil while the device is not active
	// carried is the state from a snapshot that the guest has not been told yet. The engine takes it over.
	carried *state
	// nextPort is where the search for a free host port begins. It continues after resets and restores, so that a
	// new connection is not mistaken for an old one.
	nextPort uint32
	closed   bool
}

var (
	_ devices.Device   = (*Device)(nil)
	_ devices.Pauser   = (*Device)(nil)
	_ devices.Stateful = (*Device)(nil)
)

// New makes a device and listens on its path, or takes over the listener. Clients that connect before the guest's
// driver is ready wait. New fails with ErrInUse when another process listens on the path, and with ErrPath when the
// path cannot be a socket's.
func New(mem *guestmem.Memory, cfg Config) (*Device, error) {
	if cfg.CID < MinCID || cfg.CID > MaxCID {
		return nil, fmt.Errorf("making a vsock device: context ID %d is not from %d to %d", cfg.CID, MinCID, uint64(MaxCID))
	}
	path := cfg.Path
	if cfg.Listener != nil && cfg.Connect != nil {
		path = ""
	}
	e, err := openEndpoint(path, cfg.Listener)
	if err != nil {
		return nil, fmt.Errorf("making a vsock device: %w", err)
	}
	return &Device{mem: mem, connect: cfg.Connect, cid: cfg.CID, endpoint: e, nextPort: firstHostPort}, nil
}

// ID returns the virtio device type.
func (d *Device) ID() devices.ID { return devices.IDVsock }

// Features returns the features: stream sockets.
func (d *Device) Features() uint64 { return featureStream }

// QueueSizes returns the sizes of rx, tx and event.
func (d *Device) QueueSizes() []uint16 { return []uint16{rxSize, txSize, eventSlot} }

// ReadConfig reads struct virtio_vsock_config (virtio 1.2, 5.10.4): the guest's
// context ID.
func (d *Device) ReadConfig(off uint32, p []byte) {
	var config [8]byte
	d.mu.Lock()
	binary.LittleEndian.PutUint64(config[:], d.cid)
	d.mu.Unlock()
	devices.ReadConfig(config[:], off, p)
}

// WriteConfig does nothing: the configuration space is read-only.
func (d *Device) WriteConfig(uint32, []byte) {}

// Activate starts the device. A restored one does nothing until Resume.
func (d *Device) Activate(a devices.Activation) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return fmt.Errorf("activating a vsock device: %w", os.ErrClosed)
	case d.engine != nil:
		return errors.New("activating a vsock device: it is active")
	case len(a.Queues) != queueCount || a.Queues[queueRX] == nil || a.Queues[queueTX] == nil:
		return fmt.Errorf("activating a vsock device: the driver has not set up its rx and tx queues: %w", virtq.ErrLayout)
	}
	if !a.Restored {
		d.carried = nil
	}
	e, err := newEngine(d, a)
	if err != nil {
		return fmt.Errorf("activating a vsock device: %w", err)
	}
	d.carried = nil
	d.engine = e
	return nil
}

// Reset closes all connections and forgets the driver. The listener stays.
func (d *Device) Reset() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reset()
	return nil
}

func (d *Device) reset() {
	if d.engine == nil {
		d.carried = nil
		return
	}
	d.engine.loop.Stop()
	d.inbox.detach()
	d.nextPort = d.engine.nextPort
	d.engine = nil
}

// Close resets the device, ends the listeners of Listen, and removes the device's socket. The device cannot be used
// afterwards.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	d.reset()
	d.inbox.close()
	return d.endpoint.close()
}

// Pause stops the device. The host's sockets get what the guest has sent until then, as far as they take it without
// blocking. The device keeps the rest, and has not told the guest that it was received. Connections stay open, and
// new clients wait.
func (d *Device) Pause(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.engine == nil {
		return nil
	}
	return d.engine.loop.Pause(ctx)
}

// Resume undoes Pause.
func (d *Device) Resume() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.engine != nil {
		d.engine.loop.Resume()
	}
	return nil
}
