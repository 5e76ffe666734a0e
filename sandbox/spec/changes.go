package spec

import (
	"fmt"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Changes are the settings of a VM that can change after it was made. A nil field stays unchanged.
type Changes struct {
	// Idle and Hooks take effect at the next wake or boot.
	Idle  *Idle
	Hooks *Hooks
	// VCPUs and MemoryMiB take effect at the next boot. A sleeping VM has its size in its memory, so the VM must
	// be stopped.
	VCPUs, MemoryMiB *int
	// Policy takes effect at once.
	Policy *netpolicy.Policy
}

// Changed returns the VM with changes. It refuses a new size for a VM that is asleep.
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
