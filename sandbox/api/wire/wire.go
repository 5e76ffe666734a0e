// Package wire has the bodies of the HTTP API's requests and answers that are not documents of other packages. A
// server (package api) and a client (package client) share them. docs/guides/api.md describes them.
package wire

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Version is the version of the API: the v1 of its paths. Fields may be added; their meaning never changes.
const Version = 1

// Bounds of requests and answers.
const (
	// MaxBody is the most bytes that the body of a request may have.
	MaxBody = 1 << 20
	// MaxStdin is the most bytes of a command's input. MaxOutput is how many bytes are kept of its stdout, and of
	// its stderr.
	MaxStdin  = 512 << 10
	MaxOutput = 1 << 20
	// DefaultExecSeconds is how long a command may take by default, and MaxExecSeconds the most that a request can
	// set.
	DefaultExecSeconds = 60
	MaxExecSeconds     = 3600
	// DefaultStopSeconds is how long a guest may take to shut down by default, and MaxStopSeconds the most.
	DefaultStopSeconds = 30
	MaxStopSeconds     = 300
	// DefaultTail is how much of a console is returned by default, and MaxTail the most, in bytes.
	DefaultTail = 64 << 10
	MaxTail     = 4 << 20
	// MaxFlows is the most flows in an answer: the newest ones.
	MaxFlows = 1000
)

// Codes of the server's own errors. The other codes are those of records.Code.
const (
	CodeUnauthorized records.Code = "unauthorized" // no token, or an unknown one
	CodeForbidden    records.Code = "forbidden"    // a token without this right, or a foreign page's request
	CodeNoRoute      records.Code = "no-route"     // unknown path
	CodeMethod       records.Code = "method"       // the path has other methods
	CodeTooLarge     records.Code = "too-large"    // the body has more than MaxBody bytes
	CodeMediaType    records.Code = "media-type"   // the body is not application/json
	CodeBusy         records.Code = "busy"         // too many requests at once
	CodePrecondition records.Code = "precondition" // If-Match or If-None-Match does not hold
	CodeRange        records.Code = "range"        // the file has no such part
	CodeUpgrade      records.Code = "upgrade"      // the path is a WebSocket
	CodeKeyUsed      records.Code = "key-used"     // another request had this Idempotency-Key
	CodeTooMany      records.Code = "too-many"     // too many requests of this caller at once
	CodeIssuer       records.Code = "issuer"       // the issuer of the token does not answer
)

// ErrorDoc is the answer to a failed request.
type ErrorDoc struct {
	Error Error `json:"error"`
}

// Error is a records.Error in transit.
type Error struct {
	Code    records.Code `json:"code"`
	Message string       `json:"message"`
	Remedy  string       `json:"remedy,omitempty"`
	// Field is the field of the body, parameter or header that is the cause, if it is a single one: "spec.memory_mib".
	Field   string `json:"field,omitempty"`
	Op      string `json:"op,omitempty"`
	Sandbox string `json:"sandbox,omitempty"`
	// Hooks are the hooks in the guest that refused, with code "hooks".
	Hooks []report.HookFailure `json:"hooks,omitempty"`
	// HostHooks are the hooks on the host that refused, with code "host-hooks".
	HostHooks []report.HookFailure `json:"host_hooks,omitempty"`
}

// Err makes it an error again: a *records.Error that wraps the package spec error of its code, if there is one.
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
	if e.Field != "" {
		cause = &spec.FieldError{Field: e.Field, Err: cause}
	}
	return &records.Error{Op: e.Op, Sandbox: e.Sandbox, Code: e.Code, Remedy: e.Remedy, Err: texted{e.Message, cause}}
}

// texted is an error with its text from the other end.
type texted struct {
	text  string
	cause error
}

func (t texted) Error() string { return t.text }
func (t texted) Unwrap() error { return t.cause }

// Empty is a body without content.
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
	// Disk is the id, or its beginning, of a snapshot from whose disk it boots.
	Disk string `json:"disk,omitempty"`
	// GetOrCreate returns the sandbox of that name unchanged if it exists.
	GetOrCreate bool `json:"get_or_create,omitempty"`
	// Boot boots it even if there is a template for it.
	Boot bool `json:"boot,omitempty"`
}

