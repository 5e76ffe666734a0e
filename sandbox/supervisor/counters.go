package supervisor

import (
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/sandbox/pool"
)

// Counters are what a supervisor counts while it runs. They may be read from any goroutine. The zero value is
// ready.
type Counters struct {
	// Connections is how many connections of published TCP ports are carried now. Refused counts connections that
	// did not reach their VM.
	Connections atomic.Int64
	Refused     atomic.Uint64
	// Held counts packets that were kept while their sleeping VM woke. Dropped counts packets that were discarded:
	// for want of room, because a policy would not let them in, or because the VM could not be woken.
	Held, Dropped atomic.Uint64
	// round is when the supervisor last looked for changes: nanoseconds of the Unix time.
	round atomic.Int64
	// pool is nil until the supervisor has a pool.
	pool atomic.Pointer[pool.Pool]
}

// Pool returns the figures of the supervisor's pool; false if it has none.
func (c *Counters) Pool() (pool.Stats, bool) {
	p := c.pool.Load()
	if p == nil {
		return pool.Stats{}, false
	}
	return p.Stats(), true
}

// LastRound returns when the supervisor last ran its loop, which it does twice a second. The zero time means not
// yet.
func (c *Counters) LastRound() time.Time {
	n := c.round.Load()
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}
