package process

import (
	"context"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// idleLooks is how often it is looked whether somebody uses the VM, in the time after which it sleeps, and the bounds
// of the time between two. Processor time is counted over a time of which idleSpans make the whole: what is shorter is
// no use.
const (
	idleLooks   = 30
	idleSpans   = 10
	idleSoonest = 100 * time.Millisecond
	idleLatest  = 5 * time.Second
)

// uses is what is known of how a VM is used.
type uses struct {
	// open is how many connections there are, and made how many there ever were.
	open, made uint64
	// packet says that one has passed at some time, and quiet how long ago the last one has.
	packet bool
	quiet  time.Duration
	// cpu is processor time of its process.
	cpu time.Duration
	// busy says that something is being done with the VM as a whole.
	busy bool
}

// idleWatch finds out for how long nobody has used a VM.
type idleWatch struct {
	percent     int
	every, span time.Duration
	since       time.Time // nobody has used it
	looked      time.Time
	last        uses
	cpus        []cpuAt // the first is as old as a span, or as old as there are
	// busy says that it worked when it was last looked, and burst how much it has worked since it was last used, of at
	// most allowed; what is more is use until it works no more.
	busy           bool
	burst, allowed time.Duration
}

// cpuAt is how much processor time the VM's process had used at some time.
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

// next is when to look again, at the latest when it would sleep.
func (w *idleWatch) next(now time.Time, after time.Duration) time.Duration {
	if w.busy {
		return w.every
	}
	return min(w.every, max(after-now.Sub(w.since), time.Millisecond))
}

// computes says whether its processors have been at work, by what is known now: over the last span, and still since the
// last look.
func (w *idleWatch) computes(now time.Time, cpu time.Duration) bool {
	more := func(c cpuAt) bool { return (cpu-c.cpu)*100 > now.Sub(c.at)*time.Duration(w.percent) }
	busy := more(w.cpus[0]) && more(w.cpus[len(w.cpus)-1])
	w.cpus = append(w.cpus, cpuAt{now, cpu})
	for len(w.cpus) > 1 && now.Add(w.every).Sub(w.cpus[1].at) >= w.span {
		w.cpus = w.cpus[1:]
	}
	return busy
}

// look takes what is known now, and says for how long nobody has used the VM.
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
		// This process did not run, so it does not know.
		w.since = now
	case u.packet && now.Add(-u.quiet).After(w.since):
		w.since = now.Add(-u.quiet)
	}
	// What has been too long counts until it ends.
	if tooLong && !w.busy || !tooLong && w.since != since {
		w.burst = 0
	}
	w.looked, w.last = now, u
	return now.Sub(w.since)
}

// errUsed says that somebody uses a VM that was about to sleep.
var errUsed = errors.New("somebody has just begun to use it")

// sleepWhenIdle puts the VM to sleep when nobody has used it for as long as its Spec says.
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

// stillUnused fails if anybody has begun to use the VM since it was last looked, with the guest
// standing still: what comes from now on waits, and finds it asleep.
func (p *process) stillUnused(w *idleWatch, looked time.Time) error {
	u := p.uses()
	if u.open > 0 || u.made != w.last.made || u.packet && u.quiet <= time.Since(looked) {
		return errUsed
	}
	return nil
}

// uses says how the VM is used. The one who is about to change it as a whole does not count.
func (p *process) uses() uses {
	open, made := p.in.Connections()
	held, ever := p.holders.count()
	u := uses{open: open + held, made: made + ever}
	if p.op.TryLock() {
		p.op.Unlock()
	} else {
		u.busy = true
	}
	u.cpu = processCPU()
	if n := p.in.Network(); n != nil {
		u.packet, u.quiet = n.LastPacket()
	}
	return u
}
