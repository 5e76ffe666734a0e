package mmio

import (
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// The saved state: kind, version and layout. Little-endian; a 32-bit length precedes strings:
//
//	device type u32, status u32, interrupt status u32, config generation u32,
//	device feature select u32, driver feature select u32, queue select u32,
//	accepted features u64, a bit beyond them u8, active u8, queues u16,
//	for each queue: size u16, ready u8, desc u64, avail u64, used u64,
//	  next avail u16, next used u16,
//	device: kind string, version u32, data string
const (
	stateKind    = "virtio-mmio"
	stateVersion = 1
	maxKind      = 64
)

// ErrInUse says that a state cannot be imported because a driver already uses the device.
var ErrInUse = errors.New("the device is already in use")

// state is the decoded state that Export keeps.
type state struct {
	id                uint32
	status            uint32
	interrupts        uint32
	generation        uint32
	deviceFeaturesSel uint32
	driverFeaturesSel uint32
	queueSel          uint32
	accepted          uint64
	acceptedBeyond    bool
	active            bool
	queues            []queue
	positions         []virtq.Position
	device            devices.Payload
}

// Export implements [devices.Stateful] for the transport and its device. The device must be paused.
func (t *Transport) Export() (devices.Payload, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.paused {
		return devices.Payload{}, fmt.Errorf("saving a virtio device of type %d: %w: pause it first", t.dev.ID(), devices.ErrNotPaused)
	}
	var inner devices.Payload
	if s, ok := t.dev.(devices.Stateful); ok {
		var err error
		if inner, err = s.Export(); err != nil {
			return devices.Payload{}, fmt.Errorf("saving a virtio device of type %d: %w", t.dev.ID(), err)
		}
	}
	var e devices.Encoder
	e.Uint32(uint32(t.dev.ID()))
	e.Uint32(t.status.Load())
	e.Uint32(t.interrupts.Load())
	e.Uint32(t.generation.Load())
	e.Uint32(t.deviceFeaturesSel)
	e.Uint32(t.driverFeaturesSel)
	e.Uint32(t.queueSel)
	e.Uint64(t.accepted)
	e.Bool(t.acceptedBeyond)
	e.Bool(t.active || t.restore != nil)
	e.Uint16(uint16(len(t.queues)))
	for i := range t.queues {
		q := &t.queues[i]
		var pos virtq.Position
		switch {
		case t.active && t.running[i] != nil:
			pos = t.running[i].Position()
		case t.restore != nil:
			pos = t.restore[i]
		}
		e.Uint16(q.layout.Size)
		e.Bool(q.ready)
		e.Uint64(uint64(q.layout.Desc))
		e.Uint64(uint64(q.layout.Avail))
		e.Uint64(uint64(q.layout.Used))
		e.Uint16(pos.NextAvail)
		e.Uint16(pos.NextUsed)
	}
	e.Bytes([]byte(inner.Kind))
	e.Uint32(inner.Version)
	e.Bytes(inner.Data)
	return e.Payload(stateKind, stateVersion), nil
}

func decode(data []byte) (*state, error) {
	d := devices.NewDecoder(data)
	s := &state{
		id:                d.Uint32(),
		status:            d.Uint32(),
		interrupts:        d.Uint32(),
		generation:        d.Uint32(),
		deviceFeaturesSel: d.Uint32(),
		driverFeaturesSel: d.Uint32(),
		queueSel:          d.Uint32(),
		accepted:          d.Uint64(),
		acceptedBeyond:    d.Bool(),
		active:            d.Bool(),
	}
	n := int(d.Uint16())
	if n > MaxQueues {
		d.Fail(fmt.Sprintf("%d queues where %d are possible", n, MaxQueues))
		n = 0
	}
	s.queues = make([]queue, n)
	s.positions = make([]virtq.Position, n)
	for i := range s.queues {
		s.queues[i].layout.Size = d.Uint16()
		s.queues[i].ready = d.Bool()
		s.queues[i].layout.Desc = guestmem.GPA(d.Uint64())
		s.queues[i].layout.Avail = guestmem.GPA(d.Uint64())
		s.queues[i].layout.Used = guestmem.GPA(d.Uint64())
		s.positions[i] = virtq.Position{NextAvail: d.Uint16(), NextUsed: d.Uint16()}
	}
	s.device.Kind = string(d.Bytes(maxKind))
	s.device.Version = d.Uint32()
	s.device.Data = d.Bytes(devices.MaxPayload)
	return s, d.Finish()
}

// check fails if the state cannot have come from this device, or is unreachable.
func (t *Transport) check(s *state) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf(format+": %w", append(args, devices.ErrPayload)...)
	}
	status := func(bits uint32) bool { return s.status&bits == bits }
	switch {
	case s.id != uint32(t.dev.ID()):
		return bad("it is of a device of type %d", s.id)
	case len(s.queues) != len(t.queues):
		return bad("it has %d queues, the device has %d", len(s.queues), len(t.queues))
	case s.status&^statusKnown != 0,
		status(statusDriver) && !status(statusAcknowledge),
		status(statusFeaturesOK) && !status(statusDriver),
		status(statusDriverOK) && !status(statusFeaturesOK):
		return bad("status %#x cannot be", s.status)
	case s.interrupts&^(interruptQueue|interruptConfig) != 0:
		return bad("interrupt status %#x cannot be", s.interrupts)
	case status(statusFeaturesOK) && (s.acceptedBeyond || s.accepted&FeatureVersion1 == 0):
		return bad("features %#x cannot have been accepted", s.accepted)
	case status(statusFeaturesOK) && s.accepted&^t.offered != 0:
		return bad("its driver uses the features %#x, which this device does not offer: restore it with the same device settings", s.accepted&^t.offered)
	case s.active && !status(statusDriverOK):
		return bad("it is active with status %#x", s.status)
	}
	for i := range s.queues {
		q := &s.queues[i]
		if n := q.layout.Size; n > t.queues[i].max || n&(n-1) != 0 {
			return bad("queue %d has size %d, the device allows %d", i, n, t.queues[i].max)
		}
		if !s.active || !q.ready {
			continue
		}
		if _, err := virtq.New(t.mem, q.layout, s.accepted); err != nil {
			return bad("queue %d: %v", i, err)
		}
	}
	return nil
}

