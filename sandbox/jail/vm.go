package jail

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
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
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pagecache"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm"
)

// VM is a VM in a confined process, as the keeper sees it. Its methods are those of instance.Instance, and may be
// called from any goroutine; Close must be the last. It takes nothing that the process says for granted: a process that
// a guest has taken over can end its VM, and lie about figures, but the keeper decides on names, files and records.
type VM struct {
	jail  *Jail
	log   *slog.Logger
	begun time.Time

	// Set by Start. arriving has the sizes of memory files and layers that are on their way, by name.
	parts    instance.Parts
	holds    []*os.File // see hold
	arriving map[string]int64
	grants   *grants
	started  started
	console  *console
	// serving reports that parts and grants are set. Before, all that the process asks is refused.
	serving atomic.Bool

	times  times
	orders atomic.Uint64 // numbers of captures and seals
	dials  chan struct{} // an element for each Dial under way
	pace   *rpc.Pace     // of what the process asks for

	done    chan struct{} // closed when the machine has ended
	endOnce sync.Once
	exit    vmm.Exit
	// stopped is why the keeper has ended the VM.
	stopped atomic.Pointer[error]

	freezing sync.Mutex // held by Freeze and Thaw; guards still
	still    bool       // it was seen that the process stands still

	mu sync.Mutex // guards what follows
	// frozen is why the VM is frozen, once for each call of Freeze.
	frozen []string
	// stack is the stack of the disk, as the keeper has allowed it.
	stack   disk.Stack
	last    info
	capture *capture
	silent  int // calls of callSoon that are not answered in time
	calm    func()
	closers []io.Closer
	closed  bool
	wg      sync.WaitGroup // what runs in the background; begins before closed

	events sync.Mutex // held while parts.ServiceEvent runs

	closeOnce sync.Once
	closeErr  error
}

func newVM(j *Jail) *VM {
	return &VM{jail: j, done: make(chan struct{}), log: slog.New(slog.DiscardHandler), times: usualTimes,
		dials: make(chan struct{}, maxDials), pace: rpc.NewPace(callBurst, callsPerSecond)}
}

// times are how long the keeper waits for its confined process.
type times struct {
	soon   time.Duration // for an answer that needs neither guest nor disk
	silent time.Duration // until a process that does not answer has failed
	fail   time.Duration // for a machine to end because of an error
	flush  time.Duration // for what flushes the disk
	// arrival is for what is on its way. A guest that waits for more than patience is frozen meanwhile.
	arrival, patience time.Duration
}

// An answer comes at once, unless the host is very busy.
var usualTimes = times{soon: 15 * time.Second, silent: 10 * time.Minute, fail: 5 * time.Second, flush: 2 * time.Minute, arrival: ArrivalTime, patience: Patience}

// maxDials leaves calls for all else while a guest does not accept connections.
const maxDials = maxCalls / 2

// Start starts the VM in the confined process: from p.RAM, from a snapshot's directory, or by a boot. The VM then owns
// the jail, p.Listener, p.TAP's copy, the volumes, and p.RAM stays the caller's. See instance.Boot, Restore and
// RestoreFork.
func (j *Jail) Start(ctx context.Context, p instance.Parts, dir string, o instance.RestoreOptions) (_ *VM, err error) {
	v := j.vm
	v.begun, v.parts, v.stack = time.Now(), p, disk.Stack{Layers: slices.Clone(p.Disk.Layers)}
	if p.Log != nil {
		v.log = p.Log
	}
	v.grants = newGrants(p, dir)
	for _, vol := range p.Volumes {
		v.closers = append(v.closers, vol)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, v.Close())
		}
	}()
	order, files, err := v.order(p, dir, o)
	defer func() { _ = closeAll(files) }()
	if err != nil {
		return nil, err
	}
	v.serving.Store(true)
	for _, f := range files {
		if err := confine.MayPass(f); err != nil {
			return nil, err
		}
	}
	for len(files) > maxFiles {
		if err := v.call(ctx, callPass, order.Passed[:maxFiles], nil, files[:maxFiles]...); err != nil {
			return nil, err
		}
		order.Passed, files = order.Passed[maxFiles:], files[maxFiles:]
	}
	v.wg.Go(v.watch)
	ctx, cancel := v.WhileRunning(ctx)
	defer cancel()
	err, files = v.call(ctx, callStart, order, &v.started, files...), nil
	if err != nil {
		return nil, v.Explain(ctx, err)
	}
	v.started.bound()
	// The caller's time begins here: with opening and passing what the VM is made of.
	before := max(time.Since(v.begun)-max(v.started.Took, 0), 0)
	v.started.EntryAfter = timeBy(v.started.EntryAfter + before)
	v.started.ReadyAfter = timeBy(v.started.ReadyAfter + before)
	v.last = v.started.Info
	return v, nil
}

