package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/snapshot"
)

// Operations of growth, in the order of a round. A sweep comes right before the deletion, which then never sweeps in
// addition, whatever the size: see state.Store.Remove.
const (
	opWake, opExec, opSleep, opList, opSweep, opDelete = "wake", "exec", "sleep", "list", "sweep", "delete"
)

var growthOps = []string{opWake, opExec, opSleep, opList, opSweep, opDelete}

// Parameter of the slope: what it is the slope of, besides counts.
const ofTime = "time"

var slopesOf = []string{ofTime, countCalls, countSyncs}

// MaxSandboxes bounds the other sandboxes of a store: an ext4 allows 65,000 names of a file.
const MaxSandboxes = 60_000

// What one of the other sandboxes needs at most on disk.
const (
	filesOfOther, filesOfSleep = 8, 3
	blockOfFile                = 4 << 10
)

// Growth measures what one sandbox costs in stores with more and more others, which sleep and have o.Snapshots kept
// sleeps each:
//
//   - growth, by op: Sandbox.Wake, then Exec of /bin/true, then Sleep; the first page of a list by a process that has
//     not listed before; a sweep that finds nothing to delete; Delete of one of the others.
//   - growth_slope, by op: the figure of the largest store by that of the smallest in the same round, of the time and
//     of counts. One is added to both counts, so that none becoming some is growth.
//
// Each size has a store of its own, with the images and kernels of e.Store, and all are measured in turn, so that other
// load on the machine affects all alike. The others are made by the code that makes real ones, without waiting for the
// disk; they have memory of one page, and share the file of their disks.
func Growth(ctx context.Context, e Env, o Options) ([]Row, error) {
	return e.growth(ctx, o, time.Now, func(dir string) (*sandbox.Host, error) {
		for _, d := range []string{"images", "kernels", "cache"} {
			of := filepath.Join(e.Store.State.Dir(), d) // a new store has no cache yet
			if err := errors.Join(os.MkdirAll(of, 0o755), os.Symlink(of, filepath.Join(dir, d))); err != nil {
				return nil, err
			}
		}
		h, err := sandbox.Open(dir)
		if err != nil {
			return nil, err
		}
		return h.With(e.Launcher), nil
	})
}

// grown is a store with a real sandbox and others.
type grown struct {
	host   *sandbox.Host
	others int
	// like is the record of the real sandbox when it slept, and layer the file of the others' disks.
	like  *state.Record
	layer string
	last  map[string]float64 // of the last round, by op and what: see key
}

