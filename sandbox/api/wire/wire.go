// Package wire has the bodies of the HTTP API's requests and answers that are not documents of other packages: what a
// server (package api) and a client (package client) have in common. docs/guides/api.md describes them.
package wire

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Version is that of the API: the v1 of its paths. Fields are added, and never change their meaning.
const Version = 1

// Bounds of what is asked for.
const (
	// MaxBody is the most bytes that the body of a request may have.
	MaxBody = 1 << 20
	// MaxStdin is the most that a command gets, and MaxOutput what is kept of its stdout, and as much of its stderr, in
	// bytes.
	MaxStdin  = 512 << 10
	MaxOutput = 1 << 20
	// DefaultExecSeconds is how long a command may take if nothing is said, and MaxExecSeconds the most that can be
	// said.
	DefaultExecSeconds = 60
	MaxExecSeconds     = 3600
	// DefaultStopSeconds is how long a guest may take to shut down, and MaxStopSeconds the most that can be said.
	DefaultStopSeconds = 30
	MaxStopSeconds     = 300
	// DefaultTail is how much of a console is given, and MaxTail the most, in bytes.
	DefaultTail = 64 << 10
	MaxTail     = 4 << 20
	// MaxFlows is the most flows in an answer: the newest ones.
	MaxFlows = 1000
)

// Codes of errors that are the server's own. Others are those of records.Code.
const (
	CodeUnauthorized records.Code = "unauthorized" // no token, or none that is known
	CodeForbidden    records.Code = "forbidden"    // a token that may not do this, or a request from somewhere else
	CodeNoRoute      records.Code = "no-route"     // there is no such path
	CodeMethod       records.Code = "method"       // the path has other methods
	CodeTooLarge     records.Code = "too-large"    // the body has more than MaxBody bytes
	CodeMediaType    records.Code = "media-type"   // the body is not application/json
	CodeBusy         records.Code = "busy"         // too many requests at once
	CodeTooMany      records.Code = "too-many"     // too many requests of this caller at once
)

// ErrorDoc is the answer to what failed.
type ErrorDoc struct {
	Error Error `json:"error"`
}

// Error is what a records.Error has, on its way.
type Error struct {
	Code    records.Code `json:"code"`
	Message string       `json:"message"`
	Remedy  string       `json:"remedy,omitempty"`
	Op      string       `json:"op,omitempty"`
	Sandbox string       `json:"sandbox,omitempty"`
	// Hooks are those in the guest that have refused, with code "hooks".
	Hooks []report.HookFailure `json:"hooks,omitempty"`
	// HostHooks are those on the host that have refused, with code "host-hooks".
	HostHooks []report.HookFailure `json:"host_hooks,omitempty"`
}

// Err makes it an error again: a *records.Error that wraps the error of package spec that its code stands for, if there
// is one.
func (e Error) Err() error {
	cause := errors.New(e.Message)
	for _, c := range spec.ErrorCodes {
		if c.Code == string(e.Code) {
			cause = c.Err
		}
	}
	switch e.Code {
	case records.CodeTimeout:
		cause = fmt.Errorf("%s: %w", e.Message, context.DeadlineExceeded)
	case records.CodeCanceled:
		cause = fmt.Errorf("%s: %w", e.Message, context.Canceled)
	case "hooks":
		cause = &spec.HooksError{Failures: e.Hooks}
	case "host-hooks":
		cause = &spec.HostHooksError{Failures: e.HostHooks}
	}
	return &records.Error{Op: e.Op, Sandbox: e.Sandbox, Code: e.Code, Remedy: e.Remedy, Err: texted{e.Message, cause}}
}

// texted is an error with the text that it had at the other end.
type texted struct {
	text  string
	cause error
}

func (t texted) Error() string { return t.text }
func (t texted) Unwrap() error { return t.cause }

// Empty is a body that says nothing.
type Empty struct{}

// List is GET /v1/sandboxes, as `drowse ls -o json`.
type List struct {
	Version int `json:"version"`
	records.List
}

// History is GET /v1/sandboxes/NAME/history, as `drowse history -o json`.
type History struct {
	Version int `json:"version"`
	records.History
}

// Create is POST /v1/sandboxes.
type Create struct {
	Spec     spec.VM       `json:"spec"`
	Metadata spec.Metadata `json:"metadata,omitzero"`
	// GetOrCreate returns the sandbox of that name as it is, if there is one.
	GetOrCreate bool `json:"get_or_create,omitempty"`
}

