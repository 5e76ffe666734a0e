package link_test

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"os"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

// The programs translate twice what one guest sends to another. If the sender left the checksum to others, the host
// completes it at the end; else it must have stayed right all the time.
func TestLink_checksums_survive_two_translations(t *testing.T) {
	ownNamespace(t)
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	root := testRoot(t)
	other := Identity{Address4: netip.MustParseAddr("10.200.3.8")}
	p, err := Parse([]byte(`
rules:
  - {direction: egress, verdict: allow, cidrs: [10.200.0.0/16], protocols: [any], ports: [any]}
  - {direction: ingress, verdict: allow, cidrs: [10.200.0.0/16], protocols: [any], ports: [any]}
`))
	if err != nil {
		t.Fatal(err)
	}
	taps := map[string]*tapWire{}
	for name, id := range map[string]Identity{"tapa": {Address4: own4}, "tapb": other} {
		taps[name] = newTAP(t, name)
		s, err := Compile(p, id, Environment{})
		if err != nil {
			t.Fatal(err)
		}
		l, err := Attach(Config{Endpoint: name, Interface: name, Root: root}, s)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := l.Remove(); err != nil {
				t.Error(err)
			}
		})
		if err := l.Up(id); err != nil {
			t.Fatal(err)
		}
	}
	port := uint16(5000)
	for _, tt := range []struct {
		name   string
		proto  byte
		at     int // of the checksum, in the segment
		frames func(payload []byte) []byte
	}{
		{"TCP", 6, 16, func(b []byte) []byte { return tcp(port, 80, syn, b...) }},
		{"UDP", 17, 6, func(b []byte) []byte { return udp(port, 80, b...) }},
	} {
		for n := range 200 {
			port++
			// Payloads with all kinds of sums, with carries.
			payload := bytes.Repeat([]byte{0xff - byte(n), byte(n * 7), byte(n), 0xff}, 5)[:n%17]
			whole := sent(other.Address4, tt.proto, tt.frames(payload))
			partial := clone(whole, func(f []byte) {
				pseudo := append(append(wire.Guest4.AsSlice(), other.Address4.AsSlice()...), 0, tt.proto, 0, byte(len(f)-34))
				be.PutUint16(f[34+tt.at:], ^checksum(pseudo))
			})
			header := make([]byte, vnetHeader)
			header[0] = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
			binary.LittleEndian.PutUint16(header[6:], 34)
			binary.LittleEndian.PutUint16(header[8:], uint16(tt.at))
			taps["tapa"].send(whole)
			first := taps["tapb"].receive(0x0800, tt.proto)
			taps["tapa"].sendWith(header, partial)
			second := taps["tapb"].receive(0x0800, tt.proto)
			for what, f := range map[string][]byte{"a whole": first, "a partial": second} {
				if !sumsRight(f) || !bytes.HasSuffix(f, payload) {
					t.Fatalf("%s, %d bytes, with %s checksum: %x came of %x", tt.name, n%17, what, f, whole)
				}
			}
		}
	}
	// A datagram without a checksum stays without one.
	none := clone(sent(other.Address4, 17, udp(4000, 80, 1, 2, 3)), func(f []byte) { f[40], f[41] = 0, 0 })
	taps["tapa"].send(none)
	if f := taps["tapb"].receive(0x0800, 17); f[40] != 0 || f[41] != 0 || checksum(f[14:34]) != 0 {
		t.Errorf("%x came of a datagram without a checksum", f)
	}
}
