package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// How long a guest's fork may take. Variables, so that tests need not wait as long.
var (
	// selfForkBegin is until somebody has begun with it: a request that is older is of nobody who still waits.
	selfForkBegin = 10 * time.Second
	// selfForkTime is until it is done.
	selfForkTime = 2 * time.Minute
	// selfForkPoll is how often the VM's process looks for an answer.
	selfForkPoll = 50 * time.Millisecond
)

// ErrNoForker says that a guest has asked for a fork, and nobody is there who makes it.
var ErrNoForker = errors.New("nobody makes it: `drowse serve` makes the forks that guests ask for")

// AskedFork is a fork that a guest has asked for. A VM's own process starts no others, so it is written into the
// metadata, as timers are, and who serves the store makes it.
type AskedFork struct {
	// ID is the request's, and At when it was made.
	ID string    `json:"id"`
	At time.Time `json:"at"`
	// Begun says that somebody is at it, who then says which Child it has become, or why it has not.
	Begun bool   `json:"begun,omitempty"`
	Child string `json:"child,omitempty"`
	Error string `json:"error,omitempty"`
}

// Wanted says that nobody has begun with it, and that somebody waits for it.
func (a AskedFork) Wanted(now time.Time) bool {
	age := now.Sub(a.At)
	return a.ID != "" && !a.Begun && age < selfForkBegin && age > -selfForkBegin
}

// selfFork asks for a fork of a VM, for its guest, and waits until it is made. It returns the child's name.
func (s *Store) selfFork(ctx context.Context, name string) (child string, err error) {
	id := spec.NewID()
	if err := s.setSelf(ctx, name, func(l *Metadata) error {
		l.Asked.Fork = AskedFork{ID: id, At: time.Now().UTC()}
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
		case !a.Begun && time.Since(begin) > selfForkBegin:
			err := s.forgetFork(ctx, name, id, false)
			if errors.Is(err, errForkBegun) {
				continue
			}
			return "", errors.Join(ErrNoForker, err)
		case time.Since(begin) > selfForkTime:
			return "", errors.Join(fmt.Errorf("forking %s: it has taken longer than %v: whoever has begun with it may have been killed", name, selfForkTime), s.forgetFork(ctx, name, id, true))
		}
		select {
		case <-ctx.Done():
			// Or it would be made for a guest that does not wait for it.
			return "", errors.Join(ctx.Err(), s.forgetFork(context.WithoutCancel(ctx), name, id, true))
		case <-time.After(selfForkPoll):
		}
	}
}

var errForkBegun = errors.New("somebody has begun with it")

// forgetFork takes a request back; one that somebody has begun with only if that is said.
func (s *Store) forgetFork(ctx context.Context, name, id string, begun bool) error {
	return s.setSelf(ctx, name, func(l *Metadata) error {
		switch {
		case l.Asked.Fork.ID != id:
			return errNothingToTell
		case l.Asked.Fork.Begun && !begun:
			return errForkBegun
		}
		l.Asked.Fork = AskedFork{}
		return nil
	})
}

// ForkAsked makes the fork that a VM's guest has asked for, if there is one and somebody waits for it, and has the
// guest told. The child has a random name and its parent's metadata, and may not ask for forks itself. What was wrong
// with it is told to the guest, and returned.
func (s *Store) ForkAsked(ctx context.Context, l Launcher, name string) error {
	ctx = events.WithCause(ctx, events.Guest)
	id := ""
	if err := s.setSelf(ctx, name, func(l *Metadata) error {
		if !l.Asked.Fork.Wanted(time.Now()) {
			return errNothingToTell
		}
		l.Asked.Fork.Begun = true
		id = l.Asked.Fork.ID
		return nil
	}); err != nil || id == "" {
		return err
	}
	child, err := s.forkAsked(ctx, l, name)
	// The guest hears of it also when whoever serves is about to end.
	return errors.Join(err, s.setSelf(context.WithoutCancel(ctx), name, func(l *Metadata) error {
		if l.Asked.Fork.ID != id {
			return errNothingToTell
		}
		l.Asked.Fork.Child = child
		if err != nil {
			l.Asked.Fork.Error = whyNoFork(err)
		}
		return nil
	}))
}

// whyNoFork is what a guest is told of a fork that was not made: nothing about the host, which its owner finds where it
// is served.
func whyNoFork(err error) string {
	for _, told := range []error{ErrSelfLimit, ErrNotRunning, volume.ErrInUse} {
		if errors.Is(err, told) {
			return "the fork was not made: " + told.Error()
		}
	}
	return "the fork was not made: the VM's owner finds why in what `drowse serve` writes"
}

func (s *Store) forkAsked(ctx context.Context, l Launcher, name string) (child string, err error) {
	r, err := s.Get(name)
	if err != nil {
		return "", err
	}
	list, err := s.List()
	if err != nil {
		return "", err
	}
	n, may := 0, r.Spec.Self.Forks()
	for _, other := range list {
		if other.Fork != nil && other.Fork.Asked && other.Fork.ParentID == r.ID {
			n++
		}
	}
	if n >= may {
		return "", fmt.Errorf("%w: it has %d children that it has asked for, and may have %d at once", ErrSelfLimit, n, may)
	}
	res, err := s.Fork(ctx, l, name, ForkOptions{asked: true})
	if err != nil {
		return "", err
	}
	return res.Children[0].Name, nil
}
