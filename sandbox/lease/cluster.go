package lease

import (
	"context"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Cluster is a host among others with which it shares sandboxes: cluster.Node. Its methods may be called from any
// goroutine.
type Cluster interface {
	// Claim makes sure that this host may run a sandbox, and has it as it was last. A sandbox that is not shared is left
	// alone. may, if not nil, is asked first about one that this host does not have. The errors are spec.ErrElsewhere,
	// spec.ErrNotFound and may's.
	Claim(ctx context.Context, name string, may func(spec.Metadata) error) error
	// Publish shares a sandbox that sleeps, if it is not shared yet, and returns when other hosts can wake it as it is.
	// The errors are spec.ErrInvalid for one that cannot be shared, spec.ErrExists if another one has its name, and
	// spec.ErrRunning.
	Publish(ctx context.Context, name string) error
	// Delete deletes a shared sandbox that does not run here, for all hosts. It reports false for one that is not shared.
	Delete(ctx context.Context, name string) (shared bool, freed spec.Freed, err error)
}
