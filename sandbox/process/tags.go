package process

import (
	"errors"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// setTags implements SetTags in the VM's process.
func (p *process) setTags(c spec.TagChange) (control.TagsResult, error) {
	end, err := p.begin()
	if err != nil {
		return control.TagsResult{}, err
	}
	defer end()
	n := p.net
	if n == nil {
		return control.TagsResult{}, control.NoNetworkTags(p.r.Spec.Name)
	}
	if err := c.Validate(); err != nil {
		return control.TagsResult{}, err
	}
	old := p.r.Spec.Tags
	// Save first: a process that is killed in between comes back with the new tags.
	if err := p.save(func() error { return p.r.Spec.UseTags(c) }); err != nil {
		return control.TagsResult{}, err
	}
	if err := n.SetTags(p.r.Spec.Tags); err != nil {
		p.r.Spec.Tags = old
		return control.TagsResult{}, errors.Join(err, n.SetTags(old), p.store.Save(p.r))
	}
	return control.TagsOf(p.r, true), nil
}