// watch ends the VM when its process has ended.
func (v *VM) watch() {
	<-v.jail.conn.Done()
	v.end(vmm.Exit{Reason: vmm.HostError, VCPU: -1, Detail: v.jail.verdict()})
}

// end ends the machine. If the keeper wanted its end, that is why, whatever the process says.
func (v *VM) end(x vmm.Exit) {
	v.endOnce.Do(func() {
		if err := v.stopped.Load(); err != nil {
			x = vmm.Exit{Reason: vmm.HostError, VCPU: -1, Detail: (*err).Error(), Err: *err}
		}
		v.exit = x
		close(v.done)
	})
}

// call calls the child.
func (v *VM) call(ctx context.Context, method string, arg, reply any, files ...*os.File) error {
	got, err := v.jail.conn.Call(ctx, method, arg, reply, files...)
	_ = closeAll(got)
	return err
}

// errSilent is the error of what is asked while the process has not answered for some time.
var errSilent = errors.New("the VM's confined process does not answer: wait, or kill the VM")

// callSoon is call for what is answered at once. After times.soon without an answer the caller gets errSilent, and so
// does whoever asks until the answer has come: nobody waits for it twice. A host whose disk hangs is no reason to end
// the VM, but after times.silent it ends.
func (v *VM) callSoon(method string, arg, reply any) error {
	var raw json.RawMessage
	answer := make(chan error, 1)
	late, over := false, false // under v.mu
	v.mu.Lock()
	if err := v.stopped.Load(); err != nil || v.closed || v.silent > 0 {
		v.mu.Unlock()
		if err != nil {
			return *err
		}
		return errSilent
	}
	if len(v.frozen) > 0 {
		why := v.frozen[0]
		v.mu.Unlock()
		return fmt.Errorf("%w: %s", errFrozen, why)
	}
	v.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), v.times.silent)
		defer cancel()
		err := v.call(ctx, method, arg, &raw)
		v.mu.Lock()
		if over = true; late {
			v.silent--
		}
		v.mu.Unlock()
		if err != nil && ctx.Err() != nil {
			v.Fail(fmt.Errorf("the VM's confined process has not answered within %v: %w", v.times.silent, err))
		}
		answer <- err
	})
	v.mu.Unlock()
	limit := time.NewTimer(v.times.soon)
	defer limit.Stop()
	select {
	case err := <-answer:
		if err == nil && reply != nil {
			err = json.Unmarshal(raw, reply)
		}
		return err
	case <-limit.C:
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if !over {
		late = true
		v.silent++
	}
	return errSilent
}

// callWhole is call for what changes the disk's layers. When ctx ends, the process gives up, but the keeper waits for
// its answer, by which it knows the layers. A process that does not answer has failed.
func (v *VM) callWhole(ctx context.Context, number uint64, method string, arg, reply any) error {
	whole, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		bounded, done := context.WithTimeout(whole, v.times.flush)
		defer done()
		if err := v.call(bounded, callGiveUp, number, nil); err != nil && whole.Err() == nil {
			v.log.Warn("giving up a capture", "error", err)
		}
		<-bounded.Done()
		if whole.Err() == nil {
			v.Fail(fmt.Errorf("the VM's confined process has not given up a capture within %v: the VM is ended", v.times.flush))
			cancel()
		}
	})
	defer stop()
	err := v.call(whole, method, arg, reply)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}

// info asks for what changes. If there is no answer, it returns the last one.
func (v *VM) info() info {
	var i info
	err := v.callSoon(callInfo, none{}, &i)
	v.mu.Lock()
	defer v.mu.Unlock()
	if err == nil {
		i.bound()
		v.last = i
	}
	return v.last
}

// Done is closed when the machine has ended.
func (v *VM) Done() <-chan struct{} { return v.done }

// Wait returns how the machine has ended.
func (v *VM) Wait(ctx context.Context) (vmm.Exit, error) {
	select {
	case <-v.done:
		return v.exit, nil
	case <-ctx.Done():
		return vmm.Exit{}, context.Cause(ctx)
	}
}

