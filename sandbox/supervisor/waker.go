package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// packetWaker wakes VMs for packets. The addresses of VMs lead to a device of the waker, by routes of lower
// priority than that of a running VM. So what arrives there is for a sleeping VM. If the VM's policy would let the
// packet in, the waker wakes the VM and puts the packet on the VM's own device. There the VM's programs judge it
// like any other. So the waker decides whom a packet may wake, and never what passes.
type packetWaker struct {
	log *slog.Logger
	// counters are those of the supervisor; nil, in tests, counts nothing.
	counters *Counters
	// activated is Options.Activated.
	activated func(Activation)
	// wake wakes a VM if it sleeps, and keeps it awake until the hold is released.
	wake func(ctx context.Context, name string) (hold, *spec.NetworkInfo, error)
	// send puts a frame on a VM's device.
	send            func(device string, frame []byte) error
	agents, agents6 netip.Prefix
	now             func() time.Time

	mu      sync.Mutex // guards what follows
	resting map[netip.Addr]*resting
	byName  map[string]guarded
	host    []netip.Addr // of this host: see look
	onLink  []netip.Prefix
	asked   quota // of the model, for packets of all VMs

	bringing sync.WaitGroup
}

// hold keeps a VM awake until it is released.
type hold interface{ Release() }

// guarded is a VM that a packet may wake.
type guarded struct {
	name     string
	address4 netip.Addr
	address6 netip.Addr // not valid without IPv6
	policy   *netpolicy.Policy
	tags     []string
}

// resting is an address of a guarded VM.
type resting struct {
	vm      guarded
	held    [][]byte // packets, without a link's header
	bytes   int
	waking  bool
	refused time.Time // when the VM could not be woken
	asked   quota     // of the model
}

// quota counts what is done in a second.
type quota struct {
	second time.Time
	n      int
}

// take reports whether one more of most is left.
func (q *quota) take(now time.Time, most int) bool {
	if now.Sub(q.second) >= time.Second {
		q.second, q.n = now, 0
	}
	q.n++
	return q.n <= most
}

// Bounds of the packets held for one address.
const (
	maxWakerHeld  = 64
	maxWakerBytes = 256 << 10
)

const (
	// maxJudged is for how many packets a second the waker asks the model, and maxJudgedOfOne to one address.
	maxJudged      = 2000
	maxJudgedOfOne = maxJudged / 8
	// restAfter is how long the waker leaves a VM alone that could not be woken.
	restAfter = 5 * time.Second
)

// guard sets the VMs that packets may wake.
func (g *packetWaker) guard(vms map[string]guarded) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.byName = maps.Clone(vms)
	there := map[netip.Addr]bool{}
	for _, name := range slices.Sorted(maps.Keys(vms)) {
		vm := vms[name]
		for _, a := range vm.addresses() {
			if there[a] {
				continue // two VMs may share an address: the first to wake has it
			}
			there[a] = true
			if r := g.resting[a]; r != nil && r.vm.name == vm.name {
				r.vm = vm
			} else if r == nil || !r.waking {
				g.resting[a] = &resting{vm: vm}
			}
		}
	}
	for a, r := range g.resting {
		if !there[a] && !r.waking {
			delete(g.resting, a)
		}
	}
}

// addresses returns the addresses that lead to the waker.
func (g *packetWaker) addresses() map[netip.Addr]bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := map[netip.Addr]bool{}
	for a := range g.resting {
		all[a] = true
	}
	return all
}

// addresses returns the addresses that lead to the waker while the VM has no device.
func (vm guarded) addresses() []netip.Addr {
	if vm.address6.IsValid() {
		return []netip.Addr{vm.address4, vm.address6}
	}
	return []netip.Addr{vm.address4}
}

// packet handles a packet that came to the waker. It does not keep p.
func (g *packetWaker) packet(ctx context.Context, p []byte) {
	_, dst, ok := packetEnds(p)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.resting[dst]
	if r == nil {
		return
	}
	if !r.waking {
		now := g.now()
		if now.Sub(r.refused) < restAfter || !g.opens(r, p, now) {
			g.dropped(1)
			return
		}
	}
	if len(r.held) >= maxWakerHeld || r.bytes+len(p) > maxWakerBytes {
		g.dropped(1)
		return
	}
	if g.counters != nil {
		g.counters.Held.Add(1)
	}
	r.held, r.bytes = append(r.held, append([]byte(nil), p...)), r.bytes+len(p)
	if r.waking {
		return
	}
	r.waking = true
	name := r.vm.name
	g.bringing.Go(func() { g.bring(ctx, name, dst, r) })
}

