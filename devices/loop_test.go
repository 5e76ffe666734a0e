package devices

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices/virtq"
	"golang.org/x/sys/unix"
)

// countingLooper counts the calls of its loop.
type countingLooper struct {
	event                     *Event
	turns, ready              atomic.Int64
	settled, rested, finished atomic.Int64
	delay                     atomic.Int64
}

func (c *countingLooper) Turn() (time.Duration, error) {
	c.turns.Add(1)
	return time.Duration(c.delay.Load()), nil
}
func (c *countingLooper) Kicked(int) {}
func (c *countingLooper) Ready(token, generation int32, events uint32) {
	if token == 7 && generation == 8 && events == unix.EPOLLIN {
		c.ready.Add(1)
	}
}
func (c *countingLooper) Settle() error        { c.settled.Add(1); return nil }
func (c *countingLooper) Rested(time.Duration) { c.rested.Add(1) }
func (c *countingLooper) End()                 { c.finished.Add(1) }

func newCountingLoop(t *testing.T, paused bool) (*Loop, *countingLooper) {
	t.Helper()
	l, err := NewLoop(Activation{Restored: paused})
	if err != nil {
		t.Fatal(err)
	}
	c := &countingLooper{}
	c.delay.Store(-1)
	if c.event, err = NewEvent(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.event.Close() })
	if err := l.Watch(c.event.FD(), unix.EPOLLIN, 7, 8); err != nil {
		t.Fatal(err)
	}
	l.Start(c)
	return l, c
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !f(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen", what)
		}
	}
}

func TestLoop_tells_of_each_signal_once_and_sleeps_in_between(t *testing.T) {
	l, c := newCountingLoop(t, false)
	defer l.Stop()
	for i := range int64(3) {
		c.event.Signal()
		eventually(t, "the event", func() bool { return c.ready.Load() == i+1 })
	}
	time.Sleep(5 * time.Millisecond)
	turns := c.turns.Load()
	time.Sleep(20 * time.Millisecond)
	if n := c.turns.Load() - turns; n != 0 {
		t.Errorf("%d turns without a reason", n)
	}
	l.Do()
	eventually(t, "a turn", func() bool { return c.turns.Load() > turns })
}

func TestLoop_takes_a_turn_when_its_time_has_come(t *testing.T) {
	l, c := newCountingLoop(t, false)
	defer l.Stop()
	c.delay.Store(int64(time.Millisecond))
	l.Do()
	eventually(t, "ten turns", func() bool { return c.turns.Load() > 10 })
}

func TestPaused_loop_does_nothing_and_keeps_its_events(t *testing.T) {
	l, c := newCountingLoop(t, true)
	ctx := context.Background()
	for range 2 {
		if err := l.Pause(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if c.turns.Load() != 0 {
		t.Error("a loop that starts paused has taken a turn")
	}
	c.event.Signal()
	time.Sleep(5 * time.Millisecond)
	if c.ready.Load() != 0 {
		t.Error("a paused loop has handled an event")
	}
	l.Resume()
	eventually(t, "the event", func() bool { return c.ready.Load() == 1 })
	if c.settled.Load() != 1 || c.rested.Load() != 1 {
		t.Errorf("settled %d times, rested %d times", c.settled.Load(), c.rested.Load())
	}
	if err := l.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	l.Stop()
	if c.finished.Load() != 1 {
		t.Error("stopping a paused loop has not ended it")
	}
}

func TestPause_of_a_busy_loop_ends_with_its_context_and_the_loop_goes_on(t *testing.T) {
	l, err := NewLoop(Activation{})
	if err != nil {
		t.Fatal(err)
	}
	stuck := &stuckLooper{release: make(chan struct{})}
	l.Start(stuck)
	eventually(t, "the first turn", stuck.entered.Load)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	if err := l.Pause(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(stuck.release)
	turns := stuck.turns.Load()
	l.Do()
	eventually(t, "another turn", func() bool { return stuck.turns.Load() > turns })
	l.Stop()
}

type stuckLooper struct {
	countingLooper
	entered atomic.Bool
	release chan struct{}
}

func (s *stuckLooper) Turn() (time.Duration, error) {
	s.entered.Store(true)
	<-s.release
	s.turns.Add(1)
	return -1, nil
}

func TestLoop_that_never_started_releases_what_it_has(t *testing.T) {
	l, err := NewLoop(Activation{})
	if err != nil {
		t.Fatal(err)
	}
	l.Stop()
}

// slowLooper does slow work before a pause until Enough reports true.
type slowLooper struct {
	countingLooper
	loop  *Loop
	queue Queue
	done  int
}

func (s *slowLooper) Settle() error {
	for s.done = 0; s.done < 1000 && !s.loop.Enough(&s.queue, 0); s.done++ {
		time.Sleep(SettleTime / 4)
	}
	return nil
}

func TestAttack_pause_ends_in_time_whatever_requests_cost_that_move_no_bytes(t *testing.T) {
	l, err := NewLoop(Activation{Restored: true})
	if err != nil {
		t.Fatal(err)
	}
	s := &slowLooper{loop: l, queue: Queue{Queue: &virtq.Queue{}}}
	defer l.release()
	l.looper = s
	if err := l.Settle(); err != nil {
		t.Fatal(err)
	}
	if s.done == 0 || s.done > 5 {
		t.Errorf("%d requests of a quarter of the time were done", s.done)
	}
}

func TestSlow_tells_of_a_failure_before_and_when_it_is_settled(t *testing.T) {
	failed := errors.New("failed")
	s := Slow{done: make(chan error, 1)}
	go func(done chan<- error) { done <- failed }(s.done)
	for range 2 {
		if err := s.Failed(); !errors.Is(err, failed) {
			t.Errorf("got %v, want the failure", err)
		}
	}
	s.End()
	if err := s.Failed(); err != nil {
		t.Errorf("nothing runs: %v", err)
	}
}
