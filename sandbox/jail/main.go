package jail

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pager"
)

// Argument makes a program that calls process.ServeProcess the confined process of a VM.
const Argument = "jailed"

// socketFD is the descriptor of the socket to the keeper.
const socketFD = 3

// Main is the confined process of a VM. It returns when the keeper has closed the connection, or told it to end.
func Main() error {
	// The keeper decides when the VM ends. A terminal or a host that shuts down signals both.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	c := &child{percent: -1, log: slog.New(slog.NewTextHandler(os.Stderr, nil)), ended: make(chan struct{}),
		connects: make(chan struct{}, maxConnects), ensures: make(chan struct{}, ensuresAtOnce)}
	c.fs.ask = c.askFile
	defer c.fs.close()
	conn, err := rpc.New(os.NewFile(socketFD, "keeper"), options(c.serve))
	if err != nil {
		return err
	}
	c.conn.Store(conn)
	close(c.connected())
	select {
	case <-conn.Done():
	case <-c.ended:
	}
	return conn.Close()
}

// Limits of the conversation. A start with a long policy, or the failures of many hooks, take some 100 KiB.
const (
	maxMessage = 1 << 20
	maxFiles   = 64
	maxCalls   = 32
)

// options are the options of both ends.
func options(h rpc.Handler) rpc.Options {
	return rpc.Options{Handler: h, MaxMessage: maxMessage, MaxFiles: maxFiles, MaxCalls: maxCalls, Sentinels: sentinels()}
}

// child is the state of the confined process.
type child struct {
	log   *slog.Logger
	conn  atomic.Pointer[rpc.Conn]
	once  sync.Once
	ready chan struct{}
	fs    passedFS
	ended chan struct{}
	// connects has an element for each connection of the guest that the keeper is asked for.
	connects chan struct{}
	// ensures has an element for each part of memory that the keeper is asked for.
	ensures chan struct{}
	endOnce sync.Once

	mu       sync.Mutex // guards what follows
	prebuilt *instance.Prebuilt
	percent  int // GOGC of a child that has prepared, else -1
	in       *instance.Instance
	volumes  []*volume.Volume
	hooks    hookRun
	releases []func()
	// order is the number of the capture or seal under way, giveUp ends it, and givenUp is the last that the keeper
	// has given up: that may come first.
	order, givenUp uint64
	giveUp         context.CancelFunc
}

// hookRun are the hooks that ran before the operation under way.
type hookRun interface {
	After(context.Context)
	Failed() []guest.HookFailure
}

// connected is closed when there is a connection: the first call may come before New has returned.
func (c *child) connected() chan struct{} {
	c.once.Do(func() { c.ready = make(chan struct{}) })
	return c.ready
}

// keeper returns the connection to the keeper.
func (c *child) keeper() *rpc.Conn {
	<-c.connected()
	return c.conn.Load()
}

func (c *child) askFile(o fileOrder) (i fileInfo, files []*os.File, err error) {
	ctx, cancel := fileContext()
	defer cancel()
	files, err = c.keeper().Call(ctx, callFile, o, &i)
	return i, files, err
}

// handle decodes the argument of a call and does it.
func handle[T any](body []byte, f func(T) (any, error)) (any, []*os.File, error) {
	var arg T
	if len(body) > 0 {
		if err := json.Unmarshal(body, &arg); err != nil {
			return nil, nil, fmt.Errorf("reading a call: %w", err)
		}
	}
	reply, err := f(arg)
	return reply, nil, err
}

type none struct{}

