package refmodel

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/drowse-vm/drowse/netpolicy"
)

// IP protocols.
const (
	ProtoICMP   = 1
	ProtoTCP    = 6
	ProtoUDP    = 17
	ProtoICMPv6 = 58
)

// Flags of TCP that open a flow.
const (
	FlagSYN = 1 << 1
	FlagACK = 1 << 4
)

// Packet is a parsed frame.
type Packet struct {
	Frame
	m      *Model
	Egress bool
	Six    bool
	Peer   netip.Addr
	Proto  byte
	// L4 is what follows the IP header, to the end of the packet. L4At is its offset in the frame.
	L4   []byte
	L4At int
	// Headers is the size of all headers in bytes.
	Headers             int
	PeerPort, GuestPort uint16
	// Flags are the TCP flags, or the type of ICMP.
	Flags byte
}

// Parse reads a frame. The Reason is 0 if flows and rules decide about the packet, ReasonLink if it passes without
// them, and otherwise why the frame is denied.
func (m *Model) Parse(f Frame) (*Packet, netpolicy.Reason) {
	x := &Packet{Frame: f, m: m, Egress: f.Direction == netpolicy.Egress}
	return x, x.parse()
}

func (x *Packet) parse() netpolicy.Reason {
	f, w := x.Bytes, netpolicy.TheWire
	if len(f) < 14 {
		return netpolicy.ReasonTruncated
	}
	ethertype := be16(f[12:])
	switch {
	case ethertype == 0x8100, ethertype == 0x88a8, ethertype == 0x9100:
		return netpolicy.ReasonVLAN
	case ethertype != 0x0806 && ethertype != 0x0800 && ethertype != 0x86dd:
		return netpolicy.ReasonEtherType
	}
	if x.Egress && [6]byte(f[6:12]) != w.GuestMAC {
		return netpolicy.ReasonSrcMAC
	}
	dst, to := [6]byte(f[:6]), w.GatewayMAC
	if !x.Egress {
		to = w.GuestMAC
	}
	mcast := dst[0] == 0x33 && dst[1] == 0x33
	switch {
	case dst == to:
	case ethertype == 0x0806 && dst == [6]byte{255, 255, 255, 255, 255, 255}:
	case ethertype == 0x86dd && mcast:
	default:
		return netpolicy.ReasonDstMAC
	}
	switch ethertype {
	case 0x0806:
		return x.arp(f[14:])
	case 0x0800:
		return x.ipv4(f[14:])
	}
	return x.ipv6(f[14:], mcast)
}

func (x *Packet) arp(a []byte) netpolicy.Reason {
	w := netpolicy.TheWire
	if len(a) < 28 {
		return netpolicy.ReasonTruncated
	}
	op := a[7]
	if !bytes.Equal(a[:7], []byte{0, 1, 8, 0, 6, 4, 0}) || op != 1 && op != 2 {
		return netpolicy.ReasonARP
	}
	mac, sender, target := [6]byte(a[8:14]), netip.AddrFrom4([4]byte(a[14:18])), netip.AddrFrom4([4]byte(a[24:28]))
	ok := mac == w.GatewayMAC && sender == w.Gateway4 && target == w.Guest4
	if x.Egress {
		ok = mac == w.GuestMAC && (sender == w.Guest4 || op == 1 && sender == netip.IPv4Unspecified()) &&
			(target == w.Gateway4 || target == w.Guest4)
	}
	if !ok {
		return netpolicy.ReasonARP
	}
	return netpolicy.ReasonLink
}

// fits reports whether a packet of n bytes after the Ethernet header fills the frame, apart from the padding of
// short frames.
func (x *Packet) fits(n int) bool {
	end := 14 + n
	return end == len(x.Bytes) || end < len(x.Bytes) && len(x.Bytes) <= 60
}

func (x *Packet) ipv4(p []byte) netpolicy.Reason {
	if len(p) < 20 {
		return netpolicy.ReasonTruncated
	}
	header, total := int(p[0]&15)*4, int(be16(p[2:]))
	switch {
	case p[0]>>4 != 4, header < 20, total < header, !x.fits(total), p[8] == 0:
		return netpolicy.ReasonIPHeader
	case header > 20:
		return netpolicy.ReasonIPOptions
	case be16(p[6:])&^0x4000 != 0: // all but "don't fragment"
		return netpolicy.ReasonFragment
	}
	x.Proto = p[9]
	if x.Proto != ProtoTCP && x.Proto != ProtoUDP && x.Proto != ProtoICMP {
		return netpolicy.ReasonProtocol
	}
	src, dst := netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
	if x.Egress && src != netpolicy.TheWire.Guest4 {
		return netpolicy.ReasonSrcIP
	}
	if !x.Egress && dst != x.m.id.Address4 {
		return netpolicy.ReasonDstIP
	}
	x.Peer, x.L4, x.L4At = src, p[20:total], 34
	if x.Egress {
		x.Peer = dst
	}
	return x.layer4()
}

