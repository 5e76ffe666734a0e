package sandbox

import (
	"context"
	"io"
	"net/http"
	"sync"
	"time"
)

// Hold keeps a VM from going to sleep by itself, for uses that its own process does not see. Release ends it, and must be
// called. A sleep that somebody asks for takes place all the same: Done is closed then, and the sleep waits for Release,
// up to a second.
type Hold struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when it does not hold any more
	ended  chan struct{} // closed when nothing of it goes on
}

// Hold holds a running VM awake; ErrNotRunning says that it sleeps, or has just gone to sleep. ctx is for the call
// alone.
func (s *Store) Hold(ctx context.Context, name string) (*Hold, error) {
	held, cancel := context.WithCancel(context.WithoutCancel(ctx))
	h := &Hold{cancel: cancel, done: make(chan struct{}), ended: make(chan struct{})}
	stop := context.AfterFunc(ctx, cancel)
	granted := make(chan struct{})
	over := sync.OnceFunc(func() { close(h.done) })
	var err error
	go func() {
		defer close(h.ended)
		defer over()
		err = s.callWith(held, name, http.MethodGet, "/hold", nil, func(body io.Reader) error {
			if _, err := io.ReadFull(body, make([]byte, len(holdGranted))); err != nil {
				return err
			}
			close(granted)
			_, _ = body.Read(make([]byte, 1)) // it ends, or the process has
			over()
			<-held.Done() // Release
			return nil
		})
	}()
	select {
	case <-granted:
		if stop() {
			return h, nil
		}
		// The call was called off just now.
	case <-h.ended:
	}
	cancel()
	<-h.ended
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, err
}

// Done is closed when the VM does not run any more, or Release was called.
func (h *Hold) Done() <-chan struct{} { return h.done }

// Release lets the VM sleep again. It may be called more than once.
func (h *Hold) Release() {
	h.cancel()
	<-h.ended
}

// holdSet are those who hold a VM awake.
type holdSet struct {
	mu    sync.Mutex
	n     int
	ever  uint64        // how many there were, these included
	leave chan struct{} // closed when they are to let go
	gone  chan struct{} // closed when the last one has, if somebody waits for that
}

// join adds one, who has to call done, soon after leave is closed.
func (h *holdSet) join() (leave <-chan struct{}, done func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leave == nil {
		h.leave = make(chan struct{})
	}
	h.n++
	h.ever++
	return h.leave, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.n--
		if h.n == 0 && h.gone != nil {
			close(h.gone)
			h.gone = nil
		}
	}
}

// count says how many there are, and how many there ever were.
func (h *holdSet) count() (now, ever uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return uint64(h.n), h.ever
}

// dismiss has all let go, and waits for them, but not longer than that.
func (h *holdSet) dismiss(atMost time.Duration) {
	h.mu.Lock()
	if h.leave != nil {
		close(h.leave)
		h.leave = nil
	}
	var gone chan struct{}
	if h.n > 0 {
		gone = make(chan struct{})
		h.gone = gone
	}
	h.mu.Unlock()
	if gone == nil {
		return
	}
	limit := time.NewTimer(atMost)
	defer limit.Stop()
	select {
	case <-gone:
	case <-limit.C:
		h.mu.Lock()
		h.gone = nil
		h.mu.Unlock()
	}
}

// dismissTime is how long a sleep waits for those who hold the VM awake to tell its guest that their connections
// end. A guest that is not told goes on believing in them when it wakes.
const dismissTime = time.Second

// serveHold answers a Hold: the answer begins with a line and ends with the hold, and whoever holds goes then.
func (p *process) serveHold(w http.ResponseWriter, req *http.Request) {
	leave, done := p.holders.join()
	defer done()
	if p.falling.Load() {
		// A sleep that has looked already does not know of this one.
		p.op.Lock()
		err := p.alive()
		p.op.Unlock()
		if err != nil {
			writeError(w, err)
			return
		}
	}
	say := func(line string) {
		_, _ = io.WriteString(w, line)
		_ = http.NewResponseController(w).Flush()
	}
	say(holdGranted)
	select {
	case <-leave:
		say(holdEnds)
		select {
		case <-req.Context().Done():
		case <-time.After(dismissTime):
		}
	case <-req.Context().Done():
	case <-p.in.Machine().Done():
	}
}

// The lines of the answer to a hold.
const (
	holdGranted = "held\n"
	holdEnds    = "ends\n"
)
