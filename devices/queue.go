package devices

import (
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// A worker's turn ends after serveBatch chains or TurnBytes, whichever comes first, so that it can be stopped whatever
// its driver asks for; and after any chain if a pause is wanted. TurnBytes are of [virtq.Queue.Work]. The loops of net
// and vsock keep to them too.
const (
	serveBatch = 32
	TurnBytes  = 4 << 20
)

// ErrAgain is what a handler of [Queue.Serve] returns that has stopped in the midst of a request since a pause is
// wanted. The chain is made available again, and handled anew after the pause.
var ErrAgain = errors.New("the request is done again after a pause")

// StartWorker starts a worker that calls handle after each kick. The queue knows it: see Yield.
func (q *Queue) StartWorker(handle func()) *Worker {
	q.worker = newWorker(q.Kick, handle)
	go q.worker.run()
	return q.worker
}

// Yield reports whether somebody waits for the queue's worker to stand still or to end: a handler that takes long
// returns ErrAgain then. It costs next to nothing.
func (q *Queue) Yield() bool { return q.worker != nil && q.worker.hurried.Load() }

// hurry is closed when Yield becomes true.
func (q *Queue) hurry() <-chan struct{} {
	if q == nil || q.worker == nil {
		return nil
	}
	q.worker.mu.Lock()
	defer q.worker.mu.Unlock()
	return q.worker.hurry
}

// ErrLater is what a handler of [Queue.Serve] returns for a chain that the host cannot do yet. Serve puts the chain
// back and serves no later one; whatever signals the queue's event next, a resume included, has it tried again.
var ErrLater = errors.New("the host cannot do the request yet")

// Serve is the body of a queue's [Worker]: it pops the chains that are waiting,
// lets handle do each of them, gives them back with what handle has written, and
// interrupts the driver once for all of them if it wants to hear of them.
//
// When its turn is over it kicks itself and returns, so that the worker can be
// paused in between. c is only memory to be used again; it must not be shared.
// An error that handle returns, other than ErrAgain and ErrLater, gives the device up, as does a broken ring: the
// chain is not given back, the driver is told to reset the device
// ([Interrupt.NeedsReset]), and Serve returns the error. Calling Serve again then
// returns it again without doing anything.
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

// Notify interrupts the driver if it wants to hear of what has been pushed since
// the last time.
func (q *Queue) Notify(irq Interrupt) error {
	wanted, err := q.NeedsInterrupt()
	if err == nil && wanted {
		irq.Queue()
	}
	return err
}
