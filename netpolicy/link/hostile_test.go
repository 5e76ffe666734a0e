package link_test

import (
	"fmt"
	"net/netip"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
)

// hostile is a crafted frame that no policy lets pass, or that hostilePolicy denies.
type hostile struct {
	name   string
	dir    Direction
	frame  []byte
	gso    int
	reason Reason
}

// hostilePolicy opens as much as a policy can, except one peer and two ports, so that hardly anything but the
// checks of frames and the floor denies frames.
const hostilePolicy = `
default: {egress: allow, ingress: allow}
rules:
  - {name: shut, direction: egress, verdict: deny, cidrs: [198.51.100.66, "2001:db8::66"], protocols: [any], ports: [any]}
  - {name: shut port, direction: egress, verdict: deny, groups: [any], protocols: [tcp, udp], ports: [25]}
  - {name: shut in, direction: ingress, verdict: deny, groups: [any], protocols: [tcp, udp], ports: [22]}
  - {direction: egress, verdict: allow, cidrs: [0.0.0.0/0, "::/0"], groups: [any, public, private, host], protocols: [any], ports: [any]}
  - {direction: ingress, verdict: allow, cidrs: [0.0.0.0/0, "::/0"], groups: [any, public, private, host], protocols: [any], ports: [any]}
`

var (
	peer4 = netip.MustParseAddr("198.51.100.1")
	peer6 = netip.MustParseAddr("2001:db8::1")
)

func ipOf(f []byte) []byte { return f[14:] }

// fix corrects the checksum of the IPv4 header.
func fix(f []byte) {
	h := ipOf(f)
	n := int(h[0]&15) * 4
	if n < 20 || n > len(h) {
		n = 20
	}
	h[10], h[11] = 0, 0
	be.PutUint16(h[10:], checksum(h[:n]))
}

func edited(f []byte, edit func(f []byte)) []byte {
	return clone(f, func(b []byte) {
		edit(b)
		if be.Uint16(b[12:]) == 0x0800 {
			fix(b)
		}
	})
}

