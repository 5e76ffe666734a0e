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

	"github.com/drowse-vm/drowse/devices/secrets"
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
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/vmm"
)

// process runs a VM in its own process.
type process struct {
	store      *state.Store
	log        *slog.Logger
	prioritize func() (calm func())
	machines   Machines
	in         VM
	net        Network // nil without one
	// identity is that of the VM's proxy, and hidden has the secrets that it puts into requests, which the guest never
	// gets.
	identity func() (*proxy.Identity, error)
	hidden   secrets.Store
	from     string // the directory of the snapshot that the VM came from, or empty
	arriving *arriving
	freezer  atomic.Pointer[freezer] // of a VM whose memory is on its way

	// op is held by operations on the whole VM, and guards the fields below.
	op     sync.Mutex
	r      *state.Record
	asleep bool // the record says so, and the instance is closed
	quota  quota
	// sentAll says that the VM's owner has sent as much as it may, so its network denies everything. counted is how
	// many bytes of the VM are in its owner's sum.
	sentAll bool
	counted uint64
	// ended is closed when the process must end.
	ended   chan struct{}
	endOnce sync.Once

	// holders keep the VM awake. falling reports that it is being put to sleep.
	holders wakeLocks
	falling atomic.Bool

	// cpuBefore is processor time that the process used before it belonged to the VM.
	cpuBefore time.Duration
	// events writes events; nil before the VM is ready.
	events *state.EventWriter
	// welcomed is done when the host's hooks have been told of the VM's start.
	welcomed sync.WaitGroup
	// ending is the cause of the VM's end.
	ending atomic.Pointer[events.Cause]

	lasting    context.Context
	background sync.WaitGroup
	shortening atomic.Bool
}

// ServeOptions say how the process of a VM starts it.
type ServeOptions struct {
	// Snapshot is the snapshot to restore; empty boots.
	Snapshot string
	// NewIdentity gives the guest its own identity, whatever its disk and memory were before.
	NewIdentity bool
	// Template says that Snapshot is a template: once restored, the VM is one that has booted.
	Template bool
	// Fork, if not nil, is the image of a child. Serve closes it.
	Fork *os.File
	// Prebuilt and Link, if not nil, may have a part of the VM and its network that were made ahead. Serve closes what
	// the VM does not need.
	Prebuilt *instance.Prebuilt
	Link     *network.Prebuilt
	// Report is called once, when the guest is ready or cannot be.
	Report func(control.Report)
	// Log gets the process's log.
	Log *slog.Logger
	// Cause is the cause of the start; empty is Library.
	Cause events.Cause
	// WakeLock, if not nil, is a socket. The client holds the VM awake as long as the other end is open.
	WakeLock *os.File
	// Wanted, if not nil, reports whether the caller still waits for the report. If not, the VM is not started.
	Wanted func() bool
	// Machines, if not nil, replaces KVM's. PID, if not 0, replaces the process id in the record.
	Machines Machines
	PID      int

	// prioritize, if not nil, puts the process before others until calm is called.
	prioritize func() (calm func())
	// terminated, if not nil, ends when the process is told to end. Then the VM goes to sleep.
	terminated context.Context
}

