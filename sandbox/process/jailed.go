package process

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/jail"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// jailAhead is a confined process in the making. A nil jailAhead has none: VMs then run in this process.
type jailAhead struct {
	config jail.Config
	output *jailOutput
	// started is closed when the process runs its program. Until then it shares this process's descriptors, and with
	// them locks of files that this process has closed.
	started chan struct{}
	made    chan struct{} // closed when one of the following is set
	jail    *jail.Jail
	lacks   string // what this host lacks, so that VMs run in this process
	err     error
}

// makeJail starts a confined process in the background, and has it prepare for a shape if that is not nil. program is
// what leads to ServeProcess in this program.
func makeJail(program []string, shape *spec.Shape) (*jailAhead, error) {
	if os.Getenv(control.NoJailEnv) != "" && !jailRequired() {
		return nil, nil
	}
	logOnly, err := seccompLog()
	if err != nil {
		return nil, err
	}
	out, err := newJailOutput()
	if err != nil {
		return nil, err
	}
	c := jail.Config{LogOnly: logOnly, Program: program, Shape: shape, NoDirtyLog: noDirtyLog(), Output: out.w}
	a := &jailAhead{config: c, output: out, started: make(chan struct{}), made: make(chan struct{})}
	started := sync.OnceFunc(func() { close(a.started) })
	go func() {
		defer close(a.made)
		defer started()
		c := a.config
		c.Started = started
		a.jail, a.lacks, a.err = newJail(context.Background(), c)
	}()
	return a, nil
}

// awaitStart waits until this process may lock files and let go of them again.
func (a *jailAhead) awaitStart() {
	if a != nil {
		<-a.started
	}
}

func jailRequired() bool { return os.Getenv(control.RequireJailEnv) != "" }

// seccompLog reports whether forbidden system calls are only logged.
func seccompLog() (bool, error) {
	switch how := os.Getenv(control.SeccompEnv); {
	case how == "":
		return false, nil
	case how != control.SeccompLog:
		return false, fmt.Errorf("%s is %q: set it to %q or not at all", control.SeccompEnv, how, control.SeccompLog)
	case jailRequired():
		return false, fmt.Errorf("%s=%s confines no VM, and %s is set: unset one of them", control.SeccompEnv, how, control.RequireJailEnv)
	}
	return true, nil
}

// newJail starts a confined process, or says what this host lacks for that.
func newJail(ctx context.Context, c jail.Config) (j *jail.Jail, lacks string, err error) {
	j, err = jail.New(ctx, c)
	if err == nil {
		hasConfined(j)
		return j, "", nil
	}
	lacks, err = unconfinable(err, confine.Probe(), jailRequired())
	return nil, lacks, err
}

// unconfinable judges a confined process that did not start. Only a wall that is known to be missing is a reason to do
// without: another failure may pass, or be what somebody wants.
func unconfinable(err error, s confine.Support, required bool) (lacks string, _ error) {
	var walls []string
	for _, w := range s.Missing(true) {
		walls = append(walls, w.Name+" ("+w.Detail+")")
	}
	lacks = strings.Join(walls, ", ")
	switch {
	case lacks == "":
		return "", fmt.Errorf("%w: `drowse doctor` shows what this host has; with %s=1 VMs run unconfined",
			err, control.NoJailEnv)
	case required:
		return "", fmt.Errorf("%w: this host lacks %s, and %s is set: add what is missing, or unset it",
			err, lacks, control.RequireJailEnv)
	}
	return lacks, nil
}

// wait waits until the process is ready. It is not if this host cannot confine.
func (a *jailAhead) wait() (ready bool, err error) {
	if a == nil {
		return false, nil
	}
	<-a.made
	return a.jail != nil, a.err
}

// take returns the confined process for a VM, whose log is out; nil if this host cannot confine.
func (a *jailAhead) take(ctx context.Context, s spec.VM, l confine.Limits, out io.Writer, log *slog.Logger) (*jail.Jail, error) {
	if out != nil {
		a.output.to.Store(&out)
	}
	if _, err := a.wait(); err != nil {
		return nil, err
	}
	j, lacks := a.jail, a.lacks
	a.jail = nil
	var err error
	if j != nil && len(s.Shares) > 0 {
		// Only a process that was started for shares may open files.
		if err := j.Close(); err != nil {
			return nil, err
		}
		c := a.config
		c.Shape, c.Shares = nil, s.Shares
		if j, lacks, err = newJail(ctx, c); err != nil {
			return nil, err
		}
	}
	if j == nil {
		log.Warn("this VM is not confined: a guest that breaks out has all rights of this process",
			"lacking", lacks, "remedy", "see `drowse doctor`; "+control.RequireJailEnv+"=1 refuses such VMs")
		return nil, nil
	}
	if a.config.LogOnly {
		log.Warn("this VM's forbidden system calls are logged by the kernel (type=1326) and done: it is not confined",
			"cause", control.SeccompEnv+"="+control.SeccompLog)
	}
	err = j.SetLimits(l)
	if errors.Is(err, confine.ErrNoCgroup) {
		log.Warn("what this VM's confined process uses of the host is not limited", "cause", err, "remedy", "see `drowse doctor`")
		err = nil
	}
	if err != nil {
		return nil, errors.Join(err, j.Close())
	}
	return j, nil
}

