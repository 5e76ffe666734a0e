package control

import (
	"context"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// OperationKind is what an operation does with a sandbox.
type OperationKind string

// The operations that an Observer hears of. A restore makes a sandbox from a snapshot.
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

// Operation is an operation that has ended.
type Operation struct {
	Kind OperationKind
	// Sandbox is the name of the sandbox.
	Sandbox string
	Begun   time.Time
	Took    time.Duration
	Err     error

	// The results: the Report of create, start, wake and restore; Saved of sleep and snapshot; the Fork; and Exit,
	// how the command of exec ended, nil if that is not known.
	Report Report
	Saved  spec.SleepResult
	Fork   ForkResult
	Exit   *guest.ExitStatus
}

// Joined reports whether the operation found its work done or begun by another caller: its sandbox already ran,
// slept or was coming up. Its results are those of the earlier work.
func (o *Operation) Joined() bool {
	at := o.Report.Begun
	if at.IsZero() {
		at = o.Saved.Asleep
	}
	return o.Err == nil && !at.IsZero() && at.Before(o.Begun.Round(0)) // by the wall clock, like other processes' times
}

// Observer is called when an operation begins, with the name of its sandbox, if known. It returns the context for
// the operation, and a function that is called at its end. Both may be called from any goroutine. The operation
// waits for them.
type Observer func(ctx context.Context, kind OperationKind, name string) (context.Context, func(*Operation))

// ForkResult says what a fork did.
type ForkResult struct {
	Parent string `json:"parent"`
	// Snapshot is the snapshot of the fork, which the children come back from.
	Snapshot string   `json:"snapshot"`
	Children []Report `json:"children"`
	// Durable reports whether the snapshot is on disk. If not, Problem says why.
	Durable bool   `json:"durable"`
	Problem string `json:"problem,omitempty"`
	// Pages counts the pages of RAM with data, which the children share.
	Pages uint64 `json:"pages"`
	// Stages are ahead, pause and fill (of the capture), ready (from the call until all
	// children are), durable (until the snapshot is on disk).
	Stages map[string]float64 `json:"stages_ms"`
}
