package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/template"
	"github.com/drowse-vm/drowse/snapshot"
)

// mark is what the records, metadata and snapshots of a store name. None of it may be deleted.
//
// References move: a sleep hands layers from a record to a new snapshot, a clone hands them from a snapshot to a new
// record. A VM's process does the first at any time. The second needs the store's lock (Store.LockStore, shared). So a
// reader that holds that lock exclusively and reads records first, then snapshots, misses no reference.
type mark struct {
	// layers has the users of each layer, by the name of its file.
	layers holders
	// snapshots are the ids that a record or metadata names, with the reason.
	snapshots map[string]string
	// templates are those of templates.
	templates map[string]bool
	// bases are the snapshots that the next snapshot of a running VM builds on.
	bases map[string]bool
	// running are the ids of VMs with a process. The process makes and deletes their files itself.
	running map[string]bool
	// unclear are the ids in unreadable files: of VMs and snapshots that these files may need.
	unclear map[string]bool

	records  []*Record
	lasting  []lifetime.Sandbox
	problems []error
}

// manifests are the manifests of snapshots that have been read. They do not change, except for memory files that
// Compact replaces.
type manifests map[string]*snapshot.Manifest

// markAll reads all records and then all snapshots. Manifests in have are not read again.
func (s *Store) markAll(ctx context.Context, have manifests) (*mark, error) {
	m, err := s.markRecords(ctx)
	if err != nil {
		return nil, err
	}
	return m, s.markSnapshots(ctx, m, have)
}

// markRecords reads records and metadata.
func (s *Store) markRecords(ctx context.Context) (*mark, error) {
	m := &mark{layers: holders{}, snapshots: map[string]string{}, templates: map[string]bool{}, bases: map[string]bool{}, running: map[string]bool{}, unclear: map[string]bool{}}
	entries, err := os.ReadDir(filepath.Join(s.dir, "vms"))
	if err != nil {
		return nil, fmt.Errorf("listing VMs: %w", err)
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		r, running, err := s.loadStill(e.Name())
		switch {
		case errors.Is(err, spec.ErrNotFound): // being made, or removed
		case err != nil:
			m.problems = append(m.problems, fmt.Errorf("%w: what it may need is kept", err))
			m.guess(vmFiles(s.VMDir(e.Name())))
		default:
			m.add(s, r, running)
		}
	}
	return m, m.addTemplates(s.Templates())
}

// addTemplates marks the snapshots of templates.
func (m *mark) addTemplates(d template.Dir) error {
	list, bad, err := d.List()
	for _, e := range list {
		if e.Ready() {
			m.templates[e.Snapshot] = true
			m.snapshots[e.Snapshot] = fmt.Sprintf("is template %.12s: remove that instead", e.Key)
		}
	}
	for _, key := range bad {
		m.guess([]string{d.File(key)})
	}
	if len(bad) > 0 {
		m.problems, err = append(m.problems, fmt.Errorf("%w: what it may need is kept", err)), nil
	}
	return err
}

// loadStill reads a record under its lock, or reports that the VM's process may change it.
func (s *Store) loadStill(name string) (r *Record, running bool, err error) {
	if r, err = s.Load(name); err != nil {
		return nil, false, err
	}
	l, err := s.Lock(name)
	if errors.Is(err, spec.ErrRunning) {
		return r, true, nil
	}
	if err != nil {
		return nil, false, err
	}
	defer l.Release()
	r, err = s.Load(name)
	return r, false, err
}

