package refmodel

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/drowse-vm/drowse/netpolicy"
)

const (
	protoICMP   = 1
	protoTCP    = 6
	protoUDP    = 17
	protoICMPv6 = 58
)

// parsed is a frame and what is known of it.
type parsed struct {
	Frame
	m                   *Model
	egress              bool
	six                 bool
	peer                netip.Addr
	proto               byte
	l4                  []byte // to the end of the packet
	l4at                int
	headers             int
	peerPort, guestPort uint16
	flags               byte
	via                 uint16 // the guest's port on the host, if the flow's name is checked
	quotes              bool   // an ICMP error whose quoted packet is to be translated
}

func (x *parsed) parse() netpolicy.Reason {
	f, w := x.Bytes, netpolicy.TheWire
	if len(f) < 14 {
		return netpolicy.ReasonTruncated
	}
	ethertype := be16(f[12:])
	switch {
	case x.Tagged, ethertype == 0x8100, ethertype == 0x88a8, ethertype == 0x9100:
		return netpolicy.ReasonVLAN
	case ethertype != 0x0806 && ethertype != 0x0800 && ethertype != 0x86dd:
		return netpolicy.ReasonEtherType
	}
	if x.egress && [6]byte(f[6:12]) != w.GuestMAC {
		return netpolicy.ReasonSrcMAC
	}
	dst, to := [6]byte(f[:6]), w.GatewayMAC
	if !x.egress {
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

func (x *parsed) arp(a []byte) netpolicy.Reason {
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
	if x.egress {
		ok = mac == w.GuestMAC && (sender == w.Guest4 || op == 1 && sender == netip.IPv4Unspecified()) &&
			(target == w.Gateway4 || target == w.Guest4)
	}
	if !ok {
		return netpolicy.ReasonARP
	}
	return netpolicy.ReasonLink
}

// fits says whether a packet of n bytes after the Ethernet header is all of the frame,
// but for the padding of short frames.
func (x *parsed) fits(n int) bool {
	end := 14 + n
	return end == len(x.Bytes) || end < len(x.Bytes) && len(x.Bytes) <= 60
}

func (x *parsed) ipv4(p []byte) netpolicy.Reason {
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
	x.proto = p[9]
	if x.proto != protoTCP && x.proto != protoUDP && x.proto != protoICMP {
		return netpolicy.ReasonProtocol
	}
	src, dst := netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
	if x.egress && src != netpolicy.TheWire.Guest4 {
		return netpolicy.ReasonSrcIP
	}
	if !x.egress && dst != x.m.id.Address4 {
		return netpolicy.ReasonDstIP
	}
	x.peer, x.l4, x.l4at = src, p[20:total], 34
	if x.egress {
		x.peer = dst
	}
	return x.layer4()
}

func (x *parsed) ipv6(p []byte, mcast bool) netpolicy.Reason {
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
	x.six, x.proto = true, p[6]
	switch p[6] {
	case protoTCP, protoUDP, protoICMPv6:
	case 44:
		return netpolicy.ReasonFragment
	case 0, 43, 51, 60, 135, 139, 140:
		return netpolicy.ReasonExtHeader
	default:
		return netpolicy.ReasonProtocol
	}
	src, dst := netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
	x.l4, x.l4at = p[40:40+n], 54
	if x.proto == protoICMPv6 && n >= 8 {
		if t := x.l4[0]; t >= 130 && t <= 137 || t == 143 {
			if x.neighbour(src, dst, p[7], mcast) {
				return netpolicy.ReasonLink
			}
			return netpolicy.ReasonND
		}
	}
	switch {
	case mcast:
		return netpolicy.ReasonDstMAC
	case x.egress && src != netpolicy.TheWire.Guest6:
		return netpolicy.ReasonSrcIP
	case !x.egress && dst != x.m.id.Address6:
		return netpolicy.ReasonDstIP
	}
	x.peer = src
	if x.egress {
		x.peer = dst
	}
	return x.layer4()
}

// neighbour says whether a message of neighbour discovery may pass.
func (x *parsed) neighbour(src, dst netip.Addr, hops byte, mcast bool) bool {
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
	if !x.egress {
		self, other = other, self
	}
	of := func(a netip.Addr, s side) bool { return a == s.addr || a == s.ll }
	msg := x.l4
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

func (x *parsed) layer4() netpolicy.Reason {
	p := x.l4
	var src, dst uint16
	x.headers = x.l4at
	switch x.proto {
	case protoTCP:
		if len(p) < 20 {
			return netpolicy.ReasonL4Header
		}
		offset := int(p[12]>>4) * 4
		if offset < 20 || offset > len(p) || !flagsPossible(p[13]) {
			return netpolicy.ReasonL4Header
		}
		x.flags = p[13]
		x.headers += offset
	case protoUDP:
		if len(p) < 8 || int(be16(p[4:])) != len(p) {
			return netpolicy.ReasonL4Header
		}
		x.headers += 8
	default:
		if len(p) < 8 {
			return netpolicy.ReasonL4Header
		}
		x.flags = p[0]
		x.guestPort = be16(p[4:])
	}
	if x.proto == protoTCP || x.proto == protoUDP {
		src, dst = be16(p), be16(p[2:])
		if src == 0 || dst == 0 {
			return netpolicy.ReasonL4Header
		}
		x.peerPort, x.guestPort = src, dst
		if x.egress {
			x.peerPort, x.guestPort = dst, src
		}
	}
	if x.SegmentSize != 0 {
		segments := x.proto == protoTCP || x.proto == protoUDP && !x.egress
		if !segments || x.SegmentSize < 8 {
			return netpolicy.ReasonGSO
		}
	}
	if x.egress && x.BadChecksumRequest {
		return netpolicy.ReasonChecksum
	}
	if x.proto == protoUDP {
		low := uint16(67)
		if x.six {
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

// icmp is the kind of an ICMP message.
func (x *parsed) icmp() string {
	kinds := map[byte]string{8: "request", 0: "reply", 3: "error", 11: "error", 12: "error"}
	if x.six {
		kinds = map[byte]string{128: "request", 129: "reply", 1: "error", 2: "error", 3: "error", 4: "error"}
	}
	return kinds[x.flags]
}

// related says why the packet that an ICMP error quotes does not belong to a flow.
func (x *parsed) related(now int64) netpolicy.Reason {
	q := x.l4[8:]
	var key flowKey
	var src, dst netip.Addr
	if x.six {
		if len(q) < 48 {
			return netpolicy.ReasonL4Header
		}
		if q[0]>>4 != 6 {
			return netpolicy.ReasonNoFlow
		}
		key.proto = q[6]
		src, dst = netip.AddrFrom16([16]byte(q[8:24])), netip.AddrFrom16([16]byte(q[24:40]))
		q = q[40:]
	} else {
		if len(q) < 28 {
			return netpolicy.ReasonL4Header
		}
		if q[0] != 0x45 || be16(q[6:])&0x1fff != 0 {
			return netpolicy.ReasonNoFlow
		}
		key.proto = q[9]
		src, dst = netip.AddrFrom4([4]byte(q[12:16])), netip.AddrFrom4([4]byte(q[16:20]))
		q = q[20:]
	}
	guest, own := netpolicy.TheWire.Guest4, x.m.id.Address4
	if x.six {
		guest, own = netpolicy.TheWire.Guest6, x.m.id.Address6
	}
	srcPort, dstPort := be16(q), be16(q[2:])
	if x.egress {
		// The guest complains of what it got.
		if src != x.peer || dst != guest {
			return netpolicy.ReasonNoFlow
		}
		key.peer, key.peerPort, key.guestPort = src, srcPort, dstPort
	} else {
		if src != own {
			return netpolicy.ReasonNoFlow
		}
		key.peer, key.peerPort, key.guestPort = dst, dstPort, srcPort
	}
	switch key.proto {
	case protoTCP, protoUDP:
	case x.proto:
		if t := q[0]; x.six && t != 128 && t != 129 || !x.six && t != 8 && t != 0 {
			return netpolicy.ReasonNoFlow
		}
		key.peerPort, key.guestPort = 0, be16(q[4:])
	default:
		return netpolicy.ReasonNoFlow
	}
	if f := x.m.flows[key]; f.fresh(now) && f.via != 0 {
		return netpolicy.ReasonNoFlow // the peer has no part in it
	}
	if x.By.IsValid() && x.spoofed(key.peer) {
		return netpolicy.ReasonNoFlow // on that way there is nobody but the host and that endpoint
	}
	if x.m.kindOf(key.peer) == isFloor || x.m.live(key, now) == nil {
		return netpolicy.ReasonNoFlow
	}
	x.quotes = true
	return 0
}

// translate replaces the address and computes all checksums anew. The input's are
// supposed to have been right.
func (x *parsed) translate() []byte {
	out := bytes.Clone(x.Bytes)
	own := x.m.id.Address4
	guest := netpolicy.TheWire.Guest4
	srcAt, dstAt := 26, 30
	if x.six {
		own, guest = x.m.id.Address6, netpolicy.TheWire.Guest6
		srcAt, dstAt = 22, 38
	}
	at, quotedAt, to := srcAt, dstAt, own
	if !x.egress {
		at, quotedAt, to = dstAt, srcAt, guest
	}
	copy(out[at:], to.AsSlice())
	l4 := out[x.l4at : x.l4at+len(x.l4)]
	if x.via != 0 {
		ends := [2]netip.AddrPort{netip.AddrPortFrom(own, x.via), netip.AddrPortFrom(netpolicy.TheWire.Gateway4, x.m.env.TLSPort)}
		if !x.egress {
			ends = [2]netip.AddrPort{netip.AddrPortFrom(x.peer, x.peerPort), netip.AddrPortFrom(guest, x.guestPort)}
		}
		for i, e := range ends {
			copy(out[26+4*i:], e.Addr().AsSlice())
			binary.BigEndian.PutUint16(l4[2*i:], e.Port())
		}
	}
	if x.quotes {
		inner := l4[8:]
		copy(inner[quotedAt-14:], to.AsSlice())
		if !x.six {
			putSum(inner[:20], 10, 0)
		}
	}
	var pseudo uint32
	if x.six {
		pseudo = sum(out[22:54]) + uint32(len(l4)) + uint32(x.proto)
	} else {
		putSum(out[14:34], 10, 0)
		if x.proto != protoICMP {
			pseudo = sum(out[26:34]) + uint32(len(l4)) + uint32(x.proto)
		}
	}
	switch x.proto {
	case protoTCP:
		putSum(l4, 16, pseudo)
	case protoUDP:
		if be16(l4[6:]) != 0 || x.six {
			putSum(l4, 6, pseudo)
			if be16(l4[6:]) == 0 {
				binary.BigEndian.PutUint16(l4[6:], 0xffff)
			}
		}
	default:
		putSum(l4, 2, pseudo)
	}
	return out
}

func sum(b []byte) (s uint32) {
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(be16(b[i:]))
	}
	if len(b)%2 == 1 {
		s += uint32(b[len(b)-1]) << 8
	}
	return s
}

// putSum puts the Internet checksum (RFC 1071) into a field.
func putSum(b []byte, at int, pseudo uint32) {
	b[at], b[at+1] = 0, 0
	s := uint64(sum(b)) + uint64(pseudo)
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	binary.BigEndian.PutUint16(b[at:], ^uint16(s))
}
