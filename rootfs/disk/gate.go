package disk

import (
	"context"
	"errors"
	"math"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
)

// everybody is the weight of a goroutine that is alone in a gate.
const everybody = math.MaxInt64

// gate admits any number of writers together, or one goroutine alone. Unlike with sync.RWMutex, waiting to be
// alone can be cancelled, a goroutine that is alone can become one of many in one step, and leaving too often is
// an error rather than a panic.
type gate struct {
	places *semaphore.Weighted // a goroutine that waits to be alone blocks later ones
	inside atomic.Int64
	closed atomic.Bool
}

var errNotInside = errors.New("Wrote without a WriteExtent before it")

func newGate() gate { return gate{places: semaphore.NewWeighted(everybody)} }

// take waits for places. It fails if the gate is closed.
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
	err := g.take(context.Background(), 1) // needs no cancelling: being alone is short
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

// enterAlone waits until the gate is empty, and keeps others out until leaveAlone.
func (g *gate) enterAlone(ctx context.Context) error { return g.take(ctx, everybody) }

// leaveAlone admits others again. With stay, the caller becomes one of many in the same step.
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
