package jail

import (
	"sync"
	"time"
)

// A pace bounds how fast a process makes its keeper work. What the keeper does for it is not in its cgroup, so a guest
// could otherwise take processors of the host by the keeper's hands. Beyond a burst, the process waits.
type pace struct {
	burst, perSecond float64
	now              func() time.Time
	sleep            func(time.Duration)

	mu   sync.Mutex // guards what follows
	left float64
	at   time.Time // when left was right; zero before the first wait
}

func newPace(burst, perSecond float64) *pace {
	return &pace{burst: burst, perSecond: perSecond, now: time.Now, sleep: time.Sleep}
}

// wait takes n of what there is, and returns when there was so much. The waits of several goroutines add up.
func (p *pace) wait(n float64) {
	p.mu.Lock()
	now := p.now()
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
		p.sleep(time.Duration(missing / p.perSecond * float64(time.Second)))
	}
}

// How fast a process may call its keeper, connections of the guest to ports of the host among the calls, and write to
// its console, in bytes. A guest's UART gives less than a MiB a second.
const (
	callBurst, callsPerSecond = 2000, 1000
	consoleBurst, consoleRate = 8 << 20, 4 << 20
)
