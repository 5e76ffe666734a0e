package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/procstat"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// MaxAtOnce bounds how many VMs wake at once.
const MaxAtOnce = 256

// minRounds is the least number of rounds of a row, however many wakes each round has: only one wake of a round is
// the last one.
const minRounds = 5

// rounds returns the number of measured rounds for n VMs at once.
func (o Options) rounds(n int) int { return max((o.N+n-1)/n, min(o.N, minRounds)) }

// ConcurrentResume measures VMs that wake at the same moment, each in a process of its own. concurrent_resume is
// the time from that moment until one VM is awake, over all VMs and rounds. Its stages are the medians over rounds
// of the first, the median and the last of a round, and cpu, the processor time of one VM's process until then.
// For a process from a pool, cpu counts from the wake on. concurrent_resume_ratio compares the last of a round
// with the best case, in which wakes need only processors: last / (n * cpu / CPUs). Each VM has a live python3.
// The page cache is warm. Numbers are interleaved.
func ConcurrentResume(ctx context.Context, e Env, o Options) (rows []Row, err error) {
	most := slices.Max(o.AtOnce)
	names, remove, err := e.flock(ctx, most, o.mib(), e.startBusy)
	defer func() { err = errors.Join(err, remove()) }()
	if err != nil {
		return nil, err
	}
	type way struct {
		n    int
		pool bool
	}
	var ways []way
	all := map[way]*concurrent{}
	for _, n := range o.AtOnce {
		for _, pool := range orOne(o.Pools, false) {
			w := way{n, pool}
			ways, all[w] = append(ways, w), &concurrent{wakes: newSeries(inMs), ratio: newSeries(inRatio)}
		}
	}
	for i := range o.Warmup + o.rounds(slices.Min(o.AtOnce)) {
		for _, w := range ways {
			if i >= o.Warmup+o.rounds(w.n) {
				continue
			}
			e.say("concurrent_resume: round %d of %d, %d at once", i, o.Warmup+o.rounds(w.n), w.n)
			wakes, err := e.round(ctx, names[:w.n], w.pool, o)
			if err != nil {
				return nil, err
			}
			if i >= o.Warmup {
				all[w].record(wakes)
			}
		}
	}
	for _, w := range ways {
		params := map[string]any{"at_once": w.n, "memory_mib": o.mib(), "vcpus": spec.DefaultVCPUs, "cpus": runtime.NumCPU(), "cache": "warm", "pool": w.pool, "awake_s": o.StayAwake.Seconds()}
		rows = append(rows, all[w].wakes.row("concurrent_resume", params), all[w].ratio.row("concurrent_resume_ratio", params))
	}
	return rows, nil
}

// round wakes VMs, with or without a pool, and puts them to sleep again.
func (e Env) round(ctx context.Context, names []string, pooled bool, o Options) (wakes []oneWake, err error) {
	before := map[int]time.Duration{}
	if pooled {
		pool, err := pool.New(e.Store.State, e.Launcher, pool.Options{
			Processes: len(names), Shapes: []spec.Shape{{MemoryMiB: o.mib(), VCPUs: spec.DefaultVCPUs}},
		})
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, pool.Close()) }()
		if err := pool.Wait(ctx); err != nil {
			return nil, err
		}
		for _, pid := range pool.PIDs() {
			if before[pid], err = cpuTime(pid); err != nil {
				return nil, err
			}
		}
		e.Launcher = pool.Launcher()
	}
	if wakes, err = e.wakeAtOnce(ctx, names, before); err != nil {
		return nil, err
	}
	last := wakes[len(wakes)-1]
	e.say("concurrent_resume: %s was the last, after %v: stages in ms %v, %d faults",
		last.report.Name, last.took.Round(time.Microsecond), last.report.Stages, last.report.Faults)
	if err := wait.For(ctx, o.StayAwake); err != nil {
		return nil, err
	}
	for _, name := range names {
		if _, err := e.Store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{}); err != nil {
			return nil, err
		}
	}
	return wakes, nil
}

