package devices

import (
	"context"
	"sync"
	"sync/atomic"
)

// standstill is how a [Worker] and a [Loop] pause, resume and end. The goroutine itself stops, at points that it
// chooses, for as long as callers want that.
type standstill struct {
	// mu guards what follows; cond is signalled on every change.
	mu       sync.Mutex
	cond     *sync.Cond
	paused   bool          // wanted, until Resume
	pausing  int           // calls of Pause that wait; each wants the same as paused
	standing bool          // the goroutine has stopped
	stopped  bool          // wanted
	hurry    chan struct{} // closed while any of these is wanted
	done     chan struct{} // closed by the goroutine when it ends

	hurried atomic.Bool // hurry is closed
}

// setUp makes the zero value ready.
func (s *standstill) setUp() {
	s.hurry, s.done = make(chan struct{}), make(chan struct{})
	s.cond = sync.NewCond(&s.mu)
}

// changed must follow every change of what is wanted. The caller holds mu.
func (s *standstill) changed() {
	switch wanted := s.paused || s.pausing > 0 || s.stopped; {
	case wanted && !s.hurried.Swap(true):
		close(s.hurry)
	case !wanted && s.hurried.Swap(false):
		s.hurry = make(chan struct{})
	}
	s.cond.Broadcast()
}

// set calls change to change what is wanted.
func (s *standstill) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	s.changed()
}

// want adds n to the number of callers that wait for a pause.
func (s *standstill) want(n int) { s.set(func() { s.pausing += n }) }

// stand marks the goroutine as stopped until it calls goOn.
func (s *standstill) stand() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.standing = true
	s.cond.Broadcast()
}

// goOn waits until no pause is wanted, and reports whether the goroutine must continue rather than end.
func (s *standstill) goOn() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for (s.paused || s.pausing > 0) && !s.stopped {
		s.cond.Wait()
	}
	s.standing = s.stopped
	return !s.stopped
}

// pause waits until the goroutine has stopped. It stays stopped until resume. If ctx ends first the goroutine
// continues, and pause returns ctx's error.
func (s *standstill) pause(ctx context.Context) error {
	s.want(1)
	defer s.want(-1)
	stop := context.AfterFunc(ctx, func() { s.set(func() {}) })
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for !s.standing && !s.stopped {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.cond.Wait()
	}
	s.paused = true
	return nil
}

// resume undoes pause.
func (s *standstill) resume() { s.set(func() { s.paused = false }) }
