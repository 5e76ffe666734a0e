package console

import (
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/virtq"
)

// MaxOutput bounds what one request can print, in bytes; what is beyond is
// dropped. Linux sends a page at most.
const MaxOutput = devices.OutputSize

const (
	pieceSize = 4 << 10
	// defaultPatience is how long one request waits for a slow writer.
	defaultPatience = 250 * time.Millisecond
	// receiveBatch is how many buffers are filled before the worker can be
	// paused.
	receiveBatch = 32
)

// transmitter is the queue by which the guest prints.
type transmitter struct {
	d     *Device
	queue *devices.Queue
	irq   devices.Interrupt
	chain virtq.Chain
	text  [MaxOutput]byte
}

func (t *transmitter) serve() {
	// A broken queue has been reported to the transport, which waits for a
	// reset.
	_ = t.queue.Serve(t.irq, &t.chain, t.handle)
}

func (t *transmitter) handle(c *virtq.Chain) error {
	p := t.text[:min(c.Reader.Remaining(), MaxOutput)]
	if err := c.Reader.ReadFull(p); err != nil {
		return fmt.Errorf("reading what the guest prints: %w", err)
	}
	// A pause does not wait for a slow writer, and loses nothing.
	if !t.d.out.WriteBefore(time.Now().Add(t.d.patience), t.queue, p) {
		return devices.ErrAgain
	}
	if beyond := c.Reader.Remaining(); beyond > 0 {
		t.d.mu.Lock()
		t.d.tooLong += uint64(beyond)
		t.d.mu.Unlock()
	}
	return nil
}

// receiver is the queue by which the guest gets what is typed at it.
type receiver struct {
	d     *Device
	queue *devices.Queue
	irq   devices.Interrupt
	chain virtq.Chain
	piece [pieceSize]byte
}

func (r *receiver) serve() {
	if r.queue.Broken() != nil {
		return
	}
	if err := r.fill(); err != nil {
		r.queue.Break(err)
		r.irq.NeedsReset(err)
	}
}

// fill puts input into the guest's buffers, as long as there are both.
func (r *receiver) fill() error {
	for range receiveBatch {
		if r.d.inputLen() == 0 {
			return r.queue.Notify(r.irq)
		}
		ok, err := r.queue.Pop(&r.chain)
		if err != nil {
			return err
		}
		if ok {
			if err := r.give(); err != nil {
				return err
			}
			continue
		}
		if err := r.queue.Notify(r.irq); err != nil {
			return err
		}
		more, err := r.queue.EnableKicks()
		if err != nil || !more {
			return err
		}
	}
	r.queue.Kick.Signal()
	return r.queue.Notify(r.irq)
}

// give fills one buffer.
func (r *receiver) give() error {
	for {
		p := r.d.takeInput(r.piece[:min(pieceSize, r.chain.Writer.Remaining())])
		if len(p) == 0 {
			break
		}
		if _, err := r.chain.Writer.Write(p); err != nil {
			return fmt.Errorf("giving the guest its input: %w", err)
		}
	}
	return r.queue.Push(r.chain.Head(), r.chain.Writer.Written())
}

func (d *Device) inputLen() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.input)
}

// takeInput moves input into p and returns how much of p it has filled. The rest
// stays at the start of its array, which therefore never grows.
func (d *Device) takeInput(p []byte) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := copy(p, d.input)
	d.input = append(d.input[:0], d.input[n:]...)
	return p[:n]
}
