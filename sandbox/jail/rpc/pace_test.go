package rpc

import (
	"testing"
	"time"
)

// slow gives a pace a clock that only its own waits move.
func slow(p *Pace) (slept *time.Duration) {
	slept = new(time.Duration)
	begin := time.Now()
	p.Now = func() time.Time { return begin.Add(*slept) }
	p.Sleep = func(d time.Duration) { *slept += d }
	return slept
}

func TestPace_lets_a_burst_pass_and_recovers(t *testing.T) {
	p := NewPace(10, 2)
	slept := slow(p)
	p.Wait(10)
	if *slept != 0 {
		t.Errorf("the burst has waited for %v", *slept)
	}
	p.Wait(4)
	if *slept != 2*time.Second {
		t.Errorf("4 more have waited for %v, want 2 s", *slept)
	}
	*slept += time.Hour
	before := *slept
	if p.Wait(10); *slept != before {
		t.Errorf("after an hour, a burst has waited for %v", *slept-before)
	}
}
