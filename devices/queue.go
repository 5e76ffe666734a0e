package devices

import (
	"errors"
	"fmt"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// serveBatch is how many chains Serve handles before it returns. It bounds how
// long Pause has to wait for a worker whose driver never stops making requests.
const serveBatch = 32

// ErrLater is what a handler of [Queue.Serve] returns for a chain that the host cannot do yet. Serve puts the chain back
// and serves no later one; whatever signals the queue's event next, a resume included, has it tried again.
var ErrLater = errors.New("the host cannot do the request yet")

// Serve is the body of a queue's [Worker]: it pops the chains that are waiting,
// lets handle do each of them, gives them back with what handle has written, and
// interrupts the driver once for all of them if it wants to hear of them.
//
// After serveBatch chains it kicks itself and returns, so that the worker can be
// paused in between. c is only memory to be used again; it must not be shared.
// An error that handle returns, unless it is ErrLater, gives the device up, as does a broken ring: the
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
	for n := 0; ; {
		ok, err := q.Pop(c)
		if err != nil {
			return err
		}
		if ok {
			if err := handle(c); errors.Is(err, ErrLater) {
				q.Unpop(c)
				return q.Notify(irq)
			} else if err != nil {
				return err
			}
			if err := q.Push(c.Head(), c.Writer.Written()); err != nil {
				return err
			}
			if n++; n < serveBatch {
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
		if n++; n >= serveBatch {
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