func (x *Packet) ipv6(p []byte, mcast bool) netpolicy.Reason {
	if len(p) < 40 {
		return netpolicy.ReasonTruncated
	}
	if !x.m.id.Address6.IsValid() {
		return netpolicy.ReasonIPv6Off
	}
	n := int(be16(p[4:]))
	if p[0]>>4 != 6 || n == 0 || !x.fits(40+n) || p[7] == 0 {
		return netpolicy.ReasonIPHeader
	}
	x.Six, x.Proto = true, p[6]
	switch p[6] {
	case ProtoTCP, ProtoUDP, ProtoICMPv6:
	case 44:
		return netpolicy.ReasonFragment
	case 0, 43, 51, 60, 135, 139, 140:
		return netpolicy.ReasonExtHeader
	default:
		return netpolicy.ReasonProtocol
	}
	src, dst := netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
	x.L4, x.L4At = p[40:40+n], 54
	if x.Proto == ProtoICMPv6 && n >= 8 {
		if t := x.L4[0]; t >= 130 && t <= 137 || t == 143 {
			if x.neighbour(src, dst, p[7], mcast) {
				return netpolicy.ReasonLink
			}
			return netpolicy.ReasonND
		}
	}
	switch {
	case mcast:
		return netpolicy.ReasonDstMAC
	case x.Egress && src != netpolicy.TheWire.Guest6:
		return netpolicy.ReasonSrcIP
	case !x.Egress && dst != x.m.id.Address6:
		return netpolicy.ReasonDstIP
	}
	x.Peer = src
	if x.Egress {
		x.Peer = dst
	}
	return x.layer4()
}

// neighbour reports whether a message of neighbour discovery may pass.
func (x *Packet) neighbour(src, dst netip.Addr, hops byte, mcast bool) bool {
	w := netpolicy.TheWire
	ll := func(mac [6]byte) netip.Addr { // RFC 4291, appendix A
		return netip.AddrFrom16([16]byte{0xfe, 0x80, 0, 0, 0, 0, 0, 0, mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
	}
	type side struct {
		addr, ll netip.Addr
		mac      [6]byte
	}
	self := side{w.Guest6, ll(w.GuestMAC), w.GuestMAC}
	other := side{w.Gateway6, ll(w.GatewayMAC), w.GatewayMAC}
	if !x.Egress {
		self, other = other, self
	}
	of := func(a netip.Addr, s side) bool { return a == s.addr || a == s.ll }
	msg := x.L4
	solicit, advert := msg[0] == 135, msg[0] == 136
	if !solicit && !advert || msg[1] != 0 || hops != 255 || len(msg) != 24 && len(msg) != 32 {
		return false
	}
	unspecified := src == netip.IPv6Unspecified()
	if !of(src, self) && !(unspecified && solicit) {
		return false
	}
	if b := dst.As16(); b[0] == 0xff {
		if b[1] != 2 || mcast && !bytes.Equal(x.Bytes[2:6], b[12:]) {
			return false
		}
	} else if mcast || !of(dst, other) {
		return false
	}
	target := netip.AddrFrom16([16]byte(msg[8:24]))
	if !of(target, self) && !(solicit && of(target, other)) {
		return false
	}
	if len(msg) == 24 {
		return true
	}
	o := msg[24:]
	switch {
	case o[1] != 1:
		return false
	case unspecified:
		return o[0] == 14
	case solicit:
		return o[0] == 1 && [6]byte(o[2:]) == self.mac
	}
	return o[0] == 2 && [6]byte(o[2:]) == self.mac
}

func (x *Packet) layer4() netpolicy.Reason {
	p := x.L4
	var src, dst uint16
	x.Headers = x.L4At
	switch x.Proto {
	case ProtoTCP:
		if len(p) < 20 {
			return netpolicy.ReasonL4Header
		}
		offset := int(p[12]>>4) * 4
		if offset < 20 || offset > len(p) || !flagsPossible(p[13]) {
			return netpolicy.ReasonL4Header
		}
		x.Flags = p[13]
		x.Headers += offset
	case ProtoUDP:
		if len(p) < 8 || int(be16(p[4:])) != len(p) {
			return netpolicy.ReasonL4Header
		}
		x.Headers += 8
	default:
		if len(p) < 8 {
			return netpolicy.ReasonL4Header
		}
		x.Flags = p[0]
		x.GuestPort = be16(p[4:])
	}
	if x.Proto == ProtoTCP || x.Proto == ProtoUDP {
		src, dst = be16(p), be16(p[2:])
		if src == 0 || dst == 0 {
			return netpolicy.ReasonL4Header
		}
		x.PeerPort, x.GuestPort = src, dst
		if x.Egress {
			x.PeerPort, x.GuestPort = dst, src
		}
	}
	if x.SegmentSize != 0 {
		segments := x.Proto == ProtoTCP || x.Proto == ProtoUDP && !x.Egress
		if !segments || x.SegmentSize < 8 {
			return netpolicy.ReasonGSO
		}
	}
	if x.Proto == ProtoUDP {
		low := uint16(67)
		if x.Six {
			low = 546
		}
		if src-low < 2 || dst-low < 2 {
			return netpolicy.ReasonDHCP
		}
	}
	return 0
}

func flagsPossible(f byte) bool {
	fin, syn, rst, ack := f&1 != 0, f&2 != 0, f&4 != 0, f&16 != 0
	switch {
	case syn && (fin || rst), fin && rst, fin && !ack:
		return false
	}
	return syn || rst || ack
}

// ICMP returns the kind of an ICMP message: request or reply of echo, or error; empty for a type that is never allowed.
func (x *Packet) ICMP() string {
	kinds := map[byte]string{8: "request", 0: "reply", 3: "error", 11: "error", 12: "error"}
	if x.Six {
		kinds = map[byte]string{128: "request", 129: "reply", 1: "error", 2: "error", 3: "error", 4: "error"}
	}
	return kinds[x.Flags]
}

// Spoofed reports whether a frame to the guest has a source that is not its sender's own: an address of the host
// or of another endpoint.
func (x *Packet) Spoofed(a netip.Addr) bool {
	if x.Egress {
		return false
	}
	switch x.m.kindOf(a) {
	case isHost:
		return x.By.IsValid()
	case isEndpoint:
		return x.By != a || !slices.ContainsFunc(x.m.env.Peers, func(p netpolicy.Peer) bool { return p.Address == a })
	}
	return false
}

func be16(b []byte) uint16 { return binary.BigEndian.Uint16(b) }
