package ledger

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/sandbox/blob"
)

// The clocks of holder and contender may each be wrong by a tenth: a holder's own deadline is 9/10 of the time to live,
// and a contender waits 11/10. (9/10)/(1-1/10) is not more than (11/10)/(1+1/10).
//
// What of it the clocks do not use is the time to stop what runs.
func holds(ttl time.Duration) time.Duration { return ttl - ttl/10 }
func waits(ttl time.Duration) time.Duration { return ttl + ttl/10 }

const (
	renewals = 3  // in a time to live
	retries  = 20 // in a time to live, of a renewal that failed
)

// A sight is a version of a host's record, and when it was first seen, by this host's clock.
type sight struct {
	version blob.Version
	since   time.Duration
}

// maxSights bounds the hosts that are remembered. To forget one means to wait for it again.
const maxSights = 1 << 16

// Session is the time in which a host may run what it claims. It is renewed in the background, and over at the latest
// when Err says so.
type Session struct {
	l           *Ledger
	host        string
	incarnation string

	cancel context.CancelFunc
	wait   sync.WaitGroup // run, watch
	lost   chan struct{}

	// Only run uses these, and Leave after its end.
	version blob.Version
	counter uint64
	next    time.Duration // of the next renewal

	mu       sync.Mutex
	deadline time.Duration
	over     bool // lost is closed
	// held has the families that claims of this process hold or are about to hold.
	held map[string]bool
	// loose has claims that nobody has, and that the store may have: see tidy.
	loose map[string]loose
}

// loose is a claim whose holder gave up before he knew what became of it.
type loose struct {
	claim string
	// pending means that it may still be on its way to the store.
	pending bool
}

// Join begins a session of a host. The name is the host's own: if a session of that name is alive, Join waits whether
// it still is after its time to live, and returns ErrHostInUse if so. It goes on with the session of the incarnation
// formerly, unless that has ended: the caller knows, by a lock of his own, that nobody else uses it. Then what it has
// claimed may run on, and the caller claims all of that anew, and releases what he does not need. An empty one means
// that there is none.
func (l *Ledger) Join(ctx context.Context, name, formerly string) (*Session, error) {
	if err := checkName("host", name); err != nil {
		return nil, err
	}
	s := &Session{
		l: l, host: name, incarnation: l.id(), lost: make(chan struct{}),
		held: map[string]bool{}, loose: map[string]loose{},
	}
	if err := s.join(ctx, formerly); err != nil {
		return nil, fmt.Errorf("joining the ledger as %s: %w", name, err)
	}
	ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.wait.Go(func() { s.run(ctx) })
	s.wait.Go(func() { s.watch(ctx) })
	return s, nil
}

func (s *Session) join(ctx context.Context, formerly string) error {
	var alive blob.Version // of another's session
	for failed := 0; ; {
		h, v, err := s.l.loadHost(ctx, s.host)
		if errors.Is(err, blob.ErrNotFound) {
			err = nil
		}
		var record *recordError
		if errors.As(err, &record) {
			return err
		}
		if err == nil && v != "" && !h.Ended && h.Incarnation == formerly {
			s.incarnation = formerly
		}
		if err == nil && s.incarnation == formerly && (h.Ended || h.Incarnation != formerly) {
			s.incarnation = s.l.id() // it has ended meanwhile
		}
		if err == nil && v != "" && !h.Ended && h.Incarnation != s.incarnation {
			if alive != "" && alive != v {
				return ErrHostInUse
			}
			alive = v
			var wait time.Duration
			if wait, err = s.l.end(ctx, s.host, h.Incarnation); err == nil {
				if err := s.l.clock.Sleep(ctx, wait); err != nil {
					return err
				}
				continue
			}
		}
		if err == nil {
			now := s.l.clock.Now()
			s.counter = max(s.counter, h.Counter) + 1
			if v, err = s.l.swapHost(ctx, s.host, v, s.record(false)); err == nil {
				s.version, s.deadline, s.next = v, now+holds(s.l.ttl), now+s.l.ttl/renewals
				return s.Err()
			}
		}
		if failed++; failed >= storeTries || !s.l.pause(ctx, failed) {
			return err
		}
	}
}

func (s *Session) record(ended bool) host {
	v := version
	if s.l.address != "" {
		v = hostVersion
	}
	return host{
		Version: v, Incarnation: s.incarnation, Counter: s.counter, TTL: s.l.ttl.Milliseconds(), Ended: ended,
		Address: s.l.address, Key: s.l.key,
	}
}

// Host returns the host's name.
func (s *Session) Host() string { return s.host }

// Incarnation returns the session's name, for Join.
func (s *Session) Incarnation() string { return s.incarnation }

// Deadline returns until when the session lasts, if it is not renewed, by the ledger's clock.
func (s *Session) Deadline() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.deadline
}

// Lost is closed when the session is over. Everything that it has claimed must then stop, if it has not, before another
// tenth of the time to live is over.
func (s *Session) Lost() <-chan struct{} { return s.lost }

