package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// TagsResult says what SetTags has done.
type TagsResult struct {
	Name string `json:"name"`
	// Tags are all that the VM has now.
	Tags []string `json:"tags"`
	// Live says that the VM runs and that the rules of other VMs go by them; else they are those that the VM
	// will be brought back with.
	Live bool `json:"live"`
}

// SetTags adds tags to those of a VM, and removes others, for good: they are stored before they are put into force. A
// tag that is there, or not, is no error. When it returns, no packet of another VM on the host is judged by the old
// ones any more, and flows with this one that the rules of others do not open by the new ones are cut. If it fails, the
// old tags hold. Children of a fork have the tags of the moment at which it is made, clones of a snapshot those of its
// moment. ErrSpec or netpolicy.ErrPolicy say that the VM cannot have them.
func (s *Store) SetTags(ctx context.Context, name string, add, remove []string) (res TagsResult, err error) {
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
			return res, noNetworkTags(name)
		}
		if r.Phase == state.Running {
			err = s.callWith(ctx, name, http.MethodPatch, "/tags", text, func(body io.Reader) error {
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

func noNetworkTags(name string) error {
	return fmt.Errorf("%w: %s has no network in which tags would count: VMs get one with --net %s", ErrSpec, name, spec.NetworkTAP)
}

// storeTags changes the tags of a VM that has no process.
func (s *Store) storeTags(name string, c spec.TagChange) (TagsResult, error) {
	l, err := s.Lock(name)
	if err != nil {
		return TagsResult{}, err
	}
	defer l.Release()
	r, err := s.Load(name)
	if err != nil {
		return TagsResult{}, err
	}
	if err := r.Spec.UseTags(c); err != nil {
		return TagsResult{}, err
	}
	return tagsOf(r, false), s.Save(r)
}

func tagsOf(r *state.Record, live bool) TagsResult {
	return TagsResult{Name: r.Spec.Name, Tags: append([]string{}, r.Spec.Tags...), Live: live}
}

// setTags is SetTags in the VM's process.
func (p *process) setTags(c spec.TagChange) (TagsResult, error) {
	p.op.Lock()
	defer p.op.Unlock()
	if err := p.alive(); err != nil {
		return TagsResult{}, err
	}
	n := p.in.Network()
	if n == nil {
		return TagsResult{}, noNetworkTags(p.r.Spec.Name)
	}
	if err := c.Validate(); err != nil {
		return TagsResult{}, err
	}
	old := p.r.Spec.Tags
	if err := p.r.Spec.UseTags(c); err != nil {
		return TagsResult{}, err
	}
	// First what lasts: a process that is killed in between comes back with the new ones.
	if err := p.store.Save(p.r); err != nil {
		p.r.Spec.Tags = old
		return TagsResult{}, err
	}
	if err := n.SetTags(p.r.Spec.Tags); err != nil {
		p.r.Spec.Tags = old
		return TagsResult{}, errors.Join(err, n.SetTags(old), p.store.Save(p.r))
	}
	return tagsOf(p.r, true), nil
}

// handleTags answers for tags on the control socket.
func (p *process) handleTags(handle func(string, func(*http.Request) (any, error), func())) {
	handle("PATCH /tags", func(r *http.Request) (any, error) {
		var c spec.TagChange
		if err := json.NewDecoder(io.LimitReader(r.Body, 64<<10)).Decode(&c); err != nil {
			return nil, fmt.Errorf("reading a change of tags: %w", err)
		}
		return p.setTags(c)
	}, nil)
}
