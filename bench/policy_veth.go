package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/drowse-vm/drowse/netpolicy"
)

// vethEnd is a network namespace that stands for a guest. Its device has the guest's addresses, and is the peer of
// a device with a policy. Only the thread that made it may call its methods.
type vethEnd struct {
	here, there netns.NsHandle
	agent       *attached
}

// vethThroughput measures a pair of devices.
func (e Env) vethThroughput(ctx context.Context, o Options) (rows []Row, err error) {
	v, err := newVethEnd()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, v.close()) }()
	all, err := e.throughputsOf(ctx, v, vethName, o)
	if err != nil {
		return nil, err
	}
	return all.rows(map[string]any{"link": linkVeth, "cpus": runtime.NumCPU(), "seconds": o.Send.Seconds()}), nil
}

// The devices, in the namespaces of the host and of the guest.
const vethName, vethPeer = "veth0", "eth0"

// newVethEnd makes the devices, with a policy of one rule. The thread must be in a network namespace of its own.
func newVethEnd() (_ *vethEnd, err error) {
	v := &vethEnd{here: netns.None(), there: netns.None()}
	defer func() {
		if err != nil {
			err = errors.Join(err, v.close())
		}
	}()
	if v.here, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("looking at the network namespace: %w", err)
	}
	if v.there, err = netns.New(); err != nil {
		return nil, fmt.Errorf("making a network namespace: %w", err)
	}
	if err := netns.Set(v.here); err != nil {
		return nil, fmt.Errorf("going back to a network namespace: %w", err)
	}
	w := netpolicy.TheWire
	pair := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: vethName}, PeerName: vethPeer, PeerNamespace: netlink.NsFd(v.there), PeerHardwareAddr: w.GuestMAC[:],
	}
	if err := netlink.LinkAdd(pair); err != nil {
		return nil, fmt.Errorf("making a pair of devices: %w", err)
	}
	spec, err := vethSpec(1)
	if err != nil {
		return nil, err
	}
	if v.agent, err = newAttached(spec); err != nil {
		return nil, err
	}
	if _, _, err := v.agent.attach(vethName); err != nil {
		return nil, err
	}
	return v, v.inside(func() error {
		peer, err := netlink.LinkByName(vethPeer)
		if err != nil {
			return err
		}
		const bits = 30 // like a guest's
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: w.Guest4.AsSlice(), Mask: net.CIDRMask(bits, 32)}}
		return errors.Join(netlink.AddrAdd(peer, addr), netlink.LinkSetUp(peer))
	})
}

func vethSpec(rules int) (*netpolicy.Spec, error) {
	return netpolicy.Compile(policyOf(rules, netpolicy.Host), policyAgent, netpolicy.Environment{})
}

// inside runs do in the namespace that stands for the guest.
func (v *vethEnd) inside(do func() error) error {
	if err := netns.Set(v.there); err != nil {
		return fmt.Errorf("going into a network namespace: %w", err)
	}
	err := do()
	if back := netns.Set(v.here); back != nil {
		err = errors.Join(err, fmt.Errorf("going back to a network namespace: %w", back))
	}
	return err
}

func (v *vethEnd) setPolicy(_ context.Context, rules int) error {
	spec, err := vethSpec(rules)
	if err != nil {
		return err
	}
	return v.agent.links[0].Swap(spec)
}

func (v *vethEnd) counters(context.Context) ([]netpolicy.Counter, error) {
	return v.agent.links[0].Counters()
}

func (v *vethEnd) transfer(ctx context.Context, d netpolicy.Direction, server netip.AddrPort, send time.Duration) (t transfer, err error) {
	var c net.Conn
	// A socket stays in the namespace where it was made.
	err = v.inside(func() (err error) {
		var dialer net.Dialer
		c, err = dialer.DialContext(ctx, "tcp4", server.String())
		return err
	})
	if err != nil {
		if c != nil {
			c.Close()
		}
		return t, err
	}
	return transferOver(ctx, c, d == netpolicy.Egress, send)
}

// close removes the devices, the namespace that stands for the guest, and the remains of the policy.
func (v *vethEnd) close() error {
	var errs []error
	if v.agent != nil {
		errs = append(errs, v.agent.close())
		if pair, err := netlink.LinkByName(vethName); err == nil {
			errs = append(errs, netlink.LinkDel(pair))
		}
	}
	for _, ns := range []netns.NsHandle{v.there, v.here} {
		if ns.IsOpen() {
			errs = append(errs, ns.Close())
		}
	}
	return errors.Join(errs...)
}
