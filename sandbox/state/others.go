package state

import (
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Other is a sandbox of a cluster that this host does not have, or not as it is now.
type Other struct {
	// Host has it; empty if it sleeps in the store, and no host has it.
	Host     string
	Record   *Record // of Listed, or of Portable
	Metadata spec.Metadata
	// Stale is when the host last said so, if it does not answer now. If it has never said anything, Record is that of
	// the last publication, and Published is true.
	Stale     time.Time
	Published bool
}

// Others are the sandboxes of a cluster, as one of its hosts sees them.
type Others struct {
	// Self is this host's name. Held reports whether it has claimed a sandbox.
	Self string
	Held func(name string) bool
	// List is sorted by name.
	List []Other
	// Problems are what List lacks, a line each. They name hosts, no sandboxes.
	Problems []string
}

// Listed returns what other hosts list of a VM: Portable, as it is now.
func (r *Record) Listed() *Record {
	p := r.Portable()
	p.Phase, p.Problem, p.Exit, p.Parent = r.Phase, r.Problem, r.Exit, r.Parent
	p.Boot = BootFiles{ImageID: r.Boot.ImageID, KernelID: r.Boot.KernelID}
	return p
}
