package records

import (
	"time"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Request asks for a sandbox.
type Request struct {
	Spec     spec.VM
	Metadata spec.Metadata
	// Boot boots it even if there is a template for it: sandbox.CreateOptions.
	Boot bool
	// Disk is the id, or its beginning, of a snapshot from whose disk it boots; empty is none.
	Disk string
}

// Child asks for a fork.
type Child struct {
	// Name is random if empty.
	Name string
	// Tags are added to those that it inherits with its parent's metadata.
	Tags []string
}

// Changes of a sandbox. A nil field stays unchanged.
type Changes struct {
	Class          *lifetime.Class
	Owner, Purpose *string
	// Tags replace those in the metadata. Those of the network policy stay.
	Tags *[]string
	// Expires is when it expires; the zero time is never.
	Expires *time.Time
	Keep    *lifetime.Keep
	// Wake is when it is woken; the zero Timer is never.
	Wake *spec.Timer
	// Rotate says at which wakes it starts afresh; the zero Rotation is never.
	Rotate *spec.Rotation
	// Persist says what does not persist over its sleeps. It replaces all that was set before.
	Persist *lifetime.Persist
	// Gateway replaces whom the gateway lets in, but for the count of tokens. NewGatewayToken invalidates the token.
	Gateway         *spec.Gateway
	NewGatewayToken bool
	// Reset begins with empty metadata, for metadata that cannot be read.
	Reset bool
	Spec  spec.Changes
}

// List is a page of sandboxes.
type List struct {
	Page
	// Problems are unreadable sandboxes.
	Problems []string `json:"problems,omitempty"`
}

// History is what happened in a sandbox, the newest first.
type History struct {
	Sandbox Sandbox `json:"sandbox"`
	Runs    []Run   `json:"runs"`
	Sleeps  []Sleep `json:"sleeps"`
	// Problems are parts of it that could not be read.
	Problems []string `json:"problems,omitempty"`
}

// Pruned is what a pruning did, or would do. Its JSON is that of `drowse prune -o json`.
type Pruned struct {
	// Freed is what was deleted: snapshots, layers, cached pages, and the files of sandboxes. With DryRun it is
	// what the steps of Plan.Snapshots would free; the rest cannot be known before.
	spec.Freed
	// Plan is what the metadata make due.
	lifetime.Plan
	DryRun bool `json:"dry_run,omitempty"`
	// Abandoned are disks that sandboxes left behind when they were taken back: Prune deletes them, Keep does not.
	Abandoned []lifetime.Step `json:"abandoned,omitempty"`
	// Histories counts the histories of removed sandboxes that were deleted because they were too old or too many.
	Histories int64 `json:"histories"`
	// Problems are steps that failed, and why: the next pruning tries again.
	Problems []string `json:"problems,omitempty"`
}

// Add adds what else was deleted.
func (p *Pruned) Add(f spec.Freed) {
	p.Problems = append(p.Problems, f.Problems...)
	f.Problems = nil
	p.Freed.Add(f)
}

// Code tells errors apart for callers. Codes may be added; their meaning never changes.
type Code string

// The codes of a Fleet itself. Others are those of control.ErrorCode, such as "not-found", "exists", "running",
// "not-running", "expired", "metadata" and "invalid".
const (
	CodeCanceled Code = "canceled"
	CodeTimeout  Code = "timeout"
	CodeOther    Code = "error"
)

// Error is an error of a Fleet. Its text is that of its cause.
type Error struct {
	// Op is the operation that failed: "create", "wake" and so on. Sandbox is its sandbox, if known.
	Op, Sandbox string
	Code        Code
	// Remedy is what the caller can do about it; empty if not known.
	Remedy string
	Err    error
}

// Error returns the text of the cause, which names the operation.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }
