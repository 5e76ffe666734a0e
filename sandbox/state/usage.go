package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
)

// diskBlock is the unit of st_blocks, in bytes (stat(2)).
const diskBlock = 512

// DiskUsage returns the bytes that a file or the files of a tree take on disk: all, and those that deleting them
// would free, which excludes files with other names. Unreadable files count nothing.
func DiskUsage(path string) (all, exclusive int64) {
	_ = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				all += st.Blocks * diskBlock
				if d.IsDir() || st.Nlink == 1 {
					exclusive += st.Blocks * diskBlock
				}
			}
		}
		return nil
	})
	return all, exclusive
}

// Usage is what a store takes on disk, in bytes, by purpose. A file with several names counts once, in the first
// field that it belongs to.
type Usage struct {
	// Layers are writable disks of VMs and of snapshots.
	Layers int64 `json:"layers"`
	// Snapshots are those that VMs come back from, also those whose memory is on its way. Kept are all others: named
	// ones, those with tags, and kept earlier sleeps.
	Snapshots int64 `json:"snapshots"`
	Kept      int64 `json:"kept"`
	Images    int64 `json:"images"`
	// Pages are decompressed pages of snapshots, which can be made again.
	Pages   int64 `json:"pages"`
	Volumes int64 `json:"volumes"`
}

// Usage looks at the files of the store: some microseconds for each. A file that disappears meanwhile is not an
// error. If ctx ends first, the result is incomplete.
func (s *Store) Usage(ctx context.Context) (u Usage, err error) {
	c := counter{ctx: ctx, seen: map[inode]bool{}}
	// List the snapshots first, then their users: one that a VM falls asleep in meanwhile is not in the list.
	entries, err := os.ReadDir(filepath.Join(s.dir, "snapshots"))
	if err != nil {
		return u, fmt.Errorf("looking at what the store takes: %w", err)
	}
	needed := map[string]bool{}
	records, err := s.List()
	if err != nil && len(records) == 0 {
		return u, fmt.Errorf("looking at what the store takes: %w", err)
	}
	for _, r := range records {
		needed[r.Snapshot], needed[r.Previous], needed[r.Base] = true, true, true
	}
	errs := []error{err, c.add(s.LayerDir(), &u.Layers), c.add(s.ArrivingDir(""), &u.Snapshots)}
	for _, of := range []struct {
		needed bool
		bytes  *int64
	}{{true, &u.Snapshots}, {false, &u.Kept}} {
		for _, e := range entries {
			if needed[e.Name()] == of.needed {
				errs = append(errs, c.add(s.SnapshotDir(e.Name()), of.bytes))
			}
		}
	}
	errs = append(errs, c.add(filepath.Join(s.ImageDir(), "images"), &u.Images), c.add(s.PageCacheDir(), &u.Pages),
		c.add(filepath.Join(s.dir, "volumes"), &u.Volumes))
	if err := errors.Join(errs...); err != nil {
		return u, fmt.Errorf("looking at what the store takes: %w", err)
	}
	return u, nil
}

type inode struct{ device, number uint64 }

// counter adds up what files take, each once.
type counter struct {
	ctx  context.Context
	seen map[inode]bool
}

// add adds what a tree takes. A missing tree takes nothing.
func (c counter) add(path string, sum *int64) error {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to // several stores may share one
	}
	return filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if cerr := c.ctx.Err(); cerr != nil {
			return cerr
		}
		var info fs.FileInfo
		if err == nil {
			info, err = d.Info()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return nil
		}
		if st.Nlink > 1 && !d.IsDir() {
			id := inode{st.Dev, st.Ino}
			if c.seen[id] {
				return nil
			}
			c.seen[id] = true
		}
		*sum += st.Blocks * diskBlock
		return nil
	})
}

// DiskUse is what a VM has made the host store.
type DiskUse struct {
	// Bytes are those of the layers and snapshots that it wrote, if they are still there, of decompressed pages of these,
	// of its directory with logs and audit trail, and of its directories below those that its metadata has it promote
	// to. Memory that its snapshots share with those of another VM, of which it is a fork, is the
	// other's as long as that has it.
	Bytes int64
	// Loose are the layers that it wrote and nobody else needs, nor a snapshot but the one that it slept in
	// last: when they are joined, its next sleep frees them.
	Loose map[string]bool
	// Pages are the names of the files of decompressed pages among them, and PageBytes what they take. They can be made
	// again.
	Pages     map[string]bool
	PageBytes int64
}

// DiskUse looks at each record, each manifest and each layer's name of the store.
func (s *Store) DiskUse(ctx context.Context, r *Record) (u DiskUse, err error) {
	have, layers, err := s.written(ctx)
	records, rerr := s.List()
	if err := errors.Join(err, rerr); err != nil {
		return u, fmt.Errorf("adding up what %s has on disk: %w", r.Spec.Name, err)
	}
	return s.diskUse(ctx, r, have, layers, records)
}

// QuotaUse is what a VM with a disk quota has made the host store, in bytes.
type QuotaUse struct {
	Name        string
	Quota, Used int64
}

// QuotaUses returns it for all VMs that have a disk quota, in the order of List.
func (s *Store) QuotaUses(ctx context.Context) (all []QuotaUse, err error) {
	l, err := limits.Read(s.dir)
	have, layers, werr := s.written(ctx)
	records, rerr := s.List()
	if err := errors.Join(err, werr, rerr); err != nil {
		return nil, fmt.Errorf("adding up what VMs have on disk: %w", err)
	}
	for _, r := range records {
		m, _ := s.Metadata(r.Spec.Name)
		quota := l.DiskQuota(r.Spec, m.EffectiveClass())
		if quota == 0 {
			continue
		}
		u, err := s.diskUse(ctx, r, have, layers, records)
		if err != nil {
			return nil, fmt.Errorf("adding up what %s has on disk: %w", r.Spec.Name, err)
		}
		all = append(all, QuotaUse{r.Spec.Name, quota, u.Bytes})
	}
	return all, nil
}

func (s *Store) diskUse(ctx context.Context, r *Record, have manifests, layers []fs.DirEntry, records []*Record) (u DiskUse, err error) {
	c := counter{ctx: ctx, seen: map[inode]bool{}}
	u.Loose, u.Pages = map[string]bool{}, map[string]bool{}
	var errs []error
	for _, e := range layers {
		// A new layer is called .ID-n.tmp until it is complete.
		if id, _, _ := strings.Cut(strings.TrimPrefix(e.Name(), "."), "-"); id == r.ID {
			errs = append(errs, c.add(filepath.Join(s.LayerDir(), e.Name()), &u.Bytes))
			u.Loose[e.Name()] = true
		}
	}
	need := func(layers []string) {
		maps.DeleteFunc(u.Loose, func(l string, _ bool) bool { return slices.Contains(layers, l) })
	}
	for _, other := range records {
		if other.ID != r.ID {
			need(other.Disk.Layers)
		}
	}
	for id, m := range have {
		for _, d := range m.Disks {
			if id != r.Snapshot {
				need(d.Layers)
			}
		}
		if m.Labels[labelOwner] == r.ID {
			continue
		}
		// What others made counts for them.
		var st syscall.Stat_t
		if syscall.Stat(filepath.Join(s.SnapshotDir(id), snapshot.MemoryName), &st) == nil {
			c.seen[inode{st.Dev, st.Ino}] = true
		}
	}
	for id, m := range have {
		if m.Labels[labelOwner] == r.ID {
			s.addPages(c, m, &u)
			errs = append(errs, c.add(s.SnapshotDir(id), &u.Bytes))
		}
	}
	if s.IsArriving(r.Snapshot) {
		coming, _ := os.ReadDir(s.ArrivingDir(r.Snapshot)) // it may arrive
		for _, e := range coming {
			if snapshot.IsFile(e.Name()) { // layers count for nobody when they are there
				errs = append(errs, c.add(filepath.Join(s.ArrivingDir(r.Snapshot), e.Name()), &u.Bytes))
			}
		}
	}
	u.Bytes += u.PageBytes
	m, _ := s.Metadata(r.Spec.Name) // if it cannot be read, the VM promotes nothing
	var to []string
	for _, p := range m.Persist.Promote {
		if !slices.Contains(to, p.To) {
			to = append(to, p.To)
			errs = append(errs, c.add(filepath.Join(p.To, r.Spec.Name), &u.Bytes))
		}
	}
	return u, errors.Join(append(errs, c.add(s.VMDir(r.Spec.Name), &u.Bytes))...)
}

// addPages adds the decompressed pages of those memory files of a snapshot that c has not seen in one of another VM.
func (s *Store) addPages(c counter, m *snapshot.Manifest, u *DiskUse) {
	for _, f := range m.Memory.Files {
		path := filepath.Join(s.SnapshotDir(m.ID), f.Name)
		var st, cached syscall.Stat_t
		if syscall.Stat(path, &st) != nil || c.seen[inode{st.Dev, st.Ino}] {
			continue
		}
		name, err := pagecache.NameOf(path)
		if err != nil || u.Pages[name] || syscall.Stat(filepath.Join(s.PageCacheDir(), name), &cached) != nil {
			continue
		}
		u.Pages[name] = true
		u.PageBytes += cached.Blocks * diskBlock
	}
}

