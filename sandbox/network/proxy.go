package network

import (
	"context"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var errNoIdentity = fmt.Errorf("%w: the policy has a proxy, and there is no identity for one", spec.ErrInvalid)

// listenProxy starts the proxy if the policy has one. The lock must be held.
func (n *Network) listenProxy() error {
	if !n.policy.ProxyOn() || n.stopProxy != nil {
		return nil
	}
	if n.config.Identity == nil {
		return errNoIdentity
	}
	if _, err := proxy.ExtraRoots(); err != nil {
		return err
	}
	ln, err := n.openTCP(arrivesProxy)
	if err != nil {
		return fmt.Errorf("%w: is there a server of the host's on port %d of all addresses?", err, netpolicy.ProxyPort)
	}
	n.stopProxy = n.serve("the VM's proxy has failed", func(ctx context.Context) error { return n.keeper.accept(ctx, ln, arrivesProxy) })
	return nil
}

// proxied records an event of the proxy.
func (n *Network) proxied(e proxy.Event) {
	ev := spec.NetEvent{
		Time: time.Now().UTC(), Direction: netpolicy.Egress, Verdict: netpolicy.Reject, Reason: e.Reason, Rule: e.Rule, Protocol: "tcp",
		PeerPort: e.Port, Guest: n.address, Host: e.Host, Secret: e.Secret, Status: e.Status, Suppressed: e.Suppressed,
	}
	if e.Sent {
		ev.Verdict = netpolicy.Allow
	}
	if e.Peer.IsValid() {
		ev.Peer = e.Peer.Addr()
	}
	n.events.add(ev)
}