// Fail ends the machine because of err, at once. A process that does not do so itself is killed.
func (v *VM) Fail(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || !v.stopped.CompareAndSwap(nil, &err) {
		return
	}
	frozen := len(v.frozen) > 0
	v.wg.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), v.times.fail)
		defer cancel()
		if !frozen && v.call(ctx, callFail, text(err.Error()), nil) == nil {
			select {
			case <-v.done:
				return
			case <-ctx.Done():
			}
		}
		if kerr := v.jail.proc.Kill(); kerr != nil {
			v.log.Error("killing the VM's confined process", "error", kerr)
		}
	})
}

// Health, Facts, Stages, Timing, Begun, WakeFailures, Faults, Connections, SpaceProblem and Caches are those of
// instance.Instance and vmm.Machine.
func (v *VM) Health() vmm.Health                   { return v.info().Health }
func (v *VM) Facts() vmm.HostFacts                 { return v.started.Facts }
func (v *VM) Stages() map[string]time.Duration     { return v.started.Stages }
func (v *VM) Timing() (entry, ready time.Duration) { return v.started.EntryAfter, v.started.ReadyAfter }
func (v *VM) Begun() time.Time                     { return v.begun }
func (v *VM) WakeFailures() []guest.HookFailure    { return v.started.Failures }
func (v *VM) SpaceProblem() string                 { return v.info().Full }
func (v *VM) Caches() bool                         { return v.started.Caches }
func (v *VM) Parts() instance.Parts                { return v.parts }

func (v *VM) Connections() (open, ever uint64) {
	i := v.info()
	return i.Open, i.Ever
}

func (v *VM) Faults() (*pager.Stats, bool) { return v.stats(v.info().Faults) }

// StartFaults are those that came with the answer to the start: the caller waits for the report, and the process, whose
// guest has much to catch up on, would take a millisecond or two for another answer.
func (v *VM) StartFaults() (*pager.Stats, bool) { return v.stats(v.started.Info.Faults) }

func (v *VM) stats(f faults) (*pager.Stats, bool) {
	s := &pager.Stats{}
	s.ReadFaults.Store(f.Read)
	s.WriteFaults.Store(f.Write)
	s.Ensured.Store(f.Ensured)
	s.Prefetched.Store(f.Prefetched)
	s.PagesCopied.Store(f.Copied)
	s.Frames.Store(f.Frames)
	s.FramesCached.Store(f.Cached)
	return s, v.started.Restored
}

// CPU returns the processor time that the confined process has used.
func (v *VM) CPU() time.Duration { return v.jail.proc.CPU() }

// Cgroup returns the counters of the process's cgroup.
func (v *VM) Cgroup() control.Cgroup {
	st, err := v.jail.proc.Stats()
	if err != nil {
		return control.Cgroup{}
	}
	return control.Cgroup{ThrottledMs: control.Milliseconds(st.CPUThrottled), Read: st.ReadBytes, Written: st.WrittenBytes}
}

// PID returns the id of the confined process.
func (v *VM) PID() int { return v.jail.PID() }

// Agent opens a connection to the agent in the guest. Close the client when done.
func (v *VM) Agent(ctx context.Context) (*guest.Client, error) {
	return guest.Dial(ctx, guest.RecordedDialer(v.parts.Socket, v.Dial))
}

// Dial opens a connection to a vsock port of the guest.
func (v *VM) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	select {
	case v.dials <- struct{}{}:
		defer func() { <-v.dials }()
	case <-ctx.Done():
		return nil, fmt.Errorf("connecting to the guest, while it has accepted none of %d connections: %w",
			maxDials, context.Cause(ctx))
	case <-v.done:
		return nil, v.Explain(ctx, vmm.ErrEnded)
	}
	// The keeper makes the pair: the two ends share nothing, so the process cannot make this one block.
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	mine := os.NewFile(uintptr(pair[0]), "guest")
	defer mine.Close()
	if err := v.call(ctx, callDial, port, nil, os.NewFile(uintptr(pair[1]), "guest")); err != nil {
		return nil, err
	}
	return net.FileConn(mine)
}

