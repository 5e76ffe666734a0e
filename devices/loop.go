package devices

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// loopBatch is how many events a Loop takes from the kernel at once.
const loopBatch = 64

// loopControl is the token of the loop's own event.
const loopControl int32 = -1 << 31

// Looper is what a [Loop] drives. All methods are called on the loop's goroutine,
// one at a time.
type Looper interface {
	// Turn does all that there is to do, in bounded amounts so that a pause
	// need not wait for long, ends early when [Loop.Yield] says so, and returns how long nothing else is due: zero
	// to be called again after a look at the descriptors, negative for as long
	// as no descriptor is ready.
	Turn() time.Duration
	// Ready says that a watched descriptor is ready.
	Ready(token, generation int32, events uint32)
	// Settle is called before the loop stands still.
	Settle()
	// Rested is called when it goes on, after the time that it stood still.
	Rested(time.Duration)
	// Lost says that the loop cannot wait for its descriptors.
	Lost(error)
	// End is the last call.
	End()
}

// Loop is the engine of a device that waits for several things at once, such as
// its queues and a socket: one goroutine around an epoll(7) set. Waiting is a
// plain blocking system call, as with [Event]. Like a [Worker] it pauses between
// two turns, resumes, and stops.
type Loop struct {
	epfd    int
	control *Event
	done    chan struct{}

	mu        sync.Mutex
	cond      *sync.Cond // signalled on every change of what mu guards
	wantPause bool       // guarded by mu
	wantStop  bool       // guarded by mu
	parked    bool       // guarded by mu: the loop stands still
	started   bool       // guarded by mu

	hurried atomic.Bool // a pause or the end is wanted

	// Of the loop's goroutine.
	obey   bool // look at what is wanted
	events [loopBatch]unix.EpollEvent
}

// NewLoop makes a loop that watches nothing yet.
func NewLoop() (*Loop, error) {
	control, err := NewEvent()
	if err != nil {
		return nil, err
	}
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("creating an epoll set: %w", err), control.Close())
	}
	l := &Loop{epfd: epfd, control: control, done: make(chan struct{}), obey: true}
	l.cond = sync.NewCond(&l.mu)
	if err := l.Watch(control.FD(), unix.EPOLLIN, loopControl, 0); err != nil {
		l.release()
		return nil, err
	}
	return l, nil
}

func (l *Loop) release() {
	_ = unix.Close(l.epfd)
	_ = l.control.Close()
}

// Watch has the loop tell of a descriptor, edge-triggered: once each time that
// it becomes ready. token and generation are given back with every event; the
// smallest int32 is taken. Closing the descriptor ends it.
func (l *Loop) Watch(fd int, events uint32, token, generation int32) error {
	return l.ctl(unix.EPOLL_CTL_ADD, fd, events, token, generation)
}

// Change replaces what a watched descriptor is watched for. It tells of what is
// ready already.
func (l *Loop) Change(fd int, events uint32, token, generation int32) error {
	return l.ctl(unix.EPOLL_CTL_MOD, fd, events, token, generation)
}

func (l *Loop) ctl(how, fd int, events uint32, token, generation int32) error {
	ev := unix.EpollEvent{Events: events | unix.EPOLLET, Fd: token, Pad: generation}
	if err := unix.EpollCtl(l.epfd, how, fd, &ev); err != nil {
		return fmt.Errorf("watching a descriptor: %w", err)
	}
	return nil
}

// Start runs the loop, at first paused if that is wanted.
func (l *Loop) Start(h Looper, paused bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.started, l.wantPause = true, paused
	l.changed()
	go l.run(h)
}

// Yield reports whether somebody waits for the loop to stand still or to end.
func (l *Loop) Yield() bool { return l.hurried.Load() }

// changed follows every change of what is wanted. mu is held.
func (l *Loop) changed() {
	l.hurried.Store(l.wantPause || l.wantStop)
	l.cond.Broadcast()
}

func (l *Loop) run(h Looper) {
	defer close(l.done)
	defer h.End()
	for {
		if l.obey {
			l.obey = false
			if !l.rest(h) {
				return
			}
		}
		timeout := -1
		if d := h.Turn(); l.obey {
			timeout = 0
		} else if d >= 0 {
			timeout = int((d + time.Millisecond - 1) / time.Millisecond)
		}
		n, err := unix.EpollWait(l.epfd, l.events[:], timeout)
		if err != nil && !errors.Is(err, unix.EINTR) {
			h.Lost(fmt.Errorf("waiting for a device's descriptors: %w", err))
		}
		for i := range max(n, 0) {
			ev := &l.events[i]
			if ev.Fd == loopControl {
				l.obey = true
				continue
			}
			h.Ready(ev.Fd, ev.Pad, ev.Events)
		}
	}
}

// rest stands still as long as a pause is wanted, and reports whether the loop
// goes on after that.
func (l *Loop) rest(h Looper) bool {
	l.mu.Lock()
	pausing := l.wantPause && !l.wantStop
	l.mu.Unlock()
	if pausing {
		h.Settle()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wantPause && !l.wantStop {
		start := time.Now()
		l.parked = true
		l.cond.Broadcast()
		for l.wantPause && !l.wantStop {
			l.cond.Wait()
		}
		l.parked = false
		if !l.wantStop {
			h.Rested(time.Since(start))
		}
	}
	return !l.wantStop
}

// Pause returns when the loop stands still. When ctx ends first the loop runs on,
// and Pause returns its error.
func (l *Loop) Pause(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.cond.Broadcast()
	})
	defer stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.wantPause
	l.wantPause = true
	l.changed()
	l.control.Signal()
	for !l.parked {
		if err := ctx.Err(); err != nil {
			l.wantPause = before
			l.changed()
			return err
		}
		l.cond.Wait()
	}
	return nil
}

// Resume undoes Pause.
func (l *Loop) Resume() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wantPause = false
	l.changed()
}

// Do wakes the loop, so that it takes a turn.
func (l *Loop) Do() { l.control.Signal() }

// Stop ends the loop, waits for it, and releases what it has.
func (l *Loop) Stop() {
	l.mu.Lock()
	started := l.started
	l.wantStop = true
	l.changed()
	l.mu.Unlock()
	l.control.Signal()
	if started {
		<-l.done
	}
	l.release()
}
