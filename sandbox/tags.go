package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

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
func (s *Store) SetTags(ctx context.Context, name string, add, remove []string) (res control.TagsResult, err error) {
	c := spec.TagChange{Add: add, Remove: remove}
	if err := c.Validate(); err != nil {
		return res, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return res, err
	}
	for {
		r, err := s.Get(name)
		if err != nil {
			return res, err
		}
		if r.Spec.Network != spec.NetworkTAP {
			return res, control.NoNetworkTags(name)
		}
		if r.Phase == state.Running {
			err = control.CallWith(ctx, s.Store, name, http.MethodPatch, "/tags", text, func(body io.Reader) error {
				return json.NewDecoder(io.LimitReader(body, 1<<20)).Decode(&res)
			})
		} else {
			res, err = s.storeTags(name, c)
		}
		if !passing(err) {
			if err == nil {
				s.Tell(s.Event(ctx, r, events.Updated))
			}
			return res, err
		}
		select {
		case <-ctx.Done():
			return res, errors.Join(fmt.Errorf("changing the tags of %s: %w", name, ctx.Err()), err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// storeTags changes the tags of a VM that has no process.
func (s *Store) storeTags(name string, c spec.TagChange) (control.TagsResult, error) {
	l, err := s.Lock(name)
	if err != nil {
		return control.TagsResult{}, err
	}
	defer l.Release()
	r, err := s.Load(name)
	if err != nil {
		return control.TagsResult{}, err
	}
	if err := r.Spec.UseTags(c); err != nil {
		return control.TagsResult{}, err
	}
	return control.TagsOf(r, false), s.Save(r)
}
