package vsock

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/devices"
)

// Kind and version of the saved state.
const (
	stateKind    = "virtio-vsock"
	stateVersion = 2
	// withoutParked is the version that ends before the parked connections.
	withoutParked = 1
)

// maxRefused bounds the refused connections of a saved state: queued resets, and connections that the guest waits
// for.
const maxRefused = maxResets + MaxConnections

// state is the state of the device in a snapshot.
type state struct {
	cid      uint64
	nextPort uint32
	// reset reports that a transport reset is needed even when no connection is live.
	reset bool
	// live are connections that the guest has, or may have, established.
	live []key
	// refused are connections with a reset on its way, or for which the guest still waits. On a transport reset
	// Linux resets only established ones.
	refused []key
	// parked are connections that the guest has accepted and nobody has used: see Device.Park.
	parked []parked
}

// maxParked bounds the parked connections.
const maxParked = 1

// parked is a connection on which nothing was sent yet.
type parked struct {
	key       key
	peerAlloc uint32
}

// keeps reports whether the parked connections outlive a restore. They do if all others end at the ports that these are
// to. What serves such a port must not take a reset, which looks like a clean end, for one.
func (s *state) keeps() bool {
	if s.reset || len(s.parked) == 0 {
		return false
	}
	for _, k := range s.live {
		if !slices.ContainsFunc(s.parked, func(p parked) bool { return p.key.guestPort == k.guestPort }) {
			return false
		}
	}
	return true
}

func (s *state) encode() []byte {
	var e devices.Encoder
	e.Uint64(s.cid)
	e.Uint32(s.nextPort)
	e.Bool(s.reset)
	for _, keys := range [][]key{s.live, s.refused} {
		e.Uint32(uint32(len(keys)))
		for _, k := range keys {
			e.Uint32(k.guestPort)
			e.Uint32(k.hostPort)
		}
	}
	e.Uint32(uint32(len(s.parked)))
	for _, p := range s.parked {
		e.Uint32(p.key.guestPort)
		e.Uint32(p.key.hostPort)
		e.Uint32(p.peerAlloc)
	}
	return e.Data()
}

func decodeState(p devices.Payload) (*state, error) {
	version := uint32(stateVersion)
	if p.Version == withoutParked {
		version = withoutParked
	}
	d := p.Decode(stateKind, version)
	s := &state{cid: d.Uint64(), nextPort: d.Uint32(), reset: d.Bool()}
	if s.cid < MinCID || s.cid > MaxCID {
		d.Fail("the context ID is out of range")
	}
	if s.nextPort < firstHostPort || s.nextPort >= lastHostPort {
		d.Fail("the next port is out of range")
	}
	keys := func(limit uint32) (ks []key) {
		n := d.Uint32()
		if n > limit {
			d.Fail("there are too many connections")
			n = 0
		}
		for range n {
			ks = append(ks, key{guestPort: d.Uint32(), hostPort: d.Uint32()})
		}
		return ks
	}
	s.live = keys(MaxConnections)
	s.refused = keys(maxRefused)
	if version == withoutParked {
		return s, d.Finish()
	}
	n := d.Uint32()
	if n > maxParked {
		d.Fail("there are too many parked connections")
		n = 0
	}
	for range n {
		s.parked = append(s.parked, parked{key: key{guestPort: d.Uint32(), hostPort: d.Uint32()}, peerAlloc: d.Uint32()})
	}
	return s, d.Finish()
}

// Export returns the state of a paused device. It fails with [devices.ErrNotPaused] when the device is active and
// not paused.
func (d *Device) Export() (devices.Payload, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := &state{}
	switch {
	case d.engine != nil:
		if err := d.engine.loop.AwaitPaused(); err != nil {
			return devices.Payload{}, fmt.Errorf("exporting %s state: %w", stateKind, err)
		}
		d.engine.export(s)
	case d.carried != nil:
		*s = *d.carried
	default:
		s.nextPort = d.nextPort
	}
	s.cid = d.cid
	return devices.Payload{Kind: stateKind, Version: stateVersion, Data: s.encode()}, nil
}

// Import loads a saved state. The guest's context ID becomes the saved one. After [Device.Activate] the guest
// learns that its connections are gone.
func (d *Device) Import(p devices.Payload) error {
	s, err := decodeState(p)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.engine != nil {
		return fmt.Errorf("importing %s state: the device is active", stateKind)
	}
	d.cid, d.nextPort, d.carried = s.cid, s.nextPort, s
	return nil
}

