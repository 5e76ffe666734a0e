package hostileguest

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
)

// figures count the events of one device, over all machines that have it.
type figures struct {
	starts     atomic.Uint64 // of the device by its driver
	interrupts atomic.Uint64
	broken     atomic.Uint64 // times that it was given up because of its driver
	longest    atomic.Int64  // pause of this device alone, in nanoseconds
	last       atomic.Int64  // its last pause

	mu     sync.Mutex
	bad    uint64           // malformed chains of earlier activations
	queues []*devices.Queue // of the current activation
}

// badChains returns how many chains the queues themselves have refused.
func (f *figures) badChains() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.bad
	for _, q := range f.queues {
		if q != nil {
			n += q.BadChains()
		}
	}
	return n
}

func (f *figures) have(queues []*devices.Queue) {
	bad := f.badChains()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bad, f.queues = bad, queues
}

// watched is a device with figures. It reports failures of the host.
type watched struct {
	devices.Device
	name string
	*figures
	hostError func(device string, err error)
}

func (w *watched) Activate(a devices.Activation) error {
	a.Interrupt = &interrupts{a.Interrupt, w}
	w.starts.Add(1)
	w.have(a.Queues)
	return w.told(w.Device.Activate(a))
}

func (w *watched) Reset() error {
	err := w.told(w.Device.Reset())
	w.have(nil)
	return err
}

func (w *watched) Pause(ctx context.Context) error {
	begin := time.Now()
	err := w.Device.(devices.Pauser).Pause(ctx)
	took := int64(time.Since(begin))
	w.last.Store(took)
	w.longest.Store(max(w.longest.Load(), took)) // pauses come one at a time
	return err
}

func (w *watched) Resume() error { return w.told(w.Device.(devices.Pauser).Resume()) }

func (w *watched) Export() (devices.Payload, error) {
	p, err := w.Device.(devices.Stateful).Export()
	return p, w.told(err)
}

func (w *watched) Import(p devices.Payload) error {
	return w.told(w.Device.(devices.Stateful).Import(p))
}

// told returns err, and reports it first unless the guest is to blame.
func (w *watched) told(err error) error {
	if err != nil && !errors.Is(err, virtq.ErrDriver) {
		w.hostError(w.name, err)
	}
	return err
}

type interrupts struct {
	devices.Interrupt
	w *watched
}

func (i *interrupts) Queue() {
	i.w.interrupts.Add(1)
	i.Interrupt.Queue()
}

func (i *interrupts) NeedsReset(reason error) {
	i.w.broken.Add(1)
	_ = i.w.told(reason)
	i.Interrupt.NeedsReset(reason)
}
