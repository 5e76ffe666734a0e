package devices

import (
	"context"
	"io"
	"sync"
	"time"
)

// OutputSize is how many bytes of a guest's console output wait for a slow reader. Output drops what exceeds that.
const OutputSize = 64 << 10

// outputChunk bounds one write to the host's writer, in bytes.
const outputChunk = 4 << 10

// How long Pause and Close wait for a host writer that is stuck. Pause keeps what is left, Close drops it.
const (
	pauseGrace = 20 * time.Millisecond
	closeGrace = time.Second
)

// Output carries a guest's console output to a writer on the host, through a ring of OutputSize bytes and a
// goroutine. So a slow writer never holds up a vCPU or a queue, and takes bounded memory. When the ring is full,
// Output drops and counts the newest bytes. After the writer has failed it drops everything.
type Output struct {
	w    io.Writer
	done chan struct{}

	// mu guards what follows; cond is signalled on every change.
	mu       sync.Mutex
	cond     *sync.Cond
	ring     []byte // allocated by the first write
	at, used int
	writing  bool // the goroutine is inside w.Write
	paused   bool
	closed   bool
	failed   error
	dropped  uint64
}

// NewOutput starts the goroutine. A nil w discards everything.
func NewOutput(w io.Writer) *Output {
	if w == nil {
		w = io.Discard
	}
	o := &Output{w: w, done: make(chan struct{})}
	o.cond = sync.NewCond(&o.mu)
	go o.run()
	return o
}

// Write queues p and never blocks or fails. It drops what does not fit.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || o.failed != nil {
		o.dropped += uint64(len(p))
		return len(p), nil
	}
	if o.ring == nil {
		o.ring = make([]byte, OutputSize)
	}
	n := min(len(p), len(o.ring)-o.used)
	o.dropped += uint64(len(p) - n)
	end := (o.at + o.used) % len(o.ring)
	k := copy(o.ring[end:], p[:n])
	copy(o.ring, p[k:n])
	o.used += n
	o.cond.Broadcast()
	return len(p), nil
}

func (o *Output) run() {
	defer close(o.done)
	var chunk [outputChunk]byte
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		for !o.closed && (o.used == 0 || o.paused) {
			o.cond.Wait()
		}
		if o.used == 0 || o.failed != nil {
			if o.closed {
				return
			}
			o.used = 0
			continue
		}
		n := copy(chunk[:min(o.used, len(chunk))], o.ring[o.at:])
		o.at = (o.at + n) % len(o.ring)
		o.used -= n
		o.writing = true
		o.mu.Unlock()
		_, err := o.w.Write(chunk[:n])
		o.mu.Lock()
		o.writing = false
		if err != nil {
			o.failed = err
			o.dropped += uint64(o.used)
			o.used = 0
		}
		o.cond.Broadcast()
	}
}

// Pause waits until the writer has all that the guest has written, and then holds the goroutine. If the writer is
// stuck it gives up after a fiftieth of a second, and the ring keeps the rest for Pending. It fails only if ctx
// ends first.
func (o *Output) Pause(ctx context.Context) error {
	grace, cancel := context.WithTimeout(ctx, pauseGrace)
	defer cancel()
	o.drain(grace)
	if err := ctx.Err(); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.paused = true
	return nil
}

// drain waits until the ring is empty and the writer idle, or ctx ends.
func (o *Output) drain(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.cond.Broadcast()
	})
	defer stop()
	o.mu.Lock()
	defer o.mu.Unlock()
	for !o.paused && (o.used > 0 || o.writing) && ctx.Err() == nil {
		o.cond.Wait()
	}
}

// Resume undoes Pause.
func (o *Output) Resume() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.paused = false
	o.cond.Broadcast()
}

// Pending returns a copy of what waits in the ring, for a snapshot.
func (o *Output) Pending() []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := make([]byte, o.used)
	if o.used > 0 {
		k := copy(p, o.ring[o.at:])
		copy(p[k:], o.ring)
	}
	return p
}

// Dropped returns the number of bytes that did not reach the writer.
func (o *Output) Dropped() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.dropped
}

// Err returns the writer's error after which Output drops everything, or nil.
func (o *Output) Err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.failed
}

// Close writes what is still queued, for a second at most, and ends the goroutine. If the writer is stuck, the
// goroutine ends when the writer returns. The writer's owner closes the writer.
func (o *Output) Close() error {
	o.mu.Lock()
	o.paused = false
	o.closed = true
	o.cond.Broadcast()
	o.mu.Unlock()
	select {
	case <-o.done:
		return o.Err()
	case <-time.After(closeGrace):
	}
	o.mu.Lock()
	o.dropped += uint64(o.used)
	o.used = 0
	o.mu.Unlock()
	return o.Err()
}