// Changes is PATCH /v1/sandboxes/NAME: records.Changes. A missing field stays unchanged.
type Changes struct {
	Class   *lifetime.Class `json:"class,omitempty"`
	Owner   *string         `json:"owner,omitempty"`
	Purpose *string         `json:"purpose,omitempty"`
	Tags    *[]string       `json:"tags,omitempty"`
	// Expires is when it expires. NoExpiry removes the expiry, and excludes Expires.
	Expires  *time.Time     `json:"expires,omitempty"`
	NoExpiry bool           `json:"no_expiry,omitempty"`
	Keep     *lifetime.Keep `json:"keep,omitempty"`
	// Wake is when it is woken: spec.Timer. NoWake removes its timer, and excludes Wake.
	Wake   *spec.Timer `json:"wake,omitempty"`
	NoWake bool        `json:"no_wake,omitempty"`
	// Rotate says at which wakes it starts afresh, and from which snapshot: spec.Rotation. NoRotate removes the
	// rotation, and excludes Rotate.
	Rotate   *spec.Rotation `json:"rotate,omitempty"`
	NoRotate bool           `json:"no_rotate,omitempty"`
	// Persist says what does not persist over its sleeps. It replaces all that was set before.
	Persist *lifetime.Persist `json:"persist,omitempty"`
	// Gateway replaces whom the gateway lets in. NewGatewayToken invalidates the token that it wants.
	Gateway         *Gateway `json:"gateway,omitempty"`
	NewGatewayToken bool     `json:"new_gateway_token,omitempty"`
	Reset           bool     `json:"reset,omitempty"`

	Idle      *spec.Idle        `json:"idle,omitempty"`
	Hooks     *spec.Hooks       `json:"hooks,omitempty"`
	VCPUs     *int              `json:"vcpus,omitempty"`
	MemoryMiB *int              `json:"memory_mib,omitempty"`
	Policy    *netpolicy.Policy `json:"policy,omitempty"`
}

// Gateway is a spec.Gateway without the count of its tokens.
type Gateway struct {
	PublicPorts []uint16 `json:"public_ports,omitempty"`
	AllPublic   bool     `json:"all_public,omitempty"`
	GuestTLS    []uint16 `json:"guest_tls,omitempty"`
	Host        string   `json:"host,omitempty"`
	IdleStreams bool     `json:"idle_streams,omitempty"`
}

// GatewayOf returns the settings of a gateway.
func GatewayOf(g spec.Gateway) Gateway {
	return Gateway{PublicPorts: g.PublicPorts, AllPublic: g.AllPublic, GuestTLS: g.GuestTLS, Host: g.Host, IdleStreams: g.IdleStreams}
}

// GatewayAccess is GET /v1/sandboxes/NAME/gateway.
type GatewayAccess struct {
	Gateway
	// Token lets requests in to ports that are not public.
	Token string `json:"token"`
}

