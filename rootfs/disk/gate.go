package disk

import (
	"context"
	"errors"
	"sync"
)

// gate lets any number of writers in together, or one goroutine alone. It differs from sync.RWMutex
// in that waiting to be alone can be cancelled, that being alone can turn into being one of many, and
// that leaving too often is an error rather than a panic.
type gate struct {
	mu     sync.Mutex
	inside int
	alone  bool // someone is alone, or waits to be
	closed bool
	wake   chan struct{} // closed at the next change; nil if nobody waits
}

var errNotInside = errors.New("Wrote without a WriteExtent before it")

// wait blocks until something changes. Precondition: g.mu is held; it is held again on return.
func (g *gate) wait(ctx context.Context) error {
	if g.wake == nil {
		g.wake = make(chan struct{})
	}
	ch := g.wake
	g.mu.Unlock()
	defer g.mu.Lock()
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *gate) changed() {
	if g.wake != nil {
		close(g.wake)
		g.wake = nil
	}
}

func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.alone && !g.closed {
		_ = g.wait(context.Background()) // cannot be cancelled: whoever is alone is short
	}
	if g.closed {
		return ErrClosed
	}
	g.inside++
	return nil
}

func (g *gate) leave() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside == 0 {
		return errNotInside
	}
	g.inside--
	if g.inside == 0 {
		g.changed()
	}
	return nil
}

// enterAlone waits until nobody is inside, and keeps others out meanwhile.
func (g *gate) enterAlone(ctx context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.alone && !g.closed {
		if err := g.wait(ctx); err != nil {
			return err
		}
	}
	if g.closed {
		return ErrClosed
	}
	g.alone = true
	for g.inside > 0 {
		if err := g.wait(ctx); err != nil {
			g.alone = false
			g.changed()
			return err
		}
	}
	return nil
}

// leaveAlone lets others in again; stay makes the caller one of many in the same step.
func (g *gate) leaveAlone(stay bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.alone = false
	if stay {
		g.inside++
	}
	g.changed()
}

// close makes every later enter fail. Precondition: the caller is alone.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed, g.alone = true, false
	g.changed()
}
