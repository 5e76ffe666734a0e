package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/initramfs"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/rootfs/sysdisk"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/template"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm"
)

// CreateOptions add to the Spec of a new sandbox. The zero value adds nothing.
type CreateOptions struct {
	// Metadata is the sandbox's metadata from its first moment on; nil is none.
	Metadata *spec.Metadata
	// Disk is the id, or the start of the id, of a snapshot from whose disk the sandbox boots; empty is a new disk.
	Disk string
	// Boot boots the sandbox even if there is a template for it.
	Boot bool
	// from, if not nil, is a template that is not finished: the sandbox is made from it.
	from *template.Entry
	// Report, if not nil, gets the report of the start.
	Report *control.Report
}

// Create makes a sandbox. It starts from a template of its first boot if there is one. Otherwise it boots, and asks for
// the template, which MakeTemplates makes; drowse serve calls that. Inspect and the event of its creation say which,
// and the sandbox is the same. Create returns when the agent in the guest answers. If the VM does not come up, Create
// removes it, and the error has its logs. If the name is taken, it returns ErrExists.
func (s *Host) Create(ctx context.Context, want Spec, o CreateOptions) (b *Sandbox, err error) {
	if o.Report == nil {
		o.Report = &control.Report{}
	}
	ctx, ended := s.begin(ctx, control.OpCreate, want.Name)
	defer func() { ended(control.Operation{Report: *o.Report, Err: err}) }()
	if o.Disk != "" {
		return s.createFromDisk(ctx, want, o)
	}
	class := lifetime.Workspace
	if o.Metadata != nil {
		class = o.Metadata.EffectiveClass()
	}
	if want, err = limits.FitDisk(s.State.Dir(), want, class); err != nil {
		return nil, err
	}
	if want, err = s.State.Complete(want); err != nil {
		return nil, err
	}
	r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: want, Created: time.Now().UTC(), Phase: state.Starting, Maker: os.Getpid()}
	if err := setFirstMetadata(r, o.Metadata); err != nil {
		return nil, err
	}
	if err := errors.Join(s.State.FindVolumes(want.Volumes), s.findShares(want.Shares)); err != nil {
		return nil, err
	}
	if r.Boot, err = s.resolve(ctx, want); err != nil {
		return nil, err
	}
	return s.launchCreated(ctx, r, o)
}

// setFirstMetadata gives a new sandbox its metadata; nil is none.
func setFirstMetadata(r *state.Record, m *spec.Metadata) error {
	if m != nil && lifetime.Expired(m.Expires, time.Now()) {
		return spec.InField("expires", fmt.Errorf("%w: it would expire at %s, which is over", spec.ErrMetadata, m.Expires.Format(time.RFC3339)))
	}
	return r.SetMetadata(m)
}

// creationPoll is how often GetOrCreate looks for a sandbox that another caller makes.
const creationPoll = 20 * time.Millisecond

// GetOrCreate returns the sandbox of the Spec's name, and makes it if it does not exist. If several callers want
// it at once, one makes it and all get it. An existing sandbox stays as it is, asleep or not, whatever want says;
// created is false then. GetOrCreate waits for a sandbox that is being made.
func (s *Host) GetOrCreate(ctx context.Context, want Spec, o CreateOptions) (b *Sandbox, created bool, err error) {
	if want.Name == "" {
		return nil, false, spec.InField("name", fmt.Errorf("%w: no name is given to get the sandbox by", ErrSpec))
	}
	for {
		r, err := s.State.Get(want.Name)
		switch {
		case err == nil && !r.Creating():
			return s.Sandbox(want.Name), false, nil
		case errors.Is(err, ErrNotFound):
			if b, err = s.Create(ctx, want, o); !errors.Is(err, ErrExists) {
				return b, err == nil, err
			}
		case err != nil:
			return nil, false, err
		}
		if wait.For(ctx, creationPoll) != nil {
			return nil, false, fmt.Errorf("waiting for sandbox %s, which somebody else makes: %w", want.Name, context.Cause(ctx))
		}
	}
}

// launchNew makes the record and starts the VM. If that fails, it leaves nothing. recorded, if not nil, is called
// when the record exists. to, if not nil, gets the report of the start.
func (s *Host) launchNew(ctx context.Context, r *state.Record, snapshotID string, recorded func() error, to *control.Report) (*Sandbox, error) {
	// A VM that comes from another machine must not pass for it.
	rep, err := s.launchNewWith(ctx, r, control.Order{Name: r.Spec.Name, Snapshot: snapshotID, NewIdentity: r.Parent != ""}, recorded)
	if to != nil {
		*to = rep
	}
	if err != nil {
		return nil, err
	}
	return s.Sandbox(r.Spec.Name), nil
}

