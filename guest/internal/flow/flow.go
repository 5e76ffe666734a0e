// Package flow is the flow control of the agent's streams: a window of
// unacknowledged data messages on the sending end, cumulative acknowledgements
// on the receiving end. Both ends hold the other to it.
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

// ErrProtocol is returned when the peer breaks the rules of a stream.
var ErrProtocol = errors.New("guest protocol violated")

// Bell wakes all who wait for it. The zero value is ready; a lock of its owner's guards it.
type Bell struct{ rung chan struct{} }

// Wait returns what is closed when it is rung next.
func (b *Bell) Wait() <-chan struct{} {
	if b.rung == nil {
		b.rung = make(chan struct{})
	}
	return b.rung
}

// Ring wakes them.
func (b *Bell) Ring() {
	if b.rung != nil {
		close(b.rung)
		b.rung = nil
	}
}

// Window is the sender's half. The zero value is ready. All methods may be
// called concurrently.
type Window struct {
	mu     sync.Mutex
	sent   uint64 // messages sent
	acked  uint64 // messages acknowledged, never above sent
	opened Bell   // by an acknowledgement
}

// Acquire waits until one more message may be sent and counts it. It returns
// the number of the message, counted from 1.
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

// ackBytes is after how much data an acknowledgement is due although few
// messages were received, so that a sender with a small buffer never waits for
// one that is not coming.
const ackBytes = 64 << 10

// Acker is the receiver's half, for one goroutine. The zero value is ready.
type Acker struct {
	consumed uint64
	told     uint64
	bytes    int
}

// Consumed counts one message of n bytes as consumed. When an acknowledgement
// is due it returns its value and true.
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
	Window // of what is written

	reading, writing context.Context
	send             func(data []byte) error
	ack              func(n uint64) error
	data             chan []byte   // received and not yet read, within a window
	end              chan struct{} // closed when no more comes
	ended            sync.Once
	rest             []byte // of the message being read
	acker            Acker
}

// NewPipe makes a pipe whose reads and writes last as long as their contexts. send sends a data message, ack an
// acknowledgement.
func NewPipe(reading, writing context.Context, send func([]byte) error, ack func(uint64) error) *Pipe {
	return &Pipe{reading: reading, writing: writing, send: send, ack: ack, data: make(chan []byte, agentpb.Window), end: make(chan struct{})}
}

// Put takes the data of a message that was received. It fails if the peer does not keep to its window.
func (p *Pipe) Put(data []byte) bool {
	select {
	case p.data <- data:
		return true
	default:
		return false
	}
}

// End says that no more is received.
func (p *Pipe) End() { p.ended.Do(func() { close(p.end) }) }

// Next returns the data of the next message, io.EOF behind the last.
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
			case <-p.end: // nobody waits for it any more
			default:
				return nil, err
			}
		}
	}
	return data, nil
}

// Read returns what is received, io.EOF behind the last.
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