// Changes is PATCH /v1/sandboxes/NAME: records.Changes. What is not there is left as it is.
type Changes struct {
	Class   *lifetime.Class `json:"class,omitempty"`
	Owner   *string         `json:"owner,omitempty"`
	Purpose *string         `json:"purpose,omitempty"`
	Tags    *[]string       `json:"tags,omitempty"`
	// Expires is when its time is over; NoExpiry lets it last for ever, and does not go with it.
	Expires  *time.Time     `json:"expires,omitempty"`
	NoExpiry bool           `json:"no_expiry,omitempty"`
	Keep     *lifetime.Keep `json:"keep,omitempty"`
	// Wake is when it is woken: spec.Timer. NoWake takes its timer away, and does not go with Wake.
	Wake   *spec.Timer `json:"wake,omitempty"`
	NoWake bool        `json:"no_wake,omitempty"`
	// Rotate says at which wakes it begins anew, and from which snapshot: spec.Rotation. NoRotate takes that away,
	// and does not go with Rotate.
	Rotate   *spec.Rotation `json:"rotate,omitempty"`
	NoRotate bool           `json:"no_rotate,omitempty"`
	// Persist says what of it does not persist over its sleeps, in place of all that was said before.
	Persist *lifetime.Persist `json:"persist,omitempty"`
	Reset   bool              `json:"reset,omitempty"`

	Idle      *spec.Idle        `json:"idle,omitempty"`
	Hooks     *spec.Hooks       `json:"hooks,omitempty"`
	VCPUs     *int              `json:"vcpus,omitempty"`
	MemoryMiB *int              `json:"memory_mib,omitempty"`
	Policy    *netpolicy.Policy `json:"policy,omitempty"`
}

// ChangesOf are changes as they are sent.
func ChangesOf(c records.Changes) Changes {
	out := Changes{
		Class: c.Class, Owner: c.Owner, Purpose: c.Purpose, Tags: c.Tags, Expires: c.Expires, Keep: c.Keep, Wake: c.Wake, Rotate: c.Rotate, Persist: c.Persist, Reset: c.Reset,
		Idle: c.Spec.Idle, Hooks: c.Spec.Hooks, VCPUs: c.Spec.VCPUs, MemoryMiB: c.Spec.MemoryMiB, Policy: c.Spec.Policy,
	}
	if c.Expires != nil && c.Expires.IsZero() {
		out.Expires, out.NoExpiry = nil, true
	}
	if c.Wake != nil && *c.Wake == (spec.Timer{}) {
		out.Wake, out.NoWake = nil, true
	}
	if c.Rotate != nil && *c.Rotate == (spec.Rotation{}) {
		out.Rotate, out.NoRotate = nil, true
	}
	return out
}

// Fleet are the changes as a Fleet takes them.
func (c Changes) Fleet() (records.Changes, error) {
	out := records.Changes{
		Class: c.Class, Owner: c.Owner, Purpose: c.Purpose, Tags: c.Tags, Expires: c.Expires, Keep: c.Keep, Wake: c.Wake, Rotate: c.Rotate, Persist: c.Persist, Reset: c.Reset,
		Spec: spec.Changes{Idle: c.Idle, Hooks: c.Hooks, VCPUs: c.VCPUs, MemoryMiB: c.MemoryMiB, Policy: c.Policy},
	}
	if c.NoExpiry {
		if c.Expires != nil {
			return out, fmt.Errorf("%w: both expires and no_expiry are given: give one of them", spec.ErrInvalid)
		}
		out.Expires = &time.Time{}
	}
	switch {
	case c.NoWake && c.Wake != nil:
		return out, fmt.Errorf("%w: both wake and no_wake are given: give one of them", spec.ErrInvalid)
	case c.NoWake:
		out.Wake = &spec.Timer{}
	case c.Wake != nil && c.Wake.At.IsZero():
		return out, fmt.Errorf("%w: wake has no at, the time of the first wake, as 2026-11-22T13:25:42Z: to take a timer away give no_wake", spec.ErrInvalid)
	}
	switch {
	case c.NoRotate && c.Rotate != nil:
		return out, fmt.Errorf("%w: both rotate and no_rotate are given: give one of them", spec.ErrInvalid)
	case c.NoRotate:
		out.Rotate = &spec.Rotation{}
	case c.Rotate != nil && c.Rotate.To == "":
		return out, fmt.Errorf("%w: rotate has no to, the snapshot to begin anew from: to take a rotation away give no_rotate", spec.ErrInvalid)
	}
	return out, nil
}

// Sleep is POST /v1/sandboxes/NAME/sleep.
type Sleep struct {
	Hooks spec.HookPolicy `json:"hooks,omitempty"`
}

// Stop is POST /v1/sandboxes/NAME/stop.
type Stop struct {
	// Kill ends it at once, as if its power were cut.
	Kill bool `json:"kill,omitempty"`
	// TimeoutSeconds is how long it may take: 1 to MaxStopSeconds; 0 is DefaultStopSeconds.
	TimeoutSeconds int `json:"timeout_seconds,omitempty"`
}

