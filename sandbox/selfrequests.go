package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Asked is what a guest has asked for that is in its sandbox's Metadata, so that it can change that, and nothing that
// its owner has set.
type Asked struct {
	// Wake is the time of the timer that it has asked for. The Metadata's timer is the guest's as long as it is that
	// one.
	Wake time.Time `json:"wake,omitzero"`
	// Expires is the expiry that it has asked for, and From the one that its owner had set. They count as long as the
	// Metadata expires then.
	Expires time.Time `json:"expires,omitzero"`
	From    time.Time `json:"from,omitzero"`
	// Fork is a fork that it has asked for, until it has been told of it.
	Fork AskedFork `json:"fork,omitzero"`
}

var (
	// ErrOwnersTimer says that a guest has asked to be woken, and its owner has set a timer, of which there is one.
	ErrOwnersTimer = errors.New("the VM's owner has set its timer: it stays as it is")
	// ErrExtension says that a guest has asked to last longer than it may.
	ErrExtension = errors.New("the guest has asked to last longer than its owner allows")
)

// selfMetadataTime bounds the wait for metadata that somebody else changes.
const selfMetadataTime = 10 * time.Second

// selfWake sets the timer of a sandbox for its guest, once; the zero time takes away what the guest has asked for
// before.
func (s *Store) selfWake(ctx context.Context, name string, at time.Time) error {
	at = at.UTC().Truncate(time.Millisecond) // as it is kept
	return s.setSelf(ctx, name, func(l *Metadata) error {
		switch {
		case l.Wake != Timer{} && (l.Wake.Every != 0 || !l.Wake.At.Equal(l.Asked.Wake)):
			return fmt.Errorf("%w: at %s", ErrOwnersTimer, l.Wake.At.Format(time.RFC3339))
		case at.IsZero():
			l.Wake, l.Asked.Wake = Timer{}, time.Time{}
			return nil
		case l.Class == lifetime.Ephemeral:
			return fmt.Errorf("%w: an ephemeral sandbox does not sleep, so nothing wakes it", ErrMetadata)
		case !at.After(time.Now()):
			return fmt.Errorf("%w: it asks to be woken at %s, which is over by the host's clock", ErrMetadata, at.Format(time.RFC3339))
		}
		l.Wake, l.Asked.Wake = Timer{At: at}, at
		return nil
	})
}

// selfExtend lets a sandbox last for some seconds from now on at least, for its guest: at most by so much longer in all
// than its owner has set. One that lasts longer, or for ever, is left as it is. It returns when the sandbox expires.
func (s *Store) selfExtend(ctx context.Context, name string, may spec.Self, seconds int) (expires time.Time, err error) {
	if seconds > lifetime.MaxSeconds {
		return time.Time{}, fmt.Errorf("%w: by %d s: use at most %d", ErrExtension, seconds, lifetime.MaxSeconds)
	}
	err = s.setSelf(ctx, name, func(l *Metadata) error {
		now := time.Now()
		until := now.Add(time.Duration(seconds) * time.Second).UTC().Truncate(time.Second)
		expires = l.Expires
		if l.Expires.IsZero() || !until.After(l.Expires) {
			return errNothingToTell
		}
		if lifetime.Expired(l.Expires, now) {
			return fmt.Errorf("%w: at %s: only its owner can extend it", ErrExpired, l.Expires.Format(time.RFC3339))
		}
		from := l.Expires
		if l.Asked.Expires.Equal(l.Expires) {
			from = l.Asked.From
		}
		if last := from.Add(may.Extension()); until.After(last) {
			return fmt.Errorf("%w: until %s, and %s is the last", ErrExtension, until.Format(time.RFC3339), last.Format(time.RFC3339))
		}
		l.Expires, l.Asked.Expires, l.Asked.From = until, until, from
		expires = until
		return nil
	})
	return expires, err
}

// setSelf changes metadata for its guest.
func (s *Store) setSelf(ctx context.Context, name string, change func(*Metadata) error) error {
	ctx, cancel := context.WithTimeout(events.WithCause(ctx, events.Guest), selfMetadataTime)
	defer cancel()
	_, err := s.SetMetadata(ctx, name, func(l *Metadata, unreadable error) error {
		if unreadable != nil {
			return unreadable
		}
		return change(l)
	})
	if errors.Is(err, errNothingToTell) {
		return nil
	}
	return err
}
