package spec

import (
	"fmt"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Changes are what of a VM can be changed once it is there; nil leaves a field as it is.
type Changes struct {
	// Idle and Hooks hold from the next wake or boot on.
	Idle  *Idle
	Hooks *Hooks
	// VCPUs and MemoryMiB hold from the next boot on. Those of a VM that sleeps are part of its memory, so it must have
	// stopped.
	VCPUs, MemoryMiB *int
	// Policy holds at once.
	Policy *netpolicy.Policy
}

// Changed is the VM with changes. One that is asleep has its size in its memory.
func (s VM) Changed(c Changes, asleep bool) (VM, error) {
	resized := c.VCPUs != nil && *c.VCPUs != s.VCPUs || c.MemoryMiB != nil && *c.MemoryMiB != s.MemoryMiB
	if resized && asleep {
		return s, fmt.Errorf("%w: its CPUs and memory are part of what it sleeps in: wake and stop it, change it, and boot it with Sandbox.Start", ErrInvalid)
	}
	if c.VCPUs != nil {
		s.VCPUs = *c.VCPUs
	}
	if c.MemoryMiB != nil {
		s.MemoryMiB = *c.MemoryMiB
	}
	if c.Idle != nil {
		s.Idle = *c.Idle
	}
	if c.Hooks != nil {
		s.Hooks = *c.Hooks
	}
	if err := s.Shape().Validate(); err != nil {
		return s, err
	}
	return s.WithDefaults()
}
