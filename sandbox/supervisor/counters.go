package supervisor

import (
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/sandbox/pool"
)

// Counters are what a supervisor counts while it runs, from its beginning on. They may be read from any goroutine. The
// zero value is ready.
type Counters struct {
	// Connections is how many connections of published TCP ports are carried now, and Refused how many found no way to
	// their VM.
	Connections atomic.Int64
	Refused     atomic.Uint64
	// Held is how many packets to VMs that sleep were kept while these woke, and Dropped how many were let go: for want
	// of room, since a policy would not let them in, or since the VM could not be woken.
	Held, Dropped atomic.Uint64
	// round is when the supervisor has last looked for changes: nanoseconds of the Unix time.
	round atomic.Int64
	// pool is nil as long as there is none.
	pool atomic.Pointer[pool.Pool]
}

// Pool are the figures of the supervisor's pool; false if it has none.
func (c *Counters) Pool() (pool.Stats, bool) {
	p := c.pool.Load()
	if p == nil {
		return pool.Stats{}, false
	}
	return p.Stats(), true
}

// LastRound is when the supervisor has last gone round its loop, which it does twice a second; the zero time is not
// yet.
func (c *Counters) LastRound() time.Time {
	n := c.round.Load()
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}