func hostileFrames() (out []hostile) {
	add := func(d Direction, reason Reason, f []byte, format string, args ...any) {
		out = append(out, hostile{name: fmt.Sprintf(format, args...), dir: d, frame: f, gso: 0, reason: reason})
	}
	type proto struct {
		name string
		n    byte
		m    []byte
	}
	protos := []proto{{name: "tcp", n: 6, m: tcp(4000, 443, syn)}, {name: "udp", n: 17, m: udp(4000, 443, 1, 2, 3)}, {name: "icmp", n: 1, m: echo(8, 7)}}
	protos6 := []proto{protos[0], protos[1], {name: "icmp", n: 1, m: echo(128, 7)}}
	families := []struct {
		name   string
		peer   netip.Addr
		protos []proto
	}{{"IPv4", peer4, protos}, {"IPv6", peer6, protos6}}

	// Spoofing.
	other := [6]byte{0x02, 1, 2, 3, 4, 5}
	macs := map[string][6]byte{"another": other, "the gateway's": wire.GatewayMAC, "broadcast": broadcast, "zero": {}, "multicast": {1, 0, 0x5e, 0, 0, 1},
		"one bit off": {0x02, 'd', 'r', 'o', 'w', 0}}
	for _, fam := range families {
		for _, p := range fam.protos {
			base := sent(fam.peer, p.n, p.m)
			for name, mac := range macs {
				add(Egress, ReasonSrcMAC, clone(base, func(f []byte) { copy(f[6:], mac[:]) }), "%s %s from %s MAC", fam.name, p.name, name)
			}
			for name, mac := range map[string][6]byte{"another": other, "the guest's": wire.GuestMAC, "broadcast": broadcast, "multicast": {1, 0, 0x5e, 0, 0, 1}, "IPv6 multicast": {0x33, 0x33, 0, 0, 0, 1}} {
				add(Egress, ReasonDstMAC, clone(base, func(f []byte) { copy(f, mac[:]) }), "%s %s to %s MAC", fam.name, p.name, name)
			}
			in := got(fam.peer, p.n, p.m)
			add(Ingress, ReasonDstMAC, clone(in, func(f []byte) { copy(f, broadcast[:]) }), "%s %s in by broadcast", fam.name, p.name)
			spoofs := []netip.Addr{own4, wire.Gateway4, peer4, netip.MustParseAddr("10.200.3.8"), netip.MustParseAddr("172.31.255.3"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("255.255.255.255")}
			if fam.name == "IPv6" {
				spoofs = []netip.Addr{own6, wire.Gateway6, peer6, netip.MustParseAddr("fd77::3:8"), linkLocal(wire.GuestMAC), netip.MustParseAddr("::1"), netip.MustParseAddr("::"), netip.MustParseAddr("::ffff:172.31.255.2")}
			}
			for _, a := range spoofs {
				f := ethernet(wire.GatewayMAC, wire.GuestMAC, etherTypeOf(a), ip(a, fam.peer, protoOf(a, p.n), p.m))
				add(Egress, ReasonSrcIP, f, "%s %s from %v", fam.name, p.name, a)
			}
			for _, a := range spoofs {
				if a == own4 || a == own6 {
					continue
				}
				f := ethernet(wire.GuestMAC, wire.GatewayMAC, etherTypeOf(a), ip(fam.peer, a, protoOf(a, p.n), p.m))
				add(Ingress, ReasonDstIP, f, "%s %s in to %v", fam.name, p.name, a)
			}
		}
	}

	// Tags and ethertypes.
	for _, fam := range families {
		for _, p := range fam.protos {
			f := sent(fam.peer, p.n, p.m)
			for _, tag := range []uint16{0x8100, 0x88a8, 0x9100} {
				add(Egress, ReasonVLAN, ethernet(wire.GatewayMAC, wire.GuestMAC, tag, append([]byte{0, 1, f[12], f[13]}, f[14:]...)), "%s %s tagged %x", fam.name, p.name, tag)
				add(Egress, ReasonVLAN, ethernet(wire.GatewayMAC, wire.GuestMAC, tag, append([]byte{0, 1, 0x81, 0, 0, 2, f[12], f[13]}, f[14:]...)), "%s %s tagged %x twice", fam.name, p.name, tag)
			}
		}
	}
	for _, e := range []uint16{0, 0x0001, 0x05dc, 0x0600, 0x0801, 0x0805, 0x0842, 0x22f3, 0x6558, 0x8035, 0x809b, 0x8137, 0x8847, 0x8848, 0x8863, 0x8864, 0x888e, 0x88cc, 0x88e5, 0x88f7, 0x8906, 0x9000, 0xffff} {
		add(Egress, ReasonEtherType, ethernet(wire.GatewayMAC, wire.GuestMAC, e, ipOf(sent(peer4, 6, protos[0].m))), "ethertype %04x out", e)
		add(Ingress, ReasonEtherType, ethernet(wire.GuestMAC, wire.GatewayMAC, e, ipOf(got(peer4, 6, protos[0].m))), "ethertype %04x in", e)
	}

	// ARP.
	for name, f := range map[string][]byte{
		"claims the gateway's address":    arp(2, wire.GuestMAC, wire.Gateway4, wire.Guest4),
		"claims the endpoint's address":   arp(2, wire.GuestMAC, own4, wire.Gateway4),
		"claims another address":          arp(1, wire.GuestMAC, peer4, wire.Gateway4),
		"has another MAC":                 arp(2, other, wire.Guest4, wire.Gateway4),
		"has the gateway's MAC":           arp(2, wire.GatewayMAC, wire.Guest4, wire.Gateway4),
		"asks for another address":        arp(1, wire.GuestMAC, wire.Guest4, peer4),
		"asks for the endpoint's address": arp(1, wire.GuestMAC, wire.Guest4, own4),
		"answers from nowhere":            arp(2, wire.GuestMAC, netip.IPv4Unspecified(), wire.Gateway4),
		"is RARP":                         arp(3, wire.GuestMAC, wire.Guest4, wire.Gateway4),
		"is InARP":                        arp(8, wire.GuestMAC, wire.Guest4, wire.Gateway4),
		"is not Ethernet":                 clone(arp(1, wire.GuestMAC, wire.Guest4, wire.Gateway4), func(b []byte) { b[1] = 6 }),
		"is not IPv4":                     clone(arp(1, wire.GuestMAC, wire.Guest4, wire.Gateway4), func(b []byte) { b[2] = 0x86 }),
		"has a long MAC":                  clone(arp(1, wire.GuestMAC, wire.Guest4, wire.Gateway4), func(b []byte) { b[4] = 8 }),
		"has a long address":              clone(arp(1, wire.GuestMAC, wire.Guest4, wire.Gateway4), func(b []byte) { b[5] = 16 }),
		"has operation 256":               arp(256, wire.GuestMAC, wire.Guest4, wire.Gateway4),
	} {
		add(Egress, ReasonARP, ethernet(broadcast, wire.GuestMAC, 0x0806, f), "ARP that %s", name)
		add(Egress, ReasonARP, ethernet(wire.GatewayMAC, wire.GuestMAC, 0x0806, f), "ARP that %s, unicast", name)
	}
	add(Egress, ReasonTruncated, ethernet(broadcast, wire.GuestMAC, 0x0806, arp(1, wire.GuestMAC, wire.Guest4, wire.Gateway4)[:27]), "ARP cut off")
	for _, a := range []netip.Addr{peer4, own4, wire.Guest4, netip.IPv4Unspecified()} {
		add(Ingress, ReasonARP, ethernet(broadcast, wire.GatewayMAC, 0x0806, arp(1, wire.GatewayMAC, a, wire.Guest4)), "ARP in from %v", a)
		add(Ingress, ReasonARP, ethernet(wire.GuestMAC, wire.GatewayMAC, 0x0806, arp(2, other, wire.Gateway4, wire.Guest4)), "ARP in with another MAC (%v)", a)
	}

	// Neighbour discovery.
	snma, smac := solicitedNode(wire.Gateway6)
	ll := linkLocal(wire.GuestMAC)
	allNodes, allRouters := netip.MustParseAddr("ff02::1"), netip.MustParseAddr("ff02::2")
	sll := append([]byte{1, 1}, wire.GuestMAC[:]...)
	tll := append([]byte{2, 1}, wire.GuestMAC[:]...)
	for _, src := range []netip.Addr{wire.Guest6, ll} {
		for _, typ := range []byte{130, 131, 132, 133, 134, 137, 143} {
			add(Egress, ReasonND, nd([6]byte{0x33, 0x33, 0, 0, 0, 1}, wire.GuestMAC, src, allNodes, typ, wire.Guest6, sll...), "ND type %d from %v to all nodes", typ, src)
			add(Egress, ReasonND, nd([6]byte{0x33, 0x33, 0, 0, 0, 2}, wire.GuestMAC, src, allRouters, typ, wire.Guest6), "ND type %d from %v to all routers", typ, src)
			add(Egress, ReasonND, nd(wire.GatewayMAC, wire.GuestMAC, src, wire.Gateway6, typ, wire.Guest6), "ND type %d from %v to the gateway", typ, src)
		}
	}
	for _, a := range []netip.Addr{wire.Gateway6, linkLocal(wire.GatewayMAC), own6, peer6, netip.MustParseAddr("fd77::3:8")} {
		add(Egress, ReasonND, nd([6]byte{0x33, 0x33, 0, 0, 0, 1}, wire.GuestMAC, wire.Guest6, allNodes, 136, a, tll...), "advertisement of %v", a)
		add(Egress, ReasonND, nd([6]byte{0x33, 0x33, 0, 0, 0, 1}, wire.GuestMAC, a, allNodes, 136, a, tll...), "advertisement from and of %v", a)
		add(Egress, ReasonND, nd(smac, wire.GuestMAC, a, snma, 135, wire.Gateway6, sll...), "solicitation from %v", a)
	}
	for _, a := range []netip.Addr{own6, peer6, netip.MustParseAddr("fd77::3:8")} {
		s, m := solicitedNode(a)
		add(Egress, ReasonND, nd(m, wire.GuestMAC, wire.Guest6, s, 135, a, sll...), "solicitation for %v", a)
	}
	good := nd(smac, wire.GuestMAC, wire.Guest6, snma, 135, wire.Gateway6, sll...)
	for name, edit := range map[string]func(f []byte){
		"hop limit 254":            func(f []byte) { f[21] = 254 },
		"hop limit 1":              func(f []byte) { f[21] = 1 },
		"code 1":                   func(f []byte) { f[55] = 1 },
		"another MAC":              func(f []byte) { f[85] = 9 },
		"an option of 16 bytes":    func(f []byte) { f[79] = 2 },
		"an option of 0 bytes":     func(f []byte) { f[79] = 0 },
		"another option":           func(f []byte) { f[78] = 3 },
		"a target's option":        func(f []byte) { f[78] = 2 },
		"a MAC of another group":   func(f []byte) { f[5] ^= 1 },
		"a wider scope":            func(f []byte) { f[39] = 5 },
		"a source that is nothing": func(f []byte) { clear(f[22:38]) },
	} {
		add(Egress, ReasonND, clone(good, edit), "solicitation with %s", name)
	}
	for _, typ := range []byte{133, 134, 137, 143} {
		add(Ingress, ReasonND, nd([6]byte{0x33, 0x33, 0, 0, 0, 1}, wire.GatewayMAC, linkLocal(wire.GatewayMAC), allNodes, typ, wire.Gateway6), "ND type %d in", typ)
	}

	// DHCP.
	for _, ports := range [][2]uint16{{67, 68}, {68, 67}, {67, 67}, {68, 443}, {443, 67}, {443, 68}, {67, 443}} {
		add(Egress, ReasonDHCP, sent(peer4, 17, udp(ports[0], ports[1], 1)), "DHCP from port %d to %d", ports[0], ports[1])
		add(Ingress, ReasonDHCP, got(peer4, 17, udp(ports[0], ports[1], 1)), "DHCP in from port %d to %d", ports[0], ports[1])
		add(Egress, ReasonDHCP, sent(wire.Gateway4, 17, udp(ports[0], ports[1], 1)), "DHCP to the gateway from port %d to %d", ports[0], ports[1])
	}
	for _, ports := range [][2]uint16{{546, 547}, {547, 546}, {547, 443}, {443, 547}, {443, 546}} {
		add(Egress, ReasonDHCP, sent(peer6, 17, udp(ports[0], ports[1], 1)), "DHCPv6 from port %d to %d", ports[0], ports[1])
		add(Ingress, ReasonDHCP, got(peer6, 17, udp(ports[0], ports[1], 1)), "DHCPv6 in from port %d to %d", ports[0], ports[1])
	}

	// Fragments: first, middle, last, tiny, overlapping, with the reserved bit.
	for _, p := range protos {
		for _, frag := range []uint16{0x2000, 0x2001, 0x0001, 0x0002, 0x00b9, 0x1fff, 0x3fff, 0x8000, 0xc000, 0xa000, 0x6000, 0x4001} {
			add(Egress, ReasonFragment, edited(sent(peer4, p.n, p.m), func(f []byte) { be.PutUint16(f[20:], frag) }), "%s fragment %04x", p.name, frag)
			add(Ingress, ReasonFragment, edited(got(peer4, p.n, p.m), func(f []byte) { be.PutUint16(f[20:], frag) }), "%s fragment %04x in", p.name, frag)
		}
		for _, n := range []int{0, 1, 4, 8} {
			m := p.m[:min(n, len(p.m))]
			f := ethernet(wire.GatewayMAC, wire.GuestMAC, 0x0800, append(ipHeader(wire.Guest4, peer4, p.n, len(m)), m...))
			add(Egress, ReasonFragment, edited(f, func(f []byte) { be.PutUint16(f[20:], 0x2000) }), "tiny %s fragment of %d bytes", p.name, n)
		}
	}

	// IP options, and headers that lie.
	for _, p := range protos {
		for words := 6; words <= 15; words++ {
			for name, option := range map[string]byte{"nop": 1, "record route": 7, "source route": 131} {
				opts := make([]byte, (words-5)*4)
				for i := range opts {
					opts[i] = 1
				}
				opts[0] = option
				m := append([]byte{}, p.m...)
				sumL4(wire.Guest4, peer4, p.n, m)
				h := append(ipHeader(wire.Guest4, peer4, p.n, len(opts)+len(m)), opts...)
				h[0] = 0x40 | byte(words)
				f := ethernet(wire.GatewayMAC, wire.GuestMAC, 0x0800, append(h, m...))
				fix(f)
				add(Egress, ReasonIPOptions, f, "%s with %d bytes of options, %s first", p.name, len(opts), name)
			}
		}
		for name, edit := range map[string]func(f []byte){
			"version 0":             func(f []byte) { f[14] = 0x05 },
			"version 5":             func(f []byte) { f[14] = 0x55 },
			"version 6":             func(f []byte) { f[14] = 0x65 },
			"version 15":            func(f []byte) { f[14] = 0xf5 },
			"a header of 0 words":   func(f []byte) { f[14] = 0x40 },
			"a header of 4 words":   func(f []byte) { f[14] = 0x44 },
			"length 0":              func(f []byte) { be.PutUint16(f[16:], 0) },
			"length 19":             func(f []byte) { be.PutUint16(f[16:], 19) },
			"a length beyond frame": func(f []byte) { be.PutUint16(f[16:], uint16(len(f)-13)) },
			"length 65535":          func(f []byte) { be.PutUint16(f[16:], 65535) },
			"TTL 0":                 func(f []byte) { f[22] = 0 },
		} {
			add(Egress, ReasonIPHeader, edited(sent(peer4, p.n, p.m), edit), "%s with %s", p.name, name)
		}
		add(Egress, ReasonIPHeader, append(sent(peer4, p.n, append(p.m[:len(p.m):len(p.m)], make([]byte, 40)...)[:len(p.m)]), make([]byte, 40)...), "%s with bytes behind it", p.name)
	}
	for _, p := range protos6 {
		for name, edit := range map[string]func(f []byte){
			"version 4":             func(f []byte) { f[14] = 0x40 },
			"version 0":             func(f []byte) { f[14] = 0 },
			"payload length 0":      func(f []byte) { be.PutUint16(f[18:], 0) },
			"a length beyond frame": func(f []byte) { be.PutUint16(f[18:], uint16(len(f)-53)) },
			"length 65535":          func(f []byte) { be.PutUint16(f[18:], 65535) },
			"hop limit 0":           func(f []byte) { f[21] = 0 },
		} {
			add(Egress, ReasonIPHeader, clone(sent(peer6, p.n, p.m), edit), "IPv6 %s with %s", p.name, name)
		}
		for _, next := range []byte{0, 43, 51, 60, 135, 139, 140} {
			ext := append([]byte{protoOf(peer6, p.n), 0, 1, 4, 0, 0, 0, 0}, p.m...)
			f := ethernet(wire.GatewayMAC, wire.GuestMAC, 0x86dd, append(ipHeader(wire.Guest6, peer6, next, len(ext)), ext...))
			add(Egress, ReasonExtHeader, f, "IPv6 %s behind extension header %d", p.name, next)
		}
		for _, off := range []uint16{0, 1, 8, 0xfff9} {
			ext := append([]byte{protoOf(peer6, p.n), 0, byte(off >> 8), byte(off), 0, 0, 0, 1}, p.m...)
			f := ethernet(wire.GatewayMAC, wire.GuestMAC, 0x86dd, append(ipHeader(wire.Guest6, peer6, 44, len(ext)), ext...))
			add(Egress, ReasonFragment, f, "IPv6 %s fragment %04x", p.name, off)
		}
	}

	// Tunnels and every other protocol.
	for n := range 256 {
		if n != 1 && n != 6 && n != 17 {
			f := ethernet(wire.GatewayMAC, wire.GuestMAC, 0x0800, append(ipHeader(wire.Guest4, peer4, byte(n), 40), make([]byte, 40)...))
			add(Egress, ReasonProtocol, f, "IPv4 protocol %d", n)
		}
	}
	for _, n := range []byte{1, 2, 4, 41, 46, 47, 50, 59, 89, 94, 97, 98, 103, 108, 112, 115, 132, 137, 253, 254, 255} {
		f := ethernet(wire.GatewayMAC, wire.GuestMAC, 0x86dd, append(ipHeader(wire.Guest6, peer6, n, 40), make([]byte, 40)...))
		add(Egress, ReasonProtocol, f, "IPv6 protocol %d", n)
	}

	// Layer 4 headers.
	for _, fam := range families {
		for n := 1; n < 20; n += 3 {
			f := sent(fam.peer, 6, tcp(1, 2, syn)[:n])
			add(Egress, ReasonL4Header, f, "%s TCP of %d bytes", fam.name, n)
		}
		for n := 1; n < 8; n += 2 {
			add(Egress, ReasonL4Header, sent(fam.peer, 17, udp(1, 2)[:n]), "%s UDP of %d bytes", fam.name, n)
			add(Egress, ReasonL4Header, sent(fam.peer, 1, echo(8, 2)[:n]), "%s ICMP of %d bytes", fam.name, n)
		}
		for _, off := range []byte{0x00, 0x10, 0x40, 0x60, 0xf0} {
			m := tcp(4000, 443, syn)
			m[12] = off
			add(Egress, ReasonL4Header, sent(fam.peer, 6, m), "%s TCP with data offset %d", fam.name, off>>4)
		}
		for flags := range 64 {
			f := byte(flags)
			possible := f&(syn|rst|ack) != 0 && !(f&syn != 0 && f&(fin|rst) != 0) && !(f&fin != 0 && f&(rst) != 0) && !(f&fin != 0 && f&ack == 0)
			if !possible {
				add(Egress, ReasonL4Header, sent(fam.peer, 6, tcp(4000, 443, f)), "%s TCP with flags %02x", fam.name, f)
			} else if f&(syn|ack) != syn {
				add(Egress, ReasonNoFlow, sent(fam.peer, 6, tcp(4000, 443, f)), "%s TCP with flags %02x without a flow", fam.name, f)
				add(Ingress, ReasonNoFlow, got(fam.peer, 6, tcp(443, 4000, f)), "%s TCP in with flags %02x without a flow", fam.name, f)
			}
		}
		for _, n := range []uint16{0, 7, 10, 12, 100, 65535} {
			m := udp(4000, 443, 1, 2, 3)
			be.PutUint16(m[4:], n)
			add(Egress, ReasonL4Header, sent(fam.peer, 17, m), "%s UDP with length %d of 11", fam.name, n)
		}
		for _, m := range [][]byte{tcp(0, 443, syn), tcp(4000, 0, syn), tcp(0, 0, syn)} {
			add(Egress, ReasonL4Header, sent(fam.peer, 6, m), "%s TCP with port 0 (%x)", fam.name, m[:4])
		}
		for _, m := range [][]byte{udp(0, 443), udp(4000, 0), udp(0, 0)} {
			add(Egress, ReasonL4Header, sent(fam.peer, 17, m), "%s UDP with port 0 (%x)", fam.name, m[:4])
		}
	}

	// ICMP: other types, and replies and errors that belong to no flow.
	for n := range 256 {
		switch n {
		case 0:
			add(Egress, ReasonNoFlow, sent(peer4, 1, echo(0, 7)), "echo reply without a request")
			add(Ingress, ReasonNoFlow, got(peer4, 1, echo(0, 7)), "echo reply in without a request")
		case 3, 11, 12:
			add(Egress, ReasonNoFlow, sent(peer4, 1, icmpError(byte(n), 0, ipOf(got(peer4, 17, udp(443, 4000, 1, 2)))[:28])), "ICMP error %d without a flow", n)
			add(Egress, ReasonL4Header, sent(peer4, 1, icmpError(byte(n), 0, nil)), "ICMP error %d that quotes nothing", n)
			add(Ingress, ReasonNoFlow, got(peer4, 1, icmpError(byte(n), 0, ip(own4, peer4, 6, tcp(4000, 443, syn)))), "ICMP error %d in without a flow", n)
		case 8:
		default:
			if n%3 == 0 || n < 20 {
				add(Egress, ReasonICMPType, sent(peer4, 1, echo(byte(n), 7)), "ICMP type %d", n)
			}
			add(Ingress, ReasonICMPType, got(peer4, 1, echo(byte(n), 7)), "ICMP type %d in", n)
		}
	}
	for _, n := range []byte{0, 5, 100, 127, 138, 139, 140, 141, 142, 144, 151, 153, 200, 255} {
		add(Egress, ReasonICMPType, sent(peer6, 1, echo(n, 7)), "ICMPv6 type %d", n)
	}

	// The floor, by every protocol; and peers that no rule names.
	floor := []string{
		"169.254.169.254", "169.254.170.2", "169.254.0.1", "100.100.100.200", "168.63.129.16", "127.0.0.1", "127.1.2.3", "0.0.0.0", "0.1.2.3",
		"224.0.0.1", "224.0.0.251", "239.255.255.250", "240.0.0.1", "255.255.255.255", "192.0.0.8", "192.88.99.1",
		"172.31.255.0", "172.31.255.2", "172.31.255.3", own4.String(),
		"fd00:ec2::254", "fd20:ce::254", "::1", "::", "fe80::1", "fec0::1", "ff02::1", "ff02::fb", "ff0e::1", "::ffff:198.51.100.1", "::ffff:169.254.169.254",
		"::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2001::1", "2002:a9fe:a9fe::1", "100::1", "4000::1", "fd64:726f:7773:1::2", own6.String(),
	}
	for _, s := range floor {
		a := netip.MustParseAddr(s)
		for _, p := range protos {
			m := p.m
			if a.Is6() && p.n == 1 {
				m = echo(128, 7)
			}
			add(Egress, ReasonFloor, sent(a, p.n, m), "%s to %s", p.name, s)
			add(Ingress, ReasonFloor, got(a, p.n, m), "%s from %s", p.name, s)
		}
	}
	for _, s := range []string{"10.200.0.1", "10.200.3.6", "10.200.3.8", "10.200.255.255", "fd77::1", "fd77::3:8"} {
		a := netip.MustParseAddr(s)
		for _, p := range protos {
			m := p.m
			if a.Is6() && p.n == 1 {
				m = echo(128, 7)
			}
			add(Egress, ReasonDefault, sent(a, p.n, m), "%s to the endpoint %s", p.name, s)
			add(Ingress, ReasonSrcInterface, got(a, p.n, m), "%s from the endpoint %s, which is not there", p.name, s)
		}
	}
	for _, a := range []netip.Addr{netip.MustParseAddr("198.51.100.66"), netip.MustParseAddr("2001:db8::66")} {
		for _, p := range protos {
			m := p.m
			if a.Is6() && p.n == 1 {
				m = echo(128, 7)
			}
			add(Egress, ReasonRule, sent(a, p.n, m), "%s to %v, which is denied", p.name, a)
		}
	}
	add(Egress, ReasonRule, sent(peer4, 6, tcp(4000, 25, syn)), "TCP to port 25")
	add(Egress, ReasonRule, sent(peer6, 17, udp(4000, 25)), "UDP to port 25")
	add(Ingress, ReasonRule, got(peer4, 6, tcp(4000, 22, syn)), "TCP in to port 22")

	// Segmentation offload.
	for _, fam := range families {
		for _, size := range []int{1, 8, 500, 1448} {
			out = append(out, hostile{name: fmt.Sprintf("%s UDP in segments of %d", fam.name, size), dir: Egress, frame: sent(fam.peer, 17, udp(4000, 443, make([]byte, 3000)...)), gso: size, reason: ReasonGSO})
		}
		for _, size := range []int{1, 2, 7} {
			out = append(out, hostile{name: fmt.Sprintf("%s TCP in segments of %d", fam.name, size), dir: Egress, frame: sent(fam.peer, 6, tcp(4000, 443, syn, make([]byte, 3000)...)), gso: size, reason: ReasonGSO})
		}
		out = append(out, hostile{name: fam.name + " ICMP in segments", dir: Egress, frame: sent(fam.peer, 1, echo(8, 1, make([]byte, 2000)...)), gso: 1000, reason: ReasonGSO})
	}
	return out
}

func TestPrograms_hostile_frames_are_denied(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	if err := e.Install(compile(t, hostilePolicy)); err != nil {
		t.Fatal(err)
	}
	if err := e.SetTime(1e9); err != nil {
		t.Fatal(err)
	}
	frames := hostileFrames()
	if len(frames) < 1000 {
		t.Errorf("only %d frames", len(frames))
	}
	for _, h := range frames {
		r, err := e.Run(h.dir, h.frame, h.gso)
		if err != nil {
			t.Errorf("%s: %v", h.name, err)
			continue
		}
		if r.Verdict != Deny || r.Action == 0 || r.Reason != h.reason {
			t.Errorf("%s: %s by %s (action %d), want deny by %s: %x", h.name, r.Verdict, r.Reason, r.Action, h.reason, h.frame)
		}
	}
	t.Logf("%d frames", len(frames))

	// The same policy lets these pass. So the frames above fail for their stated reason.
	for name, f := range map[string][]byte{
		"TCP": sent(peer4, 6, tcp(4000, 443, syn)), "UDP": sent(peer4, 17, udp(4000, 443, 1)), "echo": sent(peer4, 1, echo(8, 7)),
		"TCP on IPv6": sent(peer6, 6, tcp(4000, 443, syn)), "UDP on IPv6": sent(peer6, 17, udp(4000, 443, 1)), "echo on IPv6": sent(peer6, 1, echo(128, 7)),
		"to the gateway": sent(wire.Gateway4, 17, udp(4000, 53, 1)), "to a private address": sent(netip.MustParseAddr("10.1.1.1"), 17, udp(4000, 53, 1)),
		"padded": append(sent(peer4, 17, udp(4001, 443, 1)), 0, 0, 0),
		"ARP":    ethernet(broadcast, wire.GuestMAC, 0x0806, arp(1, wire.GuestMAC, wire.Guest4, wire.Gateway4)),
	} {
		r, err := e.Run(Egress, f, 0)
		if err != nil || r.Verdict != Allow || r.Action != 0 {
			t.Errorf("%s: %s by %s, %v, want allow", name, r.Verdict, r.Reason, err)
		}
	}
}

func TestPrograms_without_a_policy_deny(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	for _, f := range [][]byte{sent(peer4, 6, tcp(4000, 443, syn)), ethernet(broadcast, wire.GuestMAC, 0x0806, arp(1, wire.GuestMAC, wire.Guest4, wire.Gateway4))} {
		for _, d := range []Direction{Egress, Ingress} {
			r, err := e.Run(d, f, 0)
			if err != nil || r.Action == 0 || r.Reason != ReasonNoPolicy {
				t.Errorf("%s: action %d by %s, %v", d, r.Action, r.Reason, err)
			}
		}
	}
}

// The flow of an IPv4 peer does not open the IPv6 address that maps it.
func TestPrograms_flow_does_not_open_the_mapped_address(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	if err := e.Install(compile(t, hostilePolicy)); err != nil {
		t.Fatal(err)
	}
	mapped := netip.MustParseAddr("::ffff:198.51.100.1")
	for _, m := range [][]byte{tcp(4000, 443, syn), tcp(4000, 443, ack), udp(4000, 443, 1)} {
		proto := byte(6)
		if len(m) < 20 {
			proto = 17
		}
		if _, err := e.Run(Egress, sent(peer4, proto, m), 0); err != nil {
			t.Fatal(err)
		}
		if r, err := e.Run(Egress, sent(mapped, proto, m), 0); err != nil || r.Action == 0 || r.Reason != ReasonFloor {
			t.Errorf("out: %s by %s, %v", r.Verdict, r.Reason, err)
		}
		back := tcp(443, 4000, syn|ack)
		if proto == 17 {
			back = udp(443, 4000, 1)
		}
		if r, err := e.Run(Ingress, got(mapped, proto, back), 0); err != nil || r.Action == 0 || r.Reason != ReasonFloor {
			t.Errorf("in: %s by %s, %v", r.Verdict, r.Reason, err)
		}
	}
}

func TestPrograms_udp_without_checksum_stays_so(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	if err := e.Install(compile(t, hostilePolicy)); err != nil {
		t.Fatal(err)
	}
	f := clone(sent(peer4, 17, udp(4000, 443, 1, 2, 3)), func(f []byte) { f[40], f[41] = 0, 0 })
	r, err := e.Run(Egress, f, 0)
	if err != nil || r.Verdict != Allow || r.Bytes[40] != 0 || r.Bytes[41] != 0 || checksum(r.Bytes[14:34]) != 0 {
		t.Errorf("%s by %s, %v: %x", r.Verdict, r.Reason, err, r.Bytes)
	}
}
