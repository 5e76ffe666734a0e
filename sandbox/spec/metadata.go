package spec

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// Metadata says who owns a sandbox and how long it lasts. It is kept beside the record of its VM and can change
// whether the VM runs or not. A VM without metadata has the zero Metadata: a workspace without an owner that never
// expires.
type Metadata struct {
	// Class is ephemeral, resumable or workspace; empty is workspace.
	Class lifetime.Class `json:"class,omitempty"`
	// Owner is at most MaxMetadataOwner bytes, Purpose MaxMetadataPurpose: one line of printable characters.
	Owner   string `json:"owner,omitempty"`
	Purpose string `json:"purpose,omitempty"`
	// Tags are at most MaxMetadataTags words of at most MaxMetadataTag bytes. They serve to find sandboxes. The
	// tags of network policies are in the Spec.
	Tags []string `json:"tags,omitempty"`
	// Expires is when the sandbox expires, by the host's clock; zero is never.
	Expires time.Time `json:"expires,omitzero"`
	// Keep says which of its sleeps are kept.
	Keep lifetime.Keep `json:"keep,omitzero"`
	// Wake is when the sandbox is woken; the zero value is never.
	Wake Timer `json:"wake,omitzero"`
	// Rotate says at which wakes the sandbox starts afresh, and from which snapshot; the zero value is never.
	Rotate Rotation `json:"rotate,omitzero"`
	// Persist says what does not persist over the sandbox's sleeps.
	Persist lifetime.Persist `json:"persist,omitzero"`
	// Gateway says whom the gateway lets in; the zero value, only requests with the sandbox's token.
	Gateway Gateway `json:"gateway,omitzero"`
	// E2B is set in sandboxes of clients of E2B's wire.
	E2B *E2B `json:"e2b,omitempty"`
	// ExpiryTold is the time of expiry for which an event was written: Store.TellExpired.
	ExpiryTold time.Time `json:"expiry_told,omitzero"`
	// Asked is the part of Expires and Wake that the guest has asked for itself: Self.
	Asked Asked `json:"asked,omitzero"`
}

// TemplateOwner owns the VMs that boot for templates, while these are made. It has no limits.
const TemplateOwner = "drowse template"

// Limits of a Metadata.
const (
	MaxMetadataOwner   = 128
	MaxMetadataPurpose = 1024
	MaxMetadataTags    = 32
	MaxMetadataTag     = 64
)

var (
	// ErrMetadata means that metadata of a sandbox is invalid or unreadable.
	ErrMetadata = errors.New("invalid metadata of a sandbox")
	// ErrExpired means that a sandbox has expired.
	ErrExpired = errors.New("the sandbox has expired")
)

// EffectiveClass returns the class; an empty one counts as lifetime.Workspace.
func (l Metadata) EffectiveClass() lifetime.Class {
	if l.Class == "" {
		return lifetime.Workspace
	}
	return l.Class
}

// ForChild returns the metadata of a fork, without what belongs to the parent alone: its timer, its rotation, its open
// ports, and the wake and fork that its guest asked for. An expiry that the guest put off counts for the child as well.
func (l Metadata) ForChild() Metadata {
	l.Wake, l.Rotate, l.Asked.Wake, l.Asked.Fork = Timer{}, Rotation{}, time.Time{}, AskedFork{}
	l.E2B = nil // its clients know the forks that they make
	l.Tags, l.Persist, l.Gateway = slices.Clone(l.Tags), l.Persist.Clone(), l.Gateway.forChild()
	return l
}

// Empty reports whether the metadata is that of a VM without any.
func (l Metadata) Empty() bool {
	return l.Class == "" && l.Owner == "" && l.Purpose == "" && len(l.Tags) == 0 && l.Expires.IsZero() && l.Keep == lifetime.Keep{} && l.Wake == Timer{} && l.Rotate == Rotation{} && l.Persist.Empty() && l.Gateway.Empty() && l.E2B == nil
}

