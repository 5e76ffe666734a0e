package devices

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// Bounds on the work on a queue that the owner of a [Loop] does before a pause.
const (
	// SettleBytes is in units of [virtq.Queue.Work].
	SettleBytes = 8 << 20
	// SettleTime bounds requests that move few bytes and take long, such as those for connections.
	SettleTime = 10 * time.Millisecond
)

// loopBatch is the largest number of events that a Loop takes from the kernel at once.
const loopBatch = 64

// Tokens of the loop itself: its own event, then its queues' kicks. The owner's tokens start at loopOwner.
const (
	loopControl int32 = -1 << 31
	loopQueues        = loopControl + 1
	loopOwner   int32 = -1 << 30
)

// Looper is what a [Loop] drives. The loop calls all methods on its goroutine, one at a time. It gives the device
// up after an error.
type Looper interface {
	// Turn does the pending work, in bounded amounts so that a pause need not wait long, and ends early if
	// [Loop.Yield]. It returns how long no other work is due: zero for a call after a look at the descriptors,
	// negative until a descriptor is ready. The loop also calls it after the device has failed.
	Turn() (time.Duration, error)
	// Kicked is called when the driver has kicked the queue of that number.
	Kicked(queue int)
	// Ready is called when a watched descriptor is ready.
	Ready(token, generation int32, events uint32)
	// Settle is called before the loop stops for a pause, unless the device has failed.
	Settle() error
	// Rested is called when the loop continues, with the time that it was stopped.
	Rested(time.Duration)
	// End is called when the device fails, and again when the loop ends.
	End()
}

// Loop is the engine of a device that waits for several things at once, such as its queues and a socket: one
// goroutine around an epoll(7) set. It waits in a plain blocking system call, as [Event] does. Like a [Worker] it
// pauses between two turns, resumes, and stops. After a failure it gives the device up until the driver resets it.
type Loop struct {
	standstill
	epfd    int
	control *Event
	looper  Looper // nil before Start
	queues  []*Queue
	irq     Interrupt

	// Only the loop's goroutine uses these.
	failed   bool
	settling time.Time // when Settle was called; zero outside of it
	obey     bool      // check for a pause or stop
	events   [loopBatch]unix.EpollEvent
}

// NewLoop makes a loop for the device that is being activated. The loop of a restored device does nothing before
// Resume: the rest of the machine may not be in place.
func NewLoop(a Activation) (*Loop, error) {
	control, err := NewEvent()
	if err != nil {
		return nil, err
	}
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("creating an epoll set: %w", err), control.Close())
	}
	l := &Loop{epfd: epfd, control: control, queues: a.Queues, irq: a.Interrupt, obey: true}
	l.setUp()
	l.set(func() { l.paused = a.Restored })
	err = l.Watch(control.FD(), unix.EPOLLIN, loopControl, 0)
	for i, q := range l.queues {
		if q == nil {
			continue
		}
		// The driver of a broken queue knows that it must reset the device.
		l.failed = l.failed || q.Broken() != nil
		err = errors.Join(err, l.Watch(q.Kick.FD(), unix.EPOLLIN, loopQueues+int32(i), 0))
	}
	if err != nil {
		l.release()
		return nil, err
	}
	return l, nil
}

func (l *Loop) release() {
	_ = unix.Close(l.epfd)
	_ = l.control.Close()
}

// Watch makes the loop report a descriptor, edge-triggered: once each time that it becomes ready. Every event
// carries token and generation. Tokens below -1<<30 are reserved. Closing the descriptor ends the watch.
func (l *Loop) Watch(fd int, events uint32, token, generation int32) error {
	return l.ctl(unix.EPOLL_CTL_ADD, fd, events, token, generation)
}

// Change replaces the events of a watched descriptor. The loop also reports events that are pending already.
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

// Start runs the loop.
func (l *Loop) Start(h Looper) {
	l.looper = h
	go l.run()
}

// Yield reports whether a caller waits for the loop to pause or to end.
func (l *Loop) Yield() bool { return l.hurried.Load() }

// Failed reports whether the device waits for a reset. Call it on the loop's goroutine.
func (l *Loop) Failed() bool { return l.failed }

// Enough reports whether the work on a queue since an earlier value of [virtq.Queue.Work] is enough for one turn,
// or for the time before a pause.
func (l *Loop) Enough(q *Queue, since uint64) bool {
	if !l.settling.IsZero() {
		return q.Work()-since >= SettleBytes || time.Since(l.settling) > SettleTime
	}
	return q.Work()-since >= TurnBytes || l.Yield()
}

