package devices

import (
	"context"
	"encoding/binary"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices/virtq"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// withLength gives all descriptors of newQueue's queue n readable bytes.
func withLength(t *testing.T, mem *guestmem.Memory, n uint32) {
	t.Helper()
	for i := range 256 {
		var d [16]byte
		binary.LittleEndian.PutUint32(d[8:], n)
		if err := mem.Write(0x10000+guestmem.GPA(16*i), d[:]); err != nil {
			t.Fatal(err)
		}
	}
}

// A pause is requested while the device handles the first request of a full queue. That request is the last one
// before the pause.
func TestAttack_pause_comes_after_the_request_under_way_however_many_wait(t *testing.T) {
	q, mem := newQueue(t, 200)
	withLength(t, mem, 1<<20)
	var irq interrupts
	var c virtq.Chain
	entered := make(chan struct{}, 1)
	done := 0
	w := q.StartWorker(func() {
		_ = q.Serve(&irq, &c, func(*virtq.Chain) error {
			if done++; done == 1 {
				entered <- struct{}{}
				for !q.Yield() {
					time.Sleep(50 * time.Microsecond)
				}
			}
			return nil
		})
	})
	defer w.Stop()
	q.Kick.Signal()
	<-entered
	begin := time.Now()
	if err := w.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Logf("the pause took %v", time.Since(begin))
	if done != 1 {
		t.Errorf("%d requests were done before the pause, want the one that was under way", done)
	}
	if p := q.Position(); p.NextAvail != 1 || p.NextUsed != 1 {
		t.Errorf("the queue stands at %+v", p)
	}
	w.Resume()
	waitFor(t, func() bool {
		return w.Pause(context.Background()) == nil && func() bool { defer w.Resume(); return done == 200 }()
	})
}

// A guest resets a device while one queue handles an endless request, which a request of another queue waits for.
func TestAttack_reset_waits_for_a_queue_that_waits_for_another(t *testing.T) {
	var mu sync.Mutex // like a device's lock
	entered, waiting := make(chan struct{}), make(chan struct{})
	long, _ := newQueue(t, 1)
	short, _ := newQueue(t, 1)
	all := Workers{short.StartWorker(func() {
		close(waiting)
		mu.Lock()
		defer mu.Unlock()
	}), long.StartWorker(func() {
		mu.Lock()
		defer mu.Unlock()
		close(entered)
		for !long.Yield() {
			time.Sleep(50 * time.Microsecond)
		}
	})}
	long.Kick.Signal()
	<-entered
	short.Kick.Signal()
	<-waiting
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		all.Stop()
	}()
	select {
	case <-stopped:
	case <-time.After(time.Minute):
		t.Fatal("the reset has not ended within a minute")
	}
}

// A worker's turn is limited in bytes as well as in requests.
func TestAttack_turn_of_a_worker_ends_after_so_many_bytes(t *testing.T) {
	q, mem := newQueue(t, 200)
	const size = 1 << 20
	withLength(t, mem, size)
	var irq interrupts
	var c virtq.Chain
	done := 0
	if err := q.Serve(&irq, &c, func(*virtq.Chain) error { done++; return nil }); err != nil {
		t.Fatal(err)
	}
	if done == 0 || done > TurnBytes/size {
		t.Errorf("%d requests of %d bytes were done in one turn of %d", done, size, TurnBytes)
	}
	if err := q.Kick.Wait(); err != nil { // without a kick this would block
		t.Fatal(err)
	}
}

// A request that stops for a pause is handled again after it, and counts once.
func TestServe_handles_a_request_again_that_stopped_for_a_pause(t *testing.T) {
	q, _ := newQueue(t, 3)
	var irq interrupts
	var c virtq.Chain
	calls := 0
	handle := func(*virtq.Chain) error {
		if calls++; calls == 2 {
			return ErrAgain
		}
		return nil
	}
	if err := q.Serve(&irq, &c, handle); err != nil {
		t.Fatal(err)
	}
	if p := q.Position(); calls != 2 || p.NextAvail != 1 || p.NextUsed != 1 {
		t.Fatalf("after %d calls the queue stands at %+v", calls, p)
	}
	if err := q.Kick.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := q.Serve(&irq, &c, handle); err != nil {
		t.Fatal(err)
	}
	if p := q.Position(); calls != 4 || p.NextAvail != 3 || p.NextUsed != 3 || q.Broken() != nil {
		t.Fatalf("after %d calls the queue stands at %+v", calls, p)
	}
}

func TestSlow_leaves_what_takes_long_and_waits_for_it_the_next_time(t *testing.T) {
	q, _ := newQueue(t, 0)
	w := q.StartWorker(func() {})
	defer w.Stop()
	var s Slow
	gate, failed := make(chan struct{}), errors.New("failed")
	calls := 0
	if err := w.Pause(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := s.Do(q, func() error { <-gate; calls++; return failed }); !errors.Is(err, ErrAgain) {
		t.Fatalf("while a pause is wanted: %v", err)
	}
	w.Resume()
	close(gate)
	if err := s.Do(q, func() error { calls++; return nil }); !errors.Is(err, failed) || calls != 1 {
		t.Fatalf("the failure before is not told: %v after %d calls", err, calls)
	}
	if err := s.Do(q, func() error { calls++; return nil }); err != nil || calls != 2 {
		t.Fatalf("%v after %d calls", err, calls)
	}
	s.End()
}
