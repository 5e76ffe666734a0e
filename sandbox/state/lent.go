package state

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
)

// What a VM has made is usually needed by that VM alone. lent/ has an empty file for each VM and snapshot of which that
// may be wrong:
//
//	lent/VM        something besides the record of this VM, and the sleeps in it, has named layers of its disk
//	lent/SNAPSHOT  something besides the record of the VM that slept in it has named this snapshot
//
// Such a file is durable before the name is. That of a VM stays as long as the VM, and then until nothing names its
// layers; that of a snapshot, until nothing else names it. So a sleep and a removal look at their own VM only, however
// many there are. lent/complete says that this holds for all that the store
// has; a store of an older version gets it from its first sweep.

const lentComplete = "complete"

func (s *Store) lentPath(name string) string { return filepath.Join(s.dir, "lent", name) }

// lent reports whether something else may need what a VM or a snapshot has.
func (s *Store) lent(id string) bool {
	_, err := os.Lstat(s.lentPath(id))
	return !errors.Is(err, fs.ErrNotExist)
}

// lend makes it durable that others are about to name what these VMs and snapshots have.
func (s *Store) lend(ids ...string) error {
	made := false
	for _, id := range ids {
		if s.lent(id) {
			continue
		}
		if !made {
			err := s.FS.Mkdir(s.lentPath(""), 0o700)
			if err == nil {
				err = s.FS.SyncDir(s.dir)
			}
			if err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("noting what is needed by others: %w", err)
			}
		}
		f, err := s.FS.OpenFile(s.lentPath(id), os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			return fmt.Errorf("noting that others need %s: %w", id, err)
		}
		made = true
	}
	if !made {
		return nil
	}
	return s.FS.SyncDir(s.lentPath("")) // an empty file is durable with its name
}

// named returns the snapshots that a record needs.
func (r *Record) named() (ids []string) {
	for _, id := range []string{r.Snapshot, r.Previous, r.Base, r.Parent} {
		if id != "" {
			ids = append(ids, id)
		}
	}
	return ids
}