// Import implements [devices.Stateful]. The transport must be fresh, and is paused afterwards. Restore starts the
// device again if it was running, and Resume lets it work.
func (t *Transport) Import(p devices.Payload) error {
	if err := p.Check(stateKind, stateVersion); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.status.Load() != 0 || t.active || t.restore != nil || t.closed {
		return fmt.Errorf("importing a virtio device of type %d: %w", t.dev.ID(), ErrInUse)
	}
	s, err := decode(p.Data)
	if err == nil {
		err = t.check(s)
	}
	if err != nil {
		return fmt.Errorf("importing a virtio device of type %d: %w", t.dev.ID(), err)
	}
	if dev, ok := t.dev.(devices.Stateful); ok {
		if err := dev.Import(s.device); err != nil {
			return fmt.Errorf("importing a virtio device of type %d: %w", t.dev.ID(), err)
		}
	} else if s.device.Kind != "" || s.device.Version != 0 || len(s.device.Data) != 0 {
		return fmt.Errorf("importing a virtio device of type %d: state of kind %q for a device that has none: %w",
			t.dev.ID(), s.device.Kind, devices.ErrPayload)
	}
	t.deviceFeaturesSel, t.driverFeaturesSel, t.queueSel = s.deviceFeaturesSel, s.driverFeaturesSel, s.queueSel
	t.accepted, t.acceptedBeyond = s.accepted, s.acceptedBeyond
	for i := range t.queues {
		t.queues[i].layout, t.queues[i].ready = s.queues[i].layout, s.queues[i].ready
	}
	t.status.Store(s.status)
	t.interrupts.Store(s.interrupts)
	t.generation.Store(s.generation)
	t.paused = true
	if s.active {
		t.restore = s.positions
	}
	return nil
}

// Restore starts a device that was running when its state was exported, on the same queues, at the same place. The
// device remains paused until Resume. Restore does nothing to a device that was not running or has not been
// imported. Guest memory must be in place.
func (t *Transport) Restore() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.restore == nil {
		return nil
	}
	if err := t.activate(t.restore); err != nil {
		return fmt.Errorf("restoring a virtio device of type %d: %w", t.dev.ID(), err)
	}
	t.restore = nil
	return nil
}