// launchNewWith is launchNew with an order and its files.
func (s *Host) launchNewWith(ctx context.Context, r *state.Record, ord control.Order, recorded func() error, files ...*os.File) (control.Report, error) {
	lock, err := s.State.Create(r)
	if err != nil {
		return control.Report{}, err
	}
	lock.Release()
	if recorded != nil {
		if err := recorded(); err != nil {
			return control.Report{}, errors.Join(err, s.State.RemoveNew(context.WithoutCancel(ctx), r))
		}
	}
	rep, err := s.launchWith(ctx, r.Spec.Shape(), ord, files...)
	if err != nil {
		// The console's log goes with the VM.
		if line := control.LastLine(s.State.ConsoleLog(r.Spec.Name)); errors.Is(err, vmm.ErrEnded) && line != "" {
			err = fmt.Errorf("%w: its console ends with %q", err, line)
		}
		err = errors.Join(err, s.State.RemoveNew(context.WithoutCancel(ctx), r))
	}
	return rep, err
}

// resolve finds the files that the spec names.
func (s *Host) resolve(ctx context.Context, spec Spec) (state.BootFiles, error) {
	images, err := image.OpenStore(s.State.ImageDir())
	if err != nil {
		return state.BootFiles{}, err
	}
	img, err := images.Find(spec.Image)
	if err != nil {
		return state.BootFiles{}, err
	}
	if err := images.Check(img); err != nil {
		return state.BootFiles{}, err
	}
	b := state.BootFiles{ImageID: img.ID, Image: img.Path()}
	host := kernel.Hardware
	if vmm.SoftKVM() {
		host = kernel.Soft
	}
	kind := kernel.Built
	if strings.Contains(spec.Kernel, "/") {
		// A kernel of the user's own boots like a built one.
		b.Kernel = spec.Kernel
	} else {
		k, err := s.findKernel(spec.Kernel, host, img.Labels[kernel.NeedsLabel], spec.Features()...)
		if err != nil {
			return state.BootFiles{}, err
		}
		b.Kernel, b.KernelID, kind = k.Image, k.ID, k.Kind
		if kind == kernel.Debian { // its drivers are modules
			b.Initramfs, err = initramfs.Ensure(ctx, s.State.CacheDir(), initramfs.Spec{Init: s.launcher.Agent, Modules: k.Modules})
			if err != nil {
				return state.BootFiles{}, err
			}
		}
	}
	if b.Initramfs == "" {
		if b.SystemDisk, err = sysdisk.Ensure(ctx, s.State.CacheDir(), s.launcher.Agent); err != nil {
			return state.BootFiles{}, err
		}
	}
	params, err := kernel.DefaultParams(kind, host)
	if err != nil {
		return state.BootFiles{}, err
	}
	b.Cmdline = params + " " + kernel.RootParams(kind)
	for _, path := range []*string{&b.Kernel, &b.Initramfs, &b.SystemDisk, &b.Image} {
		*path = s.State.InStore(*path)
	}
	return b, nil
}

// resolveAgain finds the files of a VM for another one that is made from its snapshot. The guest has the image and
// the system disk in use, so they must be identical.
func (s *Host) resolveAgain(ctx context.Context, old state.Record) (state.BootFiles, error) {
	want := old.Spec
	want.Image = old.Boot.ImageID
	if old.Boot.KernelID != "" {
		want.Kernel = old.Boot.KernelID
	}
	b, err := s.resolve(ctx, want)
	if err != nil {
		return b, err
	}
	if b.SystemDisk != old.Boot.SystemDisk && old.Boot.SystemDisk != "" {
		// The agent has been replaced since. The old one's disk is still in the cache, in the same folder as the
		// new one's.
		same := filepath.Join(filepath.Dir(b.SystemDisk), filepath.Base(old.Boot.SystemDisk))
		if _, err := os.Stat(s.State.BootPath(same)); err != nil {
			return b, fmt.Errorf("%w: the disk that its guest has started from is gone: %w", spec.ErrRecord, err)
		}
		b.SystemDisk = same
	}
	return b, nil
}

// findKernel finds the named kernel, or one that fits the host and the image's needs. Either must have the
// features of own.
func (s *Host) findKernel(name string, host kernel.Host, needs string, own ...string) (*kernel.Kernel, error) {
	if name != "" {
		k, err := kernel.Find(s.State.KernelDir(), name)
		if err != nil {
			return nil, err
		}
		if err := k.Need(own); err != nil {
			return nil, err
		}
		return k, nil
	}
	features, err := kernel.ParseNeeds(needs)
	if err != nil {
		return nil, fmt.Errorf("label %s of the image: %w; or name a kernel with --kernel", kernel.NeedsLabel, err)
	}
	k, err := kernel.Choose(s.State.KernelDir(), host, append(features, own...))
	if err != nil {
		return nil, fmt.Errorf("choosing a kernel: %w", err)
	}
	return k, nil
}

