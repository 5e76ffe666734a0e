package netpolicy

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// Wire is the link between a guest and its host, the same for all guests. So a clone keeps what it knows of it,
// the MAC of its gateway included.
type Wire struct {
	GuestMAC, GatewayMAC [6]byte
	Guest4, Gateway4     netip.Addr
	Guest6, Gateway6     netip.Addr
}

// TheWire is the wire of every guest. The IPv6 prefix is /64; IPv4 is /30.
var TheWire = Wire{
	GuestMAC:   [6]byte{0x02, 'd', 'r', 'o', 'w', 1},
	GatewayMAC: [6]byte{0x02, 'd', 'r', 'o', 'w', 2},
	Guest4:     netip.MustParseAddr("172.31.255.2"),
	Gateway4:   netip.MustParseAddr("172.31.255.1"),
	Guest6:     netip.MustParseAddr("fd64:726f:7773:1::2"),
	Gateway6:   netip.MustParseAddr("fd64:726f:7773:1::1"),
}

// linkLocalOf returns the IPv6 link-local address of a MAC (RFC 4291, appendix A).
func linkLocalOf(mac [6]byte) netip.Addr {
	a := [16]byte{0xfe, 0x80, 8: mac[0] ^ 2, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5]}
	return netip.AddrFrom16(a)
}

// Identity is what distinguishes an endpoint on the network.
type Identity struct {
	// Address4 is the endpoint's own IPv4 address. It is required.
	Address4 netip.Addr
	// Address6 is its own IPv6 address; without one there is no IPv6.
	Address6 netip.Addr
}

// Peer is another endpoint.
type Peer struct {
	Address netip.Addr
	Tags    []string
}

// Environment is what surrounds the endpoint at the time of compilation.
type Environment struct {
	// Host are addresses of the host, besides the gateway's; see HostAddresses. An address missing here counts as
	// public or private.
	Host []netip.Addr
	// OnLink are the ranges in which the host has neighbours; see hostnet.OnLink. They count as private.
	OnLink []netip.Prefix
	// Endpoints are the ranges in which endpoints have their addresses.
	Endpoints []netip.Prefix
	// Peers are other endpoints, whose addresses need not lie in these ranges. Their tags only serve to explain a
	// policy: the programs know the tags of the endpoints that exist, see link.Config.
	Peers []Peer
	// TLSPort is the port of the gateway's IPv4 address where names are checked: see package tlsname. If it is 0,
	// flows that need a check are denied.
	TLSPort uint16
}

// HostAddresses returns the addresses of this host that Environment.Host should have: those of all interfaces in
// this network namespace, with the broadcast and anycast addresses of their ranges, except addresses of the floor or a
// gateway.
func HostAddresses() ([]netip.Addr, error) {
	all, err := InterfaceAddresses()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, p := range all {
		for _, addr := range deliveredTo(p) {
			if addr == TheWire.Gateway4 || addr == TheWire.Gateway6 ||
				inside(netip.PrefixFrom(addr, addr.BitLen()), floor) || slices.Contains(out, addr) {
				continue
			}
			out = append(out, addr)
		}
	}
	return out, nil
}

// deliveredTo returns the addresses that the kernel delivers to a host with the address p: its own, and those by which
// a datagram reaches all sockets of its port: the broadcast addresses of IPv4, and the subnet-router anycast address of
// IPv6 (RFC 4291, 2.6.1).
func deliveredTo(p netip.Prefix) []netip.Addr {
	out := []netip.Addr{p.Addr()}
	if p.Bits() >= p.Addr().BitLen()-1 {
		return out // one or two hosts (RFC 3021, RFC 6164)
	}
	first := p.Masked().Addr()
	out = append(out, first)
	if first.Is4() {
		last := first.As4()
		for bit := p.Bits(); bit < 32; bit++ {
			last[bit/8] |= 0x80 >> (bit % 8)
		}
		out = append(out, netip.AddrFrom4(last))
	}
	return out
}

// InterfaceAddresses returns the addresses of all interfaces in this network namespace, each with its prefix
// length.
func InterfaceAddresses() ([]netip.Prefix, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("listing the host's addresses: %w", err)
	}
	var out []netip.Prefix
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			addr, _ := netip.AddrFromSlice(n.IP)
			bits, _ := n.Mask.Size()
			if p := netip.PrefixFrom(addr.Unmap(), bits); p.IsValid() {
				out = append(out, p)
			}
		}
	}
	return out, nil
}

// MaxPeers, MaxOnLink, MaxHostAddresses and MaxEndpointRanges bound the lists of an Environment. On a host with
// more addresses no policy can open anything: an address missing from the list would count as public.
const (
	MaxPeers          = 4096
	MaxOnLink         = 512
	MaxHostAddresses  = 16384
	MaxEndpointRanges = 256
)

// MaxEndpoints is how many endpoints may have a network at once, on one host and with one version of the programs.
const MaxEndpoints = 8192