func (c *child) serve(ctx context.Context, method string, body []byte, files []*os.File) (
	reply any, out []*os.File, err error) {
	if method != callPass && method != callStart {
		defer closeAll(files)
	}
	switch method {
	case callPrepare:
		return handle(body, func(o prepareOrder) (any, error) { return nil, c.prepare(o) })
	case callPass:
		return handle(body, func(names []string) (any, error) {
			return nil, c.fs.add(names, files)
		})
	case callStart:
		return handle(body, func(o startOrder) (any, error) {
			if err := c.fs.add(o.Passed, files); err != nil {
				return nil, err
			}
			c.fs.know(o.Known)
			return c.start(ctx, o)
		})
	case callClose:
		defer c.endOnce.Do(func() { time.AfterFunc(lastAnswer, func() { close(c.ended) }) })
		return nil, nil, c.close()
	}
	in, err := c.instance()
	if err != nil {
		return nil, nil, err
	}
	switch method {
	case callInfo:
		return c.info(in), nil, nil
	case callDial:
		return handle(body, func(port uint32) (any, error) {
			if len(files) != 1 {
				return nil, errNoFile
			}
			return nil, in.DialOn(ctx, port, files[0])
		})
	case callFail:
		return handle(body, func(text string) (any, error) { in.Machine().Fail(errors.New(text)); return nil, nil })
	case callHooksBefore:
		return handle(body, func(o hooksOrder) (any, error) { return c.hooksBefore(ctx, in, o) })
	case callHooksAfter:
		c.mu.Lock()
		h := c.hooks
		c.mu.Unlock()
		if h == nil {
			return hooked{}, nil, nil
		}
		h.After(ctx)
		return hooked{Failures: h.Failed()}, nil, nil
	case callIdentity:
		return nil, nil, in.NewIdentity(ctx)
	case callServices:
		return nil, nil, in.ListenServices()
	case callServe:
		return nil, nil, in.ServeSecrets(ctx)
	case callSetSecret:
		return handle(body, func(o secretOrder) (any, error) {
			defer clear(o.Value)
			defer clear(body)
			return nil, in.Machine().Secrets().Set(o.Secret, o.Value)
		})
	case callDropSecret:
		return handle(body, func(name string) (any, error) { return in.Machine().Secrets().Remove(name), nil })
	case callSecrets:
		return in.Machine().Secrets().List(), nil, nil
	case callKeep:
		release := in.KeepRunning()
		c.mu.Lock()
		defer c.mu.Unlock()
		c.releases = append(c.releases, release)
		return nil, nil, nil
	case callRelease:
		c.mu.Lock()
		defer c.mu.Unlock()
		if n := len(c.releases); n > 0 {
			c.releases[n-1]()
			c.releases = c.releases[:n-1]
		}
		return nil, nil, nil
	case callCapture:
		return handle(body, func(o captureOrder) (any, error) { return c.capture(ctx, in, o) })
	case callSealFrozen:
		return handle(body, func(o sealOrder) (any, error) { return c.sealFrozen(ctx, in, o), nil })
	case callGiveUp:
		return handle(body, func(number uint64) (any, error) { c.abandon(number); return nil, nil })
	case callRoom:
		return handle(body, func(more int64) (any, error) { return nil, in.SetDiskRoom(more) })
	case callFlush:
		return nil, nil, in.Disk().Flush()
	case callData:
		return in.Disk().Data(), nil, nil
	case callSubstitute:
		return handle(body, func(o substitution) (any, error) { return nil, in.Disk().Substitute(o.Layers, o.By) })
	case callContinue:
		c.rearm()
		return nil, nil, in.Continue()
	case callMissed:
		return in.MissedPages(), nil, nil
	case callArrived:
		in.Arrived()
		return nil, nil, nil
	}
	return nil, nil, fmt.Errorf("a call of %q: there is no such", method)
}

// lastAnswer is how long a closed child stays, so that its answer gets out.
const lastAnswer = 50 * time.Millisecond