// ownSnapshots returns the snapshots that a record needs and those of its VM's last sleeps.
func (r *Record) ownSnapshots() []string {
	ids := r.named()
	for _, sl := range r.Sleeps {
		ids = append(ids, sl.Snapshot)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// borrowed returns the owners of layers, without own.
func borrowed(own string, layers []string) (ids []string) {
	for _, l := range layers {
		if owner, _, ok := strings.Cut(filepath.Base(l), "-"); ok && owner != own && IDPattern.MatchString(owner) {
			ids = append(ids, owner)
		}
	}
	return slices.Compact(ids)
}

// Labels returns the labels of a snapshot that is about to be made of a VM.
func (s *Store) Labels(r *Record, kind string) (map[string]string, error) {
	if kind != KindSleep { // sleeps are in the record
		if err := s.lend(r.ID); err != nil {
			return nil, err
		}
	}
	return r.labels(kind)
}

// settleLent makes lent/ what the marks say, unless these are not all. It must be called by alone.
func (s *Store) settleLent(m *mark, have manifests) error {
	if len(m.problems) > 0 || len(m.unclear) > 0 {
		return nil
	}
	lent := m.lent(s, have)
	if err := s.lend(lent...); err != nil {
		return err
	}
	if err := s.lend(lentComplete); err != nil { // it holds for what was lent before
		return err
	}
	entries, err := os.ReadDir(s.lentPath(""))
	if err != nil {
		return err
	}
	needed := map[string]bool{lentComplete: true}
	for _, id := range lent {
		needed[id] = true
	}
	// The process of a VM may be making a snapshot, and may have started since the records were read.
	for _, r := range m.records {
		needed[r.ID] = true
	}
	var errs []error
	for _, e := range entries {
		if id := e.Name(); !needed[id] {
			errs = append(errs, s.FS.Remove(s.lentPath(id)))
		}
	}
	return errors.Join(errs...)
}

// lent returns the VMs and snapshots of which something else needs something.
func (m *mark) lent(s *Store, have manifests) (ids []string) {
	sleeps := map[string]string{} // by snapshot: the VM whose record has it
	for _, r := range m.records {
		for _, id := range r.ownSnapshots() {
			if man := have[id]; man != nil && man.Labels[labelOwner] == r.ID && man.Labels[labelKind] == KindSleep && !m.templates[id] && !s.kept(id) {
				sleeps[id] = r.ID
			}
		}
	}
	for _, r := range m.records {
		ids = append(ids, borrowed(r.ID, r.Disk.Layers)...)
		for _, id := range r.named() {
			if sleeps[id] != r.ID {
				ids = append(ids, id)
			}
		}
	}
	for id := range m.templates {
		ids = append(ids, id)
	}
	for id, man := range have {
		ids = append(ids, borrowed(sleeps[id], SnapshotStack(man).Layers)...)
	}
	return ids
}

// AddSleep adds a sleep to the record of its VM, which forgets the oldest of MaxSleeps. The caller must save it.
func (s *Store) AddSleep(r *Record, slept SleepRecord) error {
	forget := max(len(r.Sleeps)-MaxSleeps+1, 0)
	for _, old := range r.Sleeps[:forget] {
		if _, err := os.Lstat(s.SnapshotDir(old.Snapshot)); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := s.lend(r.ID); err != nil {
			return err
		}
		break
	}
	r.Sleeps = append(slices.Clone(r.Sleeps[forget:]), slept)
	return nil
}

// maxOwnLayers bounds how many names of layers a removal tries.
const maxOwnLayers = 1 << 16

// removeOwn deletes the sleeps of a VM that has just been removed, and its layers, as far as only this VM can need
// them. It reads nothing of other VMs. What it leaves is for a sweep.
func (s *Store) removeOwn(ctx context.Context, r *Record, freed *spec.Freed) error {
	if !s.lent(lentComplete) {
		return nil
	}
	free := func() {}
	pages := map[string]bool{}
	err := s.alone(ctx, func() error {
		for _, id := range r.ownSnapshots() {
			man, err := snapshot.ReadManifest(s.SnapshotDir(id))
			if err != nil || man.Labels[labelOwner] != r.ID || man.Labels[labelKind] != KindSleep || s.lent(id) || s.kept(id) {
				continue // what is wrong with it is said by a sweep
			}
			for _, name := range s.cacheFiles(man) {
				pages[name] = true
			}
			_, n := DiskUsage(s.SnapshotDir(id))
			remove, err := snapshot.Discard(s.SnapshotDir(id))
			if err != nil {
				return err
			}
			before := free
			free = func() { before(); _ = remove() }
			freed.Snapshots, freed.Bytes = freed.Snapshots+1, freed.Bytes+n
		}
		if s.lent(r.ID) || r.NextLayer > maxOwnLayers {
			return nil
		}
		for n := 1; ; n++ {
			path := filepath.Join(s.LayerDir(), fmt.Sprintf("%s-%d", r.ID, n))
			if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
				if n > r.NextLayer { // a layer is made before it is counted on disk
					return nil
				}
				continue
			}
			n, err := s.removeLayer(&mark{}, r.ID, path)
			if err != nil {
				return err
			}
			if n >= 0 {
				freed.Layers, freed.Bytes = freed.Layers+1, freed.Bytes+n
			}
		}
	})
	free()
	if errors.Is(err, ErrStoreBusy) && ctx.Err() == nil {
		return nil
	}
	return errors.Join(err, pagecache.New(s.PageCacheDir()).Forget(pages))
}

// sweepShare is which part of the time at most goes into sweeps that nobody has asked for, since one looks at all VMs
// and snapshots. With up to FewToSweep of them none is put off.
const (
	sweepShare = 20
	FewToSweep = 64
)

// lastSweep is the content of the file swept, whose time is that of its end.
type lastSweep struct {
	Nanoseconds int64 `json:"ns"`
	Looked      int   `json:"looked"` // VMs and snapshots
}

func (s *Store) sweptPath() string { return filepath.Join(s.dir, "swept") }

// swept notes what a sweep has taken. Without the note the next is due.
func (s *Store) swept(last lastSweep) {
	if text, err := json.Marshal(last); err == nil {
		_ = os.WriteFile(s.sweptPath(), text, 0o600)
	}
}

// sweepDue reports whether a sweep may be made now that nobody has asked for.
func (s *Store) sweepDue() bool {
	text, err := osfile.ReadPrivate(s.sweptPath(), 1<<10)
	st, serr := os.Stat(s.sweptPath())
	var last lastSweep
	if errors.Join(err, serr) != nil || json.Unmarshal(text, &last) != nil || last.Looked <= FewToSweep || !s.lent(lentComplete) {
		return true
	}
	since := time.Since(st.ModTime())
	return since < 0 || since > sweepShare*time.Duration(last.Nanoseconds)
}
