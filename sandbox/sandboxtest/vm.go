package sandboxtest

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing/fstest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// machines make the VM of one process: process.Machines.
type machines struct {
	v *VMs
	p *proc
}

// Admit implements process.Machines. Guests take no memory here.
func (machines) Admit(context.Context, string, int, bool) (func() error, error) {
	return func() error { return nil }, nil
}

// Format implements process.Machines. The disk is empty.
func (machines) Format(_ context.Context, _, path string, size int64) (disk.Stack, error) {
	return disk.Create(path, size)
}

// Start implements process.Machines.
func (m machines) Start(ctx context.Context, p instance.Parts, dir string, o instance.RestoreOptions) (process.VM, error) {
	v := &vm{parts: p, vms: m.v, begun: time.Now(), ended: make(chan struct{}), secrets: secrets.New()}
	v.close = sync.OnceValue(v.closeOnce)
	for _, volume := range p.Volumes {
		v.CloseToo(volume)
	}
	if err := v.start(ctx, dir, o); err != nil {
		return nil, errors.Join(err, v.Close())
	}
	m.p.mu.Lock()
	m.p.vm = v
	killed := m.p.killed
	m.p.mu.Unlock()
	if killed {
		return nil, errors.Join(errKilled, v.Close())
	}
	return v, nil
}

// vm is a VM in memory: both a process.VM and a process.Machine.
type vm struct {
	parts    instance.Parts
	vms      *VMs
	guest    *fakeguest.Guest
	outside  Guest // instead of it, if VMs.Guests is set
	ports    *fakeguest.Ports
	disk     *disk.Disk
	secrets  *secrets.Device
	stages   vmm.Stages
	begun    time.Time
	ready    time.Duration
	restored bool
	closers  []io.Closer
	base     string       // directory of the last snapshot; "" if there is none
	goOn     func()       // resumes a captured guest, if not nil
	room     atomic.Int64 // what the disk may take of the host: see SetDiskRoom
	close    func() error

	once  sync.Once
	ended chan struct{}
	exit  vmm.Exit // set once it has ended, like err
	err   error
}

// errKilled means that the VM's process was killed.
var errKilled = errors.New("killed by the test")

func (v *vm) fail(op string) error { return v.vms.fail(op, v.parts.Spec.Name) }

// The memory of a guest is in the state of its machine. The image of a fork contains the same.
const memoryKind, memoryVersion = "sandboxtest.memory", 1

func (v *vm) start(ctx context.Context, dir string, o instance.RestoreOptions) (err error) {
	memory := fstest.MapFS{}
	op := "boot"
	switch {
	case v.parts.RAM != nil:
		op = "fork"
		err = v.readFork(filepath.Base(dir), &memory)
	case dir != "":
		op = "restore"
		err = v.readSnapshot(dir, &memory)
	}
	if v.restored = dir != ""; err == nil {
		err = v.fail(op)
	}
	if err != nil {
		return fmt.Errorf("starting a VM in memory: %w", err)
	}
	if v.disk, err = disk.Open(v.parts.Disk, disk.Options{}); err != nil {
		return fmt.Errorf("opening the VM's disk: %w", err)
	}
	if v.parts.DiskRoom > 0 {
		if err := v.SetDiskRoom(v.parts.DiskRoom); err != nil {
			return err
		}
	}
	files, err := v.readDisk()
	if err != nil {
		return fmt.Errorf("reading the VM's disk: %w", err)
	}
	maps.Copy(files, memory)
	v.guest = fakeguest.New(files)
	v.guest.Commands, v.guest.Changed = v.vms.Commands, v.writeDisk
	if dial := v.vms.Dial; dial != nil {
		v.guest.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			return dial(ctx, v.parts.Spec.Name, network, address)
		}
	}
	v.guest.Shutdown = func(reboot bool) {
		x := vmm.Exit{Reason: vmm.PoweredOff, VCPU: -1}
		if reboot {
			x.Reason = vmm.Rebooted
		}
		v.end(x, nil)
	}
	if !v.restored || o.NewIdentity {
		if err := v.guest.WriteFile("/etc/hostname", []byte(v.parts.Spec.Hostname+"\n")); err != nil {
			return err
		}
	}
	for _, f := range v.parts.Secrets {
		if err := v.secrets.Await(instance.DeviceSecret(f)); err != nil {
			return fmt.Errorf("%w: %w", spec.ErrSecrets, err)
		}
	}
	l, err := net.Listen("unix", v.parts.Socket)
	if err != nil {
		return fmt.Errorf("opening the guest's socket: %w", err)
	}
	v.ports = fakeguest.Listen(l, agentpb.AgentPort, agentpb.ForwardPort)
	if v.vms.Guests != nil {
		from := ""
		if v.restored {
			from = filepath.Base(dir)
		}
		if v.outside, err = v.vms.Guests(v.parts.Spec.Name, from, v.parts.RAM != nil || o.NewIdentity); err != nil {
			return fmt.Errorf("starting the guest: %w", err)
		}
		go v.carry(agentpb.AgentPort)
		go v.carry(agentpb.ForwardPort)
		go v.await()
	} else {
		go func() { _ = v.guest.Serve(v.ports) }() // ends with the ports
	}
	v.ready = time.Since(v.begun)
	return ctx.Err()
}

