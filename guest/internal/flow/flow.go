// Package flow is the flow control of the agent's streams: a window of
// unacknowledged data messages on the sending end, cumulative acknowledgements
// on the receiving end. Both ends hold the other to it.
package flow

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// ErrProtocol is returned when the peer breaks the rules of a stream.
var ErrProtocol = errors.New("guest protocol violated")

// Window is the sender's half. The zero value is ready. All methods may be
// called concurrently.
type Window struct {
	mu     sync.Mutex
	sent   uint64        // messages sent
	acked  uint64        // messages acknowledged, never above sent
	opened chan struct{} // closed by the next acknowledgement; nil when nobody waits
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
		if w.opened == nil {
			w.opened = make(chan struct{})
		}
		opened := w.opened
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
	if w.opened != nil {
		close(w.opened)
		w.opened = nil
	}
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