// Close ends a process that was not taken.
func (a *jailAhead) Close() error {
	if a == nil {
		return nil
	}
	<-a.made
	var err error
	if a.jail != nil {
		err = a.jail.Close()
		a.jail = nil
	}
	return errors.Join(err, a.output.close())
}

// What a confined process may use beside memory of its guest.
const (
	jailMemory  = 256 << 20 // bytes: Go's heap, KVM's tables, decoders, what is written
	jailThreads = 512
	diskIndex   = 512 // for each MiB of the disk: rootfs/disk keeps where each block is
)

// Lengths of files that a confined process writes: at most a disk, RAM or volume, with some more for what describes it.
const (
	jailFiles     = 2 // times the largest of these
	jailFilesMore = 256 << 20
)

// jailLimits returns what the confined process of a VM may use of the host: RAM, once more what a snapshot of a running
// guest may have to copy of it, and jailMemory. Each fork adds RAM: see jail.VM.Capture.
func jailLimits(s spec.VM, volumes int64, each limits.Sandbox, device string) confine.Limits {
	l := confine.Limits{
		MemoryBytes: 2*int64(s.Memory()) + jailMemory + int64(s.DiskMiB)*diskIndex, Pids: jailThreads,
		CPUWeight: uint64(each.CPUWeight), CPUMax: each.CPUs, IOWeight: uint64(each.IOWeight),
	}
	if device != "" {
		bytes, ops := uint64(each.IOMiBPerSecond)<<20, uint64(each.IOPerSecond)
		l.IO = confine.IOMax{Device: device, ReadBytes: bytes, WriteBytes: bytes, ReadOps: ops, WriteOps: ops}
	}
	if !slices.ContainsFunc(s.Shares, func(sh spec.Share) bool { return sh.Writable }) {
		l.FileBytes = uint64(jailFiles*max(int64(s.DiskMiB)<<20, int64(s.Memory()), volumes) + jailFilesMore)
	}
	return l
}

// limits returns what the confined process of a VM may use of the host.
func (m jailedMachines) limits(p instance.Parts) (confine.Limits, error) {
	all, err := limits.Read(m.store.Dir())
	if err != nil {
		return confine.Limits{}, err
	}
	// Metadata that cannot be read keeps no VM from running, and has the usual class.
	meta, _ := m.store.Metadata(p.Spec.Name)
	each, device := all.OfClass(meta.EffectiveClass()), ""
	if each.IOMiBPerSecond > 0 || each.IOPerSecond > 0 {
		if device, err = confine.DeviceOf(m.store.LayerDir()); errors.Is(err, confine.ErrNoDevice) {
			p.Log.Warn("this VM's disk I/O is not limited", "cause", err)
		} else if err != nil {
			return confine.Limits{}, fmt.Errorf("limiting disk I/O: %w", err)
		}
	}
	volumes := int64(0)
	for _, v := range p.Volumes {
		volumes = max(volumes, v.Size())
	}
	return jailLimits(p.Spec, volumes, each, device), nil
}

// jailOutput passes what a confined process says to the log of its VM, which is bounded.
type jailOutput struct {
	r, w *os.File
	to   atomic.Pointer[io.Writer]
	done chan struct{}
}

func newJailOutput() (*jailOutput, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making the log of a confined process: %w", err)
	}
	o := &jailOutput{r: r, w: w, done: make(chan struct{})}
	var out io.Writer = os.Stderr
	o.to.Store(&out)
	go o.copy()
	return o, nil
}

// copy writes line by line: the log counts messages.
func (o *jailOutput) copy() {
	defer close(o.done)
	lines, pace := bufio.NewReaderSize(o.r, maxLogLine), newLogPace()
	for {
		line, err := lines.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			err = nil
		}
		if len(line) > 0 {
			pace(len(line))
			_, _ = (*o.to.Load()).Write(line) // there is nobody to tell
		}
		if err != nil {
			return
		}
	}
}