// dropped counts dropped packets.
func (g *packetWaker) dropped(n int) {
	if g.counters != nil {
		g.counters.Dropped.Add(uint64(n))
	}
}

// opens reports whether the policy of a VM would let in a packet that belongs to no flow. It is false while the
// waker is flooded. g.mu is held.
func (g *packetWaker) opens(r *resting, p []byte, now time.Time) bool {
	vm := r.vm
	if vm.policy == nil {
		return false
	}
	// A flood to one address must not keep packets from waking other VMs.
	if !r.asked.take(now, maxJudgedOfOne) || !g.asked.take(now, maxJudged) {
		return false
	}
	env := netpolicy.Environment{Host: g.host, OnLink: g.onLink, Endpoints: []netip.Prefix{g.agents, g.agents6}}
	for _, other := range g.byName {
		if len(other.tags) == 0 || len(env.Peers) > netpolicy.MaxPeers-2 {
			continue
		}
		for _, a := range other.addresses() {
			env.Peers = append(env.Peers, netpolicy.Peer{Address: a, Tags: other.tags})
		}
	}
	m := refmodel.New(vm.policy, netpolicy.Identity{Address4: vm.address4, Address6: vm.address6}, env)
	f := refmodel.Frame{Direction: netpolicy.Ingress, Bytes: frame(p)}
	// A packet with such a source came by that VM's own device: see link.GuardWaker.
	if src, _, ok := packetEnds(p); ok && (g.agents.Contains(src) || g.agents6.Contains(src)) {
		f.By = src
	}
	return m.Opens(f)
}

// look notes the addresses of this host and the ranges of its neighbours, which rules of a policy may mean. If they
// cannot be listed, those known before stay.
func (g *packetWaker) look() {
	host, err := netpolicy.HostAddresses()
	onLink, err2 := hostnet.OnLink()
	if err = errors.Join(err, err2); err != nil {
		g.log.Warn("the host's addresses are not known to what judges packets to sleeping VMs", "error", err)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.host, g.onLink = host, onLink
}

// bring wakes a VM and gives it the packets held for one of its addresses.
func (g *packetWaker) bring(ctx context.Context, name string, addr netip.Addr, r *resting) {
	ctx, cancel := context.WithTimeout(ctx, wakeTime)
	defer cancel()
	activation := Activation{VM: name, By: ByPacket, Came: g.now()}
	h, info, err := g.wake(ctx, name)
	activation.Awake = g.now()
	if err == nil {
		defer h.Release()
		if info.Address != addr && info.Address6 != addr {
			err = fmt.Errorf("VM %s has another address now: %v", name, info.Address)
		}
	}
	for {
		g.mu.Lock()
		held := r.held
		r.held, r.bytes = nil, 0
		if err != nil {
			r.refused = g.now()
		}
		if err != nil || len(held) == 0 {
			g.dropped(len(held))
			r.waking = false
			g.mu.Unlock()
			break
		}
		g.mu.Unlock()
		for i, p := range held {
			if err = g.send(info.TAP, frame(p)); err != nil {
				g.dropped(len(held) - i)
				err = fmt.Errorf("giving VM %s a packet that was held for it: %w", name, err)
				break
			}
		}
		if err == nil && g.activated != nil && activation.Delivered.IsZero() {
			activation.Delivered = g.now()
			g.activated(activation)
		}
	}
	if err != nil && ctx.Err() == nil {
		g.log.Warn("a packet found no way to its VM", "vm", name, "to", addr, "error", err)
	}
}

// packetEnds returns the source that an IP packet claims, and its destination.
func packetEnds(p []byte) (src, dst netip.Addr, ok bool) {
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20])), true
	case len(p) >= 40 && p[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40])), true
	}
	return src, dst, false
}

// frame returns an IP packet as a frame from the gateway to a guest.
func frame(p []byte) []byte {
	f := make([]byte, 0, 14+len(p))
	f = append(f, netpolicy.TheWire.GuestMAC[:]...)
	f = append(f, netpolicy.TheWire.GatewayMAC[:]...)
	if p[0]>>4 == 4 {
		f = append(f, 0x08, 0x00)
	} else {
		f = append(f, 0x86, 0xdd)
	}
	return append(f, p...)
}

// read takes packets from the waker's device until it is closed.
func (g *packetWaker) read(ctx context.Context, f *os.File) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("reading packets for VMs that sleep: %w", err)
		}
		g.packet(ctx, buf[:max(0, n)])
	}
}
