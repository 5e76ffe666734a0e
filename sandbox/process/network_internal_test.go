package process

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"testing"
	"time"

	virtionet "github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// linkMachines make VMs and networks that only note what is closed.
type linkMachines struct {
	Machines
	vm, network error
	closed      []string
}

func (m *linkMachines) Network(network.Config) (Network, error) {
	if m.network != nil {
		return nil, m.network
	}
	return &notedNetwork{m: m}, nil
}

func (m *linkMachines) Start(_ context.Context, p instance.Parts, _ string, _ instance.RestoreOptions) (VM, error) {
	if err := errors.Join(m.vm, p.LinkReady(context.Background())); err != nil {
		return nil, err
	}
	return &notedVM{m: m}, nil
}

type notedNetwork struct {
	Network
	m *linkMachines
}

func (n *notedNetwork) TAP() virtionet.Backend     { return nil }
func (n *notedNetwork) Bytes() (in, out uint64)    { return 0, 0 }
func (n *notedNetwork) CPU() time.Duration         { return 2 * time.Hour }
func (n *notedNetwork) Wait(context.Context) error { return nil }
func (n *notedNetwork) Close() error               { n.m.closed = append(n.m.closed, "network"); return nil }

type notedVM struct {
	VM
	m    *linkMachines
	more []io.Closer
}

func (v *notedVM) CPU() time.Duration   { return 3 * time.Hour }
func (v *notedVM) Confined() bool       { return false }
func (v *notedVM) CloseToo(c io.Closer) { v.more = append(v.more, c) }
func (v *notedVM) Close() error {
	v.m.closed = append(v.m.closed, "VM")
	for _, c := range v.more {
		_ = c.Close()
	}
	return nil
}

func TestUsed_processor_time_is_that_of_the_keeper_its_guest_and_its_network(t *testing.T) {
	m := &linkMachines{}
	p := &process{in: &notedVM{m: m}}
	if used := p.usedCPU(); used < 3*time.Hour || used > 4*time.Hour {
		t.Errorf("without a network: %v", used)
	}
	p.net = &notedNetwork{m: m}
	if used := p.usedCPU(); used < 5*time.Hour || used > 6*time.Hour {
		t.Errorf("with one: %v", used)
	}
}

func TestStart_that_fails_closes_the_VM_and_then_its_network(t *testing.T) {
	bad := errors.New("made by the test")
	for name, c := range map[string]struct {
		machines linkMachines
		wanted   bool
		closed   []string
	}{
		"no network":         {linkMachines{network: bad}, true, nil},
		"no VM":              {linkMachines{vm: bad}, true, []string{"network"}},
		"nobody wants it":    {linkMachines{}, false, []string{"VM", "network"}},
		"a start that lasts": {linkMachines{}, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := state.OpenStore(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			r := &state.Record{
				Version: state.RecordVersion, ID: spec.NewID(), Phase: state.Stopped, Created: time.Now(),
				Spec: spec.VM{Name: "a", VCPUs: 1, Network: spec.NetworkTAP},
			}
			st, err := disk.Create(s.LayerDir()+"/"+r.NewLayer(), 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			r.Disk = s.Relative(st)
			l, err := s.Create(r)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Release()
			m := &c.machines
			p := &process{store: s, r: r, machines: m, log: slog.New(slog.DiscardHandler)}
			err = p.start(t.Context(), ServeOptions{Wanted: func() bool { return c.wanted }})
			if lasts := name == "a start that lasts"; lasts != (err == nil) || !slices.Equal(m.closed, c.closed) {
				t.Errorf("it ends with %v, and %q are closed, want %q", err, m.closed, c.closed)
			}
			if err == nil {
				if err := p.close(); err != nil || !slices.Equal(m.closed, []string{"VM", "network"}) {
					t.Errorf("at the end %q are closed, %v", m.closed, err)
				}
			}
		})
	}
}