// CheckText returns a kind of error for a text that is too long, or that could mislead a terminal or a log.
func CheckText(kind error, what, text string, limit int) error {
	if len(text) > limit {
		return fmt.Errorf("%w: %s of %d bytes: use %d at most", kind, what, len(text), limit)
	}
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("%w: %s %q: use printable characters in one line", kind, what, text)
	}
	return nil
}

// CheckTags returns a kind of error for tags that are more than a limit, too long, empty or unprintable.
func CheckTags(kind error, tags []string, limit int) error {
	if len(tags) > limit {
		return fmt.Errorf("%w: %d tags: use %d at most", kind, len(tags), limit)
	}
	for _, t := range tags {
		if t == "" || strings.ContainsAny(t, ", ") {
			return fmt.Errorf("%w: tag %q: use a word without spaces and commas, as team or team=web", kind, t)
		}
		if err := CheckText(kind, "tag", t, MaxMetadataTag); err != nil {
			return err
		}
	}
	return nil
}

// Check returns an ErrMetadata for values that are out of bounds.
func (l Metadata) Check() error {
	for _, err := range []error{InField("class", l.EffectiveClass().Check()), InField("keep", l.Keep.Check()), InField("persist", l.Persist.Check())} {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrMetadata, err)
		}
	}
	var expires error
	if y := l.Expires.Year(); !l.Expires.IsZero() && (y < 1970 || y > 2200) {
		expires = fmt.Errorf("%w: it expires in the year %d: use one before 2200", ErrMetadata, y)
	}
	return errors.Join(
		InField("owner", CheckText(ErrMetadata, "owner", l.Owner, MaxMetadataOwner)), InField("purpose", CheckText(ErrMetadata, "purpose", l.Purpose, MaxMetadataPurpose)),
		InField("tags", CheckTags(ErrMetadata, l.Tags, MaxMetadataTags)), InField("wake", l.Wake.check()), InField("rotate", l.Rotate.Check()),
		InField("gateway", l.Gateway.check()), InField("e2b", l.E2B.check()), InField("expires", expires),
	)
}

// Equal reports whether two metadata are the same.
func (l Metadata) Equal(m Metadata) bool {
	a, aerr := json.Marshal(l)
	b, berr := json.Marshal(m)
	return aerr == nil && berr == nil && string(a) == string(b)
}

// AskedFork is a fork that a guest has asked for. A VM's own process starts no other VMs. So it writes the request
// into the metadata, like a timer, and the process that serves the store makes the fork.
type AskedFork struct {
	// ID is the id of the request, and At its time.
	ID string    `json:"id"`
	At time.Time `json:"at"`
	// Begun reports that a process makes the fork. That process then sets Child, or Error if it failed.
	Begun bool   `json:"begun,omitempty"`
	Child string `json:"child,omitempty"`
	Error string `json:"error,omitempty"`
}

// Wanted reports whether the fork has not begun and its request is fresh enough that the guest still waits.
func (a AskedFork) Wanted(now time.Time) bool {
	age := now.Sub(a.At)
	return a.ID != "" && !a.Begun && age < SelfForkBegin && age > -SelfForkBegin
}

// Asked is the part of a sandbox's Metadata that its guest has asked for. The guest can change this part, and
// nothing that the owner has set.
type Asked struct {
	// Wake is the time of the timer that the guest asked for. The Metadata's timer is the guest's while it has
	// this time.
	Wake time.Time `json:"wake,omitzero"`
	// Expires is the expiry that the guest asked for, and From the one that its owner had set. They count while
	// the Metadata has this expiry.
	Expires time.Time `json:"expires,omitzero"`
	From    time.Time `json:"from,omitzero"`
	// Fork is the fork that the guest asked for. It stays until the guest has its result.
	Fork AskedFork `json:"fork,omitzero"`
}

