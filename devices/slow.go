package devices

// Slow runs operations that may take as long as the host likes and touch no guest memory, such as fdatasync(2): a
// pause does not wait for them. The zero value is ready. Its methods must not be called concurrently.
type Slow struct {
	done chan error // nil if no operation is running
}

// Do calls f once and returns its result, or ErrAgain while f runs if the queue must yield. It begins with Settle,
// and does not call f if that fails.
func (s *Slow) Do(q *Queue, f func() error) error {
	if err := s.Settle(q); err != nil {
		return err
	}
	s.done = make(chan error, 1)
	go func(done chan<- error) { done <- f() }(s.done)
	return s.Settle(q)
}

// Settle waits for the operation of an earlier Do and returns its result, or ErrAgain if the queue must yield.
func (s *Slow) Settle(q *Queue) error {
	if s.done == nil {
		return nil
	}
	select {
	case err := <-s.done:
		s.done = nil
		return err
	case <-q.hurry():
		return ErrAgain
	}
}

// Failed waits for a running operation and returns its result, which Settle will return as well.
func (s *Slow) Failed() error {
	if s.done == nil {
		return nil
	}
	err := <-s.done
	s.done <- err // it has room for one
	return err
}

// End waits for a running operation and drops its result.
func (s *Slow) End() {
	if s.done != nil {
		<-s.done
		s.done = nil
	}
}
