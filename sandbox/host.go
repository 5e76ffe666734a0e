package sandbox

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
	"github.com/drowse-vm/drowse/sandbox/lease"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Host is a directory of sandboxes, with a way to start their VMs. Any number of processes may use one directory
// at once. Any goroutine may call its methods and those of its sandboxes.
type Host struct {
	// State is the stored state: records, metadata, snapshots, volumes, events.
	State *state.Store
	// Cluster, if not nil, is this host among others with which it shares sandboxes: cluster.Node. It must not change
	// once the host is in use.
	Cluster lease.Cluster

	launcher  pool.Launcher
	observers []control.Observer
}

// Open opens or makes the directory of a host. The host can inspect sandboxes, and use those that run. With adds a
// way to start VMs.
func Open(dir string) (*Host, error) {
	s, err := state.OpenStore(dir)
	if err != nil {
		return nil, err
	}
	return &Host{State: s}, nil
}

// With returns the host with a launcher that starts its VMs.
func (h *Host) With(l pool.Launcher) *Host {
	with := *h
	with.launcher = l
	return &with
}

// WithHostHooks returns the host with hooks of the embedding program: see state.Store.WithHostHooks.
func (h *Host) WithHostHooks(list ...hosthooks.Func) *Host {
	with := *h
	with.State = h.State.WithHostHooks(list...)
	return &with
}

// WithObservers returns the host with additional observers of operations on its sandboxes: for traces and metrics.
func (h *Host) WithObservers(list ...control.Observer) *Host {
	with := *h
	with.observers = slices.Concat(h.observers, list)
	return &with
}

// begin tells observers that an operation begins. The function that it returns completes the operation's data and
// tells them that it has ended.
func (h *Host) begin(ctx context.Context, kind control.OperationKind, name string) (context.Context, func(control.Operation)) {
	if len(h.observers) == 0 {
		return ctx, func(control.Operation) {}
	}
	begun := time.Now()
	ends := make([]func(*control.Operation), len(h.observers))
	for i, o := range h.observers {
		ctx, ends[i] = o(ctx, kind, name)
	}
	return ctx, func(op control.Operation) {
		op.Kind, op.Begun, op.Took = kind, begun, time.Since(begun)
		op.Sandbox = cmp.Or(op.Report.Name, name) // the report has a random name
		for _, ended := range slices.Backward(ends) {
			ended(&op)
		}
	}
}

// Sandbox returns the sandbox of a name, whether it exists or not: if not, its methods return ErrNotFound.
func (h *Host) Sandbox(name string) *Sandbox { return &Sandbox{host: h, name: name} }

// Sandbox is a VM of a host, known by its name. It needs no Close.
type Sandbox struct {
	host *Host
	name string
}

// Name returns the sandbox's name.
func (b *Sandbox) Name() string { return b.name }