// carry carries the connections of a port to the guest outside, until the port is closed.
func (v *vm) carry(port int) {
	for l := v.ports.Port(port); ; {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			to, err := v.outside.Dial(port)
			if err != nil {
				return
			}
			defer to.Close()
			go func() {
				_, _ = io.Copy(to, c)
				_ = to.Close() // a broken connection of the host's ends that of the agent
			}()
			_, _ = io.Copy(c, to)
		}()
	}
}

// await ends the VM when its guest outside has ended.
func (v *vm) await() {
	select {
	case <-v.outside.Done():
		v.end(vmm.Exit{Reason: vmm.PoweredOff, VCPU: -1}, nil)
	case <-v.ended:
	}
}

// forkImage is the content of a fork's image.
type forkImage struct {
	Memory  json.RawMessage
	Volumes string // volumes in the label of the snapshot
}

// readFork reads the memory in the image of a fork whose snapshot has or will have that id.
func (v *vm) readFork(id string, memory *fstest.MapFS) error {
	st, err := v.parts.RAM.Stat()
	if err != nil {
		return err
	}
	// Other children read the same file.
	var image forkImage
	if err := json.NewDecoder(io.NewSectionReader(v.parts.RAM, 0, st.Size())).Decode(&image); err != nil {
		return err
	}
	m := &snapshot.Manifest{ID: id, Labels: map[string]string{instance.LabelVolumes: image.Volumes}}
	return errors.Join(v.parts.CheckVolumes(m), json.Unmarshal(image.Memory, memory))
}

// readSnapshot reads the memory in a snapshot.
func (v *vm) readSnapshot(dir string, memory *fstest.MapFS) error {
	s, err := snapshot.Open(dir)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := v.parts.CheckVolumes(s.Manifest()); err != nil {
		return fmt.Errorf("restoring %s: %w", dir, err)
	}
	v.base = dir
	for _, p := range s.Payloads() {
		if p.Kind == memoryKind && p.Version == memoryVersion {
			return json.Unmarshal(p.Data, memory)
		}
	}
	return fmt.Errorf("restoring %s: %w: it is not of a VM in memory", dir, snapshot.ErrForeign)
}

// inMemory reports whether a file is in memory and not on the disk.
func inMemory(name string) bool {
	for _, dir := range []string{"run/", "tmp/", "dev/shm/"} {
		if strings.HasPrefix(name+"/", dir) && name+"/" != dir {
			return true
		}
	}
	return false
}

// some returns the files that are in memory, or those that are not.
func some(files fstest.MapFS, memory bool) ([]byte, error) {
	out := fstest.MapFS{}
	for name, f := range files {
		if inMemory(name) == memory {
			out[name] = f
		}
	}
	return json.Marshal(out)
}