// ForgetPages deletes files of decompressed pages: see DiskUse.Pages.
func (s *Store) ForgetPages(names map[string]bool) error {
	return pagecache.New(s.PageCacheDir()).Forget(names)
}

// A PageUse says for whom decompressed pages of a memory file count: see DiskUse.
type PageUse struct {
	Own    bool // for the VM that asks
	Others bool // for others, which have a disk quota
}

// PageUses returns it for each memory file, by name, of a snapshot that the VM of an id came back from.
func (s *Store) PageUses(vm, id string) (map[string]PageUse, error) {
	m, err := snapshot.ReadManifest(s.SnapshotDir(id))
	if err != nil {
		return nil, err
	}
	out := map[string]PageUse{}
	shared := map[inode]string{}
	for _, f := range m.Memory.Files {
		var st syscall.Stat_t
		path := filepath.Join(s.SnapshotDir(id), f.Name)
		if err := syscall.Stat(path, &st); err != nil {
			return nil, &os.PathError{Op: "stat", Path: path, Err: err}
		}
		if f.Name == snapshot.MemoryName || st.Nlink == 1 {
			out[f.Name] = s.pageUse(vm, m)
		} else {
			shared[inode{st.Dev, st.Ino}] = f.Name
		}
	}
	if len(shared) == 0 {
		return out, nil
	}
	// A file counts for the VM whose snapshot wrote it, which has it as MemoryName, or else for all that have it.
	all, err := filepath.Glob(filepath.Join(s.dir, "snapshots", "*", snapshot.MemoryName+"*"))
	if err != nil {
		return nil, err
	}
	written := map[string]bool{}
	for _, path := range all {
		var st syscall.Stat_t
		if syscall.Stat(path, &st) != nil {
			continue
		}
		name, is := shared[inode{st.Dev, st.Ino}]
		if !is || written[name] {
			continue
		}
		of, err := snapshot.ReadManifest(filepath.Dir(path))
		if err != nil {
			continue
		}
		u := s.pageUse(vm, of)
		if written[name] = filepath.Base(path) == snapshot.MemoryName; !written[name] {
			u = PageUse{u.Own || out[name].Own, u.Others || out[name].Others}
		}
		out[name] = u
	}
	return out, nil
}

// pageUse returns for whom the pages of a snapshot count.
func (s *Store) pageUse(vm string, m *snapshot.Manifest) PageUse {
	id := m.Labels[labelOwner]
	if id == vm {
		return PageUse{Own: true}
	}
	other, err := s.Load(m.Sandbox)
	if err != nil || other.ID != id { // removed, or renamed
		all, _ := s.List()
		at := slices.IndexFunc(all, func(o *Record) bool { return o.ID == id })
		if at < 0 {
			return PageUse{}
		}
		other = all[at]
	}
	l, err := limits.Read(s.dir)
	meta, _ := s.Metadata(other.Spec.Name)
	return PageUse{Others: err != nil || l.DiskQuota(other.Spec, meta.EffectiveClass()) > 0}
}

// Owner returns the owner that a VM counts for: that of its metadata. One whose metadata cannot be read has none.
func (s *Store) Owner(name string) string {
	m, _ := s.Metadata(name)
	return m.Owner
}

// AdmitDisk fails with spec.ErrQuota if the sandboxes of an owner take as much disk as they may: see OwnerUse. With a
// limit, it looks at each record, manifest and layer of the store.
func (s *Store) AdmitDisk(ctx context.Context, owner string) error {
	return limits.CheckDisk(s.dir, owner, func() (int64, error) { return s.ownerDisk(ctx, owner) })
}

// HasRoom waits until the host, and the limits of an owner, allow one more VM of mib MiB to wake, and fails like
// limits.AdmitMemory, limits.AdmitOwner and AdmitDisk. It keeps no room.
func (s *Store) HasRoom(ctx context.Context, owner string, mib int) error {
	release, err := limits.AdmitMemory(ctx, s.dir, mib, true)
	if err == nil {
		err = release()
	}
	if err == nil {
		if release, err = limits.AdmitOwner(ctx, s.dir, owner, mib, true); err == nil {
			err = release()
		}
	}
	if err == nil {
		err = s.AdmitDisk(ctx, owner)
	}
	return err
}

