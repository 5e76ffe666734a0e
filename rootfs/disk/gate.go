package disk

import (
	"context"
	"errors"
	"math"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
)

// everybody is the weight of whoever is alone in a gate.
const everybody = math.MaxInt64

// gate lets any number of writers in together, or one goroutine alone. It differs from sync.RWMutex
// in that waiting to be alone can be cancelled, that being alone can turn into being one of many, and
// that leaving too often is an error rather than a panic.
type gate struct {
	places *semaphore.Weighted // whoever waits to be alone keeps those out who come later
	inside atomic.Int64
	closed atomic.Bool
}

var errNotInside = errors.New("Wrote without a WriteExtent before it")

func newGate() gate { return gate{places: semaphore.NewWeighted(everybody)} }

// take waits for places, of which a closed gate has none.
func (g *gate) take(ctx context.Context, places int64) error {
	if err := g.places.Acquire(ctx, places); err != nil {
		return err
	}
	if g.closed.Load() {
		g.places.Release(places)
		return ErrClosed
	}
	return nil
}

func (g *gate) enter() error {
	err := g.take(context.Background(), 1) // cannot be cancelled: whoever is alone is short
	if err == nil {
		g.inside.Add(1)
	}
	return err
}

func (g *gate) leave() error {
	for n := g.inside.Load(); n > 0; n = g.inside.Load() {
		if g.inside.CompareAndSwap(n, n-1) {
			g.places.Release(1)
			return nil
		}
	}
	return errNotInside
}

// enterAlone waits until nobody is inside, and keeps others out meanwhile.
func (g *gate) enterAlone(ctx context.Context) error { return g.take(ctx, everybody) }

// leaveAlone lets others in again; stay makes the caller one of many in the same step.
func (g *gate) leaveAlone(stay bool) {
	if stay {
		g.inside.Add(1)
		g.places.Release(everybody - 1)
		return
	}
	g.places.Release(everybody)
}

// close makes every later enter fail. Precondition: the caller is alone.
func (g *gate) close() {
	g.closed.Store(true)
	g.places.Release(everybody)
}
