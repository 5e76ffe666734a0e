package guest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
)

// watching is a watch that a test reads from.
type watching struct {
	t      *testing.T
	w      *guest.Watch
	events chan guest.WatchEvent
	cancel context.CancelFunc
	ended  chan error
}

// watch begins or resumes a watch.
func (v *vm) watch(t *testing.T, w *guest.Watch, events chan guest.WatchEvent) *watching {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	x := &watching{t: t, w: w, events: events, cancel: cancel, ended: make(chan error, 1)}
	ready := make(chan bool)
	c := v.dial(t)
	go func() {
		x.ended <- c.Watch(ctx, w, func() { close(ready) }, func(e guest.WatchEvent) error {
			select {
			case events <- e:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	t.Cleanup(cancel)
	select {
	case <-ready:
	case err := <-x.ended:
		t.Fatalf("the watch did not begin: %v", err)
	}
	return x
}

// until returns the kinds and names of the events before that of the file end.
func (x *watching) until(end string) (lines []string) {
	x.t.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case e := <-x.events:
			if e.Path == end {
				return lines
			}
			lines = append(lines, e.Kind+" "+e.Path)
		case err := <-x.ended:
			x.t.Fatalf("it ended with %v, after %q", err, lines)
		case <-limit:
			x.t.Fatalf("no word of %s, only of %q", end, lines)
		}
	}
}

func TestWatch_goes_on_after_its_connection_was_cut_and_misses_nothing(t *testing.T) {
	v := startVM(t)
	d := t.TempDir()
	events := make(chan guest.WatchEvent)
	w := guest.NewWatch([]string{d}, true)
	x := v.watch(t, w, events)
	write(t, d+"/one", "", 0o644)
	write(t, d+"/end1", "", 0o644)
	if lines := x.until(d + "/end1"); !slices.Contains(lines, "created "+d+"/one") {
		t.Errorf("at first it tells %q", lines)
	}
	for round := range 3 {
		v.reset()
		// Events that were under way may come before the watch ends.
		var before []string
		for ended := false; !ended; {
			select {
			case e := <-x.events:
				before = append(before, e.Kind+" "+e.Path)
			case err := <-x.ended:
				if !errors.Is(err, guest.ErrConnectionLost) {
					t.Fatalf("cut, it ends with %v", err)
				}
				ended = true
			}
		}
		missed := fmt.Sprintf("%s/sub%d/missed", d, round)
		write(t, missed, "text", 0o644)
		x = v.watch(t, w, events)
		end := fmt.Sprintf("%s/again%d", d, round)
		write(t, end, "", 0o644)
		lines := append(before, x.until(end)...)
		if !slices.Contains(lines, "created "+missed) {
			t.Errorf("round %d: what happened meanwhile is not told: %q", round, lines)
		}
		if slices.ContainsFunc(lines, func(s string) bool { return strings.HasPrefix(s, guest.WatchOverflow) }) {
			t.Errorf("round %d: something is said to be missed: %q", round, lines)
		}
	}
}

func TestWatch_that_the_guest_does_not_know_any_more_says_that_something_was_missed(t *testing.T) {
	d := t.TempDir()
	w := guest.NewWatch([]string{d}, false)
	events := make(chan guest.WatchEvent)
	first := startVM(t)
	x := first.watch(t, w, events)
	write(t, d+"/f", "", 0o644)
	x.until(d + "/f")
	x.cancel()
	<-x.ended
	// This is another agent, as in a VM that was booted anew.
	x = startVM(t).watch(t, w, events)
	write(t, d+"/end", "", 0o644)
	if lines := x.until(d + "/end"); len(lines) == 0 || !strings.HasPrefix(lines[0], guest.WatchOverflow) {
		t.Errorf("it tells %q, and nothing of what was missed", lines)
	}
}

func TestWatch_of_a_reader_that_is_slow_says_how_much_was_lost(t *testing.T) {
	v := startVM(t)
	d := t.TempDir()
	events := make(chan guest.WatchEvent)
	x := v.watch(t, guest.NewWatch([]string{d}, false), events)
	write(t, d+"/first", "", 0o644)
	first := <-x.events // take no more for now
	if first.Path != d+"/first" {
		t.Errorf("the first event is %+v", first)
	}
	for i := range 12_000 { // three events of each: more than the kernel's queue, the agent's and the connection hold
		name := fmt.Sprintf("%s/%d", d, i)
		if err := errors.Join(os.WriteFile(name, []byte("x"), 0o644), os.Remove(name)); err != nil {
			t.Fatal(err)
		}
	}
	// The agent and the kernel lose what they cannot keep. The watch reports how much, and continues. What is written
	// while it catches up may be lost as well.
	lost, end, n := false, d+"/end", 0
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	deadline := time.After(time.Minute)
	for ended := false; !ended; {
		select {
		case e := <-x.events:
			n++
			lost = lost || e.Kind == guest.WatchOverflow && e.Problem != ""
			ended = e.Path == end
		case <-again.C:
			write(t, end, "", 0o644)
		case err := <-x.ended:
			t.Fatal(err)
		case <-deadline:
			t.Fatalf("%d events, and none of %s; some lost: %v", n, end, lost)
		}
	}
	if !lost {
		t.Errorf("%d events, and no word of those that were lost", n)
	}
}

func TestWatch_refuses_what_cannot_be_watched(t *testing.T) {
	c := startVM(t).dial(t)
	many := make([]string, 65)
	for i := range many {
		many[i] = "/"
	}
	for name, paths := range map[string][]string{
		"nothing": {}, "a relative path": {"x"}, "what is not there": {"/no/such/file"}, "too many": many, "a zero byte": {"/x\x00"},
	} {
		err := c.Watch(t.Context(), guest.NewWatch(paths, false), nil, func(guest.WatchEvent) error { return nil })
		var re *guest.RemoteError
		if !errors.As(err, &re) {
			t.Errorf("%s: %v, want a remote error", name, err)
		}
	}
}

func TestWatch_ends_when_its_reader_fails_and_with_its_context(t *testing.T) {
	v := startVM(t)
	d := t.TempDir()
	full := errors.New("full")
	started := make(chan bool)
	go func() {
		<-started
		_ = os.WriteFile(d+"/f", nil, 0o644)
	}()
	err := v.dial(t).Watch(t.Context(), guest.NewWatch([]string{d}, false), func() { close(started) }, func(guest.WatchEvent) error { return full })
	if !errors.Is(err, full) {
		t.Errorf("got %v, want the reader's error", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err = v.dial(t).Watch(ctx, guest.NewWatch([]string{d}, false), cancel, func(guest.WatchEvent) error { return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
}

func TestWatch_more_than_the_agent_keeps_are_refused(t *testing.T) {
	v := startVM(t)
	d := t.TempDir()
	for range 16 {
		v.watch(t, guest.NewWatch([]string{d}, false), make(chan guest.WatchEvent))
	}
	err := v.dial(t).Watch(t.Context(), guest.NewWatch([]string{d}, false), nil, func(guest.WatchEvent) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "16 watches") {
		t.Errorf("the 17th: %v", err)
	}
}
