package process

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// process is the life of a VM in its own process.
type process struct {
	store      *state.Store
	log        *slog.Logger
	prioritize func() (calm func())
	machines   Machines
	in         VM

	// op is held by what changes the VM as a whole, and guards what follows.
	op     sync.Mutex
	r      *state.Record
	asleep bool // the record says so, and the instance is closed
	// replaced is the file of the record from before, open until the report: see aheadRecord.
	replaced *os.File
	// ended is closed when the process is to end.
	ended   chan struct{}
	endOnce sync.Once

	// lasting ends with the process, which waits for what goes on in the background.
	// holders keep it awake, and falling says that it is being put to sleep.
	holders wakeLocks
	falling atomic.Bool

	// cpuBefore is processor time that the process had used before it was the VM's.
	cpuBefore time.Duration
	// events writes events; nil before the VM is there.
	events *state.EventWriter
	// welcomed is until hooks of the host have been told that the VM is there.
	welcomed sync.WaitGroup
	// ending is on whose behalf the VM ends.
	ending atomic.Pointer[events.Cause]

	lasting    context.Context
	background sync.WaitGroup
	shortening atomic.Bool
}

// ServeOptions say how the process of a VM starts it.
type ServeOptions struct {
	// Snapshot is what to restore; empty boots.
	Snapshot string
	// NewIdentity makes the guest a machine of its own, whatever its disk and memory
	// were before.
	NewIdentity bool
	// Fork, if not nil, is the image that a child is made of. Serve closes it.
	Fork *os.File
	// Prebuilt, if not nil, may have a part of the VM that was made ahead. What the VM does not need is closed.
	Prebuilt *instance.Prebuilt
	// Report is called once, when the guest is ready or cannot be.
	Report func(control.Report)
	// Log gets the process's log.
	Log *slog.Logger
	// Cause is on whose behalf it is started; empty is Library.
	Cause events.Cause
	// WakeLock, if not nil, is a socket: as long as its other end is open, somebody holds the VM awake.
	WakeLock *os.File
	// Wanted, if not nil, says whether somebody still waits for the report: if not, the VM does not become one that
	// runs.
	Wanted func() bool
	// Machines, if not nil, are in the place of KVM's, and PID, if not 0, is what the record says in the place of the
	// number of this process.
	Machines Machines
	PID      int

	// urgent, if not nil, has the process go before others until what it returns is called.
	prioritize func() (calm func())
	// terminated, if not nil, ends when the process is told to end: the VM goes to sleep then.
	terminated context.Context
}

// Serve is the life of a VM: it takes the VM's lock, boots or restores the guest,
// answers on the control socket, and returns when the guest has ended or sleeps. The
// record must exist. When ctx ends the VM is stopped as if its power were cut.
func Serve(ctx context.Context, s *state.Store, name string, o ServeOptions) error {
	p := &process{store: s, log: o.Log, prioritize: o.prioritize, machines: o.Machines, ended: make(chan struct{}), cpuBefore: processCPU()}
	if p.machines == nil {
		p.machines = kvmMachines{}
	}
	err := p.serve(ctx, name, o)
	if err != nil {
		o.Report(control.Report{Name: name, Error: control.ReportError(err)})
	}
	return err
}

