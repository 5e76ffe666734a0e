package events

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Version is the version of the schema. Incompatible changes increase it; new types and new fields do not.
const Version = 1

// Type is the kind of an event.
type Type string

// The types.
const (
	Created     Type = "sandbox.created" // it booted for the first time, or is a clone or a fork and runs
	Started     Type = "sandbox.started" // it booted again, with its disk unchanged
	Woken       Type = "sandbox.woken"
	Slept       Type = "sandbox.slept"
	Snapshotted Type = "sandbox.snapshotted"
	Forked      Type = "sandbox.forked" // children were made from it
	Restored    Type = "sandbox.restored"
	Renamed     Type = "sandbox.renamed"
	Updated     Type = "sandbox.updated"
	Extended    Type = "sandbox.extended"
	Expired     Type = "sandbox.expired"
	Removed     Type = "sandbox.removed"
	Stopped     Type = "sandbox.stopped"
	Crashed     Type = "sandbox.crashed"
	HookFailed  Type = "sandbox.hook_failed" // in the guest
	TimerFired  Type = "sandbox.timer_fired"
	Promoted    Type = "sandbox.promoted" // a part of it was copied to the host
	// PersistFailed: a promotion or a drop failed, or it has more data than may persist.
	PersistFailed Type = "sandbox.persist_failed"

	// SecretsFailed: after a wake or a boot, secrets have no value.
	SecretsFailed Type = "sandbox.secrets_failed"

	HostHookFailed Type = "sandbox.host_hook_failed"

	PolicyChanged Type = "policy.changed"

	Imported Type = "snapshot.imported" // from a stream; it belongs to no sandbox

	// Sleeping and SleepFailed are in no file. Hooks of the host get Sleeping before a sleep, and SleepFailed if
	// the sleep fails.
	Sleeping    Type = "sandbox.sleeping"
	SleepFailed Type = "sandbox.sleep_failed"

	// Lost is in no file. A reader gets it in place of events that were deleted before the reader got them.
	Lost Type = "events.lost"
)

// Types are all types that a reader may get.
var Types = []Type{
	Created, Started, Woken, Slept, Snapshotted, Forked, Restored, Renamed, Updated, Extended, Expired, Removed, Stopped, Crashed,
	HookFailed, HostHookFailed, TimerFired, Promoted, PersistFailed, SecretsFailed, PolicyChanged, Imported, Lost,
}

// Cause is the person or program on whose behalf something happened, or the reason for it.
type Cause string

// The causes.
const (
	CLI        Cause = "cli"
	API        Cause = "api"
	Library    Cause = "library" // a program that uses package sandbox, unless it sets another cause
	Guest      Cause = "guest"   // a program in the sandbox
	Idle       Cause = "idle"
	Packet     Cause = "packet"
	Connection Cause = "connection"
	Timer      Cause = "timer"
	Expiry     Cause = "expiry"
	Killed     Cause = "killed"   // its process was killed, or told to end
	Rotation   Cause = "rotation" // it starts afresh from a good snapshot
	Quota      Cause = "quota"    // its disk quota is used up
)

var causes = []Cause{CLI, API, Library, Guest, Idle, Packet, Connection, Timer, Expiry, Killed, Rotation, Quota}

// ErrInvalid means that a request for events is invalid.
var ErrInvalid = errors.New("invalid request for events")

// inParam is an error that a parameter has caused: package spec reads it by its method.
type inParam struct {
	name string
	error
}

func (e inParam) FieldName() string { return e.name }
func (e inParam) Unwrap() error     { return e.error }

// Check returns an error unless c is one of the causes.
func (c Cause) Check() error {
	if !slices.Contains(causes, c) {
		return fmt.Errorf("%w: cause %q", ErrInvalid, string(c))
	}
	return nil
}

type causeKey struct{}

// WithCause returns a context whose actions have the cause c in events.
func WithCause(ctx context.Context, c Cause) context.Context {
	return context.WithValue(ctx, causeKey{}, c)
}

// CauseOf returns the cause of actions with a context: Library if none was set.
func CauseOf(ctx context.Context) Cause {
	if c, ok := ctx.Value(causeKey{}).(Cause); ok {
		return c
	}
	return Library
}

// Event is one thing that happened. Events contain no commands, output, environment, secrets or addresses.
type Event struct {
	Version int `json:"version"`
	// Cursor is the event's place in its journal: larger than all earlier ones, and below 2^53.
	Cursor uint64 `json:"cursor"`
	// ID is 32 hex digits, and tells an event that is delivered twice. That of Lost is empty.
	ID   string    `json:"id,omitempty"`
	Time time.Time `json:"time"`
	Type Type      `json:"type"`
	// Sandbox is the name at that time. SandboxID stays the same when it is renamed.
	Sandbox   string `json:"sandbox,omitempty"`
	SandboxID string `json:"sandbox_id,omitempty"`
	// Owner and Tags are those in its metadata at that time. Events of ephemeral sandboxes have none.
	Owner   string   `json:"owner,omitempty"`
	Tags    []string `json:"tags,omitempty"`
	Cause   Cause    `json:"cause,omitempty"`
	Details Details  `json:"details,omitzero"`
}

