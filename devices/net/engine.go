package net

import (
	"encoding/binary"
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Bounds.
const (
	// turnFrames is the most frames that one turn of the loop passes on in each direction.
	turnFrames = 128
	// maxHeld is the most receive buffers that the engine holds for a frame of unknown size.
	maxHeld = queueSize
	// rxPatience is how long a frame that might not fit waits for more buffers from the guest.
	rxPatience = 5 * time.Millisecond
	// txRetry is when the engine tries a full backend again, unless the backend becomes writable earlier.
	txRetry = 10 * time.Millisecond
)

// held is a receive buffer taken from the queue.
type held struct {
	chain  virtq.Chain
	size   int
	ranges int
}

// engine serves the device between Activate and Reset. After newEngine the goroutine of its loop owns it, or the
// caller that has paused that loop.
type engine struct {
	dev      *Device
	mem      *guestmem.Memory
	stats    *Stats
	features uint64
	rx, tx   *devices.Queue
	irq      devices.Interrupt
	loop     *devices.Loop
	fd       int
	merge    bool // a frame may be spread over several buffers
	want     int  // bytes, header included, that hold any frame
	ordinary int  // bytes that hold any frame without a VLAN tag

	told bool // what the guest knows of the link

	txReady bool
	blocked bool // the backend takes no more
	retryAt time.Time
	txChain virtq.Chain
	txOut   []guestmem.Range
	header  [HeaderSize]byte

	readable bool // the backend may have frames
	quiet    bool // the driver was asked not to kick rx
	starved  bool // there are no receive buffers; the engine waits for a kick
	// patient: a lack of buffers still counts as temporary.
	patient   bool
	readAt    time.Time // when patience ends; zero while no frame waits
	held      [maxHeld]held
	heldFrom  int
	heldCount int
	room      int // bytes
	ranges    []guestmem.Range
	used      [maxHeld]virtq.Used
	number    [2]byte
}

func newEngine(d *Device, a devices.Activation) (*engine, error) {
	e := &engine{
		dev:      d,
		mem:      d.mem,
		stats:    &d.stats,
		features: a.Features,
		rx:       a.Queues[queueRX],
		tx:       a.Queues[queueTX],
		irq:      a.Interrupt,
		fd:       d.backend.FD(),
		merge:    a.Features&featureMrgRxbuf != 0,
		told:     d.told,
		txReady:  true,
		readable: true,
		patient:  true,
		txOut:    make([]guestmem.Range, 0, virtq.MaxSegments),
		ranges:   make([]guestmem.Range, 0, 2*virtq.MaxSegments),
	}
	payload := defaultMTU
	if a.Features&featureGuestTSO != 0 {
		payload = maxPayload
	}
	e.ordinary = HeaderSize + ethernetHeader + payload
	e.want = e.ordinary + vlanTag
	var err error
	if e.loop, err = devices.NewLoop(a); err != nil {
		return nil, err
	}
	if err := e.loop.Watch(e.fd, unix.EPOLLIN|unix.EPOLLOUT, 0, 0); err != nil {
		e.loop.Stop()
		return nil, err
	}
	e.loop.Start(e)
	return e, nil
}

// Ready implements [devices.Looper].
func (e *engine) Ready(_, _ int32, events uint32) {
	if events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		e.readable = true
	}
	if events&unix.EPOLLOUT != 0 {
		e.blocked = false
	}
}

// Kicked implements [devices.Looper].
func (e *engine) Kicked(queue int) {
	if queue == queueRX {
		e.starved = false
	} else {
		e.txReady = true
	}
}

// End implements [devices.Looper].
func (e *engine) End() {}

// Rested implements [devices.Looper].
func (e *engine) Rested(time.Duration) {
	// Kicks may have been lost with the process that took a snapshot.
	e.txReady, e.readable = true, true
	e.starved, e.blocked, e.quiet = false, false, false
}

// Settle implements [devices.Looper].
func (e *engine) Settle() (err error) {
	held := e.dev.held.Load()
	if !held {
		err = e.pumpTX(queueSize)
	}
	if err == nil && e.dev.up() && !held {
		// The backend closes when the VM sleeps, and its frames are lost. Some are never sent again: a reset, or
		// the last segment of a connection whose peer has gone.
		err = e.pumpRX(queueSize)
	}
	e.release()
	if err != nil {
		return err
	}
	return e.notify()
}

// release returns the held receive buffers to the queue.
func (e *engine) release() {
	for ; e.heldCount > 0; e.heldCount-- {
		e.rx.Unpop(&e.held[(e.heldFrom+e.heldCount-1)%maxHeld].chain)
	}
	e.heldFrom, e.room, e.ranges = 0, 0, e.ranges[:0]
}