// WhileRunning returns a context that ends when the machine ends.
func (v *VM) WhileRunning(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-v.done:
			cancel(vmm.ErrEnded)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// Explain returns an EndedError if the machine has ended, otherwise err.
func (v *VM) Explain(_ context.Context, err error) error {
	select {
	case <-v.jail.conn.Done():
		<-v.done // soon: see watch
	default:
	}
	select {
	case <-v.done:
		return &instance.EndedError{Exit: v.exit}
	default:
		return err
	}
}

// KeepRunning is instance.Instance.KeepRunning.
func (v *VM) KeepRunning() (release func()) {
	if err := v.callSoon(callKeep, none{}, nil); err != nil {
		return func() {}
	}
	return sync.OnceFunc(func() {
		v.mu.Lock()
		closed := v.closed
		v.mu.Unlock()
		if closed {
			return
		}
		if err := v.callSoon(callRelease, none{}, nil); err != nil {
			v.log.Warn("letting the VM wait for space again", "error", err)
		}
	})
}

// Hooks are hooks of the guest that ran before an operation.
type Hooks struct {
	v        *VM
	due      bool
	once     sync.Once
	failures []guest.HookFailure
}

// RunHooksBefore is instance.Instance.RunHooksBefore.
func (v *VM) RunHooksBefore(ctx context.Context, e guest.HookEvent, over spec.HookPolicy) (*Hooks, error) {
	var r hooked
	if err := v.call(ctx, callHooksBefore, hooksOrder{e, over}, &r); err != nil {
		return nil, err
	}
	if r.Refused {
		return nil, &spec.HooksError{Failures: failures(r.Failures)}
	}
	return &Hooks{v: v, due: r.Due, failures: failures(r.Failures)}, nil
}

// After runs the counterparts of the hooks, once, and waits for them.
func (h *Hooks) After(ctx context.Context) {
	if h == nil || !h.due {
		return
	}
	h.once.Do(func() {
		var r hooked
		if err := h.v.call(ctx, callHooksAfter, none{}, &r); err != nil {
			h.v.log.Warn("hooks in the guest", "error", err)
			return
		}
		h.failures = failures(r.Failures)
	})
}

// Failed returns the failures of the hooks.
func (h *Hooks) Failed() []guest.HookFailure { return h.failures }

// maxFailures is how many failures of hooks the keeper takes over.
const maxFailures = 256

func failures(list []guest.HookFailure) []guest.HookFailure {
	list = list[:min(len(list), maxFailures)]
	for i := range list {
		f := &list[i]
		f.Name, f.Event = text(f.Name), guest.HookEvent(text(string(f.Event)))
		f.Problem, f.Output = text(f.Problem), text(f.Output)
	}
	return list
}

// NewIdentity, ServeSecrets and ListenServices are those of instance.Instance.
func (v *VM) NewIdentity(ctx context.Context) error  { return v.call(ctx, callIdentity, none{}, nil) }
func (v *VM) ServeSecrets(ctx context.Context) error { return v.call(ctx, callServe, none{}, nil) }
func (v *VM) ListenServices() error                  { return v.callSoon(callServices, none{}, nil) }

// Set, Remove and List are those of secrets.Device.
func (v *VM) Set(s secrets.Secret, value []byte) error {
	return v.callSoon(callSetSecret, secretOrder{s, value}, nil)
}

func (v *VM) Remove(name string) (there bool) {
	if err := v.callSoon(callDropSecret, name, &there); err != nil {
		v.log.Error("taking a secret from the VM", "error", err)
	}
	return there
}

func (v *VM) List() (list []secrets.State) {
	if err := v.callSoon(callSecrets, none{}, &list); err != nil {
		v.log.Warn("listing the VM's secrets", "error", err)
	}
	list = list[:min(len(list), secrets.MaxSecrets)]
	for i := range list {
		list[i].Name, list[i].Size = text(list[i].Name), max(list[i].Size, 0)
	}
	return list
}

// Flush, Size, Stack, Data and Substitute are those of the disk.
func (v *VM) Flush() error {
	ctx, cancel := context.WithTimeout(context.Background(), v.times.flush)
	defer cancel()
	return v.call(ctx, callFlush, none{}, nil)
}

func (v *VM) Size() int64 { return v.started.DiskSize }

func (v *VM) Stack() disk.Stack {
	v.mu.Lock()
	defer v.mu.Unlock()
	return disk.Stack{Layers: slices.Clone(v.stack.Layers)}
}

func (v *VM) Data() (n int64) {
	if err := v.callSoon(callData, none{}, &n); err != nil {
		v.log.Warn("asking for the data on the disk", "error", err)
	}
	return bytesBy(n)
}

// hold locks files that other VMs may have as well, for reading, until Close. The process needs flock(2) for its own
// files, and who has a descriptor may change its lock: without this one, the process could lock others out.
func (v *VM) hold(names ...string) error {
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		v.holds = append(v.holds, f)
		if err := osfile.TryLock(f, osfile.Shared); errors.Is(err, osfile.ErrLocked) {
			return fmt.Errorf("lock %s: %w (another VM or command has it open)", name, disk.ErrInUse)
		} else if err != nil {
			return err
		}
	}
	return nil
}

