package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
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
	// Asked is what of Expires and Wake the guest has asked for itself: spec.Self.
	Asked Asked `json:"asked,omitzero"`
}

// Limits of a Metadata.
const (
	MaxMetadataOwner   = 128
	MaxMetadataPurpose = 1024
	MaxMetadataTags    = 32
	MaxMetadataTag     = 64
	// maxMetadata bounds the file, in bytes.
	maxMetadata = 64 << 10
)

// metadataVersion is counted up by incompatible changes of the file.
const metadataVersion = 1

const (
	metadataFile = "sandbox.json"
	metadataNew  = ".sandbox.json.new"
	metadataLock = "sandbox.lock"
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
	if err := l.EffectiveClass().Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrMetadata, err)
	}
	if err := l.Keep.Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrMetadata, err)
	}
	if err := l.Persist.Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrMetadata, err)
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
	if err := errors.Join(l.Wake.check(), l.Rotate.check()); err != nil {
		return err
	}
	if y := l.Expires.Year(); !l.Expires.IsZero() && (y < 1970 || y > 2200) {
		return fmt.Errorf("%w: it expires in the year %d: use one before 2200", ErrMetadata, y)
	}
	return nil
}

// metadataDoc is the file.
type metadataDoc struct {
	Version int `json:"version"`
	Metadata
}

// Metadata returns a sandbox's metadata. One that cannot be read is ErrMetadata: nothing is removed then for what it
// says.
func (s *Store) Metadata(name string) (Metadata, error) {
	if !spec.ValidName(name) {
		return Metadata{}, fmt.Errorf("%w: %q is not the name of a VM", spec.ErrNotFound, name)
	}
	root, err := os.OpenRoot(s.VMDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return Metadata{}, fmt.Errorf("%w: %s: see `drowse ps -a`", spec.ErrNotFound, name)
	}
	if err != nil {
		return Metadata{}, fmt.Errorf("reading the metadata of %s: %w", name, err)
	}
	defer root.Close()
	return readMetadata(root, name)
}

func readMetadata(root *os.Root, name string) (Metadata, error) {
	f, err := root.Open(metadataFile)
	if errors.Is(err, fs.ErrNotExist) {
		return Metadata{}, nil
	}
	if err != nil {
		return Metadata{}, fmt.Errorf("reading the metadata of %s: %w", name, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxMetadata+1))
	if err != nil {
		return Metadata{}, fmt.Errorf("reading the metadata of %s: %w", name, err)
	}
	l, err := parseMetadata(data)
	if err != nil {
		return Metadata{}, fmt.Errorf("reading the metadata of %s: %w: write it anew with `drowse update %s --reset`", name, err, name)
	}
	return l, nil
}

func parseMetadata(data []byte) (Metadata, error) {
	if len(data) > maxMetadata {
		return Metadata{}, fmt.Errorf("%w: it has more than %d bytes", ErrMetadata, maxMetadata)
	}
	var doc metadataDoc
	d := json.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(&doc); err != nil {
		return Metadata{}, fmt.Errorf("%w: %w: it was written by another version, or is damaged", ErrMetadata, err)
	}
	if doc.Version != metadataVersion {
		return Metadata{}, fmt.Errorf("%w: version %d, this build reads %d", ErrMetadata, doc.Version, metadataVersion)
	}
	return doc.Metadata, doc.Check()
}

// SetMetadata changes a sandbox's metadata: change gets what it is and says what it is to be; an error of it changes
// nothing and is returned. A metadata that cannot be read is given as the zero Metadata, with its error. Changes by
// several processes come one after another, and each is on disk when SetMetadata returns. The sandbox may run, and may
// be renamed meanwhile.
func (s *Store) SetMetadata(ctx context.Context, name string, change func(l *Metadata, unreadable error) error) (Metadata, error) {
	return s.setMetadata(ctx, name, change, func(r *Record, before, l Metadata, unreadable error) { s.tellMetadata(ctx, r, before, l, unreadable) })
}

