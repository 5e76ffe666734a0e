package instance

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/balloon"
	"github.com/drowse-vm/drowse/devices/blk"
	"github.com/drowse-vm/drowse/devices/fs"
	virtionet "github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/devices/vsock"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/freepages"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// Parts are the pieces of a VM on this host. Paths are absolute.
type Parts struct {
	Spec spec.VM
	// Files has all files and directories named here and in CaptureOptions, except Socket; nil means the host's
	// file system.
	Files osfile.FS
	// NoDirtyLog makes the VM do without KVM's log of changed pages. Each snapshot then has all of RAM, and a running
	// guest stands still until it is written.
	NoDirtyLog bool
	// Arriving, if not nil, is that of the snapshot that Restore restores.
	Arriving *Arriving
	// Kernel, and Initramfs or SystemDisk, are what the VM boots. A restore needs only SystemDisk, if the VM was
	// booted with one.
	Kernel     string
	Initramfs  string
	SystemDisk string
	// Cmdline is the kernel's command line without what depends on the devices.
	Cmdline string
	// Image is the read-only EROFS below the writable disk.
	Image string
	// Disk is the writable disk; its top layer is open for writing.
	Disk disk.Stack
	// Socket is the path of the Unix socket that leads to the guest's vsock ports. The audit trail is beside it.
	Socket string
	// Listener and Connect, if not nil, connect host and guest in place of Socket: see vsock.Config. The caller
	// closes Listener.
	Listener *os.File
	Connect  func(port uint32, done func(fd int, own bool, err error))
	// Console gets the guest's serial output; nil discards it.
	Console io.Writer
	// Volumes are attached, in the order of Spec.Volumes; the instance closes them.
	Volumes []*volume.Volume
	// VM is the id of the VM, by which its volumes know it.
	VM string
	// RAM is the image of a fork that RAM is mapped from, for RestoreFork.
	RAM *os.File
	// TAP is the host's end of the network that Spec.Network asks for: see sandbox/network. The caller, which made it,
	// closes it after the instance.
	TAP virtionet.Backend
	// LinkReady waits until the policy is in force. No packet of the guest passes before it has returned nil.
	LinkReady func(context.Context) error
	// Secrets are those that the guest waits for until they are in Machine().Secrets().
	Secrets []spec.SecretFile
	// ServiceEvent, if not nil, is called with each report of the guest on its services, one at a time.
	ServiceEvent func(guest.ServiceEvent)
	// DiskRoom is how many bytes the disk may take of the host from now on; 0 is no limit. See Instance.SetDiskRoom.
	// QuotaReached, if not nil, is called when a write of the guest waits for that reason. It must not block.
	DiskRoom     int64
	QuotaReached func()
	// Prebuilt, if not nil, may have a part of the VM that was made ahead.
	Prebuilt *Prebuilt
	// PageCache is a directory with pages of snapshots that were restored before, written by KeepPages; empty for
	// none. See package pagecache.
	PageCache string
	// Symbolize names guest kernel addresses in reports, if not nil.
	Symbolize vmm.Symbolizer
	// Log gets the log records; nil discards them.
	Log *slog.Logger
}

// guestCID is the vsock address of every guest. It need not be unique: each VM has its own Unix socket on the host.
const guestCID = 3

// Names of the devices, under which snapshots save their state.
const (
	deviceSystem  = "system"
	deviceImage   = "image"
	DeviceDisk    = "disk"
	deviceVsock   = "vsock"
	deviceRNG     = "rng"
	deviceBalloon = "balloon"
	deviceNet     = "net"
	// Volumes are called deviceVolume and the volume's name, shares by shareTag.
	deviceVolume = "volume-"
)

// Instance is one VM in this process. Its methods may be called from any goroutine. Close must be the last call.
type Instance struct {
	parts    Parts
	log      *slog.Logger
	mem      *guestmem.Memory
	prebuilt *vmm.Prebuilt
	machine  *vmm.Machine
	// assembled is closed when there is a machine, or when it is certain that there will be none.
	assembled chan struct{}
	disk      *disk.Disk
	space     spaceWait
	closers   []io.Closer
	snap      *snapshot.Snapshot // what the VM was restored from, or nil
	awaited   *awaited           // of the memory of snap and layers of the disk, or nil
	pager     *pager.Pager
	// cached has pages of snap; nil without Parts.PageCache.
	cached *pagecache.Reader
	// capturing is held by a capture and by evict, of which there is one at a time.
	capturing sync.Mutex
	// tracked reports that KVM keeps a log of the pages that change.
	tracked bool
	// captured reports that changes of RAM count from a snapshot, not from zeros. base is that snapshot, or nil if
	// it cannot be built on. base may be snap.
	captured bool
	base     *snapshot.Snapshot
	// forkBase is where that snapshot is, or will be, in a child whose fork was not yet durable when the child
	// began; otherwise empty.
	forkBase string
	// structPages locates the guest's marks of free pages; nil if unknown.
	structPages *freepages.Map
	net         *virtionet.Device // nil without a network
	vsock       *vsock.Device
	shares      []*fs.Device

	started time.Time
	ready   time.Duration
	// hooks reports that the guest has hooks.
	hooks atomic.Bool
	// hookFailures are the failures of hooks that ran after the restore.
	hookFailures []guest.HookFailure
}