// add marks what a record and its metadata name.
func (m *mark) add(s *Store, r *Record, running bool) {
	name := r.Spec.Name
	m.records = append(m.records, r)
	m.layers.add(r.Disk.Layers, "VM "+name)
	if r.Phase == Asleep {
		m.layers.add([]string{r.LastLayer()}, "VM "+name)
	}
	last := s.lasts(r)
	last.Running = running || last.Running && r.making()
	m.lasting = append(m.lasting, last)
	// The next reader of the record cleans up after a killed process. Until then the VM may have layers that its
	// record does not name, see adoptLayers.
	m.running[r.ID] = last.Running || r.Phase == Starting || r.Phase == Running
	need := func(id, why string) {
		if id != "" {
			m.snapshots[id] = why
		}
	}
	need(r.Snapshot, "is what VM "+name+" comes back from")
	need(r.Previous, "is what VM "+name+" slept in before it was taken back, and is kept until its next sleep")
	if r.Fork != nil && r.Snapshot == "" {
		// Its parent's process may be writing it: see adoptFork.
		need(r.Parent, "is what VM "+name+" comes back from")
	}
	if last.Running && r.Base != "" {
		m.bases[r.Base] = true
	}
	l, err := s.Metadata(name)
	if err != nil {
		m.guess([]string{filepath.Join(s.VMDir(name), metadataFile)})
		return
	}
	need(l.Rotate.To, "is what VM "+name+" begins anew from: see Rotate of its metadata")
}

// names reports whether something may need a snapshot, and why.
func (m *mark) names(id string) (why string, named bool) {
	if why, named = m.snapshots[id]; !named && m.unclear[id] {
		return "may be needed by a VM whose record or metadata cannot be read", true
	}
	return why, named
}

// markSnapshots reads the snapshots that exist now and adds them to have. It removes those that no longer exist.
func (s *Store) markSnapshots(ctx context.Context, m *mark, have manifests) error {
	// First: one that arrives meanwhile is in either place.
	if err := s.markArriving(m); err != nil {
		return err
	}
	there, unread, err := s.readManifests(ctx, have)
	if err != nil {
		return err
	}
	for id, err := range unread {
		m.problems = append(m.problems, fmt.Errorf("snapshot %s: %w: it and what it may need are kept", id, err))
		m.unclear[id] = true
		m.guess([]string{filepath.Join(s.SnapshotDir(id), snapshot.ManifestName)})
	}
	for id := range have {
		if !there[id] {
			delete(have, id)
			continue
		}
		for _, d := range have[id].Disks {
			m.layers.add(d.Layers, "snapshot "+id)
		}
	}
	return m.follow(s)
}

// readManifests reads the manifests that have lacks. It returns the ids of all snapshots, and why some are unreadable.
func (s *Store) readManifests(ctx context.Context, have manifests) (there map[string]bool, unread map[string]error, err error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return nil, nil, fmt.Errorf("listing snapshots: %w", err)
	}
	there, unread = map[string]bool{}, map[string]error{}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		id := e.Name()
		if snapshot.IsTemp(id) {
			continue
		}
		if have[id] == nil {
			man, err := snapshot.ReadManifest(s.SnapshotDir(id))
			if errors.Is(err, snapshot.ErrNotFound) {
				continue // removed just now
			}
			if err != nil {
				unread[id] = err
				continue
			}
			have[id] = man
		}
		there[id] = true
	}
	return there, unread, nil
}

// maxGuess is how much of a file is searched for ids, in bytes. A record with the largest policy has 2 MiB.
const maxGuess = 8 << 20

