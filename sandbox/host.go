package sandbox

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/hosthooks"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Host is a directory of sandboxes, and how their VMs are started. Any number of processes may use one directory at
// once. Its methods, and those of its sandboxes, may be called from any goroutine.
type Host struct {
	// State is what is kept: records, metadata, snapshots, volumes, events.
	State     *state.Store
	launcher  pool.Launcher
	observers []control.Observer
}

// Open opens or makes the directory of a host. The host can look at sandboxes, and use those that run; With says how it
// starts VMs.
func Open(dir string) (*Host, error) {
	s, err := state.OpenStore(dir)
	if err != nil {
		return nil, err
	}
	return &Host{State: s}, nil
}

// With is the host with what it starts VMs by.
func (h *Host) With(l pool.Launcher) *Host {
	with := *h
	with.launcher = l
	return &with
}

// WithHostHooks is the host with hooks of the embedding program: state.Store.WithHostHooks.
func (h *Host) WithHostHooks(list ...hosthooks.Func) *Host {
	with := *h
	with.State = h.State.WithHostHooks(list...)
	return &with
}

// WithObservers is the host with some more who are told of what is done with its sandboxes: for traces and metrics.
func (h *Host) WithObservers(list ...control.Observer) *Host {
	with := *h
	with.observers = slices.Concat(h.observers, list)
	return &with
}

// begin tells observers that an operation begins. What it returns tells them that it has ended, and completes what is
// said of it.
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
		op.Sandbox = cmp.Or(op.Report.Name, name) // a random one
		for _, ended := range slices.Backward(ends) {
			ended(&op)
		}
	}
}

// Sandbox is the sandbox of a name, whether there is one or not: what is done with it says so, by ErrNotFound.
func (h *Host) Sandbox(name string) *Sandbox { return &Sandbox{host: h, name: name} }

// Sandbox is a VM of a host, known by its name. It has nothing to be closed.
type Sandbox struct {
	host *Host
	name string
}

// Name is what it is called.
func (b *Sandbox) Name() string { return b.name }
