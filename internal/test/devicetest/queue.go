package devicetest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Descriptor flags (virtio 1.2, 2.7.5).
const (
	DescNext     = 1
	DescWrite    = 2
	DescIndirect = 4
)

// Desc is one descriptor in guest memory.
type Desc struct {
	Addr  guestmem.GPA
	Len   uint32
	Flags uint16
	Next  uint16
}

func (e Desc) put(p []byte) {
	le := binary.LittleEndian
	le.PutUint64(p, uint64(e.Addr))
	le.PutUint32(p[8:], e.Len)
	le.PutUint16(p[12:], e.Flags)
	le.PutUint16(p[14:], e.Next)
}

// Queue is the driver's side of a virtqueue.
type Queue struct {
	d     *Driver
	index uint32
	size  uint16
	desc  guestmem.GPA
	avail guestmem.GPA
	used  guestmem.GPA

	mu       sync.Mutex
	rand     *rand.Rand
	free     []uint16
	inFlight map[uint16]*Request
	availIdx uint16
	kicked   uint16 // availIdx when the device was last kicked
	usedIdx  uint16
	err      error
}

// Request is a chain that the driver has given to the device.
type Request struct {
	q     *Queue
	descs []uint16
	bufs  []guestmem.Range
	in    []guestmem.Range
	table guestmem.Range

	done chan struct{}
	data []byte
	used uint32
	err  error
}

func newQueue(d *Driver, index uint32, size uint16) *Queue {
	base := ringsGPA + guestmem.GPA(index)*ringsStride
	q := &Queue{
		d: d, index: index, size: size,
		desc: base, avail: base + availOffset, used: base + usedOffset,
		rand:     newRand(uint64(index)),
		inFlight: make(map[uint16]*Request),
	}
	for i := range size {
		q.free = append(q.free, size-1-i)
	}
	return q
}

func (q *Queue) clearRings() error { return q.d.mem.Zero(q.desc, ringsStride) }

// Size returns the number of descriptors.
func (q *Queue) Size() uint16 { return q.size }

// Rings returns the addresses of descriptor table, avail ring and used ring.
func (q *Queue) Rings() (desc, avail, used guestmem.GPA) { return q.desc, q.avail, q.used }

// Do makes a request and waits for the answer. out is what the device reads; in are the sizes of the buffers that
// it may write. Do returns the content of these buffers, and how many bytes the device says it has written. The
// test fails if there is no answer.
func (q *Queue) Do(out [][]byte, in ...int) (data []byte, used uint32) {
	q.d.t.Helper()
	r := q.Submit(out, in...)
	return r.Wait()
}

// Submit adds a request and kicks the device if it wants kicks. If the queue is full, Submit waits for room.
func (q *Queue) Submit(out [][]byte, in ...int) *Request {
	q.d.t.Helper()
	for deadline := time.Now().Add(Timeout); ; time.Sleep(50 * time.Microsecond) {
		r, err := q.Add(out, in...)
		if err == nil {
			q.Kick()
			return r
		}
		if !errors.Is(err, ErrFull) || time.Now().After(deadline) {
			q.d.t.Fatalf("queue %d: %v", q.index, err)
		}
	}
}

// ErrFull means that a queue has no descriptors left.
var ErrFull = errors.New("the queue is full")

// Add makes a request available without a kick. If the device allows indirect tables, every other request uses
// one.
func (q *Queue) Add(out [][]byte, in ...int) (*Request, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(out) + len(in)
	if n == 0 {
		return nil, errors.New("a request without buffers")
	}
	indirect := q.d.features&FeatureIndirect != 0 && q.rand.IntN(2) == 0
	need := n
	if indirect {
		need = 1
	}
	if need > int(q.size) {
		return nil, fmt.Errorf("a request of %d buffers in a queue of %d", n, q.size)
	}
	if need > len(q.free) {
		return nil, ErrFull
	}
	r := &Request{q: q, done: make(chan struct{})}
	descs, err := r.place(out, in)
	if err != nil {
		r.release()
		return nil, err
	}
	r.descs = append(r.descs, q.free[len(q.free)-need:]...)
	q.free = q.free[:len(q.free)-need]
	if err := r.write(descs, indirect); err != nil {
		return nil, err
	}
	q.inFlight[r.descs[0]] = r
	return r, q.publish(r.descs[0])
}

