package sandbox

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// WakeLock keeps a VM from going to sleep by itself, for uses that its own process does not see. Release ends it, and
// must be called. A sleep that somebody asks for takes place all the same: Done is closed then, and the sleep waits for
// Release, up to a second.
type WakeLock struct {
	cancel  context.CancelFunc
	done    chan struct{} // closed when it does not hold any more
	ended   chan struct{} // closed when nothing of it goes on
	network *spec.NetworkInfo
}

// Network is the network that the VM has while it is held, as it was when the hold was granted: not its addresses, but
// their warnings can change. nil if it has none, or its process is one of an older drowse that does not say.
func (h *WakeLock) Network() *spec.NetworkInfo { return h.network }

// AcquireWakeLock keeps a running VM awake; ErrNotRunning says that it sleeps, or has just gone to sleep. ctx is for
// the call alone.
func (s *Store) AcquireWakeLock(ctx context.Context, name string) (*WakeLock, error) {
	held, cancel := context.WithCancel(context.WithoutCancel(ctx))
	h := &WakeLock{cancel: cancel, done: make(chan struct{}), ended: make(chan struct{})}
	stop := context.AfterFunc(ctx, cancel)
	granted := make(chan struct{})
	over := sync.OnceFunc(func() { close(h.done) })
	var err error
	go func() {
		defer close(h.ended)
		defer over()
		err = s.callWith(held, name, http.MethodGet, "/hold", nil, func(body io.Reader) error {
			answer := bufio.NewReaderSize(body, maxHoldLine)
			line, err := answer.ReadSlice('\n')
			if err != nil {
				return err
			}
			if h.network, err = parseHeld(line); err != nil {
				return err
			}
			close(granted)
			_, _ = answer.ReadByte() // it ends, or the process has
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

// WakeLocked is BringUp, with the VM held awake from its first moment on. If somebody else was about to wake it, or it
// was awake, there is no lock: see AcquireWakeLock.
func (s *Store) WakeLocked(ctx context.Context, l Launcher, name string) (Report, *WakeLock, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return Report{}, nil, fmt.Errorf("waking %s: %w", name, err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "hold")
	conn, err := fileConn(os.NewFile(uintptr(fds[0]), "hold"))
	if err != nil {
		return Report{}, nil, errors.Join(fmt.Errorf("waking %s: %w", name, err), theirs.Close())
	}
	rep, err := s.wake(ctx, l, name, theirs, false)
	if err = errors.Join(err, theirs.Close()); err != nil {
		return rep, nil, errors.Join(err, conn.Close())
	}
	h := &WakeLock{cancel: func() { conn.Close() }, done: make(chan struct{}), ended: make(chan struct{})}
	answer := bufio.NewReaderSize(conn, maxHoldLine)
	// It was said before the report. Nobody has said anything if another process is the VM's.
	if err := conn.SetReadDeadline(time.Now().Add(dismissTime)); err != nil {
		return rep, nil, errors.Join(err, conn.Close())
	}
	line, err := answer.ReadSlice('\n')
	if err == nil {
		h.network, err = parseHeld(line)
	}
	if err == nil {
		err = conn.SetReadDeadline(time.Time{})
	}
	if err != nil {
		return rep, nil, conn.Close()
	}
	go func() {
		defer close(h.ended)
		defer close(h.done)
		_, _ = answer.ReadByte() // it ends, the process has, or Release
	}()
	return rep, h, nil
}

// Done is closed when the VM does not run any more, or Release was called.
func (h *WakeLock) Done() <-chan struct{} { return h.done }

// Release lets the VM sleep again. It may be called more than once.
func (h *WakeLock) Release() {
	h.cancel()
	<-h.ended
}

// wakeLocks are those who hold a VM awake.
type wakeLocks struct {
	mu    sync.Mutex
	n     int
	ever  uint64        // how many there were, these included
	leave chan struct{} // closed when they are to let go
	gone  chan struct{} // closed when the last one has, if somebody waits for that
}

// join adds one, who has to call done, soon after leave is closed.
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

// count says how many there are, and how many there ever were.
func (h *wakeLocks) count() (now, ever uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return uint64(h.n), h.ever
}

// dismiss has all let go, and waits for them, but not longer than that.
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

// dismissTime is how long a sleep waits for those who hold the VM awake to tell its guest that their connections
// end. A guest that is not told goes on believing in them when it wakes.
const dismissTime = time.Second

// serveWakeLock answers a request for a wake lock: the answer begins with a line and ends with the lock, and whoever
// has it goes then.
func (p *process) serveWakeLock(w http.ResponseWriter, req *http.Request) {
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
	say(p.held())
	p.lockAwake(leave, req.Context().Done(), say)
}

// lockAwake returns when a wake lock is over: gone says that whoever has it has let go.
func (p *process) lockAwake(leave, gone <-chan struct{}, say func(string)) {
	select {
	case <-leave:
		say(holdEnds)
		select {
		case <-gone:
		case <-time.After(dismissTime):
		}
	case <-gone:
	case <-p.in.Machine().Done():
	}
}

// lockedBy grants a wake lock to whoever has had the VM woken and has the other end of a socket, before anybody knows
// that it is awake.
func (p *process) lockedBy(end *os.File) error {
	conn, err := fileConn(end)
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

// The lines of the answer to a hold. The first one goes on with the network, if the VM has one.
const (
	holdGranted = "held"
	holdEnds    = "ends\n"
	// maxHoldLine bounds them, in bytes.
	maxHoldLine = 64 << 10
)

// held is the first line. Who asks wants to connect to the VM, and need not ask once more where it is.
func (p *process) held() string {
	if p.in.Network() == nil {
		return holdGranted + "\n"
	}
	info, err := json.Marshal(p.in.Network().Info())
	if err != nil || len(info) > maxHoldLine/2 {
		return holdGranted + "\n"
	}
	return holdGranted + " " + string(info) + "\n"
}

func parseHeld(line []byte) (*spec.NetworkInfo, error) {
	word, rest, more := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
	if string(word) != holdGranted {
		return nil, fmt.Errorf("it answers %.80q, want that it holds", line)
	}
	if !more {
		return nil, nil
	}
	var n spec.NetworkInfo
	if err := json.Unmarshal(rest, &n); err != nil {
		return nil, fmt.Errorf("reading which network it has: %w", err)
	}
	return &n, nil
}
