package devices

// Slow does what takes as long as the host likes and touches no guest memory, such as fdatasync(2): a pause does not
// wait for it. The zero value is ready. Its methods must not be called concurrently.
type Slow struct {
	done chan error // nil if nothing is under way
}

// Do calls f, once, and returns what it returns; or ErrAgain, while f goes on, if the queue is to yield. It begins with
// Settle, and does not call f if that fails.
func (s *Slow) Do(q *Queue, f func() error) error {
	if err := s.Settle(q); err != nil {
		return err
	}
	s.done = make(chan error, 1)
	go func(done chan<- error) { done <- f() }(s.done)
	return s.Settle(q)
}

// Settle waits for what an earlier Do has left behind and returns how that has ended; or ErrAgain, if the queue is to
// yield.
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

// End waits for what is under way, and forgets how it ends.
func (s *Slow) End() {
	if s.done != nil {
		<-s.done
		s.done = nil
	}
}