// ChangesOf returns changes in the form for sending.
func ChangesOf(c records.Changes) Changes {
	out := Changes{
		NewGatewayToken: c.NewGatewayToken,
		Class:           c.Class, Owner: c.Owner, Purpose: c.Purpose, Tags: c.Tags, Expires: c.Expires, Keep: c.Keep, Wake: c.Wake, Rotate: c.Rotate, Persist: c.Persist, Reset: c.Reset,
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
	if c.Gateway != nil {
		g := GatewayOf(*c.Gateway)
		out.Gateway = &g
	}
	return out
}

// Fleet returns the changes in the form that a Fleet takes.
func (c Changes) Fleet() (records.Changes, error) {
	out := records.Changes{
		NewGatewayToken: c.NewGatewayToken,
		Class:           c.Class, Owner: c.Owner, Purpose: c.Purpose, Tags: c.Tags, Expires: c.Expires, Keep: c.Keep, Wake: c.Wake, Rotate: c.Rotate, Persist: c.Persist, Reset: c.Reset,
		Spec: spec.Changes{Idle: c.Idle, Hooks: c.Hooks, VCPUs: c.VCPUs, MemoryMiB: c.MemoryMiB, Policy: c.Policy},
	}
	if g := c.Gateway; g != nil {
		out.Gateway = &spec.Gateway{PublicPorts: g.PublicPorts, AllPublic: g.AllPublic, GuestTLS: g.GuestTLS, Host: g.Host, IdleStreams: g.IdleStreams}
	}
	if c.NoExpiry {
		if c.Expires != nil {
			return out, spec.InField("expires", fmt.Errorf("%w: both expires and no_expiry are given: give one of them", spec.ErrInvalid))
		}
		out.Expires = &time.Time{}
	}
	switch {
	case c.NoWake && c.Wake != nil:
		return out, spec.InField("wake", fmt.Errorf("%w: both wake and no_wake are given: give one of them", spec.ErrInvalid))
	case c.NoWake:
		out.Wake = &spec.Timer{}
	case c.Wake != nil && c.Wake.At.IsZero():
		return out, spec.InField("wake.at", fmt.Errorf("%w: wake has no at, the time of the first wake, as 2026-11-22T13:25:42Z: to take a timer away give no_wake", spec.ErrInvalid))
	}
	switch {
	case c.NoRotate && c.Rotate != nil:
		return out, spec.InField("rotate", fmt.Errorf("%w: both rotate and no_rotate are given: give one of them", spec.ErrInvalid))
	case c.NoRotate:
		out.Rotate = &spec.Rotation{}
	case c.Rotate != nil && c.Rotate.To == "":
		return out, spec.InField("rotate.to", fmt.Errorf("%w: rotate has no to, the snapshot to begin anew from: to take a rotation away give no_rotate", spec.ErrInvalid))
	}
	return out, nil
}

// Sleep is POST /v1/sandboxes/NAME/sleep.
type Sleep struct {
	Hooks spec.HookPolicy `json:"hooks,omitempty"`
	// Durable also shares the sandbox with the other hosts of the server's cluster, and waits until they can wake it.
	Durable bool `json:"durable,omitempty"`
}

// Migrate is POST /v1/sandboxes/NAME/migrate.
type Migrate struct {
	// To is the name of a host of the server's cluster.
	To    string          `json:"to"`
	Hooks spec.HookPolicy `json:"hooks,omitempty"`
}

// Stop is POST /v1/sandboxes/NAME/stop.
type Stop struct {
	// Kill ends it at once, like a power cut.
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
	// Snapshot is an id, or its beginning.
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

// Exec is POST /v1/sandboxes/NAME/exec. Without user, cwd and env, those of the sandbox's image apply.
type Exec struct {
	Command []string `json:"command"`
	User    string   `json:"user,omitempty"`
	Cwd     string   `json:"cwd,omitempty"`
	// Env are variables, KEY=VALUE.
	Env []string `json:"env,omitempty"`
	// Stdin is base64, and at most MaxStdin bytes.
	Stdin []byte `json:"stdin,omitempty"`
	// TimeoutSeconds is after how long the command is killed: 1 to MaxExecSeconds; 0 is DefaultExecSeconds.
	TimeoutSeconds int `json:"timeout_seconds,omitempty"`
}

// Executed is the answer to Exec. A command that failed has this answer as well.
type Executed struct {
	// ExitCode is the command's as a shell gives it: 128 + n when signal n ended it, 126 and 127 when it could not
	// start.
	ExitCode int  `json:"exit_code"`
	Signal   int  `json:"signal,omitempty"`
	TimedOut bool `json:"timed_out,omitempty"`
	// NotStarted is why the command could not be started.
	NotStarted string `json:"not_started,omitempty"`
	// Stdout and Stderr are base64, at most MaxOutput bytes each; Truncated reports that there was more.
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

// Tags is POST /v1/snapshots/ID/tags: they replace its tags.
type Tags struct {
	Tags []string `json:"tags"`
}

// Flows is GET /v1/sandboxes/NAME/flows: what `drowse policy flows -o json` prints, the newest MaxFlows.
type Flows struct {
	Flows []netpolicy.FlowRecord `json:"flows"`
	// Truncated reports that there were more.
	Truncated bool `json:"truncated,omitempty"`
}

// Image is the part of an image's record that a client needs; the answer has all of the record.
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
	// Problems are unreadable images.
	Problems []string `json:"problems,omitempty"`
}

// Prune is POST /v1/prune.
type Prune struct {
	DryRun bool `json:"dry_run,omitempty"`
}

// Is is GET /v1/version.
type Is struct {
	// Version is the program's version, and API that of the paths.
	Version string `json:"version"`
	API     int    `json:"api"`
	// Scope is "read" if the caller may only read, else "write". Scopes are all that it has.
	Scope  string   `json:"scope"`
	Scopes []string `json:"scopes"`
	// Owner is whose sandboxes the caller reaches; empty is all.
	Owner string `json:"owner,omitempty"`
}

// Host is GET /v1/host.
type Host struct {
	spec.Capacity
	// Sandboxes counts them by status. Problems say why some are missing.
	Sandboxes map[records.Status]int `json:"sandboxes"`
	Problems  []string               `json:"problems,omitempty"`
	// Resolvers are the host's name servers, for the dns of policies.
	Resolvers []netip.AddrPort `json:"resolvers"`
}

// Health is GET /healthz and /readyz. The status of the answer is 200, or 503 if a check has failed.
type Health struct {
	OK     bool    `json:"ok"`
	Checks []Check `json:"checks"`
}

// Check is the result of one check.
type Check struct {
	Name string `json:"name"`
	OK   bool   `json:"ok"`
	// Problem is why it failed; only callers with the read scope get it.
	Problem string `json:"problem,omitempty"`
}
