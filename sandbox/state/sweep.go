package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
)

// Lightest returns where the window of window sizes with the least sum begins, the last of several.
func Lightest(sizes []int64, window int) (first int) {
	var sum, least int64
	for i, n := range sizes {
		sum += n
		if i >= window {
			sum -= sizes[i-window]
		}
		if i == window-1 || i >= window && sum <= least {
			first, least = i-window+1, sum
		}
	}
	return first
}

// templateOwner begins the names of the empty file systems, which are small and needed again.
const templateOwner = "ext4"

// Labels of a snapshot.
const (
	labelKind   = "drowse.kind"   // KindSleep, KindNamed, KindDisk, KindFork or KindAbandoned
	LabelRecord = "drowse.record" // the VM's record at that time
	labelOwner  = "drowse.owner"  // the id of that VM
	LabelNote   = "drowse.note"   // the user's words

	KindSleep = "sleep"
	KindNamed = "named"
	KindFork  = "fork"
)

// Sweep deletes what no record, metadata or snapshot names (see mark) and what has not changed for ten minutes:
// sleep snapshots that no VM needs and no Metadata keeps, disk layers, decompressed pages of no snapshot, and
// leftovers of interrupted commands. It never deletes a snapshot that was requested by name. An unreadable record
// or snapshot is an error: Sweep keeps what it may need, and deletes the rest. While a snapshot is being imported
// or a VM is being forked, it does nothing. ctx ends it.
func (s *Store) Sweep(ctx context.Context) (spec.Freed, error) { return s.SweepExcept(ctx, Exempt{}) }

// SweepAbandoned is Sweep that also deletes the disks that VMs left when they were taken back, except those with tags.
func (s *Store) SweepAbandoned(ctx context.Context) (spec.Freed, error) {
	return s.SweepExcept(ctx, Exempt{abandoned: true})
}

// sweepPatience is how long a sweep waits for processes that make records of what others name.
const sweepPatience = 5 * time.Second

// SweepExcept is Sweep that does not spare what has just been given up.
func (s *Store) SweepExcept(ctx context.Context, now Exempt) (freed spec.Freed, err error) {
	var m *mark
	have := manifests{}
	begin := time.Now()
	defer func() {
		if m != nil {
			s.swept(lastSweep{Nanoseconds: time.Since(begin).Nanoseconds(), Looked: len(m.records) + len(have)})
		}
		if err != nil {
			err = fmt.Errorf("tidying up: %w", err)
		}
	}()
	if _, err := snapshot.Clean(filepath.Join(s.dir, "snapshots")); err != nil {
		return freed, err
	}
	// Most manifests do not change, so read them before others have to wait.
	if _, _, err := s.readManifests(ctx, have); err != nil {
		return freed, err
	}
	free := func() {}
	err = s.alone(ctx, func() error {
		var err error
		m, free, err = s.takeAway(ctx, have, now, &freed)
		return err
	})
	free()
	if errors.Is(err, ErrStoreBusy) && ctx.Err() == nil {
		return freed, nil // another time
	}
	if m == nil {
		return freed, err
	}
	errs := append(m.problems, err)
	memory := map[string]bool{}
	for _, man := range have {
		for _, name := range s.cacheFiles(man) {
			memory[name] = true
		}
	}
	// A snapshot made meanwhile is not in the list. Its next wake does without the pages that the cache already
	// had for it.
	n, bytes, err := pagecache.New(s.PageCacheDir()).Sweep(memory)
	freed.CacheFiles, freed.Bytes = n, freed.Bytes+bytes
	errs = append(errs, err, os.RemoveAll(s.oldPageCacheDir()))
	for _, r := range m.records {
		if ctx.Err() != nil {
			break
		}
		if len(r.Disk.Layers) > looseLayers && r.Phase == Asleep {
			errs = append(errs, s.joinAlone(ctx, r.Spec.Name, have))
		}
	}
	if err := s.sweepRemoved(); err != nil {
		freed.Problems = append(freed.Problems, err.Error()) // not an error of the sweep
	}
	errs = append(errs, ctx.Err(), SweepNetworks(), confine.Sweep())
	return freed, errors.Join(errs...)
}