// Err returns ErrLost if the session is over. It asks the clock: whoever acts for a claim outside of the ledger asks it
// directly before. Once over it is so for ever.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err()
}

// err is Err, with mu held.
func (s *Session) err() error {
	if !s.over && s.l.clock.Now() < s.deadline {
		return nil
	}
	s.lose()
	return ErrLost
}

// lose ends the session for this process, with mu held.
func (s *Session) lose() {
	if !s.over {
		s.over = true
		close(s.lost)
	}
}

// watch closes lost in time, also if a call of the store hangs.
func (s *Session) watch(ctx context.Context) {
	for s.Err() == nil {
		s.mu.Lock()
		left := s.deadline - s.l.clock.Now()
		s.mu.Unlock()
		if s.l.clock.Sleep(ctx, left) != nil {
			return
		}
	}
}

// run renews the session.
func (s *Session) run(ctx context.Context) {
	for s.l.clock.Sleep(ctx, s.next-s.l.clock.Now()) == nil && s.Err() == nil {
		if s.renew(ctx) {
			s.tidy(ctx)
		}
	}
}

// renew reports whether the session was renewed.
func (s *Session) renew(ctx context.Context) bool {
	ctx, cancel := within(ctx, s.l.clock, s.l.ttl/renewals)
	defer cancel()
	// The deadline counts from here: a contender may see the new record as soon as it is sent.
	now := s.l.clock.Now()
	s.counter++
	v, err := s.l.swapHost(ctx, s.host, s.version, s.record(false))
	if err == nil {
		s.version, s.next = v, now+s.l.ttl/renewals
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.err() != nil {
			return false // too late: those who asked know it
		}
		s.deadline = now + holds(s.l.ttl)
		return true
	}
	s.next = s.l.clock.Now() + s.l.ttl/retries
	// It may have been done, which is only good to know: when it was is not known.
	h, v, err := s.l.loadHost(ctx, s.host)
	switch {
	case err == nil && h.Incarnation == s.incarnation && !h.Ended:
		s.version, s.counter = v, max(s.counter, h.Counter)
	case err == nil, errors.Is(err, blob.ErrNotFound):
		s.mu.Lock()
		s.lose()
		s.mu.Unlock()
	}
	return false
}

// Close stops renewing the session, which lasts until its deadline. A later process may go on with it: see Join.
func (s *Session) Close() {
	s.cancel()
	s.wait.Wait()
}

// Leave ends the session, so that nobody has to wait for its end. What it has claimed must have stopped before. If it
// fails the session is over nevertheless, and others wait until they see that.
func (s *Session) Leave(ctx context.Context) error {
	s.mu.Lock()
	s.lose()
	s.mu.Unlock()
	s.Close()
	var err error
	for failed := 0; ; {
		s.counter++
		if _, err = s.l.swapHost(ctx, s.host, s.version, s.record(true)); err == nil {
			return nil
		}
		h, v, err2 := s.l.loadHost(ctx, s.host)
		switch {
		case err2 == nil && (h.Incarnation != s.incarnation || h.Ended), errors.Is(err2, blob.ErrNotFound):
			return nil
		case err2 == nil:
			s.version, s.counter = v, max(s.counter, h.Counter)
		}
		if failed++; failed >= storeTries || !s.l.pause(ctx, failed) {
			return fmt.Errorf("leaving the ledger as %s: %w", s.host, err)
		}
	}
}

// end ends an incarnation of a host, if it has given no sign of life for long enough. It returns 0 if it has ended, and
// else how long to wait until a next call.
func (l *Ledger) end(ctx context.Context, name, incarnation string) (time.Duration, error) {
	for failed := 0; ; {
		h, v, err := l.loadHost(ctx, name)
		if errors.Is(err, blob.ErrNotFound) {
			// Nobody deletes these. Its holder is alive for at most as long as any.
			h, err = host{Version: version, Incarnation: incarnation, TTL: maxTTL.Milliseconds()}, nil
		}
		if err != nil {
			return 0, err
		}
		if h.Incarnation != incarnation || h.Ended {
			return 0, nil
		}
		if left := l.sight(name, v, waits(h.ttl())); left > 0 {
			return left, nil
		}
		h.Ended = true
		h.Counter++
		if _, err = l.swapHost(ctx, name, v, h); err == nil {
			return 0, nil
		}
		if failed++; failed >= storeTries || !l.pause(ctx, failed) {
			return 0, err
		}
	}
}

// sight notes that a host's record has just been seen, and returns how long it still has to be seen unchanged.
func (l *Ledger) sight(name string, v blob.Version, wait time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now() // after the answer
	s, ok := l.seen[name]
	if !ok || s.version != v {
		if len(l.seen) >= maxSights {
			clear(l.seen)
		}
		s = sight{v, now}
		l.seen[name] = s
	}
	return s.since + wait - now
}