// export fills in what the guest knows or waits for. The loop must be paused.
func (e *engine) export(s *state) {
	s.nextPort = e.nextPort
	s.reset = e.hold
	if e.carried != nil {
		s.reset = s.reset || e.carried.reset
		s.live = append(s.live, e.carried.live...)
		s.refused = append(s.refused, e.carried.refused...)
		s.parked = append(s.parked, e.carried.parked...)
	}
	for _, c := range e.slots {
		switch {
		case c == nil, c.state == stateHandshake, c.state == stateDraining:
		case c.say&sayRequest != 0: // the guest has never heard of it
		case c.say&sayResponse != 0, c.state == stateConnecting:
			s.refused = append(s.refused, c.key)
		case c.state == stateParked:
			s.parked = append(s.parked, parked{c.key, c.peerAlloc})
		default:
			s.live = append(s.live, c.key)
		}
	}
	for i := range e.resetsCount {
		s.refused = append(s.refused, e.resets[(e.resetsFrom+i)%len(e.resets)].key)
	}
	s.live = s.live[:min(len(s.live), MaxConnections)]
	s.refused = s.refused[:min(len(s.refused), maxRefused)]
}

// announce tells a restored guest which connections are gone.
func (e *engine) announce() error {
	s := e.carried
	e.carried = nil
	told := false
	if s.keeps() {
		for _, p := range s.parked {
			e.keep(p)
		}
	} else {
		for _, p := range s.parked {
			s.live = append(s.live, p.key)
		}
	}
	if s.reset || len(s.live) > 0 && e.parked == nil {
		var err error
		if told, err = e.transportReset(); err != nil {
			return err
		}
	}
	if !told {
		for _, k := range s.live {
			e.sendReset(k, typeStream)
		}
	}
	for _, k := range s.refused {
		e.sendReset(k, typeStream)
	}
	return nil
}

// keep makes a parked connection of a snapshot one of this device.
func (e *engine) keep(p parked) {
	c := e.newConn(-1, stateParked, true)
	if c == nil {
		e.sendReset(p.key, typeStream)
		return
	}
	e.register(c, p.key)
	c.peerAlloc = p.peerAlloc
	e.parked = c
}

// transportReset puts the event into the event queue, and then holds back all packets until the driver has given
// the buffer back. It returns false if the driver has posted no buffer.
func (e *engine) transportReset() (bool, error) {
	if e.event == nil {
		return false, nil
	}
	index, err := e.eventIndex()
	if err != nil {
		return false, err
	}
	c := &e.rxChain[0]
	ok, err := e.event.Pop(c)
	if err != nil || !ok {
		return false, err
	}
	if c.Writer.Remaining() < eventSize {
		e.stats.ShortBuffers.Add(1)
		return false, e.event.Push(c.Head(), 0)
	}
	var event [eventSize]byte
	binary.LittleEndian.PutUint32(event[:], eventTransportReset)
	if _, err := c.Writer.Write(event[:]); err != nil {
		return false, err
	}
	if err := e.event.Push(c.Head(), eventSize); err != nil {
		return false, err
	}
	e.hold, e.ackIndex = true, index
	e.holdUntil = e.now + int64(ackTimeout)
	// The device needs a kick for the next new buffer, after those already posted. EnableKicks asks for one at the
	// queue's position, so pop all posted buffers first and unpop them afterwards.
	left := 0
	for ; left < eventSlot; left++ {
		if ok, err := e.event.Pop(c); err != nil || !ok {
			if err != nil {
				return false, err
			}
			break
		}
	}
	_, err = e.event.EnableKicks()
	for range left {
		e.event.Unpop(c)
	}
	return true, err
}

// eventIndex returns the driver's index in the event queue.
func (e *engine) eventIndex() (uint16, error) {
	return e.mem.LoadUint16(e.event.Layout().Avail + 2)
}

// checkHold lets packets flow again once the driver has handled the reset.
func (e *engine) checkHold() error {
	index, err := e.eventIndex()
	if err != nil {
		return err
	}
	if index != e.ackIndex || e.now >= e.holdUntil {
		e.hold, e.holdUntil = false, 0
	}
	return nil
}
