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

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// maxMetadata bounds the file, in bytes.
const maxMetadata = 64 << 10

// metadataVersion goes up with each incompatible change of the file.
const metadataVersion = 1

const (
	metadataFile = "sandbox.json"
	metadataNew  = ".sandbox.json.new"
	metadataLock = "sandbox.lock"
)

// metadataDoc is the file.
type metadataDoc struct {
	Version int `json:"version"`
	spec.Metadata
}

// Metadata returns a sandbox's metadata. If it is unreadable, the error is ErrMetadata. Then nothing may be
// removed on its account.
func (s *Store) Metadata(name string) (spec.Metadata, error) {
	if !spec.ValidName(name) {
		return spec.Metadata{}, fmt.Errorf("%w: %q is not the name of a VM", spec.ErrNotFound, name)
	}
	root, err := s.openMetadata(name, "reading")
	if err != nil {
		return spec.Metadata{}, err
	}
	defer root.Close()
	return readMetadata(root, name)
}

// openMetadata opens the directory of a sandbox itself, not its name: the sandbox may be renamed, and another one
// may get its name.
func (s *Store) openMetadata(name, doing string) (*os.Root, error) {
	root, err := os.OpenRoot(s.VMDir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s: see Host.List", spec.ErrNotFound, name)
	}
	if err != nil {
		return nil, fmt.Errorf("%s the metadata of %s: %w", doing, name, err)
	}
	return root, nil
}

func readMetadata(root *os.Root, name string) (spec.Metadata, error) {
	f, err := root.Open(metadataFile)
	if errors.Is(err, fs.ErrNotExist) {
		return spec.Metadata{}, nil
	}
	if err != nil {
		return spec.Metadata{}, fmt.Errorf("reading the metadata of %s: %w", name, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxMetadata+1))
	if err != nil {
		return spec.Metadata{}, fmt.Errorf("reading the metadata of %s: %w", name, err)
	}
	l, err := parseMetadata(data)
	if err != nil {
		return spec.Metadata{}, fmt.Errorf("reading the metadata of %s: %w: write it anew: Fleet.Update of %q with Reset", name, err, name)
	}
	return l, nil
}

func parseMetadata(data []byte) (spec.Metadata, error) {
	if len(data) > maxMetadata {
		return spec.Metadata{}, fmt.Errorf("%w: it has more than %d bytes", spec.ErrMetadata, maxMetadata)
	}
	var doc metadataDoc
	d := json.NewDecoder(strings.NewReader(string(data)))
	d.DisallowUnknownFields()
	if err := d.Decode(&doc); err != nil {
		return spec.Metadata{}, fmt.Errorf("%w: %w: it was written by another version, or is damaged", spec.ErrMetadata, err)
	}
	if doc.Version != metadataVersion {
		return spec.Metadata{}, fmt.Errorf("%w: version %d, this build reads %d", spec.ErrMetadata, doc.Version, metadataVersion)
	}
	return doc.Metadata, doc.Check()
}

// SetMetadata changes a sandbox's metadata: change gets the current metadata and modifies it. If change fails,
// nothing changes, and SetMetadata returns its error. Unreadable metadata is passed as the zero Metadata, with the
// error. Changes by several processes are serialized, and each is on disk when SetMetadata returns. The sandbox
// may run, and may be renamed meanwhile.
func (s *Store) SetMetadata(ctx context.Context, name string, change func(l *spec.Metadata, unreadable error) error) (spec.Metadata, error) {
	return s.setMetadata(ctx, name, change, func(r *Record, before, l spec.Metadata, unreadable error) {
		s.tellMetadata(ctx, r, before, l, unreadable)
	})
}

// setMetadata is SetMetadata that calls told after the change, with the metadata locked.
func (s *Store) setMetadata(ctx context.Context, name string, change func(*spec.Metadata, error) error, told func(r *Record, before, l spec.Metadata, unreadable error)) (spec.Metadata, error) {
	r, err := s.Load(name)
	if err != nil {
		return spec.Metadata{}, err
	}
	root, err := s.openMetadata(name, "changing")
	if err != nil {
		return spec.Metadata{}, err
	}
	defer root.Close()
	unlock, err := lockMetadata(ctx, root)
	if err != nil {
		return spec.Metadata{}, fmt.Errorf("changing the metadata of %s: %w", name, err)
	}
	defer unlock()
	l, rerr := readMetadata(root, name)
	before := l
	if err := change(&l, rerr); err != nil {
		return spec.Metadata{}, err
	}
	l.Tags = slices.Compact(slices.Sorted(slices.Values(l.Tags)))
	l.Expires = l.Expires.UTC().Truncate(time.Second)
	l.Wake.At = l.Wake.At.UTC().Truncate(time.Millisecond)
	l.Rotate.At = l.Rotate.At.UTC().Truncate(time.Millisecond)
	if l.Rotate.To != before.Rotate.To {
		// A sweep either sees what must be kept now, or has ended.
		release, err := s.Share(ctx)
		if err != nil {
			return spec.Metadata{}, err
		}
		defer func() { _ = release() }()
		if err := s.checkRotation(r, &l.Rotate); err != nil {
			return spec.Metadata{}, err
		}
	}
	if err := l.Check(); err != nil {
		return spec.Metadata{}, err
	}
	if l.Owner != before.Owner {
		release, err := s.admitOwned(l.Owner)
		if err != nil {
			return spec.Metadata{}, fmt.Errorf("changing the owner of %s: %w", name, err)
		}
		defer func() { _ = release() }()
	}
	err = writeMetadata(root, l)
	if errors.Is(err, fs.ErrNotExist) {
		return spec.Metadata{}, fmt.Errorf("changing the metadata of %s: %w: it has just been removed", name, spec.ErrNotFound)
	}
	if err != nil {
		return spec.Metadata{}, fmt.Errorf("changing the metadata of %s: %w", name, err)
	}
	told(r, before, l, rerr)
	return l, nil
}