// admitOwned counts one more VM for an owner until release is called, after the VM's files say whose it is.
func (s *Store) admitOwned(owner string) (release func() error, err error) {
	return limits.AdmitSandbox(s.dir, owner, func() (int, error) { return s.ownerCount(owner) })
}

// OwnerUse returns what the sandboxes of an owner use. On disk they have the layers and snapshots that they wrote.
// What a removed sandbox wrote counts for those owners whose sandboxes need it, or else for its own.
func (s *Store) OwnerUse(ctx context.Context, owner string) (u limits.OwnerUse, err error) {
	var mib, disk int64
	if u.Sandboxes, err = s.ownerCount(owner); err != nil {
		return u, err
	}
	if u.Awake, mib, err = limits.OwnerAwake(s.dir, owner); err != nil {
		return u, err
	}
	disk, err = s.ownerDisk(ctx, owner)
	sent, serr := limits.OwnerEgress(s.dir, owner, time.Now())
	u.AwakeMiB, u.DiskMiB, u.EgressMiB = int(mib), int(disk>>20), int(sent>>20)
	return u, errors.Join(err, serr)
}

// ownerCount returns how many VMs with a record an owner has.
func (s *Store) ownerCount(owner string) (n int, err error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "vms"))
	if err != nil {
		return 0, fmt.Errorf("listing VMs: %w", err)
	}
	for _, e := range entries {
		if _, err := os.Stat(s.RecordPath(e.Name())); err == nil && s.Owner(e.Name()) == owner {
			n++
		}
	}
	return n, nil
}

// written lists snapshots, those whose manifests can be read, and layers.
func (s *Store) written(ctx context.Context) (manifests, []fs.DirEntry, error) {
	have := manifests{}
	_, _, err := s.readManifests(ctx, have)
	layers, lerr := os.ReadDir(s.LayerDir())
	return have, layers, errors.Join(err, lerr)
}

// ownerDisk returns how many bytes count for an owner. Unreadable records and snapshots count nothing.
func (s *Store) ownerDisk(ctx context.Context, owner string) (sum int64, err error) {
	// List what there is first, then its users, as Usage does.
	have, layers, err := s.written(ctx)
	whose, werr := s.readOwners()
	if err := errors.Join(err, werr); err != nil {
		return 0, err
	}
	c := counter{ctx: ctx, seen: map[inode]bool{}}
	var errs []error
	for _, e := range layers {
		if id, _, _ := strings.Cut(e.Name(), "-"); id != templateOwner && whose.has(owner, id, e.Name()) {
			errs = append(errs, c.add(filepath.Join(s.LayerDir(), e.Name()), &sum))
		}
	}
	for id, m := range have {
		if whose.has(owner, m.Labels[labelOwner], id) {
			errs = append(errs, c.add(s.SnapshotDir(id), &sum))
		}
	}
	return sum, errors.Join(errs...)
}

// owners say whose layers and snapshots are.
type owners struct {
	of      map[string]string          // by the ids of VMs
	needs   map[string]map[string]bool // owners, by the layers and snapshots that their VMs need
	removed map[string]history         // by the ids of removed VMs
	former  map[string]string          // owners of removed VMs whose history was read, by id
}

func (s *Store) readOwners() (*owners, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "vms"))
	if err != nil {
		return nil, fmt.Errorf("listing VMs: %w", err)
	}
	o := &owners{map[string]string{}, map[string]map[string]bool{}, map[string]history{}, map[string]string{}}
	for _, e := range entries {
		r, err := s.Load(e.Name())
		if err != nil {
			continue
		}
		owner := s.Owner(e.Name())
		o.of[r.ID] = owner
		for _, name := range append([]string{r.Snapshot, r.Previous, r.Base, r.Left}, r.Disk.Layers...) {
			if o.needs[name] == nil {
				o.needs[name] = map[string]bool{}
			}
			o.needs[name][owner] = true
		}
	}
	gone, err := s.histories()
	for _, h := range gone {
		o.removed[h.id] = h
	}
	return o, err
}

// has reports whether the layer or snapshot of a name, which the VM of an id wrote, counts for an owner.
func (o *owners) has(owner, id, name string) bool {
	if now, there := o.of[id]; there {
		return now == owner
	}
	if need := o.needs[name]; need != nil {
		return need[owner]
	}
	h, known := o.removed[id]
	if !known {
		return false
	}
	former, read := o.former[id]
	if !read {
		gone, err := h.read()
		if err != nil {
			return false
		}
		former = gone.Metadata.Owner
		o.former[id] = former
	}
	return former == owner
}