// Serve runs a VM: it takes the VM's lock, boots or restores the guest, answers on the control socket, and returns when
// the guest has ended or sleeps. The record must exist. When ctx ends, Serve stops the VM as if its power were cut.
func Serve(ctx context.Context, s *state.Store, name string, o ServeOptions) error {
	p := &process{store: s, log: o.Log, prioritize: o.prioritize, machines: o.Machines, ended: make(chan struct{}), cpuBefore: processCPU()}
	if p.machines == nil {
		p.machines = kvmMachines{}
	}
	defer p.hidden.Close()
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
		// The record was changed by hand.
		return p.notStarted(err)
	}
	if err := p.stillMeant(o); err != nil {
		return err
	}
	ctx, low, unlease, err := p.leased(ctx)
	if err != nil {
		return p.notStarted(err)
	}
	defer unlease()
	// The caller kills a process whose report it does not want, and with it the memory of a VM that is awake by then.
	// So a start that nobody waits for fails by itself, and the VM sleeps on.
	wanted, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	settled := make(chan struct{})
	settle := sync.OnceFunc(func() { close(settled) })
	defer settle()
	if o.Wanted != nil {
		go cancelUnwanted(o.Wanted, settled, cancel)
	}
	// While the VM waits for memory, its record stays unchanged.
	release, err := p.admit(wanted, o)
	if err != nil {
		return p.notStarted(err)
	}
	defer func() { err = errors.Join(err, release()) }()
	before := *p.r
	// In parallel with the start of the guest.
	made := make(chan *http.Server, 1)
	go func() { made <- p.control() }()
	err = p.start(wanted, o)
	settle()
	if err != nil {
		top := p.r.Disk
		// Restore the record as it was. The maker of a VM that was just being made removes it.
		p.r.Phase, p.r.PID, p.r.Problem = before.Phase, 0, before.Problem
		if before.Phase == state.Starting {
			p.r.Phase, p.r.Problem = state.Stopped, "it did not start: "+err.Error()
		}
		p.r.Disk = before.Disk
		if o.Snapshot != "" && before.Phase == state.Asleep {
			if stale := p.store.CheckVolumes(p.r, o.Snapshot); errors.Is(stale, volume.ErrStale) {
				// The VM was awake long enough to write to a volume, so its writes to its disk must be kept as well.
				p.r.Phase, p.r.Disk = state.Crashed, top
				p.r.Problem = "its wake has failed, and it cannot be repeated: " + stale.Error()
			}
		}
		return errors.Join(err, p.store.Save(p.r))
	}
	lasting, stop := context.WithCancel(ctx)
	p.lasting = lasting
	p.events = p.store.NewEventWriter(p.log)
	p.awaitArrival()
	// After the background has ended, and before the lock is released.
	defer func() {
		stop()
		p.background.Wait()
		p.welcomed.Wait()
		p.events.Close()
	}()
	// Events of later requests must follow that of this start.
	p.op.Lock()
	unlock := sync.OnceFunc(p.op.Unlock)
	defer unlock()
	control := <-made
	if err := p.listen(control); err != nil {
		return errors.Join(err, p.close())
	}
	defer control.Close()
	unask, err := p.serveSelf(lasting)
	if err != nil {
		return errors.Join(err, p.close())
	}
	// After the background was told to end, and before it is waited for.
	defer unask()
	if o.WakeLock != nil {
		if err := p.lockedBy(o.WakeLock); err != nil {
			return errors.Join(err, p.close())
		}
	}
	rep := p.report()
	rep.Awaited = slices.Clone(p.r.Secrets)
	o.Report(rep)
	begun, details := p.begun(before.Maker != 0, o)
	if begun == events.Started && before.Phase == state.Crashed {
		details.Problem = "its process was killed before: it has booted with its disk as it was, and what was in memory is lost"
	}
	p.welcomed.Add(1)
	p.tellThen(cmp.Or(o.Cause, events.Library), begun, details, p.welcome)
	p.tellHooks(events.WithCause(ctx, cmp.Or(o.Cause, events.Library)), p.in.WakeFailures())
	sleeps, long := p.r.Spec.Idle.SleepSeconds > 0, len(p.r.Disk.Layers) > 2*maxStack
	unlock()
	if err := errors.Join(o.Prebuilt.Close(), o.Link.Close()); err != nil {
		p.log.Warn("closing what was made ahead and is not needed", "error", err)
	}
	if sleeps {
		p.background.Go(func() { p.sleepWhenIdle(lasting) })
	}
	if p.net != nil {
		p.background.Go(func() { p.meterEgress(lasting) })
	}
	if o.terminated != nil {
		p.background.Go(func() { p.sleepOnTerminate(lasting, o.terminated, "its process was told to end", toldHooks) })
	}
	if low != nil {
		p.background.Go(func() { p.sleepOnTerminate(lasting, low, "its host loses its claim on it", leaseHooks) })
	}
	// Leave a VM that has just come back alone, unless its stack is far too long.
	if long || p.quota.joining {
		p.shortenDisk()
	}
	p.keepPages()
	p.background.Go(func() { instance.ReleaseHeap(p.lasting.Done()) })
	return p.wait(ctx)
}

