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
	// Run makes a VM and boots it: Store.RunWithMetadata.
	Run(ctx context.Context, spec sandbox.Spec, label state.Metadata) (control.Report, error)
	Start(ctx context.Context, name string) (control.Report, error)
	Wake(ctx context.Context, name string) (control.Report, error)
	// BringUp is Wake that never takes a VM back: Store.BringUp.
	BringUp(ctx context.Context, name string) (control.Report, error)
	SleepWith(ctx context.Context, name string, o sandbox.SleepOptions) (control.SleepResult, error)
	SnapshotWith(ctx context.Context, name string, o sandbox.SnapshotOptions) (control.SleepResult, error)
	// Promote copies what the metadata names to the host: Store.Promote.
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
	// Store.SweepAbandoned.
	SweepAbandoned(ctx context.Context) (state.Freed, error)
	Audit(ctx context.Context, name string, o audit.ReadOptions, f func(audit.Entry) error) (audit.Trailer, error)
}

// storeVMs are the VMs of a store, with what their processes are started by.
type storeVMs struct {
	*sandbox.Store
	launcher func() (pool.Launcher, error)
}

// OfStore are the VMs of a store. l is how their processes are started.
func OfStore(s *sandbox.Store, l pool.Launcher) VMs {
	return storeVMs{s, func() (pool.Launcher, error) { return l, nil }}
}

// OfStoreLazily is OfStore for callers that may never start a VM: launcher is called when one is to be started.
func OfStoreLazily(s *sandbox.Store, launcher func() (pool.Launcher, error)) VMs {
	return storeVMs{s, launcher}
}

func (v storeVMs) Run(ctx context.Context, spec sandbox.Spec, label state.Metadata) (control.Report, error) {
	l, err := v.launcher()
	if err != nil {
		return control.Report{}, err
	}
	return v.RunWithMetadata(ctx, l, spec, &label)
}

func (v storeVMs) Start(ctx context.Context, name string) (control.Report, error) {
	l, err := v.launcher()
	if err != nil {
		return control.Report{}, err
	}
	return v.Store.Start(ctx, l, name)
}

func (v storeVMs) Wake(ctx context.Context, name string) (control.Report, error) {
	l, err := v.launcher()
	if err != nil {
		return control.Report{}, err
	}
	return v.Store.Wake(ctx, l, name)
}

func (v storeVMs) BringUp(ctx context.Context, name string) (control.Report, error) {
	l, err := v.launcher()
	if err != nil {
		return control.Report{}, err
	}
	return v.Store.BringUp(ctx, l, name)
}

func (v storeVMs) Fork(ctx context.Context, name string, o sandbox.ForkOptions) (sandbox.ForkResult, error) {
	l, err := v.launcher()
	if err != nil {
		return sandbox.ForkResult{}, err
	}
	return v.Store.Fork(ctx, l, name, o)
}
