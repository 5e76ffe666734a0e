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

// Version is that of the schema. It is counted up by incompatible changes; new types and new fields are none.
const Version = 1

// Type says what has happened.
type Type string

// The types.
const (
	Created     Type = "sandbox.created" // it has booted for the first time, or is a clone or a fork and runs
	Started     Type = "sandbox.started" // it has booted again, with its disk as it was
	Woken       Type = "sandbox.woken"
	Slept       Type = "sandbox.slept"
	Snapshotted Type = "sandbox.snapshotted"
	Forked      Type = "sandbox.forked" // children were made of it
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
	// PersistFailed: something could not be promoted or dropped, or it has more data than may persist.
	PersistFailed Type = "sandbox.persist_failed"

	HostHookFailed Type = "sandbox.host_hook_failed"

	PolicyChanged Type = "policy.changed"

	Imported Type = "snapshot.imported" // from a stream; it is of no sandbox

	// Sleeping and SleepFailed are in no file: hooks of the host get them before a sleep, and when it has not come
	// about.
	Sleeping    Type = "sandbox.sleeping"
	SleepFailed Type = "sandbox.sleep_failed"

	// Lost is in no file: a reader gets it in place of events that were deleted before it had read them.
	Lost Type = "events.lost"
)

// Types are all types that a reader may get.
var Types = []Type{
	Created, Started, Woken, Slept, Snapshotted, Forked, Restored, Renamed, Updated, Extended, Expired, Removed, Stopped, Crashed,
	HookFailed, HostHookFailed, TimerFired, Promoted, PersistFailed, PolicyChanged, Imported, Lost,
}

// Cause says who or what has brought it about.
type Cause string

// The causes.
const (
	CLI        Cause = "cli"
	API        Cause = "api"
	Library    Cause = "library" // a program that uses package sandbox, and does not say more
	Guest      Cause = "guest"   // a program in the sandbox
	Idle       Cause = "idle"
	Packet     Cause = "packet"
	Connection Cause = "connection"
	Timer      Cause = "timer"
	Expiry     Cause = "expiry"
	Killed     Cause = "killed"   // its process was killed, or told to end, by whomever
	Rotation   Cause = "rotation" // it begins anew from a snapshot that is known to be good
)

var causes = []Cause{CLI, API, Library, Guest, Idle, Packet, Connection, Timer, Expiry, Killed, Rotation}

// ErrInvalid says that events are asked for that there cannot be.
var ErrInvalid = errors.New("invalid request for events")

// Check refuses what is no cause.
func (c Cause) Check() error {
	if !slices.Contains(causes, c) {
		return fmt.Errorf("%w: cause %q", ErrInvalid, string(c))
	}
	return nil
}

type causeKey struct{}

// WithCause has what is done with a context be told of as done by a cause.
func WithCause(ctx context.Context, c Cause) context.Context {
	return context.WithValue(ctx, causeKey{}, c)
}

// CauseOf is the cause of what is done with a context: Library if nobody has said.
func CauseOf(ctx context.Context) Cause {
	if c, ok := ctx.Value(causeKey{}).(Cause); ok {
		return c
	}
	return Library
}

// Event is one thing that has happened. Commands, their output, environment, secrets and addresses are not in events.
type Event struct {
	Version int `json:"version"`
	// Cursor is the event's place in its journal: larger than those of all events before it, and below 2^53.
	Cursor uint64 `json:"cursor"`
	// ID is 32 hex digits, by which an event is known that is delivered twice. That of Lost is empty.
	ID   string    `json:"id,omitempty"`
	Time time.Time `json:"time"`
	Type Type      `json:"type"`
	// Sandbox is the name at that time, and SandboxID what stays when it is renamed.
	Sandbox   string `json:"sandbox,omitempty"`
	SandboxID string `json:"sandbox_id,omitempty"`
	// Owner and Tags are those of its metadata at that time. Events of ephemeral sandboxes have none.
	Owner   string   `json:"owner,omitempty"`
	Tags    []string `json:"tags,omitempty"`
	Cause   Cause    `json:"cause,omitempty"`
	Details Details  `json:"details,omitzero"`
}

// Details say more of some types; docs/reference/events.md has which.
type Details struct {
	Snapshot string `json:"snapshot,omitempty"`
	// Bytes are what the snapshot takes on disk, or what a removal has freed.
	Bytes int64 `json:"bytes,omitempty"`
	// Milliseconds is how long it took; for a sleep or a snapshot, how long the guest stood still.
	Milliseconds float64 `json:"milliseconds,omitempty"`
	// From is the name before, and Parent the sandbox that it is a fork of.
	From     string   `json:"from,omitempty"`
	Parent   string   `json:"parent,omitempty"`
	Children []string `json:"children,omitempty"`
	// Dropped are the fields that the stream of an imported snapshot has and that were not taken over.
	Dropped []string  `json:"dropped,omitempty"`
	Expires time.Time `json:"expires,omitzero"`
	// Reason is how a guest has ended, or the code of why it does not sleep; Hook and Event are which hook has failed,
	// and Problem how.
	Reason  string `json:"reason,omitempty"`
	Hook    string `json:"hook,omitempty"`
	Event   string `json:"event,omitempty"`
	Problem string `json:"problem,omitempty"`
	// Path is where a copy is, on the host.
	Path string `json:"path,omitempty"`
	// After and Before are the cursors between which events were Lost, and Reset that the journal ends before the
	// cursor that the reader has: another one is in its place.
	After  uint64 `json:"after,omitempty"`
	Before uint64 `json:"before,omitempty"`
	Reset  bool   `json:"reset,omitempty"`
}

// Bounds of an event. What is longer is cut.
const (
	maxText     = 1 << 10 // bytes
	maxTags     = 96
	maxChildren = 64
	// MaxLine is the longest line of a journal, in bytes, its end included.
	MaxLine = 16 << 10
)

// bound cuts what is too long.
func (e *Event) bound() {
	for _, s := range []*string{
		(*string)(&e.Type), &e.Sandbox, &e.SandboxID, &e.Owner, (*string)(&e.Cause), &e.Details.Snapshot, &e.Details.From, &e.Details.Parent,
		&e.Details.Reason, &e.Details.Hook, &e.Details.Event, &e.Details.Problem, &e.Details.Path,
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

// clip cuts a text at a rune, and leaves nothing in it that is no text.
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

// Filter chooses events. The zero value is all. Lost passes every filter.
type Filter struct {
	// Types are those of which an event has one; an entry that ends with ".*" stands for all that begin so.
	Types []string
	// Sandbox is a name or an id.
	Sandbox, Owner string
	// Tags are those that an event has all of.
	Tags []string
}

// Check refuses a type that there is none of.
func (f Filter) Check() error {
	for _, want := range f.Types {
		if !slices.ContainsFunc(Types, func(t Type) bool { return typeMatches(want, t) }) {
			return fmt.Errorf("%w: there are no events of type %q: use one as %s, or sandbox.*", ErrInvalid, want, Slept)
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

// Match says whether an event passes.
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
