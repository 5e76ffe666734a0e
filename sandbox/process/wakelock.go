package process

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
)

// wakeLocks counts the clients that hold a VM awake.
type wakeLocks struct {
	mu    sync.Mutex
	n     int
	ever  uint64        // how many there ever were
	leave chan struct{} // closed when they must let go
	gone  chan struct{} // closed when the last one has let go, if dismiss waits for that
}

// join adds a holder. It must call done soon after leave is closed.
func (h *wakeLocks) join() (leave <-chan struct{}, done func()) {
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

// count returns how many holders there are, and how many there ever were.
func (h *wakeLocks) count() (now, ever uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return uint64(h.n), h.ever
}

// dismiss makes all holders let go, and waits for them, at most for atMost.
func (h *wakeLocks) dismiss(atMost time.Duration) {
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

// serveWakeLock answers a request for a wake lock. The answer begins with a line and ends with the lock; the
// client then disconnects.
func (p *process) serveWakeLock(w http.ResponseWriter, req *http.Request) {
	leave, done := p.holders.join()
	defer done()
	if p.falling.Load() {
		// A sleep that has already counted the holders does not know of this one.
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
	say(p.held())
	p.lockAwake(leave, req.Context().Done(), say)
}

// lockAwake returns when a wake lock is over. gone is closed when its holder has let go.
func (p *process) lockAwake(leave, gone <-chan struct{}, say func(string)) {
	select {
	case <-leave:
		say(control.HoldEnds)
		select {
		case <-gone:
		case <-time.After(control.DismissTime):
		}
	case <-gone:
	case <-p.in.Machine().Done():
	}
}

// lockedBy grants a wake lock to the client that had the VM woken, before others know that the VM is awake. The
// client has the other end of the socket.
func (p *process) lockedBy(end *os.File) error {
	conn, err := control.FileConn(end)
	if err != nil {
		return fmt.Errorf("holding the VM awake for whoever has woken it: %w", err)
	}
	leave, done := p.holders.join()
	say := func(line string) { _, _ = io.WriteString(conn, line) }
	say(p.held())
	gone := make(chan struct{})
	p.background.Go(func() {
		defer close(gone)
		_, _ = conn.Read(make([]byte, 1)) // nothing is sent
	})
	p.background.Go(func() {
		defer done()
		defer conn.Close()
		p.lockAwake(leave, gone, say)
	})
	return nil
}

// held returns the first line. It has the network's address, so that a client that wants to connect need not ask again.
func (p *process) held() string {
	if p.net == nil {
		return control.HoldGranted + "\n"
	}
	info, err := json.Marshal(p.net.Info())
	if err != nil || len(info) > control.MaxHoldLine/2 {
		return control.HoldGranted + "\n"
	}
	return control.HoldGranted + " " + string(info) + "\n"
}