// StartOptions change a start. The zero value boots a VM that is not asleep.
type StartOptions struct {
	// DiscardMemory also boots a VM that sleeps, with the disk that it slept with, as after a loss of power. It
	// discards what was only in its memory. Start does not read the memory, so this is the way back from a damaged
	// snapshot.
	DiscardMemory bool
	// Awake only brings the VM up: Start wakes a VM that sleeps (BringUp), and leaves a running one alone.
	Awake bool
}

// Start boots a VM that has stopped or crashed, with its disk as it is.
func (b *Sandbox) Start(ctx context.Context, o StartOptions) (rep control.Report, err error) {
	s, name := b.host, b.name
	if o.Awake {
		return b.startAwake(ctx)
	}
	ctx, ended := s.begin(ctx, control.OpStart, name)
	defer func() { ended(control.Operation{Report: rep, Err: err}) }()
	if err := s.claim(ctx, name); err != nil {
		return control.Report{}, err
	}
	if o.DiscardMemory {
		if err := s.discardMemory(ctx, name); err != nil {
			return control.Report{}, err
		}
	}
	r, err := s.State.Get(name)
	if err != nil {
		return control.Report{}, err
	}
	switch r.Phase {
	case state.Running, state.Starting:
		return control.Report{}, fmt.Errorf("%w: %s", ErrRunning, name)
	}
	if _, err := s.State.Lasting(name); err != nil {
		return control.Report{}, err
	}
	switch r.Phase {
	case state.Asleep:
		// Its memory cannot be used if its volumes have moved on.
		if !errors.Is(s.State.CheckVolumes(r, r.Snapshot), volume.ErrStale) {
			return control.Report{}, fmt.Errorf("%w: %s is asleep: wake it with Sandbox(%q).Wake", ErrNotRunning, name, name)
		}
	}
	return s.launchWith(ctx, r.Spec.Shape(), control.Order{Name: r.Spec.Name, Shared: true})
}

// startAwake implements Start with Awake.
func (b *Sandbox) startAwake(ctx context.Context) (rep control.Report, err error) {
	if err := b.host.fetch(ctx, b.name); err != nil {
		return rep, err
	}
	for {
		r, err := b.host.State.Get(b.name)
		if err != nil {
			return rep, err
		}
		if r.Phase == state.Stopped || r.Phase == state.Crashed {
			rep, err = b.Start(ctx, StartOptions{})
		} else {
			rep, err = b.BringUp(ctx)
		}
		if !errors.Is(err, ErrRunning) && !errors.Is(err, ErrNotRunning) {
			return rep, err
		}
		// The VM may have changed in between.
		if now, gerr := b.host.State.Get(b.name); gerr != nil || now.Phase == r.Phase {
			return rep, err
		}
		if wait.For(ctx, creationPoll) != nil {
			return rep, fmt.Errorf("starting %s: %w", b.name, context.Cause(ctx))
		}
	}
}

// discardMemory marks a sleeping VM as stopped, with the disk that it slept with. Its snapshot is kept until the
// VM sleeps again.
func (s *Host) discardMemory(ctx context.Context, name string) error {
	if _, err := s.State.Lasting(name); err != nil {
		return err
	}
	l, err := s.State.LockSoon(ctx, name)
	if err != nil {
		return err
	}
	defer l.Release()
	r, err := s.State.Load(name)
	if err != nil || r.Phase != state.Asleep {
		return err
	}
	r.Phase, r.Problem = state.Stopped, "its memory was discarded; Sandbox.Start boots it with its disk as it is"
	return s.State.Save(r)
}

// unreadable adds to the error of a wake what the caller can do if the memory is unreadable: boot from the disk.
func unreadable(name string, err error) error {
	if unusable(err) {
		return fmt.Errorf("%w; its disk does not depend on its memory: Sandbox(%q).Start with DiscardMemory boots it without what was in memory alone", err, name)
	}
	return err
}

// unusable reports whether an error means that this host can never restore a snapshot.
func unusable(err error) bool {
	return slices.ContainsFunc([]error{
		snapshot.ErrCorrupt, snapshot.ErrIncomplete, snapshot.ErrNotFound, snapshot.ErrVersion, snapshot.ErrForeign, vmm.ErrForeign,
	}, func(e error) bool { return errors.Is(err, e) })
}

