package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// setTags is SetTags in the VM's process.
func (p *process) setTags(c spec.TagChange) (control.TagsResult, error) {
	p.op.Lock()
	defer p.op.Unlock()
	if err := p.alive(); err != nil {
		return control.TagsResult{}, err
	}
	n := p.in.Network()
	if n == nil {
		return control.TagsResult{}, control.NoNetworkTags(p.r.Spec.Name)
	}
	if err := c.Validate(); err != nil {
		return control.TagsResult{}, err
	}
	old := p.r.Spec.Tags
	if err := p.r.Spec.UseTags(c); err != nil {
		return control.TagsResult{}, err
	}
	// First what lasts: a process that is killed in between comes back with the new ones.
	if err := p.store.Save(p.r); err != nil {
		p.r.Spec.Tags = old
		return control.TagsResult{}, err
	}
	if err := n.SetTags(p.r.Spec.Tags); err != nil {
		p.r.Spec.Tags = old
		return control.TagsResult{}, errors.Join(err, n.SetTags(old), p.store.Save(p.r))
	}
	return control.TagsOf(p.r, true), nil
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
