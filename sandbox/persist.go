package sandbox

import (
	"context"
	"fmt"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Promote copies what the metadata of a running VM names to the host now: guest.Client.Promote. The VM runs on, and
// what its programs write meanwhile is in the copies or not. One that sleeps is ErrNotRunning.
func (s *Store) Promote(ctx context.Context, name string) ([]control.Promoted, error) {
	l, err := s.Metadata(name)
	if err != nil {
		return nil, err
	}
	if len(l.Persist.Promote) == 0 {
		return nil, fmt.Errorf("%w: nothing of %s is to be promoted: say what with `drowse update %s --promote PATH=HOSTDIR`", state.ErrMetadata, name, name)
	}
	r, err := s.Get(name)
	if err != nil {
		return nil, err
	}
	c, err := s.Agent(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("promoting of %s: %w", name, err)
	}
	defer c.Close()
	copies, _, err := control.Promote(ctx, c, name, l.Persist)
	if err != nil {
		return nil, fmt.Errorf("promoting of %s: %w", name, err)
	}
	for _, m := range copies {
		e := s.Event(ctx, r, events.Promoted)
		e.Details = control.PromotedDetails(m)
		s.Tell(e)
	}
	return copies, nil
}
