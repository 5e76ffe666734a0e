package devices

import (
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// A worker's turn ends after serveBatch chains or TurnBytes, whichever comes first, so that the worker can stop
// whatever its driver asks for. It ends after any chain if a pause is wanted. TurnBytes is in units of
// [virtq.Queue.Work]. The loops of net and vsock keep to it too.
const (
	serveBatch = 32
	TurnBytes  = 4 << 20
)

// ErrAgain is the error of a handler of [Queue.Serve] that has stopped in the middle of a request because a pause
// is wanted. Serve makes the chain available again and handles it anew after the pause.
var ErrAgain = errors.New("the request is done again after a pause")

// StartWorker starts a worker that calls handle after each kick. Yield reports about that worker.
func (q *Queue) StartWorker(handle func()) *Worker {
	q.worker = newWorker(q.Kick, handle)
	go q.worker.run()
	return q.worker
}

// Yield reports whether a caller waits for the queue's worker to pause or to end. A handler that takes long must
// then return ErrAgain. Yield costs next to nothing.
func (q *Queue) Yield() bool { return q.worker != nil && q.worker.hurried.Load() }

// hurry returns a channel that is closed when Yield becomes true.
func (q *Queue) hurry() <-chan struct{} {
	if q == nil || q.worker == nil {
		return nil
	}
	q.worker.mu.Lock()
	defer q.worker.mu.Unlock()
	return q.worker.hurry
}

// ErrLater is the error of a handler of [Queue.Serve] for a chain that the host cannot do yet. Serve puts the chain
// back and serves no later one. It tries the chain again after the next signal of the queue's event, such as by a
// resume.
var ErrLater = errors.New("the host cannot do the request yet")

// Serve is the body of a queue's [Worker]. It pops the chains that are waiting, calls handle for each, and gives
// them back with what handle has written. It interrupts the driver once for all of them if the driver wants that.
//
// When its turn is over Serve kicks its own queue and returns, so that the worker can pause in between. c is memory
// to reuse and must not be shared. Serve gives the device up if the ring is broken or handle returns an error other
// than ErrAgain and ErrLater: it does not give the chain back, tells the driver to reset the device
// ([Interrupt.NeedsReset]), and returns the error. A later Serve only returns the error again.
func (q *Queue) Serve(irq Interrupt, c *virtq.Chain, handle func(*virtq.Chain) error) error {
	if q.Broken() != nil {
		return q.Broken()
	}
	err := q.serve(irq, c, handle)
	if err != nil {
		q.Break(err)
		irq.NeedsReset(err)
	}
	return err
}

func (q *Queue) serve(irq Interrupt, c *virtq.Chain, handle func(*virtq.Chain) error) error {
	if err := q.DisableKicks(); err != nil {
		return fmt.Errorf("holding off kicks: %w", err)
	}
	begin := q.Work()
	for n := 0; ; {
		over := func() bool { return n >= serveBatch || q.Work()-begin >= TurnBytes || q.Yield() }
		ok, err := q.Pop(c)
		if err != nil {
			return err
		}
		if ok {
			switch err := handle(c); {
			case errors.Is(err, ErrAgain):
				q.Unpop(c)
				n = serveBatch
			case errors.Is(err, ErrLater):
				q.Unpop(c)
				return q.Notify(irq)
			case err != nil:
				return err
			default:
				if err := q.Push(c.Head(), c.Writer.Written()); err != nil {
					return err
				}
				n++
			}
			if !over() {
				continue
			}
		}
		if err := q.Notify(irq); err != nil {
			return err
		}
		more, err := q.EnableKicks()
		if err != nil || !more {
			return err
		}
		if n++; over() {
			q.Kick.Signal()
			return nil
		}
		if err := q.DisableKicks(); err != nil {
			return fmt.Errorf("holding off kicks: %w", err)
		}
	}
}

// Notify interrupts the driver if the driver wants to know of the chains pushed since the last time.
func (q *Queue) Notify(irq Interrupt) error {
	wanted, err := q.NeedsInterrupt()
	if err == nil && wanted {
		irq.Queue()
	}
	return err
}