// notStarted returns err for a VM of which nothing has been touched. The record of a VM that was just being made
// gets the problem.
func (p *process) notStarted(err error) error {
	if p.r.Phase == state.Starting {
		p.r.Phase, p.r.PID, p.r.Problem = state.Stopped, 0, "it did not start: "+err.Error()
		err = errors.Join(err, p.store.Save(p.r))
	}
	return err
}

// wantedPoll is how often a VM that is started checks that it is still wanted.
const wantedPoll = 100 * time.Millisecond

// cancelUnwanted calls cancel when nobody waits for the VM any more, until settled is closed.
func cancelUnwanted(wanted func() bool, settled <-chan struct{}, cancel context.CancelCauseFunc) {
	for {
		select {
		case <-settled:
			return
		case <-time.After(wantedPoll):
			if !wanted() {
				cancel(control.ErrCanceled)
				return
			}
		}
	}
}

// admit waits until the limits of the VM's owner allow it, and for room in the host's memory.
func (p *process) admit(ctx context.Context, o ServeOptions) (release func() error, err error) {
	name, dir, mib, wake := p.r.Spec.Name, p.store.Dir(), p.r.Spec.MemoryMiB, o.Snapshot != "" && p.r.Phase == state.Asleep
	owner := p.store.Owner(name)
	if err := p.store.AdmitDisk(ctx, owner); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	if err := p.admitDisk(ctx); err != nil {
		return nil, err
	}
	owned, err := limits.AdmitOwner(ctx, dir, owner, mib, wake)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	memory, err := p.machines.Admit(ctx, dir, mib, wake)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting %s: %w", name, err), owned())
	}
	return func() error { return errors.Join(memory(), owned()) }, nil
}

// stillMeant refuses an order that is outdated: meanwhile the VM was woken or booted, and slept or ended again.
// Otherwise the VM would lose what it did, or old memory would meet a newer disk. The VM's lock must be held. A
// caller that gets ErrRunning must look again.
func (p *process) stillMeant(o ServeOptions) error {
	r := p.r
	meant := true
	switch {
	case o.Snapshot != "":
		meant = r.Snapshot == o.Snapshot && (r.Phase == state.Asleep || r.Maker != 0)
	case o.Fork == nil && r.Phase == state.Asleep:
		// Its memory cannot be used if its volumes have moved on: see Start.
		meant = errors.Is(p.store.CheckVolumes(r, r.Snapshot), volume.ErrStale)
	}
	if !meant {
		return fmt.Errorf("starting %s: %w: it has run since it was looked at, and is %s: try again", r.Spec.Name, spec.ErrRunning, r.Phase)
	}
	return nil
}