// alone runs f while no process makes a record of what another one names; ErrStoreBusy if that takes too long.
func (s *Store) alone(ctx context.Context, f func() error) error {
	unlock, err := s.LockStore(ctx, osfile.Exclusive, sweepPatience)
	if err != nil {
		return err
	}
	return errors.Join(f(), unlock())
}

// takeAway removes the names of unneeded files, which is quick; free deletes the files. It must be called by
// alone. m is nil if the marks could not be read.
func (s *Store) takeAway(ctx context.Context, have manifests, now Exempt, freed *spec.Freed) (m *mark, free func(), err error) {
	var later []func()
	free = func() {
		for _, f := range later {
			f()
		}
	}
	// List the files first, then their users: files made in between are ignored. Meanwhile a VM may sleep and wake
	// again.
	files, err := os.ReadDir(s.LayerDir())
	if err != nil {
		return nil, free, err
	}
	before, _, err := s.readManifests(ctx, have)
	if err != nil {
		return nil, free, err
	}
	if m, err = s.markRecords(ctx); err != nil {
		return nil, free, err
	}
	if err := s.markSnapshots(ctx, m, have); err != nil {
		return nil, free, err
	}
	if err := s.settleLent(m, have); err != nil {
		return nil, free, err
	}
	gone := map[string]bool{}
	for _, id := range m.unneeded(s, have, before, now) {
		dir := s.SnapshotDir(id)
		_, n := DiskUsage(dir)
		remove, err := snapshot.Discard(dir)
		if err != nil {
			// Its layers are still marked.
			return m, free, err
		}
		for _, d := range have[id].Disks {
			now.layers = append(now.layers, d.Layers...)
		}
		gone["snapshot "+id] = true
		delete(have, id)
		freed.Snapshots++
		freed.Bytes += n
		later = append(later, func() { _ = remove() }) // what stays has a name that the next sweep knows
	}
	m.layers.without(gone)
	var errs []error
	for _, e := range files {
		name := e.Name()
		owner, _, _ := strings.Cut(name, "-")
		if m.layers[name] != nil || m.running[owner] || owner == templateOwner {
			continue
		}
		path := filepath.Join(s.LayerDir(), name)
		if !now.layer(name) && s.young(path) {
			continue
		}
		n, err := s.removeLayer(m, owner, path)
		errs = append(errs, err)
		if n >= 0 {
			freed.Layers++
			freed.Bytes += n
		}
	}
	return m, free, errors.Join(errs...)
}

// removeLayer deletes a file that nothing names, unless a process has it open, or its VM has begun to run. Then it
// returns -1, otherwise how many bytes of disk it has freed.
func (s *Store) removeLayer(m *mark, owner, path string) (int64, error) {
	if i := slices.IndexFunc(m.records, func(r *Record) bool { return r.ID == owner }); i >= 0 {
		l, err := s.Lock(m.records[i].Spec.Name)
		if err != nil {
			return -1, nil //nolint:nilerr // it runs, or has another name: another time
		}
		defer l.Release()
	}
	if f, err := os.Open(path); err == nil {
		defer f.Close()
		// A user of a layer has it locked: see package disk.
		if osfile.TryLock(f, osfile.Exclusive) != nil {
			return -1, nil
		}
	}
	n, err := remove(path)
	if err != nil {
		return -1, err
	}
	return n, nil
}

// joinAlone joins the layers of a sleeping VM's disk, if there are too many.
func (s *Store) joinAlone(ctx context.Context, name string, have manifests) error {
	err := s.alone(ctx, func() error {
		m, err := s.markAll(ctx, have)
		if err != nil {
			return err
		}
		return s.joinLayers(ctx, name, m.layers)
	})
	if errors.Is(err, ErrStoreBusy) {
		return nil // another time
	}
	return err
}

// cacheFiles returns the names of the cache files of a snapshot's memory files that are there.
func (s *Store) cacheFiles(m *snapshot.Manifest) (names []string) {
	for _, f := range m.Memory.Files {
		if name, err := pagecache.NameOf(filepath.Join(s.SnapshotDir(m.ID), f.Name)); err == nil {
			names = append(names, name)
		}
	}
	return names
}