// begin makes the guest's RAM and has KVM prepare for it in the background, unless both were made ahead.
func begin(p Parts) (in *Instance, err error) {
	in = &Instance{parts: p, log: p.Log, started: time.Now(), tracked: !p.NoDirtyLog, assembled: make(chan struct{})}
	if in.log == nil {
		in.log = slog.New(slog.DiscardHandler)
	}
	for _, v := range p.Volumes {
		in.closers = append(in.closers, v)
	}
	if p.Arriving != nil {
		in.awaited = newAwaited(p.Arriving)
	}
	if p.RAM == nil {
		if in.mem, in.prebuilt = p.Prebuilt.take(p.Spec.Shape()); in.mem != nil {
			return in, nil
		}
	}
	if in.mem, err = p.memory(); err == nil {
		in.prebuilt, err = newPrebuiltVM(in.mem, p.Spec.VCPUs, in.tracked)
	}
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// assemble makes the machine with its devices, in the order in which the guest finds them.
func (in *Instance) assemble(net netStart) (err error) {
	defer close(in.assembled)
	p := in.parts
	var devs []vmm.Device
	add := func(name string, d devices.Device) { devs = append(devs, vmm.Device{Name: name, Device: d}) }
	readOnly := func(name, path string) error {
		open, err := p.files().OpenFile(path, os.O_RDONLY|unix.O_NOCTTY, 0)
		if err != nil {
			return fmt.Errorf("opening a disk image: %w", err)
		}
		f, err := blk.NewImage(open.OS())
		if err != nil {
			return err
		}
		in.closers = append(in.closers, f)
		add(name, blk.New(f, blk.Options{Serial: "drowse-" + name, OnError: in.deviceError(name)}))
		return nil
	}
	if p.SystemDisk != "" {
		if err = readOnly(deviceSystem, p.SystemDisk); err != nil {
			return err
		}
	}
	if err = readOnly(deviceImage, p.Image); err != nil {
		return err
	}
	if in.disk, err = disk.Open(p.Disk, disk.Options{FS: p.files(), Coming: in.coming}); err != nil {
		return fmt.Errorf("opening the VM's disk: %w", err)
	}
	in.space.space = newSpace(filepath.Dir(p.Disk.Top()), in.disk.Statfs, int64(in.mem.Size()))
	options := in.writable(DeviceDisk, "drowse-"+DeviceDisk)
	if p.DiskRoom > 0 {
		in.space.quota = &quota{allocated: in.disk.Allocated}
		if err = in.space.quota.set(p.DiskRoom); err != nil {
			return err
		}
		options.Space = in.takeDisk
	}
	add(DeviceDisk, blk.New(in.disk, options))
	vs, err := vsock.New(in.mem, vsock.Config{CID: guestCID, Path: p.Socket, Listener: p.Listener, Connect: p.Connect})
	if err != nil {
		return err
	}
	in.closers = append(in.closers, vs)
	in.vsock = vs
	add(deviceVsock, vs)
	add(deviceRNG, rng.New(rng.Options{}))
	add(deviceBalloon, balloon.New(in.mem, balloon.Options{OnError: in.deviceError(deviceBalloon)}))

	if p.Spec.Network == spec.NetworkTAP {
		if in.net, err = in.connect(net); err != nil {
			return err
		}
		add(deviceNet, in.net)
	}
	for _, v := range p.Volumes {
		r := v.Record()
		add(deviceVolume+r.Name, blk.New(v, in.writable(deviceVolume+r.Name, volumeSerial(&r))))
	}
	for i, sh := range p.Spec.Shares {
		dir, err := OpenShare(p.files(), sh)
		if err != nil {
			return err
		}
		in.closers = append(in.closers, dir)
		d := fs.New(dir, shareTag(i), fs.Options{OnError: in.deviceError(shareTag(i))})
		in.shares = append(in.shares, d)
		add(shareTag(i), d)
	}
	in.machine, err = vmm.New(in.prebuilt, vmm.Config{Devices: devs, Console: p.Console, Symbolize: p.Symbolize, Log: in.log})
	if err != nil {
		return err
	}
	in.awaitSpace()
	return in.awaitSecrets()
}

// writable returns the options of a disk that the guest writes to.
func (in *Instance) writable(name, serial string) blk.Options {
	return blk.Options{Serial: serial, OnError: in.deviceError(name), Space: in.space.take, OnFull: in.space.wait}
}

// NoDirtyLogEnv, set to anything, makes a VM's process set Parts.NoDirtyLog, for hosts on which the log misbehaves.
const NoDirtyLogEnv = "DROWSE_NO_DIRTY_LOG"

// files returns the file system of the parts.
func (p Parts) files() osfile.FS {
	if p.Files == nil {
		return osfile.OS
	}
	return p.Files
}

// openFile opens a file for reading.
func (p Parts) openFile(name string) (*os.File, error) {
	f, err := p.files().OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	return f.OS(), nil
}

func (in *Instance) deviceError(name string) func(error) {
	return func(err error) { in.log.Error("device I/O failed", "device", name, "error", err) }
}

// cmdline returns the kernel's command line, with what the agent must know about the devices.
func (p Parts) cmdline() string {
	words := []string{p.Cmdline}
	disks := "abc"
	if p.SystemDisk != "" {
		disks = disks[1:]
	}
	words = append(words, "drowse.image=/dev/vd"+disks[:1], "drowse.rw=/dev/vd"+disks[1:2], "drowse.hostname="+p.Spec.Hostname)
	if p.Spec.Network == spec.NetworkTAP {
		words = append(words, "drowse.ip="+guestAddress)
		if p.Spec.IPv6 {
			words = append(words, "drowse.ip6="+guestAddress6)
		}
	}
	for i, v := range p.Volumes {
		r, mode := v.Record(), "rw"
		if v.ReadOnly() {
			mode = "ro"
		}
		words = append(words, "drowse.volume="+volumeSerial(&r)+","+mode+","+p.Spec.Volumes[i].Path)
	}
	for i, sh := range p.Spec.Shares {
		mode := "ro"
		if sh.Writable {
			mode = "rw"
		}
		words = append(words, "drowse.share="+shareTag(i)+","+mode+","+sh.Path)
	}
	if p.Spec.Cmdline != "" {
		words = append(words, p.Spec.Cmdline)
	}
	return strings.Join(words, " ")
}

// seedSize is what the random number generator of a guest kernel takes in at once.
const seedSize = 32

// Boot starts a VM from its kernel and returns when the agent inside answers.
func Boot(ctx context.Context, p Parts) (*Instance, error) {
	in, err := begin(p)
	if err != nil {
		return nil, err
	}
	if err := in.boot(ctx); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

func (in *Instance) boot(ctx context.Context) error {
	defer in.space.started()
	seed := make([]byte, seedSize)
	if _, err := rand.Read(seed); err != nil {
		return fmt.Errorf("making a random seed: %w", err)
	}
	if err := in.assemble(netOpen); err != nil {
		return err
	}
	err := in.machine.Boot(vmm.BootOptions{
		Kernel: in.parts.Kernel, Initramfs: in.parts.Initramfs, Open: in.parts.openFile, Cmdline: in.parts.cmdline(),
		NoACPI: in.parts.Spec.NoACPI, Seed: seed,
	})
	if err != nil {
		return err
	}
	ready, err := in.vsock.Listen(guest.ReadyPort)
	if err != nil {
		return fmt.Errorf("listening for the agent: %w", err)
	}
	defer ready.Close()
	if err := in.listenHooks(); err != nil {
		return err
	}
	if in.net != nil {
		if err := in.parts.LinkReady(ctx); err != nil {
			return err
		}
	}
	if err := in.machine.Start(); err != nil {
		return err
	}
	ctx, cancel := in.WhileRunning(ctx)
	defer cancel()
	report, err := guest.WaitReady(ctx, ready)
	if err != nil {
		return in.Explain(ctx, fmt.Errorf("waiting for the agent in the guest: %w", err))
	}
	if err := in.ask(ctx, setClock); err != nil {
		return err
	}
	in.ready = time.Since(in.started)
	in.locateFreePages(report)
	return nil
}

const (
	// clockSets bounds how often setClock sets the clock, and clockError is an error that it is content with.
	clockSets  = 3
	clockError = 100 * time.Millisecond
)

// setClock sets the clock of a guest that has booted: its kernel counts the interrupts of a timer until it trusts a
// better clock, and misses some of them. The clock is behind by the time that a request takes to the agent, and the
// first one takes longest.
func setClock(ctx context.Context, c *guest.Client) error {
	for range clockSets {
		now := time.Now()
		if _, err := c.Resume(ctx, guest.Resume{Wall: now}); err != nil {
			return err
		}
		if time.Since(now) < clockError {
			break
		}
	}
	return nil
}

// ask calls f with a connection to the agent, and cancels it when the machine ends. It closes the connection
// afterwards, so that the saved state of a guest that is paused next does not have it.
func (in *Instance) ask(ctx context.Context, f func(context.Context, *guest.Client) error) error {
	ctx, cancel := in.WhileRunning(ctx)
	defer cancel()
	c, err := in.Agent(ctx)
	if err == nil {
		defer c.Close()
		err = f(ctx, c)
	}
	if err != nil {
		return in.Explain(ctx, err)
	}
	return nil
}

// WhileRunning returns a context that ends when the machine ends.
func (in *Instance) WhileRunning(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-in.machine.Done():
			cancel(vmm.ErrEnded)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// Explain returns an EndedError if the machine has ended, otherwise err, with details if the guest hangs.
func (in *Instance) Explain(ctx context.Context, err error) error {
	select {
	case <-in.machine.Done():
		x, _ := in.machine.Wait(ctx)
		return &EndedError{Exit: x}
	default:
	}
	if h := in.machine.Health(); h.Hung {
		return fmt.Errorf("%w: %s", err, h.Detail)
	}
	return err
}

// EndedError says that the guest ended before it did what was asked.
type EndedError struct{ Exit vmm.Exit }

// Error returns how the guest ended.
func (e *EndedError) Error() string {
	return "the guest ended: " + e.Exit.String()
}

// Unwrap makes it a vmm.ErrEnded.
func (e *EndedError) Unwrap() error { return vmm.ErrEnded }

// RestoreOptions say how a restored VM comes back.
type RestoreOptions struct {
	// NewIdentity gives the VM its own identity: host name, machine id, boot id.
	NewIdentity bool
	// Again says that a machine has already run on from this state and that this one goes back to it. With
	// NewIdentity the guest notices anyway that it is a clone.
	Again bool
	// EntryOnly returns when the first vCPU has entered the guest, without talking to the agent: for measurements.
	// The guest has old random numbers and an old clock, so it must not be used otherwise.
	EntryOnly bool
}

// Restore starts a VM from the snapshot in a directory. It returns when the agent inside has taken fresh random numbers
// and the time of day. The pager reads RAM on demand: the snapshot's files must stay until the instance is closed.
func Restore(ctx context.Context, p Parts, snapshotDir string, o RestoreOptions) (*Instance, error) {
	in, err := begin(p)
	if err != nil {
		return nil, err
	}
	if err := in.restore(ctx, snapshotDir, o); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

func (in *Instance) restore(ctx context.Context, dir string, o RestoreOptions) error {
	net := netHeld
	if o.NewIdentity {
		net = netDown
	}
	if err := in.putTogether(net, func() ([]snapshot.Payload, error) { return in.open(dir) }); err != nil {
		return err
	}
	return in.goOn(ctx, o)
}

// putTogether makes a machine with its devices and loads the state that open returns. Another goroutine makes the
// devices: they take less time than the state, so that putTogether does not wait for a thread to wake up.
func (in *Instance) putTogether(net netStart, open func() ([]snapshot.Payload, error)) error {
	ready := in.prebuilt.Ready()
	opened := make(chan struct{})
	assembled := make(chan error, 1)
	go func() {
		err := in.assemble(net)
		assembled <- err
		if <-opened; err == nil && ready && in.pager != nil {
			// Not earlier: it would take a processor from what the guest waits for.
			in.pager.LoadWorkingSet()
		}
	}()
	payloads, err := open()
	close(opened)
	if err == nil && !ready && in.pager != nil {
		go in.pager.LoadWorkingSet() // while KVM prepares
	}
	states := fromPayloads(payloads)
	if err == nil {
		err = in.prebuilt.Load(states)
	}
	if err := errors.Join(err, <-assembled); err != nil {
		return err
	}
	return in.machine.Import(states)
}

// open opens the snapshot in a directory, starts a pager for RAM, and returns the states of the machine's parts.
func (in *Instance) open(dir string) (states []snapshot.Payload, err error) {
	if in.awaited != nil {
		in.snap, err = snapshot.OpenArriving(in.parts.files(), dir, in.awaited.ensure)
	} else {
		in.snap, err = snapshot.OpenIn(in.parts.files(), dir)
	}
	if err != nil {
		return nil, err
	}
	m := in.snap.Manifest()
	if m.VCPUs != in.parts.Spec.VCPUs || m.RAM() != in.mem.Size() {
		return nil, fmt.Errorf("restoring %s: %w: it is of a machine with %d vCPUs and %d MiB, this one has %d and %d",
			dir, spec.ErrInvalid, m.VCPUs, m.RAM()>>20, in.parts.Spec.VCPUs, in.mem.Size()>>20)
	}
	if err := in.parts.CheckVolumes(m); err != nil {
		return nil, fmt.Errorf("restoring %s: %w", dir, err)
	}
	in.base, in.captured = in.snap, true
	known, states, err := takeWorkingSet(in.snap.Payloads())
	if err != nil {
		return nil, fmt.Errorf("restoring %s: %w", dir, err)
	}
	if states, err = in.takeFreePages(states); err != nil {
		return nil, fmt.Errorf("restoring %s: %w", dir, err)
	}
	opts := pager.Options{OnFailure: in.fail, WorkingSet: known.pages, Hot: known.hot}
	if in.awaited != nil {
		in.awaited.know(m)
		opts.Handlers = arrivingHandlers
	}
	if in.parts.PageCache != "" {
		in.cached = pagecache.New(in.parts.PageCache).Open(in.parts.files(), in.snap)
		opts.Cache = in.cached
	}
	if in.pager, err = pager.New(in.mem, in.snap.Memory(), opts); err != nil {
		return nil, err
	}
	in.pager.Start()
	if err := in.checkHost(m.Host); err != nil {
		return nil, fmt.Errorf("restoring %s: %w", dir, err)
	}
	return states, nil
}

// fail ends the machine, as soon as there is one, because its RAM cannot be read.
func (in *Instance) fail(err error) {
	<-in.assembled
	if in.machine != nil {
		in.machine.Fail(err)
	}
}

// goOn starts a guest whose state has been loaded, and tells its agent that time has passed and what else has changed.
func (in *Instance) goOn(ctx context.Context, o RestoreOptions) error {
	defer in.space.started()
	if o.EntryOnly {
		if err := in.machine.Start(); err != nil {
			return err
		}
		return in.machine.WaitEntry(ctx)
	}
	if o.NewIdentity || o.Again {
		if err := in.machine.NewGeneration(); err != nil {
			return err
		}
	}
	// Before the agent reports whether it has hooks.
	if err := in.listenHooks(); err != nil {
		return err
	}
	offered := in.offer(o)
	if err := in.machine.Start(); err != nil {
		return err
	}
	ctx, cancel := in.WhileRunning(ctx)
	defer cancel()
	resumed, err := in.update(ctx, offered, o)
	if err != nil {
		return err
	}
	if len(in.parts.Spec.Services) > 0 {
		// Before the guest can report on them.
		if err := in.ListenServices(); err != nil {
			return err
		}
	}
	in.machine.EndQuiet()
	if in.net != nil {
		// The network stays silent until the policy is in force and the guest has its identity.
		if err := in.parts.LinkReady(ctx); err != nil {
			return in.Explain(ctx, err)
		}
		in.net.SetLink(true)
		in.net.Release()
	}
	if resumed.Hooks {
		in.hooks.Store(true)
	}
	if resumed.HooksWait {
		// After the network is up, and without delaying what is measured above.
		event := guest.HookWake
		if o.NewIdentity {
			event = guest.HookClone
		}
		in.hookFailures = in.afterHooks(ctx, event)
	}
	return nil
}

// FactsKey is the key of the host facts in the manifest.
const FactsKey = "facts"

// goodFacts were found to match this host. The host does not change, and decoding the facts again for the next machine
// takes 0.1 ms.
var goodFacts struct {
	mu   sync.Mutex
	seen map[string]struct{} // at most maxGoodFacts
}

const maxGoodFacts = 64

// NoteGoodFacts has CheckHost accept these facts from now on. Tests do so with those of machines that need no KVM.
func NoteGoodFacts(text string) {
	goodFacts.mu.Lock()
	defer goodFacts.mu.Unlock()
	if goodFacts.seen == nil || len(goodFacts.seen) >= maxGoodFacts {
		goodFacts.seen = make(map[string]struct{}, 1)
	}
	goodFacts.seen[text] = struct{}{}
}

func factsAreGood(text string) bool {
	goodFacts.mu.Lock()
	defer goodFacts.mu.Unlock()
	_, ok := goodFacts.seen[text]
	return ok
}

// CheckHost refuses a snapshot from a CPU that this host does not match.
func CheckHost(facts map[string]string) error {
	text := facts[FactsKey]
	if factsAreGood(text) {
		return nil
	}
	var saved vmm.HostFacts
	if err := json.Unmarshal([]byte(text), &saved); err != nil {
		return fmt.Errorf("%w: its host facts are unreadable: %w", snapshot.ErrForeign, err)
	}
	if err := vmm.CheckFacts(saved); err != nil {
		return err
	}
	NoteGoodFacts(text)
	return nil
}

// checkHost is CheckHost after the VM is made, whose vCPU knows the rate of the time stamp counter. Before that,
// CheckHost would make a VM just to ask it, and the end of that one takes KVM 12 ms.
func (in *Instance) checkHost(facts map[string]string) error {
	if err := in.prebuilt.Wait(); err != nil {
		return err
	}
	return CheckHost(facts)
}

func fromPayloads(ps []snapshot.Payload) []vmm.State {
	out := make([]vmm.State, len(ps))
	for i, p := range ps {
		out[i] = vmm.State{Name: p.Name, Payload: devices.Payload{Kind: p.Kind, Version: p.Version, Data: p.Data}}
	}
	return out
}

func toPayloads(states []vmm.State) []snapshot.Payload {
	out := make([]snapshot.Payload, len(states))
	for i, s := range states {
		out[i] = snapshot.Payload{Name: s.Name, Kind: s.Payload.Kind, Version: s.Payload.Version, Data: s.Payload.Data}
	}
	return out
}

// Agent opens a connection to the agent in the guest. Close the client when done.
func (in *Instance) Agent(ctx context.Context) (*guest.Client, error) {
	return guest.Dial(ctx, in.Dial)
}

// Dial opens a connection to a vsock port of the guest.
func (in *Instance) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	return guest.RecordedDialer(in.parts.Socket, in.vsock.Dial)(ctx, port)
}

// DialOn connects a Unix socket, whose other end somebody else has, to a vsock port of the guest.
func (in *Instance) DialOn(ctx context.Context, port uint32, f *os.File) error {
	return in.vsock.DialOn(ctx, port, f)
}

// Parts returns the pieces that the VM was made of.
func (in *Instance) Parts() Parts { return in.parts }

// Disk returns the VM's writable disk.
func (in *Instance) Disk() *disk.Disk { return in.disk }

// Begun returns when the making of the instance began.
func (in *Instance) Begun() time.Time { return in.started }

// WakeFailures returns the failures of hooks that ran after a restore.
func (in *Instance) WakeFailures() []guest.HookFailure { return in.hookFailures }

// CloseToo makes Close close c too.
func (in *Instance) CloseToo(c io.Closer) { in.closers = append(in.closers, c) }

// Connections returns how many vsock connections are open, and how many there ever were: see vsock.Stats.
func (in *Instance) Connections() (open, ever uint64) {
	st := in.vsock.Stats()
	return st.Open.Load(), st.Uses.Load()
}

// Machine returns the VM below.
func (in *Instance) Machine() *vmm.Machine { return in.machine }

// Timing returns how long it took from the call of Boot or Restore to the guest's first instruction, and to the
// agent's answer.
func (in *Instance) Timing() (entry, ready time.Duration) {
	if t := in.machine.Stages().Entry(); !t.IsZero() {
		entry = t.Sub(in.started)
	}
	return entry, in.ready
}

// Faults returns what the pager has done so far; false if the VM was not restored.
func (in *Instance) Faults() (*pager.Stats, bool) {
	if in.pager == nil {
		return &pager.Stats{}, false
	}
	return in.pager.Stats(), true
}

// Capture is a snapshot that has been taken, with its costs.
type Capture struct {
	ID       string
	Dir      string
	Disk     disk.Stack // what the snapshot needs of the disk
	Manifest *snapshot.Manifest
	CaptureCosts
}

// CaptureCosts are the figures of a Capture.
type CaptureCosts struct {
	Raw     uint64 // bytes of RAM that are not zero
	Stored  int64  // bytes written for the snapshot
	Shared  int64  // bytes of files that it shares with its base
	Changed uint64 // pages that may have changed since its base, or were ever written
	// Free is how many of the changed pages the guest does not use, as far as that is known: they are not stored.
	Free uint64
	// Shareable is how many nonzero pages the image of a fork has.
	Shareable uint64
	// Ahead is how long copying to the image of a fork took before the pause; Fill is how long it took after the pause.
	Ahead, Fill time.Duration
	Pause       time.Duration
	Save        time.Duration
}

// CaptureOptions say where a snapshot goes.
type CaptureOptions struct {
	// Dir is the snapshot's directory, which must not exist.
	Dir string
	// ID is the snapshot's id: 32 hex digits.
	ID string
	// Live lets the guest run on as soon as its state has been taken, while RAM is being written. Otherwise the
	// guest stays paused until Continue.
	Live bool
	// NewTop is the file of the disk's next layer.
	NewTop string
	// Names returns the snapshot's names for the layers of the disk, the lowest first.
	Names func(disk.Stack) []string
	// Labels are stored in the snapshot.
	Labels map[string]string
	// Image and Kernel identify what the guest was booted from.
	Image, Kernel string
	// Sealed gets the disk's new layers as soon as they exist, before the guest can write to them.
	Sealed func(disk.Stack) error
	// Resumed, if not nil, is called when a live capture lets the guest run on. It
	// must not block.
	Resumed func()
	// Still, if not nil, is called when the guest stands still, before anything is changed. If it fails, so does
	// Capture.
	Still func() error
	// Fork, if not nil, gets a sealed image of RAM, with what else RestoreFork needs, as soon as the image is
	// complete and before the snapshot is written. The image may be used until Capture returns, and longer through
	// a copy of its descriptor. If Fork fails, so does Capture. Live must be set.
	Fork func(image *os.File, c *Capture) error

	// Prioritize, if not nil, is called before the agent is asked to stand by. Capture calls restore when the
	// guest stands still or, in a live capture, when it runs on.
	Prioritize func() (restore func())
}

// Capture writes a snapshot of the VM: machine, RAM and disk at one instant. If there is a previous snapshot, it
// writes only the RAM that has changed since. If it fails, the VM runs on, and the next snapshot has the changes.
// Only one capture may run at a time.
func (in *Instance) Capture(ctx context.Context, o CaptureOptions) (c *Capture, err error) {
	in.capturing.Lock()
	defer in.capturing.Unlock()
	defer in.KeepRunning()()
	in.adoptForkBase()
	base := in.base
	if !in.tracked {
		base = nil
	}
	if base != nil {
		if _, err := in.parts.files().Stat(filepath.Join(base.Dir(), snapshot.ManifestName)); err != nil {
			// The snapshot was deleted, but RAM still has its pages.
			in.log.Warn("the snapshot before is not there to build upon: writing all of RAM", "error", err)
			base = nil
		}
	}
	var fork *forkCapture
	if o.Fork != nil {
		if fork, err = in.beginFork(ctx); err != nil {
			return nil, err
		}
		defer func() { err = fork.end(err) }()
	}
	var source snapshot.MemorySource
	var frozen *pager.Frozen
	if o.Live && (in.tracked || fork != nil) {
		expect, err := in.expectDirty()
		if err != nil {
			return nil, err
		}
		if frozen, err = pager.Prepare(in.mem, in.pager, pager.FreezeOptions{Expect: expect}); err != nil {
			return nil, err
		}
		source = frozen
		defer in.closing("the view of RAM that stood still", frozen.Close)
	}
	if err := in.disk.Prepare(o.NewTop); err != nil {
		return nil, fmt.Errorf("preparing the disk's next layer: %w", err)
	}
	calm := func() {}
	if o.Prioritize != nil {
		calm = o.Prioritize()
	}
	defer calm()
	release, begin, err := in.standStill(ctx, secretLimit)
	defer release()
	if err != nil {
		return nil, err
	}
	if !o.Live {
		calm()
	}
	running, still := false, begin
	var pause time.Duration
	resume := func() error {
		running = true
		defer calm()
		in.machine.Handover().Release()
		err := in.machine.Resume()
		pause = time.Since(still)
		if err == nil && o.Resumed != nil {
			o.Resumed()
		}
		return err
	}
	defer func() {
		if err != nil && !running {
			err = errors.Join(err, resume())
		}
	}()
	if o.Still != nil {
		if err := o.Still(); err != nil {
			return nil, err
		}
	}
	if !o.Live {
		for _, d := range in.shares {
			if err := d.Settled(); err != nil {
				return nil, fmt.Errorf("syncing a share: %w", err)
			}
		}
	}
	c = &Capture{ID: o.ID, Dir: o.Dir, Disk: in.disk.Stack()}
	states, err := in.machine.Export()
	if err != nil {
		return nil, err
	}
	first := in.machine.FirstPages()
	var changed *guestmem.PageSet
	if in.tracked {
		if changed, err = in.machine.TakeDirty(); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				in.machine.MarkDirty(changed)
			}
		}()
		c.Changed = changed.Len()
	}
	set := changed
	if fork != nil {
		set, changed = fork.changed(changed)
	} else if base == nil && in.captured {
		set = in.allPages()
	}
	stored := changed
	if changed == nil || base == nil && in.captured {
		stored = in.allPages()
	}
	free, err := in.freePages(stored)
	if err != nil {
		return nil, err
	}
	if frozen != nil {
		if free != nil && fork == nil {
			set = set.Clone()
			set.Subtract(free)
		}
		if err := frozen.Freeze(set); err != nil {
			return nil, err
		}
	}
	if _, err := in.disk.Seal(ctx, o.NewTop); err != nil {
		return nil, fmt.Errorf("sealing the disk: %w", err)
	}
	if err := o.Sealed(in.disk.Stack()); err != nil {
		return nil, err
	}
	if frozen != nil {
		if err := resume(); err != nil {
			return nil, err
		}
	}
	if c.Pause = pause; frozen == nil {
		c.Pause = time.Since(still)
	}
	begin = time.Now()
	if err := in.disk.Flush(); err != nil {
		return nil, fmt.Errorf("flushing the disk: %w", err)
	}
	facts, err := json.Marshal(in.machine.Facts())
	if err != nil {
		return nil, fmt.Errorf("describing the host: %w", err)
	}
	if source == nil {
		still, closeSource, err := in.source()
		if err != nil {
			return nil, err
		}
		defer in.closing("the view of RAM", closeSource)
		source = still
	}
	spec := snapshot.Spec{
		ID: o.ID, Sandbox: in.parts.Spec.Name, VCPUs: in.parts.Spec.VCPUs, Image: o.Image, Kernel: o.Kernel,
		Disks:    []snapshot.Disk{{Name: DeviceDisk, Size: uint64(in.disk.Size()), Layers: o.Names(c.Disk)}},
		Host:     map[string]string{FactsKey: string(facts)},
		Labels:   o.Labels,
		Payloads: toPayloads(states),
		Memory:   source,
		FS:       in.parts.files(),
	}
	if fp, ok := in.freePagesPayload(); ok {
		spec.Payloads = append(spec.Payloads, fp)
	}
	if base != nil {
		spec.Base, spec.Changed = base, changed
	}
	if fork != nil {
		if spec.Memory, err = fork.finish(ctx, frozen, &spec, c); err != nil {
			return nil, err
		}
		if err := o.Fork(fork.image.File(), c); err != nil {
			return nil, err
		}
	}
	if free != nil {
		c.Free = free.Len()
		spec.Memory = freepages.Without(spec.Memory, free)
	}
	if ws := newWorkingSet(first, in.pager); len(ws.pages) > 0 {
		spec.Payloads = append(spec.Payloads, ws.payload())
		spec.Hot = ws.pages[:ws.hot]
	}
	info, err := snapshot.Create(ctx, o.Dir, spec)
	if err != nil {
		return nil, err
	}
	c.Save = time.Since(begin)
	c.Manifest = info.Manifest
	c.Raw = info.Manifest.Stats.Pages * guestmem.PageSize
	c.Stored, c.Shared = info.SizeBytes, info.SharedBytes
	in.rebase(o.Dir)
	if o.Live && !running {
		if err := resume(); err != nil {
			return nil, err
		}
		c.Pause = pause
	}
	return c, nil
}

// closing closes a source that a capture has read from. The capture is complete by then, so a failure is only logged.
func (in *Instance) closing(what string, f func() error) {
	if err := f(); err != nil {
		in.log.Error("closing "+what+" failed", "error", err)
	}
}

// rebase makes a snapshot the base of the next one. Without a base, the next one has all of RAM.
func (in *Instance) rebase(dir string) {
	next, err := snapshot.OpenIn(in.parts.files(), dir)
	if err != nil {
		// The snapshot is on disk and was checked as it was written. Only the next one suffers.
		in.log.Warn("the new snapshot cannot be built upon", "error", err)
	}
	if in.base != nil && in.base != in.snap {
		if err := in.base.Close(); err != nil {
			in.log.Warn("closing the snapshot before", "error", err)
		}
	}
	in.base, in.captured, in.forkBase = next, true, ""
}

// source returns the source of the snapshot's RAM. It takes pages that a lazy restore has not loaded yet from
// where they still are.
func (in *Instance) source() (snapshot.MemorySource, func() error, error) {
	if in.pager != nil {
		s, err := in.pager.Source()
		if err != nil {
			return nil, nil, err
		}
		return s, s.Close, nil
	}
	s, err := snapshot.NewGuestSource(in.mem)
	if err != nil {
		return nil, nil, err
	}
	return s, s.Close, nil
}

// Continue lets a captured VM run on.
func (in *Instance) Continue() error { return in.machine.Resume() }

// Close stops the VM as if its power were cut, and releases all that it holds.
func (in *Instance) Close() error {
	var errs []error
	in.endSpaceWait()
	if in.awaited != nil {
		in.awaited.end(errClosing) // vCPUs may be waiting for it
	}
	// The machine must go first: its vCPUs may be waiting for the pager.
	if in.machine != nil {
		errs = append(errs, in.machine.Close())
	} else if in.prebuilt != nil {
		errs = append(errs, in.prebuilt.Close())
	}
	if in.pager != nil {
		errs = append(errs, in.pager.Close())
	}
	if in.cached != nil {
		errs = append(errs, in.cached.Close())
	}
	if in.base != nil && in.base != in.snap {
		errs = append(errs, in.base.Close())
	}
	if in.snap != nil {
		errs = append(errs, in.snap.Close())
	}
	for _, c := range in.closers {
		errs = append(errs, c.Close())
	}
	if in.disk != nil {
		errs = append(errs, in.disk.Close())
	}
	if in.mem != nil {
		errs = append(errs, in.mem.Close())
	}
	return errors.Join(errs...)
}
