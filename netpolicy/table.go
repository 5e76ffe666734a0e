package netpolicy

import (
	"cmp"
	"encoding/binary"
	"net/netip"
)

// The table is an array of rows of one size, which bpf/endpoint.c reads:
//
//	row 0      the identity: magic, generation, MACs and addresses, default verdicts, claim,
//	           whether there are limits, names in rules, tags in rules, names that are
//	           checked; the port where they are
//	row 1      roots of trees, rows of sets; limits
//	set        a bit for each rule; a bit for each word of these that is not 0
//	node of 4  16 keys of 32 bits in ascending order, 16 values
//	node of 6  8 keys of 128 bits, as high and low halves; 8 values
//
// A lookup in a tree finds the last key that is not above a number. The values of inner nodes are rows, those of
// leaves are sets, with the class of the address in the highest byte. A root is a row, with the number of levels
// in the highest byte. A node that is not full is padded with the highest key and the last value. Numbers are
// little-endian, addresses as in packets.

// RowSize is the size of a row in bytes.
const RowSize = 160

const (
	fanout4 = 16
	fanout6 = 8
	magic   = 0x31575244
	genAt   = 4   // offset of the generation in row 0
	claimAt = 116 // offset of the number of the slot's endpoint
)

type row [RowSize]byte

// Rows returns how many rows the table has.
func (s *Spec) Rows() int { return len(s.rows) }

// Fill writes the table to mem, with its generation and its endpoint's claim.
func (s *Spec) Fill(mem []byte, generation, claim uint32) {
	for i := range s.rows {
		copy(mem[i*RowSize:], s.rows[i][:])
	}
	binary.LittleEndian.PutUint32(mem[genAt:], generation)
	binary.LittleEndian.PutUint32(mem[claimAt:], claim)
}

// number is an address or a port.
type number struct{ hi, lo uint64 }

func (n number) compare(m number) int {
	if c := cmp.Compare(n.hi, m.hi); c != 0 {
		return c
	}
	return cmp.Compare(n.lo, m.lo)
}

func numberOf(a netip.Addr) number {
	if a.Is4() {
		b := a.As4()
		return number{lo: uint64(binary.BigEndian.Uint32(b[:]))}
	}
	b := a.As16()
	return number{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (n number) addr(six bool) netip.Addr {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], n.hi)
	binary.BigEndian.PutUint64(b[8:], n.lo)
	if six {
		return netip.AddrFrom16(b)
	}
	return netip.AddrFrom4([4]byte(b[12:]))
}

// edges returns the first address of a prefix, and the address after its last if there is one.
func edges(p netip.Prefix) (first, after number, more bool) {
	first = numberOf(p.Masked().Addr())
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	end, _ := netip.AddrFromSlice(last)
	next := end.Next()
	if !next.IsValid() {
		return first, number{}, false
	}
	return first, numberOf(next), true
}

type leaf struct {
	key   number
	value uint32
}

func fanoutOf(six bool) int {
	if six {
		return fanout6
	}
	return fanout4
}

// tree puts a tree into the table and returns its root. The first key is 0.
func (c *compiler) tree(leaves []leaf, six bool) uint32 {
	fanout := fanoutOf(six)
	for depth := uint32(1); ; depth++ {
		var up []leaf
		for len(leaves) > 0 {
			n := min(fanout, len(leaves))
			up = append(up, leaf{leaves[0].key, uint32(len(c.table))})
			c.table = append(c.table, nodeRow(leaves[:n], six))
			leaves = leaves[n:]
		}
		if len(up) == 1 {
			return depth<<24 | up[0].value
		}
		leaves = up
	}
}

func nodeRow(leaves []leaf, six bool) (r row) {
	le := binary.LittleEndian
	for i := range fanoutOf(six) {
		l := leaf{number{^uint64(0), ^uint64(0)}, leaves[len(leaves)-1].value}
		if i < len(leaves) {
			l = leaves[i]
		}
		if six {
			le.PutUint64(r[8*i:], l.key.hi)
			le.PutUint64(r[64+8*i:], l.key.lo)
			le.PutUint32(r[128+4*i:], l.value)
		} else {
			le.PutUint32(r[4*i:], uint32(l.key.lo))
			le.PutUint32(r[64+4*i:], l.value)
		}
	}
	return r
}

func setRow(b bitset) (r row) {
	var some uint32
	for i, w := range b {
		binary.LittleEndian.PutUint64(r[8*i:], w)
		if w != 0 {
			some |= 1 << i
		}
	}
	binary.LittleEndian.PutUint32(r[8*len(b):], some)
	return r
}

// heads is the content of rows 0 and 1.
type heads struct {
	identity      Identity
	fallback      [2]uint8
	words         uint8
	addr4, addr6  uint32
	ports         [2][2]uint32
	icmp          [2]uint32
	allow, reject uint32
	names         bool
	tags          uint32 // root; 0 is none
	checked       uint32 // root; 0 is none
	tlsPort       uint16
	limits        [2]limitSet
}

func (h *heads) put(table []row) {
	le, w := binary.LittleEndian, TheWire
	r := table[0][:]
	le.PutUint32(r, magic)
	copy(r[8:], w.GuestMAC[:])
	copy(r[14:], w.GatewayMAC[:])
	copy(r[20:], w.Guest4.AsSlice())
	copy(r[24:], w.Gateway4.AsSlice())
	copy(r[28:], h.identity.Address4.AsSlice())
	copy(r[32:], w.Guest6.AsSlice())
	copy(r[48:], w.Gateway6.AsSlice())
	if h.identity.Address6.IsValid() {
		copy(r[64:], h.identity.Address6.AsSlice())
		r[112] = 1
	}
	copy(r[80:], linkLocalOf(w.GuestMAC).AsSlice())
	copy(r[96:], linkLocalOf(w.GatewayMAC).AsSlice())
	r[113], r[114], r[115] = h.fallback[0], h.fallback[1], h.words

	r = table[1][:]
	for i, v := range []uint32{
		h.addr4, h.addr6, h.ports[0][0], h.ports[0][1], h.ports[1][0], h.ports[1][1],
		h.icmp[0], h.icmp[1], h.allow, h.reject, h.tags, h.checked,
	} {
		le.PutUint32(r[4*i:], v)
	}
	if h.names {
		table[0][122] = 1
	}
	if h.tags != 0 {
		table[0][123] = 1
	}
	if h.checked != 0 {
		table[0][124] = 1
	}
	binary.BigEndian.PutUint16(table[0][126:], h.tlsPort)
	for d, l := range h.limits {
		if l.any() {
			table[0][120+d] = 1
		}
		for i, v := range []uint64{
			l.bits.mult, l.bits.burst, l.packets.mult, l.packets.burst, l.connections.mult, l.connections.burst, l.quota,
		} {
			le.PutUint64(r[48+56*d+8*i:], v)
		}
	}
}