// Wake brings a VM back from its last sleep, for its owner; code that wakes a VM for a use calls BringUp. If the
// VM's process was killed, Wake takes the VM back to that sleep, and keeps what its disk has got since as a disk
// snapshot of kind "abandoned". A wake of a running VM does nothing. Of several callers at once one wakes it, and
// all return when it runs. Wake waits for a sleep that has begun, so the VM runs in any case when Wake returns. If
// ctx ends first, the wake is canceled, unless others may already use the VM: then it runs. The errors are
// ErrNotRunning if there is nothing to wake from, ErrExpired, and errors of a restore; then it sleeps on.
func (b *Sandbox) Wake(ctx context.Context) (control.Report, error) {
	s, name := b.host, b.name
	return s.wake(ctx, name, nil, true)
}

// BringUp is Wake that never takes a VM back. It boots a VM whose process was killed with its disk as it is, like
// Start, so that nothing that its guest had written out is lost.
func (b *Sandbox) BringUp(ctx context.Context) (control.Report, error) {
	s, name := b.host, b.name
	return s.wake(ctx, name, nil, false)
}

// wake implements Wake, and BringUp without back. hold, if not nil, is the socket that holds the VM awake from its
// first moment on, if this call wakes it.
func (s *Host) wake(ctx context.Context, name string, hold *os.File, back bool) (rep control.Report, err error) {
	ctx, ended := s.begin(ctx, control.OpWake, name)
	defer func() { ended(control.Operation{Report: rep, Err: err}) }()
	if err := s.claim(ctx, name); err != nil {
		return rep, err
	}
	for tries := 0; ; tries++ {
		rep, err = s.wakeOnce(ctx, name, hold, back)
		if errors.Is(err, spec.ErrUnclaimed) && s.Cluster != nil && tries < wakeTries {
			// It was given up just now, since it slept.
			if err := errors.Join(wait.For(ctx, unclaimedRest), s.claim(ctx, name)); err != nil {
				return rep, err
			}
			continue
		}
		if !errors.Is(err, state.ErrBetween) {
			return rep, err
		}
		if werr := wait.For(ctx, 2*time.Millisecond); werr != nil {
			return control.Report{}, fmt.Errorf("waking %s: %w: %w", name, err, werr)
		}
	}
}

// unclaimedRest is how long a wake waits that has met a sandbox as it was given up.
const unclaimedRest = 50 * time.Millisecond

func (s *Host) wakeOnce(ctx context.Context, name string, hold *os.File, back bool) (control.Report, error) {
	r, err := s.State.Get(name)
	if err != nil {
		return control.Report{}, err
	}
	if r.Phase == state.Running || r.Phase == state.Starting {
		return s.awaitRunning(ctx, name)
	}
	label, err := s.State.Lasting(name)
	if err != nil {
		return control.Report{}, err
	}
	if r, err = s.State.RotateIfDue(ctx, r, label.Rotate); err != nil {
		return control.Report{}, err
	}
	if r.Phase == state.Crashed && !back {
		return s.upOnce(ctx, r, "", hold)
	}
	if r.Snapshot == "" {
		return control.Report{}, fmt.Errorf("%w: %s has not slept: boot it with Sandbox(%q).Start", ErrNotRunning, name, name)
	}
	if r.Phase == state.Stopped {
		// It has ended by itself, and its disk has all that it wrote.
		return control.Report{}, fmt.Errorf("%w: %s has stopped: boot it with Sandbox(%q).Start; a clone as of its last sleep is Host.Clone of %q",
			ErrNotRunning, name, name, r.Snapshot)
	}
	if err := errors.Join(s.State.CheckVolumes(r, r.Snapshot), s.findShares(r.Spec.Shares)); err != nil {
		return control.Report{}, fmt.Errorf("waking %s: %w", name, unreadable(name, err))
	}
	if r.Phase != state.Asleep {
		// Go back to the disk of that time, and set aside what was written since.
		if err := s.rewind(ctx, name); errors.Is(err, ErrRunning) {
			return control.Report{}, state.ErrBetween
		} else if err != nil {
			return control.Report{}, err
		}
	}
	return s.upOnce(ctx, r, r.Snapshot, hold)
}

