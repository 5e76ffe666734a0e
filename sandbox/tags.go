package sandbox

import (
	"context"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// SetTags adds tags to a VM and removes others, permanently: it stores them before it enforces them. A tag to add
// that is present, or to remove that is not, is not an error. When SetTags returns, no packet of another VM on the
// host is judged by the old tags, and flows with this VM that other VMs' rules do not open for the new tags are
// cut. If it fails, the old tags hold. Children of a fork get the tags of the moment of the fork, clones those of
// the moment of the snapshot. ErrSpec or netpolicy.ErrPolicy mean that the VM cannot have these tags.
func (b *Sandbox) SetTags(ctx context.Context, add, remove []string) (res control.TagsResult, err error) {
	s, name := b.host, b.name
	c := spec.TagChange{Add: add, Remove: remove}
	if err := c.Validate(); err != nil {
		return res, err
	}
	r, err := b.change(ctx, "changing the tags of", func() error {
		return control.Do(ctx, s.State, name, "tags", c, &res)
	}, func(r *state.Record) error {
		if r.Spec.Network != spec.NetworkTAP {
			return control.NoNetworkTags(name)
		}
		if err := r.Spec.UseTags(c); err != nil {
			return err
		}
		res = control.TagsOf(r, false)
		return nil
	})
	if err == nil {
		s.State.Tell(s.State.Event(ctx, r, events.Updated))
	}
	return res, err
}