// Drain calls handle for the chains that the driver has sent, up to limit chains and until that is Enough, and
// gives the chains back. It reports whether there may be more; if not, a kick follows. A chain for which handle
// returns ErrLater waits.
func (l *Loop) Drain(q *Queue, c *virtq.Chain, limit int, handle func(*virtq.Reader) error) (more bool, err error) {
	if err := q.DisableKicks(); err != nil {
		return true, err
	}
	begin := q.Work()
	for ; limit > 0 && !l.Enough(q, begin); limit-- {
		ok, err := q.Pop(c)
		if err != nil {
			return true, err
		}
		if !ok {
			if more, err := q.EnableKicks(); err != nil || !more {
				return false, err
			}
			continue
		}
		if err := handle(&c.Reader); errors.Is(err, ErrLater) {
			q.Unpop(c)
			return true, nil
		} else if err != nil {
			return true, err
		}
		if err := q.Push(c.Head(), 0); err != nil {
			return true, err
		}
	}
	return true, nil
}

// fail gives the device up until its driver resets it.
func (l *Loop) fail(err error) {
	if err == nil || l.failed {
		return
	}
	l.failed = true
	for _, q := range l.queues {
		if q != nil {
			q.Break(err)
		}
	}
	l.looper.End()
	l.irq.NeedsReset(err)
}

func (l *Loop) run() {
	defer close(l.done)
	defer l.looper.End()
	for {
		if l.obey {
			l.obey = false
			if !l.rest() {
				return
			}
		}
		timeout := -1
		d, err := l.looper.Turn()
		l.fail(err)
		if l.obey {
			timeout = 0
		} else if d >= 0 && err == nil {
			timeout = int((d + time.Millisecond - 1) / time.Millisecond)
		}
		n, err := unix.EpollWait(l.epfd, l.events[:], timeout)
		if err != nil && !errors.Is(err, unix.EINTR) {
			l.fail(fmt.Errorf("waiting for a device's descriptors: %w", err))
		}
		for _, ev := range l.events[:max(n, 0)] {
			switch {
			case ev.Fd == loopControl:
				l.obey = true
			case ev.Fd < loopOwner:
				// epoll has just reported signals, and no other goroutine takes them: this does not block.
				i := int(ev.Fd - loopQueues)
				l.fail(l.queues[i].Kick.Wait())
				l.looper.Kicked(i)
			default:
				l.looper.Ready(ev.Fd, ev.Pad, ev.Events)
			}
		}
	}
}

// rest stops while a pause is wanted, and reports whether the loop must continue.
func (l *Loop) rest() bool {
	l.mu.Lock()
	pausing, stopped := l.paused || l.pausing > 0, l.stopped
	l.mu.Unlock()
	if stopped || !pausing {
		return !stopped
	}
	if !l.failed {
		l.fail(l.Settle())
	}
	start := time.Now()
	l.stand()
	if !l.goOn() {
		return false
	}
	l.looper.Rested(time.Since(start))
	return true
}

// Settle does the work before a pause. The loop's goroutine calls it, or a test while that is stopped.
func (l *Loop) Settle() error {
	l.settling = time.Now()
	defer func() { l.settling = time.Time{} }()
	return l.looper.Settle()
}

// Pause returns when the loop has stopped. If ctx ends first the loop continues to run, and Pause returns ctx's
// error.
func (l *Loop) Pause(ctx context.Context) error {
	l.want(1)
	defer l.want(-1)
	l.control.Signal()
	return l.pause(ctx)
}

// AwaitPaused waits until a loop that was told to pause has stopped. Without a pause it fails with ErrNotPaused.
func (l *Loop) AwaitPaused() error {
	l.mu.Lock()
	paused := l.paused
	l.mu.Unlock()
	if !paused {
		return fmt.Errorf("%w: pause it first", ErrNotPaused)
	}
	return l.Pause(context.Background())
}

// Resume undoes Pause.
func (l *Loop) Resume() { l.resume() }

// Do wakes the loop, so that it takes a turn.
func (l *Loop) Do() { l.control.Signal() }

// Stop ends the loop, waits for it, and releases its resources.
func (l *Loop) Stop() {
	l.set(func() { l.stopped = true })
	l.control.Signal()
	if l.looper != nil {
		<-l.done
	}
	l.release()
}
