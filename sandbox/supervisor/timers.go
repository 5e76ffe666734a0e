package supervisor

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

const (
	// timerEvery is how often the supervisor looks for timers that are due.
	timerEvery = 250 * time.Millisecond
	// maxTimers is how many sandboxes timers wake at once; others wait.
	maxTimers = 8
	// timerTries is how often a failing wake is tried, and timerPause the first pause between two tries. Each
	// further pause is twice as long.
	timerTries = 6
	timerPause = time.Second
	// forkTime bounds a fork that a guest asked for.
	forkTime = 2 * time.Minute
)

// timerVMs are the VMs that timers work on: a sandbox.Store with its Launcher.
type timerVMs interface {
	FileStamps() (map[string]string, error)
	Metadata(name string) (spec.Metadata, error)
	TimerFired(ctx context.Context, name string, fired spec.Timer, problem error) error
	wake(ctx context.Context, name string) error
	// forkAsked makes the fork that a guest asked for.
	forkAsked(ctx context.Context, name string) error
}

type launchedVMs struct {
	*state.Store
	host   *sandbox.Host
	stamps *noticed[map[string]string]
}

// FileStamps returns those of the store. It reads them when something has changed.
func (v launchedVMs) FileStamps() (map[string]string, error) { return v.stamps.get() }

func (v launchedVMs) wake(ctx context.Context, name string) error {
	if c := v.host.Cluster; c != nil {
		if err := c.Claim(ctx, name, nil); err != nil {
			return err
		}
		if m, err := v.Metadata(name); err == nil && !m.Wake.Due(time.Now()) {
			return nil // another host has woken it
		}
	}
	_, err := v.host.Sandbox(name).BringUp(ctx)
	return err
}

func (v launchedVMs) forkAsked(ctx context.Context, name string) error {
	return v.host.Sandbox(name).ForkAsked(ctx)
}

// timers wakes sandboxes at the times in their metadata, and makes the forks that guests asked for, which are in
// the metadata as well.
type timers struct {
	vms  timerVMs
	log  func(msg string, args ...any)
	seen map[string]timerMetadata

	running sync.WaitGroup
	mu      sync.Mutex // guards busy
	busy    map[string]bool
}

type timerMetadata struct {
	stamp string
	timer spec.Timer
	fork  spec.AskedFork
}

func newTimers(vms timerVMs, log func(string, ...any)) *timers {
	return &timers{vms: vms, log: log, seen: map[string]timerMetadata{}, busy: map[string]bool{}}
}

// run looks again and again until ctx ends, and returns when all that it began has ended.
func (t *timers) run(ctx context.Context) {
	defer t.running.Wait()
	tick := time.NewTicker(timerEvery)
	defer tick.Stop()
	failed := ""
	for {
		if err := t.look(ctx, time.Now()); err != nil && err.Error() != failed {
			failed = err.Error()
			t.log("looking for timers that are due", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look fires what is due.
func (t *timers) look(ctx context.Context, now time.Time) error {
	stamps, err := t.vms.FileStamps()
	if err != nil {
		return err
	}
	for name := range t.seen {
		if _, there := stamps[name]; !there {
			delete(t.seen, name)
		}
	}
	for name, stamp := range stamps {
		known, ok := t.seen[name]
		if !ok || stamp == "" || known.stamp != stamp {
			l, err := t.vms.Metadata(name)
			if err != nil {
				delete(t.seen, name) // being made or removed, or unreadable
				continue
			}
			known = timerMetadata{stamp, l.Wake, l.Asked.Fork}
			t.seen[name] = known
		}
		if known.fork.Wanted(now) && t.take(name) {
			t.running.Go(func() {
				defer t.leave(name)
				t.fork(ctx, name)
			})
		}
		if known.timer.Due(now) && t.take(name) {
			t.running.Go(func() {
				defer t.leave(name)
				t.fire(ctx, name, known.timer)
			})
		}
	}
	return nil
}

// take reports whether work for a sandbox may begin now, and marks the sandbox as busy.
func (t *timers) take(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.busy[name] || len(t.busy) >= maxTimers {
		return false
	}
	t.busy[name] = true
	return true
}

func (t *timers) leave(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.busy, name)
}

// fork makes the fork that a guest asked for. The guest gets the error, if any.
func (t *timers) fork(ctx context.Context, name string) {
	ctx, cancel := context.WithTimeout(ctx, forkTime)
	defer cancel()
	if err := t.vms.forkAsked(ctx, name); err != nil {
		t.log("a guest has asked for a fork that was not made", "sandbox", name, "error", err)
	}
}

// fire wakes a sandbox, and then records that the timer has fired. A supervisor that is killed in between wakes it
// once more, which does nothing if it runs.
func (t *timers) fire(ctx context.Context, name string, timer spec.Timer) {
	if l, err := t.vms.Metadata(name); err != nil || !l.Wake.At.Equal(timer.At) || l.Wake.Every != timer.Every {
		return // changed since it was read, or it has fired
	}
	ctx = events.WithCause(ctx, events.Timer)
	var err error
	pause := timerPause
	for try := 1; ; try++ {
		limited, cancel := context.WithTimeout(ctx, wakeTime)
		err = t.vms.wake(limited, name)
		cancel()
		if err == nil || ctx.Err() != nil || try == timerTries || final(err) {
			break
		}
		t.log("a timer does not wake a sandbox", "sandbox", name, "attempt", try, "error", err)
		if wait.For(ctx, pause) != nil {
			return
		}
		pause *= 2
	}
	if ctx.Err() != nil {
		return // the next supervisor fires it
	}
	if err := t.vms.TimerFired(ctx, name, timer, err); err != nil {
		t.log("setting a timer to its next time", "sandbox", name, "error", err)
		select { // a pause before the next try
		case <-ctx.Done():
		case <-time.After(timerPause):
		}
	}
}

// final reports whether another try to wake is pointless.
func final(err error) bool {
	for _, e := range []error{spec.ErrExpired, spec.ErrElsewhere, sandbox.ErrNotRunning, sandbox.ErrNotFound} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
