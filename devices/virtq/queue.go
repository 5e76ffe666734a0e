package virtq

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// MaxSize is the largest size of a queue that our devices offer, in descriptors. The format allows 32768.
const MaxSize = 1024

// MaxSegments is the largest number of pieces of memory that one chain may have. A chain cannot be longer than its
// queue (virtio 1.2, 2.7.5.3.1), nor can an indirect table.
const MaxSegments = MaxSize

// popWork is how much work a driver can cause in one Pop, and descriptorWork what a descriptor counts for, in bytes
// of Work: reading and checking a descriptor takes about as long as copying that many.
const (
	popWork        = 256 << 10
	descriptorWork = 256
)

// Feature bits that the queue itself implements (virtio 1.2, section 6).
const (
	FeatureIndirectDesc uint64 = 1 << 28
	FeatureEventIdx     uint64 = 1 << 29
)

// Descriptor flags (virtio 1.2, 2.7.5).
const (
	descNext     = 1
	descWrite    = 2
	descIndirect = 4
	descSize     = 16
)

// availNoInterrupt is VIRTQ_AVAIL_F_NO_INTERRUPT (virtio 1.2, 2.7.6).
const availNoInterrupt = 1

// usedNoNotify is VIRTQ_USED_F_NO_NOTIFY (virtio 1.2, 2.7.8).
const usedNoNotify = 1

// ErrDriver is the error that every error caused by the guest wraps.
var ErrDriver = errors.New("the guest's driver broke a virtqueue rule")

// driverError is a rule that a driver broke. The errors are allocated once: a hostile guest must not make the host
// allocate.
type driverError string

func (e driverError) Error() string        { return "virtqueue: " + string(e) }
func (e driverError) Is(target error) bool { return target == ErrDriver }

// The rules that a driver can break.
var (
	ErrAvailIndex error = driverError("avail index runs ahead by more than the queue's size")
	ErrHeadIndex  error = driverError("head of a chain is beyond the descriptor table")
	ErrNextIndex  error = driverError("next descriptor is beyond the table")
	ErrLoop       error = driverError("chain is longer than the queue: it loops")
	ErrZeroLength error = driverError("descriptor of zero length")
	ErrDirection  error = driverError("device-readable descriptor after a device-writable one")
	ErrAddress    error = driverError("descriptor outside of guest RAM")
	ErrTotal      error = driverError("chain of more than 4 GiB")
	ErrIndirect   error = driverError("malformed indirect table")
	ErrLayout     error = driverError("queue of bad size, or at a bad address")
	ErrShort      error = driverError("chain is too short for what the request needs")
)

// Layout is the size and the place of a queue.
type Layout struct {
	Size  uint16 // descriptors: a power of two, at most MaxSize
	Desc  guestmem.GPA
	Avail guestmem.GPA
	Used  guestmem.GPA
}

// Position is the progress of a queue; a snapshot keeps it.
type Position struct {
	NextAvail uint16
	NextUsed  uint16
}

// Queue is the device's end of a virtqueue. Its methods must not be called
// concurrently.
type Queue struct {
	mem      *guestmem.Memory
	layout   Layout
	indirect bool
	eventIdx bool

	nextAvail uint16
	nextUsed  uint16
	// signalled is nextUsed at the last call of NeedsInterrupt.
	signalled uint16
	broken    error
	work      uint64
	bad       atomic.Uint64

	// scratch holds an indirect table while it is validated.
	scratch [MaxSegments * descSize]byte
}

// New checks the layout and makes the queue. features are the negotiated ones. New fails with ErrLayout when the
// size is not a power of two or too large, or when a ring is misaligned (virtio 1.2, 2.7) or not inside guest RAM.
func New(mem *guestmem.Memory, l Layout, features uint64) (*Queue, error) {
	n := uint64(l.Size)
	switch {
	case n == 0 || n > MaxSize || n&(n-1) != 0:
		return nil, ErrLayout
	case l.Desc%16 != 0 || l.Avail%2 != 0 || l.Used%4 != 0:
		return nil, ErrLayout
	case !mem.Contains(l.Desc, n*descSize), !mem.Contains(l.Avail, 6+2*n), !mem.Contains(l.Used, 6+8*n):
		return nil, ErrLayout
	}
	return &Queue{
		mem:      mem,
		layout:   l,
		indirect: features&FeatureIndirectDesc != 0,
		eventIdx: features&FeatureEventIdx != 0,
	}, nil
}

