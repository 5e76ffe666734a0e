package ledger

import "time"

// Kill ends what a session does in the background, as the death of its process would.
func Kill(s *Session) { s.Close() }

// Replace makes what is random reproducible.
func Replace(l *Ledger, id func() string) {
	l.id, l.jitter = id, func(d time.Duration) time.Duration { return d }
}

// Alive reports whether Err would return nil, and changes nothing.
func Alive(c *Claim) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return !c.closed && !c.s.over && c.s.l.clock.Now() < c.s.deadline
}

// DecodeFamily and DecodeHost are for fuzzing.
func DecodeFamily(body []byte) (*Family, error) { return decodeFamily(body) }

// DecodeHost reads a host's record.
func DecodeHost(body []byte) error { _, err := decodeHost(body); return err }

// Holds and Waits are the times of a holder and of a contender.
func Holds(ttl time.Duration) time.Duration { return holds(ttl) }

// Waits is for how long a contender sees no sign of life.
func Waits(ttl time.Duration) time.Duration { return waits(ttl) }