// SweepSlept deletes those sleeps of a VM that has just slept which its metadata does not keep: usually the
// previous one. It reads only these; where another VM may come back from one of them (see lend), the bytes of all
// records as well. It leaves a VM that has been woken meanwhile alone.
func (s *Store) SweepSlept(ctx context.Context, name string) error {
	var layers []string
	pages := map[string]bool{}
	free := func() {}
	err := s.alone(ctx, func() error {
		r, running, err := s.loadStill(name)
		if err != nil || running || r.Phase != Asleep {
			return nothing(err)
		}
		old := s.oldSleeps(r)
		if len(old) == 0 {
			return nil
		}
		known := s.lent(lentComplete)
		needed := sync.OnceValues(func() (map[string]bool, error) { return s.idsInRecords(ctx, r) })
		for _, man := range old {
			if s.kept(man.ID) {
				continue
			}
			if !known || s.lent(man.ID) {
				ids, err := needed()
				if err != nil {
					return err
				}
				if ids[man.ID] {
					continue
				}
			}
			names := s.cacheFiles(man)
			remove, err := snapshot.Discard(s.SnapshotDir(man.ID))
			if err != nil {
				return err
			}
			before := free
			free = func() { before(); _ = remove() }
			for _, name := range names {
				pages[name] = true
			}
			for _, l := range SnapshotStack(man).Layers {
				if !slices.Contains(r.Disk.Layers, l) {
					layers = append(layers, l)
				}
			}
		}
		last, err := snapshot.ReadManifest(s.SnapshotDir(r.Snapshot))
		if err != nil {
			return err
		}
		for _, name := range s.cacheFiles(last) {
			delete(pages, name)
		}
		if known && !s.lent(r.ID) {
			err = s.removeJoined(r, layers)
			layers = nil
		}
		return err
	})
	free()
	if errors.Is(err, ErrStoreBusy) {
		return ctx.Err() // another time
	}
	if err != nil {
		err = fmt.Errorf("deleting sleeps that are not kept: %w: Fleet.Prune tries that again", err)
	}
	if len(pages) > 0 {
		// If another snapshot has some of these pages, its next wake does without them.
		err = errors.Join(err, pagecache.New(s.PageCacheDir()).Forget(pages))
	}
	if err == nil && len(layers) > 0 && s.sweepDue() {
		// Layers were joined while it ran, which happens once in many sleeps.
		_, err = s.SweepExcept(ctx, Exempt{layers: layers})
	}
	return err
}