// vmFiles returns the files in a VM's directory that may say what it needs: its record, a new record not yet in
// its place, its metadata, and its audit trail, which begins with the VM's id and origin.
func vmFiles(dir string) (paths []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.Type().IsRegular() && filepath.Ext(e.Name()) != ".log" && e.Type()&os.ModeSocket == 0 {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths
}

// anID matches an id of a VM or a snapshot. A longer match is a hash of something else.
var anID = lazyregexp.New(`[0-9a-f]{32,}`)

// guess marks the ids in unreadable files.
func (m *mark) guess(paths []string) {
	for _, path := range paths {
		for _, id := range idsIn(path) {
			m.unclear[id] = true
		}
	}
}

func idsIn(path string) (ids []string) {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	data, _ := io.ReadAll(io.LimitReader(f, maxGuess))
	for _, run := range anID.FindAllString(string(data), -1) {
		if len(run) == len(spec.NewID()) {
			ids = append(ids, run)
		}
	}
	return ids
}

// follow marks the layers of unclear owners, and the layers below them, as the layers themselves name them.
func (m *mark) follow(s *Store) error {
	if len(m.unclear) == 0 {
		return nil
	}
	all, err := disk.Find(s.LayerDir())
	if err != nil {
		return fmt.Errorf("looking for the layers of a VM that cannot be read: %w", err)
	}
	byID := map[disk.ID]disk.LayerInfo{}
	for _, l := range all {
		byID[l.ID] = l
	}
	for _, l := range all {
		owner, _, _ := strings.Cut(filepath.Base(l.Path), "-")
		if !m.unclear[owner] {
			continue
		}
		for n := 0; n < len(all); n++ { // an end, even if the layers form a circle
			m.layers.add([]string{l.Path}, "what cannot be read")
			next, ok := byID[l.Parent]
			if !ok {
				break
			}
			l = next
		}
	}
	return nil
}

// unneeded returns those snapshots from before the records were read that are not needed: sleeps by the rules of
// metadata, forks that no VM comes back from, and, if now says so, abandoned disks. All others stay until they are
// removed explicitly.
func (m *mark) unneeded(s *Store, have manifests, before map[string]bool, now Exempt) (drop []string) {
	var sleeps []lifetime.Sleep
	known := func(owner string) bool {
		return slices.ContainsFunc(m.lasting, func(b lifetime.Sandbox) bool { return b.ID == owner })
	}
	for id := range before {
		man := have[id]
		if man == nil {
			continue
		}
		owner := man.Labels[labelOwner]
		_, named := m.names(id)
		named = named || m.bases[id] || m.unclear[owner] || s.kept(id)
		switch man.Labels[labelKind] {
		case KindSleep:
			// Metadata decides over the sleeps of an existing VM, whatever their age.
			tagged := named || !known(owner) && !now.snapshot(id, owner) && s.young(s.SnapshotDir(id))
			sleeps = append(sleeps, lifetime.Sleep{ID: id, Owner: owner, Created: time.Unix(0, man.CreatedUnixNano), Tagged: tagged})
		case KindAbandoned:
			if !named && (now.abandoned || slices.Contains(now.Owners, owner)) {
				drop = append(drop, id)
			}
		case KindFork:
			if !named && (now.snapshot(id, owner) || !s.young(s.SnapshotDir(id))) {
				drop = append(drop, id)
			}
		}
	}
	for _, old := range lifetime.Unkept(m.lasting, sleeps, time.Now()) {
		drop = append(drop, old.ID)
	}
	return drop
}

// graceTime is how old an unnamed file must be before a sweep deletes it, unless it belongs to what is being
// removed. A program that makes files must name them within that time.
const graceTime = 10 * time.Minute

// young reports whether a file has changed too recently to be deleted. A file whose status is unreadable is young.
func (s *Store) young(path string) bool {
	st, err := os.Lstat(path)
	return err != nil || time.Since(st.ModTime()) < s.Grace
}

// Exempt is what a sweep need not spare while it is young: it belongs to what is being removed. It still stays if
// something else names it. The zero value is nothing.
type Exempt struct {
	Owners, Snapshots, layers []string
	// abandoned are the disks that VMs left when they were taken back.
	abandoned bool
}

// of adds what a removed VM named.
func (x *Exempt) of(r *Record) {
	x.Owners = append(x.Owners, r.ID)
	x.Snapshots = append(x.Snapshots, r.Snapshot, r.Previous, r.Base, r.Parent)
	x.layers = append(x.layers, r.Disk.Layers...)
}

func (x Exempt) snapshot(id, owner string) bool {
	return slices.Contains(x.Snapshots, id) || slices.Contains(x.Owners, owner)
}

func (x Exempt) layer(name string) bool {
	owner, _, _ := strings.Cut(name, "-")
	return slices.Contains(x.layers, name) || slices.Contains(x.Owners, owner)
}
