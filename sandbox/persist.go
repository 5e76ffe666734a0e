package sandbox

import (
	"context"
	"fmt"
	"math"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Promote copies what the metadata of a running VM names to the host now: see guest.Client.Promote. The VM runs on, so
// the copies may or may not have what its programs write meanwhile. If it sleeps, Promote returns ErrNotRunning.
func (b *Sandbox) Promote(ctx context.Context) ([]spec.Promoted, error) {
	s, name := b.host, b.name
	l, err := s.State.Metadata(name)
	if err != nil {
		return nil, err
	}
	if len(l.Persist.Promote) == 0 {
		return nil, fmt.Errorf("%w: nothing of %s is to be promoted: say what: Fleet.Update of %q with Persist.Promote", spec.ErrMetadata, name, name)
	}
	r, err := s.State.Get(name)
	if err != nil {
		return nil, err
	}
	all, err := limits.Read(s.State.Dir())
	if err != nil {
		return nil, err
	}
	if all.DiskQuota(r.Spec, l.EffectiveClass()) > 0 {
		var copies []spec.Promoted
		err := control.Do(ctx, s.State, name, control.OrderPromote, struct{}{}, &copies)
		if err != nil {
			err = fmt.Errorf("promoting of %s: %w", name, err)
		}
		return copies, err
	}
	c, err := b.Agent(ctx)
	if err != nil {
		return nil, fmt.Errorf("promoting of %s: %w", name, err)
	}
	defer c.Close()
	copies, _, err := control.Promote(ctx, c, name, l.Persist, math.MaxInt64)
	if err != nil {
		return nil, fmt.Errorf("promoting of %s: %w", name, err)
	}
	for _, m := range copies {
		e := s.State.Event(ctx, r, events.Promoted)
		e.Details = control.PromotedDetails(m)
		s.State.Tell(e)
	}
	return copies, nil
}