// upOnce starts the process of a VM that has none: from a snapshot, or, if that is empty, from its disk. It
// returns state.ErrBetween if there is a process.
func (s *Host) upOnce(ctx context.Context, r *state.Record, snapshotID string, hold *os.File) (control.Report, error) {
	// The process that has put it to sleep may still be exiting.
	lock, err := s.State.Lock(r.Spec.Name)
	if errors.Is(err, ErrRunning) {
		return control.Report{}, state.ErrBetween
	}
	if err != nil {
		return control.Report{}, err
	}
	lock.Release()
	ord := control.Order{Name: r.Spec.Name, Snapshot: snapshotID, WakeLock: hold != nil, Shared: true}
	var files []*os.File
	if hold != nil {
		files = []*os.File{hold}
	}
	rep, err := s.launchWith(ctx, r.Spec.Shape(), ord, files...)
	if errors.Is(err, ErrRunning) {
		// Another caller was faster.
		return control.Report{}, state.ErrBetween
	}
	return rep, unreadable(r.Spec.Name, err)
}

// rewind makes a crashed VM sleep in its last snapshot.
func (s *Host) rewind(ctx context.Context, name string) error {
	l, err := s.State.Lock(name)
	if err != nil {
		return err
	}
	defer l.Release()
	r, err := s.State.Load(name)
	if err != nil {
		return err
	}
	if r.Phase != state.Crashed {
		return fmt.Errorf("%w: %s", ErrRunning, name) // it has run meanwhile: look again
	}
	m, err := s.State.Manifest(r.Snapshot)
	if err != nil {
		return err
	}
	if _, err := s.State.Abandon(ctx, r, m); err != nil {
		return err
	}
	r.GoBack(m)
	return s.State.Save(r)
}

// awaitRunning waits until a VM that another process starts is ready.
func (s *Host) awaitRunning(ctx context.Context, name string) (control.Report, error) {
	for {
		r, err := s.State.Get(name)
		if err != nil {
			return control.Report{}, err
		}
		switch r.Phase {
		case state.Running:
			info, err := s.Sandbox(name).Info(ctx)
			if err == nil && info.Falling {
				break // the sleep decides
			}
			if err == nil || !passing(err) {
				return info.Report, err
			}
		case state.Starting:
		case state.Asleep:
			return control.Report{}, state.ErrBetween
		default:
			return control.Report{}, fmt.Errorf("%w: %s is %s", ErrNotRunning, name, r.Phase)
		}
		if err := wait.For(ctx, changePoll); err != nil {
			return control.Report{}, err
		}
	}
}

// CloneOptions say how a clone differs from the snapshot's VM. The zero value is a clone with a random name.
type CloneOptions struct {
	// Name is the clone's name; empty is a random one.
	Name string
	// Policy is the clone's network policy; nil is that of the snapshot.
	Policy *netpolicy.Policy
	// Idle says when the clone goes to sleep by itself; nil is as for the snapshot's VM.
	Idle *spec.Idle
	// Metadata is the clone's; nil is none, even if the snapshot's VM has some.
	Metadata *spec.Metadata
	// Report, if not nil, gets the report of the start.
	Report *control.Report
	// Moved, if not nil, is the sandbox that sleeps in the snapshot on another host: state.Record.Portable. Then Clone
	// makes that sandbox itself, with Metadata, and leaves it asleep. The snapshot is named by its whole id, and its
	// memory may be on its way.
	Moved *state.Record
}

// Clone makes a new sandbox from a snapshot. It has the memory, processes and files of the snapshot's VM, but its
// own identity. By default its network policy is the one that the VM had at the time of the snapshot.
func (s *Host) Clone(ctx context.Context, snapshotID string, o CloneOptions) (b *Sandbox, err error) {
	if o.Report == nil {
		o.Report = &control.Report{}
	}
	ctx, ended := s.begin(ctx, control.OpRestore, o.Name)
	defer func() { ended(control.Operation{Report: *o.Report, Err: err}) }()
	// The lock keeps the snapshot and its layers until the record names them.
	unlock, err := s.State.Share(ctx)
	if err != nil {
		return nil, fmt.Errorf("restoring snapshot %s: %w", snapshotID, err)
	}
	unlock = sync.OnceValue(unlock)
	defer func() { _ = unlock() }()
	if o.Moved != nil {
		return s.Sandbox(o.Moved.Spec.Name), s.adopt(ctx, o.Moved, *cmp.Or(o.Metadata, &spec.Metadata{}), snapshotID)
	}
	id, err := s.State.FindSnapshot(snapshotID)
	if err != nil {
		return nil, err
	}
	r, err := s.cloneRecord(ctx, id, o.Name)
	if err != nil {
		return nil, err
	}
	if err := r.Spec.UsePolicy(o.Policy); err != nil {
		return nil, err
	}
	if o.Idle != nil {
		if err := o.Idle.Validate(); err != nil {
			return nil, err
		}
		r.Spec.Idle = *o.Idle
	}
	if err := setFirstMetadata(r, o.Metadata); err != nil {
		return nil, err
	}
	return s.launchNew(ctx, r, id, unlock, o.Report)
}