// start boots or restores the guest.
func (p *process) start(ctx context.Context, o ServeOptions) (err error) {
	r := p.r
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	// First, since it is done in the background.
	if err := p.connect(o); err != nil {
		return err
	}
	if err := p.awaitHidden(); err != nil {
		return err
	}
	// With volumes, a later start must find the guest's writes to its disk and to its volumes together.
	waking := o.Snapshot != "" && r.Phase == state.Asleep && len(r.Spec.Volumes) == 0
	st, err := p.store.Absolute(r.Disk)
	if err != nil {
		return err
	}
	fresh := "" // the layer that the record's write must make durable
	switch unused, ok := p.unusedTop(st); {
	case ok:
		st = unused
	case o.Snapshot != "" || o.Fork != nil:
		// The layers that a snapshot needs are sealed, and other VMs may use them.
		st, err = p.newTop(ctx, st)
		fresh = st.Top()
	default:
		st, err = p.writable(ctx, st)
		fresh = st.Top()
	}
	if err != nil {
		return err
	}
	r.Disk, r.Base = p.store.Relative(st), ""
	r.Phase, r.PID, r.Maker, r.Exit, r.Problem = state.Starting, cmp.Or(o.PID, os.Getpid()), 0, nil, ""
	r.DiskUsed = 0
	r.Awake = time.Now().UTC()
	m, jailed := p.machines.(jailedMachines)
	r.Confined = jailed && m.likely()
	// A second wake from the same snapshot goes back in time.
	again := o.Snapshot != "" && r.Resumed == o.Snapshot
	r.Resumed = o.Snapshot
	// A wake does not wait for the disk. Until the record says that the VM is awake, its lock does. After a loss
	// of power the VM is asleep, as of the snapshot that it comes back from anyway. The caller gets its answer
	// when the record is safe.
	begun, starting := make(chan error, 1), *r
	if waking {
		go func() { begun <- p.store.SaveOver(&starting, fresh) }()
	} else {
		begun <- p.store.SaveOver(r, fresh)
	}
	saved := sync.OnceValue(func() error { return <-begun })
	// No other write to the record's file may come before this one.
	defer func() { _ = saved() }()
	console, err := newRing(p.store.ConsoleLog(r.Spec.Name), maxConsoleLog)
	if err != nil {
		return err
	}
	parts := Parts(p.store, r, st)
	parts.Console, parts.Log, parts.Prebuilt = console, p.log, o.Prebuilt
	parts.ServiceEvent = p.serviceEvents()
	if p.quota.limit > 0 {
		parts.DiskRoom, parts.QuotaReached = max(p.room(), quotaRoom), p.quotaReached
	}
	if p.net != nil {
		parts.TAP, parts.LinkReady = p.net.TAP(), p.net.Wait
	}
	if parts.Volumes, err = p.store.AttachVolumes(r); err != nil {
		return errors.Join(err, console.Close())
	}
	from := ""
	switch {
	case o.Fork != nil:
		parts.RAM, from = o.Fork, p.store.SnapshotDir(r.Parent)
	case o.Snapshot != "":
		from, parts.Arriving = p.store.SnapshotDir(o.Snapshot), p.comes(o.Snapshot)
	}
	p.from = from
	if _, jailed := p.machines.(jailedMachines); !jailed && parts.Arriving != nil {
		if err := parts.Arriving.Whole(ctx); err != nil {
			return errors.Join(err, console.Close())
		}
		parts.Arriving = nil
	}
	p.in, err = p.machines.Start(ctx, parts, from, instance.RestoreOptions{NewIdentity: o.NewIdentity, Again: again})
	if o.Fork != nil {
		err = errors.Join(err, o.Fork.Close())
	}
	if err != nil {
		return errors.Join(err, console.Close())
	}
	p.in.CloseToo(console)
	p.startQuota()
	switch {
	case from == "" || o.Template:
		if err := p.booted(ctx, o); err != nil {
			return err
		}
	default:
		p.trustProxy(ctx)
	}
	if o.Template {
		// It comes back from its own sleeps alone. The first of them builds on the template, even if that is removed.
		r.Snapshot, r.Resumed, r.Base = "", "", o.Snapshot
	}
	if err := saved(); err != nil {
		return err
	}
	// From here on others may use the VM: see canceled in package pool.
	if o.Wanted != nil && !o.Wanted() {
		return fmt.Errorf("starting %s: %w", r.Spec.Name, control.ErrCanceled)
	}
	r.Phase, r.Confined = state.Running, p.in.Confined()
	return p.store.SaveRunning(r, starting)
}

