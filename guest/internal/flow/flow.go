// Package flow is the flow control of the agent's streams: a window of unacknowledged data messages at the sender,
// cumulative acknowledgements at the receiver. Each end enforces it on the other.
package flow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// ErrProtocol says that the peer broke the rules of a stream.
var ErrProtocol = errors.New("guest protocol violated")

// Bell wakes all its waiters. The zero value is ready. The owner must guard it with a lock.
type Bell struct{ rung chan struct{} }

// Wait returns a channel that the next Ring closes.
func (b *Bell) Wait() <-chan struct{} {
	if b.rung == nil {
		b.rung = make(chan struct{})
	}
	return b.rung
}

// Ring wakes all waiters.
func (b *Bell) Ring() {
	if b.rung != nil {
		close(b.rung)
		b.rung = nil
	}
}

// Window is the sender's half. The zero value is ready. All methods may be called concurrently.
type Window struct {
	mu     sync.Mutex
	sent   uint64 // messages sent
	acked  uint64 // messages acknowledged, never above sent
	opened Bell   // by an acknowledgement
}

// Acquire waits until one more message may be sent, and counts it. It returns the number of the message, from 1.
func (w *Window) Acquire(ctx context.Context) (uint64, error) {
	for {
		w.mu.Lock()
		if w.sent-w.acked < agentpb.Window {
			w.sent++
			n := w.sent
			w.mu.Unlock()
			return n, nil
		}
		opened := w.opened.Wait()
		w.mu.Unlock()
		select {
		case <-opened:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// Ack records that the peer has consumed n messages in all.
func (w *Window) Ack(n uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n > w.sent || n < w.acked {
		return fmt.Errorf("%w: acknowledgement of %d messages with %d sent and %d acknowledged", ErrProtocol, n, w.sent, w.acked)
	}
	w.acked = n
	w.opened.Ring()
	return nil
}

// ackBytes is the amount of data after which an acknowledgement is due even after few messages, so that a sender
// with a small buffer never waits for an acknowledgement that does not come.
const ackBytes = 64 << 10

// Acker is the receiver's half, for one goroutine. The zero value is ready.
type Acker struct {
	consumed uint64
	told     uint64
	bytes    int
}

// Consumed counts one message of n bytes as consumed. When an acknowledgement is due, it returns the value to send
// and true.
func (a *Acker) Consumed(n int) (uint64, bool) {
	a.consumed++
	a.bytes += n
	if a.consumed-a.told < agentpb.AckEvery && a.bytes < ackBytes {
		return 0, false
	}
	a.told = a.consumed
	a.bytes = 0
	return a.consumed, true
}

// Pipe carries bytes both ways as data messages, within the windows of both ends. Write may be called while another
// goroutine reads.
type Pipe struct {
	Window // for written data

	reading, writing context.Context
	send             func(data []byte) error
	ack              func(n uint64) error
	data             chan []byte   // received and not yet read, within a window
	end              chan struct{} // closed when no more data comes
	ended            sync.Once
	rest             []byte // of the message being read
	acker            Acker
}

// NewPipe makes a pipe. Its reads and writes end with their contexts. send sends a data message, ack an
// acknowledgement.
func NewPipe(reading, writing context.Context, send func([]byte) error, ack func(uint64) error) *Pipe {
	return &Pipe{reading: reading, writing: writing, send: send, ack: ack, data: make(chan []byte, agentpb.Window), end: make(chan struct{})}
}

// Put takes the data of a received message. It fails if the peer exceeds its window.
func (p *Pipe) Put(data []byte) bool {
	select {
	case p.data <- data:
		return true
	default:
		return false
	}
}

// End notes that no more data comes.
func (p *Pipe) End() { p.ended.Do(func() { close(p.end) }) }

// Next returns the data of the next message, or io.EOF after the last.
func (p *Pipe) Next() (data []byte, err error) {
	select {
	case data = <-p.data:
	case <-p.reading.Done():
		return nil, p.reading.Err()
	case <-p.end:
		select { // data that came before the end
		case data = <-p.data:
		default:
			return nil, io.EOF
		}
	}
	if n, due := p.acker.Consumed(len(data)); due {
		if err := p.ack(n); err != nil {
			select {
			case <-p.end: // the peer no longer waits for the acknowledgement
			default:
				return nil, err
			}
		}
	}
	return data, nil
}

// Read returns received data, or io.EOF after the last.
func (p *Pipe) Read(b []byte) (int, error) {
	for len(p.rest) == 0 {
		var err error
		if p.rest, err = p.Next(); err != nil {
			return 0, err
		}
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

// Write sends b.
func (p *Pipe) Write(b []byte) (int, error) {
	sent := 0
	for chunk := range slices.Chunk(b, agentpb.MaxChunk) {
		if _, err := p.Acquire(p.writing); err != nil {
			return sent, err
		}
		if err := p.send(chunk); err != nil {
			return sent, err
		}
		sent += len(chunk)
	}
	return sent, nil
}
