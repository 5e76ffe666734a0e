package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Claim is the right to run a sandbox, and to change what the ledger says of it. It ends with its session, or when it
// is given up.
type Claim struct {
	s      *Session
	family string
	name   string // Holder.Claim
	fence  uint64
	since  uint64
	head   string

	mu     sync.Mutex
	closed bool
	// intended has the snapshots that Intend registered.
	intended map[string]bool
}

// Claim claims a sandbox, and makes its family if there is none. It returns a HeldError if another host has it that may
// be alive, and ErrDeleted.
func (s *Session) Claim(ctx context.Context, family string) (*Claim, error) {
	return s.claim(ctx, family, false)
}

// Create is Claim of a sandbox that is to be new: there is none of its name, or it is deleted, or it has no head and no
// host. Otherwise it returns ErrExists, or a HeldError.
func (s *Session) Create(ctx context.Context, family string) (*Claim, error) {
	return s.claim(ctx, family, true)
}

func (s *Session) claim(ctx context.Context, family string, create bool) (*Claim, error) {
	if err := s.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	held := s.held[family]
	s.held[family] = true
	s.mu.Unlock()
	if held {
		return nil, &HeldError{Family: family, Host: s.host}
	}
	c := &Claim{s: s, family: family, name: s.l.id(), intended: map[string]bool{}}
	left, err := c.claim(ctx, create)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		delete(s.loose, family) // ours has replaced it
		err = s.err()
	}
	if err == nil {
		return c, nil
	}
	delete(s.held, family)
	if left.pending {
		s.loose[family] = left
	}
	return nil, fmt.Errorf("claiming the sandbox %s: %w", family, err)
}

// claim returns what may still become of a claim that fails.
func (c *Claim) claim(ctx context.Context, create bool) (loose, error) {
	left := loose{claim: c.name}
	f, err := c.s.l.update(ctx, change{
		family: c.family,
		make: func(f *Family) (bool, error) {
			h := f.Holder
			switch {
			case h != nil && h.Claim == c.name:
				return false, nil // an answer was lost
			case f.Deleted && !create:
				return false, ErrDeleted
			case create && f.Head != "":
				return false, ErrExists
			case h != nil && h.Incarnation != c.s.incarnation:
				wait, err := c.s.l.end(ctx, h.Host, h.Incarnation)
				if err != nil {
					return false, err
				}
				if wait > 0 {
					return false, &HeldError{Family: c.family, Host: h.Host, Wait: wait}
				}
			}
			// One of our own is of a claim that nobody has: see Session.held.
			f.Fence++
			f.Deleted = false
			since := f.Fence
			if h != nil && h.Incarnation == c.s.incarnation {
				since = h.Since
			}
			f.Holder = &Holder{Host: c.s.host, Incarnation: c.s.incarnation, Claim: c.name, Since: since}
			return true, nil
		},
		may:  c.s.Err,
		sent: func() { left.pending = true },
	})
	if err != nil {
		return left, err
	}
	c.fence, c.since, c.head = f.Fence, f.Holder.Since, f.Head
	return loose{}, nil
}

// tidy releases claims that nobody has. Without it a sandbox whose claim came late would be held by a host that lives
// and knows nothing of it. If the claim was to make the family, it makes an empty one.
func (s *Session) tidy(ctx context.Context) {
	s.mu.Lock()
	families := sortedKeys(s.loose)
	s.mu.Unlock()
	if len(families) == 0 {
		return
	}
	ctx, cancel := within(ctx, s.l.clock, s.l.ttl/renewals/2)
	defer cancel()
	for _, family := range families {
		s.mu.Lock()
		o, ok := s.loose[family]
		busy := s.held[family]
		s.mu.Unlock()
		if !ok || busy {
			continue
		}
		_, err := s.l.update(ctx, change{family: family, may: s.Err, make: o.release})
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			s.mu.Lock()
			if s.loose[family] == o {
				delete(s.loose, family)
			}
			s.mu.Unlock()
		}
	}
}

func (o loose) release(f *Family) (bool, error) {
	if f.Holder != nil && f.Holder.Claim == o.claim {
		f.Holder = nil
		return true, nil
	}
	// Any change makes what is on its way come too late.
	return o.pending && !f.Deleted, nil
}

// Family returns the sandbox's name.
func (c *Claim) Family() string { return c.family }

// Head returns the snapshot that the sandbox slept in when it was claimed; it is empty if there was none.
func (c *Claim) Head() string { return c.head }

// Fence returns the number of the claim, which is above those of all claims before it.
func (c *Claim) Fence() uint64 { return c.fence }

// Follows reports whether nobody else has held the sandbox between a claim of this host, by its fence, and this one.
func (c *Claim) Follows(fence uint64) bool { return fence > 0 && fence+1 >= c.since }

// Err returns ErrLost or ErrReleased if the claim has ended. Whoever acts for the sandbox outside of the ledger asks it
// directly before.
func (c *Claim) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrReleased
	}
	return c.s.Err()
}

func (c *Claim) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// change makes a change of the family that only its holder may make.
func (c *Claim) change(ctx context.Context, doing string, limit int, make func(f *Family) (bool, error)) error {
	if err := c.Err(); err != nil {
		return fmt.Errorf("%s of the sandbox %s: %w", doing, c.family, err)
	}
	_, err := c.s.l.update(ctx, change{family: c.family, limit: limit, may: c.Err, make: func(f *Family) (bool, error) {
		if f.Deleted {
			return false, ErrDeleted
		}
		return make(f)
	}})
	if err != nil {
		err = fmt.Errorf("%s of the sandbox %s: %w", doing, c.family, err)
	}
	return err
}

