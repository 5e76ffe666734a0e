package balloon

import (
	"encoding/binary"
	"fmt"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
)

// GuestStats is what the guest says about its memory, in bytes where it is an
// amount. A field is zero if the guest does not know it.
type GuestStats struct {
	SwapIn, SwapOut          uint64
	MajorFaults, MinorFaults uint64
	Free, Total, Available   uint64
	Caches                   uint64
}

// statSize is that of one statistic: tag u16, value u64, without padding
// (virtio 1.2, 5.5.6.3). maxStats bounds how many are read of one buffer.
const (
	statSize = 10
	maxStats = 32
)

// fields has them in the order of their tags (virtio 1.2, 5.5.6.4).
func (s *GuestStats) fields() [8]*uint64 {
	return [...]*uint64{
		&s.SwapIn, &s.SwapOut, &s.MajorFaults, &s.MinorFaults, &s.Free, &s.Total, &s.Available, &s.Caches,
	}
}

func (s *GuestStats) set(tag uint16, v uint64) {
	if f := s.fields(); int(tag) < len(f) {
		*f[tag] = v
	}
}

// statsQueue works the other way round: the driver puts one buffer of statistics
// into it, which the device keeps, and gives back when it wants new ones.
type statsQueue struct {
	d     *Device
	queue *devices.Queue
	irq   devices.Interrupt
	chain virtq.Chain
	raw   [statSize * maxStats]byte
	head  uint16
	held  bool // head is with us
}

// RequestStats asks the guest for new statistics. They come in the guest's own
// time, if it knows them at all; GuestStats has the latest.
func (d *Device) RequestStats() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wantStats.Store(true)
	if d.statsKick != nil {
		d.statsKick.Signal()
	}
}

// GuestStats is the latest that the guest has said; ok is false before it has said
// anything.
func (d *Device) GuestStats() (s GuestStats, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.guest, d.guest != GuestStats{}
}

func (s *statsQueue) serve() {
	if s.queue.Broken() != nil {
		return
	}
	if err := s.exchange(); err != nil {
		s.queue.Break(err)
		s.irq.NeedsReset(err)
	}
}

func (s *statsQueue) exchange() error {
	if s.held && s.d.wantStats.Swap(false) {
		if err := s.giveBack(); err != nil {
			return err
		}
	}
	// The driver has one buffer only; more than one is given back at once, and
	// the worker is left after as many as the queue can hold.
	for range QueueSize {
		ok, err := s.queue.Pop(&s.chain)
		if err != nil {
			return err
		}
		if ok {
			if s.held {
				if err := s.giveBack(); err != nil {
					return err
				}
			}
			s.head, s.held = s.chain.Head(), true
			if err := s.read(); err != nil {
				return err
			}
			continue
		}
		if err := s.queue.Notify(s.irq); err != nil {
			return err
		}
		more, err := s.queue.EnableKicks()
		if err != nil || !more {
			return err
		}
	}
	s.queue.Kick.Signal()
	return s.queue.Notify(s.irq)
}

func (s *statsQueue) giveBack() error {
	s.held = false
	return s.queue.Push(s.head, 0)
}

func (s *statsQueue) read() error {
	n := min(s.chain.Reader.Remaining()/statSize, maxStats)
	raw := s.raw[:n*statSize]
	if err := s.chain.Reader.ReadFull(raw); err != nil {
		return fmt.Errorf("reading statistics: %w", err)
	}
	// These are new, so whoever has asked has got what he wanted.
	s.d.wantStats.Store(false)
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	for ; len(raw) > 0; raw = raw[statSize:] {
		s.d.guest.set(binary.LittleEndian.Uint16(raw), binary.LittleEndian.Uint64(raw[2:]))
	}
	return nil
}