// Timer says when a sandbox is woken. It is kept in the Metadata. A supervisor wakes the sandbox, to within a
// second. A timer that came due while no supervisor ran fires once when one runs again.
type Timer struct {
	// At is the next time, by the host's clock; zero is never.
	At time.Time `json:"at,omitzero"`
	// Every is the number of seconds between wakes, MinTimer to lifetime.MaxSeconds; 0 is one wake only.
	Every int64 `json:"every_seconds,omitempty"`
}

// MinTimer is the shortest time between two wakes by a timer, in seconds.
const MinTimer = 1

func (t Timer) check() error {
	switch y := t.At.Year(); {
	case t.Every < 0 || t.Every > lifetime.MaxSeconds:
		return fmt.Errorf("%w: it is woken every %d s: use %d to %d, or 0 for once", ErrMetadata, t.Every, MinTimer, lifetime.MaxSeconds)
	case t.At.IsZero() && t.Every > 0:
		return fmt.Errorf("%w: it is woken every %d s, and it is not said when first", ErrMetadata, t.Every)
	case !t.At.IsZero() && (y < 1970 || y > 2200):
		return fmt.Errorf("%w: it is woken in the year %d: use one before 2200", ErrMetadata, y)
	}
	return nil
}

// Due reports whether the timer is due.
func (t Timer) Due(now time.Time) bool { return !t.At.IsZero() && !now.Before(t.At) }

// After returns the timer after it has fired. It skips the times that were missed.
func (t Timer) After(now time.Time) Timer {
	if t.Every == 0 {
		return Timer{}
	}
	step := time.Duration(t.Every) * time.Second
	if !now.Before(t.At) {
		t.At = t.At.Add((now.Sub(t.At)/step + 1) * step)
	}
	return t
}

// Rotation makes a sandbox start afresh, at its wakes, from a snapshot that is known to be good. The work since
// then is left: its last sleep is kept until the next one, as by Store.RestoreTo. The Metadata holds the rotation,
// so no process has to watch the time, and a rotation never interrupts a running sandbox. The zero value is none.
type Rotation struct {
	// To is the snapshot, one of the sandbox's own with memory. It is kept while it is named here.
	To string `json:"to,omitempty"`
	// At is the first time, by the host's clock: the first wake at or after it starts afresh, and later wakes do
	// not. The zero time means every wake.
	At time.Time `json:"at,omitzero"`
	// Every is the number of seconds until a wake starts afresh again, MinTimer to lifetime.MaxSeconds; 0 is once.
	// It needs At.
	Every int64 `json:"every_seconds,omitempty"`
}

// timer returns the times of the rotation as a Timer.
func (r Rotation) timer() Timer { return Timer{At: r.At, Every: r.Every} }

// Check returns an error for values that are out of bounds.
func (r Rotation) Check() error {
	if r == (Rotation{}) {
		return nil
	}
	if r.To == "" {
		return fmt.Errorf("%w: a rotation names no snapshot to begin anew from", ErrMetadata)
	}
	if len(r.To) > MaxSnapshotID {
		return fmt.Errorf("%w: a rotation to snapshot %.64q: use the id of one of its snapshots", ErrMetadata, r.To)
	}
	if err := r.timer().check(); err != nil {
		return fmt.Errorf("when it begins anew: %w", err)
	}
	return nil
}

// MaxSnapshotID is the most bytes of a snapshot's id in a request.
const MaxSnapshotID = 64

// Due reports whether a wake at now starts afresh.
func (r Rotation) Due(now time.Time) bool {
	return r.To != "" && (r.At.IsZero() || r.timer().Due(now))
}

// After returns the rotation after a wake has started afresh.
func (r Rotation) After(now time.Time) Rotation {
	if r.At.IsZero() {
		return r
	}
	next := r.timer().After(now)
	if next.At.IsZero() {
		return Rotation{}
	}
	r.At = next.At
	return r
}

// SelfForkBegin is how long the store's process has to begin a fork that a guest asked for. The guest no longer
// waits for an older request. It is a variable so that tests can shorten it.
var SelfForkBegin = 10 * time.Second