func (p *process) serve(ctx context.Context, name string, o ServeOptions) (err error) {
	l, err := p.store.LockSoon(ctx, name)
	if err != nil {
		return err
	}
	defer l.Release()
	if p.r, err = p.store.Load(name); err != nil {
		return err
	}
	if err := p.store.RemoveSockets(name); err != nil {
		return err
	}
	if err := p.r.Spec.ValidatePolicy(); err != nil {
		// Somebody has changed the record.
		return p.notStarted(err)
	}
	if err := p.stillMeant(o); err != nil {
		return err
	}
	// A VM that has to wait for memory is as it was meanwhile.
	release, err := p.admit(ctx, o)
	if err != nil {
		return p.notStarted(err)
	}
	defer func() { err = errors.Join(err, release()) }()
	before := *p.r
	// While the guest takes its time.
	made := make(chan *http.Server, 1)
	go func() { made <- p.control() }()
	if err := p.start(ctx, o); err != nil {
		top := p.r.Disk
		// As it was before, but for a VM that was only just being made, which
		// whoever makes it removes.
		p.r.Phase, p.r.PID, p.r.Problem = before.Phase, 0, before.Problem
		if before.Phase == state.Starting {
			p.r.Phase, p.r.Problem = state.Stopped, "it did not start: "+err.Error()
		}
		p.r.Disk = before.Disk
		if o.Snapshot != "" && before.Phase == state.Asleep {
			if stale := p.store.CheckVolumes(p.r, o.Snapshot); errors.Is(stale, volume.ErrStale) {
				// It was awake for long enough to write to a volume, so what it wrote to
				// its disk counts as well.
				p.r.Phase, p.r.Disk = state.Crashed, top
				p.r.Problem = "its wake has failed, and it cannot be repeated: " + stale.Error()
			}
		}
		return errors.Join(err, p.store.Save(p.r))
	}
	defer p.letGo()
	lasting, stop := context.WithCancel(ctx)
	p.lasting = lasting
	p.events = p.store.NewEventWriter(p.log)
	// When the background has ended, and before the lock is released.
	defer func() {
		stop()
		p.background.Wait()
		p.welcomed.Wait()
		p.events.Close()
	}()
	// Whatever is asked for from now on is told of after this beginning.
	p.op.Lock()
	unlock := sync.OnceFunc(p.op.Unlock)
	defer unlock()
	control := <-made
	if err := p.listen(control); err != nil {
		return errors.Join(err, p.in.Close())
	}
	defer control.Close()
	unask, err := p.serveSelf(lasting)
	if err != nil {
		return errors.Join(err, p.in.Close())
	}
	// Before the background is waited for, and after it was told to end.
	defer unask()
	if o.WakeLock != nil {
		if err := p.lockedBy(o.WakeLock); err != nil {
			return errors.Join(err, p.in.Close())
		}
	}
	o.Report(p.report())
	p.letGo()
	begun, details := p.begun(before.Maker != 0, o)
	if begun == events.Started && before.Phase == state.Crashed {
		details.Problem = "its process was killed before: it has booted with its disk as it was, and what was in memory is lost"
	}
	p.welcomed.Add(1)
	p.tellThen(cmp.Or(o.Cause, events.Library), begun, details, p.welcome)
	p.tellHooks(events.WithCause(ctx, cmp.Or(o.Cause, events.Library)), p.in.WakeFailures())
	unlock()
	if o.Prebuilt != nil {
		if err := o.Prebuilt.Close(); err != nil {
			p.log.Warn("closing what was made ahead and is not needed", "error", err)
		}
	}
	if p.r.Spec.Idle.SleepSeconds > 0 {
		p.background.Go(func() { p.sleepWhenIdle(lasting) })
	}
	if o.terminated != nil {
		p.background.Go(func() { p.sleepOnTerminate(lasting, o.terminated) })
	}
	// A VM that has come back is left alone unless it is urgent.
	if len(p.r.Disk.Layers) > 2*maxStack {
		p.shortenDisk()
	}
	p.keepPages()
	return p.wait(ctx)
}

// notStarted is err, why nothing of the VM has been touched. The record of one that was only just being made says so.
func (p *process) notStarted(err error) error {
	if p.r.Phase == state.Starting {
		p.r.Phase, p.r.PID, p.r.Problem = state.Stopped, 0, "it did not start: "+err.Error()
		err = errors.Join(err, p.store.Save(p.r))
	}
	return err
}

// wantedPoll is how often a VM that waits for memory looks whether it is still wanted.
const wantedPoll = 100 * time.Millisecond

// admit waits for room in the host's memory.
func (p *process) admit(ctx context.Context, o ServeOptions) (release func() error, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if o.Wanted != nil {
		go func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(wantedPoll):
					if !o.Wanted() {
						cancel(control.ErrCanceled)
					}
				}
			}
		}()
	}
	release, err = p.machines.Admit(ctx, p.store.Dir(), p.r.Spec.MemoryMiB, o.Snapshot != "" && p.r.Phase == state.Asleep)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", p.r.Spec.Name, err)
	}
	return release, nil
}

