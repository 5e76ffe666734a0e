package sandbox

import (
	"context"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// SetTags adds tags to those of a VM, and removes others, for good: they are stored before they are put into force. A
// tag that is there, or not, is no error. When it returns, no packet of another VM on the host is judged by the old
// ones any more, and flows with this one that the rules of others do not open by the new ones are cut. If it fails, the
// old tags hold. Children of a fork have the tags of the moment at which it is made, clones of a snapshot those of its
// moment. ErrSpec or netpolicy.ErrPolicy say that the VM cannot have them.
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
