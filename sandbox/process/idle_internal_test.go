package process

import (
	"errors"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestIdleSpec_that_cannot_be_is_refused(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]spec.Idle{
		"negative time":       {SleepSeconds: -1},
		"too long":            {SleepSeconds: spec.MaxIdleSeconds + 1},
		"negative processor":  {SleepSeconds: 1, CPUPercent: -1},
		"more than a CPU has": {SleepSeconds: 1, CPUPercent: 101},
	} {
		if err := s.Validate(); !errors.Is(err, spec.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrSpec", name, err)
		}
	}
	for _, s := range []spec.Idle{{}, {SleepSeconds: 1}, {SleepSeconds: spec.MaxIdleSeconds, CPUPercent: 100}} {
		if err := s.Validate(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

func TestIdleWatch(t *testing.T) {
	t.Parallel()
	const second = time.Second
	// Each step comes a second after the last one. In uses, made and cpu are running totals.
	type step struct {
		u    uses
		late time.Duration // more than a second
		want time.Duration
		// burst means that the guest works right now, and so must not sleep.
		burst bool
	}
	for name, tc := range map[string]struct {
		spec  spec.Idle
		span  time.Duration
		steps []step
	}{
		"nothing happens": {steps: []step{{want: second}, {want: 2 * second}, {want: 3 * second}}},
		"a connection is open": {steps: []step{
			{want: second}, {u: uses{open: 1, made: 1}}, {u: uses{open: 1, made: 1}}, {u: uses{made: 1}}, {u: uses{made: 1}, want: second},
		}},
		"a connection came and went in between": {steps: []step{{want: second}, {u: uses{made: 1}}, {u: uses{made: 1}, want: second}}},
		"a packet passes": {steps: []step{
			{want: second}, {u: uses{packet: true, quiet: second / 2}, want: second / 2},
			{u: uses{packet: true, quiet: 3 * second / 2}, want: 3 * second / 2}, {u: uses{packet: true, quiet: second}, want: second},
		}},
		"the only packet is old": {steps: []step{{u: uses{packet: true, quiet: 10 * second}, want: second}, {u: uses{packet: true, quiet: 11 * second}, want: 2 * second}}},
		// A tenth of a processor over ten seconds is one second of it.
		"it computes": {steps: []step{
			{u: uses{cpu: second / 20}, want: second}, {u: uses{cpu: second/20 + 6*second/5}}, {u: uses{cpu: second/20 + 6*second/5}, want: second},
		}},
		"it computes no more than it may": {spec: spec.Idle{CPUPercent: 30}, steps: []step{
			{u: uses{cpu: 3 * second / 10}, want: second}, {u: uses{cpu: 6 * second / 10}, want: 2 * second}, {u: uses{cpu: 61 * second / 10}},
		}},
		"bursts that are short": {steps: []step{
			{u: uses{cpu: second / 2}, want: second, burst: true}, {u: uses{cpu: second / 2}, want: 2 * second},
			{u: uses{cpu: second}, want: 3 * second, burst: true}, {u: uses{cpu: second}, want: 4 * second},
		}},
		"bursts that are too much together": {steps: []step{
			{u: uses{cpu: second / 2}, want: second, burst: true}, {u: uses{cpu: second / 2}, want: 2 * second},
			{u: uses{cpu: 11 * second / 10}, burst: true}, {u: uses{cpu: 11 * second / 10}, want: second},
			{u: uses{cpu: 16 * second / 10}, want: 2 * second, burst: true}, {u: uses{cpu: 16 * second / 10}, want: 3 * second},
		}},
		"work that goes on is use as long as it does, however little it is": {steps: []step{
			{u: uses{cpu: 11 * second / 10}, burst: true}, {u: uses{cpu: 13 * second / 10}, burst: true}, {u: uses{cpu: 15 * second / 10}, burst: true},
			{u: uses{cpu: 15 * second / 10}, want: second},
		}},
		"a burst, a packet, and another": {steps: []step{
			{u: uses{cpu: 9 * second / 10}, want: second, burst: true}, {u: uses{cpu: 9 * second / 10, packet: true}},
			{u: uses{cpu: 18 * second / 10, packet: true, quiet: second}, want: second, burst: true},
		}},
		"what is little over a span is no burst": {span: 3 * second, steps: []step{
			{want: second}, {want: 2 * second}, {want: 3 * second}, {u: uses{cpu: second / 5}, want: 4 * second}, {u: uses{cpu: second / 5}, want: 5 * second},
		}},
		"it computes for longer, and is unused from when it has ended": {span: 3 * second, steps: []step{
			{want: second}, {want: 2 * second}, {u: uses{cpu: second / 5}, want: 3 * second}, {u: uses{cpu: 7 * second / 5}},
			{u: uses{cpu: 7 * second / 5}, want: second}, {u: uses{cpu: 7 * second / 5}, want: 2 * second},
		}},
		"a snapshot is made":         {steps: []step{{want: second}, {u: uses{busy: true}}, {want: second}}},
		"nobody has looked for long": {steps: []step{{want: second}, {late: 5 * second}, {want: second}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now := time.Unix(1000, 0)
			spec := tc.spec
			spec.SleepSeconds = 10
			w := newIdleWatch(spec, now, uses{})
			w.every, w.span = second, second
			if tc.span != 0 {
				w.span = tc.span
			}
			for i, s := range tc.steps {
				now = now.Add(second + s.late)
				if got := w.look(now, s.u); got != s.want {
					t.Errorf("step %d: unused for %v, want %v", i, got, s.want)
				}
				if s.burst && !w.busy {
					t.Errorf("step %d: it works, and could be put to sleep", i)
				}
			}
		})
	}
}

func TestIdleWatch_looks_neither_too_often_nor_too_seldom(t *testing.T) {
	t.Parallel()
	for seconds, want := range map[int]time.Duration{1: 100 * time.Millisecond, 15: 500 * time.Millisecond, 3600: 5 * time.Second} {
		if w := newIdleWatch(spec.Idle{SleepSeconds: seconds}, time.Now(), uses{}); w.every != want {
			t.Errorf("for a sleep after %d s: each %v, want %v", seconds, w.every, want)
		}
	}
}

func TestIdleWatch_looks_again_at_the_latest_when_it_sleeps(t *testing.T) {
	t.Parallel()
	now := time.Unix(1000, 0)
	w := newIdleWatch(spec.Idle{SleepSeconds: 15}, now, uses{})
	for passed, want := range map[time.Duration]time.Duration{
		0: 500 * time.Millisecond, 14500 * time.Millisecond: 500 * time.Millisecond, 14900 * time.Millisecond: 100 * time.Millisecond,
		15 * time.Second: time.Millisecond, time.Minute: time.Millisecond,
	} {
		if got := w.next(now.Add(passed), 15*time.Second); got != want {
			t.Errorf("after %v: in %v, want in %v", passed, got, want)
		}
	}
}
