package devices

import (
	"context"

	"github.com/drowse-vm/drowse/devices/virtq"
)

// Worker runs a function on a goroutine of its own, each time its event is signalled. It is the engine of a
// virtqueue: it starts, pauses between two calls, resumes and stops. Since it pauses only between calls, the
// function must return soon once a caller waits for that, however much work the guest makes; [Queue.Serve] does.
type Worker struct {
	standstill
	event  *Event
	handle func()
}

// newWorker makes a worker that calls handle after each signal of event, once run runs. The caller owns the event,
// which must outlive the worker.
func newWorker(event *Event, handle func()) *Worker {
	w := &Worker{event: event, handle: handle}
	w.setUp()
	w.standing = true // Pause need not wait for the goroutine to begin
	return w
}

func (w *Worker) run() {
	defer close(w.done)
	for {
		w.stand()
		if err := w.event.Wait(); err != nil || !w.goOn() {
			return
		}
		w.handle()
	}
}

// Pause returns when handle is not running; the worker does not call it again before Resume. If ctx ends first the
// worker continues to run, and Pause returns ctx's error.
func (w *Worker) Pause(ctx context.Context) error { return w.pause(ctx) }

// Resume lets the worker run again, at least once: a signal may have been lost with the process that took the
// snapshot.
func (w *Worker) Resume() {
	w.resume()
	w.event.Signal()
}

// Stop ends the worker and waits for it. handle must return soon.
func (w *Worker) Stop() {
	w.tellStop()
	<-w.done
}

func (w *Worker) tellStop() {
	w.set(func() { w.stopped = true })
	w.event.Signal()
}

// Workers are the workers of a device with several queues.
type Workers []*Worker

// Serve adds a worker that calls handle for the driver's chains ([Queue.Serve]), unless q is nil. The worker
// reports a broken queue through irq, and waits for a reset.
func (ws *Workers) Serve(q *Queue, irq Interrupt, handle func(*virtq.Chain) error) {
	if q != nil {
		chain := new(virtq.Chain)
		*ws = append(*ws, q.StartWorker(func() { _ = q.Serve(irq, chain, handle) }))
	}
}

// Pause pauses all of them, or none if ctx ends first.
func (ws Workers) Pause(ctx context.Context) error {
	// Tell all before waiting for the first: one may have to wait for another.
	for _, w := range ws {
		w.want(1)
		defer w.want(-1)
	}
	for i, w := range ws {
		if err := w.Pause(ctx); err != nil {
			_ = ws[:i].Resume()
			return err
		}
	}
	return nil
}

// Resume resumes all of them. It does not fail.
func (ws Workers) Resume() error {
	for _, w := range ws {
		w.Resume()
	}
	return nil
}

// Stop ends all of them and waits for them. It tells all before it waits for the first: a worker may wait for
// another, which stops its work only once it is told.
func (ws Workers) Stop() {
	for _, w := range ws {
		w.tellStop()
	}
	for _, w := range ws {
		<-w.done
	}
}