// Turn implements [devices.Looper].
func (e *engine) Turn() (time.Duration, error) {
	if e.loop.Failed() {
		return -1, nil
	}
	if err := e.turn(); err != nil {
		return 0, err
	}
	wait := time.Duration(-1)
	sooner := func(d time.Duration) {
		if d = max(d, 0); wait < 0 || d < wait {
			wait = d
		}
	}
	link := e.dev.up()
	if link != e.told {
		sooner(0)
	}
	if e.dev.held.Load() {
		return wait, nil // until Release
	}
	if e.txReady && !e.blocked {
		sooner(0)
	}
	if e.blocked {
		sooner(time.Until(e.retryAt))
	}
	if link && e.readable && !e.starved {
		if e.readAt.IsZero() {
			sooner(0)
		} else {
			sooner(time.Until(e.readAt))
		}
	}
	return wait, nil
}

// turn passes on a bounded number of frames and interrupts the guest once.
func (e *engine) turn() error {
	if link := e.dev.up(); link != e.told {
		e.told = link
		if e.features&featureStatus != 0 {
			e.irq.Config()
		}
	}
	if e.dev.held.Load() {
		return nil
	}
	if e.blocked && !time.Now().Before(e.retryAt) {
		e.blocked = false
	}
	if e.txReady && !e.blocked {
		if err := e.pumpTX(turnFrames); err != nil {
			return err
		}
	}
	if e.readable && !e.starved && e.dev.up() {
		if err := e.pumpRX(turnFrames); err != nil {
			return err
		}
	}
	return e.notify()
}

// notify interrupts the guest at most once for both queues.
func (e *engine) notify() error {
	rx, err := e.rx.NeedsInterrupt()
	if err != nil {
		return err
	}
	tx, err := e.tx.NeedsInterrupt()
	if err != nil {
		return err
	}
	if rx || tx {
		e.irq.Queue()
	}
	return nil
}

// pumpTX sends up to limit frames of the guest.
func (e *engine) pumpTX(limit int) error {
	more, err := e.loop.Drain(e.tx, &e.txChain, limit, e.send)
	e.txReady = more
	return err
}

// send writes one frame to the backend, or drops it.
func (e *engine) send(r *virtq.Reader) error {
	total := r.Remaining()
	if total < HeaderSize+minFrame || total > HeaderSize+maxFrame {
		e.stats.Malformed.Add(1)
		return nil
	}
	if err := r.ReadFull(e.header[:]); err != nil {
		return err
	}
	if !valid(&e.header, total-HeaderSize, e.features) {
		e.stats.Malformed.Add(1)
		return nil
	}
	if !e.dev.up() {
		e.stats.LinkDown.Add(1)
		return nil
	}
	var err error
	if e.txOut, err = r.Ranges(e.txOut[:0], total-HeaderSize); err != nil {
		return err
	}
	// Send the header that was checked: the guest may have changed its own by now. The frame itself is unchecked.
	_, err = e.mem.WritevAfter(e.fd, e.header[:], e.txOut)
	switch {
	case err == nil:
		e.stats.FramesFromGuest.Add(1)
	case errors.Is(err, unix.EAGAIN):
		e.blocked = true
		e.retryAt = time.Now().Add(txRetry)
		e.stats.Waits.Add(1)
		return devices.ErrLater
	case errors.Is(err, unix.EBADFD):
		e.dev.gone.Store(true)
		e.stats.LinkDown.Add(1)
	case ofFrame(err):
		e.stats.Refused.Add(1)
	default:
		return &BackendError{"sending a frame", err}
	}
	return nil
}

// ofFrame reports whether a write failed because of the frame or the state of the interface, and not because of a
// bad descriptor or bad guest memory.
func ofFrame(err error) bool {
	var errno unix.Errno
	return errors.As(err, &errno) && errno != unix.EFAULT && errno != unix.EBADF
}

// BackendError is a failure of the backend or of guest memory. The device then waits for a reset.
type BackendError struct {
	Doing string
	Err   error
}

func (e *BackendError) Error() string { return e.Doing + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *BackendError) Unwrap() error { return e.Err }

