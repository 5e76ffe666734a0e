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

// Metadata says whose a sandbox is and how long it lasts. It is kept beside the record of its VM and can be changed
// whether that runs or not. A VM without one has the zero Metadata, which counts as a workspace of nobody's that never
// expires.
type Metadata struct {
	// Class is ephemeral, resumable or workspace; empty is workspace.
	Class lifetime.Class `json:"class,omitempty"`
	// Owner is at most MaxMetadataOwner bytes, Purpose MaxMetadataPurpose: printable characters in one line.
	Owner   string `json:"owner,omitempty"`
	Purpose string `json:"purpose,omitempty"`
	// Tags are at most MaxMetadataTags words of at most MaxMetadataTag bytes. They are there to be found by; those that
	// count in network policies are in the Spec.
	Tags []string `json:"tags,omitempty"`
	// Expires is when its time is over, by the host's clock; zero is never.
	Expires time.Time `json:"expires,omitzero"`
	// Keep says which of its sleeps are kept.
	Keep lifetime.Keep `json:"keep,omitzero"`
	// Wake is when it is woken; the zero value is never.
	Wake Timer `json:"wake,omitzero"`
	// Rotate says at which wakes it begins anew, and from which snapshot; the zero value is never.
	Rotate Rotation `json:"rotate,omitzero"`
	// Persist says what of it does not persist over its sleeps.
	Persist lifetime.Persist `json:"persist,omitzero"`
	// ExpiryTold is the time of expiry of which there is an event: Store.TellExpired.
	ExpiryTold time.Time `json:"expiry_told,omitzero"`
	// Asked is what of Expires and Wake the guest has asked for itself: Self.
	Asked Asked `json:"asked,omitzero"`
}

// Limits of a Metadata.
const (
	MaxMetadataOwner   = 128
	MaxMetadataPurpose = 1024
	MaxMetadataTags    = 32
	MaxMetadataTag     = 64
)

var (
	// ErrMetadata says that a sandbox cannot have such metadata, or that the one it has cannot be read.
	ErrMetadata = errors.New("invalid metadata of a sandbox")
	// ErrExpired says that a sandbox's time is over.
	ErrExpired = errors.New("the sandbox has expired")
)

// EffectiveClass is the class, or what an empty one counts as.
func (l Metadata) EffectiveClass() lifetime.Class {
	if l.Class == "" {
		return lifetime.Workspace
	}
	return l.Class
}

// ForChild is the metadata of a fork: without what was said of the one that is forked alone, its timer, its rotation
// and what its guest has asked for. What the guest has put its expiry off by counts for the child as well.
func (l Metadata) ForChild() Metadata {
	l.Wake, l.Rotate, l.Asked.Wake, l.Asked.Fork = Timer{}, Rotation{}, time.Time{}, AskedFork{}
	l.Tags, l.Persist = slices.Clone(l.Tags), l.Persist.Clone()
	return l
}

// Empty says that it is what a VM without one has.
func (l Metadata) Empty() bool {
	return l.Class == "" && l.Owner == "" && l.Purpose == "" && len(l.Tags) == 0 && l.Expires.IsZero() && l.Keep == lifetime.Keep{} && l.Wake == Timer{} && l.Rotate == Rotation{} && l.Persist.Empty()
}

// Check refuses what is out of bounds.
func (l Metadata) Check() error {
	text := func(what, s string, limit int) error {
		if len(s) > limit {
			return fmt.Errorf("%w: %s of %d bytes: use %d at most", ErrMetadata, what, len(s), limit)
		}
		if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return fmt.Errorf("%w: %s %q: use printable characters in one line", ErrMetadata, what, s)
		}
		return nil
	}
	for _, err := range []error{l.EffectiveClass().Check(), l.Keep.Check(), l.Persist.Check()} {
		if err != nil {
			return fmt.Errorf("%w: %w", ErrMetadata, err)
		}
	}
	if err := errors.Join(text("owner", l.Owner, MaxMetadataOwner), text("purpose", l.Purpose, MaxMetadataPurpose)); err != nil {
		return err
	}
	if len(l.Tags) > MaxMetadataTags {
		return fmt.Errorf("%w: %d tags: use %d at most", ErrMetadata, len(l.Tags), MaxMetadataTags)
	}
	for _, t := range l.Tags {
		if t == "" || strings.ContainsAny(t, ", ") {
			return fmt.Errorf("%w: tag %q: use a word without spaces and commas, as team or team=web", ErrMetadata, t)
		}
		if err := text("tag", t, MaxMetadataTag); err != nil {
			return err
		}
	}
	if err := errors.Join(l.Wake.check(), l.Rotate.Check()); err != nil {
		return err
	}
	if y := l.Expires.Year(); !l.Expires.IsZero() && (y < 1970 || y > 2200) {
		return fmt.Errorf("%w: it expires in the year %d: use one before 2200", ErrMetadata, y)
	}
	return nil
}

