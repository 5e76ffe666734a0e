package proc

import (
	"context"
	"slices"
	"sync"

	"github.com/drowse-vm/drowse/guest/internal/flow"
)

// Output holds what a process has written until it is taken, both streams in the order in which they were read,
// within a fixed number of bytes. With a reader attached, a full output blocks the writer, and so the process.
// Without one, a kept output drops its oldest bytes.
type Output struct {
	limit int
	keep  bool // keep what the reader has read until it acknowledges it, for a replay
	hold  bool // lose nothing: see replayed

	mu     sync.Mutex
	buf    []byte // a ring: byte of offset o is at index o % len(buf)
	start  uint64 // offset of the oldest byte held
	next   uint64 // offset of the first byte not handed to the reader
	taken  uint64 // offset up to which the reader needs nothing again
	end    uint64 // offset after the newest byte
	segs   []segment
	state  outputState
	ended  bool   // no more writes will come
	reader uint64 // the latest reader to attach, who alone may read

	grown    flow.Bell     // there is more
	readable chan struct{} // capacity 1: there is news for the reader
	writable sync.Cond     // on mu: there may be room, or the state has changed
}

// outputState is what happens to output that does not fit.
type outputState int

const (
	held    outputState = iota // a reader is attached: writers wait
	kept                       // no reader: the oldest bytes are dropped
	dropped                    // no reader will come: all bytes are dropped
)

// segment is a run of bytes of one stream that ends before offset end.
type segment struct {
	end    uint64
	stderr bool
}

const (
	firstOutput = 4 << 10 // bytes of the first buffer: one page
	maxSegments = 4096    // runs held, so that alternating streams stay bounded
)

func newOutput(limit int, keep bool) *Output {
	o := &Output{limit: limit, keep: keep, readable: make(chan struct{}, 1)}
	o.writable.L = &o.mu
	return o
}

// NewLog returns an output without a reader: it drops the oldest bytes.
func NewLog(limit int) *Output {
	o := newOutput(limit, false)
	o.state = kept
	return o
}

