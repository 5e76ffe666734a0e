package supervisor

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// fakeVMs are VMs with timers that can be woken.
type fakeVMs struct {
	mu     sync.Mutex
	labels map[string]spec.Timer
	wakes  []string
	fired  map[string][]error
	fail   func(name string, n int) error
	causes []events.Cause
	asked  map[string]spec.AskedFork
	forks  []string
}

func (v *fakeVMs) forkAsked(_ context.Context, name string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.forks = append(v.forks, name)
	a := v.asked[name]
	a.Begun = true
	v.asked[name] = a
	return errors.New("it is told to the guest and to the log")
}

func (v *fakeVMs) FileStamps() (map[string]string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := map[string]string{}
	for name := range v.labels {
		out[name] = "" // empty, so that look reads the metadata
	}
	return out, nil
}

func (v *fakeVMs) Metadata(name string) (spec.Metadata, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	t, ok := v.labels[name]
	if !ok {
		return spec.Metadata{}, sandbox.ErrNotFound
	}
	return spec.Metadata{Wake: t, Asked: spec.Asked{Fork: v.asked[name]}}, nil
}

func (v *fakeVMs) TimerFired(_ context.Context, name string, fired spec.Timer, problem error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.labels[name] == fired {
		v.labels[name] = spec.Timer{}
	}
	v.fired[name] = append(v.fired[name], problem)
	return nil
}

func (v *fakeVMs) wake(ctx context.Context, name string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.wakes = append(v.wakes, name)
	v.causes = append(v.causes, events.CauseOf(ctx))
	if v.fail == nil {
		return nil
	}
	return v.fail(name, len(v.wakes))
}

// look fires every timer that is due, and waits for the wakes.
func (v *fakeVMs) look(t *testing.T, ts *timers, now time.Time) {
	t.Helper()
	if err := ts.look(t.Context(), now); err != nil {
		t.Fatal(err)
	}
	ts.running.Wait()
}

func quiet(string, ...any) {}

func TestForks_that_guests_have_asked_for_are_made_once_and_none_of_those_past(t *testing.T) {
	now := time.Now()
	v := &fakeVMs{
		labels: map[string]spec.Timer{"none": {}, "wanted": {}, "begun": {}, "past": {}, "to come": {}},
		asked: map[string]spec.AskedFork{
			"wanted": {ID: "1", At: now.Add(-time.Second)}, "begun": {ID: "2", At: now, Begun: true},
			"past": {ID: "3", At: now.Add(-time.Minute)}, "to come": {ID: "4", At: now.Add(time.Hour)},
		},
	}
	ts := newTimers(v, quiet)
	for range 3 {
		v.look(t, ts, now)
	}
	if want := []string{"wanted"}; !slices.Equal(v.forks, want) || len(v.wakes) != 0 {
		t.Errorf("forks of %v and wakes of %v, want forks of %v", v.forks, v.wakes, want)
	}
}

func TestTimers_that_are_due_fire_once_and_others_do_not(t *testing.T) {
	now := time.Now()
	v := &fakeVMs{fired: map[string][]error{}, labels: map[string]spec.Timer{
		"none": {}, "later": {At: now.Add(time.Hour)}, "now": {At: now}, "missed": {At: now.Add(-24 * time.Hour)},
	}}
	ts := newTimers(v, quiet)
	for range 3 {
		v.look(t, ts, now)
	}
	slices.Sort(v.wakes)
	if !slices.Equal(v.wakes, []string{"missed", "now"}) || len(v.fired["now"]) != 1 || v.fired["now"][0] != nil || v.causes[0] != events.Timer {
		t.Fatalf("woken %v by %v, fired %v", v.wakes, v.causes, v.fired)
	}
	v.look(t, ts, now.Add(time.Hour))
	if v.wakes[len(v.wakes)-1] != "later" || len(v.wakes) != 3 {
		t.Fatalf("woken %v", v.wakes)
	}
}

func TestA_timer_that_fails_is_tried_again_and_one_that_cannot_work_is_not(t *testing.T) {
	now := time.Now()
	busy := errors.New("out of memory")
	v := &fakeVMs{fired: map[string][]error{}, labels: map[string]spec.Timer{"a": {At: now}}}
	v.fail = func(_ string, n int) error {
		if n < 2 {
			return busy
		}
		return nil
	}
	v.look(t, newTimers(v, quiet), now)
	if len(v.wakes) != 2 || v.fired["a"][0] != nil {
		t.Fatalf("woken %v, fired %v", v.wakes, v.fired)
	}
	for _, never := range []error{spec.ErrExpired, sandbox.ErrNotRunning} {
		v := &fakeVMs{fired: map[string][]error{}, labels: map[string]spec.Timer{"a": {At: now}}}
		v.fail = func(string, int) error { return never }
		v.look(t, newTimers(v, quiet), now)
		if len(v.wakes) != 1 || !errors.Is(v.fired["a"][0], never) {
			t.Fatalf("%v: woken %v, fired %v", never, v.wakes, v.fired)
		}
	}
}

func TestA_timer_that_was_changed_since_it_was_read_does_not_fire(t *testing.T) {
	now := time.Now()
	v := &fakeVMs{fired: map[string][]error{}, labels: map[string]spec.Timer{"a": {At: now.Add(time.Hour)}}}
	newTimers(v, quiet).fire(t.Context(), "a", spec.Timer{At: now})
	if len(v.wakes) != 0 {
		t.Fatal("it was woken")
	}
}

func TestThe_end_of_a_supervisor_leaves_a_timer_to_the_next_one(t *testing.T) {
	now := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	v := &fakeVMs{fired: map[string][]error{}, labels: map[string]spec.Timer{"a": {At: now}}}
	v.fail = func(string, int) error { cancel(); return context.Canceled }
	newTimers(v, quiet).run(ctx)
	if len(v.fired["a"]) != 0 || !v.labels["a"].At.Equal(now) {
		t.Fatalf("fired %v, left %v", v.fired, v.labels)
	}
}

// heldVMs wake only when a channel is closed.
type heldVMs struct {
	*fakeVMs
	until chan struct{}
}

func (v heldVMs) wake(ctx context.Context, name string) error {
	<-v.until
	return v.fakeVMs.wake(ctx, name)
}

func TestTimers_beyond_the_bound_wait_until_one_has_woken_its_sandbox(t *testing.T) {
	now := time.Now()
	v := heldVMs{&fakeVMs{fired: map[string][]error{}, labels: map[string]spec.Timer{}}, make(chan struct{})}
	for i := range maxTimers + 1 {
		v.labels[strconv.Itoa(i)] = spec.Timer{At: now}
	}
	ts := newTimers(v, quiet)
	for range 2 {
		if err := ts.look(t.Context(), now); err != nil {
			t.Fatal(err)
		}
	}
	close(v.until)
	ts.running.Wait()
	if len(v.wakes) != maxTimers {
		t.Errorf("%d were woken at once, want %d", len(v.wakes), maxTimers)
	}
	v.look(t, ts, now)
	if len(v.wakes) != maxTimers+1 {
		t.Errorf("%d were woken in the end, want %d", len(v.wakes), maxTimers+1)
	}
}