// has reports whether a family is held by this claim.
func (c *Claim) has(f *Family) bool { return f.current(c.fence) && f.Holder.Claim == c.name }

// Needs is what a snapshot needs.
type Needs struct {
	// Fresh is what is to be uploaded for it. No key was ever used before: a part of each is random.
	Fresh []string
	// Reused is uploads of this family that are needed by its head, or by what the same claim intends.
	Reused []string
}

// Intend registers a snapshot and all that it needs. Nothing of it may be uploaded before. It returns a CondemnedError
// if something that is to be used again may be gone, and ErrFull.
//
// A snapshot that is never committed ends with the claim, or by Remove; then Collect deletes its uploads.
func (c *Claim) Intend(ctx context.Context, snapshot string, n Needs) error {
	err := checkName("snapshot", snapshot)
	for _, u := range slices.Concat(n.Fresh, n.Reused) {
		err = errors.Join(err, checkUpload(u))
	}
	if err != nil {
		return err
	}
	want := Snapshot{State: Intent, Fence: c.fence, Uploads: set(slices.Concat(n.Fresh, n.Reused))}
	err = c.change(ctx, "intending a snapshot", MaxFamily-reserve, func(f *Family) (bool, error) {
		if !c.has(f) {
			return false, ErrReleased
		}
		if s, ok := f.Snapshots[snapshot]; ok {
			if s.State == Intent && s.Fence == c.fence && slices.Equal(s.Uploads, want.Uploads) {
				return false, nil // an answer was lost
			}
			return false, fmt.Errorf("%w: there is a snapshot %s already", ErrSnapshot, snapshot)
		}
		needed := f.needed()
		var condemned CondemnedError
		for _, u := range n.Reused {
			if !needed[u] {
				condemned.Uploads = append(condemned.Uploads, u)
			}
		}
		if len(condemned.Uploads) > 0 {
			return false, &condemned
		}
		fresh := map[string]bool{}
		for _, u := range n.Fresh {
			fresh[u] = true
		}
		for _, s := range f.Snapshots {
			for _, u := range s.Uploads {
				if fresh[u] {
					return false, fmt.Errorf("%w: the upload %s is not fresh", ErrSnapshot, u)
				}
			}
		}
		if f.Snapshots == nil {
			f.Snapshots = map[string]Snapshot{}
		}
		f.Snapshots[snapshot] = want
		return true, nil
	})
	if err == nil {
		c.mu.Lock()
		c.intended[snapshot] = true
		c.mu.Unlock()
	}
	return err
}

// Commit makes a snapshot the head that the claim intends, and all of whose uploads are in the store. The head before
// is then gone. With release it also gives up the claim, for which the sandbox must have stopped before. After an error
// the caller calls it again, or gives up by Release.
func (c *Claim) Commit(ctx context.Context, snapshot string, release bool) error {
	c.mu.Lock()
	intended := c.intended[snapshot]
	c.mu.Unlock()
	err := c.change(ctx, "committing a snapshot", 0, func(f *Family) (bool, error) {
		s, ok := f.Snapshots[snapshot]
		if !c.has(f) {
			// An answer may have been lost. Nobody else can have kept it.
			if release && (intended && s.State == Kept || f.Holder == nil && f.Fence == c.fence && f.Head == snapshot) {
				return false, nil
			}
			return false, ErrReleased
		}
		if !ok || s.State == Gone || s.State == Kept && f.Head != snapshot || s.State == Intent && s.Fence != c.fence {
			return false, fmt.Errorf("%w: %s", ErrSnapshot, snapshot)
		}
		if s.State == Kept && f.Head == snapshot && !release {
			return false, nil
		}
		for id, other := range f.Snapshots {
			if other.State == Kept {
				other.State = Gone
				f.Snapshots[id] = other
			}
		}
		s.State, s.Fence = Kept, 0
		f.Snapshots[snapshot] = s
		f.Head = snapshot
		if release {
			f.Holder = nil
		}
		return true, nil
	})
	if err == nil && release {
		c.close()
		c.s.forget(c, false)
	}
	return err
}

// Release gives up the claim. The sandbox must have stopped before. If it fails the session goes on trying.
func (c *Claim) Release(ctx context.Context) error {
	if c.Err() != nil {
		return nil
	}
	c.close()
	_, err := c.s.l.update(ctx, change{family: c.family, may: c.s.Err, make: loose{claim: c.name}.release})
	c.s.forget(c, err != nil)
	if err != nil {
		return fmt.Errorf("giving up the sandbox %s: %w", c.family, err)
	}
	return nil
}

// Delete marks the sandbox and all of its snapshots as gone, for ever, and ends the claim. The sandbox must have
// stopped before. Collect then deletes its uploads.
func (c *Claim) Delete(ctx context.Context) error {
	if err := c.Err(); err != nil {
		return err
	}
	_, err := c.s.l.update(ctx, change{family: c.family, may: c.Err, make: func(f *Family) (bool, error) {
		if f.Deleted {
			return false, nil // an answer was lost
		}
		if !c.has(f) {
			return false, ErrReleased
		}
		f.Deleted, f.Head, f.Holder = true, "", nil
		for id, s := range f.Snapshots {
			s.State, s.Fence = Gone, 0
			f.Snapshots[id] = s
		}
		return true, nil
	}})
	if err != nil {
		return fmt.Errorf("deleting the sandbox %s: %w", c.family, err)
	}
	c.close()
	c.s.forget(c, false)
	return nil
}

// forget ends a claim of this process. If its release has failed, tidy does it.
func (s *Session) forget(c *Claim, failed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.held, c.family)
	if failed {
		s.loose[c.family] = loose{claim: c.name}
	}
}
