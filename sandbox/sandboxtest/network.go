package sandboxtest

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	virtionet "github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/network"
	"github.com/drowse-vm/drowse/sandbox/process"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// link is a network without packets. Its policy is compiled: process.Network.
type link struct {
	vms     *VMs
	name    string
	address netip.Addr
	ended   chan struct{}

	mu       sync.Mutex // guards warnings
	warnings []string
}

// addresses counts the assigned addresses.
var addresses atomic.Uint32

// Network implements process.Machines.
func (m machines) Network(c network.Config) (process.Network, error) {
	n := addresses.Add(1)
	address := netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)})
	out := &link{vms: m.v, name: c.Name, address: address, ended: make(chan struct{})}
	if err := out.SetPolicy(c.Policy); err != nil {
		return nil, err
	}
	return out, nil
}

// Close implements process.Network.
func (n *link) Close() error {
	close(n.ended)
	return nil
}

func (n *link) SetPolicy(p *netpolicy.Policy) error {
	if err := n.vms.fail("policy", n.name); err != nil {
		return err
	}
	_, err := netpolicy.Compile(p, netpolicy.Identity{Address4: n.address}, netpolicy.Environment{})
	return err
}

func (n *link) Info() *spec.NetworkInfo {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &spec.NetworkInfo{TAP: "test", Address: n.address, Warnings: slices.Clone(n.warnings)}
}

func (n *link) Warn(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.warnings = append(n.warnings, text)
}

func (n *link) Stats() (spec.NetworkStats, error) {
	return spec.NetworkStats{Name: n.name, NetworkInfo: *n.Info(), Counters: []netpolicy.Counter{}}, nil
}

func (n *link) TAP() virtionet.Backend                     { return nil }
func (n *link) Wait(context.Context) error                 { return nil }
func (n *link) Bytes() (in, out uint64)                    { return 0, 0 }
func (n *link) LastPacket() (ever bool, ago time.Duration) { return false, 0 }
func (n *link) CPU() time.Duration                         { return 0 }
func (n *link) SetTags([]string) error                     { return nil }
func (n *link) SetUp() time.Duration                       { return 0 }
func (n *link) Done() <-chan struct{}                      { return n.ended }

// RecentEvents implements process.Network. There are no events.
func (n *link) RecentEvents(follow bool) (events []spec.NetEvent, f <-chan spec.NetEvent, stop func()) {
	if follow {
		f = make(chan spec.NetEvent)
	}
	return nil, f, func() {}
}

// Flows implements process.Network with the flows of VMs.Flows.
func (n *link) Flows(ctx context.Context, follow bool, f func([]netpolicy.FlowRecord) error) error {
	if flows := n.vms.Flows; flows != nil {
		if err := f(flows(n.name)); err != nil {
			return err
		}
	}
	if follow {
		select {
		case <-ctx.Done():
		case <-n.ended:
		}
	}
	return ctx.Err()
}
