package process

import (
	"context"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// idleLooks is how often the process looks for use in the time after which the VM sleeps. idleSoonest and idleLatest
// bound the interval. Processor time is counted over 1/idleSpans of that time: a shorter burst is not use.
const (
	idleLooks   = 30
	idleSpans   = 10
	idleSoonest = 100 * time.Millisecond
	idleLatest  = 5 * time.Second
)

// uses is a reading of how a VM is used.
type uses struct {
	// open is the number of connections now, made the number that there ever were.
	open, made uint64
	// packet reports that a packet has ever passed; quiet is how long ago the last one did.
	packet bool
	quiet  time.Duration
	// cpu is the processor time of the VM's process.
	cpu time.Duration
	// busy reports that an operation on the whole VM is running.
	busy bool
}

// idleWatch measures for how long a VM has been unused.
type idleWatch struct {
	percent     int
	every, span time.Duration
	since       time.Time // unused from then on
	looked      time.Time
	last        uses
	cpus        []cpuAt // the first is a span old, or the oldest there is
	// busy reports that the processors worked at the last look. burst is their work since the last use. Work
	// beyond allowed counts as use until it ends.
	busy           bool
	burst, allowed time.Duration
}

// cpuAt is the processor time that the VM's process had used at one moment.
type cpuAt struct {
	at  time.Time
	cpu time.Duration
}

func newIdleWatch(s spec.Idle, now time.Time, u uses) *idleWatch {
	w := &idleWatch{percent: s.CPUPercent, since: now, looked: now, last: u}
	if w.percent == 0 {
		w.percent = spec.DefaultIdleCPUPercent
	}
	w.every = min(max(s.After()/idleLooks, idleSoonest), idleLatest)
	w.span = min(max(s.After()/idleSpans, idleSoonest), idleLatest)
	w.cpus = []cpuAt{{now, u.cpu}}
	w.allowed = min(s.After()*time.Duration(w.percent)/100, spec.MaxIdleBurst)
	return w
}

// next returns when to look again, at the latest when the VM would sleep.
func (w *idleWatch) next(now time.Time, after time.Duration) time.Duration {
	if w.busy {
		return w.every
	}
	return min(w.every, max(after-now.Sub(w.since), time.Millisecond))
}

// computes reports whether the VM's processors have been at work, given the reading now: over the last span, and
// still since the last look.
func (w *idleWatch) computes(now time.Time, cpu time.Duration) bool {
	more := func(c cpuAt) bool { return (cpu-c.cpu)*100 > now.Sub(c.at)*time.Duration(w.percent) }
	busy := more(w.cpus[0]) && more(w.cpus[len(w.cpus)-1])
	w.cpus = append(w.cpus, cpuAt{now, cpu})
	for len(w.cpus) > 1 && now.Add(w.every).Sub(w.cpus[1].at) >= w.span {
		w.cpus = w.cpus[1:]
	}
	return busy
}

// look takes a new reading and returns for how long the VM has been unused.
func (w *idleWatch) look(now time.Time, u uses) time.Duration {
	w.busy = w.computes(now, u.cpu)
	if w.busy {
		w.burst += u.cpu - w.last.cpu
	}
	since, tooLong := w.since, w.burst > w.allowed
	switch {
	case w.busy && tooLong, u.busy, u.open > 0, u.made != w.last.made, w.last.open > 0:
		w.since = now
	case now.Sub(w.looked) > 3*w.every:
		// This process did not run in between, so it cannot know.
		w.since = now
	case u.packet && now.Add(-u.quiet).After(w.since):
		w.since = now.Add(-u.quiet)
	}
	// Work beyond allowed counts until it ends.
	if tooLong && !w.busy || !tooLong && w.since != since {
		w.burst = 0
	}
	w.looked, w.last = now, u
	return now.Sub(w.since)
}

// errUsed means that a VM that was about to sleep is in use.
var errUsed = errors.New("somebody has just begun to use it")

// sleepWhenIdle puts the VM to sleep when it has been unused for as long as its Spec says.
func (p *process) sleepWhenIdle(ctx context.Context) {
	want := p.r.Spec.Idle
	w := newIdleWatch(want, time.Now(), p.uses())
	tick := time.NewTimer(w.every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.in.Machine().Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		if w.look(now, p.uses()) < want.After() || w.busy {
			tick.Reset(w.next(now, want.After()))
			continue
		}
		res, err := p.sleep(events.WithCause(ctx, events.Idle), "", func() error { return p.stillUnused(w, now) })
		switch {
		case err == nil:
			p.log.Info("gone to sleep, since nobody has used it", "for", want.After(), "snapshot", res.Snapshot, "bytes", res.BytesStored)
			p.end()
			return
		case errors.Is(err, spec.ErrNotRunning):
			return
		case errors.Is(err, errUsed):
		default:
			p.log.Warn("it was to sleep, since nobody uses it, and is awake", "error", err, "again_after", want.After())
		}
		w = newIdleWatch(want, time.Now(), p.uses())
		tick.Reset(w.every)
	}
}

// stillUnused returns errUsed if the VM has been used since the last look. The guest stands still: later use
// waits, and finds the VM asleep.
func (p *process) stillUnused(w *idleWatch, looked time.Time) error {
	u := p.uses()
	if u.open > 0 || u.made != w.last.made || u.packet && u.quiet <= time.Since(looked) {
		return errUsed
	}
	return nil
}

// uses returns how the VM is used. busy is also set if the caller itself holds p.op, so stillUnused ignores it.
func (p *process) uses() uses {
	open, made := p.in.Connections()
	held, ever := p.holders.count()
	u := uses{open: open + held, made: made + ever}
	if p.op.TryLock() {
		p.op.Unlock()
	} else {
		u.busy = true
	}
	u.cpu = p.usedCPU()
	if n := p.net; n != nil {
		u.packet, u.quiet = n.LastPacket()
	}
	return u
}
