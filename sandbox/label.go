package sandbox

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

// Label says whose a sandbox is and how long it lasts. It is kept beside the record of its VM and can be changed
// whether that runs or not. A VM without one has the zero Label, which counts as a workspace of nobody's that never
// expires.
type Label struct {
	// Class is ephemeral, resumable or workspace; empty is workspace.
	Class lifetime.Class `json:"class,omitempty"`
	// Owner is at most MaxLabelOwner bytes, Purpose MaxLabelPurpose: printable characters in one line.
	Owner   string `json:"owner,omitempty"`
	Purpose string `json:"purpose,omitempty"`
	// Tags are at most MaxLabelTags words of at most MaxLabelTag bytes. They are there to be found by; those that count
	// in network policies are in the Spec.
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

// Limits of a Label.
const (
	MaxLabelOwner   = 128
	MaxLabelPurpose = 1024
	MaxLabelTags    = 32
	MaxLabelTag     = 64
	// maxLabel bounds the file, in bytes.
	maxLabel = 64 << 10
)

// labelVersion is counted up by incompatible changes of the file.
const labelVersion = 1

const (
	labelFile = "sandbox.json"
	labelNew  = ".sandbox.json.new"
	labelLock = "sandbox.lock"
)

var (
	// ErrLabel says that a sandbox cannot have such a label, or that the one it has cannot be read.
	ErrLabel = errors.New("invalid label of a sandbox")
	// ErrExpired says that a sandbox's time is over.
	ErrExpired = errors.New("the sandbox has expired")
)

// EffectiveClass is the class, or what an empty one counts as.
func (l Label) EffectiveClass() lifetime.Class {
	if l.Class == "" {
		return lifetime.Workspace
	}
	return l.Class
}

// ForChild is the label of a fork: without what was said of the one that is forked alone, its timer, its rotation and
// what its guest has asked for. What the guest has put its expiry off by counts for the child as well.
func (l Label) ForChild() Label {
	l.Wake, l.Rotate, l.Asked.Wake, l.Asked.Fork = Timer{}, Rotation{}, time.Time{}, AskedFork{}
	l.Tags, l.Persist = slices.Clone(l.Tags), l.Persist.Clone()
	return l
}

// empty says that it is what a VM without one has.
func (l Label) empty() bool {
	return l.Class == "" && l.Owner == "" && l.Purpose == "" && len(l.Tags) == 0 && l.Expires.IsZero() && l.Keep == lifetime.Keep{} && l.Wake == Timer{} && l.Rotate == Rotation{} && l.Persist.Empty()
}

// Check refuses what is out of bounds.
func (l Label) Check() error {
	text := func(what, s string, limit int) error {
		if len(s) > limit {
			return fmt.Errorf("%w: %s of %d bytes: use %d at most", ErrLabel, what, len(s), limit)
		}
		if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return fmt.Errorf("%w: %s %q: use printable characters in one line", ErrLabel, what, s)
		}
		return nil
	}
	if err := l.EffectiveClass().Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrLabel, err)
	}
	if err := l.Keep.Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrLabel, err)
	}
	if err := l.Persist.Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrLabel, err)
	}
	if err := errors.Join(text("owner", l.Owner, MaxLabelOwner), text("purpose", l.Purpose, MaxLabelPurpose)); err != nil {
		return err
	}
	if len(l.Tags) > MaxLabelTags {
		return fmt.Errorf("%w: %d tags: use %d at most", ErrLabel, len(l.Tags), MaxLabelTags)
	}
	for _, t := range l.Tags {
		if t == "" || strings.ContainsAny(t, ", ") {
			return fmt.Errorf("%w: tag %q: use a word without spaces and commas, as team or team=web", ErrLabel, t)
		}
		if err := text("tag", t, MaxLabelTag); err != nil {
			return err
		}
	}
	if err := errors.Join(l.Wake.check(), l.Rotate.check()); err != nil {
		return err
	}
	if y := l.Expires.Year(); !l.Expires.IsZero() && (y < 1970 || y > 2200) {
		return fmt.Errorf("%w: it expires in the year %d: use one before 2200", ErrLabel, y)
	}
	return nil
}

// labelDoc is the file.
type labelDoc struct {
	Version int `json:"version"`
	Label
}

