package fleet

import (
	"context"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// VMs are what a Fleet works on. Their contracts are those of the methods of sandbox.Store, errors included: a sleep
// that has begun is waited for by a wake, what is there already is not made twice, and what fails has changed nothing.
// All methods may be called from any goroutine.
type VMs interface {
	// Run makes a VM and boots it: Host.Create.
	Run(ctx context.Context, spec sandbox.Spec, label state.Metadata) (control.Report, error)
	Start(ctx context.Context, name string) (control.Report, error)
	Wake(ctx context.Context, name string) (control.Report, error)
	// BringUp is Wake that never takes a VM back: Sandbox.BringUp.
	BringUp(ctx context.Context, name string) (control.Report, error)
	SleepWith(ctx context.Context, name string, o sandbox.SleepOptions) (control.SleepResult, error)
	SnapshotWith(ctx context.Context, name string, o sandbox.SnapshotOptions) (control.SleepResult, error)
	// Promote copies what the metadata names to the host: Sandbox.Promote.
	Promote(ctx context.Context, name string) ([]control.Promoted, error)
	RestoreTo(ctx context.Context, name, snapshot string) (*state.Record, error)
	Fork(ctx context.Context, name string, o sandbox.ForkOptions) (sandbox.ForkResult, error)
	Rename(ctx context.Context, name, to string) error
	RemoveFreed(ctx context.Context, name string, force bool) (state.Freed, error)

	Get(name string) (*state.Record, error)
	List() ([]*state.Record, error)
	FileStamps() (map[string]string, error)
	Metadata(name string) (state.Metadata, error)
	SetMetadata(ctx context.Context, name string, change func(l *state.Metadata, unreadable error) error) (state.Metadata, error)
	TellExpired(ctx context.Context, name string) error
	SetSpec(ctx context.Context, name string, c spec.Changes) error

	Snapshots() ([]state.SnapshotInfo, error)
	TagSnapshot(prefix string, tags []string) (state.SnapshotInfo, error)
	Sweep(ctx context.Context) (state.Freed, error)
	// SweepAbandoned is Sweep that deletes the disks as well that VMs have left which were taken back:
	// state.Store.SweepAbandoned.
	SweepAbandoned(ctx context.Context) (state.Freed, error)
	Audit(ctx context.Context, name string, o audit.ReadOptions, f func(audit.Entry) error) (audit.Trailer, error)
}

// hostVMs are the VMs of a host.
type hostVMs struct {
	*state.Store
	host     *sandbox.Host
	launcher func() (pool.Launcher, error)
}

// OfHost are the VMs of a host. l is how their processes are started.
func OfHost(h *sandbox.Host, l pool.Launcher) VMs {
	return OfHostLazily(h, func() (pool.Launcher, error) { return l, nil })
}

// OfHostLazily is OfHost for callers that may never start a VM: launcher is called when one is to be started.
func OfHostLazily(h *sandbox.Host, launcher func() (pool.Launcher, error)) VMs {
	return hostVMs{h.State, h, launcher}
}

// start does what starts a VM.
func start[T any](v hostVMs, name string, do func(*sandbox.Sandbox) (T, error)) (none T, err error) {
	l, err := v.launcher()
	if err != nil {
		return none, err
	}
	return do(v.host.With(l).Sandbox(name))
}

func (v hostVMs) Run(ctx context.Context, spec sandbox.Spec, m state.Metadata) (control.Report, error) {
	l, err := v.launcher()
	if err != nil {
		return control.Report{}, err
	}
	var rep control.Report
	_, err = v.host.With(l).Create(ctx, spec, sandbox.CreateOptions{Metadata: &m, Report: &rep})
	return rep, err
}

func (v hostVMs) Start(ctx context.Context, name string) (control.Report, error) {
	return start(v, name, func(b *sandbox.Sandbox) (control.Report, error) { return b.Start(ctx, sandbox.StartOptions{}) })
}

func (v hostVMs) Wake(ctx context.Context, name string) (control.Report, error) {
	return start(v, name, func(b *sandbox.Sandbox) (control.Report, error) { return b.Wake(ctx) })
}

func (v hostVMs) BringUp(ctx context.Context, name string) (control.Report, error) {
	return start(v, name, func(b *sandbox.Sandbox) (control.Report, error) { return b.BringUp(ctx) })
}

func (v hostVMs) Fork(ctx context.Context, name string, o sandbox.ForkOptions) (sandbox.ForkResult, error) {
	return start(v, name, func(b *sandbox.Sandbox) (sandbox.ForkResult, error) { return b.Fork(ctx, o) })
}

func (v hostVMs) SleepWith(ctx context.Context, name string, o sandbox.SleepOptions) (control.SleepResult, error) {
	return v.host.Sandbox(name).Sleep(ctx, o)
}

func (v hostVMs) SnapshotWith(ctx context.Context, name string, o sandbox.SnapshotOptions) (control.SleepResult, error) {
	return v.host.Sandbox(name).Snapshot(ctx, o)
}

func (v hostVMs) Promote(ctx context.Context, name string) ([]control.Promoted, error) {
	return v.host.Sandbox(name).Promote(ctx)
}

func (v hostVMs) RemoveFreed(ctx context.Context, name string, force bool) (freed state.Freed, err error) {
	err = v.host.Sandbox(name).Delete(ctx, sandbox.DeleteOptions{Force: force, Freed: &freed})
	return freed, err
}

func (v hostVMs) SetSpec(ctx context.Context, name string, c spec.Changes) error {
	return v.host.Sandbox(name).SetSpec(ctx, c)
}
