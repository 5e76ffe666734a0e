package tlsname_test

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/tlsname"
)

// stranger is a guest that makes its own TCP segments.
type stranger struct {
	l        *lab
	port     uint16
	seq, ack uint32 // of the first byte of its stream, and of the peer's
}

const (
	fin = 1
	syn = 2
	psh = 8
	ack = 16
)

func sum(parts ...[]byte) uint16 {
	var s uint32
	for _, b := range parts {
		for i := 0; i < len(b); i += 2 {
			s += uint32(b[i]) << 8
			if i+1 < len(b) {
				s += uint32(b[i+1])
			}
		}
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

// segment sends a segment. at is its place in the stream.
func (s *stranger) segment(flags byte, at int, payload []byte, edit ...func(frame []byte)) {
	s.l.t.Helper()
	be, w := binary.BigEndian, netpolicy.TheWire
	m := make([]byte, 20, 20+len(payload))
	be.PutUint16(m, s.port)
	be.PutUint16(m[2:], 8443)
	be.PutUint32(m[4:], s.seq+uint32(at))
	if flags&ack != 0 {
		be.PutUint32(m[8:], s.ack)
	}
	m[12], m[13] = 5<<4, flags
	be.PutUint16(m[14:], 60000)
	m = append(m, payload...)
	ip := []byte{0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0}
	ip = append(append(ip, w.Guest4.AsSlice()...), peerA.AsSlice()...)
	be.PutUint16(ip[2:], uint16(20+len(m)))
	be.PutUint16(ip[10:], sum(ip))
	be.PutUint16(m[16:], sum(ip[12:20], []byte{0, 6, byte(len(m) >> 8), byte(len(m))}, m))
	f := append(append(append(bytes.Clone(w.GatewayMAC[:]), w.GuestMAC[:]...), 8, 0), append(ip, m...)...)
	for _, e := range edit {
		e(f)
	}
	if _, err := s.l.tap.Write(append(make([]byte, vnetHeader), f...)); err != nil {
		s.l.t.Fatal(err)
	}
}

// connect makes the TCP handshake. The SYN carries data.
func (s *stranger) connect(data []byte) {
	s.l.t.Helper()
	s.segment(syn, -1, data)
	if err := s.l.tap.SetReadDeadline(time.Now().Add(waitMost)); err != nil {
		s.l.t.Fatal(err)
	}
	b := make([]byte, 70000)
	for {
		n, err := s.l.tap.Read(b)
		if err != nil {
			s.l.t.Fatalf("waiting for an answer: %v", err)
		}
		f := b[vnetHeader:n]
		be := binary.BigEndian
		if n < vnetHeader+54 || be.Uint16(f[12:]) != 0x0800 || f[23] != 6 || be.Uint16(f[36:]) != s.port {
			continue
		}
		if src := netip.AddrFrom4([4]byte(f[26:30])); src != peerA || be.Uint16(f[34:]) != 8443 || f[47]&(syn|ack) != syn|ack {
			s.l.t.Fatalf("an answer from %v, %x", src, f)
		}
		s.ack = be.Uint32(f[38:]) + 1
		s.segment(ack, 0, nil)
		return
	}
}

// Whatever a guest does with its segments, the peer gets a hello with an allowed name, or nothing.
func TestServer_segments_that_say_two_things(t *testing.T) {
	l := newLab(t, false, waitMost)
	got := make(chan []byte, 1)
	p := l.serve(netip.AddrPortFrom(peerA, 8443), record(got))
	good := clientHello(t, "good.example")
	evil := bytes.Replace(good, []byte("good.example"), []byte("evil.example"), 1)
	cut := bytes.Index(good, []byte("good.example"))
	x, y := cut+2, cut+8 // the middle part has the letters that differ, and so has the first
	badSum := func(f []byte) { f[len(f)-1] ^= 1 }
	port := uint16(5000)
	for _, c := range []struct {
		what string
		want string // the name in what the peer gets, empty for nothing, "?" for either
		do   func(s *stranger)
	}{
		{"a hello in the SYN, and another one after it", "good.example", func(s *stranger) {
			s.connect(evil)
			s.segment(ack|psh, 0, good)
		}},
		{"an allowed hello in the SYN, and another one after it", "", func(s *stranger) {
			s.connect(good)
			s.segment(ack|psh, 0, evil)
		}},
		{"an allowed name with a wrong checksum, then another", "", func(s *stranger) {
			s.connect(nil)
			s.segment(ack|psh, 0, good, badSum)
			s.segment(ack|psh, 0, evil)
		}},
		{"a foreign name with a wrong checksum, then an allowed one", "good.example", func(s *stranger) {
			s.connect(nil)
			s.segment(ack|psh, 0, evil, badSum)
			s.segment(ack|psh, 0, good)
		}},
		{"an allowed name out of the window, then another", "", func(s *stranger) {
			s.connect(nil)
			s.segment(ack|psh, 1<<30, good)
			s.segment(ack|psh, 0, evil)
		}},
		{"sent again with another name after the first part", "good.example", func(s *stranger) {
			s.connect(nil)
			s.segment(ack|psh, 0, good[:y])
			s.segment(ack|psh, 0, evil[:y])
			s.segment(ack|psh, y, good[y:])
		}},
		{"the other way round", "", func(s *stranger) {
			s.connect(nil)
			s.segment(ack|psh, 0, evil[:y])
			s.segment(ack|psh, 0, good[:y])
			s.segment(ack|psh, y, good[y:])
		}},
		{"out of order, with two kinds of the middle", "?", func(s *stranger) {
			s.connect(nil)
			s.segment(ack|psh, y, good[y:])
			s.segment(ack|psh, cut, evil[cut:y])
			s.segment(ack|psh, cut, good[cut:y])
			s.segment(ack|psh, 0, good[:cut])
		}},
		{"overlapping, with two kinds of the middle", "?", func(s *stranger) {
			s.connect(nil)
			s.segment(ack|psh, cut, good[cut:])
			s.segment(ack|psh, cut-20, evil[cut-20:x])
			s.segment(ack|psh, 0, evil[:y])
		}},
		{"another name after it was judged", "good.example", func(s *stranger) {
			s.connect(nil)
			s.segment(ack|psh, 0, good)
			s.segment(ack|psh, 0, evil)
		}},
	} {
		port++
		s := &stranger{l: l, port: port, seq: 1000}
		c.do(s)
		// The end, for a peer that got something. It may arrive before the rest.
		s.segment(ack|fin, len(good), nil)
		var peerGot []byte
		for refused, end := false, time.Now().Add(waitMost); !refused && peerGot == nil; time.Sleep(time.Millisecond) {
			select {
			case peerGot = <-got:
			default:
			}
			l.mu.Lock()
			for _, r := range l.refused {
				refused = true
				if r.Reason != netpolicy.ReasonTLSName || r.Name != "evil.example" {
					t.Errorf("%s: refused %+v", c.what, r)
				}
			}
			l.refused = nil
			l.mu.Unlock()
			if time.Now().After(end) {
				t.Fatalf("%s: nothing has come of it: %+v", c.what, l.server.Stats())
			}
		}
		name := ""
		if peerGot != nil {
			var err error
			if name, _, err = tlsname.Hello(peerGot); err != nil || name != "good.example" {
				t.Errorf("%s: the peer has got the name %q, %v", c.what, name, err)
			}
		}
		if c.want != "?" && name != c.want {
			t.Errorf("%s: the peer has got the name %q, want %q", c.what, name, c.want)
		}
		t.Logf("%s: the peer has got %q", c.what, name)
	}
	if p.accepted.Load() != l.dialed.Load() {
		t.Errorf("%d connections of %d", p.accepted.Load(), l.dialed.Load())
	}
}