// stillMeant refuses an order that was given before others woke the VM, or booted it, and it slept or ended again: what
// it did meanwhile would be lost, or its memory from then be put on a disk from now. It is called with the VM's lock
// held. Whoever gets ErrRunning looks again.
func (p *process) stillMeant(o ServeOptions) error {
	r := p.r
	meant := true
	switch {
	case o.Snapshot != "":
		meant = r.Snapshot == o.Snapshot && (r.Phase == state.Asleep || r.Maker != 0)
	case o.Fork == nil && r.Phase == state.Asleep:
		// Its memory is of no use if its volumes have moved on: see Start.
		meant = errors.Is(p.store.CheckVolumes(r, r.Snapshot), volume.ErrStale)
	}
	if !meant {
		return fmt.Errorf("starting %s: %w: it has run since it was looked at, and is %s: try again", r.Spec.Name, spec.ErrRunning, r.Phase)
	}
	return nil
}

// letGo closes the file of the record from before the VM ran.
func (p *process) letGo() {
	if p.replaced != nil {
		p.replaced.Close()
		p.replaced = nil
	}
}

// start boots or restores the guest.
func (p *process) start(ctx context.Context, o ServeOptions) error {
	r := p.r
	// With volumes, what the guest writes to its disk and to them has to be found together.
	waking := o.Snapshot != "" && r.Phase == state.Asleep && len(r.Spec.Volumes) == 0
	st, err := p.store.Absolute(r.Disk)
	if err != nil {
		return err
	}
	if o.Snapshot != "" || o.Fork != nil {
		// What a snapshot needs is sealed, and may be in use by other VMs.
		st, err = p.newTop(ctx, st)
	} else {
		st, err = p.writable(ctx, st)
	}
	if err != nil {
		return err
	}
	r.Disk, r.Base = p.store.Relative(st), ""
	r.Phase, r.PID, r.Maker, r.Exit, r.Problem = state.Starting, cmp.Or(o.PID, os.Getpid()), 0, nil, ""
	r.Awake = time.Now().UTC()
	// A second wake from a snapshot goes back in time.
	again := o.Snapshot != "" && r.Resumed == o.Snapshot
	r.Resumed = o.Snapshot
	if r.NetworkID = ""; r.Spec.Network == spec.NetworkTAP {
		r.NetworkID = o.Prebuilt.NextNetwork()
	}
	// A wake does not wait for the disk: until the record says that the VM is awake, its lock does, and after a loss of
	// power it is asleep as of the snapshot that it comes back from anyway. Whoever has asked for it is answered when
	// the record is safe.
	begun, ahead := make(chan error, 1), &state.AheadRecord{}
	if waking {
		starting, ready := *r, *r
		ready.Phase = state.Running
		go func() {
			err := p.store.SaveOver(&starting, st.Top())
			if err == nil {
				ahead, err = p.store.Ahead(&ready)
			}
			begun <- err
		}()
	} else {
		begun <- p.store.SaveOver(r, st.Top())
	}
	saved := sync.OnceValue(func() error { return <-begun })
	// Nothing else may be written to the record's file before.
	defer func() {
		_ = saved()
		ahead.Discard()
	}()
	console, err := newRing(p.store.ConsoleLog(r.Spec.Name), maxConsoleLog)
	if err != nil {
		return err
	}
	parts := Parts(p.store, r, st)
	parts.Console, parts.Log, parts.Prebuilt = console, p.log, o.Prebuilt
	parts.ServiceEvent = p.serviceEvents()
	if parts.Volumes, err = p.store.AttachVolumes(r); err != nil {
		return errors.Join(err, console.Close())
	}
	from := ""
	switch {
	case o.Fork != nil:
		parts.RAM, from = o.Fork, p.store.SnapshotDir(r.Parent)
	case o.Snapshot != "":
		from = p.store.SnapshotDir(o.Snapshot)
	}
	p.in, err = p.machines.Start(ctx, parts, from, instance.RestoreOptions{NewIdentity: o.NewIdentity, Again: again})
	if o.Fork != nil {
		err = errors.Join(err, o.Fork.Close())
	}
	if err == nil && from == "" {
		if err = p.booted(ctx, o); err != nil {
			err = errors.Join(err, p.in.Close())
		}
	}
	if err != nil {
		return errors.Join(err, console.Close())
	}
	p.in.CloseToo(console)
	if o.Snapshot != "" || o.Fork != nil {
		p.trustProxy(ctx)
	}
	if err := saved(); err != nil {
		return errors.Join(err, p.in.Close())
	}
	// From here on others may use it: see Store.canceled.
	if o.Wanted != nil && !o.Wanted() {
		return errors.Join(fmt.Errorf("starting %s: %w", r.Spec.Name, control.ErrCanceled), p.in.Close())
	}
	r.Phase = state.Running
	// After a loss of power a VM that was starting is one that was running.
	if done, err := ahead.Commit(r); err != nil {
		return errors.Join(err, p.in.Close())
	} else if done {
		p.replaced, ahead.Before = ahead.Before, nil
		return nil
	}
	if err := p.store.SaveBy(p.store.ReplaceFile, r); err != nil {
		return errors.Join(err, p.in.Close())
	}
	return nil
}