// Rewind takes a stopped or sleeping sandbox back to one of its own snapshots, in which it then sleeps: memory,
// disk and services are those of that time; the policy stays. The caller can undo this: see state.Store.RestoreTo.
// If the sandbox runs, Rewind returns ErrRunning.
func (b *Sandbox) Rewind(ctx context.Context, snapshotID string) error {
	if err := b.host.claim(ctx, b.name); err != nil {
		return err
	}
	_, err := b.host.State.RestoreTo(ctx, b.name, snapshotID)
	return err
}

// cloneRecord returns the record of a new VM that is made from a snapshot.
func (s *Host) cloneRecord(ctx context.Context, id, name string) (*state.Record, error) {
	m, err := s.State.Manifest(id)
	if err != nil {
		return nil, err
	}
	if state.DiskOnly(m) {
		return nil, fmt.Errorf("restoring snapshot %s: %w: boot a VM from it with Host.Create with Disk \"%.12s\"", id, spec.ErrDiskOnly, id)
	}
	var old state.Record
	if err := json.Unmarshal([]byte(m.Labels[state.LabelRecord]), &old); err != nil {
		return nil, fmt.Errorf("snapshot %s: %w: it was not taken by this store: %w", id, spec.ErrRecord, err)
	}
	// The snapshot may come from elsewhere, so its file names are not used.
	boot, err := s.resolveAgain(ctx, old)
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	want := old.Spec
	want.Name, want.Hostname = name, ""
	if want.Policy, err = state.PolicyOf(m.Labels); err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	if want, err = s.State.Complete(want); err != nil {
		return nil, err
	}
	r := &state.Record{
		Version: state.RecordVersion, ID: spec.NewID(), Spec: want, Created: time.Now().UTC(), Phase: state.Starting, Maker: os.Getpid(),
		Boot: boot, Disk: state.SnapshotStack(m), Snapshot: id, Parent: id,
	}
	r.Inherit(&old)
	if err := errors.Join(s.State.CheckVolumes(r, id), s.findShares(want.Shares)); err != nil {
		return nil, fmt.Errorf("restoring snapshot %s: %w", id, err)
	}
	return r, nil
}

// launchWith starts the process of a VM with an order, and with the order's files besides the one for the report.
// It waits for the report.
func (s *Host) launchWith(ctx context.Context, shape spec.Shape, ord control.Order, files ...*os.File) (rep control.Report, err error) {
	if rep, err = pool.Start(ctx, s.State, s.launcher, shape, ord, files...); err == nil {
		s.handIn(ctx, &rep)
	}
	return rep, err
}

// Info asks a running VM for its state.
func (b *Sandbox) Info(ctx context.Context) (info control.Info, err error) {
	s, name := b.host, b.name
	err = control.Get(ctx, s.State, name, "/info", &info)
	return info, err
}

// Sleep writes a running VM to a snapshot and returns when its process is gone. If the VM already sleeps, Sleep
// returns the result of its last sleep. It waits for a VM that is being started. If the VM cannot be saved, or
// hooks in the guest refuse (spec.ErrHooks), it runs on. Once it sleeps there is no error: other failures, such as
// deleting the previous sleep, are in the result's Problem, and the next sweep handles them.
func (b *Sandbox) Sleep(ctx context.Context, o SleepOptions) (res spec.SleepResult, err error) {
	s, name := b.host, b.name
	if o.Durable {
		if s.Cluster == nil {
			return res, fmt.Errorf("%w: putting %s to sleep durably: this host is in no cluster: run `drowse serve --cluster` here", spec.ErrInvalid, name)
		}
		if r, err := s.State.Get(name); err != nil || r.Phase != state.Asleep {
			o.Durable = false
			if res, err = b.Sleep(ctx, o); err != nil {
				return res, err
			}
		} else {
			res = lastSleep(r)
		}
		return res, s.Cluster.Publish(ctx, name)
	}
	ctx, ended := s.begin(ctx, control.OpSleep, name)
	defer func() { ended(control.Operation{Saved: res, Err: err}) }()
	if err := spec.InField("hooks", o.Hooks.Validate()); err != nil {
		return res, err
	}
	r, err := s.awaitStarted(ctx, name)
	if err != nil {
		return res, err
	}
	if r.Phase == state.Asleep {
		return lastSleep(r), nil
	}
	if l, err := s.State.Metadata(name); err == nil && l.Class == lifetime.Ephemeral {
		return res, fmt.Errorf("putting %s to sleep: %w: it is ephemeral, and ephemeral sandboxes leave nothing: remove it, or change its class: Fleet.Update of %q with Class", name, spec.ErrMetadata, name)
	}
	begin := time.Now()
	proc, err := s.launcher.Find(r.PID) // a pidfd: it always means this process
	if err != nil {
		return res, fmt.Errorf("finding the process of VM %s: %w", name, err)
	}
	defer proc.Close()
	if err := control.Do(ctx, s.State, name, "sleep", o, &res); err != nil {
		// It still sleeps if the answer was lost, or another caller has put it to sleep.
		now, gerr := s.State.Get(name)
		if gerr != nil || !now.SleptAfter(r) {
			return res, err
		}
		res = lastSleep(now)
		res.Note(awaitExit(ctx, proc))
		return res, nil
	}
	// From here on it sleeps, whatever else fails.
	if err := awaitExit(ctx, proc); err != nil {
		res.Note(fmt.Errorf("waiting for the process of VM %s to end: %w", name, err))
		return res, nil
	}
	res.Stages["gone"] = control.Milliseconds(time.Since(begin))
	res.Note(errors.Join(s.State.SweepSlept(ctx, name), state.SweepNetworks()))
	return res, nil
}

