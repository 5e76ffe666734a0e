package devices

import (
	"context"
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// ID is a virtio device type (virtio 1.2, section 5).
type ID uint32

// The device types that drowse has.
const (
	IDNet     ID = 1
	IDBlock   ID = 2
	IDEntropy ID = 4
	IDBalloon ID = 5
	IDVsock   ID = 19
	IDFS      ID = 26
)

// Device is a virtio device behind a transport. The transport calls its methods one at a time. Between Activate and
// Reset the device runs its queues on goroutines of its own.
type Device interface {
	ID() ID
	// Features returns the features that the device offers, without the transport's own bits.
	Features() uint64
	// QueueSizes returns the largest size of each virtqueue.
	QueueSizes() []uint16
	// ReadConfig fills p from the configuration space at off; bytes beyond
	// its end read as zero.
	ReadConfig(off uint32, p []byte)
	// WriteConfig writes p at off. It ignores what is read-only or beyond the end.
	WriteConfig(off uint32, p []byte)
	// Activate starts the device after the driver has set DRIVER_OK. The transport calls Reset if Activate fails.
	Activate(Activation) error
	// Reset stops the device, waits until no part of it touches guest memory any more, and forgets everything from
	// Activate. It does nothing to a device that is not active.
	Reset() error
}

// ReadConfig fills p from a configuration space at off, as ReadConfig of a [Device] does.
func ReadConfig(config []byte, off uint32, p []byte) {
	clear(p)
	if uint64(off) < uint64(len(config)) {
		copy(p, config[off:])
	}
}

// Activation is what a device gets from its transport when the driver is ready.
type Activation struct {
	// Features that both sides agreed on.
	Features uint64
	// Queues has one entry for each of QueueSizes; nil where the driver left
	// the queue unconfigured.
	Queues []*Queue
	// Interrupt notifies the driver.
	Interrupt Interrupt
	// Restored reports that the driver was already running: its queues continue where they stopped, and Import has
	// been called before. The transport pauses the device right after Activate, before any kick.
	Restored bool
}

// Queue is a virtqueue together with the event that its driver kicks.
type Queue struct {
	*virtq.Queue
	// The driver signals Kick when it has made buffers available. The transport owns Kick and closes it after
	// Reset.
	Kick *Event

	worker *Worker // from StartWorker
}

// Interrupt sends notifications to the driver. Any goroutine may call its methods. They never block and do not
// fail: an interrupt that the host cannot deliver breaks the whole machine, and the owner learns that elsewhere.
type Interrupt interface {
	// Queue tells the driver that used buffers are waiting (virtio 1.2, 2.3).
	Queue()
	// Config tells the driver that the configuration space has changed.
	Config()
	// NeedsReset gives the device up because it cannot continue, for instance after its driver broke a rule (virtio
	// 1.2, 2.1.2, DEVICE_NEEDS_RESET).
	NeedsReset(reason error)
}

// Pauser is a device that can stop at a defined point. A transport calls it only for an active device. Reset undoes
// Pause.
type Pauser interface {
	// Pause returns when no request is in flight any more and no part of the device touches guest memory, its
	// backing or the host until Resume. A paused device still accepts kicks and register accesses; it acts on them
	// after Resume. A second Pause does nothing. If ctx ends first, Pause returns its error and the device
	// continues to run.
	Pause(ctx context.Context) error
	// Resume undoes Pause. It looks at all queues once, since a kick may have come in between.
	Resume() error
}

// Stateful is a device with state for a snapshot to keep.
type Stateful interface {
	// Export returns the state of a paused device.
	Export() (Payload, error)
	// Import loads a state from Export into a device that has not been activated. If the payload is of another kind
	// or an unknown version, or damaged, it fails with ErrPayload and changes nothing.
	Import(Payload) error
}

// Payload is the state of one device, in the device's own encoding.
type Payload struct {
	// Kind names the device type, such as "virtio-blk".
	Kind string
	// Version is the version of the layout of Data. Incompatible changes increment it.
	Version uint32
	// Data is at most MaxPayload bytes.
	Data []byte
}

// MaxPayload bounds the saved state of one device, in bytes.
const MaxPayload = 16 << 20

// ErrPayload says that a saved device state cannot be used. ErrNotPaused says that the device must be paused first.
var (
	ErrPayload   = errors.New("unusable device state")
	ErrNotPaused = errors.New("the device is not paused")
)

// Check returns an error that wraps ErrPayload unless the payload is of the
// given kind and version and no larger than MaxPayload.
func (p Payload) Check(kind string, version uint32) error {
	switch {
	case p.Kind != kind:
		return fmt.Errorf("importing state of kind %q into a %s device: %w", p.Kind, kind, ErrPayload)
	case p.Version != version:
		return fmt.Errorf("importing %s state of version %d, this build reads version %d: %w: use the drowse that wrote it, or boot the VM afresh",
			kind, p.Version, version, ErrPayload)
	case len(p.Data) > MaxPayload:
		return fmt.Errorf("importing %s state of %d bytes, more than %d: %w", kind, len(p.Data), MaxPayload, ErrPayload)
	}
	return nil
}