// prepare confines this process, and makes what it can of the VM before.
func (c *child) prepare(o prepareOrder) error {
	if err := confine.ViewOnly(); err != nil {
		return err
	}
	if err := instance.PrepareJail(); err != nil {
		return err
	}
	for i, name := range o.Shares {
		if err := c.fs.add([]string{name}, []*os.File{os.NewFile(uintptr(socketFD+1+i), name)}); err != nil {
			return err
		}
	}
	walls, err := confine.Enter()
	if err != nil {
		return err
	}
	if err := confine.Lock(walls); err != nil {
		return err
	}
	// Only now: Enter makes each call on all threads, and more processors have more of them.
	const procs = 16 // see process.PrepareProcess
	if os.Getenv("GOMAXPROCS") == "" && runtime.GOMAXPROCS(0) < procs {
		runtime.GOMAXPROCS(procs)
	}
	if o.Shape == nil {
		return nil
	}
	prebuilt, err := instance.NewPrebuilt(*o.Shape, instance.PrebuiltOptions{NoDirtyLog: o.NoDirtyLog})
	if err != nil {
		return err
	}
	_, _ = WarmUp(), snapshot.PrepareDecoders(pager.DefaultHandlers+1) // a failure shows at the wake
	c.mu.Lock()
	defer c.mu.Unlock()
	c.prebuilt = prebuilt
	runtime.GC()
	// Without a goal for the heap, the runtime keeps what is free of it: to get it back takes a wake's time.
	c.percent = debug.SetGCPercent(-1)
	return nil
}

func (c *child) instance() (*instance.Instance, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.in == nil {
		return nil, errors.New("the VM does not run")
	}
	return c.in, nil
}

// gcPause is how long after a start the garbage collector stays off.
const gcPause = 100 * time.Millisecond

// start makes the VM of what was passed.
func (c *child) start(ctx context.Context, o startOrder) (any, error) {
	percent := debug.SetGCPercent(-1)
	c.mu.Lock()
	percent = max(percent, c.percent)
	prebuilt := c.prebuilt
	c.prebuilt = nil
	c.mu.Unlock()
	// Not before the keeper has the answer.
	defer time.AfterFunc(gcPause, func() { debug.SetGCPercent(percent) })
	p := instance.Parts{
		Spec: o.Spec, Kernel: o.Kernel, Initramfs: o.Initramfs, SystemDisk: o.SystemDisk, Cmdline: o.Cmdline, Image: o.Image,
		Disk: o.Disk, VM: o.VM, Secrets: o.Secrets, PageCache: o.PageCache, NoDirtyLog: o.NoDirtyLog, Prebuilt: prebuilt,
		Files: &c.fs, Log: c.log, Listener: c.fs.take(passListener), Connect: c.connect,
	}
	if f := c.fs.take(passConsole); f != nil {
		p.Console = f
	}
	if o.Arriving {
		p.Arriving, p.PageCache = &instance.Arriving{Layers: o.Coming, Ensure: c.ensure}, ""
	}
	if o.Fork {
		if p.RAM = c.fs.take(passRAM); p.RAM == nil {
			return nil, errors.New("the image of a fork was not passed")
		}
	}
	if o.Spec.Network == spec.NetworkTAP {
		f := c.fs.take(passTAP)
		if f == nil {
			return nil, errors.New("the TAP device was not passed")
		}
		t, err := tap.Of(f)
		if err != nil {
			return nil, err
		}
		p.TAP = t
		p.LinkReady = func(ctx context.Context) error {
			_, err := c.keeper().Call(ctx, callLinkReady, none{}, nil)
			return err
		}
	}
	for i, v := range o.Volumes {
		f := c.fs.take(passVolume + strconv.Itoa(i))
		if f == nil {
			return nil, fmt.Errorf("volume %s was not passed", v.Record.Name)
		}
		p.Volumes = append(p.Volumes, volume.Of(v.Record, f, v.ReadOnly, func() error { return c.tell(callWritten, i) }))
	}
	if o.Symbols {
		p.Symbolize = func(addr uint64) (string, uint64, bool) {
			ctx, cancel := fileContext()
			defer cancel()
			var s symbol
			_, err := c.keeper().Call(ctx, callSymbolize, addr, &s)
			return s.Name, s.Offset, err == nil && s.Known
		}
	}
	if p.DiskRoom = o.DiskRoom; p.DiskRoom > 0 {
		p.QuotaReached = func() { c.post(postQuota, none{}) }
	}
	if o.Services {
		p.ServiceEvent = func(e guest.ServiceEvent) { c.post(postService, e) }
	}
	in, err := c.bring(ctx, p, o)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.in, c.volumes = in, p.Volumes
	c.mu.Unlock()
	if prebuilt != nil {
		if err := prebuilt.Close(); err != nil {
			c.log.Warn("closing what was made ahead and is not needed", "error", err)
		}
	}
	go c.watch(in)
	go instance.ReleaseHeap(in.Machine().Done())
	go in.EvictIdle()
	entry, ready := in.Timing()
	_, restored := in.Faults()
	return started{
		EntryAfter: entry, ReadyAfter: ready, Took: time.Since(in.Begun()), Stages: in.Machine().Stages().ByName(), Facts: in.Machine().Facts(),
		Failures: in.WakeFailures(), Restored: restored, Caches: in.Caches(), DiskSize: in.Disk().Size(), Info: c.info(in),
	}, nil
}