// Equal says whether two metadata say the same.
func (l Metadata) Equal(m Metadata) bool {
	a, aerr := json.Marshal(l)
	b, berr := json.Marshal(m)
	return aerr == nil && berr == nil && string(a) == string(b)
}

// AskedFork is a fork that a guest has asked for. A VM's own process starts no others, so it is written into the
// metadata, as timers are, and who serves the store makes it.
type AskedFork struct {
	// ID is the request's, and At when it was made.
	ID string    `json:"id"`
	At time.Time `json:"at"`
	// Begun says that somebody is at it, who then says which Child it has become, or why it has not.
	Begun bool   `json:"begun,omitempty"`
	Child string `json:"child,omitempty"`
	Error string `json:"error,omitempty"`
}

// Wanted says that nobody has begun with it, and that somebody waits for it.
func (a AskedFork) Wanted(now time.Time) bool {
	age := now.Sub(a.At)
	return a.ID != "" && !a.Begun && age < SelfForkBegin && age > -SelfForkBegin
}

// Asked is what a guest has asked for that is in its sandbox's Metadata, so that it can change that, and nothing that
// its owner has set.
type Asked struct {
	// Wake is the time of the timer that it has asked for. The Metadata's timer is the guest's as long as it is that
	// one.
	Wake time.Time `json:"wake,omitzero"`
	// Expires is the expiry that it has asked for, and From the one that its owner had set. They count as long as the
	// Metadata expires then.
	Expires time.Time `json:"expires,omitzero"`
	From    time.Time `json:"from,omitzero"`
	// Fork is a fork that it has asked for, until it has been told of it.
	Fork AskedFork `json:"fork,omitzero"`
}

// Timer says when a sandbox is woken. It is kept in its Metadata, and carried out by a supervisor, to within a second;
// one that was due while there was none fires once when there is one again.
type Timer struct {
	// At is the next time, by the host's clock; zero is never.
	At time.Time `json:"at,omitzero"`
	// Every is after how many seconds it is woken again, MinTimer to lifetime.MaxSeconds; 0 is once.
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

// Due says whether it is time.
func (t Timer) Due(now time.Time) bool { return !t.At.IsZero() && !now.Before(t.At) }

// After is the timer once it has fired: what was missed meanwhile is left out.
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

// Rotation has a sandbox begin anew from a snapshot that is known to be good, at its wakes. What it has done since is
// left then: its last sleep is kept until the next one, as by Store.RestoreTo. It is kept in the Metadata, so it needs
// nobody who watches the time, and never interrupts a sandbox that runs. The zero value is none.
type Rotation struct {
	// To is the snapshot, one of the sandbox's own with memory; it is kept for as long as it is named here.
	To string `json:"to,omitempty"`
	// At is from when on, by the host's clock: the first wake at that time or later begins anew, and those after it do
	// not. The zero time is each wake.
	At time.Time `json:"at,omitzero"`
	// Every is after how many seconds a wake begins anew again, MinTimer to lifetime.MaxSeconds; 0 is once. It goes
	// with At.
	Every int64 `json:"every_seconds,omitempty"`
}

// timer is what of it is a time.
func (r Rotation) timer() Timer { return Timer{At: r.At, Every: r.Every} }

// Check refuses what is out of bounds.
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

// MaxSnapshotID bounds what is given for the id of a snapshot, in bytes.
const MaxSnapshotID = 64

// Due says whether a wake now begins anew.
func (r Rotation) Due(now time.Time) bool {
	return r.To != "" && (r.At.IsZero() || r.timer().Due(now))
}

// After is the rotation once a wake has begun anew.
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

// SelfForkBegin is until when somebody has to have begun with a fork that a guest asks for: a request that is older is
// of nobody who still waits. It is a variable, so that tests need not wait as long.
var SelfForkBegin = 10 * time.Second