// The log leaves out what is too much. So that reading that is no work either, a process that writes more than logFlood
// bytes within logSpan waits. A short line is as much work as one of logLine bytes.
const (
	logFlood = 8 << 20
	logSpan  = time.Second
	logLine  = 256
)

// newLogPace returns what is called with the length of each line, and sleeps if it was too much.
func newLogPace() func(n int) {
	since, sum := time.Now(), 0
	return func(n int) {
		if spent := time.Since(since); spent >= logSpan {
			since, sum = time.Now(), 0
		} else if sum > logFlood {
			time.Sleep(logSpan - spent)
			since, sum = time.Now(), 0
		}
		sum += max(n, logLine)
	}
}

func (o *jailOutput) close() error {
	err := o.w.Close()
	select {
	case <-o.done:
	case <-time.After(answerTime): // something still has the other end
	}
	err = errors.Join(err, o.r.Close())
	<-o.done
	return err
}

// jailedMachines makes VMs in a confined process each, or in this one if this host cannot confine.
type jailedMachines struct {
	kvmMachines
	ahead *jailAhead
	store *state.Store
	log   io.Writer
}

// likely reports whether the VM will be confined, as far as is known yet.
func (m jailedMachines) likely() bool {
	select {
	case <-m.ahead.made:
		return m.ahead.jail != nil && !m.ahead.config.LogOnly
	default:
		return !m.ahead.config.LogOnly
	}
}

func (m jailedMachines) Start(ctx context.Context, p instance.Parts, snapshot string, o instance.RestoreOptions) (VM, error) {
	l, err := m.limits(p)
	if err != nil {
		return nil, err
	}
	j, err := m.ahead.take(ctx, p.Spec, l, m.log, p.Log)
	if err != nil {
		return nil, err
	}
	if j == nil {
		if p.Arriving != nil { // only a confined process has somebody to ask
			if err := p.Arriving.Whole(ctx); err != nil {
				return nil, err
			}
			p.Arriving = nil
		}
		return m.kvmMachines.Start(ctx, p, snapshot, o)
	}
	socket, err := osfile.ListenUnix(p.Socket)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listening for connections to the guest: %w", err), j.Close())
	}
	// Closing it removes the socket.
	p.Listener, err = listenerFile(socket)
	if err != nil {
		return nil, errors.Join(err, socket.Close(), j.Close())
	}
	v, err := j.Start(ctx, p, snapshot, o)
	p.Listener.Close()
	if err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	v.CloseToo(socket)
	return jailedVM{v, m.ahead.config.LogOnly}, nil
}

// networkMemory and networkThreads bound the network process: buffers of all its connections, and Go's own.
const (
	networkMemory  = 128 << 20
	networkThreads = 128
)

// Network makes a network whose network process is confined, unless this host cannot confine.
func (m jailedMachines) Network(c network.Config) (Network, error) {
	c.Start = func(ctx context.Context, files []*os.File) (network.Process, error) {
		p := confine.Profile{
			Program: append(append([]string{"/proc/self/exe"}, m.ahead.config.Program...), network.Argument), Files: files,
			Output: m.ahead.output.w, Network: true, LogOnly: m.ahead.config.LogOnly, Limits: confine.Limits{MemoryBytes: networkMemory, Pids: networkThreads},
		}
		proc, err := confine.Start(ctx, p)
		if errors.Is(err, confine.ErrNoCgroup) {
			p.Limits = confine.Limits{} // take has said so
			proc, err = confine.Start(ctx, p)
		}
		if err == nil {
			return proc, nil
		}
		lacks, err := unconfinable(err, confine.Probe(), jailRequired())
		if err == nil && c.Log != nil {
			c.Log.Warn("the parsers of this VM's network are not confined", "lacking", lacks, "remedy", "see `drowse doctor`")
		}
		return nil, err
	}
	return m.kvmMachines.Network(c)
}

func listenerFile(l interface{}) (*os.File, error) {
	f, ok := l.(interface{ File() (*os.File, error) })
	if !ok {
		return nil, errors.New("a listener without a descriptor")
	}
	return f.File()
}

// jailedVM adapts a jail.VM to VM.
type jailedVM struct {
	*jail.VM
	logOnly bool // its forbidden system calls
}

func (v jailedVM) Machine() Machine { return v.VM }
func (v jailedVM) Secrets() Secrets { return v.VM }
func (v jailedVM) Disk() Disk       { return v.VM }
func (v jailedVM) Confined() bool   { return !v.logOnly }
func (v jailedVM) SeccompLog() bool { return v.logOnly }

func (v jailedVM) RunHooksBefore(ctx context.Context, e guest.HookEvent, over spec.HookPolicy) (Hooks, error) {
	return v.VM.RunHooksBefore(ctx, e, over)
}