func (e Env) growth(
	ctx context.Context, o Options, now func() time.Time, open func(dir string) (*sandbox.Host, error),
) (rows []Row, err error) {
	c := counting()
	defer c.close()
	root, err := os.MkdirTemp(e.Store.State.Dir(), "growth-")
	if err != nil {
		return nil, fmt.Errorf("making a directory for stores: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(root)) }()
	sizes := slices.Compact(slices.Sorted(slices.Values(o.Sandboxes)))
	if err := room(root, sizes, o.Snapshots); err != nil {
		return nil, err
	}
	var stores []*grown
	defer func() {
		for _, g := range stores {
			err = errors.Join(err, Env{Store: g.host}.remove(ctx, vmName()))
		}
	}()
	for _, n := range sizes {
		dir := filepath.Join(root, strconv.Itoa(n))
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
		host, err := open(dir)
		if err != nil {
			return nil, fmt.Errorf("opening a store: %w", err)
		}
		e.say("growth: booting a guest in a store for %d others", n)
		want := sandbox.Spec{Name: vmName(), MemoryMiB: o.mib(), Image: e.Image, Kernel: e.Kernel}
		if _, err := host.Create(ctx, want, sandbox.CreateOptions{Boot: true}); err != nil {
			return nil, err
		}
		g := &grown{host: host, others: n}
		stores = append(stores, g)
		e.say("growth: making %d sandboxes of %d snapshots", n, o.Snapshots)
		if err := g.fill(ctx, o.Snapshots); err != nil {
			return nil, err
		}
	}
	all := map[string]*series{} // by size, op and what
	key := func(n int, op, of string) string { return fmt.Sprint(n, op, of) }
	of := func(k string, u unit) *series {
		if all[k] == nil {
			all[k] = newSeries(u)
		}
		return all[k]
	}
	least, most := stores[0], stores[len(stores)-1]
	turn := slices.Clone(stores)
	for i := range o.Warmup + o.N {
		e.say("growth: round %d of %d", i, o.Warmup+o.N)
		timed := i >= o.Warmup
		for _, g := range turn {
			g.last = map[string]float64{}
			for _, op := range growthOps {
				counts := c.begin(timed)
				begin := now()
				err := g.do(ctx, op, i)
				took := now().Sub(begin)
				counts = c.since(counts)
				if err == nil && op == opDelete {
					err = errors.Join(g.other(ctx, i%g.others), g.settle())
				}
				if err != nil {
					return nil, fmt.Errorf("%s beside %d others: %w", op, g.others, err)
				}
				s := of(key(g.others, op, ofTime), inMs)
				s.counted(c, counts, true)
				if timed {
					s.add(int64(took))
				}
				g.last[op+ofTime] = float64(took)
				for name, n := range counts.by(c, true) {
					g.last[op+name] = n
				}
			}
		}
		slices.Reverse(turn)
		for _, op := range growthOps {
			for _, what := range slopesOf {
				if a, ok := most.last[op+what]; timed && ok {
					of(key(0, op, what), inRatio).portion(a+1, least.last[op+what]+1)
				}
			}
		}
	}
	params := func(op string) map[string]any {
		return map[string]any{"op": op, "snapshots": o.Snapshots, "memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs}
	}
	for _, op := range growthOps {
		for _, g := range stores {
			p := params(op)
			p["sandboxes"] = g.others
			rows = append(rows, all[key(g.others, op, ofTime)].row("growth", p))
		}
	}
	for _, op := range growthOps {
		for _, what := range slopesOf {
			p := params(op)
			p["of"], p["from"], p["to"] = what, least.others, most.others
			why := c.missing[what]
			switch {
			case len(stores) < 2:
				why = "it needs two sizes: use --sandboxes with more than one"
			case op == opDelete && (least.others+1)*(o.Snapshots+1) <= state.FewToSweep:
				why = "in so small a store each deletion also sweeps: use larger --sandboxes or --snapshots"
			}
			if why != "" {
				rows = append(rows, Row{Name: "growth_slope", Params: p, Unit: inRatio.name, Skipped: why})
				continue
			}
			rows = append(rows, all[key(0, op, what)].row("growth_slope", p))
		}
	}
	return rows, nil
}

// room refuses stores that the file system has no room for.
func room(dir string, sizes []int, snapshots int) error {
	var files uint64
	for _, n := range sizes {
		files += uint64(n) * uint64(filesOfOther+filesOfSleep*snapshots)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("looking for room in %s: %w", dir, err)
	}
	need, free := files*blockOfFile, st.Bavail*uint64(st.Bsize)
	// File systems without a fixed number of inodes have 0 of them.
	if need > free || st.Files > 0 && files > st.Ffree {
		return fmt.Errorf("the stores need up to %d files and %d MiB, and %s has room for %d and %d MiB: use smaller --sandboxes or --snapshots",
			files, need/mibBytes, dir, st.Ffree, free/mibBytes)
	}
	return nil
}

// do does one operation. The sandbox sleeps before the first and after the third.
func (g *grown) do(ctx context.Context, op string, round int) error {
	b := g.host.Sandbox(vmName())
	switch op {
	case opWake:
		_, err := b.Wake(ctx)
		return err
	case opExec:
		_, err := b.Exec(ctx, guest.Cmd{Argv: execCommands["true"].argv})
		return err
	case opSleep:
		_, err := b.Sleep(ctx, sandbox.SleepOptions{})
		return err
	case opList:
		list, err := fleet.New(g.host, fleet.Options{}).List(ctx, records.Filter{})
		if want := min(g.others+1, records.DefaultPage); err == nil && len(list.Sandboxes) != want {
			err = fmt.Errorf("the list has %d sandboxes, want %d: %v", len(list.Sandboxes), want, list.Problems)
		}
		return err
	case opSweep:
		freed, err := g.host.State.Sweep(ctx)
		if err == nil && freed.Snapshots+freed.Layers > 0 {
			err = fmt.Errorf("it deleted %d snapshots and %d layers of sandboxes that need them", freed.Snapshots, freed.Layers)
		}
		return err
	}
	var freed spec.Freed
	err := g.host.Sandbox(otherName(round%g.others)).Delete(ctx, sandbox.DeleteOptions{Freed: &freed})
	if want := len(g.like.Sleeps); err == nil && freed.Snapshots != want {
		err = fmt.Errorf("it deleted %d snapshots of a sandbox with %d", freed.Snapshots, want)
	}
	return err
}

func otherName(i int) string { return fmt.Sprintf("other-%06d", i) }

// fill puts the real sandbox to sleep and makes the others.
func (g *grown) fill(ctx context.Context, snapshots int) (err error) {
	if _, err := g.host.Sandbox(vmName()).Sleep(ctx, sandbox.SleepOptions{}); err != nil {
		return err
	}
	if g.like, err = g.host.State.Get(vmName()); err != nil {
		return err
	}
	g.like.Sleeps = make([]state.SleepRecord, snapshots)
	g.layer = filepath.Join(g.host.State.Dir(), "layer")
	st, err := disk.Create(g.layer, int64(g.like.Spec.DiskMiB)<<20)
	if err != nil {
		return err
	}
	d, err := disk.Open(st, disk.Options{})
	if err == nil {
		err = d.CloseSealed()
	}
	if err != nil {
		return err
	}
	for i := range g.others {
		if err := g.other(ctx, i); err != nil {
			return fmt.Errorf("making sandbox %d of %d: %w", i+1, g.others, err)
		}
	}
	return g.settle()
}

// settle writes what has been made, so that no operation that is measured waits for it.
func (g *grown) settle() error {
	d, err := os.Open(g.host.State.Dir())
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
}

// other makes a sandbox that sleeps and keeps its sleeps.
func (g *grown) other(ctx context.Context, i int) error {
	s := *g.host.State
	s.FS = unsynced{s.FS}
	r := &state.Record{
		Version: state.RecordVersion, ID: spec.NewID(), Spec: g.like.Spec, Created: g.like.Created, Phase: state.Asleep, Confined: g.like.Confined, Boot: g.like.Boot,
	}
	r.Spec.Name, r.Spec.Hostname = otherName(i), otherName(i)
	if err := r.SetMetadata(&spec.Metadata{Keep: lifetime.Keep{Last: len(g.like.Sleeps)}}); err != nil {
		return err
	}
	name := r.NewLayer()
	if err := os.Link(g.layer, filepath.Join(s.LayerDir(), name)); err != nil {
		return err
	}
	r.Disk.Layers = []string{name}
	l, err := s.Create(r)
	if err != nil {
		return err
	}
	defer l.Release()
	for range g.like.Sleeps {
		labels, err := s.Labels(r, state.KindSleep)
		if err != nil {
			return err
		}
		r.Snapshot = spec.NewID()
		if _, err := snapshot.Create(ctx, s.SnapshotDir(r.Snapshot), snapshot.Spec{
			ID: r.Snapshot, Sandbox: r.Spec.Name, VCPUs: r.Spec.VCPUs, Kernel: r.Boot.KernelID, Image: r.Boot.ImageID, Labels: labels, Memory: state.NoMemory{},
			Disks: []snapshot.Disk{{Name: "disk", Size: uint64(r.Spec.DiskMiB) << 20, Layers: r.Disk.Layers}}, FS: s.FS,
		}); err != nil {
			return err
		}
		if err := s.AddSleep(r, state.SleepRecord{Snapshot: r.Snapshot, Awake: r.Created, Asleep: time.Now().UTC()}); err != nil {
			return err
		}
	}
	return s.Save(r)
}

// unsynced is a file system that does not wait for the disk.
type unsynced struct{ osfile.FS }

// SyncDir implements osfile.FS.
func (unsynced) SyncDir(string) error { return nil }

// OpenFile implements osfile.FS.
func (u unsynced) OpenFile(name string, flag int, perm os.FileMode) (osfile.File, error) {
	f, err := u.FS.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return unsyncedFile{f}, nil
}

type unsyncedFile struct{ osfile.File }

// Sync implements osfile.File.
func (unsyncedFile) Sync() error { return nil }

// Datasync implements osfile.File.
func (unsyncedFile) Datasync() error { return nil }
