package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// Snapshots of which memory or layers are still on their way are in a directory of their own, so nothing that looks for
// a snapshot or a layer finds one of them. Only the node of a host that shares sandboxes makes and removes them: see
// package cluster.

// ArrivingDir returns the directory of a snapshot that is on its way; of all of them for an empty id.
func (s *Store) ArrivingDir(id string) string { return filepath.Join(s.dir, "arriving", id) }

// LaterLayer is a layer that comes after its snapshot.
type LaterLayer struct {
	// Name is that in the source, which does not have it among its files.
	Name string
	// Sum is a SHA-256 that only this content has, as 64 hex digits.
	Sum string
	// Size is how many bytes disk.Pack writes for it.
	Size int64
	// Same reads to the end of what disk.Pack writes for a layer of this store, and fails unless that is this one.
	Same func(io.Reader) error
}

// Base is the name that the layer has here.
func (l *LaterLayer) Base() string { return contentPrefix + l.Sum }

// ReceiveLater is ReceiveSnapshot without the memory: see snapshot.ReceiveLater. Image and other layers are whole when
// it returns, and of the layers to come there is what begin has written at the given paths: header and table, durably.
// It is not called for those that the store has. Arrived must follow.
func (s *Store) ReceiveLater(ctx context.Context, src snapshot.Source, o ImportOptions, later []LaterLayer, begin func(l *LaterLayer, path string) error) (res ImportResult, err error) {
	parent := s.ArrivingDir("")
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return res, err
	}
	if err := osfile.SyncDir(s.dir); err != nil {
		return res, err
	}
	return s.takeIn(ctx, o, func(_ string, im *importing) (*snapshot.Imported, error) {
		var more snapshot.More
		var come []*LaterLayer
		for i := range later {
			l := &later[i]
			if !layerName.MatchString(l.Name) {
				return nil, fmt.Errorf("layer %.80q: %w: no store calls a layer so", l.Name, snapshot.ErrForeign)
			}
			if im.layers[l.Name] = s.layerLike(ctx, l); im.layers[l.Name] == "" {
				im.layers[l.Name] = l.Base()
				come, more.Bytes = append(come, l), more.Bytes+l.Size
			}
		}
		more.Put = func(dir string) error {
			im.coming = dir
			var g errgroup.Group
			g.SetLimit(beginsAtOnce)
			for _, l := range come {
				g.Go(func() error {
					path := filepath.Join(dir, l.Base())
					if err := begin(l, path); err != nil {
						return fmt.Errorf("layer %.80q: %w", l.Name, err)
					}
					return checkImportedLayer(path)
				})
			}
			return g.Wait()
		}
		return snapshot.ReceiveLater(ctx, src, parent, im, more)
	})
}

// beginsAtOnce is how many layers begin to come at once.
const beginsAtOnce = 8

// MayHaveLayer reports whether the store has a layer that may have the content of another.
func (s *Store) MayHaveLayer(l LaterLayer) bool {
	for _, name := range []string{l.Base(), filepath.Base(l.Name)} {
		if _, err := os.Lstat(filepath.Join(s.LayerDir(), name)); err == nil {
			return true
		}
	}
	return false
}

// layerLike returns the name of a layer of this store that has the content of another; empty if there is none.
func (s *Store) layerLike(ctx context.Context, l *LaterLayer) string {
	if _, err := os.Lstat(filepath.Join(s.LayerDir(), l.Base())); err == nil {
		return l.Base()
	}
	path := filepath.Join(s.LayerDir(), l.Name)
	if info, err := disk.Inspect(path); err != nil || info.State != disk.StateSealed.String() {
		return "" // what is not there, in use or damaged is another one
	}
	if n, err := disk.PackedSize(path); err != nil || n != l.Size {
		return ""
	}
	r, w := io.Pipe()
	defer r.Close()
	go func() { w.CloseWithError(disk.Pack(ctx, w, path)) }()
	if l.Same(r) != nil {
		return ""
	}
	return l.Name
}

// layersIn returns a stack with the paths of those layers in a directory that are there, and whether there are any. An
// empty dir has none.
func layersIn(dir string, st disk.Stack) (at disk.Stack, are bool, err error) {
	at.Layers = slices.Clone(st.Layers)
	for i, path := range at.Layers {
		if dir == "" {
			break
		}
		there := filepath.Join(dir, filepath.Base(path))
		if _, err := os.Lstat(there); err == nil {
			at.Layers[i], are = there, true
		} else if !errors.Is(err, fs.ErrNotExist) {
			return at, are, err
		}
	}
	return at, are, nil
}

// LayersArrive reports whether layers of a stack are on their way with a snapshot.
func (s *Store) LayersArrive(id string, st disk.Stack) (bool, error) {
	if !s.IsArriving(id) {
		return false, nil
	}
	_, are, err := layersIn(s.ArrivingDir(id), st)
	return are, err
}