// TellExpired writes the event of a sandbox's expiry, once for each time at which it has expired. It does nothing
// for sandboxes that have not expired.
func (s *Store) TellExpired(ctx context.Context, name string) error {
	var e events.Event
	_, err := s.setMetadata(ctx, name, func(l *spec.Metadata, unreadable error) error {
		if unreadable != nil || !lifetime.Expired(l.Expires, time.Now()) || l.ExpiryTold.Equal(l.Expires) {
			return ErrNothingToTell
		}
		l.ExpiryTold = l.Expires.UTC().Truncate(time.Second) // truncated like the other
		return nil
	}, func(r *Record, _, l spec.Metadata, _ error) {
		e = s.Event(events.WithCause(ctx, events.Expiry), r, events.Expired)
		e.Details.Expires = l.Expires
	})
	if err == nil {
		// Not while the metadata is locked: a hook may want to change it.
		s.Announce(ctx, e)
	}
	return nothing(err)
}

// nothing returns nil if err only says that there is nothing to do.
func nothing(err error) error {
	if errors.Is(err, ErrNothingToTell) || errors.Is(err, spec.ErrNotFound) {
		return nil
	}
	return err
}

// ErrNothingToTell ends a change of metadata that changes nothing.
var ErrNothingToTell = errors.New("there is nothing to tell of")

// tellMetadata writes the event for changed metadata.
func (s *Store) tellMetadata(ctx context.Context, r *Record, before, l spec.Metadata, unreadable error) {
	before.Asked = l.Asked // a change of who asked is not a change of the metadata
	if unreadable == nil && before.Equal(l) {
		return
	}
	e := s.Event(ctx, r, events.Updated)
	if same := before; unreadable == nil {
		same.Expires = l.Expires
		if same.Equal(l) && !before.Expires.IsZero() && (l.Expires.IsZero() || l.Expires.After(before.Expires)) {
			e.Type = events.Extended
		}
	}
	e.Details.Expires = l.Expires
	s.Tell(e)
}

// lockMetadata serializes changes of metadata. Its holders keep the lock only for one change.
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

// writeMetadata writes like osfile.WriteFile, but through the open directory, since the VM may be renamed meanwhile.
func writeMetadata(root *os.Root, l spec.Metadata) error {
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

// beginMetadata gives a new VM its metadata, or removes what a killed command has left in its directory. The VM's
// lock must be held, and there must be no record yet.
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

// SetMetadata sets the metadata of a VM that is not made yet.
func (r *Record) SetMetadata(l *spec.Metadata) error {
	if l == nil {
		return nil
	}
	own := *l
	own.Tags, own.Persist = slices.Compact(slices.Sorted(slices.Values(l.Tags))), l.Persist.Clone()
	own.Expires, own.ExpiryTold, own.Asked = l.Expires.UTC().Truncate(time.Second), time.Time{}, spec.Asked{}
	own.Wake.At = l.Wake.At.UTC().Truncate(time.Millisecond)
	if own.Rotate != (spec.Rotation{}) {
		return fmt.Errorf("%w: it has no snapshot yet to begin anew from: update it once it has one", spec.ErrMetadata)
	}
	if err := own.Check(); err != nil {
		return err
	}
	if own.Class == lifetime.Ephemeral && r.Spec.Idle.SleepSeconds > 0 {
		return fmt.Errorf("%w: an ephemeral sandbox does not sleep: give it a time of expiry instead of an idle time, or another class", spec.ErrMetadata)
	}
	r.metadata = &own
	return nil
}

// lasts returns the data of a VM that decides how long it and its sleeps last.
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
	// SelfForkTime is the limit until the fork is done.
	SelfForkTime = 2 * time.Minute
	// SelfForkPoll is how often the VM's process looks for an answer.
	SelfForkPoll = 50 * time.Millisecond
)

// selfMetadataTime bounds the wait for metadata that another process changes.
const selfMetadataTime = 10 * time.Second

// SetSelf changes metadata for its guest.
func (s *Store) SetSelf(ctx context.Context, name string, change func(*spec.Metadata) error) error {
	ctx, cancel := context.WithTimeout(events.WithCause(ctx, events.Guest), selfMetadataTime)
	defer cancel()
	_, err := s.SetMetadata(ctx, name, func(l *spec.Metadata, unreadable error) error {
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
