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
	// Migrate moves a sandbox from this host to another one, and wakes it there if it runs here. After an error it is on
	// one of them, or asleep where any host can wake it; until its last step it goes on here. The errors are
	// spec.ErrTarget, those of Publish, and those of a sleep and a wake.
	Migrate(ctx context.Context, name string, o spec.MigrateOptions) (spec.MigrateResult, error)
	// Delete deletes a shared sandbox that does not run here, for all hosts. It reports false for one that is not shared.
	Delete(ctx context.Context, name string) (shared bool, freed spec.Freed, err error)
}