// booted prepares a guest that has booted for what uses it.
func (p *process) booted(ctx context.Context, o ServeOptions) error {
	if o.NewIdentity {
		if err := p.in.NewIdentity(ctx); err != nil {
			return err
		}
	}
	// What it had in memory is gone.
	p.r.TrustedCA = ""
	p.trustProxy(ctx)
	if forGuest(p.r.Secrets) {
		// Before the services, which may want them.
		if err := p.in.ServeSecrets(ctx); err != nil {
			return err
		}
	}
	if len(p.r.Spec.Services) > 0 {
		if err := p.in.ListenServices(); err != nil {
			return err
		}
		p.startServices(ctx)
	}
	return nil
}

// Parts are the pieces of a recorded VM, with the given disk.
func Parts(s *state.Store, r *state.Record, d disk.Stack) instance.Parts {
	p := instance.Parts{
		Spec: r.Spec, Kernel: s.BootPath(r.Boot.Kernel), Initramfs: s.BootPath(r.Boot.Initramfs), SystemDisk: s.BootPath(r.Boot.SystemDisk),
		Cmdline: r.Boot.Cmdline, Image: s.BootPath(r.Boot.Image), Disk: d, Socket: s.VsockPath(r.Spec.Name), VM: r.ID, Secrets: r.Secrets,
	}
	if os.Getenv(control.NoPageCacheEnv) == "" {
		p.PageCache = s.PageCacheDir()
	}
	p.ProxyIdentity = sync.OnceValues(func() (*proxy.Identity, error) { return s.ProxyIdentity(r) })
	if k, err := kernel.Open(s.KernelDir(), r.Boot.KernelID); err == nil {
		p.Symbolize = k.Symbolize
	}
	return p
}

// writable opens the way to boot a VM with its disk as it is. A disk whose uppermost
// layer is sealed, as that of a VM whose process was killed in the midst of a
// snapshot, gets a new one.
func (p *process) writable(ctx context.Context, st disk.Stack) (disk.Stack, error) {
	if len(st.Layers) > 0 {
		d, err := disk.Open(st, disk.Options{})
		if err == nil {
			return st, d.Close()
		}
		if !errors.Is(err, disk.ErrSealed) {
			return st, fmt.Errorf("opening the VM's disk: %w", err)
		}
	}
	return p.newTop(ctx, st)
}

// newTop makes the layer that the guest is going to write to: over the layers there
// are, or as a fresh file system.
func (p *process) newTop(ctx context.Context, lower disk.Stack) (disk.Stack, error) {
	path, err := p.newLayer()
	if err != nil {
		return disk.Stack{}, err
	}
	if len(lower.Layers) == 0 {
		return p.machines.Format(ctx, p.store.LayerDir(), path, int64(p.r.Spec.DiskMiB)<<20)
	}
	return disk.Fork(path, lower, 0)
}

// newLayer is the path of the VM's next layer. A file of that name is in nobody's record or snapshot, since each counts
// the layers before it names them: a process was killed before its record did, and the record that there is goes on
// without it.
func (p *process) newLayer() (path string, err error) {
	path = filepath.Join(p.store.LayerDir(), p.r.NewLayer())
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("removing a layer that was never recorded: %w", err)
	}
	return path, nil
}

