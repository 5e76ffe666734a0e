package control

import (
	"context"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// OperationKind is what an operation does with a sandbox.
type OperationKind string

// The operations that an Observer is told of. A restore makes a sandbox from a snapshot.
const (
	OpCreate   OperationKind = "create"
	OpStart    OperationKind = "start"
	OpWake     OperationKind = "wake"
	OpRestore  OperationKind = "restore"
	OpSleep    OperationKind = "sleep"
	OpSnapshot OperationKind = "snapshot"
	OpFork     OperationKind = "fork"
	OpExec     OperationKind = "exec"
)

// Operation is one that has ended.
type Operation struct {
	Kind OperationKind
	// Sandbox is its name.
	Sandbox string
	Begun   time.Time
	Took    time.Duration
	Err     error

	// What it gave: a Report of create, start, wake and restore, what was Saved of sleep and snapshot, the Fork, and how
	// the command of exec has ended, nil if that is not known.
	Report Report
	Saved  spec.SleepResult
	Fork   ForkResult
	Exit   *guest.ExitStatus
}

// Joined says that the operation has found done what it was to do: its sandbox ran, or slept, already, or somebody else
// had begun to bring it up. What it gave tells of that.
func (o *Operation) Joined() bool {
	at := o.Report.Begun
	if at.IsZero() {
		at = o.Saved.Asleep
	}
	return o.Err == nil && !at.IsZero() && at.Before(o.Begun.Round(0)) // by the wall's clock, as those of other processes
}

// Observer is told that an operation begins, with the name of its sandbox, if that is known. It returns the context of
// what the operation does, and who is told of its end. Those may be called from any goroutine; the operation waits for
// them.
type Observer func(ctx context.Context, kind OperationKind, name string) (context.Context, func(*Operation))

// ForkResult says what a fork has done.
type ForkResult struct {
	Parent string `json:"parent"`
	// Snapshot is that of the fork: what the children come back from.
	Snapshot string   `json:"snapshot"`
	Children []Report `json:"children"`
	// Durable says that the snapshot is on disk, and Problem why not.
	Durable bool   `json:"durable"`
	Problem string `json:"problem,omitempty"`
	// Pages of RAM that are not zeros are shared by the children.
	Pages uint64 `json:"pages"`
	// Stages are ahead, pause and fill (of the capture), ready (from the call until all
	// children are), durable (until the snapshot is on disk).
	Stages map[string]float64 `json:"stages_ms"`
}
