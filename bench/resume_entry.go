package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Env is the environment of the benchmarks.
type Env struct {
	Store    *sandbox.Host
	Launcher pool.Launcher
	Image    string
	Kernel   string // as in sandbox.Spec
	// Program is the path of drowse itself.
	Program string
	// PeerGuest is the path of drowse-peer-guest, which the guests of other monitors run.
	PeerGuest string
	// Progress, if not nil, receives messages about the progress.
	Progress func(string)
}

func (e Env) say(format string, args ...any) {
	if e.Progress != nil {
		e.Progress(fmt.Sprintf(format, args...))
	}
}

// sleeper is a sleeping VM, to restore again and again.
type sleeper struct {
	record  *state.Record
	parts   instance.Parts
	snap    string
	series  map[variant]*series
	last    time.Duration // the figure of the last restore
	state   uint64        // RAM in the snapshot that is not zero, in pages
	counter *counter      // nil counts nothing
}

// ResumeEntry measures the time from the call that restores a VM from a snapshot on disk to its first KVM_RUN.
// This process makes memory, devices and pager from nothing, and also KVM's VM and vCPUs, unless they come from a
// pool. The guest does not run. The page cache is warm. Sizes are interleaved, so that other load on the machine
// affects all alike.
func ResumeEntry(ctx context.Context, e Env, o Options) ([]Row, error) {
	r := resumes{name: "resume_entry", n: o.N, warmup: o.Warmup, sizes: o.MemoryMiB, options: instance.RestoreOptions{EntryOnly: true}, pools: o.Pools}
	return r.measure(ctx, e, func(ctx context.Context, mib int) (*sleeper, error) {
		return e.sleeperWith(ctx, mib, 0, func(context.Context, string) error { return nil })
	})
}

// resumes are restores of VMs of several sizes of RAM, in MiB.
type resumes struct {
	name      string
	n, warmup int
	sizes     []int
	options   instance.RestoreOptions
	params    map[string]any // besides the common ones
	then      then
	// peers are measured in turn with the VMs. Each has a guest with peerUsedMiB in use, which depends on the size
	// of its RAM.
	peers       []string
	peerUsedMiB func(mib int) int
	// caches are the states of the page cache to measure in turn, out of Caches. None means warm only.
	caches []string
	// pools are whether there is a pool of prebuilt VMs, to measure in turn. None means no.
	pools []bool
	// pages are whether restores find pages that an earlier one decompressed, to measure in turn. None means no,
	// without a parameter in the rows.
	pages []bool
}

// variant is a way to restore the same VM.
type variant struct {
	cache string
	pool  bool
	pages bool
}

// then continues with a restored guest. It returns when that was done and its time by stage. It is part of the
// measured time, except its cleaning up.
type then func(context.Context, *instance.Instance) (done time.Time, stages map[string]time.Duration, err error)

// measure calls sleep for a sleeper of each size, and restores these in turn.
func (r resumes) measure(ctx context.Context, e Env, sleep func(context.Context, int) (*sleeper, error)) (rows []Row, err error) {
	var vms []*sleeper
	c := counting()
	defer c.close()
	defer func() {
		for _, v := range vms {
			err = errors.Join(err, e.remove(ctx, v.record.Spec.Name))
		}
	}()
	for _, mib := range r.sizes {
		v, err := sleep(ctx, mib)
		if v != nil {
			v.counter = c
			vms = append(vms, v)
		}
		if err != nil {
			return nil, err
		}
	}
	peers := make([][]*beside, len(vms))
	defer func() {
		for _, all := range peers {
			for _, b := range all {
				err = errors.Join(err, b.close())
			}
		}
	}()
	for i, mib := range r.sizes {
		for _, name := range r.peers {
			b, err := e.preparePeer(ctx, name, mib, r.peerUsedMiB(mib))
			peers[i] = append(peers[i], b)
			if err != nil {
				return nil, err
			}
		}
	}
	if err := r.inTurn(ctx, e, vms, peers); err != nil {
		return nil, err
	}
	for k, v := range vms {
		for _, way := range r.variants() {
			params := map[string]any{"memory_mib": v.parts.Spec.MemoryMiB, "vcpus": v.parts.Spec.VCPUs, "cache": way.cache, "pool": way.pool}
			if len(r.pages) > 0 {
				params["page_cache"] = way.pages
			}
			maps.Copy(params, r.params)
			row := v.of(way).row(r.name, params)
			row.StateMiB = float64(v.state) / pagesPerMiB
			rows = append(rows, row)
		}
		for _, b := range peers[k] {
			rows = append(rows, b.rows(r.name)...)
		}
	}
	return rows, nil
}