// pumpRX receives up to limit frames.
func (e *engine) pumpRX(limit int) error {
	if !e.quiet {
		e.quiet = true
		if err := e.rx.DisableKicks(); err != nil {
			return err
		}
	}
	begin := e.rx.Work()
	for range limit {
		if e.loop.Enough(e.rx, begin) {
			return nil
		}
		if enough, err := e.fill(begin); enough || err != nil {
			return err
		}
		if e.room >= e.want || !e.merge && e.heldCount > 0 {
			e.patient, e.readAt = true, time.Time{}
		} else if wait, err := e.lack(); wait || err != nil {
			return err
		}
		more, err := e.receive()
		if err != nil || !more {
			return err
		}
	}
	return nil
}

// fill takes receive buffers until any frame fits. It reports whether it has given back so many that are too short that
// the turn, which began at that value of the queue's work, is over: another vCPU can post them without end.
func (e *engine) fill(begin uint64) (enough bool, err error) {
	for e.room < e.want && e.heldCount < maxHeld && (e.merge || e.heldCount == 0) {
		h := &e.held[(e.heldFrom+e.heldCount)%maxHeld]
		ok, err := e.rx.Pop(&h.chain)
		if err != nil || !ok {
			return false, err
		}
		w := h.chain.Writer
		h.size = w.Remaining()
		if h.size < HeaderSize {
			// Not even the header of a frame would fit (virtio 1.2, 5.1.6.3.1).
			if e.heldCount > 0 {
				// The buffers before it come first.
				e.rx.Unpop(&h.chain)
				return false, nil
			}
			if err := e.rx.Push(h.chain.Head(), 0); err != nil {
				return false, err
			}
			if e.loop.Enough(e.rx, begin) {
				return true, nil
			}
			continue
		}
		before := len(e.ranges)
		rs, err := w.Ranges(e.ranges, h.size)
		if err != nil {
			return false, err
		}
		if len(rs) > guestmem.MaxRanges {
			e.ranges = rs[:before]
			e.rx.Unpop(&h.chain)
			return false, nil
		}
		h.ranges = len(rs) - before
		e.ranges = rs
		e.room += h.size
		e.heldCount++
	}
	return false, nil
}

// lack decides what to do when a frame might not fit in the held buffers. It reports whether to wait for more.
func (e *engine) lack() (bool, error) {
	if e.heldCount > 0 && !e.patient {
		return false, nil
	}
	if e.heldCount > 0 && !e.readAt.IsZero() && !time.Now().Before(e.readAt) {
		// The guest gives no more buffers. Frames that fit must get through.
		e.patient, e.readAt = false, time.Time{}
		return false, nil
	}
	e.quiet = false
	more, err := e.rx.EnableKicks()
	if err != nil {
		return false, err
	}
	switch {
	case more && e.heldCount == 0:
		return true, nil // the next turn takes them
	case e.heldCount == 0:
		e.starved = true
		e.readAt = time.Time{}
	case e.readAt.IsZero():
		e.readAt = time.Now().Add(rxPatience)
	}
	return true, nil
}

// receive reads one frame into the held buffers. It reports false if there is no frame.
func (e *engine) receive() (bool, error) {
	n, err := e.mem.Readv(e.fd, e.ranges)
	switch {
	case errors.Is(err, unix.EAGAIN), err == nil && n == 0:
		e.readable = false
		return false, nil
	case errors.Is(err, unix.EBADFD):
		e.dev.gone.Store(true)
		return false, nil
	case err != nil:
		return false, &BackendError{"receiving a frame", err}
	case n < HeaderSize+minFrame:
		e.stats.TooShort.Add(1)
		return true, nil
	case n >= e.room && e.room < e.ordinary:
		// The frame may be cut off: the kernel does not say.
		e.stats.TooLong.Add(1)
		return true, nil
	}
	count := 0
	for left := n; left > 0; count++ {
		h := &e.held[(e.heldFrom+count)%maxHeld]
		k := min(left, h.size)
		e.used[count] = virtq.Used{Head: h.chain.Head(), Written: uint32(k)}
		left -= k
	}
	// The kernel does not fill in num_buffers.
	w := e.held[e.heldFrom].chain.Writer
	if err := w.Skip(headerNumBuffers); err != nil {
		return false, err
	}
	binary.LittleEndian.PutUint16(e.number[:], uint16(count))
	if _, err := w.Write(e.number[:]); err != nil {
		return false, err
	}
	if err := e.rx.PushAll(e.used[:count]); err != nil {
		return false, err
	}
	ranges := 0
	for range count {
		h := &e.held[e.heldFrom]
		ranges += h.ranges
		e.room -= h.size
		e.heldFrom = (e.heldFrom + 1) % maxHeld
		e.heldCount--
	}
	e.ranges = e.ranges[:copy(e.ranges, e.ranges[ranges:])]
	e.stats.FramesToGuest.Add(1)
	return true, nil
}