func (c *child) bring(ctx context.Context, p instance.Parts, o startOrder) (*instance.Instance, error) {
	switch {
	case o.Fork:
		in, err := instance.RestoreFork(ctx, p, o.Snapshot, o.Options)
		return in, errors.Join(err, p.RAM.Close())
	case o.Snapshot != "":
		return instance.Restore(ctx, p, o.Snapshot, o.Options)
	}
	return instance.Boot(ctx, p)
}

// watch tells the keeper when the machine has ended.
func (c *child) watch(in *instance.Instance) {
	<-in.Machine().Done()
	x, err := in.Machine().Wait(context.Background())
	e := ended{Reason: x.Reason, VCPU: x.VCPU, RIP: x.RIP, Detail: x.Detail}
	if err = cmp.Or(x.Err, err); err != nil {
		e.Error = err.Error()
	}
	c.post(postEnded, e)
}

func (c *child) post(method string, arg any) {
	if err := c.keeper().Post(method, arg); err != nil {
		c.log.Warn("telling the keeper", "what", method, "error", err)
	}
}

// tell calls the keeper and waits for its answer.
func (c *child) tell(method string, arg any) error {
	ctx, cancel := fileContext()
	defer cancel()
	_, err := c.keeper().Call(ctx, method, arg, nil)
	return err
}

func (c *child) info(in *instance.Instance) info {
	i := info{Health: in.Machine().Health(), Full: in.SpaceProblem()}
	i.Open, i.Ever = in.Connections()
	f, _ := in.Faults()
	i.Faults = faults{f.ReadFaults.Load(), f.WriteFaults.Load(), f.Ensured.Load(), f.Prefetched.Load(),
		f.PagesCopied.Load(), f.Frames.Load(), f.FramesCached.Load()}
	return i
}

// connect asks the keeper for a connection to a port of the host, for the guest.
func (c *child) connect(port uint32, done func(fd int, own bool, err error)) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), connectTimeout)
		defer cancel()
		select {
		case c.connects <- struct{}{}:
			defer func() { <-c.connects }()
		case <-ctx.Done():
			done(-1, false, ctx.Err())
			return
		}
		var own bool
		files, err := c.keeper().Call(ctx, callConnect, port, &own)
		if err == nil && len(files) != 1 {
			err = errNoFile
		}
		fd := -1
		if err == nil {
			if fd, err = unix.FcntlInt(files[0].Fd(), unix.F_DUPFD_CLOEXEC, 0); err == nil {
				err = unix.SetNonblock(fd, true)
			}
		}
		_ = closeAll(files)
		done(fd, own, err)
	}()
}