// place copies the request into guest memory and describes it.
func (r *Request) place(out [][]byte, in []int) ([]Desc, error) {
	mem := r.q.d.mem
	var descs []Desc
	for i := range len(out) + len(in) {
		var n int
		var flags uint16
		if i < len(out) {
			n = len(out[i])
		} else {
			n, flags = in[i-len(out)], DescWrite
		}
		gpa, err := r.q.d.buffers.alloc(n)
		if err != nil {
			return nil, err
		}
		b := guestmem.Range{GPA: gpa, Len: uint32(n)}
		r.bufs = append(r.bufs, b)
		descs = append(descs, Desc{Addr: gpa, Len: uint32(n), Flags: flags})
		if i < len(out) {
			err = mem.Write(gpa, out[i])
		} else {
			r.in = append(r.in, b)
			// Bytes that the device does not write must not look written.
			err = fill(mem, gpa, n, 0xee)
		}
		if err != nil {
			return nil, err
		}
	}
	return descs, nil
}

func fill(mem *guestmem.Memory, gpa guestmem.GPA, n int, v byte) error {
	p := make([]byte, n)
	for i := range p {
		p[i] = v
	}
	return mem.Write(gpa, p)
}

// write puts the descriptors into the table, or into an indirect one.
func (r *Request) write(descs []Desc, indirect bool) error {
	if indirect {
		gpa, err := r.q.d.buffers.alloc(16 * len(descs))
		if err != nil {
			return err
		}
		r.table = guestmem.Range{GPA: gpa, Len: uint32(16 * len(descs))}
		for i := range descs {
			if i+1 < len(descs) {
				descs[i].Flags |= DescNext
				descs[i].Next = uint16(i + 1)
			}
			if err := writeDesc(r.q.d.mem, gpa, i, descs[i]); err != nil {
				return err
			}
		}
		return r.q.WriteDesc(r.descs[0], Desc{Addr: gpa, Len: r.table.Len, Flags: DescIndirect})
	}
	for i := range descs {
		if i+1 < len(descs) {
			descs[i].Flags |= DescNext
			descs[i].Next = r.descs[i+1]
		}
		if err := r.q.WriteDesc(r.descs[i], descs[i]); err != nil {
			return err
		}
	}
	return nil
}

func writeDesc(mem *guestmem.Memory, table guestmem.GPA, i int, e Desc) error {
	var p [16]byte
	e.put(p[:])
	return mem.Write(table+guestmem.GPA(16*i), p[:])
}

// WriteDesc writes a descriptor without checks.
func (q *Queue) WriteDesc(i uint16, e Desc) error {
	return writeDesc(q.d.mem, q.desc, int(i), e)
}

// publish puts a head into the avail ring. q.mu is held.
func (q *Queue) publish(head uint16) error {
	if err := q.d.mem.StoreUint16(q.avail+4+2*guestmem.GPA(q.availIdx%q.size), head); err != nil {
		return err
	}
	q.availIdx++
	return q.d.mem.StoreUint16(q.avail+2, q.availIdx)
}

// Publish makes a head available without checks of its chain.
func (q *Queue) Publish(head uint16) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.publish(head)
}

// Kick tells the device that requests were added, if the device wants to know (virtio 1.2, 2.7.10).
func (q *Queue) Kick() {
	q.mu.Lock()
	wanted, err := q.kickWanted()
	q.mu.Unlock()
	if err != nil {
		q.d.t.Error(err)
	}
	if wanted {
		q.d.Write32(RegQueueNotify, q.index)
	}
}