// connect begins to make the VM's network, if it has one.
func (p *process) connect(o ServeOptions) (err error) {
	r := p.r
	p.identity = sync.OnceValues(func() (*proxy.Identity, error) { return p.store.ProxyIdentity(r) })
	if r.NetworkID = ""; r.Spec.Network != spec.NetworkTAP {
		return nil
	}
	r.NetworkID = o.Link.ID()
	why := limits.AddEgress(p.store.Dir(), p.store.Owner(r.Spec.Name), time.Now(), 0)
	if p.sentAll = errors.Is(why, spec.ErrQuota); why != nil && !p.sentAll {
		return why
	}
	policy := r.Spec.Policy
	if p.sentAll {
		policy = nil
	}
	p.net, err = p.machines.Network(network.Config{
		Name: r.Spec.Name, ID: r.ID, IPv6: r.Spec.IPv6, Policy: policy, Tags: r.Spec.Tags,
		Identity: p.identity, Secrets: &p.hidden, Prebuilt: o.Link, Log: p.log,
	})
	if err == nil && p.sentAll {
		p.net.Warn(deniedFor(why))
	}
	return err
}

// close stops the VM as if its power were cut, and then its network.
func (p *process) close() error {
	var errs []error
	if p.in != nil {
		errs = append(errs, p.in.Close())
	}
	if p.net != nil {
		_, _ = p.countEgress(time.Now())
		errs = append(errs, p.net.Close())
	}
	return errors.Join(append(errs, p.hidden.Close())...)
}

