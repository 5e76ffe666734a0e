package state

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// RestoreTo takes a VM back to one of its own snapshots, in which it then sleeps, with the memory, disk and services of
// that time and its present policy. Repeating it does nothing more. If the VM slept, its previous snapshot is kept
// until it sleeps again, so that this can be undone. If it had stopped or was killed, its disk is kept as a snapshot of
// kind "abandoned". The error is ErrRunning if the VM runs, ErrForeignSnapshot for another VM's snapshot, ErrDiskOnly
// for one without memory, and ErrMetadata if the VM's Rotation would take it elsewhere at its next wake.
func (s *Store) RestoreTo(ctx context.Context, name, snapshotID string) (*Record, error) {
	id, err := s.FindSnapshot(snapshotID)
	if err != nil {
		return nil, err
	}
	if err := s.notRotated(name, id); err != nil {
		return nil, fmt.Errorf("taking %s back to snapshot %s: %w", name, id, err)
	}
	return s.restoreTo(ctx, name, id, func(*Record) {})
}

// restoreTo is RestoreTo with the whole id of a snapshot. It calls note for the record before it writes it.
func (s *Store) restoreTo(ctx context.Context, name, id string, note func(*Record)) (*Record, error) {
	fail := func(err error) (*Record, error) {
		return nil, fmt.Errorf("taking %s back to snapshot %s: %w", name, id, err)
	}
	// The lock keeps the snapshot until the record names it.
	unlock, err := s.Share(ctx)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = unlock() }()
	_, running := fail(fmt.Errorf("%w: put it to sleep first", spec.ErrRunning))
	r, l, err := s.atRest(ctx, name, running)
	if err != nil {
		return nil, err
	}
	defer l.Release()
	if r.Phase == Asleep && r.Snapshot == id {
		before := r.Rotated
		if note(r); r.Rotated.Equal(before) {
			return r, nil
		}
		return r, s.Save(r)
	}
	m, err := s.Manifest(id)
	if err != nil {
		return nil, err
	}
	switch {
	case DiskOnly(m):
		return fail(fmt.Errorf("%w: boot a VM from it with Host.Create with Disk \"%.12s\"", spec.ErrDiskOnly, id))
	case m.Labels[labelOwner] != r.ID:
		return fail(fmt.Errorf("%w, %s: a VM of its own comes of it by Host.Clone of \"%.12s\"", spec.ErrForeignSnapshot, m.Sandbox, id))
	}
	if err := s.CheckVolumes(r, id); err != nil {
		return fail(err)
	}
	if r.Phase == Asleep {
		// Taken back twice, it still comes back from where it slept.
		r.Previous = cmp.Or(r.Previous, r.Snapshot)
	} else if left, err := s.Abandon(ctx, r, m); err != nil {
		return fail(err)
	} else if left != "" && events.CauseOf(ctx) == events.Rotation {
		r.Left = left
	}
	r.Snapshot, r.Resumed = id, id
	r.GoBack(m)
	note(r)
	if err := s.Save(r); err != nil {
		return r, err
	}
	e := s.Event(ctx, r, events.Restored)
	e.Details.Snapshot = id
	s.Tell(e)
	return r, nil
}

// Limits of the tags of a snapshot.
const (
	MaxSnapshotTags = 16
	maxKept         = 16 << 10 // bytes of the file with them
)

// keptDoc is the content of a file below kept/; an empty file has no tags.
type keptDoc struct {
	Version int      `json:"version"`
	Tags    []string `json:"tags"`
}

// TagSnapshot replaces the tags of a snapshot. While it has tags, or was imported, only RemoveSnapshot deletes it.
// Empty tags remove that mark. There may be MaxSnapshotTags words of spec.MaxMetadataTag bytes.
func (s *Store) TagSnapshot(prefix string, tags []string) (spec.SnapshotInfo, error) {
	id, err := s.FindSnapshot(prefix)
	if err != nil {
		return spec.SnapshotInfo{}, err
	}
	if len(tags) > MaxSnapshotTags {
		return spec.SnapshotInfo{}, fmt.Errorf("%w: %d tags of a snapshot: use %d at most", spec.ErrMetadata, len(tags), MaxSnapshotTags)
	}
	for _, t := range tags {
		if t == "" || len(t) > spec.MaxMetadataTag || !utf8.ValidString(t) || strings.ContainsAny(t, ", ") || strings.ContainsFunc(t, func(r rune) bool { return !unicode.IsPrint(r) }) {
			return spec.SnapshotInfo{}, fmt.Errorf("%w: tag %q: use a word of 1 to %d bytes without spaces and commas", spec.ErrMetadata, t, spec.MaxMetadataTag)
		}
	}
	// A sweep either sees the tags, or has ended.
	unlock, err := s.Share(context.Background())
	if err != nil {
		return spec.SnapshotInfo{}, err
	}
	defer func() { _ = unlock() }()
	m, err := s.Manifest(id)
	if err != nil {
		return spec.SnapshotInfo{}, err
	}
	if len(tags) == 0 {
		err = s.unkeep(id)
	} else if err = errors.Join(s.lendOwner(m), s.keep(id)); err == nil {
		var data []byte
		if data, err = json.Marshal(keptDoc{1, slices.Compact(slices.Sorted(slices.Values(tags)))}); err == nil {
			err = osfile.WriteFileIn(s.FS, s.keptPath(id), append(data, '\n'), 0o600)
		}
	}
	if err != nil {
		return spec.SnapshotInfo{}, fmt.Errorf("tagging snapshot %s: %w", id, err)
	}
	return s.snapshotInfo(m), nil
}

// lendOwner is for a snapshot that sweeps keep from now on, whatever the record of its VM says.
func (s *Store) lendOwner(m *snapshot.Manifest) error {
	return s.lend(borrowed("", SnapshotStack(m).Layers)...)
}

// snapshotTags returns the tags of a snapshot. A file that cannot be read still keeps the snapshot.
func (s *Store) snapshotTags(id string) []string {
	f, err := os.Open(s.keptPath(id))
	if err != nil {
		return nil
	}
	defer f.Close()
	var doc keptDoc
	if err := json.NewDecoder(io.LimitReader(f, maxKept)).Decode(&doc); err != nil {
		return nil
	}
	return doc.Tags
}