// inTurn restores each VM, and then its peers, if any, for all runs.
func (r resumes) inTurn(ctx context.Context, e Env, vms []*sleeper, peers [][]*beside) error {
	dir, err := runsDir()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for i := range r.warmup + r.n {
		if i%10 == 0 {
			e.say("%s: run %d of %d", r.name, i, r.warmup+r.n)
		}
		for k, v := range vms {
			if err := r.run(ctx, v, dir, i >= r.warmup); err != nil {
				return err
			}
			for _, b := range peers[k] {
				if err := b.resume(ctx, i >= r.warmup, v.last); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (r resumes) variants() (all []variant) {
	for _, cache := range orOne(r.caches, cacheWarm) {
		for _, pool := range orOne(r.pools, false) {
			for _, kept := range orOne(r.pages, false) {
				all = append(all, variant{cache, pool, kept})
			}
		}
	}
	return all
}

// orOne returns the list, or one value if it is empty.
func orOne[T any](list []T, value T) []T {
	if len(list) == 0 {
		return []T{value}
	}
	return list
}

// run restores a VM once in each way. Peers are compared with the first.
func (r resumes) run(ctx context.Context, v *sleeper, dir string, counts bool) error {
	var first time.Duration
	for i, way := range r.variants() {
		if way.cache == cacheCold {
			if err := v.evict(); err != nil {
				return err
			}
		}
		if err := v.restore(ctx, dir, way, counts, r.options, r.then); err != nil {
			return err
		}
		if i == 0 {
			first = v.last
		}
	}
	v.last = first
	return nil
}

// of returns the series of a way of restoring.
func (v *sleeper) of(way variant) *series {
	if v.series == nil {
		v.series = map[variant]*series{}
	}
	if v.series[way] == nil {
		v.series[way] = newSeries(inMs)
	}
	return v.series[way]
}

// sleep puts a VM to sleep and notes what it is restored from.
func (e Env) sleep(ctx context.Context, v *sleeper) error {
	name := v.record.Spec.Name
	res, err := e.Store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{})
	if err != nil {
		return err
	}
	v.snap = e.Store.State.SnapshotDir(res.Snapshot)
	if v.record, err = e.Store.State.Get(name); err != nil {
		return err
	}
	info, err := e.Store.State.InspectSnapshot(res.Snapshot)
	if err != nil {
		return err
	}
	v.state = info.Manifest.Stats.Pages
	st, err := e.Store.State.SnapshotDisk(res.Snapshot)
	if err != nil {
		return err
	}
	v.parts = process.Parts(e.Store.State, v.record, st)
	return nil
}

// restore restores the VM once. If the run counts, it records the time until the first KVM_RUN or, if the options
// go further, until the agent has answered and more is done.
func (v *sleeper) restore(ctx context.Context, dir string, way variant, counts bool, o instance.RestoreOptions, more then) (err error) {
	s := v.of(way)
	top := filepath.Join(dir, "top")
	p := v.parts
	if p.Disk, err = disk.Fork(top, v.parts.Disk, 0); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(top)) }()
	p.Socket = filepath.Join(dir, "vsock.sock")
	if !way.pages {
		p.PageCache = ""
	}
	if way.pool {
		if p.Prebuilt, err = instance.NewPrebuilt(p.Spec.Shape().Machine(), instance.PrebuiltOptions{}); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, p.Prebuilt.Close()) }()
	}
	// Like a process of the VM's own.
	process.PrepareProcess()
	runtime.GC()
	resume := process.PauseGC()
	defer resume()
	tallied := v.counter.begin(counts)
	begin := time.Now()
	in, err := instance.Restore(ctx, p, v.snap, o)
	if err != nil {
		return err
	}
	var whole time.Duration
	var after map[string]time.Duration
	if more != nil {
		var done time.Time
		if done, after, err = more(ctx, in); err != nil {
			return errors.Join(err, in.Close())
		}
		whole = done.Sub(begin)
	}
	s.counted(v.counter, v.counter.since(tallied), true)
	entry, ready := in.Timing()
	stages := in.Machine().Stages().Durations()
	faults, _ := in.Faults()
	// Not every host has these counters.
	kvm, _ := in.Machine().KVMStats()
	// For the next restore that uses the pages, if there is one.
	if missed := in.MissedPages(); len(missed) > 0 {
		if err := instance.KeepPages(ctx, p.PageCache, v.snap, missed, nil); err != nil {
			return errors.Join(err, in.Close())
		}
	}
	if err := in.Close(); err != nil {
		return err
	}
	total := entry
	if !o.EntryOnly {
		total = ready
	}
	guest := total - entry
	if more != nil {
		total = whole
	}
	v.last = total
	if !counts {
		return nil
	}
	s.add(int64(total))
	s.touched(int64(faults.PagesCopied.Load()))
	var known time.Duration
	for stage, d := range stages {
		s.stage(stage.String(), int64(d))
		if !stage.InGuest() && !stage.Background() {
			known += d
		}
	}
	s.stage("other", int64(max(entry-known, 0)))
	s.stage("guest", int64(guest))
	s.fault("read", int64(faults.ReadFaults.Load()))
	s.fault("write", int64(faults.WriteFaults.Load()))
	s.fault("ensured", int64(faults.Ensured.Load()))
	s.fault("frames_read", int64(faults.Frames.Load()))
	s.fault("frames_cached", int64(faults.FramesCached.Load()))
	for stage, d := range after {
		s.stage(stage, int64(d))
	}
	for name, kind := range map[string]string{"exits": "exits", "pf_taken": "kvm_pages", "insn_emulation": "emulated"} {
		if n, ok := kvm[name]; ok {
			s.fault(kind, int64(n))
		}
	}
	return nil
}
