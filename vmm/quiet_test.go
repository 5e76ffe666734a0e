package vmm

import (
	"testing"
	"time"
)

func TestQuiet_time_is_longer_for_a_machine_that_lacks_processors(t *testing.T) {
	const ms = time.Millisecond
	for name, tc := range map[string]struct {
		elapsed, used, sinceLook time.Duration // used: before the look at which sinceLook begins
		over                     bool
		more                     bool
	}{
		"it had a fifth of a processor":     {elapsed: 50 * ms, sinceLook: 10 * ms, more: true},
		"it had one to itself":              {elapsed: 50 * ms, sinceLook: 50 * ms},
		"it had enough in the end":          {elapsed: 200 * ms, used: 45 * ms, sinceLook: 5 * ms},
		"it has little after a long time":   {elapsed: 950 * ms, used: 20 * ms, sinceLook: 2 * ms, more: true},
		"it has little after the most time": {elapsed: quietMost, used: 20 * ms, sinceLook: 2 * ms},
		"it waits for something else":       {elapsed: 50 * ms, sinceLook: ms / 2},
		"it has ended meanwhile":            {elapsed: 50 * ms, sinceLook: 10 * ms, over: true},
	} {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			q := quiet{on: true, over: tc.over, begun: begun, before: time.Hour, looked: time.Hour + tc.used}
			q.limit = time.NewTimer(time.Hour)
			defer q.limit.Stop()
			if got := q.more(begun.Add(tc.elapsed), q.looked+tc.sinceLook); got != tc.more {
				t.Errorf("more time: %v, want %v", got, tc.more)
			}
		})
	}
}
