package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
)

// Freed is what a sweep has deleted.
type Freed struct {
	Snapshots int `json:"snapshots"`
	Layers    int `json:"layers"`
	// CacheFiles had decompressed pages of snapshots that are gone.
	CacheFiles int   `json:"cache_files"`
	Bytes      int64 `json:"bytes"`
}

// templateOwner begins the names of the empty file systems, which are small and
// needed again.
const templateOwner = "ext4"

// Labels of a snapshot.
const (
	labelKind   = "drowse.kind"   // kindSleep, kindNamed, kindDisk or kindFork
	labelRecord = "drowse.record" // the VM's record at that time
	labelOwner  = "drowse.owner"  // the id of that VM
	labelNote   = "drowse.note"   // the user's words

	kindSleep = "sleep"
	kindNamed = "named"
	kindFork  = "fork"
)

// Sweep deletes the sleep snapshots that no VM needs any more and no Label keeps, the disk layers that
// neither a VM nor a snapshot needs, decompressed pages of no snapshot, and what interrupted commands have left. It
// never deletes a snapshot that was asked for by name. When a record or a snapshot
// cannot be read, nothing is deleted that it might need.
func (s *Store) Sweep(ctx context.Context) (Freed, error) {
	var freed Freed
	unlock, err := s.lockImports(unix.LOCK_EX)
	if errors.Is(err, ErrRunning) {
		return freed, nil // another time
	}
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	defer func() { _ = unlock() }()
	// The files first, then who needs them: what is made in between is not in the
	// list, and so not deleted.
	files, err := os.ReadDir(s.layerDir())
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	snaps, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	records, err := s.List()
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	layers, snapshots, live := holders{}, map[string]bool{}, map[string]bool{}
	var lasting []lifetime.Sandbox
	for _, r := range records {
		// The process of a VM makes and deletes its files itself, also while its
		// record does not say yet that it runs. Without a process the record
		// stands still as long as the lock is held, so it is read then.
		l, err := s.lock(r.Spec.Name)
		switch {
		case err == nil:
			r, err = s.load(r.Spec.Name)
			l.release()
			if err != nil {
				return freed, fmt.Errorf("tidying up: %w", err)
			}
		case errors.Is(err, ErrRunning):
			live[r.ID] = true
		case !errors.Is(err, ErrNotFound):
			return freed, fmt.Errorf("tidying up: %w", err)
		}
		layers.add(r.Disk.Layers, "VM "+r.Spec.Name)
		if r.Snapshot != "" {
			snapshots[r.Snapshot] = true
		}
		if r.Previous != "" {
			snapshots[r.Previous] = true
		}
		last := s.lasts(r)
		last.Running = live[r.ID]
		if l, err := s.Label(r.Spec.Name); err == nil && l.Rotate.To != "" {
			snapshots[l.Rotate.To] = true
		}
		lasting = append(lasting, last)
		if r.Base != "" && live[r.ID] {
			snapshots[r.Base] = true
		}
	}
	memory, err := s.sweepSnapshots(ctx, snaps, snapshots, lasting, layers, &freed)
	if err != nil {
		return freed, fmt.Errorf("tidying up: %w", err)
	}
	// A snapshot that has come meanwhile is not in the list: what there may be for it
	// already, its next wake does without.
	n, bytes, err := pagecache.New(s.pageCacheDir()).Sweep(memory)
	freed.CacheFiles, freed.Bytes = n, freed.Bytes+bytes
	errs := []error{err, os.RemoveAll(s.oldPageCacheDir())}
	for _, e := range files {
		owner, _, _ := strings.Cut(e.Name(), "-")
		if layers[e.Name()] != nil || live[owner] || owner == templateOwner {
			continue
		}
		n, err := remove(filepath.Join(s.layerDir(), e.Name()))
		errs = append(errs, err)
		if n > 0 {
			freed.Layers++
			freed.Bytes += n
		}
	}
	for _, r := range records {
		errs = append(errs, s.joinLayers(ctx, r.Spec.Name, layers))
	}
	errs = append(errs, sweepNetworks())
	return freed, errors.Join(errs...)
}

// holders says who needs each layer.
type holders map[string][]string

func (h holders) add(layers []string, who string) {
	for _, l := range layers {
		l = filepath.Base(l)
		h[l] = append(h[l], who)
	}
}

// only says whether nobody else needs a layer.
func (h holders) only(layer string, who ...string) bool {
	for _, w := range h[layer] {
		if !slices.Contains(who, w) {
			return false
		}
	}
	return true
}