// Layout returns the size and the place of the queue.
func (q *Queue) Layout() Layout { return q.layout }

// Position returns the progress of the queue. All chains must have been pushed.
func (q *Queue) Position() Position { return Position{q.nextAvail, q.nextUsed} }

// SetPosition makes a fresh queue continue at the position of a snapshot.
func (q *Queue) SetPosition(p Position) {
	q.nextAvail, q.nextUsed, q.signalled = p.NextAvail, p.NextUsed, p.NextUsed
}

// BadChains returns how many malformed chains were given back. Unlike the other methods it may be called at any
// time.
func (q *Queue) BadChains() uint64 { return q.bad.Load() }

// Work returns how much work the driver has caused so far: the bytes of all popped chains, and 256 for each
// descriptor that was read. Devices use it to end a turn after a certain amount.
func (q *Queue) Work() uint64 { return q.work }

// Broken returns the error that stopped the queue, or nil.
func (q *Queue) Broken() error { return q.broken }

// Break stops the queue permanently because of err, unless it has already stopped: all methods that can fail return
// err from now on.
func (q *Queue) Break(err error) {
	if q.broken == nil {
		q.broken = err
	}
}

// Pop takes the next chain that the driver has made available into c, which the caller may reuse. It returns false
// when there is none. It counts malformed chains, returns them to the driver with length zero, and tries the next
// one, at most as many as the queue has entries. After many descriptors of such chains it also returns false, and
// the next call continues.
//
// An error that wraps ErrDriver means that the ring itself is bad: the queue has stopped permanently, and the
// device should ask for a reset. Any other error is the host's.
func (q *Queue) Pop(c *Chain) (bool, error) {
	if q.broken != nil {
		return false, q.broken
	}
	begin := q.work
	for range q.layout.Size {
		if q.work-begin >= popWork {
			return false, nil
		}
		head, ok, err := q.nextHead()
		if !ok || err != nil {
			return false, err
		}
		err = q.walk(c, head)
		if err == nil {
			q.work += c.total
			return true, nil
		}
		if !errors.Is(err, ErrDriver) {
			return false, err
		}
		q.bad.Add(1)
		if err := q.Push(head, 0); err != nil {
			return false, err
		}
	}
	return false, nil
}

// Pending reports whether the driver has made chains available that Pop has not taken.
func (q *Queue) Pending() (bool, error) {
	if q.broken != nil {
		return false, q.broken
	}
	idx, err := q.mem.LoadUint16(q.layout.Avail + 2)
	return idx != q.nextAvail, err
}

func (q *Queue) nextHead() (uint16, bool, error) {
	idx, err := q.mem.LoadUint16(q.layout.Avail + 2)
	if err != nil {
		return 0, false, fmt.Errorf("reading the avail ring: %w", err)
	}
	if idx == q.nextAvail {
		return 0, false, nil
	}
	if idx-q.nextAvail > q.layout.Size {
		return 0, false, q.fail(ErrAvailIndex)
	}
	head, err := q.mem.LoadUint16(q.layout.Avail + 4 + 2*guestmem.GPA(q.nextAvail%q.layout.Size))
	if err != nil {
		return 0, false, fmt.Errorf("reading the avail ring: %w", err)
	}
	if head >= q.layout.Size {
		return 0, false, q.fail(ErrHeadIndex)
	}
	q.nextAvail++
	return head, true, nil
}

func (q *Queue) fail(err error) error {
	q.broken = err
	return err
}

// walk validates the chain that starts at head.
func (q *Queue) walk(c *Chain, head uint16) error {
	c.reset(q.mem, head)
	var d [descSize]byte
	index := head
	for steps := uint16(0); ; steps++ {
		if steps >= q.layout.Size {
			return ErrLoop
		}
		q.work += descriptorWork
		if err := q.mem.Read(q.layout.Desc+descSize*guestmem.GPA(index), d[:]); err != nil {
			return fmt.Errorf("reading the descriptor table: %w", err)
		}
		addr, n, flags, next := decode(d[:])
		if flags&descIndirect != 0 {
			// Nothing may follow an indirect table (virtio 1.2, 2.7.5.3.1).
			if !q.indirect || flags&descNext != 0 {
				return ErrIndirect
			}
			return q.walkIndirect(c, addr, n)
		}
		if err := c.add(addr, n, flags&descWrite != 0); err != nil {
			return err
		}
		if flags&descNext == 0 {
			return nil
		}
		if next >= q.layout.Size {
			return ErrNextIndex
		}
		index = next
	}
}