// Label returns a sandbox's label. One that cannot be read is ErrLabel: nothing is removed then for what it says.
func (s *Store) Label(name string) (Label, error) {
	if !spec.ValidName(name) {
		return Label{}, fmt.Errorf("%w: %q is not the name of a VM", ErrNotFound, name)
	}
	root, err := os.OpenRoot(s.vmDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return Label{}, fmt.Errorf("%w: %s: see `drowse ps -a`", ErrNotFound, name)
	}
	if err != nil {
		return Label{}, fmt.Errorf("reading the label of %s: %w", name, err)
	}
	defer root.Close()
	return readLabel(root, name)
}

func readLabel(root *os.Root, name string) (Label, error) {
	f, err := root.Open(labelFile)
	if errors.Is(err, fs.ErrNotExist) {
		return Label{}, nil
	}
	if err != nil {
		return Label{}, fmt.Errorf("reading the label of %s: %w", name, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxLabel+1))
	if err != nil {
		return Label{}, fmt.Errorf("reading the label of %s: %w", name, err)
	}
	l, err := parseLabel(data)
	if err != nil {
		return Label{}, fmt.Errorf("reading the label of %s: %w: write it anew with `drowse update %s --reset`", name, err, name)
	}
	return l, nil
}

func parseLabel(data []byte) (Label, error) {
	if len(data) > maxLabel {
		return Label{}, fmt.Errorf("%w: it has more than %d bytes", ErrLabel, maxLabel)
	}
	var doc labelDoc
	d := json.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(&doc); err != nil {
		return Label{}, fmt.Errorf("%w: %w: it was written by another version, or is damaged", ErrLabel, err)
	}
	if doc.Version != labelVersion {
		return Label{}, fmt.Errorf("%w: version %d, this build reads %d", ErrLabel, doc.Version, labelVersion)
	}
	return doc.Label, doc.Check()
}

// SetLabel changes a sandbox's label: change gets what it is and says what it is to be; an error of it changes nothing
// and is returned. A label that cannot be read is given as the zero Label, with its error. Changes by several processes
// come one after another, and each is on disk when SetLabel returns. The sandbox may run, and may be renamed meanwhile.
func (s *Store) SetLabel(ctx context.Context, name string, change func(l *Label, unreadable error) error) (Label, error) {
	return s.setLabel(ctx, name, change, func(r *Record, before, l Label, unreadable error) { s.tellLabel(ctx, r, before, l, unreadable) })
}

// setLabel is SetLabel that calls told, with the label locked, when it is changed.
func (s *Store) setLabel(ctx context.Context, name string, change func(*Label, error) error, told func(r *Record, before, l Label, unreadable error)) (Label, error) {
	r, err := s.load(name)
	if err != nil {
		return Label{}, err
	}
	// The directory itself, by whatever name: it may be renamed, and another one may get its name.
	root, err := os.OpenRoot(s.vmDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return Label{}, fmt.Errorf("%w: %s: see `drowse ps -a`", ErrNotFound, name)
	}
	if err != nil {
		return Label{}, fmt.Errorf("changing the label of %s: %w", name, err)
	}
	defer root.Close()
	unlock, err := lockLabel(ctx, root)
	if err != nil {
		return Label{}, fmt.Errorf("changing the label of %s: %w", name, err)
	}
	defer unlock()
	l, rerr := readLabel(root, name)
	before := l
	if err := change(&l, rerr); err != nil {
		return Label{}, err
	}
	l.Tags = slices.Compact(slices.Sorted(slices.Values(l.Tags)))
	l.Expires = l.Expires.UTC().Truncate(time.Second)
	l.Wake.At = l.Wake.At.UTC().Truncate(time.Millisecond)
	l.Rotate.At = l.Rotate.At.UTC().Truncate(time.Millisecond)
	if l.Rotate.To != before.Rotate.To {
		// A sweep either sees what is kept now, or is over.
		release, err := s.share(ctx)
		if err != nil {
			return Label{}, err
		}
		defer func() { _ = release() }()
		if err := s.checkRotation(r, &l.Rotate); err != nil {
			return Label{}, err
		}
	}
	if err := l.Check(); err != nil {
		return Label{}, err
	}
	err = writeLabel(root, l)
	if errors.Is(err, fs.ErrNotExist) {
		return Label{}, fmt.Errorf("changing the label of %s: %w: it has just been removed", name, ErrNotFound)
	}
	if err != nil {
		return Label{}, fmt.Errorf("changing the label of %s: %w", name, err)
	}
	told(r, before, l, rerr)
	return l, nil
}