// setMetadata is SetMetadata that calls told, with the metadata locked, when it is changed.
func (s *Store) setMetadata(ctx context.Context, name string, change func(*Metadata, error) error, told func(r *Record, before, l Metadata, unreadable error)) (Metadata, error) {
	r, err := s.Load(name)
	if err != nil {
		return Metadata{}, err
	}
	// The directory itself, by whatever name: it may be renamed, and another one may get its name.
	root, err := os.OpenRoot(s.VMDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return Metadata{}, fmt.Errorf("%w: %s: see `drowse ps -a`", spec.ErrNotFound, name)
	}
	if err != nil {
		return Metadata{}, fmt.Errorf("changing the metadata of %s: %w", name, err)
	}
	defer root.Close()
	unlock, err := lockMetadata(ctx, root)
	if err != nil {
		return Metadata{}, fmt.Errorf("changing the metadata of %s: %w", name, err)
	}
	defer unlock()
	l, rerr := readMetadata(root, name)
	before := l
	if err := change(&l, rerr); err != nil {
		return Metadata{}, err
	}
	l.Tags = slices.Compact(slices.Sorted(slices.Values(l.Tags)))
	l.Expires = l.Expires.UTC().Truncate(time.Second)
	l.Wake.At = l.Wake.At.UTC().Truncate(time.Millisecond)
	l.Rotate.At = l.Rotate.At.UTC().Truncate(time.Millisecond)
	if l.Rotate.To != before.Rotate.To {
		// A sweep either sees what is kept now, or is over.
		release, err := s.Share(ctx)
		if err != nil {
			return Metadata{}, err
		}
		defer func() { _ = release() }()
		if err := s.checkRotation(r, &l.Rotate); err != nil {
			return Metadata{}, err
		}
	}
	if err := l.Check(); err != nil {
		return Metadata{}, err
	}
	err = writeMetadata(root, l)
	if errors.Is(err, fs.ErrNotExist) {
		return Metadata{}, fmt.Errorf("changing the metadata of %s: %w: it has just been removed", name, spec.ErrNotFound)
	}
	if err != nil {
		return Metadata{}, fmt.Errorf("changing the metadata of %s: %w", name, err)
	}
	told(r, before, l, rerr)
	return l, nil
}

// TellExpired writes the event of a sandbox's expiry, once for each time at which it has expired. It does nothing for
// others.
func (s *Store) TellExpired(ctx context.Context, name string) error {
	var e events.Event
	_, err := s.setMetadata(ctx, name, func(l *Metadata, unreadable error) error {
		if unreadable != nil || !lifetime.Expired(l.Expires, time.Now()) || l.ExpiryTold.Equal(l.Expires) {
			return ErrNothingToTell
		}
		l.ExpiryTold = l.Expires.UTC().Truncate(time.Second) // as the other is kept
		return nil
	}, func(r *Record, _, l Metadata, _ error) {
		e = s.Event(events.WithCause(ctx, events.Expiry), r, events.Expired)
		e.Details.Expires = l.Expires
	})
	if err == nil {
		// Not with the metadata locked, which a hook may want to change.
		s.Announce(ctx, e)
	}
	return nothing(err)
}

// nothing is nil if there was nothing to tell of.
func nothing(err error) error {
	if errors.Is(err, ErrNothingToTell) || errors.Is(err, spec.ErrNotFound) {
		return nil
	}
	return err
}

// ErrNothingToTell ends a change of metadata that is none.
var ErrNothingToTell = errors.New("there is nothing to tell of")

// tellMetadata tells of a changed metadata.
func (s *Store) tellMetadata(ctx context.Context, r *Record, before, l Metadata, unreadable error) {
	before.Asked = l.Asked // who has asked for it is no change of what it says
	if unreadable == nil && before.equal(l) {
		return
	}
	e := s.Event(ctx, r, events.Updated)
	if same := before; unreadable == nil {
		same.Expires = l.Expires
		if same.equal(l) && !before.Expires.IsZero() && (l.Expires.IsZero() || l.Expires.After(before.Expires)) {
			e.Type = events.Extended
		}
	}
	e.Details.Expires = l.Expires
	s.Tell(e)
}

// equal says whether two metadata say the same.
func (l Metadata) equal(m Metadata) bool {
	a, aerr := json.Marshal(l)
	b, berr := json.Marshal(m)
	return aerr == nil && berr == nil && string(a) == string(b)
}