// sealed notes the disk's new layers in the record.
func (p *process) sealed(st disk.Stack) error {
	p.r.Disk = p.store.Relative(st)
	return p.store.Save(p.r)
}

// report describes a guest that is ready.
func (p *process) report() control.Report {
	entry, ready := p.in.Timing()
	rep := control.Report{Name: p.r.Spec.Name, Begun: p.in.Begun().UTC().Round(0), Stages: map[string]float64{}, Hooks: p.in.WakeFailures()}
	for stage, d := range p.in.Machine().Stages().Durations() {
		rep.Stages[stage.String()] = control.Milliseconds(d)
	}
	if f, restored := p.in.Faults(); restored || p.in.Parts().RAM != nil {
		rep.Stages["resume_entry"], rep.Stages["resume_ready"] = control.Milliseconds(entry), control.Milliseconds(ready)
		rep.Faults, rep.MiBTouched = f.ReadFaults.Load()+f.WriteFaults.Load(), f.MiBTouched()
		rep.FramesRead, rep.FramesCached = f.Frames.Load(), f.FramesCached.Load()
	} else {
		rep.Stages["boot"] = control.Milliseconds(ready)
	}
	if n := p.in.Network(); n != nil {
		rep.Network, rep.Stages["network"] = n.Info(), control.Milliseconds(n.SetUp())
	}
	return rep
}

// wait ends with the guest, the sleep, or ctx.
func (p *process) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		p.log.Info("told to stop")
		p.ends(events.Killed)
		p.in.Machine().Fail(control.ErrStopped)
	case <-p.in.Machine().Done():
	case <-p.ended:
		return nil
	}
	// A sleep under way decides what becomes of the VM.
	p.op.Lock()
	defer p.op.Unlock()
	if p.asleep {
		// Let whoever asked for it have the answer.
		select {
		case <-p.ended:
		case <-time.After(answerTime):
		}
		return nil
	}
	x, err := p.in.Machine().Wait(context.Background())
	if err != nil {
		return err
	}
	err = p.in.Close()
	p.r.Phase, p.r.PID = state.Stopped, 0
	p.r.Exit = &state.ExitRecord{Reason: string(x.Reason), Detail: x.Detail, Time: time.Now().UTC()}
	if err = errors.Join(err, p.store.Save(p.r)); err != nil {
		return err
	}
	cause := events.Guest
	if c := p.ending.Load(); c != nil {
		cause = *c
	}
	p.tellAs(cause, events.Stopped, events.Details{Reason: string(x.Reason)})
	return nil
}

// ends says on whose behalf the VM is about to end, if nobody has said so before.
func (p *process) ends(c events.Cause) { p.ending.CompareAndSwap(nil, &c) }

// answerTime is how long the process of a VM that has fallen asleep stays to say so.
const answerTime = 5 * time.Second

// sleepRecord says what the VM has used until now, when it goes to sleep.
func (p *process) sleepRecord(res spec.SleepResult) state.SleepRecord {
	s := state.SleepRecord{
		Snapshot: res.Snapshot, Awake: p.r.Awake, Asleep: time.Now().UTC(),
		Raw: res.BytesRaw, Stored: res.BytesStored, Shared: res.BytesShared, CPUSeconds: max(processCPU()-p.cpuBefore, 0).Seconds(),
	}
	if n := p.in.Network(); n != nil {
		s.NetworkIn, s.NetworkOut = n.Bytes()
	}
	return s
}

