package hostnet

import (
	"context"
	"log/slog"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/drowse-vm/drowse/netpolicy"
)

// watchInterval is how often Watch calls without a notice from the kernel.
const watchInterval = 30 * time.Second

// Watch calls look at once, and again whenever this host has got or lost an address, until ctx ends. Gateways of VMs,
// which come and go with them, do not count. Ranges that come without an address, like that of a gateway, have no
// notice: Watch calls look every 30 seconds in any case.
func Watch(ctx context.Context, log *slog.Logger, look func()) {
	updates := make(chan netlink.AddrUpdate, 64)
	done := make(chan struct{})
	defer close(done)
	if err := netlink.AddrSubscribe(updates, done); err != nil {
		log.Warn("changes of the host's addresses are noticed late", "error", err)
		updates = nil
	}
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		// First handle changes from before the subscription.
		look()
	wait:
		for {
			select {
			case <-ctx.Done():
				// Closing done ends the subscription, which then closes updates. Until then it must not block on a
				// missing reader.
				if updates != nil {
					go func() {
						for range updates {
						}
					}()
				}
				return
			case u, ok := <-updates:
				if !ok {
					updates = nil
					continue
				}
				a, _ := netip.AddrFromSlice(u.LinkAddress.IP)
				if a = a.Unmap(); a == netpolicy.TheWire.Gateway4 || a == netpolicy.TheWire.Gateway6 {
					continue // of another VM, which comes or goes
				}
				break wait
			case <-tick.C:
				break wait
			}
		}
	}
}
