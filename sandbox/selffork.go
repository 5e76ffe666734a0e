package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// ForkAsked makes the fork that a VM's guest has requested, if the request is still wanted, and tells the guest
// the outcome. The child has a random name and its parent's metadata, and may not request forks itself. ForkAsked
// also tells the guest of a failure, and returns it.
func (b *Sandbox) ForkAsked(ctx context.Context) error {
	s, name := b.host, b.name
	ctx = events.WithCause(ctx, events.Guest)
	id := ""
	if err := s.State.SetSelf(ctx, name, func(l *spec.Metadata) error {
		if !l.Asked.Fork.Wanted(time.Now()) {
			return state.ErrNothingToTell
		}
		l.Asked.Fork.Begun = true
		id = l.Asked.Fork.ID
		return nil
	}); err != nil || id == "" {
		return err
	}
	child, err := s.forkAsked(ctx, name)
	// The guest gets the answer even if the server is about to end.
	return errors.Join(err, s.State.SetSelf(context.WithoutCancel(ctx), name, func(l *spec.Metadata) error {
		if l.Asked.Fork.ID != id {
			return state.ErrNothingToTell
		}
		l.Asked.Fork.Child = child
		if err != nil {
			l.Asked.Fork.Error = whyNoFork(err)
		}
		return nil
	}))
}

// whyNoFork returns what a guest is told about a fork that failed: nothing about the host. The owner finds that in
// the server's output.
func whyNoFork(err error) string {
	for _, told := range []error{control.ErrSelfLimit, ErrNotRunning, volume.ErrInUse} {
		if errors.Is(err, told) {
			return "the fork was not made: " + told.Error()
		}
	}
	return "the fork was not made: the VM's owner finds why in what `drowse serve` writes"
}

func (s *Host) forkAsked(ctx context.Context, name string) (child string, err error) {
	r, err := s.State.Get(name)
	if err != nil {
		return "", err
	}
	list, err := s.State.List()
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
		return "", fmt.Errorf("%w: it has %d children that it has asked for, and may have %d at once", control.ErrSelfLimit, n, may)
	}
	res, err := s.Sandbox(name).Fork(ctx, ForkOptions{asked: true})
	if err != nil {
		return "", err
	}
	return res.Children[0].Name, nil
}
