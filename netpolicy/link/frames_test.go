package link_test

import (
	"encoding/binary"
	"net/netip"

	. "github.com/drowse-vm/drowse/netpolicy"
)

// These functions build the tests' frames, with right lengths and checksums. A test may break them afterwards.

var (
	wire     = TheWire
	own4     = netip.MustParseAddr("10.200.3.7")
	own6     = netip.MustParseAddr("fd77::3:7")
	endpoint = Identity{Address4: own4, Address6: own6}
	be       = binary.BigEndian
)

func ethernet(dst, src [6]byte, ethertype uint16, payload []byte) []byte {
	b := append(append(append([]byte{}, dst[:]...), src[:]...), byte(ethertype>>8), byte(ethertype))
	return append(b, payload...)
}

// checksum computes the checksum of RFC 1071.
func checksum(parts ...[]byte) uint16 {
	var s uint64
	for _, b := range parts {
		for i := 0; i < len(b); i += 2 {
			if i+1 < len(b) {
				s += uint64(be.Uint16(b[i:]))
			} else {
				s += uint64(b[i]) << 8
			}
		}
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

func ipHeader(src, dst netip.Addr, proto byte, n int) []byte {
	if src.Is4() {
		h := []byte{0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, proto, 0, 0}
		h = append(append(h, src.AsSlice()...), dst.AsSlice()...)
		be.PutUint16(h[2:], uint16(20+n))
		be.PutUint16(h[10:], checksum(h))
		return h
	}
	h := []byte{0x60, 0, 0, 0, byte(n >> 8), byte(n), proto, 64}
	return append(append(h, src.AsSlice()...), dst.AsSlice()...)
}

// sumL4 fills in the checksum of a TCP, UDP or ICMP message.
func sumL4(src, dst netip.Addr, proto byte, m []byte) {
	at := map[byte]int{6: 16, 17: 6, 1: 2, 58: 2}[proto]
	if len(m) < at+2 {
		return
	}
	m[at], m[at+1] = 0, 0
	var pseudo []byte
	if proto != 1 {
		pseudo = append(append(src.AsSlice(), dst.AsSlice()...), 0, proto, byte(len(m)>>8), byte(len(m)))
	}
	c := checksum(pseudo, m)
	if proto == 17 && c == 0 {
		c = 0xffff
	}
	be.PutUint16(m[at:], c)
}

// ip returns an IP packet.
func ip(src, dst netip.Addr, proto byte, m []byte) []byte {
	m = append([]byte{}, m...)
	sumL4(src, dst, proto, m)
	return append(ipHeader(src, dst, proto, len(m)), m...)
}

const (
	fin = 1
	syn = 2
	rst = 4
	psh = 8
	ack = 16
)

func tcp(src, dst uint16, flags byte, payload ...byte) []byte {
	m := []byte{byte(src >> 8), byte(src), byte(dst >> 8), byte(dst), 0, 0, 0, 1, 0, 0, 0, 2, 0x50, flags, 0x20, 0, 0, 0, 0, 0}
	return append(m, payload...)
}

func udp(src, dst uint16, payload ...byte) []byte {
	n := 8 + len(payload)
	m := []byte{byte(src >> 8), byte(src), byte(dst >> 8), byte(dst), byte(n >> 8), byte(n), 0, 0}
	return append(m, payload...)
}

func echo(typ byte, id uint16, payload ...byte) []byte {
	return append([]byte{typ, 0, 0, 0, byte(id >> 8), byte(id), 0, 1}, payload...)
}

// icmpError returns an ICMP error that quotes a packet.
func icmpError(typ, code byte, quoted []byte) []byte {
	return append([]byte{typ, code, 0, 0, 0, 0, 0, 0}, quoted...)
}

func etherTypeOf(a netip.Addr) uint16 {
	if a.Is4() {
		return 0x0800
	}
	return 0x86dd
}

func protoOf(a netip.Addr, proto byte) byte {
	if proto == 1 && a.Is6() {
		return 58
	}
	return proto
}

// sent returns a frame from the guest to a peer. got returns one from a peer to the endpoint, as the host hands it
// to the TAP device.
func sent(peer netip.Addr, proto byte, m []byte) []byte {
	src := wire.Guest4
	if peer.Is6() {
		src = wire.Guest6
	}
	return ethernet(wire.GatewayMAC, wire.GuestMAC, etherTypeOf(peer), ip(src, peer, protoOf(peer, proto), m))
}

func got(peer netip.Addr, proto byte, m []byte) []byte {
	dst := own4
	if peer.Is6() {
		dst = own6
	}
	return ethernet(wire.GuestMAC, wire.GatewayMAC, etherTypeOf(peer), ip(peer, dst, protoOf(peer, proto), m))
}

func arp(op uint16, mac [6]byte, sender netip.Addr, target netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4, byte(op >> 8), byte(op)}
	b = append(append(b, mac[:]...), sender.AsSlice()...)
	b = append(b, 0, 0, 0, 0, 0, 0)
	return append(b, target.AsSlice()...)
}

var broadcast = [6]byte{255, 255, 255, 255, 255, 255}

// nd returns a neighbour discovery message with hop limit 255.
func nd(dstMAC, srcMAC [6]byte, src, dst netip.Addr, typ byte, target netip.Addr, option ...byte) []byte {
	m := append([]byte{typ, 0, 0, 0, 0, 0, 0, 0}, target.AsSlice()...)
	p := ip(src, dst, 58, append(m, option...))
	p[7] = 255
	return ethernet(dstMAC, srcMAC, 0x86dd, p)
}

func linkLocal(mac [6]byte) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5]})
}

func solicitedNode(a netip.Addr) (netip.Addr, [6]byte) {
	b := a.As16()
	return netip.AddrFrom16([16]byte{0xff, 2, 11: 1, 12: 0xff, 13: b[13], 14: b[14], 15: b[15]}), [6]byte{0x33, 0x33, 0xff, b[13], b[14], b[15]}
}

func clone(b []byte, edit func([]byte)) []byte {
	b = append([]byte{}, b...)
	edit(b)
	return b
}