func poke(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Write appends p, waiting for room when a reader is attached.
func (o *Output) Write(stderr bool, p []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for len(p) > 0 && o.state != dropped {
		room := o.makeRoom(stderr, len(p))
		if room == 0 {
			o.writable.Wait()
			continue
		}
		o.put(stderr, p[:room])
		p = p[room:]
		poke(o.readable)
	}
}

// makeRoom returns how many of n bytes fit now. It grows the buffer and drops what the state allows. Precondition:
// o.mu is held.
func (o *Output) makeRoom(stderr bool, n int) int {
	if used := int(o.end - o.start); used+n > len(o.buf) && len(o.buf) < o.limit {
		o.grow(used + n)
	}
	free := len(o.buf) - int(o.end-o.start)
	if want := n - free; want > 0 {
		o.drop(min(o.start+uint64(want), o.droppable()))
		free = len(o.buf) - int(o.end-o.start)
	}
	if len(o.segs) >= maxSegments && o.segs[len(o.segs)-1].stderr != stderr {
		first := o.segs[0].end
		if first > o.droppable() {
			return 0
		}
		o.drop(first)
	}
	return min(n, free)
}

// droppable returns the offset before which bytes may be dropped for new ones. Precondition: o.mu is held.
func (o *Output) droppable() uint64 {
	switch {
	case o.state == kept:
		return o.end
	case o.hold:
		return o.taken - min(o.taken, o.replayed())
	}
	return o.taken
}

// replayed is how many acknowledged bytes a held output has for a reader that lost them on the way: what the host has
// acknowledged may never have reached its client.
func (o *Output) replayed() uint64 { return uint64(o.limit / 2) }

// grow makes the buffer large enough for n bytes, within the limit.
// Precondition: o.mu is held.
func (o *Output) grow(n int) {
	size := max(len(o.buf), firstOutput)
	for size < n && size < o.limit {
		size *= 2
	}
	size = min(size, o.limit)
	if size != len(o.buf) {
		o.rebuffer(size)
	}
}

// rebuffer moves the bytes into a buffer of another size, which must have room for them. Precondition: o.mu is
// held.
func (o *Output) rebuffer(size int) {
	old := o.buf
	o.buf = make([]byte, size)
	for off := o.start; off < o.end; {
		p := ringSlice(old, off, int(o.end-off))
		off += uint64(o.copyIn(off, p))
	}
}

// ringSlice returns the contiguous bytes of ring buf from offset off, at most n.
func ringSlice(buf []byte, off uint64, n int) []byte {
	i := int(off % uint64(len(buf)))
	return buf[i:min(i+n, len(buf))]
}

// copyIn copies as much of p as fits contiguously at offset off.
func (o *Output) copyIn(off uint64, p []byte) int {
	return copy(ringSlice(o.buf, off, len(p)), p)
}

// copyOut fills p with the bytes from offset off.
func (o *Output) copyOut(off uint64, p []byte) (n int) {
	for n < len(p) {
		n += copy(p[n:], ringSlice(o.buf, off+uint64(n), len(p)-n))
	}
	return n
}

// put appends p, for which there is room. Precondition: o.mu is held.
func (o *Output) put(stderr bool, p []byte) {
	for len(p) > 0 {
		n := o.copyIn(o.end, p)
		o.end += uint64(n)
		p = p[n:]
	}
	o.grown.Ring()
	if k := len(o.segs); k > 0 && o.segs[k-1].stderr == stderr {
		o.segs[k-1].end = o.end
	} else {
		o.segs = append(o.segs, segment{end: o.end, stderr: stderr})
	}
}

// drop discards everything before offset to. Precondition: o.mu is held.
func (o *Output) drop(to uint64) {
	if to <= o.start {
		return
	}
	o.start = to
	o.next = max(o.next, to)
	o.taken = max(o.taken, to)
	i := 0
	for i < len(o.segs) && o.segs[i].end <= to {
		i++
	}
	o.segs = slices.Delete(o.segs, 0, i)
}

// read copies the next bytes of one stream for the reader into p. n is 0 when there are none now; ended then
// reports that none will come.
func (o *Output) read(reader uint64, p []byte) (n int, stderr bool, offset uint64, ended bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if reader != o.reader || o.next == o.end {
		return 0, false, o.next, o.ended && reader == o.reader
	}
	i, _ := slices.BinarySearchFunc(o.segs, o.next, func(s segment, off uint64) int {
		if s.end <= off {
			return -1
		}
		return 1
	})
	offset = o.next
	n = o.copyOut(offset, p[:min(o.segs[i].end-offset, uint64(len(p)))])
	stderr = o.segs[i].stderr
	o.next += uint64(n)
	if !o.keep {
		o.release(o.next)
	}
	return n, stderr, offset, false
}

// took records that the reader will not need anything before the offset again.
func (o *Output) took(reader, offset uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if reader == o.reader {
		o.release(offset)
	}
}

// release frees everything before offset. Precondition: o.mu is held.
func (o *Output) release(offset uint64) {
	o.taken = max(o.taken, min(offset, o.end))
	if !o.keep {
		o.drop(o.taken)
	}
	o.writable.Broadcast()
}

// attach replaces the reader with a new one, at offset or at the oldest byte still held. It returns where that is,
// and the new reader's number, with which it may read.
func (o *Output) attach(offset uint64) (start, reader uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reader++
	o.next = min(max(offset, o.start), o.end)
	o.taken = o.next
	o.state = held
	o.writable.Broadcast() // it may have more than it had acknowledged
	poke(o.readable)
	return o.next, o.reader
}

// detach sets what happens from now on to output that does not fit.
func (o *Output) detach(state outputState) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.state = state
	o.writable.Broadcast()
}

// finish records that no more writes will come.
func (o *Output) finish() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = true
	poke(o.readable)
}

// Bounds returns the offset of the oldest byte and the offset after the newest one.
func (o *Output) Bounds() (start, end uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.start, o.end
}

// Resize sets how much the output holds. It drops the oldest bytes that do not fit any more.
func (o *Output) Resize(limit int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.limit = limit
	if len(o.buf) <= limit {
		return
	}
	if held := o.end - o.start; held > uint64(limit) {
		o.drop(o.end - uint64(limit))
	}
	o.rebuffer(limit)
}

// Look copies both streams from an offset on, without being a reader. It returns the offset of the first byte, and
// that behind the newest one.
func (o *Output) Look(offset uint64, p []byte) (n int, at, end uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	at = min(max(offset, o.start), o.end)
	return o.copyOut(at, p[:min(uint64(len(p)), o.end-at)]), at, o.end
}

// WaitBehind waits until there is output behind an offset, which is the end, or ctx ends.
func (o *Output) WaitBehind(ctx context.Context, offset uint64) {
	for {
		o.mu.Lock()
		if o.end != offset {
			o.mu.Unlock()
			return
		}
		grown := o.grown.Wait()
		o.mu.Unlock()
		select {
		case <-grown:
		case <-ctx.Done():
			return
		}
	}
}