// TellExpired writes the event of a sandbox's expiry, once for each time at which it has expired. It does nothing for
// others.
func (s *Store) TellExpired(ctx context.Context, name string) error {
	var e events.Event
	_, err := s.setLabel(ctx, name, func(l *Label, unreadable error) error {
		if unreadable != nil || !lifetime.Expired(l.Expires, time.Now()) || l.ExpiryTold.Equal(l.Expires) {
			return errNothingToTell
		}
		l.ExpiryTold = l.Expires.UTC().Truncate(time.Second) // as the other is kept
		return nil
	}, func(r *Record, _, l Label, _ error) {
		e = s.event(events.WithCause(ctx, events.Expiry), r, events.Expired)
		e.Details.Expires = l.Expires
	})
	if err == nil {
		// Not with the label locked, which a hook may want to change.
		s.announce(ctx, e)
	}
	return nothing(err)
}

// nothing is nil if there was nothing to tell of.
func nothing(err error) error {
	if errors.Is(err, errNothingToTell) || errors.Is(err, ErrNotFound) {
		return nil
	}
	return err
}

// errNothingToTell ends a change of a label that is none.
var errNothingToTell = errors.New("there is nothing to tell of")

// tellLabel tells of a changed label.
func (s *Store) tellLabel(ctx context.Context, r *Record, before, l Label, unreadable error) {
	before.Asked = l.Asked // who has asked for it is no change of what it says
	if unreadable == nil && before.equal(l) {
		return
	}
	e := s.event(ctx, r, events.Updated)
	if same := before; unreadable == nil {
		same.Expires = l.Expires
		if same.equal(l) && !before.Expires.IsZero() && (l.Expires.IsZero() || l.Expires.After(before.Expires)) {
			e.Type = events.Extended
		}
	}
	e.Details.Expires = l.Expires
	s.tell(e)
}

// equal says whether two labels say the same.
func (l Label) equal(m Label) bool {
	a, aerr := json.Marshal(l)
	b, berr := json.Marshal(m)
	return aerr == nil && berr == nil && string(a) == string(b)
}

// lockLabel serialises those who change a label. Nobody has the lock for longer than a change takes.
func lockLabel(ctx context.Context, root *os.Root) (unlock func(), err error) {
	f, err := root.OpenFile(labelLock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := osfile.Lock(ctx, f, osfile.Exclusive); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// writeLabel writes as osfile.WriteFile does, but by the open directory: its VM may get another name meanwhile.
func writeLabel(root *os.Root, l Label) error {
	data, err := json.MarshalIndent(labelDoc{labelVersion, l}, "", "  ")
	if err != nil {
		return err
	}
	f, err := root.OpenFile(labelNew, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := root.Rename(labelNew, labelFile); err != nil {
		return err
	}
	d, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// beginLabel gives a new VM its label, or takes away what a killed command has left in its directory. The VM's lock is
// held, and there is no record yet.
func (s *Store) beginLabel(r *Record) error {
	root, err := os.OpenRoot(s.vmDir(r.Spec.Name))
	if err != nil {
		return fmt.Errorf("making VM %s: %w", r.Spec.Name, err)
	}
	defer root.Close()
	if r.label == nil {
		err = root.Remove(labelFile)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
	} else {
		err = writeLabel(root, *r.label)
	}
	if err != nil {
		return fmt.Errorf("making VM %s: %w", r.Spec.Name, err)
	}
	return nil
}

// setLabel gives a VM that is yet to be made its label.
func (r *Record) setLabel(l *Label) error {
	if l == nil {
		return nil
	}
	own := *l
	own.Tags, own.Persist = slices.Compact(slices.Sorted(slices.Values(l.Tags))), l.Persist.Clone()
	own.Expires, own.ExpiryTold, own.Asked = l.Expires.UTC().Truncate(time.Second), time.Time{}, Asked{}
	own.Wake.At = l.Wake.At.UTC().Truncate(time.Millisecond)
	if own.Rotate != (Rotation{}) {
		return fmt.Errorf("%w: it has no snapshot yet to begin anew from: update it once it has one", ErrLabel)
	}
	if err := own.Check(); err != nil {
		return err
	}
	if own.Class == lifetime.Ephemeral && r.Spec.Idle.SleepSeconds > 0 {
		return fmt.Errorf("%w: an ephemeral sandbox does not sleep: give it a time of expiry instead of an idle time, or another class", ErrLabel)
	}
	r.label = &own
	return nil
}

// lasts is what counts of a VM for how long it and its sleeps last.
func (s *Store) lasts(r *Record) lifetime.Sandbox {
	l, err := s.Label(r.Spec.Name)
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