// Snapshot is POST /v1/sandboxes/NAME/snapshot.
type Snapshot struct {
	Note     string          `json:"note,omitempty"`
	Hooks    spec.HookPolicy `json:"hooks,omitempty"`
	DiskOnly bool            `json:"disk_only,omitempty"`
}

// Promoted is the answer to POST /v1/sandboxes/NAME/promote, as `drowse promote -o json`.
type Promoted struct {
	Promoted []spec.Promoted `json:"promoted"`
}

// Restore is POST /v1/sandboxes/NAME/restore.
type Restore struct {
	// Snapshot is an id, or how it begins.
	Snapshot string `json:"snapshot"`
}

// Fork is POST /v1/sandboxes/NAME/fork.
type Fork struct {
	Children []Child `json:"children"`
}

// Child is records.Child.
type Child struct {
	Name string   `json:"name,omitempty"`
	Tags []string `json:"tags,omitempty"`
}

// Forked is the answer to Fork.
type Forked struct {
	Sandboxes []records.Sandbox `json:"sandboxes"`
}

// Rename is POST /v1/sandboxes/NAME/rename.
type Rename struct {
	To string `json:"to"`
}

// Extend is POST /v1/sandboxes/NAME/extend.
type Extend struct {
	Until time.Time `json:"until"`
}

// Exec is POST /v1/sandboxes/NAME/exec. Without user, cwd and env they are what the sandbox's image says.
type Exec struct {
	Command []string `json:"command"`
	User    string   `json:"user,omitempty"`
	Cwd     string   `json:"cwd,omitempty"`
	// Env are variables, KEY=VALUE.
	Env []string `json:"env,omitempty"`
	// Stdin is base64, and at most MaxStdin bytes.
	Stdin []byte `json:"stdin,omitempty"`
	// TimeoutSeconds is after how long it is killed: 1 to MaxExecSeconds; 0 is DefaultExecSeconds.
	TimeoutSeconds int `json:"timeout_seconds,omitempty"`
}

// Executed is the answer to Exec. It is there also when the command has failed.
type Executed struct {
	// ExitCode is the command's as a shell gives it: 128 + n when signal n ended it, 126 and 127 when it could not be
	// started.
	ExitCode int  `json:"exit_code"`
	Signal   int  `json:"signal,omitempty"`
	TimedOut bool `json:"timed_out,omitempty"`
	// NotStarted is why the command could not be started.
	NotStarted string `json:"not_started,omitempty"`
	// Stdout and Stderr are base64, MaxOutput bytes at most each; Truncated says that there was more.
	Stdout    []byte  `json:"stdout"`
	Stderr    []byte  `json:"stderr"`
	Truncated bool    `json:"truncated,omitempty"`
	ElapsedMs float64 `json:"elapsed_ms"`
}

// Snapshots is GET /v1/snapshots and /v1/sandboxes/NAME/snapshots.
type Snapshots struct {
	Version   int                 `json:"version"`
	Snapshots []spec.SnapshotInfo `json:"snapshots"`
}

// Tags is POST /v1/snapshots/ID/tags: they take the place of those that it has.
type Tags struct {
	Tags []string `json:"tags"`
}

// Flows is GET /v1/sandboxes/NAME/flows: what `drowse policy flows -o json` prints, the newest MaxFlows.
type Flows struct {
	Flows []netpolicy.FlowRecord `json:"flows"`
	// Truncated says that there were more.
	Truncated bool `json:"truncated,omitempty"`
}

// Image is what a client needs of an image; the answer has all of its record.
type Image struct {
	ID           string    `json:"id"`
	Tags         []string  `json:"tags"`
	Source       string    `json:"source"`
	Size         int64     `json:"size"`    // of the file system, in bytes
	Content      int64     `json:"content"` // sum of the sizes of the files in it, in bytes
	Created      time.Time `json:"created"`
	Architecture string    `json:"architecture"`
}

// Images is GET /v1/images.
type Images struct {
	Version int     `json:"version"`
	Images  []Image `json:"images"`
	// Problems are of images that cannot be read.
	Problems []string `json:"problems,omitempty"`
}

// Prune is POST /v1/prune.
type Prune struct {
	DryRun bool `json:"dry_run,omitempty"`
}

// Is is GET /v1/version.
type Is struct {
	// Version is the program's, and API that of the paths.
	Version string `json:"version"`
	API     int    `json:"api"`
	// Scope is what the caller may do: read or write.
	Scope string `json:"scope"`
}

// Health is GET /healthz and /readyz. The status of the answer is 200, or 503 if a check has failed.
type Health struct {
	OK     bool    `json:"ok"`
	Checks []Check `json:"checks"`
}

// Check is one of them.
type Check struct {
	Name string `json:"name"`
	OK   bool   `json:"ok"`
	// Problem is why not; only callers that may read are told.
	Problem string `json:"problem,omitempty"`
}