// booted prepares a guest that has booted, or comes from a template, for use.
func (p *process) booted(ctx context.Context, o ServeOptions) error {
	if o.NewIdentity && !o.Template { // a restore has done it
		if err := p.in.NewIdentity(ctx); err != nil {
			return err
		}
	}
	// The boot has cleared its memory.
	p.r.TrustedCA = ""
	p.trustProxy(ctx)
	if forGuest(p.r.Secrets) {
		// Before the services, which may need them.
		if err := p.in.ServeSecrets(ctx); err != nil {
			if slices.ContainsFunc(p.r.Secrets, func(f spec.SecretFile) bool { return !f.Proxy && f.From == "" }) {
				return err
			}
			// Nobody has seen that this guest can have secrets. It can be told that it cannot: see handIn of package sandbox.
			p.log.Error("the guest serves no secrets", "error", err)
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

// Parts returns the pieces of a recorded VM, with the given disk.
func Parts(s *state.Store, r *state.Record, d disk.Stack) instance.Parts {
	p := instance.Parts{
		Spec: r.Spec, Kernel: s.BootPath(r.Boot.Kernel), Initramfs: s.BootPath(r.Boot.Initramfs), SystemDisk: s.BootPath(r.Boot.SystemDisk),
		Cmdline: r.Boot.Cmdline, Image: s.BootPath(r.Boot.Image), Disk: d, Socket: s.VsockPath(r.Spec.Name), VM: r.ID,
		Secrets:    slices.DeleteFunc(slices.Clone(r.Secrets), func(f spec.SecretFile) bool { return f.Proxy }),
		NoDirtyLog: noDirtyLog(),
	}
	if os.Getenv(control.NoPageCacheEnv) == "" {
		p.PageCache = s.PageCacheDir()
	}
	// Nobody asks before the guest's kernel fails.
	find := sync.OnceValues(func() (*kernel.Kernel, error) { return kernel.Open(s.KernelDir(), r.Boot.KernelID) })
	p.Symbolize = func(addr uint64) (string, uint64, bool) {
		k, err := find()
		if err != nil {
			return "", 0, false
		}
		return k.Symbolize(addr)
	}
	return p
}

// writable returns a stack that the VM can boot with and write to. If the uppermost layer is sealed, as after a
// kill in the middle of a snapshot, it adds a new layer.
func (p *process) writable(ctx context.Context, st disk.Stack) (disk.Stack, error) {
	if coming, err := p.store.LayersArrive(p.r.Snapshot, st); err != nil || coming {
		return st, cmp.Or(err, fmt.Errorf("%w: %s boots when its disk is", spec.ErrArriving, p.r.Spec.Name))
	}
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

// unusedTop returns the disk of a sleeping VM with the layer above it that its sleep has left for this wake. It is
// durable, so the wake makes none and waits for none.
func (p *process) unusedTop(lower disk.Stack) (st disk.Stack, ok bool) {
	if p.r.Phase != state.Asleep || p.r.NextLayer == 0 || len(lower.Layers) == 0 {
		return lower, false
	}
	path := filepath.Join(p.store.LayerDir(), p.r.LastLayer())
	// A wake that has failed may have written to it.
	unused := false
	err := p.store.WithLayers(p.r.Snapshot, lower, func(at disk.Stack) (err error) { unused, err = disk.Unused(path, at); return err })
	if err != nil || !unused {
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			p.log.Info("not using the layer that the last sleep has left", "cause", err)
		}
		return lower, false
	}
	return lower.With(path), true
}

// newTop makes the layer that the guest will write to: above the existing layers, or as a fresh file system.
func (p *process) newTop(ctx context.Context, lower disk.Stack) (disk.Stack, error) {
	path, err := p.newLayer()
	if err != nil {
		return disk.Stack{}, err
	}
	if len(lower.Layers) == 0 {
		return p.machines.Format(ctx, p.store.LayerDir(), path, int64(p.r.Spec.DiskMiB)<<20)
	}
	return lower.With(path), p.store.WithLayers(p.r.Snapshot, lower, func(at disk.Stack) error {
		_, err := disk.Fork(path, at, 0)
		return err
	})
}

// newLayer returns the path of the VM's next layer, and removes a leftover file of that name. No record or
// snapshot names that file, because each counts a layer before it names it: a process was killed before it saved
// its record, and the saved record does without the file.
func (p *process) newLayer() (path string, err error) {
	path = filepath.Join(p.store.LayerDir(), p.r.NewLayer())
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("removing a layer that was never recorded: %w", err)
	}
	return path, nil
}

// sealed records the disk's new layers.
func (p *process) sealed(st disk.Stack) error {
	p.r.Disk = p.store.Relative(st)
	return p.store.Save(p.r)
}

// report describes a guest that is ready.
func (p *process) report() control.Report {
	entry, ready := p.in.Timing()
	rep := control.Report{Name: p.r.Spec.Name, Begun: p.in.Begun().UTC().Round(0), Stages: map[string]float64{}, Hooks: p.in.WakeFailures()}
	for stage, d := range p.in.Machine().Stages() {
		rep.Stages[stage] = control.Milliseconds(d)
	}
	if f, restored := p.in.StartFaults(); restored || p.in.Parts().RAM != nil {
		rep.Stages["resume_entry"], rep.Stages["resume_ready"] = control.Milliseconds(entry), control.Milliseconds(ready)
		rep.Faults, rep.MiBTouched = f.ReadFaults.Load()+f.WriteFaults.Load(), f.MiBTouched()
		rep.FramesRead, rep.FramesCached = f.Frames.Load(), f.FramesCached.Load()
	} else {
		rep.Stages["boot"] = control.Milliseconds(ready)
	}
	if n := p.net; n != nil {
		rep.Network, rep.Stages["network"] = n.Info(), control.Milliseconds(n.SetUp())
	}
	return rep
}

// wait returns when the guest ends or sleeps, or after ctx ends.
func (p *process) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		p.log.Info("told to stop", "why", context.Cause(ctx))
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
		// Let the client that asked for the sleep get its answer.
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
	problem := ""
	switch {
	case errors.Is(context.Cause(ctx), spec.ErrUnclaimed):
		problem = context.Cause(ctx).Error()
	case x.Reason == vmm.HostError && ctx.Err() == nil && !errors.Is(x.Err, control.ErrStopped) && p.arrives():
		problem = x.Detail // it can go back to its sleep, once that is here
	}
	err = p.close()
	if problem != "" {
		// Whatever uses it next boots it with its disk, if no other host has claimed it.
		p.r.Phase, p.r.PID, p.r.Problem = state.Crashed, 0, problem
		err = errors.Join(err, p.store.Save(p.r))
		p.tellAs(events.Killed, events.Crashed, events.Details{Problem: p.r.Problem})
		return err
	}
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

// ends records the cause of the VM's end, unless there is one already.
func (p *process) ends(c events.Cause) { p.ending.CompareAndSwap(nil, &c) }

// answerTime is how long the process of a VM that has fallen asleep stays to answer.
const answerTime = 5 * time.Second

// sleepRecord returns what the VM has used until now, when it goes to sleep.
func (p *process) sleepRecord(res spec.SleepResult) state.SleepRecord {
	s := state.SleepRecord{
		Snapshot: res.Snapshot, Awake: p.r.Awake, Asleep: time.Now().UTC(),
		Raw: res.BytesRaw, Stored: res.BytesStored, Shared: res.BytesShared, CPUSeconds: max(p.usedCPU()-p.cpuBefore, 0).Seconds(),
	}
	if n := p.net; n != nil {
		s.NetworkIn, s.NetworkOut = n.Bytes()
	}
	return s
}

// usedCPU returns the processor time that the VM's processes have used.
func (p *process) usedCPU() time.Duration {
	used := processCPU() + p.in.CPU()
	if p.net != nil {
		used += p.net.CPU()
	}
	return used
}

// processCPU returns the processor time that this process has used.
func processCPU() time.Duration {
	var ru unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &ru); err != nil {
		return 0
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

func (p *process) capture(ctx context.Context, kind, note string, more ...func(*instance.CaptureOptions)) (*instance.Capture, spec.SleepResult, error) {
	id := spec.NewID()
	labels, err := p.store.Labels(p.r, kind)
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
	settle, err := p.beginCapture(ctx, kind != state.KindSleep)
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
		settle("")
		return nil, spec.SleepResult{}, err
	}
	settle(o.Dir)
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

// begin begins an operation on the whole VM, which must be alive. It keeps running until end is called.
func (p *process) begin() (end func(), err error) {
	p.op.Lock()
	if err := p.alive(); err != nil {
		p.op.Unlock()
		return nil, err
	}
	release := p.in.KeepRunning()
	return func() { release(); p.op.Unlock() }, nil
}

// save applies change to the record and writes it. If either fails, the record is as before. p.op must be held.
func (p *process) save(change func() error) error {
	before := *p.r
	if err := change(); err != nil {
		*p.r = before
		return err
	}
	err := p.store.Save(p.r)
	if err != nil {
		*p.r = before
		// The record that failed may be in its place all the same.
		err = errors.Join(err, p.store.Save(p.r))
	}
	return err
}

// runsOn wraps *err, if it is not nil: doing failed, and the VM runs on.
func runsOn(doing string, err *error) {
	if *err != nil {
		*err = fmt.Errorf("%s: %w: it runs on", doing, *err)
	}
}

// sleep writes the VM to a snapshot and ends the process. still, if not nil, is called when the guest stands
// still. If anything fails, including still, the VM runs on.
func (p *process) sleep(ctx context.Context, policy spec.HookPolicy, still func() error) (res spec.SleepResult, err error) {
	if err := p.whole(ctx); err != nil {
		return res, err
	}
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
	// From here on the snapshot counts.
	slept := p.sleepRecord(res)
	control.Take(&res, slept)
	if err := p.fallAsleep(c.ID, c.Disk, slept); err != nil {
		return res, errors.Join(err, p.in.Continue())
	}
	// The layer that the guest would have written to next is empty, and waits for its wake: see unusedTop.
	p.asleep = true
	p.tell(ctx, events.Slept, events.Details{Snapshot: c.ID, Bytes: res.BytesStored, Milliseconds: res.Stages["pause"]})
	p.tellHooks(ctx, res.Hooks)
	if err := p.close(); err != nil {
		p.log.Warn("closing the VM after its sleep", "error", err)
	}
	res.Stages["hooks"], res.Stages["sleep"] = control.Milliseconds(hooked), control.Milliseconds(time.Since(begin))
	return res, nil
}

// fallAsleep records that the VM sleeps in a snapshot. If that fails, the record is as before.
func (p *process) fallAsleep(snapshot string, st disk.Stack, slept state.SleepRecord) error {
	used := int64(0)
	if p.quota.limit > 0 {
		p.countDisk(p.store.SnapshotDir(snapshot))
		used = p.quota.used + p.quota.pages
	}
	return p.save(func() error {
		p.r.DiskUsed = used
		p.r.Phase, p.r.PID, p.r.Snapshot, p.r.Previous = state.Asleep, 0, snapshot, ""
		p.r.Disk = p.store.Relative(st)
		return p.store.AddSleep(p.r, slept)
	})
}

// snapshot writes the VM to a snapshot and lets it run on.
func (p *process) snapshot(ctx context.Context, note string, policy spec.HookPolicy) (res spec.SleepResult, err error) {
	if err := p.whole(ctx); err != nil {
		return res, err
	}
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

// captureLive captures a VM that runs on. The hooks' counterparts run as soon as it does.
func (p *process) captureLive(ctx context.Context, hooks Hooks, kind, note string, more ...func(*instance.CaptureOptions)) (spec.SleepResult, error) {
	// The guest's programs must not stand still until everything is written.
	var after sync.WaitGroup
	_, res, err := p.capture(ctx, kind, note, append(more, func(o *instance.CaptureOptions) {
		o.Resumed = func() { after.Go(func() { hooks.After(context.WithoutCancel(ctx)) }) }
	})...)
	after.Wait()
	hooks.After(context.WithoutCancel(ctx)) // if the capture did not get that far
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

// end lets the process end. It is called once the answer to the request is out.
func (p *process) end() { p.endOnce.Do(func() { close(p.ended) }) }

func (p *process) info() control.Info {
	h := p.in.Machine().Health()
	i := control.Info{
		Report: p.report(), PID: os.Getpid(), Confined: p.in.Confined(),
		Hung: h.Hung, Problem: h.Detail, Falling: p.falling.Load(),
		Cgroup: p.in.Cgroup(),
	}
	if v, ok := p.in.(interface{ SeccompLog() bool }); ok {
		i.SeccompLog = v.SeccompLog()
	}
	if full := p.in.SpaceProblem(); full != "" {
		i.NoSpace, i.Problem = true, full
	}
	if v, ok := p.in.(interface{ Frozen() string }); ok {
		i.Problem = cmp.Or(v.Frozen(), i.Problem)
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

// control returns the server of the control socket. It may serve once the VM is ready.
func (p *process) control() *http.Server {
	mux := http.NewServeMux()
	answer(mux, "GET /info", func(*http.Request) (any, error) { return p.info(), nil })
	answer(mux, "GET /policy/stats", func(*http.Request) (any, error) { return p.networkStats() })
	answer(mux, "GET /secrets", func(*http.Request) (any, error) { return p.listSecrets(), nil })
	mux.HandleFunc("GET /policy/events", p.serveEvents)
	mux.HandleFunc("GET /policy/flows", p.serveFlows)
	mux.HandleFunc("GET /hold", p.serveWakeLock)
	mux.HandleFunc("POST "+control.Orders+"fork", p.serveFork)
	// A sleep continues if the client goes away.
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
	take(mux, control.OrderPromote, control.MaxOrder, func(ctx context.Context, _ struct{}) (any, error) { return p.promoteNow(ctx) })
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
	// A client that shuts the guest down announces it first.
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

// answer answers requests with the result of f, as JSON, and then calls after, unless f failed.
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

// take registers do for an order: a T as JSON, of at most limit bytes.
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

// writeError answers a request with an error.
func writeError(w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusInternalServerError)
	_ = json.NewEncoder(w).Encode(control.ReportError(err))
}

// noDirtyLog reports whether VMs do without KVM's log of changed pages.
func noDirtyLog() bool { return os.Getenv(instance.NoDirtyLogEnv) != "" }
