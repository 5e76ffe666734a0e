package devices

import (
	"context"
	"sync"
	"sync/atomic"
)

// Worker runs a function on a goroutine of its own, each time its event is
// signalled. It is the engine of a virtqueue: it starts, pauses between two
// calls, resumes and stops. Since it pauses only between calls, the function
// must return soon once somebody waits for that, however much the guest gives
// it to do; [Queue.Serve] does.
type Worker struct {
	event  *Event
	handle func()

	// mu guards what follows; cond is signalled on every change.
	mu      sync.Mutex
	cond    *sync.Cond
	paused  bool // wanted: the goroutine stays out of handle
	pausing int  // calls of Pause that wait; each wants the same as paused
	resting bool // the goroutine is not in handle
	stopped bool
	hurry   chan struct{} // closed while somebody waits for handle to return
	done    chan struct{}

	hurried atomic.Bool // hurry is closed
}

// StartWorker starts a worker that calls handle after each signal of event. The
// event stays the caller's and must outlive the worker.
func StartWorker(event *Event, handle func()) *Worker {
	w := newWorker(event, handle)
	go w.run()
	return w
}

func newWorker(event *Event, handle func()) *Worker {
	// It rests until its goroutine has begun, so that Pause need not wait for that.
	w := &Worker{event: event, handle: handle, resting: true, hurry: make(chan struct{}), done: make(chan struct{})}
	w.cond = sync.NewCond(&w.mu)
	return w
}

// changed follows every change of what is wanted. mu is held.
func (w *Worker) changed() {
	switch wanted := w.paused || w.pausing > 0 || w.stopped; {
	case wanted && !w.hurried.Swap(true):
		close(w.hurry)
	case !wanted && w.hurried.Swap(false):
		w.hurry = make(chan struct{})
	}
	w.cond.Broadcast()
}

func (w *Worker) run() {
	defer close(w.done)
	for {
		w.mu.Lock()
		w.resting = true
		w.cond.Broadcast()
		w.mu.Unlock()

		err := w.event.Wait()

		w.mu.Lock()
		for (w.paused || w.pausing > 0) && !w.stopped {
			w.cond.Wait()
		}
		if w.stopped || err != nil {
			w.mu.Unlock()
			return
		}
		w.resting = false
		w.mu.Unlock()
		w.handle()
	}
}

// Pause returns when handle is not running; it is not called again before
// Resume. When ctx ends first the worker runs on, and Pause returns its error.
func (w *Worker) Pause(ctx context.Context) error {
	w.want(1)
	defer w.want(-1)
	stop := context.AfterFunc(ctx, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.cond.Broadcast()
	})
	defer stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	for !w.resting && !w.stopped {
		if err := ctx.Err(); err != nil {
			return err
		}
		w.cond.Wait()
	}
	w.paused = true
	return nil
}

// want adds to the number of those who wait for a pause.
func (w *Worker) want(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pausing += n
	w.changed()
}

// Resume lets the worker run again, once at least: a signal may have been lost
// with the process that took the snapshot.
func (w *Worker) Resume() {
	w.mu.Lock()
	w.paused = false
	w.changed()
	w.mu.Unlock()
	w.event.Signal()
}

// Stop ends the worker and waits for it. handle must return soon.
func (w *Worker) Stop() {
	w.mu.Lock()
	w.stopped = true
	w.changed()
	w.mu.Unlock()
	w.event.Signal()
	<-w.done
}

// Workers are those of a device that has several queues.
type Workers []*Worker

// Pause pauses all of them, or none when ctx ends first.
func (ws Workers) Pause(ctx context.Context) error {
	// All are told before the first is waited for: one may have to wait for another.
	for _, w := range ws {
		w.want(1)
		defer w.want(-1)
	}
	for i, w := range ws {
		if err := w.Pause(ctx); err != nil {
			ws[:i].Resume()
			return err
		}
	}
	return nil
}

// Resume resumes all of them.
func (ws Workers) Resume() {
	for _, w := range ws {
		w.Resume()
	}
}

// Stop ends all of them and waits for them.
func (ws Workers) Stop() {
	for _, w := range ws {
		w.Stop()
	}
}
