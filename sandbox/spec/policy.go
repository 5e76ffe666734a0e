package spec

import (
	"fmt"
	"slices"

	"github.com/drowse-vm/drowse/netpolicy"
)

// ValidatePolicy returns an error if the VM cannot have its policy.
func (s *VM) ValidatePolicy() error {
	if s.Policy == nil {
		return nil
	}
	if s.Network != NetworkTAP {
		return fmt.Errorf("%w: it has a network policy and no network: add the network %q", ErrInvalid, NetworkTAP)
	}
	return s.Policy.Validate()
}

// checkTags returns an error if the VM cannot have its tags.
func (s *VM) checkTags() error {
	if len(s.Tags) > 0 && s.Network != NetworkTAP {
		return fmt.Errorf("%w: it has tags and no network in which they would count: add the network %q", ErrInvalid, NetworkTAP)
	}
	if err := netpolicy.CheckTags(s.Tags); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// UsePolicy replaces the policy if p is not nil.
func (s *VM) UsePolicy(p *netpolicy.Policy) error {
	if p == nil {
		return nil
	}
	s.Policy = p
	return s.ValidatePolicy()
}

// TagChange is a request of SetTags to a VM's process.
type TagChange struct {
	Add    []string `json:"add,omitempty"`
	Remove []string `json:"remove,omitempty"`
}

// of returns the new tags: those that stay in their order, and new ones after them.
func (c TagChange) of(tags []string) []string {
	out := slices.DeleteFunc(slices.Clone(tags), func(t string) bool { return slices.Contains(c.Remove, t) })
	for _, t := range c.Add {
		if !slices.Contains(out, t) {
			out = append(out, t)
		}
	}
	return out
}

// Validate returns an ErrInvalid for a change that cannot be made.
func (c TagChange) Validate() error {
	if len(c.Add)+len(c.Remove) == 0 {
		return fmt.Errorf("%w: no tag to add or to remove", ErrInvalid)
	}
	for _, tags := range [][]string{c.Add, c.Remove} {
		if err := netpolicy.CheckTags(tags); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	for _, t := range c.Add {
		if slices.Contains(c.Remove, t) {
			return fmt.Errorf("%w: tag %q is to be added and removed: leave one out", ErrInvalid, t)
		}
	}
	return nil
}

// UseTags changes the VM's tags.
func (s *VM) UseTags(c TagChange) error {
	next := *s
	next.Tags = c.of(s.Tags)
	if err := next.checkTags(); err != nil {
		return err
	}
	s.Tags = next.Tags
	return nil
}
