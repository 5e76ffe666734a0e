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

// Device is a virtio device behind a transport. The transport calls its methods
// one at a time; a device runs its queues on goroutines of its own between
// Activate and Reset.
type Device interface {
	ID() ID
	// Features is what the device offers, without the transport's own bits.
	Features() uint64
	// QueueSizes gives the largest size of each virtqueue.
	QueueSizes() []uint16
	// ReadConfig fills p from the configuration space at off; bytes beyond
	// its end read as zero.
	ReadConfig(off uint32, p []byte)
	// WriteConfig writes p at off; what is read-only or beyond the end is
	// ignored.
	WriteConfig(off uint32, p []byte)
	// Activate starts the device after the driver has set DRIVER_OK. When it
	// fails the transport calls Reset.
	Activate(Activation) error
	// Reset stops the device, waits until nothing of it touches guest memory
	// any more, and forgets all that Activate was given. Resetting a device
	// that is not active does nothing.
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
	// Interrupt tells the driver something.
	Interrupt Interrupt
	// Restored says that the driver was already running: its queues go on
	// where they stopped, and Import has been called before. The transport
	// pauses the device right after Activate, before anything is kicked.
	Restored bool
}

// Queue is a virtqueue together with the event that its driver kicks.
type Queue struct {
	*virtq.Queue
	// Kick is signalled when the driver has made buffers available. The
	// transport owns it and closes it after Reset.
	Kick *Event

	worker *Worker // that of StartWorker
}

// Interrupt sends notifications to the driver. Its methods may be called from
// any goroutine, never block and do not fail: an interrupt that the host cannot
// deliver breaks the whole machine, which its owner learns elsewhere.
type Interrupt interface {
	// Queue says that used buffers are waiting (virtio 1.2, 2.3).
	Queue()
	// Config says that the configuration space has changed.
	Config()
	// NeedsReset gives the device up: it has found its driver to break the
	// rules so that it cannot go on (virtio 1.2, 2.1.2, DEVICE_NEEDS_RESET).
	NeedsReset(reason error)
}

// Pauser is what can stop at a defined point. A transport calls it only for an
// active device; Reset undoes Pause.
type Pauser interface {
	// Pause returns when no request is in flight any more and nothing of the
	// device touches guest memory, its backing or the host until Resume. A
	// paused device still accepts kicks and register accesses; it acts on
	// them after Resume. Pausing twice is the same as once. When ctx ends
	// first, Pause returns its error and the device runs on.
	Pause(ctx context.Context) error
	// Resume undoes Pause, and looks at all queues once, since a kick may
	// have come in between.
	Resume() error
}

// Stateful is what a snapshot has to keep of a device.
type Stateful interface {
	// Export returns the state of a paused device.
	Export() (Payload, error)
	// Import puts a state that Export returned into a device that has not
	// been activated. It fails with ErrPayload, and changes nothing, when the
	// payload is of another kind, of a version it does not know, or damaged.
	Import(Payload) error
}

// Payload is the state of one device, as its own code has written it.
type Payload struct {
	// Kind names the device type, such as "virtio-blk".
	Kind string
	// Version is of the layout of Data, counted up by incompatible changes.
	Version uint32
	// Data is at most MaxPayload bytes.
	Data []byte
}

// MaxPayload bounds the saved state of one device, in bytes.
const MaxPayload = 16 << 20

// ErrPayload says that a saved device state cannot be used, ErrNotPaused that the state of a running device was asked
// for.
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