// Details say more for some types; docs/reference/events.md says which.
type Details struct {
	Snapshot string `json:"snapshot,omitempty"`
	// Template says that Snapshot is a template. If a new VM has booted, Booted says why.
	Template bool   `json:"template,omitempty"`
	Booted   string `json:"booted,omitempty"`
	// Bytes is the size of the snapshot on disk, or what a removal freed.
	Bytes int64 `json:"bytes,omitempty"`
	// Milliseconds is the duration; for a sleep or a snapshot, how long the guest stood still.
	Milliseconds float64 `json:"milliseconds,omitempty"`
	// From is the name before, and Parent the sandbox that it was forked from.
	From     string   `json:"from,omitempty"`
	Parent   string   `json:"parent,omitempty"`
	Children []string `json:"children,omitempty"`
	// Dropped are the fields in the stream of an imported snapshot that were not taken over.
	Dropped []string  `json:"dropped,omitempty"`
	Expires time.Time `json:"expires,omitzero"`
	// Reason is how a guest ended, or the error code of a failed sleep. Hook and Event name the hook that failed,
	// and Problem says how. Path is the place of a copy on the host.
	Reason  string `json:"reason,omitempty"`
	Hook    string `json:"hook,omitempty"`
	Event   string `json:"event,omitempty"`
	Problem string `json:"problem,omitempty"`
	// Path is where a copy is, on the host.
	Path string `json:"path,omitempty"`
	// After and Before are the cursors between which events were Lost. Reset reports that the journal ends before
	// the reader's cursor: another journal has replaced it.
	After  uint64 `json:"after,omitempty"`
	Before uint64 `json:"before,omitempty"`
	Reset  bool   `json:"reset,omitempty"`
}

// Bounds of an event. Longer values are cut.
const (
	maxText     = 1 << 10 // bytes
	maxTags     = 96
	maxChildren = 64
	// MaxLine is the longest line of a journal, in bytes, with its end.
	MaxLine = 16 << 10
)

// bound cuts values that are too long.
func (e *Event) bound() {
	for _, s := range []*string{
		(*string)(&e.Type), &e.Sandbox, &e.SandboxID, &e.Owner, (*string)(&e.Cause), &e.Details.Snapshot, &e.Details.From, &e.Details.Parent,
		&e.Details.Booted, &e.Details.Reason, &e.Details.Hook, &e.Details.Event, &e.Details.Problem, &e.Details.Path,
	} {
		*s = clip(*s, maxText)
	}
	if len(e.Tags) > maxTags {
		e.Tags = e.Tags[:maxTags]
	}
	if len(e.Details.Children) > maxChildren {
		e.Details.Children = e.Details.Children[:maxChildren]
	}
}

// clip cuts a text at a rune, and replaces invalid UTF-8 in it.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// Filter selects events. The zero value selects all. Lost passes every filter.
type Filter struct {
	// Types are the selected types; an entry that ends with ".*" selects all types that begin so.
	Types []string
	// Sandbox is a name or an id.
	Sandbox, Owner string
	// Tags must all be in an event.
	Tags []string
}

// Check returns an error for a type that does not exist.
func (f Filter) Check() error {
	for _, want := range f.Types {
		if !slices.ContainsFunc(Types, func(t Type) bool { return typeMatches(want, t) }) {
			return inParam{"type", fmt.Errorf("%w: there are no events of type %q: use one as %s, or sandbox.*", ErrInvalid, want, Slept)}
		}
	}
	return nil
}

func typeMatches(want string, t Type) bool {
	if prefix, ok := strings.CutSuffix(want, "*"); ok && strings.HasSuffix(prefix, ".") {
		return strings.HasPrefix(string(t), prefix)
	}
	return want == string(t)
}

// Match reports whether an event passes.
func (f Filter) Match(e Event) bool {
	switch {
	case e.Type == Lost:
		return true
	case len(f.Types) > 0 && !slices.ContainsFunc(f.Types, func(want string) bool { return typeMatches(want, e.Type) }):
		return false
	case f.Sandbox != "" && f.Sandbox != e.Sandbox && f.Sandbox != e.SandboxID && f.Sandbox != e.Details.From:
		return false
	case f.Owner != "" && f.Owner != e.Owner:
		return false
	}
	for _, t := range f.Tags {
		if !slices.Contains(e.Tags, t) {
			return false
		}
	}
	return true
}
