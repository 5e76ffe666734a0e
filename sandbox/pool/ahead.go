package pool

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// ahead are processes for VMs that are about to start. It is nil in a Launcher that has none.
type ahead struct {
	// made gets each process, and is closed after the last.
	made chan *standby
	// wanted counts down to the VMs for which there is none. The others wait for theirs: the rest of its start takes
	// less time than that of another one.
	wanted atomic.Int64
}

// Ahead gets processes for n VMs of a shape that will be started soon, while their starter does something else first:
// those that a pool of l has, and new ones, at most one for each processor that the starter leaves. The Launcher that
// it returns gives them to the next VMs. done ends those that are left, and returns when they have ended.
func Ahead(ctx context.Context, s *state.Store, l Launcher, shape spec.Shape, n int) (with Launcher, done func()) {
	if n = min(n, runtime.NumCPU()-1); n < 1 || l.Processes != nil || len(l.Command) == 0 {
		return l, func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	a := &ahead{made: make(chan *standby, n)}
	a.wanted.Store(int64(n))
	from, started := standbys(s, l)
	var making sync.WaitGroup
	for range n {
		ready := from(shape)
		making.Go(func() {
			if ready == nil {
				var err error
				// Without one, the VM's own start has the same error, or none.
				if ready, err = makeStandby(ctx, s, l, shape, func(*standby) {}); err != nil {
					return
				}
				ready.own = true
			}
			a.made <- ready
		})
	}
	var left sync.WaitGroup
	left.Go(func() {
		making.Wait()
		close(a.made)
	})
	with = l
	with.ahead = a
	return with, func() {
		cancel()
		left.Wait()
		started()
		for ready := range a.made {
			left.Go(ready.end)
		}
		left.Wait()
	}
}

// standbys returns the processes as function standbys does, and after them those of l itself.
func (a *ahead) standbys(s *state.Store, l Launcher) (from func(spec.Shape) *standby, done func()) {
	l.ahead = nil
	var others func(spec.Shape) *standby
	started := func() {}
	from = func(shape spec.Shape) *standby {
		if a.wanted.Add(-1) >= 0 {
			if ready, ok := <-a.made; ok {
				return ready
			}
		}
		if others == nil {
			others, started = standbys(s, l)
		}
		return others(shape)
	}
	return from, func() { started() }
}
