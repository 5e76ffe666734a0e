package supervisor

import (
	"cmp"
	"context"
	"time"

	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/template"
)

const (
	// DefaultPruneEvery is how often the supervisor looks for sandboxes that may have expired.
	DefaultPruneEvery = time.Minute
	// sweepEvery is how often it looks for sleeps that are no longer kept, and for histories that are too old.
	sweepEvery = time.Hour
)

// keep does what metadata make due, again and again until ctx ends. It returns a channel that is closed when it
// has ended.
func (v *supervisor) keep(ctx context.Context) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		k := keeper{v: v, fleet: fleet.New(v.host, fleet.Options{})}
		tick := time.NewTicker(cmp.Or(v.o.PruneEvery, DefaultPruneEvery))
		defer tick.Stop()
		for {
			if err := k.once(ctx, time.Now()); err != nil && ctx.Err() == nil {
				v.log.Warn("looking for sandboxes whose time is over", "error", err)
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return done
}

// keeper is the state between two looks.
type keeper struct {
	v     *supervisor
	fleet *fleet.Fleet
	swept time.Time
}

// once does what is due.
func (k *keeper) once(ctx context.Context, now time.Time) error {
	log := k.v.log
	all := now.Sub(k.swept) >= sweepEvery
	if !all {
		// In nearly every minute nothing is due.
		due, err := k.fleet.Due()
		if err != nil || !due {
			return err
		}
	}
	p, err := k.fleet.Keep(ctx)
	for _, step := range p.Sleep {
		log.Info("put to sleep", "sandbox", step.Name, "why", step.Why)
	}
	for _, step := range p.Remove {
		log.Info("removed", "sandbox", step.Name, "why", step.Why)
	}
	if p.Freed.Snapshots+p.Layers > 0 {
		log.Info("pruned", "snapshots", p.Freed.Snapshots, "layers", p.Layers, "bytes", p.Bytes)
	}
	for _, problem := range p.Problems {
		log.Warn("not all could be pruned", "cause", problem)
	}
	if err != nil || !all {
		return err
	}
	k.swept = now
	if err := k.v.host.State.Events().Trim(); err != nil {
		log.Warn("old events stay", "error", err)
	}
	return nil
}

// What sandboxes ask for is looked for every templateDelay: whoever has just made one uses it now.
// Those that are used no more are removed every templatePrune.
const (
	templateDelay = 2 * time.Second
	templatePrune = time.Hour
)

// makeTemplates makes the templates that sandboxes ask for, until ctx ends. The channel is closed when it has ended.
func (v *supervisor) makeTemplates(ctx context.Context) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(templateDelay)
		defer tick.Stop()
		all := v.host.State.Templates()
		var changed, looked, pruned time.Time
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-tick.C:
				if now.Sub(pruned) >= templatePrune {
					pruned = now
					if _, err := v.host.PruneTemplates(ctx); err != nil && ctx.Err() == nil {
						v.log.Warn("looking for templates that are used no more", "error", err)
					}
				}
				// Nothing is read while nothing has changed, except to try again.
				is := all.Changed()
				if is.Equal(changed) && now.Sub(looked) < template.RetryAfter {
					continue
				}
				if changed, looked = is, now; !all.AnyDue(now) {
					continue
				}
			}
			made, err := v.host.MakeTemplates(ctx)
			for _, e := range made {
				v.log.Info("made a template", "template", e.Key[:12], "image", e.Spec.Image)
			}
			if err != nil && ctx.Err() == nil {
				v.log.Warn("making a template", "error", err)
			}
		}
	}()
	return done
}