// flock makes sleeping VMs from one snapshot of a guest in which start has started something. It also returns a
// function that removes them, even after an error.
func (e Env) flock(ctx context.Context, n, mib int, start func(ctx context.Context, name string) error) (names []string, remove func() error, err error) {
	first := vmName()
	made := []string{first}
	snap := ""
	remove = func() (err error) {
		for _, name := range made {
			if rerr := e.remove(ctx, name); !errors.Is(rerr, sandbox.ErrNotFound) {
				err = errors.Join(err, rerr)
			}
		}
		if snap != "" {
			err = errors.Join(err, e.Store.State.RemoveSnapshot(context.WithoutCancel(ctx), snap))
		}
		return err
	}
	if err := e.boot(ctx, first, mib); err != nil {
		return nil, remove, err
	}
	if err := start(ctx, first); err != nil {
		return nil, remove, err
	}
	res, err := e.Store.Sandbox(first).Snapshot(ctx, sandbox.SnapshotOptions{})
	if err != nil {
		return nil, remove, err
	}
	snap = res.Snapshot
	for i := range n {
		name := fmt.Sprintf("%s-%d", first, i)
		e.say("making VM %d of %d", i+1, n)
		made = append(made, name)
		if _, err := e.Store.With(e.Launcher).Clone(ctx, snap, sandbox.CloneOptions{Name: name}); err != nil {
			return nil, remove, err
		}
		if _, err := e.Store.Sandbox(name).Sleep(ctx, sandbox.SleepOptions{}); err != nil {
			return nil, remove, err
		}
		names = append(names, name)
	}
	return names, remove, e.Store.Sandbox(first).Kill(ctx)
}

// oneWake is the time of a wake, the processor time of its process, and its report.
type oneWake struct {
	took, cpu time.Duration
	report    control.Report
}

// wakeAtOnce wakes VMs at the same moment. It sorts the result by time. before is the processor time that
// processes have used already.
func (e Env) wakeAtOnce(ctx context.Context, names []string, before map[int]time.Duration) ([]oneWake, error) {
	wakes, errs := make([]oneWake, len(names)), make([]error, len(names))
	var standing, done sync.WaitGroup
	start := make(chan struct{})
	var begin time.Time // before start is closed
	for i, name := range names {
		standing.Add(1)
		done.Go(func() {
			standing.Done()
			<-start
			report, err := e.Store.With(e.Launcher).Sandbox(name).Wake(ctx)
			if err != nil {
				errs[i] = err
				return
			}
			wakes[i].took, wakes[i].report = time.Since(begin), report
			r, err := e.Store.State.Get(name)
			if err != nil {
				errs[i] = err
				return
			}
			used, err := cpuTime(r.PID)
			wakes[i].cpu, errs[i] = used-before[r.PID], err
		})
	}
	standing.Wait()
	begin = time.Now()
	close(start)
	done.Wait()
	slices.SortFunc(wakes, func(a, b oneWake) int { return int(a.took - b.took) })
	return wakes, errors.Join(errs...)
}

// cpuTime returns the user and system time of a process and its children, over all their threads, ended ones included.
// The clock's number is that of clock_getcpuclockid(3): the complement of the process id, and CPUCLOCK_SCHED, 2
// (include/linux/posix-timers.h).
func cpuTime(pid int) (sum time.Duration, err error) {
	const sched = 2
	pids, err := procstat.PIDs(pid)
	if err != nil {
		return 0, fmt.Errorf("asking for the processor time of process %d: %w", pid, err)
	}
	for _, p := range pids {
		var ts unix.Timespec
		if err := unix.ClockGettime(int32(^p<<3|sched), &ts); err != nil {
			if p != pid {
				continue // it has ended
			}
			return 0, fmt.Errorf("asking for the processor time of process %d: %w", pid, err)
		}
		sum += time.Duration(ts.Nano())
	}
	return sum, nil
}

// concurrent is what the rounds with one number of VMs measured.
type concurrent struct{ wakes, ratio *series }

// record adds a round.
func (c *concurrent) record(wakes []oneWake) {
	var cpu time.Duration
	for _, w := range wakes {
		cpu += w.cpu
		c.wakes.add(int64(w.took))
		c.wakes.stage("cpu", int64(w.cpu))
		for name, ms := range w.report.Stages {
			c.wakes.stage(name, ns(ms))
		}
	}
	last := wakes[len(wakes)-1].took
	c.wakes.stage("first", int64(wakes[0].took))
	c.wakes.stage("median", int64(wakes[(len(wakes)-1)/2].took))
	c.wakes.stage("last", int64(last))
	// ideal is the time that all processors need for the total work, shared evenly. n wakes cannot use more than n
	// processors, unless one wake has several threads. Then this is the lower bound.
	if ideal := float64(cpu) / float64(runtime.NumCPU()); ideal > 0 {
		c.ratio.portion(float64(last), ideal)
	}
}