// lockMetadata serialises those who change metadata. Nobody has the lock for longer than a change takes.
func lockMetadata(ctx context.Context, root *os.Root) (unlock func(), err error) {
	f, err := root.OpenFile(metadataLock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := osfile.Lock(ctx, f, osfile.Exclusive); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// writeMetadata writes as osfile.WriteFile does, but by the open directory: its VM may get another name meanwhile.
func writeMetadata(root *os.Root, l Metadata) error {
	data, err := json.MarshalIndent(metadataDoc{metadataVersion, l}, "", "  ")
	if err != nil {
		return err
	}
	f, err := root.OpenFile(metadataNew, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := root.Rename(metadataNew, metadataFile); err != nil {
		return err
	}
	d, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// beginMetadata gives a new VM its metadata, or takes away what a killed command has left in its directory. The VM's
// lock is held, and there is no record yet.
func (s *Store) beginMetadata(r *Record) error {
	root, err := os.OpenRoot(s.VMDir(r.Spec.Name))
	if err != nil {
		return fmt.Errorf("making VM %s: %w", r.Spec.Name, err)
	}
	defer root.Close()
	if r.metadata == nil {
		err = root.Remove(metadataFile)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
	} else {
		err = writeMetadata(root, *r.metadata)
	}
	if err != nil {
		return fmt.Errorf("making VM %s: %w", r.Spec.Name, err)
	}
	return nil
}

// SetMetadata gives a VM that is yet to be made its metadata.
func (r *Record) SetMetadata(l *Metadata) error {
	if l == nil {
		return nil
	}
	own := *l
	own.Tags, own.Persist = slices.Compact(slices.Sorted(slices.Values(l.Tags))), l.Persist.Clone()
	own.Expires, own.ExpiryTold, own.Asked = l.Expires.UTC().Truncate(time.Second), time.Time{}, Asked{}
	own.Wake.At = l.Wake.At.UTC().Truncate(time.Millisecond)
	if own.Rotate != (Rotation{}) {
		return fmt.Errorf("%w: it has no snapshot yet to begin anew from: update it once it has one", ErrMetadata)
	}
	if err := own.Check(); err != nil {
		return err
	}
	if own.Class == lifetime.Ephemeral && r.Spec.Idle.SleepSeconds > 0 {
		return fmt.Errorf("%w: an ephemeral sandbox does not sleep: give it a time of expiry instead of an idle time, or another class", ErrMetadata)
	}
	r.metadata = &own
	return nil
}

// lasts is what counts of a VM for how long it and its sleeps last.
func (s *Store) lasts(r *Record) lifetime.Sandbox {
	l, err := s.Metadata(r.Spec.Name)
	out := lifetime.Sandbox{
		ID: r.ID, Name: r.Spec.Name, Class: l.EffectiveClass(), Keep: l.Keep, Expires: l.Expires,
		Running: r.Phase == Running || r.Phase == Starting, Ended: r.Phase == Stopped || r.Phase == Crashed,
		Unknown: err != nil,
	}
	for _, id := range []string{r.Snapshot, r.Previous, r.Base, l.Rotate.To} {
		if id != "" {
			out.Needs = append(out.Needs, id)
		}
	}
	return out
}

// How long a guest's fork may take. Variables, so that tests need not wait as long.
var (
	// selfForkBegin is until somebody has begun with it: a request that is older is of nobody who still waits.
	SelfForkBegin = 10 * time.Second
	// selfForkTime is until it is done.
	SelfForkTime = 2 * time.Minute
	// selfForkPoll is how often the VM's process looks for an answer.
	SelfForkPoll = 50 * time.Millisecond
)

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

// selfMetadataTime bounds the wait for metadata that somebody else changes.
const selfMetadataTime = 10 * time.Second

// SetSelf changes metadata for its guest.
func (s *Store) SetSelf(ctx context.Context, name string, change func(*Metadata) error) error {
	ctx, cancel := context.WithTimeout(events.WithCause(ctx, events.Guest), selfMetadataTime)
	defer cancel()
	_, err := s.SetMetadata(ctx, name, func(l *Metadata, unreadable error) error {
		if unreadable != nil {
			return unreadable
		}
		return change(l)
	})
	if errors.Is(err, ErrNothingToTell) {
		return nil
	}
	return err
}