// The disk begins with the length of its files as JSON, followed by the files.
const diskHeader = 8

func (v *vm) readDisk() (fstest.MapFS, error) {
	files := fstest.MapFS{}
	head := make([]byte, diskHeader)
	if _, err := v.disk.ReadAt(head, 0); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(head)
	if n == 0 {
		return files, nil
	}
	if n > uint64(v.disk.Size()-diskHeader) {
		return nil, fmt.Errorf("%d bytes of files on a disk of %d: it is not of a VM in memory", n, v.disk.Size())
	}
	data := make([]byte, n)
	if _, err := v.disk.ReadAt(data, diskHeader); err != nil {
		return nil, err
	}
	return files, json.Unmarshal(data, &files)
}

// writeDisk writes the files that are not in memory.
func (v *vm) writeDisk(files fstest.MapFS) error {
	select {
	case <-v.ended:
		return unix.EIO
	default:
	}
	data, err := some(files, false)
	if err != nil {
		return err
	}
	blocks := (int64(len(data)+diskHeader) + disk.BlockSize - 1) / disk.BlockSize
	if blocks*disk.BlockSize > v.disk.Size() {
		return unix.ENOSPC
	}
	if v.parts.DiskRoom > 0 {
		if taken, err := v.disk.Allocated(); err != nil || taken+blocks*disk.BlockSize > v.room.Load() {
			v.parts.QuotaReached()
			return errors.Join(err, unix.EDQUOT)
		}
	}
	whole := binary.LittleEndian.AppendUint64(make([]byte, 0, blocks*disk.BlockSize), uint64(len(data)))
	whole = append(whole, data...)
	_, err = v.disk.WriteAt(whole[:cap(whole)][:blocks*disk.BlockSize], 0)
	return err
}

// end ends the VM.
func (v *vm) end(x vmm.Exit, err error) {
	v.once.Do(func() {
		v.exit, v.err = x, err
		close(v.ended)
	})
}

// kill ends the VM's process without a report: Wait fails, so the process does not finish its record.
func (v *vm) kill() { v.end(vmm.Exit{}, errKilled) }

// Done implements process.Machine.
func (v *vm) Done() <-chan struct{} { return v.ended }

// Wait implements process.Machine.
func (v *vm) Wait(ctx context.Context) (vmm.Exit, error) {
	select {
	case <-v.ended:
		return v.exit, v.err
	case <-ctx.Done():
		return vmm.Exit{}, ctx.Err()
	}
}

// Fail implements process.Machine.
func (v *vm) Fail(err error) {
	v.end(vmm.Exit{Reason: vmm.HostError, VCPU: -1, Detail: err.Error(), Err: err}, nil)
}

func (v *vm) Machine() process.Machine          { return v }
func (v *vm) Health() vmm.Health                { return vmm.Health{} }
func (v *vm) Facts() vmm.HostFacts              { return vmm.HostFacts{Arch: "sandboxtest"} }
func (v *vm) Secrets() process.Secrets          { return v.secrets }
func (v *vm) Stages() map[string]time.Duration  { return nil }
func (v *vm) CPU() time.Duration                { return 0 }
func (v *vm) Confined() bool                    { return false }
func (v *vm) Cgroup() control.Cgroup            { return control.Cgroup{} }
func (v *vm) Disk() process.Disk                { return v.disk }
func (v *vm) Parts() instance.Parts             { return v.parts }
func (v *vm) Begun() time.Time                  { return v.begun }
func (v *vm) Faults() (*pager.Stats, bool)      { return &pager.Stats{}, v.restored }
func (v *vm) StartFaults() (*pager.Stats, bool) { return v.Faults() }
func (v *vm) SpaceProblem() string              { return "" }
func (v *vm) KeepRunning() (release func())     { return func() {} }
func (v *vm) Caches() bool                      { return v.restored && v.vms.Pages > 0 }
func (v *vm) ListenServices() error             { return nil }
func (v *vm) CloseToo(c io.Closer)              { v.closers = append(v.closers, c) }

