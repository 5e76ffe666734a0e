package records

import (
	"time"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Request is a sandbox that is wanted.
type Request struct {
	Spec     spec.VM
	Metadata spec.Metadata
}

// Child is a fork that is wanted.
type Child struct {
	// Name is random if it is empty.
	Name string
	// Tags are added to those that it has from its parent's metadata, as it has all of that.
	Tags []string
}

// Changes of a sandbox; nil leaves a field as it is.
type Changes struct {
	Class          *lifetime.Class
	Owner, Purpose *string
	// Tags take the place of those of the metadata. Those of the network policy stay.
	Tags *[]string
	// Expires is when its time is over; the zero time is never.
	Expires *time.Time
	Keep    *lifetime.Keep
	// Wake is when it is woken; the zero Timer is never.
	Wake *spec.Timer
	// Rotate says at which wakes it begins anew; the zero Rotation is never.
	Rotate *spec.Rotation
	// Persist says what of it does not persist over its sleeps, in place of all that was said before.
	Persist *lifetime.Persist
	// Reset begins with an empty metadata, for one that cannot be read.
	Reset bool
	Spec  spec.Changes
}

// List is a page of sandboxes.
type List struct {
	Page
	// Problems are of sandboxes that cannot be read.
	Problems []string `json:"problems,omitempty"`
}

// History is what a sandbox has done, the newest first.
type History struct {
	Sandbox Sandbox `json:"sandbox"`
	Runs    []Run   `json:"runs"`
	Sleeps  []Sleep `json:"sleeps"`
	// Problems are what of it could not be read.
	Problems []string `json:"problems,omitempty"`
}

// Pruned is what a pruning has done, or would do. Its JSON is that of `drowse prune -o json`.
type Pruned struct {
	// Freed is what was deleted: snapshots, layers, cached pages, and the files of sandboxes. With DryRun it is what
	// the steps of Plan.Snapshots would free; what else would go is not known before.
	spec.Freed
	// Plan is what the metadata say is to be done.
	lifetime.Plan
	DryRun bool `json:"dry_run,omitempty"`
	// Abandoned are the disks that sandboxes have left which were taken back: Prune deletes them, Keep does not.
	Abandoned []lifetime.Step `json:"abandoned,omitempty"`
	// Histories is of how many removed sandboxes the history was deleted, since it was too old or there were too many.
	Histories int64 `json:"histories"`
	// Problems are steps that were not taken, and why: the next pruning tries again.
	Problems []string `json:"problems,omitempty"`
}

// Add adds what was deleted.
func (p *Pruned) Add(f spec.Freed) {
	p.Freed.Snapshots += f.Snapshots
	p.Layers += f.Layers
	p.CacheFiles += f.CacheFiles
	p.Bytes += f.Bytes
	p.Problems = append(p.Problems, f.Problems...)
}

// Code is what a caller may want to tell errors apart by. Codes are added, and never change their meaning.
type Code string

// The codes that a Fleet gives by itself. Others are those of control.ErrorCode, such as "not-found", "exists",
// "running", "not-running", "expired", "metadata" and "invalid".
const (
	CodeCanceled Code = "canceled"
	CodeTimeout  Code = "timeout"
	CodeOther    Code = "error"
)

// Error is an error of a Fleet's. Its text is that of its cause.
type Error struct {
	// Op is what was being done: "create", "wake" and so on; Sandbox to which one, where that is known.
	Op, Sandbox string
	Code        Code
	// Remedy is what can be done about it; empty if nobody knows.
	Remedy string
	Err    error
}

// Error is the text of the cause, which says what was being done.
func (e *Error) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }
