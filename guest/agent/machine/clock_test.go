package machine

import (
	"syscall"
	"testing"
	"time"
)

func TestSetClock_on_a_slow_host_sets_the_clock_that_is_late_again(t *testing.T) {
	host := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC) // when it made the message
	for _, c := range []struct {
		name   string
		before time.Duration   // from the message to the first look at the clock
		takes  []time.Duration // how long each call takes until it has effect
		off    time.Duration   // the guest's clock at first
		sets   int
		within time.Duration
	}{
		{"at once", 0, []time.Duration{0}, time.Hour, 1, 0},
		{"the clock is right", 0, nil, time.Microsecond, 0, clockSlack},
		{"late before the call", 20 * time.Second, []time.Duration{0}, -time.Hour, 1, 0},
		{"the first call is slow", time.Second, []time.Duration{10 * time.Second, 0}, time.Hour, 2, 0},
		{"a little late", 0, []time.Duration{clockMissed / 2, 0}, time.Hour, 1, clockMissed},
		{"every call is slow", 0, []time.Duration{time.Second, time.Second, time.Second}, time.Hour, clockSets, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			passed, wall, sets := c.before, host.Add(c.before+c.off), 0
			now := func() (int64, time.Duration) { return wall.UnixNano(), passed }
			errno := setClock(host.UnixNano(), now, func(sec, nsec int64) syscall.Errno {
				passed += c.takes[sets]
				sets++
				wall = time.Unix(sec, nsec)
				return 0
			})
			if off := wall.Sub(host.Add(passed)).Abs(); errno != 0 || sets != c.sets || off > c.within {
				t.Errorf("%v: set %d times, and it is off by %v; want %d times, at most %v", errno, sets, off, c.sets, c.within)
			}
		})
	}
}