// SetDiskRoom implements process.VM. A write beyond it fails here, and waits in a real VM.
func (v *vm) SetDiskRoom(more int64) error {
	taken, err := v.disk.Allocated()
	v.room.Store(taken + more)
	return err
}

// WakeFailures implements process.VM. There are no hooks.
func (v *vm) WakeFailures() []guest.HookFailure { return nil }

// Timing implements process.VM.
func (v *vm) Timing() (entry, ready time.Duration) { return v.ready, v.ready }

// Connections implements process.VM.
func (v *vm) Connections() (open, ever uint64) { return v.ports.Uses() }

// Agent implements process.VM.
func (v *vm) Agent(ctx context.Context) (*guest.Client, error) {
	return guest.Dial(ctx, guest.IdleDialer(v.parts.Socket))
}

// WhileRunning implements process.VM.
func (v *vm) WhileRunning(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-v.ended:
			cancel(vmm.ErrEnded)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// Explain implements process.VM.
func (v *vm) Explain(_ context.Context, err error) error {
	select {
	case <-v.ended:
		return &instance.EndedError{Exit: v.exit}
	default:
		return err
	}
}

// noHooks is the result of a run of no hooks.
type noHooks struct{}

func (noHooks) After(context.Context)       {}
func (noHooks) Failed() []guest.HookFailure { return nil }

// RunHooksBefore implements process.VM.
func (v *vm) RunHooksBefore(context.Context, guest.HookEvent, spec.HookPolicy) (process.Hooks, error) {
	return noHooks{}, nil
}

// NewIdentity implements process.VM. A guest boots with the VM's host name already.
func (v *vm) NewIdentity(context.Context) error { return nil }

// ServeSecrets implements process.VM. Values do not reach the guest.
func (v *vm) ServeSecrets(context.Context) error { return nil }

// SealFrozen implements process.VM.
func (v *vm) SealFrozen(ctx context.Context, newTop string, _ guest.HookLimits, recorded func(disk.Stack) error) (
	sealed disk.Stack, frozen time.Duration, failures []guest.HookFailure, err error) {
	begin := time.Now()
	_, resume := v.guest.Pause()
	defer resume()
	sealed = v.disk.Stack()
	if err = v.disk.Prepare(newTop); err == nil {
		_, err = v.disk.SealThen(ctx, newTop, recorded)
	}
	return sealed, time.Since(begin), nil, err
}

// Capture implements process.VM.
func (v *vm) Capture(ctx context.Context, o instance.CaptureOptions) (c *instance.Capture, err error) {
	if err := v.fail("capture"); err != nil {
		return nil, err
	}
	if err := v.disk.Prepare(o.NewTop); err != nil {
		return nil, fmt.Errorf("preparing the disk's next layer: %w", err)
	}
	begin := time.Now()
	files, resume := v.guest.Pause()
	defer func() {
		if err != nil || o.Live {
			resume()
		}
	}()
	if o.Still != nil {
		if err := o.Still(); err != nil {
			return nil, err
		}
	}
	memory, err := some(files, true)
	if err != nil {
		return nil, err
	}
	if v.outside != nil {
		if err := v.outside.Capture(o.ID, o.Live); err != nil {
			return nil, fmt.Errorf("capturing the guest: %w", err)
		}
	}
	c = &instance.Capture{ID: o.ID, Dir: o.Dir, Disk: v.disk.Stack(), CaptureCosts: instance.CaptureCosts{Raw: uint64(len(memory)), Changed: 1, Shareable: 1}}
	if _, err := v.disk.Seal(ctx, o.NewTop); err != nil {
		return nil, fmt.Errorf("sealing the disk: %w", err)
	}
	if err := o.Sealed(v.disk.Stack()); err != nil {
		return nil, err
	}
	if o.Live {
		resume()
		if o.Resumed != nil {
			o.Resumed()
		}
	}
	c.Pause = time.Since(begin)
	begin = time.Now()
	if err := v.disk.Flush(); err != nil {
		return nil, fmt.Errorf("flushing the disk: %w", err)
	}
	if o.Fork != nil {
		image := forkImage{memory, o.Labels[instance.LabelVolumes]}
		if err := image.give(func(f *os.File) error { return o.Fork(f, c) }); err != nil {
			return nil, err
		}
	}
	facts, err := json.Marshal(v.Facts())
	if err != nil {
		return nil, err
	}
	want := snapshot.Spec{
		ID: o.ID, Sandbox: v.parts.Spec.Name, VCPUs: v.parts.Spec.VCPUs, Image: o.Image, Kernel: o.Kernel, Labels: o.Labels,
		Disks:    []snapshot.Disk{{Name: instance.DeviceDisk, Size: uint64(v.disk.Size()), Layers: o.Names(c.Disk)}},
		Host:     map[string]string{instance.FactsKey: string(facts)},
		Payloads: []snapshot.Payload{{Name: "memory", Kind: memoryKind, Version: memoryVersion, Data: memory}},
		Memory:   noise(v.vms.Pages),
	}
	if v.vms.Deltas && v.base != "" {
		if want.Base, err = snapshot.Open(v.base); err != nil && !errors.Is(err, snapshot.ErrNotFound) {
			return nil, err
		}
		if want.Base != nil {
			defer want.Base.Close()
			want.Changed = guestmem.NewPageSet(uint64(max(v.vms.Pages, 1)))
		}
	}
	info, err := snapshot.Create(ctx, o.Dir, want)
	if err != nil {
		return nil, err
	}
	v.base = o.Dir
	c.Save, c.Manifest, c.Stored = time.Since(begin), info.Manifest, info.SizeBytes
	v.goOn = resume
	return c, nil
}

// noise is the RAM of a snapshot: so many pages that do not compress.
type noise int

// Slots implements snapshot.MemorySource.
func (n noise) Slots() []snapshot.Slot {
	const pageSize = 4096
	return []snapshot.Slot{{Size: uint64(max(n, 1)) * pageSize}}
}

// NextData implements snapshot.MemorySource.
func (n noise) NextData(page uint64) (first, end uint64, err error) {
	return page, max(page, uint64(n)), nil
}

// ReadPages implements snapshot.MemorySource.
func (n noise) ReadPages(page uint64, p []byte) error {
	clear(p)
	if n > 0 {
		_, _ = rand.NewChaCha8([32]byte{byte(page), byte(page >> 8)}).Read(p) // it never fails
	}
	return nil
}

// MissedPages implements process.VM.
func (v *vm) MissedPages() (missed []uint64) {
	if v.Caches() {
		for page := range v.vms.Pages {
			missed = append(missed, uint64(page))
		}
	}
	return missed
}

// give calls f with a file that has the image.
func (i forkImage) give(f func(*os.File) error) error {
	fd, err := unix.MemfdCreate("fork", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("making the image of a fork: %w", err)
	}
	file := os.NewFile(uintptr(fd), "fork")
	defer file.Close()
	if err := json.NewEncoder(file).Encode(i); err != nil {
		return fmt.Errorf("making the image of a fork: %w", err)
	}
	return f(file)
}

// Continue implements process.VM.
func (v *vm) Continue() error {
	v.goOn()
	return nil
}

// Close implements process.VM. It may be called twice.
func (v *vm) Close() error { return v.close() }

func (v *vm) closeOnce() error {
	v.end(vmm.Exit{Reason: vmm.Stopped, VCPU: -1}, nil)
	if v.goOn != nil {
		v.goOn() // waiting commands find that they cannot write
	}
	var errs []error
	if v.ports != nil {
		errs = append(errs, v.ports.Close())
	}
	if v.outside != nil {
		errs = append(errs, v.outside.Close())
	}
	for _, c := range v.closers {
		errs = append(errs, c.Close())
	}
	if v.guest != nil {
		_, resume := v.guest.Pause() // no command writes any more
		defer resume()
	}
	if v.disk != nil {
		errs = append(errs, v.disk.Close())
	}
	return errors.Join(append(errs, v.secrets.Close())...)
}
