package sandbox

import (
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Host is a directory of sandboxes, and how their VMs are started. Any number of processes may use one directory at
// once. Its methods, and those of its sandboxes, may be called from any goroutine.
type Host struct {
	// State is what is kept: records, metadata, snapshots, volumes, events.
	State    *state.Store
	launcher pool.Launcher
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
	return &Host{State: h.State, launcher: l}
}

// WithHostHooks is the host with hooks of the embedding program: state.Store.WithHostHooks.
func (h *Host) WithHostHooks(list ...state.HostHook) *Host {
	return &Host{State: h.State.WithHostHooks(list...), launcher: h.launcher}
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