func (q *Queue) walkIndirect(c *Chain, table guestmem.GPA, size uint32) error {
	if size == 0 || size%descSize != 0 || size/descSize > uint32(q.layout.Size) {
		return ErrIndirect
	}
	if !q.mem.Contains(table, uint64(size)) {
		return ErrAddress
	}
	descs := q.scratch[:size]
	if err := q.mem.Read(table, descs); err != nil {
		return fmt.Errorf("reading an indirect table: %w", err)
	}
	entries := size / descSize
	index := uint32(0)
	for steps := uint32(0); ; steps++ {
		if steps >= entries {
			return ErrLoop
		}
		q.work += descriptorWork
		addr, n, flags, next := decode(descs[index*descSize:])
		if flags&descIndirect != 0 {
			return ErrIndirect
		}
		if err := c.add(addr, n, flags&descWrite != 0); err != nil {
			return err
		}
		if flags&descNext == 0 {
			return nil
		}
		if uint32(next) >= entries {
			return ErrNextIndex
		}
		index = uint32(next)
	}
}

func decode(d []byte) (addr guestmem.GPA, n uint32, flags, next uint16) {
	return guestmem.GPA(binary.LittleEndian.Uint64(d)),
		binary.LittleEndian.Uint32(d[8:]),
		binary.LittleEndian.Uint16(d[12:]),
		binary.LittleEndian.Uint16(d[14:])
}

// Push gives a chain back to the driver. head is from [Chain.Head]; written is how many bytes the device has put
// into the chain's writable part.
func (q *Queue) Push(head uint16, written uint32) error {
	if q.broken != nil {
		return q.broken
	}
	var e [8]byte
	binary.LittleEndian.PutUint32(e[:], uint32(head))
	binary.LittleEndian.PutUint32(e[4:], written)
	slot := q.layout.Used + 4 + 8*guestmem.GPA(q.nextUsed%q.layout.Size)
	if err := q.mem.Write(slot, e[:]); err != nil {
		return fmt.Errorf("writing the used ring: %w", err)
	}
	q.nextUsed++
	if err := q.mem.StoreUint16(q.layout.Used+2, q.nextUsed); err != nil {
		return fmt.Errorf("writing the used index: %w", err)
	}
	return nil
}

// NeedsInterrupt reports whether the driver wants an interrupt for the chains pushed since the last call (virtio
// 1.2, 2.7.7 and 2.7.10). Call it once after a batch.
func (q *Queue) NeedsInterrupt() (bool, error) {
	if q.broken != nil {
		return false, q.broken
	}
	last := q.signalled
	q.signalled = q.nextUsed
	if last == q.nextUsed {
		return false, nil
	}
	// The driver may be going to sleep right now. It must see our index, or we must see that it wants an interrupt.
	guestmem.Fence()
	if !q.eventIdx {
		flags, err := q.mem.LoadUint16(q.layout.Avail)
		if err != nil {
			return false, fmt.Errorf("reading the avail flags: %w", err)
		}
		return flags&availNoInterrupt == 0, nil
	}
	event, err := q.mem.LoadUint16(q.layout.Avail + 4 + 2*guestmem.GPA(q.layout.Size))
	if err != nil {
		return false, fmt.Errorf("reading the used event: %w", err)
	}
	return q.nextUsed-event-1 < q.nextUsed-last, nil
}

// DisableKicks asks the driver not to kick while the device polls. It is a hint.
func (q *Queue) DisableKicks() error {
	if q.broken != nil {
		return q.broken
	}
	if q.eventIdx {
		// The driver kicks when it passes avail_event. It is enough not to update that.
		return nil
	}
	return q.mem.StoreUint16(q.layout.Used, usedNoNotify)
}

// EnableKicks asks the driver to kick for its next chain. It reports whether chains have arrived meanwhile: those
// come without a kick, and the caller must pop them.
func (q *Queue) EnableKicks() (bool, error) {
	if q.broken != nil {
		return false, q.broken
	}
	var err error
	if q.eventIdx {
		err = q.mem.StoreUint16(q.layout.Used+4+8*guestmem.GPA(q.layout.Size), q.nextAvail)
	} else {
		err = q.mem.StoreUint16(q.layout.Used, 0)
	}
	if err != nil {
		return false, fmt.Errorf("asking for kicks: %w", err)
	}
	guestmem.Fence()
	return q.Pending()
}