// removeJoined deletes those layers of a sleeping VM that only deleted sleeps of it have named.
func (s *Store) removeJoined(r *Record, layers []string) error {
	if len(layers) == 0 {
		return nil
	}
	needed := r.Disk.Layers
	for _, id := range r.ownSnapshots() {
		man, err := snapshot.ReadManifest(s.SnapshotDir(id))
		if errors.Is(err, snapshot.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		needed = append(slices.Clip(needed), SnapshotStack(man).Layers...)
	}
	var errs []error
	for _, l := range layers {
		if owner, _, _ := strings.Cut(l, "-"); owner == r.ID && !slices.Contains(needed, l) {
			_, err := s.removeLayer(&mark{}, owner, filepath.Join(s.LayerDir(), l))
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// oldSleeps returns those of a VM's last sleeps that exist, but that neither its metadata keeps nor the VM needs.
func (s *Store) oldSleeps(r *Record) (old []*snapshot.Manifest) {
	var sleeps []lifetime.Sleep
	there := map[string]*snapshot.Manifest{}
	for _, sl := range r.Sleeps {
		man, err := snapshot.ReadManifest(s.SnapshotDir(sl.Snapshot))
		if err != nil || man.Labels[labelKind] != KindSleep || man.Labels[labelOwner] != r.ID {
			continue
		}
		there[man.ID] = man
		sleeps = append(sleeps, lifetime.Sleep{ID: man.ID, Owner: r.ID, Created: time.Unix(0, man.CreatedUnixNano)})
	}
	for _, sl := range lifetime.Unkept([]lifetime.Sandbox{s.lasts(r)}, sleeps, time.Now()) {
		old = append(old, there[sl.ID])
	}
	return old
}

// idsInRecords returns the ids in the records of all VMs but r, whatever they mean.
func (s *Store) idsInRecords(ctx context.Context, r *Record) (map[string]bool, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "vms"))
	if err != nil {
		return nil, fmt.Errorf("listing VMs: %w", err)
	}
	ids := map[string]bool{}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if e.Name() == r.Spec.Name {
			continue
		}
		found := idsIn(s.RecordPath(e.Name()))
		if len(found) == 0 { // every record has one
			for _, path := range vmFiles(s.VMDir(e.Name())) {
				found = append(found, idsIn(path)...)
			}
		}
		for _, id := range found {
			ids[id] = true
		}
	}
	return ids, nil
}

// holders maps each layer to its users.
type holders map[string][]string

func (h holders) add(layers []string, who string) {
	for _, l := range layers {
		l = filepath.Base(l)
		h[l] = append(h[l], who)
	}
}

// without removes users that are gone.
func (h holders) without(gone map[string]bool) {
	for l, who := range h {
		if who = slices.DeleteFunc(who, func(w string) bool { return gone[w] }); len(who) == 0 {
			delete(h, l)
			continue
		}
		h[l] = who
	}
}

// only reports whether no one but who needs a layer.
func (h holders) only(layer string, who ...string) bool {
	for _, w := range h[layer] {
		if !slices.Contains(who, w) {
			return false
		}
	}
	return true
}

// Layers are joined when a sleeping VM's disk has more than looseLayers that only it and its own snapshot need.
// Layers that would make one with more data than maxJoin stay.
const (
	looseLayers = 4
	maxJoin     = 64 << 20 // bytes
)

// joinLayers shortens the stack of a VM that sleeps: a wake opens each layer, and a VM may sleep thousands of
// times. The joined layer has its own name, because a layer never changes: another store may have one of that name
// from an export. The old layers stay for the snapshot, and are swept when the next sleep has replaced it.
func (s *Store) joinLayers(ctx context.Context, name string, needed holders) error {
	l, err := s.Lock(name)
	if err != nil {
		return nil // it is being woken, or gone: another time
	}
	defer l.Release()
	r, err := s.Load(name)
	if err != nil || r.Phase != Asleep {
		return err
	}
	first, n := s.chooseJoin(r.Disk.Layers, func(layer string) bool {
		owner, _, _ := strings.Cut(layer, "-")
		return owner == r.ID && needed.only(layer, "VM "+name, "snapshot "+r.Snapshot)
	})
	if n == 0 {
		return nil
	}
	st, err := s.Absolute(disk.Stack{Layers: r.Disk.Layers[first : first+n]})
	if err != nil {
		return err
	}
	joined := r.NewLayer()
	// A name is used once, even if this process ends before its file is whole.
	if err := s.Save(r); err != nil {
		return err
	}
	err = disk.Squash(ctx, st.Layers, filepath.Join(s.LayerDir(), joined))
	if errors.Is(err, disk.ErrMerging) || errors.Is(err, disk.ErrInUse) {
		return nil // an older version was killed as it joined these: they can be opened as they are
	}
	if err != nil {
		return fmt.Errorf("joining layers of the disk of VM %s: %w", name, err)
	}
	// It is durable. Until the record names it, a sweep may delete it like any unnamed layer.
	r.Disk.Layers = slices.Replace(slices.Clone(r.Disk.Layers), first, first+n, joined)
	return s.Save(r)
}

// chooseJoin returns which neighbours to join so that looseLayers are left: those with the least data, so that
// each byte is copied seldom. If they have too much data, it chooses fewer; n is 0 for none.
func (s *Store) chooseJoin(layers []string, loose func(string) bool) (first, n int) {
	count := 0
	sizes := make([]int64, len(layers))
	for i, l := range layers {
		sizes[i] = maxJoin + 1
		if loose(l) {
			count++
			sizes[i], _ = DiskUsage(filepath.Join(s.LayerDir(), l))
		}
	}
	for n = count - looseLayers + 1; n > 1; n-- {
		if first = Lightest(sizes, n); sum(sizes[first:first+n]) <= maxJoin {
			return first, n
		}
	}
	return 0, 0
}

func sum(sizes []int64) (n int64) {
	for _, s := range sizes {
		n += s
	}
	return n
}

// remove deletes a file or a tree and returns how many bytes of disk that frees.
func remove(path string) (int64, error) {
	_, n := DiskUsage(path)
	return n, os.RemoveAll(path)
}
