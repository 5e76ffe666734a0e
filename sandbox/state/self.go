package state

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ErrNoForker means that a guest has asked for a fork, and no process makes it.
var ErrNoForker = errors.New("nobody makes it: `drowse serve` makes the forks that guests ask for")

// SelfFork requests a fork of a VM, for its guest, and waits until it is made. It returns the child's name.
func (s *Store) SelfFork(ctx context.Context, name string) (child string, err error) {
	id := spec.NewID()
	if err := s.SetSelf(ctx, name, func(l *spec.Metadata) error {
		l.Asked.Fork = spec.AskedFork{ID: id, At: time.Now().UTC()}
		return nil
	}); err != nil {
		return "", err
	}
	begin := time.Now()
	for {
		l, err := s.Metadata(name)
		switch a := l.Asked.Fork; {
		case err != nil:
			return "", err
		case a.ID != id:
			return "", fmt.Errorf("forking %s: somebody has written its metadata anew meanwhile", name)
		case a.Child != "" || a.Error != "":
			if err := s.forgetFork(ctx, name, id, true); err != nil {
				return "", err
			}
			if a.Error != "" {
				return "", errors.New(a.Error)
			}
			return a.Child, nil
		case !a.Begun && time.Since(begin) > spec.SelfForkBegin:
			err := s.forgetFork(ctx, name, id, false)
			if errors.Is(err, errForkBegun) {
				continue
			}
			return "", errors.Join(ErrNoForker, err)
		case time.Since(begin) > SelfForkTime:
			return "", errors.Join(fmt.Errorf("forking %s: it has taken longer than %v: whoever has begun with it may have been killed", name, SelfForkTime), s.forgetFork(ctx, name, id, true))
		}
		if wait.For(ctx, SelfForkPoll) != nil {
			// Otherwise it would be made for a guest that no longer waits.
			return "", errors.Join(ctx.Err(), s.forgetFork(context.WithoutCancel(ctx), name, id, true))
		}
	}
}

var errForkBegun = errors.New("somebody has begun with it")

// forgetFork withdraws a request. It withdraws one that has begun only if begun is set.
func (s *Store) forgetFork(ctx context.Context, name, id string, begun bool) error {
	return s.SetSelf(ctx, name, func(l *spec.Metadata) error {
		switch {
		case l.Asked.Fork.ID != id:
			return ErrNothingToTell
		case l.Asked.Fork.Begun && !begun:
			return errForkBegun
		}
		l.Asked.Fork = spec.AskedFork{}
		return nil
	})
}

var (
	// ErrOwnersTimer means that a guest has asked to be woken, but its owner has set the VM's only timer.
	ErrOwnersTimer = errors.New("the VM's owner has set its timer: it stays as it is")
	// ErrExtension means that a guest has asked to last longer than it may.
	ErrExtension = errors.New("the guest has asked to last longer than its owner allows")
)

// SelfWake sets the timer of a sandbox for its guest, once. The zero time removes what the guest has asked for before.
func (s *Store) SelfWake(ctx context.Context, name string, at time.Time) error {
	at = at.UTC().Truncate(time.Millisecond) // as it is stored
	return s.SetSelf(ctx, name, func(l *spec.Metadata) error {
		switch {
		case l.Wake != spec.Timer{} && (l.Wake.Every != 0 || !l.Wake.At.Equal(l.Asked.Wake)):
			return fmt.Errorf("%w: at %s", ErrOwnersTimer, l.Wake.At.Format(time.RFC3339))
		case at.IsZero():
			l.Wake, l.Asked.Wake = spec.Timer{}, time.Time{}
			return nil
		case l.Class == lifetime.Ephemeral:
			return fmt.Errorf("%w: an ephemeral sandbox does not sleep, so nothing wakes it", spec.ErrMetadata)
		case !at.After(time.Now()):
			return fmt.Errorf("%w: it asks to be woken at %s, which is over by the host's clock", spec.ErrMetadata, at.Format(time.RFC3339))
		}
		l.Wake, l.Asked.Wake = spec.Timer{At: at}, at
		return nil
	})
}

// SelfExtend lets a sandbox last for at least some seconds from now, for its guest: in all at most may.Extension()
// longer than its owner has set. It does not change one that lasts longer, or without end. It returns when the
// sandbox expires.
func (s *Store) SelfExtend(ctx context.Context, name string, may spec.Self, seconds int) (expires time.Time, err error) {
	if seconds > lifetime.MaxSeconds {
		return time.Time{}, fmt.Errorf("%w: by %d s: use at most %d", ErrExtension, seconds, lifetime.MaxSeconds)
	}
	err = s.SetSelf(ctx, name, func(l *spec.Metadata) error {
		now := time.Now()
		until := now.Add(time.Duration(seconds) * time.Second).UTC().Truncate(time.Second)
		expires = l.Expires
		if l.Expires.IsZero() || !until.After(l.Expires) {
			return ErrNothingToTell
		}
		if lifetime.Expired(l.Expires, now) {
			return fmt.Errorf("%w: at %s: only its owner can extend it", spec.ErrExpired, l.Expires.Format(time.RFC3339))
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
