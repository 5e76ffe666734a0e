package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
)

// The shortest prefixes of IPv4 and IPv6 routes that count as neighbours. A shorter one, such as a default route,
// is a way out.
const (
	minOnLink4 = 8
	minOnLink6 = 16
)

// onLinkTries bounds how often OnLink lists the routes again because they changed meanwhile.
const onLinkTries = 5

// OnLink returns the ranges of public addresses in which this host has neighbours, as Environment.OnLink should
// have them, in order: the prefixes of its interfaces' addresses, its routes without a gateway, and its gateways,
// of all tables in this network namespace. It leaves out routes into tunnels (interfaces without broadcast), which
// lead further, unless the kernel made them for an address. If there are more than MaxOnLink, it widens them.
func OnLink() ([]netip.Prefix, error) {
	all, err := netpolicy.InterfaceAddresses()
	if err != nil {
		return nil, err
	}
	found := map[netip.Prefix]bool{}
	for _, p := range all {
		if p = p.Masked(); onLink(p) {
			found[p] = true
		}
	}
	broadcast := map[int]bool{} // by the index of an interface
	hop := func(r *netlink.Route, gw net.IP, via netlink.Destination, index int) {
		if v, ok := via.(*netlink.Via); ok {
			gw = v.Addr
		}
		if gw != nil {
			if p, ok := neighbours(&net.IPNet{IP: gw, Mask: net.CIDRMask(8*len(gw), 8*len(gw))}); ok {
				found[p] = true
			}
			return
		}
		p, ok := neighbours(r.Dst)
		if !ok {
			return
		}
		if _, ok := broadcast[index]; !ok {
			nl, err := netlink.LinkByIndex(index)
			broadcast[index] = err != nil || nl.Attrs().Flags&net.FlagBroadcast != 0
		}
		if broadcast[index] || r.Protocol == unix.RTPROT_KERNEL {
			found[p] = true
		}
	}
	for try := 1; ; try++ {
		err := netlink.RouteListFilteredIter(netlink.FAMILY_ALL, &netlink.Route{Type: unix.RTN_UNICAST}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE, func(r netlink.Route) bool {
			if len(r.MultiPath) == 0 {
				hop(&r, r.Gw, r.Via, r.LinkIndex)
			}
			for _, h := range r.MultiPath {
				hop(&r, h.Gw, h.Via, h.LinkIndex)
			}
			return true
		})
		if errors.Is(err, netlink.ErrDumpInterrupted) && try < onLinkTries {
			continue // ranges found so far still count
		}
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, fmt.Errorf("listing the routes on the host's links: %w", err)
		}
		return widen(found, netpolicy.MaxOnLink), nil
	}
}

// neighbours returns the range of a network on a link, if part of it could be public and it is not a way out.
func neighbours(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	p, err := a.Unmap().Prefix(bits)
	return p, ok && err == nil && onLink(p)
}

func onLink(p netip.Prefix) bool {
	least := minOnLink4
	if p.Addr().Is6() {
		least = minOnLink6
	}
	return p.Bits() >= least && netpolicy.MayBePublic(p)
}

// widen returns at most so many ranges: if there are more, it shortens the prefixes until enough of them coincide.
func widen(found map[netip.Prefix]bool, most int) []netip.Prefix {
	for bits := 128; ; bits-- {
		var out []netip.Prefix
		for p := range found {
			out = append(out, netip.PrefixFrom(p.Addr(), min(p.Bits(), bits)).Masked())
		}
		slices.SortFunc(out, netip.Prefix.Compare)
		if out = slices.Compact(out); len(out) <= most || bits == 0 {
			return out
		}
	}
}