const connectTimeout = 10 * time.Second

// maxConnects leaves calls for all else while the guest opens many connections. More of them wait; the device bounds
// their number.
const maxConnects = maxCalls / 2

func (c *child) hooksBefore(ctx context.Context, in *instance.Instance, o hooksOrder) (any, error) {
	h, err := in.RunHooksBefore(ctx, o.Event, o.Over)
	var refused *spec.HooksError
	if errors.As(err, &refused) {
		return hooked{Failures: refused.Failures, Refused: true}, nil
	}
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hooks = h
	return hooked{Failures: h.Failed(), Due: true}, nil
}

// begin returns the context of a capture or seal, which ends when the keeper gives it up.
func (c *child) begin(ctx context.Context, number uint64) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.order, c.giveUp = number, cancel
	if c.givenUp == number {
		cancel()
	}
	return ctx, cancel
}

func (c *child) abandon(number uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.givenUp = number; c.order == number {
		c.giveUp()
	}
}

func (c *child) capture(ctx context.Context, in *instance.Instance, o captureOrder) (any, error) {
	ctx, cancel := c.begin(ctx, o.Number)
	defer cancel()
	k := c.keeper()
	co := instance.CaptureOptions{
		Dir: o.Dir, ID: o.ID, Live: o.Live, NewTop: o.NewTop, Labels: o.Labels, Image: o.Image, Kernel: o.Kernel,
		Names:  func(disk.Stack) []string { return o.Names },
		Sealed: func(disk.Stack) error { return c.tell(callSealed, none{}) },
	}
	if o.Still {
		co.Still = func() error { return c.tell(callStill, none{}) }
	}
	if o.Resumed {
		// A call, so that it comes before the end of the capture.
		co.Resumed = func() {
			if err := c.tell(callResumed, none{}); err != nil {
				c.log.Warn("telling that the guest runs on", "error", err)
			}
		}
	}
	if o.Prioritize {
		co.Prioritize = func() func() {
			if err := c.tell(callPrioritize, none{}); err != nil {
				c.log.Warn("asking for priority", "error", err)
			}
			return sync.OnceFunc(func() { c.post(postCalm, none{}) })
		}
	}
	if o.Fork {
		co.Fork = func(image *os.File, cap *instance.Capture) error {
			f, err := rpc.Dup(image)
			if err == nil {
				_, err = k.Call(ctx, callForked, cap.CaptureCosts, nil, f)
			}
			return err
		}
	}
	cap, err := in.Capture(ctx, co)
	if err != nil {
		return nil, err
	}
	return cap.CaptureCosts, nil
}

func (c *child) sealFrozen(ctx context.Context, in *instance.Instance, o sealOrder) sealResult {
	ctx, cancel := c.begin(ctx, o.Number)
	defer cancel()
	sealed := func(disk.Stack) error { return c.tell(callSealed, none{}) }
	_, frozen, failures, err := in.SealFrozen(ctx, o.NewTop, o.Limits, sealed)
	r := sealResult{Frozen: frozen, Failures: failures}
	var refused *spec.HooksError
	switch {
	case errors.As(err, &refused):
		r.Failures, r.Refused = refused.Failures, true
	case err != nil:
		r.Problem = &problem{Text: err.Error(), Code: codeOf(err)}
	}
	return r
}

// rearm makes the next write to a volume known to the keeper again: it has settled the volumes.
func (c *child) rearm() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, v := range c.volumes {
		v.Rearm()
	}
}

func (c *child) close() error {
	c.mu.Lock()
	in, prebuilt := c.in, c.prebuilt
	c.in, c.prebuilt = nil, nil
	c.mu.Unlock()
	var errs []error
	if in != nil {
		errs = append(errs, in.Close())
	}
	if prebuilt != nil {
		errs = append(errs, prebuilt.Close())
	}
	return errors.Join(errs...)
}