// release ends hold.
func (v *VM) release() error {
	var errs []error
	for _, f := range v.holds {
		errs = append(errs, osfile.Unlock(f), f.Close())
	}
	v.holds = nil
	return errors.Join(errs...)
}

// openVolume opens the file of a volume anew for the process: with the volume's own descriptor, it would have its lock.
func (v *VM) openVolume(vol *volume.Volume) (f *os.File, err error) {
	name := vol.File().Name()
	if vol.ReadOnly() {
		f, err = v.jail.toRead(name, unix.O_NOFOLLOW)
	} else {
		f, err = os.OpenFile(name, os.O_RDWR|unix.O_NOFOLLOW, 0)
	}
	if err != nil {
		return nil, err
	}
	is, err1 := f.Stat()
	was, err2 := vol.File().Stat()
	if err = errors.Join(err1, err2); err == nil && !os.SameFile(is, was) {
		err = fmt.Errorf("%s is not the file of the volume any more", name)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Substitute must not be called during a capture. It reads the new layer, so it may wait for the host's disk.
func (v *VM) Substitute(layers []string, by string) error {
	v.grants.read(by)
	ctx, cancel := context.WithTimeout(context.Background(), v.times.flush)
	defer cancel()
	if err := v.call(ctx, callSubstitute, substitution{layers, by}, nil); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	i := slices.Index(v.stack.Layers, layers[0])
	if i < 0 || i+len(layers) > len(v.stack.Layers) || !slices.Equal(v.stack.Layers[i:i+len(layers)], layers) {
		return fmt.Errorf("substitute layers: %w: the disk has others", disk.ErrMissingParent)
	}
	v.stack.Layers = slices.Replace(slices.Clone(v.stack.Layers), i, i+len(layers), by)
	v.grants.forget(layers)
	return nil
}

// Capture is instance.Instance.Capture. The keeper checks the manifest before the snapshot gets its name.
func (v *VM) Capture(ctx context.Context, o instance.CaptureOptions) (*instance.Capture, error) {
	c := newCapture(v, o)
	number := v.orders.Add(1)
	order := captureOrder{
		Number: number, Dir: o.Dir, ID: o.ID, Live: o.Live, NewTop: o.NewTop, Names: c.names, Labels: o.Labels,
		Image: o.Image, Kernel: o.Kernel,
		Still: o.Still != nil, Resumed: o.Resumed != nil, Fork: o.Fork != nil, Prioritize: o.Prioritize != nil,
	}
	if err := v.beginCapture(c); err != nil {
		return nil, err
	}
	defer v.endCapture(c)
	if o.Fork != nil {
		// The image of RAM is the child's memory, and stays so while a VM that was made of it uses it.
		if err := v.jail.allow(int64(v.parts.Spec.Memory())); err != nil {
			return nil, err
		}
	}
	ctx, cancel := v.WhileRunning(ctx)
	defer cancel()
	var f instance.CaptureCosts
	if err := v.callWhole(ctx, number, callCapture, order, &f); err != nil {
		return nil, v.Explain(ctx, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.manifest == nil || !c.sealed || o.Fork != nil && !c.forked {
		return nil, errors.New("capturing a VM: its confined process has reported a snapshot that does not exist")
	}
	c.result.CaptureCosts = boundCosts(f)
	c.result.Manifest = c.manifest
	v.grants.link(o.Dir)
	return c.result, nil
}

// checkManifest compares the manifest of a new snapshot with what the keeper has ordered.
func (v *VM) checkManifest(m *snapshot.Manifest, c *capture) error {
	o := c.o
	want := snapshot.Disk{Name: instance.DeviceDisk, Size: uint64(v.started.DiskSize), Layers: c.names}
	switch {
	case m.ID != o.ID, m.Sandbox != v.parts.Spec.Name, m.Image != o.Image, m.Kernel != o.Kernel,
		m.VCPUs != v.parts.Spec.VCPUs, m.RAM() != v.parts.Spec.Memory(), !maps.Equal(m.Labels, o.Labels),
		len(m.Disks) != 1:
		return errForged
	}
	if d := m.Disks[0]; d.Name != want.Name || d.Size != want.Size || !slices.Equal(d.Layers, want.Layers) {
		return errForged
	}
	return nil
}

var errForged = errors.New("a snapshot that differs from what was ordered: its VM's process is out of control: " +
	"kill the VM")

// SealFrozen is instance.Instance.SealFrozen.
func (v *VM) SealFrozen(ctx context.Context, newTop string, l guest.HookLimits, recorded func(disk.Stack) error) (
	disk.Stack, time.Duration, []guest.HookFailure, error) {
	before := v.Stack()
	o := instance.CaptureOptions{NewTop: newTop, Sealed: recorded}
	c := &capture{o: o, before: before, diskOnly: true}
	if err := v.beginCapture(c); err != nil {
		return disk.Stack{}, 0, nil, err
	}
	defer v.endCapture(c)
	ctx, cancel := v.WhileRunning(ctx)
	defer cancel()
	var r sealResult
	number := v.orders.Add(1)
	if err := v.callWhole(ctx, number, callSealFrozen, sealOrder{number, newTop, l}, &r); err != nil {
		return disk.Stack{}, 0, nil, v.Explain(ctx, err)
	}
	fs := failures(r.Failures)
	switch {
	case r.Refused:
		return disk.Stack{}, 0, fs, &spec.HooksError{Failures: fs}
	case r.Problem != nil:
		return disk.Stack{}, 0, fs, &control.ErrorReport{Code: text(r.Problem.Code), Message: text(r.Problem.Text)}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.sealed {
		return disk.Stack{}, 0, fs, errors.New("sealing a disk: the confined process has not done it")
	}
	return before, timeBy(r.Frozen), fs, nil
}

// Continue lets a captured VM run on.
func (v *VM) Continue() error { return v.callSoon(callContinue, none{}, nil) }

// SetDiskRoom is that of instance.Instance.
func (v *VM) SetDiskRoom(more int64) error { return v.callSoon(callRoom, more, nil) }

// MissedPages is that of instance.Instance.
func (v *VM) MissedPages() (missed []uint64) {
	if err := v.callSoon(callMissed, none{}, &missed); err != nil {
		v.log.Info("asking for what the page cache lacks", "cause", err)
	}
	return missed[:min(len(missed), pagecache.MaxMissed)]
}

// CloseToo makes Close close c too.
func (v *VM) CloseToo(c io.Closer) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.closers = append(v.closers, c)
}

// Close stops the VM as if its power were cut, ends its process, and releases all that it holds.
func (v *VM) Close() error {
	v.closeOnce.Do(func() { v.closeErr = v.close() })
	return v.closeErr
}

func (v *VM) close() error {
	v.mu.Lock()
	v.closed = true
	closers, frozen := v.closers, len(v.frozen) > 0
	v.mu.Unlock()
	wait := v.times.flush
	if frozen { // it must not go on to be closed
		if err := v.jail.proc.Kill(); err != nil {
			v.log.Error("killing the VM's confined process", "error", err)
		}
	}
	if v.stopped.Load() != nil {
		wait = v.times.fail
	}
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	var errs []error
	select {
	case <-v.jail.conn.Done():
	default:
		if err := v.call(ctx, callClose, none{}, nil); err != nil {
			errs = append(errs, fmt.Errorf("closing the VM: %w", err))
		}
		v.end(vmm.Exit{Reason: vmm.Stopped, VCPU: -1}) // before watch sees that the process has ended
	}
	errs = append(errs, v.jail.Close())
	v.end(vmm.Exit{Reason: vmm.Stopped, VCPU: -1})
	v.wg.Wait()
	if v.console != nil {
		errs = append(errs, v.console.close(v.times.soon))
	}
	errs = append(errs, v.release())
	for _, c := range closers {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// How fast a process may call its keeper, connections of the guest to ports of the host among the calls, and write to
// its console, in bytes. A guest's UART gives less than a MiB a second.
const (
	callBurst, callsPerSecond = 2000, 1000
	consoleBurst, consoleRate = 8 << 20, 4 << 20
)

// console copies what the guest writes to its serial port.
type console struct {
	r    *os.File
	done chan struct{}
}

func copyConsole(to io.Writer, pace *rpc.Pace) (c *console, w *os.File, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, fmt.Errorf("making the guest's console: %w", err)
	}
	c = &console{r, make(chan struct{})}
	go func() {
		defer close(c.done)
		buf := make([]byte, 4<<10)
		for {
			n, err := r.Read(buf)
			if n > 0 {
				pace.Read(n)
				_, _ = to.Write(buf[:n]) // a console that cannot be written is lost, and the guest runs on
			}
			if err != nil {
				return
			}
		}
	}()
	return c, w, nil
}

func (c *console) close(wait time.Duration) error {
	// Its process has ended, so the rest is in the pipe, unless something else holds the other end.
	select {
	case <-c.done:
	case <-time.After(wait):
	}
	err := c.r.Close()
	<-c.done
	return err
}

// order returns the order to start, and what is passed with it.
func (v *VM) order(p instance.Parts, dir string, o instance.RestoreOptions) (
	s startOrder, files []*os.File, err error) {
	s = startOrder{
		Spec: p.Spec, Kernel: p.Kernel, Initramfs: p.Initramfs, SystemDisk: p.SystemDisk, Cmdline: p.Cmdline,
		Image: p.Image, Disk: p.Disk, VM: p.VM, DiskRoom: p.DiskRoom, Secrets: p.Secrets, PageCache: p.PageCache, NoDirtyLog: p.NoDirtyLog,
		Symbols: p.Symbolize != nil, Services: p.ServiceEvent != nil, Fork: p.RAM != nil, Snapshot: dir, Options: o,
		Known: map[string]*fileInfo{},
	}
	add := func(name string, f *os.File) { s.Passed, files = append(s.Passed, name), append(files, f) }
	openAt := func(name, at string) error {
		f, err := v.jail.toRead(at, 0)
		if err == nil {
			add(passName(name, os.O_RDONLY), f)
		}
		return err
	}
	open := func(name string) error { return openAt(name, name) }
	fail := func(err error) (startOrder, []*os.File, error) { return s, files, err }
	paths := []string{p.Image}
	shared := []string{p.Image}
	if p.SystemDisk != "" {
		paths, shared = append(paths, p.SystemDisk), append(shared, p.SystemDisk)
	}
	if dir == "" && p.RAM == nil {
		paths = append(paths, p.Kernel)
		if p.Initramfs != "" {
			paths = append(paths, p.Initramfs)
		}
	}
	if err := v.hold(shared...); err != nil {
		return fail(err)
	}
	for _, path := range paths {
		if err := open(path); err != nil {
			return fail(err)
		}
	}
	coming := map[string]int64{}
	for _, path := range p.Disk.Layers[:max(len(p.Disk.Layers)-1, 0)] {
		is, err := v.openLayer(path, func(at string) error {
			if err := v.hold(at); err != nil {
				return err
			}
			return openAt(path, at)
		})
		if err == nil && is {
			coming[filepath.Base(path)], err = sizeOf(files[len(files)-1])
		}
		if err != nil {
			return fail(err)
		}
	}
	top, err := os.OpenFile(p.Disk.Top(), os.O_RDWR, 0)
	if err != nil {
		return fail(err)
	}
	add(passName(p.Disk.Top(), os.O_RDWR), top)
	if dir != "" && p.RAM == nil {
		list, arriving, err := v.jail.openSnapshot(dir, p.Arriving)
		at := dir
		if v.parts.Arriving = arriving; arriving != nil && err == nil {
			// The process knows it by the name that it will have.
			s.Arriving, s.Coming, at = true, coming, arriving.Dir
			if v.arriving, err = arrivingFiles(list); err == nil {
				maps.Copy(v.arriving, coming)
			}
		}
		for _, f := range list {
			add(filepath.Join(dir, filepath.Base(f.Name())), f)
			if p.PageCache == "" || s.Arriving || filepath.Base(f.Name()) == snapshot.ManifestName {
				continue
			}
			// The cache has pages of all VMs: only the files for these very memory files are passed.
			if name, err := pagecache.Name(f); err == nil {
				name = filepath.Join(p.PageCache, name)
				v.grants.read(name)
				if err := open(name); errors.Is(err, fs.ErrNotExist) {
					s.Known[name] = nil // the child need not ask
				}
			}
		}
		if err != nil {
			return fail(err)
		}
		if i, err, _ := statInfo(at); err == nil {
			s.Known[filepath.Clean(dir)] = &i
		}
	}
	if p.RAM != nil {
		f, err := rpc.Dup(p.RAM)
		if err != nil {
			return fail(err)
		}
		add(passRAM, f)
	}
	if p.Listener != nil {
		f, err := rpc.Dup(p.Listener)
		if err != nil {
			return fail(err)
		}
		add(passListener, f)
	}
	if p.TAP != nil {
		t, ok := p.TAP.(interface{ File() (*os.File, error) })
		if !ok {
			return fail(errors.New("a network that is no TAP device"))
		}
		f, err := t.File()
		if err != nil {
			return fail(err)
		}
		add(passTAP, f)
	}
	for i, vol := range p.Volumes {
		s.Volumes = append(s.Volumes, volumeOrder{vol.Record(), vol.ReadOnly()})
		f, err := v.openVolume(vol)
		if err != nil {
			return fail(err)
		}
		add(fmt.Sprint(passVolume, i), f)
	}
	if p.Console != nil {
		var w *os.File
		if v.console, w, err = copyConsole(p.Console, rpc.NewPace(consoleBurst, consoleRate)); err != nil {
			return fail(err)
		}
		add(passConsole, w)
	}
	return s, files, nil
}

// serve answers the child.
func (v *VM) serve(ctx context.Context, method string, body []byte, files []*os.File) (
	reply any, out []*os.File, err error) {
	defer closeAll(files)
	v.pace.Call(body)
	if !v.serving.Load() {
		return nil, nil, errRefused
	}
	switch method {
	case callFile:
		var o fileOrder
		if err := json.Unmarshal(body, &o); err != nil {
			return nil, nil, err
		}
		i, f, err := v.file(o)
		if f != nil {
			out = []*os.File{f}
		}
		return i, out, err
	case callConnect:
		var port uint32
		if err := json.Unmarshal(body, &port); err != nil {
			return nil, nil, err
		}
		f, own, err := v.connect(ctx, port)
		if err != nil {
			return nil, nil, err
		}
		return own, []*os.File{f}, nil
	case callWritten:
		return handle(body, func(i int) (any, error) {
			if i < 0 || i >= len(v.parts.Volumes) {
				return nil, errRefused
			}
			return nil, v.parts.Volumes[i].Written()
		})
	case callEnsure:
		return handle(body, func(o ensureOrder) (any, error) { return nil, v.ensure(ctx, o) })
	case callLinkReady:
		if v.parts.LinkReady == nil {
			return nil, nil, errRefused
		}
		return nil, nil, v.parts.LinkReady(ctx)
	case callSymbolize:
		return handle(body, func(addr uint64) (any, error) {
			if v.parts.Symbolize == nil {
				return nil, errRefused
			}
			name, offset, ok := v.parts.Symbolize(addr)
			return symbol{name, offset, ok}, nil
		})
	case postService:
		return handle(body, func(e guest.ServiceEvent) (any, error) {
			if v.parts.ServiceEvent != nil {
				v.events.Lock() // the process may call in place of posting
				defer v.events.Unlock()
				e.Name, e.Event, e.Problem = text(e.Name), text(e.Event), text(e.Problem)
				v.parts.ServiceEvent(e)
			}
			return nil, nil
		})
	case postQuota:
		if v.parts.QuotaReached != nil {
			v.parts.QuotaReached()
		}
		return nil, nil, nil
	case postEnded:
		return handle(body, func(e ended) (any, error) { v.machineEnded(e); return nil, nil })
	case postCalm:
		v.mu.Lock()
		calm := v.calm
		v.calm = nil
		v.mu.Unlock()
		if calm != nil {
			calm()
		}
		return nil, nil, nil
	}
	v.mu.Lock()
	c := v.capture
	v.mu.Unlock()
	if c == nil {
		return nil, nil, errRefused
	}
	return v.serveCapture(c, method, body, files)
}

// machineEnded takes over how the machine has ended.
func (v *VM) machineEnded(e ended) {
	x := vmm.Exit{Reason: e.Reason, VCPU: e.VCPU, RIP: e.RIP, Detail: text(e.Detail)}
	if !x.Reason.Known() {
		x.Reason = vmm.HostError
	}
	if x.VCPU < -1 || x.VCPU >= v.parts.Spec.VCPUs {
		x.VCPU = -1
	}
	if e.Error != "" {
		x.Err = errors.New(text(e.Error))
	}
	v.end(x)
}