// ForceKick kicks the device even if it does not want kicks.
func (q *Queue) ForceKick() { q.d.Write32(RegQueueNotify, q.index) }

func (q *Queue) kickWanted() (bool, error) {
	guestmem.Fence()
	last := q.kicked
	q.kicked = q.availIdx
	if q.d.features&FeatureEventIdx == 0 {
		flags, err := q.d.mem.LoadUint16(q.used)
		return flags&1 == 0, err
	}
	event, err := q.d.mem.LoadUint16(q.used + 4 + 8*guestmem.GPA(q.size))
	return q.availIdx-event-1 < q.availIdx-last, err
}

// collect takes the chains that the device has used.
func (q *Queue) collect() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.err == nil {
		idx, err := q.d.mem.LoadUint16(q.used + 2)
		if err != nil {
			q.fail(err)
			return
		}
		for ; q.usedIdx != idx && q.err == nil; q.usedIdx++ {
			q.take()
		}
		if q.d.features&FeatureEventIdx != 0 {
			if err := q.d.mem.StoreUint16(q.avail+4+2*guestmem.GPA(q.size), q.usedIdx); err != nil {
				q.fail(err)
				return
			}
		}
		// Did a chain arrive before the device knew that the driver wants interrupts?
		guestmem.Fence()
		if again, err := q.d.mem.LoadUint16(q.used + 2); err != nil || again == q.usedIdx {
			return
		}
	}
}

func (q *Queue) take() {
	var e [8]byte
	if err := q.d.mem.Read(q.used+4+8*guestmem.GPA(q.usedIdx%q.size), e[:]); err != nil {
		q.fail(err)
		return
	}
	id := binary.LittleEndian.Uint32(e[:])
	r := q.inFlight[uint16(id)]
	if r == nil || id >= uint32(q.size) {
		q.fail(fmt.Errorf("queue %d: the device gives back %d, which it does not have", q.index, id))
		return
	}
	delete(q.inFlight, uint16(id))
	r.used = binary.LittleEndian.Uint32(e[4:])
	for _, b := range r.in {
		p := make([]byte, b.Len)
		if err := q.d.mem.Read(b.GPA, p); err != nil {
			r.err = err
		}
		r.data = append(r.data, p...)
	}
	if int(r.used) > len(r.data) {
		r.err = fmt.Errorf("queue %d: the device says it has written %d bytes of %d", q.index, r.used, len(r.data))
	}
	q.free = append(q.free, r.descs...)
	r.release()
	close(r.done)
}

func (r *Request) release() {
	for _, b := range r.bufs {
		r.q.d.buffers.free(b.GPA, int(b.Len))
	}
	if r.table.Len > 0 {
		r.q.d.buffers.free(r.table.GPA, int(r.table.Len))
	}
}

// fail ends all requests of a broken queue. q.mu is held.
func (q *Queue) fail(err error) {
	q.err = err
	for _, r := range q.inFlight {
		r.err = err
		close(r.done)
	}
	clear(q.inFlight)
}

// stop forgets the queue after a reset.
func (q *Queue) stop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.fail(errors.New("the device has been reset"))
	}
}

// InFlight returns how many requests the device has not answered.
func (q *Queue) InFlight() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.inFlight)
}

// Done returns a channel that is closed when the device has answered.
func (r *Request) Done() <-chan struct{} { return r.done }

// Buffers returns where the request's buffers lie in guest memory, in order.
func (r *Request) Buffers() []guestmem.Range { return r.bufs }

// Wait returns the answer, like Do.
func (r *Request) Wait() (data []byte, used uint32) {
	d := r.q.d
	d.t.Helper()
	select {
	case <-r.done:
	case <-time.After(Timeout):
		d.t.Fatalf("queue %d: no answer to a request after %v (status %#x, host error %v)", r.q.index, Timeout, d.Status(), d.HostError())
	}
	if r.err != nil {
		d.t.Fatalf("queue %d: %v", r.q.index, r.err)
	}
	return r.data, r.used
}
