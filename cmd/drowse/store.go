//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/traces"
)

// tracing is the state of traces, which only commands on this host have. Both are nil until app.traces makes them.
type tracing struct {
	provider *sdktrace.TracerProvider
	spans    *traces.Traces
}

// store opens the store of the state directory. Only commands with makesState may make one. Any other would find
// it empty, and leave an empty directory behind a misspelt name.
func (a *app) store() (*sandbox.Host, error) {
	if _, err := os.Stat(a.state); errors.Is(err, fs.ErrNotExist) && !a.mayMake {
		return nil, fmt.Errorf("there is no state directory %s: name yours with --state or $DROWSE_STATE; `drowse run`, `kernel build` and `image build` make a new one", a.state)
	}
	h, err := sandbox.Open(a.state)
	if err != nil {
		return nil, err
	}
	// This is no launcher of VMs, but knows the values of secrets.
	l := pool.Launcher{Secrets: a.secretsFrom(h, false)}
	if processes != nil {
		l.Agent, l.Processes = agentPath(), processes
	}
	h.Cluster = clusterOf(h.State.Dir())
	return h.With(l), nil
}

// processes are the VMs of tests without /dev/kvm; nil for real ones.
var processes pool.Processes

// agentName and vmmName are the files of the guest's agent and of the program of a VM's process. They lie beside
// this program.
const (
	agentName = "drowse-agent"
	vmmName   = "drowse-vmm"
)

// vmmCommand returns the program of a VM's process. Tests are one program and replace it.
var vmmCommand = func() ([]string, error) {
	vmm := beside(vmmName)
	if _, err := os.Stat(vmm); err != nil {
		return nil, fmt.Errorf("finding the program of a VM's process: %w: build it with `make build`, and put it beside drowse", err)
	}
	return []string{vmm}, nil
}

// launcher returns the launcher of VM processes.
func (a *app) launcher() (pool.Launcher, error) {
	agent := agentPath()
	if _, err := os.Stat(agent); err != nil {
		return pool.Launcher{}, fmt.Errorf("finding the guest's agent: %w: build it with `make build`, put it beside drowse, or name it in $DROWSE_AGENT", err)
	}
	if processes != nil {
		return pool.Launcher{Agent: agent, Processes: processes}, nil
	}
	vmm, err := vmmCommand()
	return pool.Launcher{Command: vmm, Agent: agent, Supervised: true}, err
}

// agentPath returns the path of the guest's agent.
func agentPath() string { return cmp.Or(os.Getenv("DROWSE_AGENT"), beside(agentName)) }

// beside returns the path of a file beside this program, or the bare name if the program's own path is unknown.
func beside(name string) string {
	self, err := os.Executable()
	if err != nil {
		return name
	}
	return filepath.Join(filepath.Dir(self), name)
}

// onHost returns a command on the state directory's host.
func (a *app) onHost(do func(*cobra.Command, []string, *sandbox.Host) error) runE {
	return opened(a.store, do)
}

// launching returns the host with a launcher of VMs and with tracing.
func (a *app) launching(ctx context.Context) (*sandbox.Host, error) {
	h, err := a.store()
	if err != nil {
		return nil, err
	}
	l, err := a.launcher()
	if err != nil {
		return nil, err
	}
	l.Secrets = a.secretsFrom(h, false)
	return a.traced(ctx, h.With(l))
}

// images opens the image store of the state directory.
func (a *app) images() (*image.Store, error) {
	s, err := a.store()
	if err != nil {
		return nil, err
	}
	return image.OpenStore(s.State.ImageDir())
}