// processCPU is the processor time that this process has used.
func processCPU() time.Duration {
	var ru unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &ru); err != nil {
		return 0
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

func (p *process) capture(ctx context.Context, kind, note string, more ...func(*instance.CaptureOptions)) (*instance.Capture, spec.SleepResult, error) {
	id := spec.NewID()
	labels, err := p.r.Labels(kind)
	if err != nil {
		return nil, spec.SleepResult{}, err
	}
	if note != "" {
		labels[state.LabelNote] = note
	}
	if err := p.in.Parts().LabelVolumes(labels); err != nil {
		return nil, spec.SleepResult{}, err
	}
	newTop, err := p.newLayer()
	if err != nil {
		return nil, spec.SleepResult{}, err
	}
	o := instance.CaptureOptions{
		Dir: p.store.SnapshotDir(id), ID: id, Live: kind != state.KindSleep, NewTop: newTop, Labels: labels,
		Image: p.r.Boot.ImageID, Kernel: p.r.Boot.KernelID, Prioritize: p.prioritize,
		Names:  func(st disk.Stack) []string { return p.store.Relative(st).Layers },
		Sealed: p.sealed,
	}
	for _, f := range more {
		f(&o)
	}
	c, err := p.in.Capture(ctx, o)
	if err != nil {
		return nil, spec.SleepResult{}, err
	}
	res := spec.SleepResult{
		Name: p.r.Spec.Name, Snapshot: o.ID, BytesRaw: c.Raw, BytesStored: c.Stored,
		BytesShared: c.Shared, PagesChanged: c.Changed, PagesFree: c.Free,
		Stages: map[string]float64{"pause": control.Milliseconds(c.Pause), "save": control.Milliseconds(c.Save)},
	}
	if f, ok := p.in.Faults(); ok {
		res.Faults, res.MiBTouched = f.ReadFaults.Load()+f.WriteFaults.Load(), f.MiBTouched()
	}
	return c, res, nil
}

// begin begins something with the VM as a whole, which has to be there, and goes on running until end is called.
func (p *process) begin() (end func(), err error) {
	p.op.Lock()
	if err := p.alive(); err != nil {
		p.op.Unlock()
		return nil, err
	}
	release := p.in.KeepRunning()
	return func() { release(); p.op.Unlock() }, nil
}

// save changes the record by change, and writes it. If either fails, the record is as before. p.op is held.
func (p *process) save(change func() error) error {
	before := *p.r
	err := change()
	if err == nil {
		err = p.store.Save(p.r)
	}
	if err != nil {
		*p.r = before
	}
	return err
}

// runsOn says of an error, if it is one, what could not be done with the VM.
func runsOn(doing string, err *error) {
	if *err != nil {
		*err = fmt.Errorf("%s: %w: it runs on", doing, *err)
	}
}

// sleep writes the VM to a snapshot and ends the process. When anything fails, still included, the
// VM runs on. still, if not nil, is called when the guest stands still.
func (p *process) sleep(ctx context.Context, policy spec.HookPolicy, still func() error) (res spec.SleepResult, err error) {
	end, err := p.begin()
	if err != nil {
		return res, err
	}
	defer end()
	p.falling.Store(true)
	defer p.falling.Store(false)
	defer runsOn("putting "+p.r.Spec.Name+" to sleep", &err)
	begin := time.Now()
	host, err := p.hostBefore(ctx, policy)
	if err != nil {
		return res, err
	}
	defer func() { res.HostHooks = host.settle(ctx, err) }()
	hooks, err := p.in.RunHooksBefore(ctx, guest.HookSleep, policy)
	if err != nil {
		p.tellRefusal(ctx, err)
		return res, err
	}
	defer func() {
		if err != nil {
			hooks.After(ctx)
		}
	}()
	hooked := time.Since(begin)
	shed, err := p.shed(ctx, policy)
	if err != nil {
		return res, err
	}
	if still == nil {
		p.holders.dismiss(control.DismissTime)
	}
	c, res, err := p.capture(ctx, state.KindSleep, "", func(o *instance.CaptureOptions) { o.Still = shed.still(still) })
	if err != nil {
		p.tellLimit(ctx, err)
		return res, err
	}
	res.Hooks, res.Persist = hooks.Failed(), shed.result()
	if err := p.in.Parts().SettleVolumes(c.ID); err != nil {
		return res, errors.Join(err, p.in.Continue())
	}
	// From here on the snapshot is what counts.
	top := p.r.Disk.Layers[len(p.r.Disk.Layers)-1]
	slept := p.sleepRecord(res)
	control.Take(&res, slept)
	if err := p.fallAsleep(c.ID, c.Disk, slept); err != nil {
		return res, errors.Join(err, p.in.Continue())
	}
	p.asleep = true
	p.tell(ctx, events.Slept, events.Details{Snapshot: c.ID, Bytes: res.BytesStored, Milliseconds: res.Stages["pause"]})
	p.tellHooks(ctx, res.Hooks)
	if err := p.in.Close(); err != nil {
		p.log.Warn("closing the VM after its sleep", "error", err)
	}
	// The layer that the guest would have gone on with has nothing in it.
	if err := os.Remove(filepath.Join(p.store.LayerDir(), top)); err != nil {
		p.log.Warn("removing an empty layer", "error", err)
	}
	res.Stages["hooks"], res.Stages["sleep"] = control.Milliseconds(hooked), control.Milliseconds(time.Since(begin))
	return res, nil
}

// fallAsleep has the record say that the VM sleeps in a snapshot. If that fails, the record is as before.
func (p *process) fallAsleep(snapshot string, st disk.Stack, slept state.SleepRecord) error {
	return p.save(func() error {
		p.r.Phase, p.r.PID, p.r.Snapshot, p.r.Previous = state.Asleep, 0, snapshot, ""
		p.r.Disk = p.store.Relative(st)
		p.r.Sleeps = append(slices.Clone(p.r.Sleeps[max(len(p.r.Sleeps)-state.MaxSleeps+1, 0):]), slept)
		return nil
	})
}

// snapshot writes the VM to a snapshot and lets it run on.
func (p *process) snapshot(ctx context.Context, note string, policy spec.HookPolicy) (res spec.SleepResult, err error) {
	end, err := p.begin()
	if err != nil {
		return res, err
	}
	defer end()
	defer runsOn("taking a snapshot of "+p.r.Spec.Name, &err)
	hooks, err := p.in.RunHooksBefore(ctx, guest.HookSnapshot, policy)
	if err != nil {
		p.tellRefusal(ctx, err)
		return res, err
	}
	defer p.shortenDisk()
	res, err = p.captureLive(ctx, hooks, state.KindNamed, note)
	if err != nil {
		return res, err
	}
	p.tell(ctx, events.Snapshotted, events.Details{Snapshot: res.Snapshot, Bytes: res.BytesStored, Milliseconds: res.Stages["pause"]})
	p.tellHooks(ctx, res.Hooks)
	return res, nil
}

// captureLive captures a VM that runs on, whose hooks are told as soon as it does.
func (p *process) captureLive(ctx context.Context, hooks Hooks, kind, note string, more ...func(*instance.CaptureOptions)) (spec.SleepResult, error) {
	// The guest's programs need not stand still until all is written.
	var after sync.WaitGroup
	_, res, err := p.capture(ctx, kind, note, append(more, func(o *instance.CaptureOptions) {
		o.Resumed = func() { after.Go(func() { hooks.After(context.WithoutCancel(ctx)) }) }
	})...)
	after.Wait()
	hooks.After(context.WithoutCancel(ctx)) // if it did not get that far
	res.Hooks = hooks.Failed()
	return res, err
}

func (p *process) alive() error {
	if p.asleep {
		return fmt.Errorf("%w: %s: it has gone to sleep", spec.ErrNotRunning, p.r.Spec.Name)
	}
	select {
	case <-p.in.Machine().Done():
		return fmt.Errorf("%w: %s: its guest has ended", spec.ErrNotRunning, p.r.Spec.Name)
	default:
		return nil
	}
}

// end lets the process end, once the answer to the request that asked for it is out.
func (p *process) end() { p.endOnce.Do(func() { close(p.ended) }) }

func (p *process) info() control.Info {
	h := p.in.Machine().Health()
	i := control.Info{Report: p.report(), PID: os.Getpid(), Hung: h.Hung, Problem: h.Detail, Falling: p.falling.Load()}
	if full := p.in.SpaceProblem(); full != "" {
		i.NoSpace, i.Problem = true, full
	}
	return i
}

// listen opens the control socket: HTTP with JSON, for this host's root only.
func (p *process) listen(srv *http.Server) error {
	l, err := osfile.ListenUnix(p.store.ControlSocket(p.r.Spec.Name))
	if err != nil {
		return fmt.Errorf("opening the control socket: %w", err)
	}
	go func() {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			p.log.Error("control socket", "error", err)
		}
	}()
	return nil
}

