package process

import (
	"context"
	"io"
	"time"

	virtionet "github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/limits"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot/pager"
	"github.com/drowse-vm/drowse/vmm"
)

// Machines make the VMs of processes: those of package instance, or of sandboxtest.
type Machines interface {
	// Admit waits for room in the host's memory for a VM of mib MiB that wakes or boots, and holds it until
	// release: see limits.AdmitMemory.
	Admit(ctx context.Context, dir string, mib int, wake bool) (release func() error, err error)
	// Format makes the disk of a new VM in the file path, with size bytes.
	Format(ctx context.Context, layers, path string, size int64) (disk.Stack, error)
	// Start makes a VM that runs: from the parts' image of a fork if there is one, else from the snapshot
	// directory if not empty, else by a boot. With an image, snapshot is that of the fork and may not exist yet.
	Start(ctx context.Context, p instance.Parts, snapshot string, o instance.RestoreOptions) (VM, error)
	// Network makes the host's end of a VM's link. It returns with the TAP device, and makes the rest in the background.
	Network(network.Config) (Network, error)
}

// VM is one VM in this process. See instance.Instance for the methods.
type VM interface {
	Machine() Machine
	// Secrets are those that the guest reads.
	Secrets() Secrets
	Disk() Disk
	Parts() instance.Parts
	Agent(context.Context) (*guest.Client, error)

	Begun() time.Time
	Timing() (entry, ready time.Duration)
	Faults() (stats *pager.Stats, restored bool)
	// StartFaults are Faults as of the end of the start or later.
	StartFaults() (stats *pager.Stats, restored bool)
	Connections() (open, ever uint64)
	WakeFailures() []guest.HookFailure
	SpaceProblem() string

	WhileRunning(context.Context) (context.Context, context.CancelFunc)
	Explain(context.Context, error) error
	KeepRunning() (release func())
	// SetDiskRoom lets the disk of a VM with Parts.DiskRoom take so many bytes more of the host than now.
	SetDiskRoom(more int64) error
	RunHooksBefore(context.Context, guest.HookEvent, spec.HookPolicy) (Hooks, error)
	NewIdentity(context.Context) error
	ServeSecrets(context.Context) error
	ListenServices() error

	Capture(context.Context, instance.CaptureOptions) (*instance.Capture, error)
	SealFrozen(ctx context.Context, newTop string, l guest.HookLimits, recorded func(disk.Stack) error) (disk.Stack, time.Duration,
		[]guest.HookFailure, error)
	Continue() error
	Caches() bool
	MissedPages() []uint64
	// CPU is the processor time that the VM has used in other processes than this one.
	CPU() time.Duration
	// Confined reports that the guest is in a confined process.
	Confined() bool
	// Cgroup returns counters of that process.
	Cgroup() control.Cgroup

	CloseToo(io.Closer)
	Close() error
}

// Disk is the writable disk of a VM: see disk.Disk.
type Disk interface {
	Flush() error
	Size() int64
	// Data is how many bytes of the top layer have data.
	Data() int64
	Stack() disk.Stack
	Substitute(layers []string, by string) error
}

// Machine is the machine of a VM: see vmm.Machine.
type Machine interface {
	Done() <-chan struct{}
	Wait(context.Context) (vmm.Exit, error)
	Fail(error)
	Health() vmm.Health
	Facts() vmm.HostFacts
	// Stages are the durations of the steps that it has gone through, by their names: see vmm.Stage.
	Stages() map[string]time.Duration
}

// Secrets are the values of a VM's secrets: see secrets.Store.
type Secrets interface {
	Set(s secrets.Secret, value []byte) error
	Remove(name string) bool
	List() []secrets.State
}

// Network is the host's end of a VM's link: see network.Network. Close comes after that of the VM.
type Network interface {
	TAP() virtionet.Backend
	Wait(context.Context) error
	Info() *spec.NetworkInfo
	Stats() (spec.NetworkStats, error)
	Bytes() (in, out uint64)
	// CPU is the processor time that the network has used in other processes than this one.
	CPU() time.Duration
	LastPacket() (ever bool, ago time.Duration)
	SetPolicy(*netpolicy.Policy) error
	SetTags([]string) error
	Warn(string)
	RecentEvents(follow bool) (events []spec.NetEvent, f <-chan spec.NetEvent, stop func())
	Flows(ctx context.Context, follow bool, f func([]netpolicy.FlowRecord) error) error
	SetUp() time.Duration
	Done() <-chan struct{}
	Close() error
}

// Hooks are hooks of the guest that ran before an operation: see Instance.RunHooksBefore.
type Hooks interface {
	After(context.Context)
	Failed() []guest.HookFailure
}

// kvmMachines makes the VMs of package instance, and their networks of package network.
type kvmMachines struct{}

func (kvmMachines) Admit(ctx context.Context, dir string, mib int, wake bool) (func() error, error) {
	return limits.AdmitMemory(ctx, dir, mib, wake)
}

func (kvmMachines) Format(ctx context.Context, layers, path string, size int64) (disk.Stack, error) {
	return disk.FormatExt4(ctx, layers, path, size)
}

func (kvmMachines) Start(ctx context.Context, p instance.Parts, snapshot string, o instance.RestoreOptions) (VM, error) {
	var in *instance.Instance
	var err error
	switch {
	case p.RAM != nil:
		in, err = instance.RestoreFork(ctx, p, snapshot, o)
	case snapshot != "":
		in, err = instance.Restore(ctx, p, snapshot, o)
	default:
		in, err = instance.Boot(ctx, p)
	}
	if err != nil {
		return nil, err
	}
	return kvmVM{in}, nil
}

func (kvmMachines) Network(c network.Config) (Network, error) {
	n, err := network.New(c)
	if err != nil {
		return nil, err
	}
	return n, nil
}

// kvmVM adapts an Instance to VM.
type kvmVM struct{ *instance.Instance }

func (v kvmVM) Machine() Machine { return kvmMachine{v.Instance.Machine()} }

func (v kvmVM) StartFaults() (*pager.Stats, bool) { return v.Faults() }

func (v kvmVM) Disk() Disk { return v.Instance.Disk() }

// CPU is nothing: the VM is in this process.
func (v kvmVM) CPU() time.Duration { return 0 }

func (v kvmVM) Confined() bool { return false }

func (v kvmVM) Cgroup() control.Cgroup { return control.Cgroup{} }

type kvmMachine struct{ *vmm.Machine }

func (m kvmMachine) Stages() map[string]time.Duration { return m.Machine.Stages().ByName() }

func (v kvmVM) Secrets() Secrets { return v.Instance.Machine().Secrets() }

func (v kvmVM) RunHooksBefore(ctx context.Context, e guest.HookEvent, over spec.HookPolicy) (Hooks, error) {
	return v.Instance.RunHooksBefore(ctx, e, over)
}