// awaitStarted waits until the start of a VM has succeeded or failed.
func (s *Host) awaitStarted(ctx context.Context, name string) (*state.Record, error) {
	for {
		r, err := s.State.Get(name)
		if err != nil || r.Phase != state.Starting {
			return r, err
		}
		if err := wait.For(ctx, changePoll); err != nil {
			return nil, fmt.Errorf("waiting for VM %s to start: %w", name, err)
		}
	}
}

// lastSleep returns the result of a sleeping VM's last sleep.
func lastSleep(r *state.Record) spec.SleepResult {
	res := spec.SleepResult{Name: r.Spec.Name, Snapshot: r.Snapshot, Stages: map[string]float64{}}
	for _, sl := range r.Sleeps {
		if sl.Snapshot == r.Snapshot {
			control.Take(&res, sl)
		}
	}
	return res
}

// awaitExit waits until a process has ended. It need not be a child.
func awaitExit(ctx context.Context, p pool.Process) error {
	for !p.Wait(10 * time.Millisecond) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// awaitUnlocked waits until the process of a VM is gone.
func (s *Host) awaitUnlocked(ctx context.Context, name string) error {
	for {
		l, err := s.State.Lock(name)
		if err == nil {
			l.Release()
			return nil
		}
		if !errors.Is(err, ErrRunning) {
			return err
		}
		if err := wait.For(ctx, time.Millisecond); err != nil {
			return fmt.Errorf("waiting for the process of VM %s to end: %w", name, err)
		}
	}
}

// Snapshot writes a running VM to a snapshot that stays until it is removed, and lets it run on.
func (b *Sandbox) Snapshot(ctx context.Context, o SnapshotOptions) (res spec.SleepResult, err error) {
	s, name := b.host, b.name
	ctx, ended := s.begin(ctx, control.OpSnapshot, name)
	defer func() { ended(control.Operation{Saved: res, Err: err}) }()
	if err := errors.Join(spec.InField("hooks", o.Hooks.Validate()), spec.CheckNote(o.Note)); err != nil {
		return res, err
	}
	if err := s.State.AdmitDisk(ctx, s.State.Owner(name)); err != nil {
		return res, fmt.Errorf("making a snapshot of %s: %w", name, err)
	}
	err = control.Do(ctx, s.State, name, "snapshot", o, &res)
	return res, err
}

// Agent connects to the agent of a running VM. Close the client when done. The audit trail records what the client
// does: see state.Store.Audit.
func (b *Sandbox) Agent(ctx context.Context) (*guest.Client, error) {
	if err := b.running(); err != nil {
		return nil, err
	}
	return guest.Dial(ctx, guest.UnixDialer(b.host.State.VsockPath(b.name)))
}

// running returns ErrNotRunning if the VM does not run. Otherwise its audit trail is there.
func (b *Sandbox) running() error {
	r, err := b.host.State.Get(b.name)
	if err != nil {
		return err
	}
	if r.Phase != state.Running {
		return fmt.Errorf("%w: %s is %s", ErrNotRunning, b.name, r.Phase)
	}
	return b.host.State.EnsureAudit(b.name)
}

// Stop has a VM shut itself down before ctx ends. It leaves a VM that does not run alone.
func (b *Sandbox) Stop(ctx context.Context) error {
	return b.end(ctx, func() error {
		c, err := b.Agent(ctx)
		if err != nil {
			return err
		}
		// Only for the event, so a failure does not matter.
		_ = control.Do(ctx, b.host.State, b.name, "ending", struct{}{}, nil)
		err = c.Shutdown(ctx, guest.Shutdown{})
		c.Close()
		if err != nil {
			return fmt.Errorf("shutting down VM %s: %w: end it by Sandbox(%q).Kill", b.name, err, b.name)
		}
		return nil
	})
}

// Kill ends a VM at once, as if its power were cut. It leaves a VM that does not run alone.
func (b *Sandbox) Kill(ctx context.Context) error {
	return b.end(ctx, func() error {
		if err := control.Do(ctx, b.host.State, b.name, "kill", struct{}{}, nil); err != nil {
			// It does not answer, or its control socket is not open yet.
			if kerr := b.host.kill(ctx, b.name); kerr != nil {
				return errors.Join(err, kerr)
			}
		}
		return nil
	})
}

// end ends a running VM by calling how, and waits until its process is gone.
func (b *Sandbox) end(ctx context.Context, how func() error) error {
	r, err := b.host.State.Get(b.name)
	if err != nil || r.Phase != state.Running && r.Phase != state.Starting {
		return err
	}
	if err := how(); err != nil {
		return err
	}
	if err := b.host.awaitUnlocked(ctx, b.name); err != nil {
		return err
	}
	_, err = b.host.State.Get(b.name)
	return err
}

// makePatience is how long the maker of a VM may take to start its process. After that it counts as having given up.
const makePatience = 10 * time.Second

// kill kills the process of a VM: only the one that holds the record's lock.
func (s *Host) kill(ctx context.Context, name string) error {
	for deadline := time.Now().Add(makePatience); ; {
		r, err := s.State.Get(name)
		if err != nil || r.Phase != state.Running && r.Phase != state.Starting {
			return err
		}
		done, err := false, error(nil)
		switch {
		case r.PID > 0:
			done, err = s.killHolder(ctx, r)
		case time.Now().After(deadline):
			done, err = s.giveUp(ctx, name)
		}
		if done || err != nil {
			return err
		}
		if err := wait.For(ctx, time.Millisecond); err != nil {
			return fmt.Errorf("killing the process of VM %s: %w", name, err)
		}
	}
}

// killHolder kills the process that a record names if it is the VM's. Another process may have got the number
// since. It is the VM's process if the lock is held and the record has this number before and after.
func (s *Host) killHolder(ctx context.Context, r *state.Record) (done bool, err error) {
	proc, err := s.launcher.Find(r.PID) // a pidfd: it always means this process
	if err != nil {
		return false, fmt.Errorf("finding the process of VM %s: %w", r.Spec.Name, err)
	}
	defer proc.Close()
	l, err := s.State.LockSoon(ctx, r.Spec.Name)
	if err == nil {
		l.Release()
		return false, nil // it is gone
	}
	if !errors.Is(err, ErrRunning) {
		return false, err
	}
	if again, err := s.State.Load(r.Spec.Name); err != nil || again.PID != r.PID {
		return false, err
	}
	if err := proc.Kill(); err != nil {
		return false, fmt.Errorf("killing the process of VM %s: %w", r.Spec.Name, err)
	}
	return true, nil
}

// giveUp ends the making of a VM that never got a process.
func (s *Host) giveUp(ctx context.Context, name string) (done bool, err error) {
	l, err := s.State.LockSoon(ctx, name)
	if errors.Is(err, ErrRunning) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer l.Release()
	r, err := s.State.Load(name)
	if err != nil || r.Phase != state.Starting || r.PID != 0 {
		return false, err
	}
	return true, s.State.Tidy(r)
}

// DeleteOptions change a deletion. The zero value refuses a running sandbox with ErrRunning, and one whose record
// cannot be read with spec.ErrRecord.
type DeleteOptions struct {
	// Force deletes a running sandbox, which it kills first, and one with an unreadable record.
	Force bool
	// Freed, if not nil, gets what was freed.
	Freed *spec.Freed
}

// Delete deletes a sandbox with its disk and the snapshots of its sleeps: state.Store.Remove.
func (b *Sandbox) Delete(ctx context.Context, o DeleteOptions) error {
	if o.Force {
		switch r, err := b.host.State.Get(b.name); {
		case errors.Is(err, spec.ErrRecord), b.host.elsewhere(err):
		case err != nil:
			return err
		case r.Phase == state.Running || r.Phase == state.Starting:
			if err := b.Kill(ctx); err != nil {
				return err
			}
		}
	}
	shared, freed, err := b.host.unshare(ctx, b.name)
	if !shared && err == nil {
		freed, err = b.host.State.Remove(ctx, b.name, o.Force)
	}
	if o.Freed != nil {
		*o.Freed = freed
	}
	return err
}
