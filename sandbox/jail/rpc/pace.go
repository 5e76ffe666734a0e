package rpc

import (
	"sync"
	"time"
)

// A Pace bounds how fast a process makes its keeper work. What the keeper does for it is not in its cgroup, so a guest
// could otherwise take processors of the host by the keeper's hands. Beyond a burst, the process waits.
type Pace struct {
	burst, perSecond float64
	// Now and Sleep are those of package time, except in tests.
	Now   func() time.Time
	Sleep func(time.Duration)

	mu   sync.Mutex // guards what follows
	left float64
	at   time.Time // when left was right; zero before the first wait
}

// NewPace returns a pace of so much in a second, and so much at once.
func NewPace(burst, perSecond float64) *Pace {
	return &Pace{burst: burst, perSecond: perSecond, Now: time.Now, Sleep: time.Sleep}
}

// perKiB is what the body of a call costs: reading a KiB of JSON takes about as long as a call.
const perKiB = 1

// Call is Wait for a call with this body.
func (p *Pace) Call(body []byte) { p.Wait(1 + perKiB*float64(len(body))/(1<<10)) }

// minRead is how many bytes a read counts for at least: it takes about as long as copying so many.
const minRead = 256

// Read is Wait for n bytes that one read(2) has given.
func (p *Pace) Read(n int) { p.Wait(float64(max(n, minRead))) }

// Wait takes n of what there is, and returns when there was so much. The waits of several goroutines add up.
func (p *Pace) Wait(n float64) {
	p.mu.Lock()
	now := p.Now()
	if p.at.IsZero() {
		p.left = p.burst
	} else {
		p.left = min(p.burst, p.left+now.Sub(p.at).Seconds()*p.perSecond)
	}
	p.at = now
	p.left -= n
	missing := -p.left
	p.mu.Unlock()
	if missing > 0 {
		p.Sleep(time.Duration(missing / p.perSecond * float64(time.Second)))
	}
}