// WithLayers calls do with a stack whose layers may be on their way with a snapshot, by the paths where they are now.
// Of those do must need no more than header and table.
func (s *Store) WithLayers(id string, st disk.Stack, do func(disk.Stack) error) error {
	for try := 0; ; try++ {
		at := st
		if s.IsArriving(id) {
			var err error
			if at, _, err = layersIn(s.ArrivingDir(id), st); err != nil {
				return err
			}
		}
		// They may arrive in between, and are moved then.
		if err := do(at); try > 0 || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
}

// Keep keeps a snapshot until Unkeep, although the VM that sleeps in it is removed. was reports that it is kept anyway.
func (s *Store) Keep(ctx context.Context, id string) (was bool, err error) {
	unlock, err := s.Share(ctx)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	m, err := s.Manifest(id)
	if err != nil {
		return false, err
	}
	was = s.kept(id)
	if err = s.lendOwner(m); err == nil && !was {
		err = s.keep(id)
	}
	return was, err
}

// Unkeep lets sweeps delete a snapshot that was received, now that a record names it, once none does.
func (s *Store) Unkeep(ctx context.Context, id string) error {
	unlock, err := s.Share(ctx)
	if err != nil {
		return err
	}
	return errors.Join(s.unkeep(id), unlock())
}

// Arrived makes a snapshot of one that is all there, and durable.
func (s *Store) Arrived(ctx context.Context, id string) error {
	// No sweep sees it in neither place.
	unlock, err := s.Share(ctx)
	if err != nil {
		return err
	}
	err = s.settleLayers(s.ArrivingDir(id))
	if err == nil {
		err = snapshot.Arrived(s.FS, s.ArrivingDir(id), s.SnapshotDir(id))
	}
	return errors.Join(err, unlock())
}

// settleLayers gives the layers in the directory of a snapshot on its way their names, durably. The snapshot needs them
// from then on, so it comes after them.
func (s *Store) settleLayers(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), contentPrefix) {
			continue
		}
		from := filepath.Join(dir, e.Name())
		// It was synced: see archive.Arrival.Run.
		err := s.FS.RenameNew(from, filepath.Join(s.LayerDir(), e.Name()))
		if errors.Is(err, fs.ErrExist) {
			err = s.FS.Remove(from) // it has come with another snapshot
		}
		if err != nil {
			return fmt.Errorf("placing a layer: %w", err)
		}
	}
	return s.FS.SyncDir(s.LayerDir())
}

// Arriving returns the ids of the snapshots that are on their way.
func (s *Store) Arriving() (ids []string, err error) {
	entries, err := os.ReadDir(s.ArrivingDir(""))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if IDPattern.MatchString(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, err
}

// IsArriving reports whether a snapshot is on its way.
func (s *Store) IsArriving(id string) bool {
	_, err := os.Lstat(filepath.Join(s.ArrivingDir(id), snapshot.ManifestName))
	return id != "" && err == nil
}

// DropArriving removes a snapshot whose memory does not come any more. A VM that runs on it gets no more of it.
func (s *Store) DropArriving(id string) error { return snapshot.Remove(s.ArrivingDir(id)) }

// CleanArriving removes what a killed ReceiveLater or DropArriving has left.
func (s *Store) CleanArriving() error {
	_, err := snapshot.Clean(s.ArrivingDir(""))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// ComingManifest returns the manifest of a snapshot, also of one that is on its way.
func (s *Store) ComingManifest(id string) (*snapshot.Manifest, error) {
	for range 2 { // it may arrive in between
		if m, err := snapshot.ReadManifest(s.ArrivingDir(id)); err == nil {
			return m, nil
		}
		if m, err := s.Manifest(id); !errors.Is(err, snapshot.ErrNotFound) && !errors.Is(err, spec.ErrArriving) {
			return m, err
		}
	}
	return s.Manifest(id)
}

// arrivingError is why a snapshot that is on its way cannot be used.
func arrivingError(id string) error {
	return fmt.Errorf("snapshot %s: %w", id, spec.ErrArriving)
}

// SystemDisks returns the disks with agents that this store has.
func (s *Store) SystemDisks() []string {
	paths, _ := filepath.Glob(filepath.Join(s.systemDir(), "*.erofs")) // without special characters in the pattern's end
	return paths
}

// HotPages returns the pages of a snapshot's memory that its guest needs to be ready, and further ones that it needs
// soon.
func HotPages(snap *snapshot.Snapshot) (hot, soon []uint64, err error) {
	return instance.HotPages(snap.Payloads())
}

// markArriving marks the layers of snapshots that are on their way.
func (s *Store) markArriving(m *mark) error {
	ids, err := s.Arriving()
	if err != nil {
		return fmt.Errorf("listing snapshots on their way: %w", err)
	}
	for _, id := range ids {
		man, err := snapshot.ReadManifest(s.ArrivingDir(id))
		switch {
		case errors.Is(err, snapshot.ErrNotFound): // it has arrived, or was dropped
		case err != nil:
			m.problems = append(m.problems, fmt.Errorf("snapshot %s, on its way: %w: what it may need is kept", id, err))
			m.guess([]string{filepath.Join(s.ArrivingDir(id), snapshot.ManifestName)})
		default:
			for _, d := range man.Disks {
				m.layers.add(d.Layers, "arriving snapshot "+id)
			}
		}
	}
	return nil
}
