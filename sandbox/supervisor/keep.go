package supervisor

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
)

const (
	// DefaultPruneEvery is how often sandboxes are looked at whose time may be over.
	DefaultPruneEvery = time.Minute
	// gatherEvery is how often sleeps that are not kept any more are looked for, and what was run is taken over from
	// the trails of all sandboxes; checkEvery is how often all of the records is checked.
	gatherEvery = time.Hour
	checkEvery  = 24 * time.Hour
)

// keep does what metadata say is to be done by now, again and again until ctx ends. What it returns is closed when it
// has ended.
func (v *supervisor) keep(ctx context.Context) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		k := keeper{v: v}
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

// keeper is what is remembered from one look to the next.
type keeper struct {
	v                 *supervisor
	gathered, checked time.Time
}

// once does what is due. It opens the records for one look: nobody who has to put a damaged database aside waits for a
// supervisor's end.
func (k *keeper) once(ctx context.Context, now time.Time) (err error) {
	s, log := k.v.store, k.v.log
	all := now.Sub(k.gathered) >= gatherEvery
	if !all {
		// In nearly every minute there is nothing to do.
		due, err := fleet.New(fleet.OfStore(s, k.v.launcher), fleet.Options{}).Due()
		if err != nil || !due {
			return err
		}
	}
	check := now.Sub(k.checked) >= checkEvery
	db, err := records.Open(ctx, s.Dir(), records.Options{Check: check})
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		// What is to be done is in the files.
		log.Warn("the records of sandboxes cannot be used", "error", err)
	} else {
		defer func() { err = errors.Join(err, db.Close()) }()
		if check {
			k.checked = now
		}
		if m := db.Moved; m != nil {
			log.Warn("the records of sandboxes were damaged: they are made anew from the files, without the history of removed sandboxes",
				"put_aside", m.To, "cause", m.Cause)
		}
	}
	f := fleet.New(fleet.OfStore(s, k.v.launcher), fleet.Options{Records: db})
	p, err := f.Keep(ctx)
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
	k.gathered = now
	if err := s.Events().Trim(); err != nil {
		log.Warn("old events stay", "error", err)
	}
	if db == nil {
		return nil
	}
	return f.Gather(ctx)
}
