package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/archive"
	"github.com/drowse-vm/drowse/sandbox/arrival"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// A sandbox is woken while its memory and disk are still on their way: its process asks for what its guest touches, and
// the rest comes in the background. Until all is there, the snapshot is not in the store: see state.Store.ArrivingDir.
// What a node leaves unfinished the next one goes on with, if a claim still names it.

const (
	// arrivingRetry is how long after a failure the node tries again to go on with an arrival.
	arrivingRetry = time.Second
	// arrivingTime is how long a node that ends goes on with what VMs wait for.
	arrivingTime = 10 * time.Second
)

// arrivals are the snapshots that are on their way.
type arrivals struct {
	line *archive.Line
	mu   sync.Mutex // guards all
	all  map[string]*arriving
}

// arriving is one of them.
type arriving struct {
	id, head, name string
	cancel         context.CancelFunc
	opened         chan struct{} // closed when a is set, or over is closed
	a              *archive.Arrival
	over           chan struct{} // closed when err is set; nil is for a snapshot that is whole
	err            error
}

func (a *arrivals) get(id string) *arriving {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.all[id]
}

// arrive gets a head's snapshot without memory and large layers, which follow in the background.
func (n *Node) arrive(ctx context.Context, name, head, id string, h *archive.Head) error {
	if was := n.arrivals.get(id); was != nil {
		if was.head == head && was.lives() {
			return nil
		}
		if err := n.dropArrival(id); err != nil {
			return err
		}
	} else if n.state.IsArriving(id) { // it could not be removed before
		if err := n.state.DropArriving(id); err != nil {
			return err
		}
	}
	a, err := h.PullLater(ctx, n.state, n.arrivals.line)
	if err != nil {
		return err
	}
	if a.ID != id {
		err := fmt.Errorf("%w: head %.12s has the snapshot %.64q, and says that it has %s", archive.ErrCorrupt, head, a.ID, id)
		return errors.Join(err, a.Close(), n.state.DropArriving(a.ID))
	}
	n.begins(&arriving{id: id, head: head, name: name, a: a})
	return nil
}

// begins goes on with an arrival in the background.
func (n *Node) begins(e *arriving) {
	ctx, cancel := context.WithCancel(n.life)
	e.cancel, e.opened, e.over = cancel, make(chan struct{}), make(chan struct{})
	n.arrivals.mu.Lock()
	n.arrivals.all[e.id] = e
	n.arrivals.mu.Unlock()
	n.background.Go(func() {
		defer cancel()
		begun := time.Now()
		e.err = n.finish(ctx, e)
		switch {
		case e.err == nil:
			n.near.drop(e.head)
			n.log.Info("its memory and disk have arrived", "sandbox", e.name, "snapshot", e.id, "ms", time.Since(begun).Milliseconds())
			n.arrivals.mu.Lock()
			delete(n.arrivals.all, e.id)
			n.arrivals.mu.Unlock()
		case errors.Is(e.err, arrival.ErrLost):
			n.log.Error("its memory and disk do not arrive", "sandbox", e.name, "snapshot", e.id, "error", e.err)
			e.err = errors.Join(e.err, n.state.DropArriving(e.id))
		}
		close(e.over)
	})
}

// lives reports whether an arrival goes on.
func (e *arriving) lives() bool {
	select {
	case <-e.over:
		return false
	default:
		return true
	}
}

// finish opens an arrival, if that is not done, reads the rest, and makes the snapshot whole.
func (n *Node) finish(ctx context.Context, e *arriving) (err error) {
	for try := 1; e.a == nil; try++ {
		h, err := n.archive.Head(ctx, e.head)
		if err == nil {
			e.a, err = h.Resume(ctx, n.state, n.arrivals.line, e.id)
		}
		if err == nil {
			break
		}
		if archive.Lost(err) && try >= archive.LostTries {
			return fmt.Errorf("%w: %w", arrival.ErrLost, err)
		}
		n.log.Warn("going on to get memory and disk from the cluster", "sandbox", e.name, "error", err)
		if wait.For(ctx, arrivingRetry) != nil {
			return context.Cause(ctx)
		}
	}
	close(e.opened)
	defer func() { err = errors.Join(err, e.a.Close()) }()
	var soon sync.WaitGroup
	defer soon.Wait()
	n.ahead(ctx, e, &soon)
	if err := e.a.Run(ctx); err != nil {
		if ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", arrival.ErrLost, err)
		}
		return err
	}
	for {
		err := n.state.Arrived(ctx, e.id)
		switch {
		case err == nil:
			n.keepArrived(ctx, e)
			return nil
		case errors.Is(err, state.ErrStoreBusy) && wait.For(ctx, arrivingRetry) == nil:
		case n.state.IsThere(e.id): // whole, and perhaps not durable: after a power cut it is had again
			n.log.Warn("making a snapshot durable", "sandbox", e.name, "snapshot", e.id, "error", err)
			return nil
		case ctx.Err() != nil:
			return err
		default:
			// What could not be written does not become durable by another try.
			return fmt.Errorf("%w: %w", arrival.ErrLost, err)
		}
	}
}