// Layers are joined when a sleeping VM's disk has more than looseLayers that only it and
// its own snapshot need; those that would make a layer with more data than maxJoin stay as they are.
const (
	looseLayers = 4
	maxJoin     = 64 << 20 // bytes
)

// joinLayers shortens the stack of a VM that sleeps: a wake opens each layer, and a VM may
// sleep thousands of times. The joined layer has a name of its own, since a layer never changes: another store may have
// one of that name from an export. Those that it was made of stay for the snapshot, and are swept when the next sleep has
// taken its place.
func (s *Store) joinLayers(ctx context.Context, name string, needed holders) error {
	l, err := s.lock(name)
	if err != nil {
		return nil // it is being woken, or gone: another time
	}
	defer l.release()
	r, err := s.load(name)
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
	st, err := s.absolute(disk.Stack{Layers: r.Disk.Layers[first : first+n]})
	if err != nil {
		return err
	}
	joined := r.newLayer()
	// A name is used once, even if this process ends before its file is whole.
	if err := s.save(r); err != nil {
		return err
	}
	err = disk.Squash(ctx, st.Layers, filepath.Join(s.layerDir(), joined))
	if errors.Is(err, disk.ErrMerging) || errors.Is(err, disk.ErrInUse) {
		return nil // an older version was killed as it joined these: they can be opened as they are
	}
	if err != nil {
		return fmt.Errorf("joining layers of the disk of VM %s: %w", name, err)
	}
	// It is durable. Until the record names it, it is swept like any that nobody names.
	r.Disk.Layers = slices.Replace(slices.Clone(r.Disk.Layers), first, first+n, joined)
	return s.save(r)
}

// chooseJoin returns which neighbours are to be joined so that looseLayers are left: those with the least data of so many,
// so that each byte is copied seldom. If they have too much, it is fewer; n is 0 if none are to be.
func (s *Store) chooseJoin(layers []string, loose func(string) bool) (first, n int) {
	count := 0
	sizes := make([]int64, len(layers))
	for i, l := range layers {
		sizes[i] = maxJoin + 1
		if loose(l) {
			count++
			sizes[i], _ = diskUsage(filepath.Join(s.layerDir(), l))
		}
	}
	for n = count - looseLayers + 1; n > 1; n-- {
		if first = lightest(sizes, n); sum(sizes[first:first+n]) <= maxJoin {
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

// sweepSnapshots returns the ids of the memory files of those snapshots that stay.
func (s *Store) sweepSnapshots(ctx context.Context, entries []fs.DirEntry, needed map[string]bool, lasting []lifetime.Sandbox, layers holders, freed *Freed) (memory map[string]bool, err error) {
	if _, err := snapshot.Clean(filepath.Join(s.dir, "snapshots")); err != nil {
		return nil, err
	}
	var (
		all    []*snapshot.Manifest
		sleeps []lifetime.Sleep
		drop   = map[string]bool{}
	)
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if snapshot.IsTemp(e.Name()) {
			continue
		}
		m, err := s.manifest(e.Name())
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			return nil, fmt.Errorf("snapshot %s: %w: nothing has been deleted that it may need", e.Name(), err)
		}
		all = append(all, m)
		switch m.Labels[labelKind] {
		case kindSleep:
			// One of a VM that runs is there for a moment before the record names it.
			sleeps = append(sleeps, lifetime.Sleep{ID: e.Name(), Owner: m.Labels[labelOwner], Created: time.Unix(0, m.CreatedUnixNano), Tagged: needed[e.Name()] || s.kept(e.Name())})
		case kindFork:
			drop[e.Name()] = !needed[e.Name()] && !s.kept(e.Name())
		}
	}
	for _, old := range lifetime.Unkept(lasting, sleeps, time.Now()) {
		drop[old.ID] = true
	}
	memory = map[string]bool{}
	for _, m := range all {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if drop[m.ID] {
			dir := s.snapshotDir(m.ID)
			_, n := diskUsage(dir)
			if err := snapshot.Remove(dir); err != nil {
				return nil, err
			}
			freed.Snapshots++
			freed.Bytes += n
			continue
		}
		for _, d := range m.Disks {
			layers.add(d.Layers, "snapshot "+m.ID)
		}
		for _, f := range m.Memory.Files {
			memory[f.ID] = true
		}
	}
	return memory, nil
}

// remove deletes a file or a tree and returns how many bytes of disk that gives back.
func remove(path string) (int64, error) {
	_, n := diskUsage(path)
	return n, os.RemoveAll(path)
}
