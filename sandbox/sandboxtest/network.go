package sandboxtest

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// network is a link without packets. Its policy is compiled: process.Network.
type network struct {
	vm      *vm
	address netip.Addr

	mu       sync.Mutex // guards warnings
	warnings []string
}

// addresses counts the assigned addresses.
var addresses atomic.Uint32

func newNetwork(v *vm) (*network, error) {
	n := addresses.Add(1)
	out := &network{vm: v, address: netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)})}
	return out, out.SetPolicy(v.parts.Spec.Policy)
}

func (n *network) SetPolicy(p *netpolicy.Policy) error {
	if err := n.vm.fail("policy"); err != nil {
		return err
	}
	_, err := netpolicy.Compile(p, netpolicy.Identity{Address4: n.address}, netpolicy.Environment{})
	return err
}

func (n *network) Info() *spec.NetworkInfo {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &spec.NetworkInfo{TAP: "test", Address: n.address, Warnings: slices.Clone(n.warnings)}
}

func (n *network) Warn(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.warnings = append(n.warnings, text)
}

func (n *network) Stats() (spec.NetworkStats, error) {
	return spec.NetworkStats{Name: n.vm.parts.Spec.Name, NetworkInfo: *n.Info(), Counters: []netpolicy.Counter{}}, nil
}

func (n *network) Bytes() (in, out uint64)                    { return 0, 0 }
func (n *network) LastPacket() (ever bool, ago time.Duration) { return false, 0 }
func (n *network) SetTags([]string) error                     { return nil }
func (n *network) SetUp() time.Duration                       { return 0 }
func (n *network) Done() <-chan struct{}                      { return n.vm.ended }

// RecentEvents implements process.Network. There are no events.
func (n *network) RecentEvents(follow bool) (events []spec.NetEvent, f <-chan spec.NetEvent, stop func()) {
	if follow {
		f = make(chan spec.NetEvent)
	}
	return nil, f, func() {}
}

// Flows implements process.Network with the flows of VMs.Flows.
func (n *network) Flows(ctx context.Context, follow bool, f func([]netpolicy.FlowRecord) error) error {
	if flows := n.vm.vms.Flows; flows != nil {
		if err := f(flows(n.vm.parts.Spec.Name)); err != nil {
			return err
		}
	}
	if follow {
		select {
		case <-ctx.Done():
		case <-n.vm.ended:
		}
	}
	return ctx.Err()
}