// ahead gets what the guest needs to be ready, before it faults. What it needs next comes in the background.
func (n *Node) ahead(ctx context.Context, e *arriving, background *sync.WaitGroup) {
	begun := time.Now()
	failed := func(err error) {
		if ctx.Err() == nil {
			n.log.Warn("getting the memory that a guest needs first", "sandbox", e.name, "error", err)
		}
	}
	snap, err := e.a.Open(ctx)
	if err != nil {
		failed(err)
		return
	}
	hot, soon, err := state.HotPages(snap)
	if err == nil {
		err = e.a.Load(ctx, snap.Memory(), hot, true)
	}
	if err != nil {
		failed(errors.Join(err, snap.Close()))
		return
	}
	n.log.Info("the memory that it needs first has arrived", "sandbox", e.name, "pages", len(hot), "missing", e.a.Missing(), "ms", time.Since(begun).Milliseconds())
	background.Go(func() {
		if err := errors.Join(e.a.Load(ctx, snap.Memory(), soon, false), snap.Close()); err != nil {
			failed(err)
		}
	})
}

// answer answers the process of a VM.
func (n *Node) answer(ctx context.Context, r arrival.Request) error {
	e := n.arrivals.get(r.Snapshot)
	if e == nil {
		if state.IDPattern.MatchString(r.Snapshot) && n.state.IsThere(r.Snapshot) {
			return nil
		}
		return fmt.Errorf("%w: snapshot %.32s is not on its way to this host", arrival.ErrLost, r.Snapshot)
	}
	wait := e.over
	if r.File != "" {
		wait = e.opened
	}
	select {
	case <-wait:
	case <-e.over:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if !e.lives() {
		return e.err
	}
	err := e.a.Ensure(ctx, r.File, r.Off, r.Len)
	if archive.Lost(err) {
		err = fmt.Errorf("%w: %w", arrival.ErrLost, err)
	}
	return err
}

// isHere reports whether a snapshot is here or on its way.
func (n *Node) isHere(id string) bool {
	if e := n.arrivals.get(id); e != nil {
		return e.lives() || e.err == nil
	}
	return n.state.IsThere(id)
}

// awaitWhole waits for a snapshot that is on its way.
func (n *Node) awaitWhole(ctx context.Context, id string) error {
	e := n.arrivals.get(id)
	if e == nil {
		return nil
	}
	select {
	case <-e.over:
		return e.err
	case <-ctx.Done():
		return fmt.Errorf("waiting for memory and disk from the cluster: %w", context.Cause(ctx))
	}
}

// dropArrival gives up an arrival that nobody needs.
func (n *Node) dropArrival(id string) error {
	e := n.arrivals.get(id)
	if e == nil {
		return nil
	}
	e.cancel()
	<-e.over
	n.arrivals.mu.Lock()
	delete(n.arrivals.all, id)
	n.arrivals.mu.Unlock()
	return n.state.DropArriving(id)
}

// goOn goes on with the arrivals of this host's last node. What no claim names was not needed yet.
func (n *Node) goOn() error {
	if err := n.state.CleanArriving(); err != nil {
		return err
	}
	ids, err := n.state.Arriving()
	if err != nil || len(ids) == 0 {
		return err
	}
	names, err := n.dir.Names()
	if err != nil {
		return err
	}
	claims := map[string]*arriving{}
	for _, name := range names {
		c, err := n.dir.Claim(name)
		if err != nil {
			return err // it may name one
		}
		if c != nil && c.Head != "" {
			claims[c.Snapshot] = &arriving{id: c.Snapshot, head: c.Head, name: name}
		}
	}
	for _, id := range ids {
		if e := claims[id]; e != nil {
			n.begins(e)
		} else if err := n.state.DropArriving(id); err != nil {
			return err
		}
	}
	return nil
}

// settleArrivals gives arrivals some time to end.
func (n *Node) settleArrivals(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, min(arrivingTime, n.o.TTL/3))
	defer cancel()
	n.arrivals.mu.Lock()
	all := make([]*arriving, 0, len(n.arrivals.all))
	for _, e := range n.arrivals.all {
		all = append(all, e)
	}
	n.arrivals.mu.Unlock()
	for _, e := range all {
		select {
		case <-e.over:
		case <-ctx.Done():
			n.log.Warn("memory or disk of a sandbox is on its way: it waits for the next node of this host", "sandbox", e.name)
		}
	}
}