// control makes what answers on the control socket, once the VM is there.
func (p *process) control() *http.Server {
	mux := http.NewServeMux()
	answer(mux, "GET /info", func(*http.Request) (any, error) { return p.info(), nil })
	answer(mux, "GET /policy/stats", func(*http.Request) (any, error) { return p.networkStats() })
	answer(mux, "GET /secrets", func(*http.Request) (any, error) { return p.listSecrets(), nil })
	mux.HandleFunc("GET /policy/events", p.serveEvents)
	mux.HandleFunc("GET /policy/flows", p.serveFlows)
	mux.HandleFunc("GET /hold", p.serveWakeLock)
	mux.HandleFunc("POST "+control.Orders+"fork", p.serveFork)
	// A sleep goes on if the one who asked for it goes away.
	take(mux, "sleep", control.MaxOrder, func(ctx context.Context, o spec.SleepOptions) (any, error) {
		if err := o.Hooks.Validate(); err != nil {
			return nil, err
		}
		return p.sleep(ctx, o.Hooks, nil)
	}, p.end)
	take(mux, "snapshot", control.MaxOrder, func(ctx context.Context, o spec.SnapshotOptions) (any, error) {
		if err := o.Hooks.Validate(); err != nil {
			return nil, err
		}
		if o.DiskOnly {
			return p.diskSnapshot(ctx, o.Note, o.Hooks)
		}
		return p.snapshot(ctx, o.Note, o.Hooks)
	})
	take(mux, "policy", netpolicy.MaxFileBytes+1, func(_ context.Context, text json.RawMessage) (any, error) {
		policy, err := netpolicy.Parse(text)
		if err != nil {
			return nil, err
		}
		return p.setPolicy(policy)
	})
	take(mux, "tags", control.MaxOrder, func(_ context.Context, c spec.TagChange) (any, error) { return p.setTags(c) })
	take(mux, "secrets", control.MaxSecretsBody, func(ctx context.Context, list []spec.Secret) (any, error) {
		defer func() {
			for _, l := range list {
				clear(l.Value)
			}
		}()
		return nil, p.setSecrets(ctx, list)
	})
	take(mux, "remove-secrets", control.MaxOrder, func(_ context.Context, names []string) (any, error) {
		return nil, p.removeSecrets(names)
	})
	take(mux, "service", 4*spec.MaxServicesBytes, func(_ context.Context, want spec.Service) (any, error) {
		return nil, p.changeServices(func() error { return p.r.SetService(want) })
	})
	take(mux, "remove-service", control.MaxOrder, func(_ context.Context, name string) (any, error) {
		return nil, p.changeServices(func() error { return p.r.DropService(name) })
	})
	// Whoever has the guest shut down says so first.
	take(mux, "ending", control.MaxOrder, func(ctx context.Context, _ struct{}) (any, error) {
		p.ends(events.CauseOf(ctx))
		return nil, nil
	})
	take(mux, "kill", control.MaxOrder, func(ctx context.Context, _ struct{}) (any, error) {
		p.ends(events.CauseOf(ctx))
		p.in.Machine().Fail(control.ErrStopped)
		return nil, nil
	})
	return &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 16 << 10}
}

// answer answers requests with what f returns, as JSON. after is called then, unless that is an error.
func answer(mux *http.ServeMux, pattern string, f func(*http.Request) (any, error), after ...func()) {
	mux.HandleFunc(pattern, func(w http.ResponseWriter, req *http.Request) {
		v, err := f(req)
		if err != nil {
			writeError(w, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
		for _, then := range after {
			_ = http.NewResponseController(w).Flush()
			then()
		}
	})
}

// take is answer for an order: a T as JSON, of at most limit bytes.
func take[T any](mux *http.ServeMux, order string, limit int64, do func(context.Context, T) (any, error), after ...func()) {
	answer(mux, "POST "+control.Orders+order, func(r *http.Request) (any, error) {
		var o T
		d := json.NewDecoder(io.LimitReader(r.Body, limit))
		d.DisallowUnknownFields()
		if err := d.Decode(&o); err != nil {
			return nil, fmt.Errorf("reading what is asked for: %w: %w", spec.ErrInvalid, err)
		}
		return do(control.WithCause(r), o)
	}, after...)
}

// writeError answers a request with what is wrong.
func writeError(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusInternalServerError)
	_ = json.NewEncoder(w).Encode(control.ReportError(err))
}
