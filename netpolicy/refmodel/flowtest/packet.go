package flowtest

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

// packet is one on its way through the model.
type packet struct {
	*refmodel.Packet
	m      *Model
	via    uint16 // the guest's port on the host, if the flow's name is checked
	quotes bool   // an ICMP error whose quoted packet is to be translated
}

// related says why the packet that an ICMP error quotes does not belong to a flow.
func (x *packet) related(now int64) netpolicy.Reason {
	q := x.L4[8:]
	var key flowKey
	var src, dst netip.Addr
	if x.Six {
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
	if x.Six {
		guest, own = netpolicy.TheWire.Guest6, x.m.id.Address6
	}
	srcPort, dstPort := be16(q), be16(q[2:])
	if x.Egress {
		// The guest complains of what it got.
		if src != x.Peer || dst != guest {
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
	case refmodel.ProtoTCP, refmodel.ProtoUDP:
	case x.Proto:
		if t := q[0]; x.Six && t != 128 && t != 129 || !x.Six && t != 8 && t != 0 {
			return netpolicy.ReasonNoFlow
		}
		key.peerPort, key.guestPort = 0, be16(q[4:])
	default:
		return netpolicy.ReasonNoFlow
	}
	if f := x.m.flows[key]; f.fresh(now) && f.via != 0 {
		return netpolicy.ReasonNoFlow // the peer has no part in it
	}
	if x.By.IsValid() && x.Spoofed(key.peer) {
		return netpolicy.ReasonNoFlow // on that way there is nobody but the host and that endpoint
	}
	if x.m.rules.Floor(key.peer) || x.m.live(key, now) == nil {
		return netpolicy.ReasonNoFlow
	}
	x.quotes = true
	return 0
}

// translate replaces the address and computes all checksums anew. The input's are
// supposed to have been right.
func (x *packet) translate() []byte {
	out := bytes.Clone(x.Bytes)
	own := x.m.id.Address4
	guest := netpolicy.TheWire.Guest4
	srcAt, dstAt := 26, 30
	if x.Six {
		own, guest = x.m.id.Address6, netpolicy.TheWire.Guest6
		srcAt, dstAt = 22, 38
	}
	at, quotedAt, to := srcAt, dstAt, own
	if !x.Egress {
		at, quotedAt, to = dstAt, srcAt, guest
	}
	copy(out[at:], to.AsSlice())
	l4 := out[x.L4At : x.L4At+len(x.L4)]
	if x.via != 0 {
		ends := [2]netip.AddrPort{netip.AddrPortFrom(own, x.via), netip.AddrPortFrom(netpolicy.TheWire.Gateway4, x.m.env.TLSPort)}
		if !x.Egress {
			ends = [2]netip.AddrPort{netip.AddrPortFrom(x.Peer, x.PeerPort), netip.AddrPortFrom(guest, x.GuestPort)}
		}
		for i, e := range ends {
			copy(out[26+4*i:], e.Addr().AsSlice())
			binary.BigEndian.PutUint16(l4[2*i:], e.Port())
		}
	}
	if x.quotes {
		inner := l4[8:]
		copy(inner[quotedAt-14:], to.AsSlice())
		if !x.Six {
			putSum(inner[:20], 10, 0)
		}
	}
	var pseudo uint32
	if x.Six {
		pseudo = sum(out[22:54]) + uint32(len(l4)) + uint32(x.Proto)
	} else {
		putSum(out[14:34], 10, 0)
		if x.Proto != refmodel.ProtoICMP {
			pseudo = sum(out[26:34]) + uint32(len(l4)) + uint32(x.Proto)
		}
	}
	switch x.Proto {
	case refmodel.ProtoTCP:
		putSum(l4, 16, pseudo)
	case refmodel.ProtoUDP:
		if be16(l4[6:]) != 0 || x.Six {
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

func be16(b []byte) uint16 { return binary.BigEndian.Uint16(b) }
