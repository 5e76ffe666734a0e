package link_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

// waitMost bounds a test's wait for an event that is immediate on any working machine.
const waitMost = 60 * time.Second

// ownNamespace moves the test's thread into a new network namespace. The thread ends with the test.
func ownNamespace(t *testing.T) {
	t.Helper()
	needRoot(t)
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("making a network namespace: %v", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
}

// tapWire is the guest's end of a TAP device.
type tapWire struct {
	t    *testing.T
	file *os.File
}

const vnetHeader = 12

func openTAP(name string, persist bool) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	req, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, vnetHeader); err != nil {
		unix.Close(fd)
		return nil, err
	}
	if persist {
		if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1); err != nil {
			unix.Close(fd)
			return nil, err
		}
	}
	return os.NewFile(uintptr(fd), "tap"), nil
}

func newTAP(t *testing.T, name string) *tapWire {
	t.Helper()
	f, err := openTAP(name, false)
	if err != nil {
		t.Fatalf("making a TAP device: %v", err)
	}
	t.Cleanup(func() { f.Close() })
	return &tapWire{t: t, file: f}
}

// send puts a frame on the wire. When it returns, the programs have seen it.
func (w *tapWire) send(frame []byte) { w.sendWith(make([]byte, vnetHeader), frame) }

func (w *tapWire) sendWith(header, frame []byte) {
	w.t.Helper()
	if err := w.try(header, frame); err != nil {
		w.t.Fatalf("sending a frame: %v", err)
	}
}

func (w *tapWire) try(header, frame []byte) error {
	_, err := w.file.Write(append(append([]byte{}, header...), frame...))
	return err
}

// receive waits for a frame of an ethertype and protocol.
func (w *tapWire) receive(ethertype uint16, proto byte) []byte {
	w.t.Helper()
	if err := w.file.SetReadDeadline(time.Now().Add(waitMost)); err != nil {
		w.t.Fatal(err)
	}
	b := make([]byte, 70000)
	for {
		n, err := w.file.Read(b)
		if err != nil {
			w.t.Fatalf("waiting for a frame: %v", err)
		}
		f := b[vnetHeader:n]
		if be.Uint16(f[12:]) != ethertype {
			continue
		}
		if ethertype == 0x0806 || ethertype == 0x0800 && f[23] == proto || ethertype == 0x86dd && f[20] == proto {
			return bytes.Clone(f)
		}
	}
}

var roots atomic.Int32

func testRoot(t *testing.T) string {
	root := fmt.Sprintf("%s-test-%d-%d", DefaultRoot, os.Getpid(), roots.Add(1))
	t.Cleanup(func() {
		names, err := Endpoints(root)
		if err != nil || len(names) > 0 {
			t.Errorf("left under %s: %v, %v", root, names, err)
		}
		if err := Sweep(root); err != nil {
			t.Error(err)
		}
		if err := os.Remove(root); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	return root
}

func compile(t testing.TB, text string) *Spec {
	t.Helper()
	p, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	s, err := Compile(p, endpoint, Environment{Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16"), netip.MustParsePrefix("fd77::/64")}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const hostUDP = `
rules:
  - {direction: egress, verdict: allow, groups: [host], protocols: [udp], ports: [7]}
`

func attach(t *testing.T, tap, policy string) (*Link, Config) {
	t.Helper()
	cfg := Config{Endpoint: "a1", Interface: tap, Root: testRoot(t)}
	l, err := Attach(cfg, compile(t, policy))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Remove(); err != nil {
			t.Error(err)
		}
	})
	if err := l.Up(endpoint); err != nil {
		t.Fatal(err)
	}
	return l, cfg
}

func count(t *testing.T, l *Link, d Direction, reason Reason) uint64 {
	t.Helper()
	all, err := l.Counters()
	if err != nil {
		t.Fatal(err)
	}
	return packets(all, d, reason)
}

func packets(all []Counter, d Direction, reason Reason) uint64 {
	for _, c := range all {
		if c.Direction == d && c.Reason == reason {
			return c.Packets
		}
	}
	return 0
}

// countOn returns the egress packets counted by the programs on a device whose process has ended.
func countOn(t *testing.T, device string, reason Reason) uint64 {
	t.Helper()
	all, err := CountersOn(device)
	if err != nil {
		t.Fatal(err)
	}
	return packets(all, Egress, reason)
}

// listenHost opens a UDP socket on the host's side, for IPv4 or IPv6.
func listenHost(t *testing.T, network, address string) *net.UDPConn {
	t.Helper()
	a, err := net.ResolveUDPAddr(network, address)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.ListenUDP(network, a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(waitMost)); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestLink_udp_to_the_host_and_back_is_translated(t *testing.T) {
	for _, peer := range []netip.Addr{wire.Gateway4, wire.Gateway6} {
		t.Run(peer.String(), func(t *testing.T) {
			ownNamespace(t)
			tap := newTAP(t, "tap0")
			l, _ := attach(t, "tap0", hostUDP)
			own, guest := own4, wire.Guest4
			if peer.Is6() {
				own, guest = own6, wire.Guest6
			}
			c := listenHost(t, "udp", netip.AddrPortFrom(peer, 7).String())
			tap.send(sent(peer, 17, udp(5000, 7, []byte("hello")...)))
			b := make([]byte, 100)
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				t.Fatalf("%v; counters %v", err, counters(l))
			}
			if string(b[:n]) != "hello" || from != netip.AddrPortFrom(own, 5000) {
				t.Fatalf("host got %q from %v, want hello from %v:5000", b[:n], from, own)
			}
			if _, err := c.WriteToUDPAddrPort([]byte("world"), from); err != nil {
				t.Fatal(err)
			}
			got := tap.receive(etherTypeOf(peer), 17)
			want := ethernet(wire.GuestMAC, wire.GatewayMAC, etherTypeOf(peer), ip(peer, guest, 17, udp(7, 5000, []byte("world")...)))
			ports := len(want) - 13
			if !bytes.Equal(got[ports:], want[ports:]) || !bytes.Contains(got, guest.AsSlice()) || bytes.Contains(got, own.AsSlice()) {
				t.Fatalf("guest got  %x, want %x", got, want)
			}
			if !sumsRight(got) {
				t.Errorf("a checksum of %x is wrong", got)
			}
			u, err := l.Usage(Egress)
			if err != nil || u.Bytes == 0 || u.Idle < 0 {
				t.Errorf("usage %+v, %v: bytes and activity are missing", u, err)
			}
		})
	}
}

func counters(l *Link) string {
	all, err := l.Counters()
	return fmt.Sprint(all, err)
}

func TestLink_swap_denies_flows_that_the_new_policy_would_not_open(t *testing.T) {
	ownNamespace(t)
	tap := newTAP(t, "tap0")
	l, _ := attach(t, "tap0", hostUDP)
	c := listenHost(t, "udp", "172.31.255.1:7")
	frame := sent(wire.Gateway4, 17, udp(5000, 7, []byte("one")...))
	tap.send(frame)
	b := make([]byte, 100)
	if _, _, err := c.ReadFromUDPAddrPort(b); err != nil {
		t.Fatal(err)
	}
	if err := l.Swap(compile(t, ``)); err != nil {
		t.Fatal(err)
	}
	tap.send(frame)
	if n := count(t, l, Egress, ReasonDefault); n != 1 {
		t.Errorf("%d packets denied by default after the swap, want 1: %s", n, counters(l))
	}
	if err := l.Swap(compile(t, hostUDP)); err != nil {
		t.Fatal(err)
	}
	tap.send(sent(wire.Gateway4, 17, udp(5000, 7, []byte("two")...)))
	n, _, err := c.ReadFromUDPAddrPort(b)
	if err != nil || string(b[:n]) != "two" {
		t.Errorf("after swapping back: %q, %v, want two", b[:n], err)
	}
}

func TestLink_events_tell_what_was_denied(t *testing.T) {
	ownNamespace(t)
	tap := newTAP(t, "tap0")
	l, _ := attach(t, "tap0", `rules: [{direction: egress, verdict: reject, groups: [host], protocols: [tcp], ports: [22]}]`)
	tap.send(sent(wire.Gateway4, 6, tcp(4000, 22, syn)))
	ctx, cancel := context.WithTimeout(t.Context(), waitMost)
	defer cancel()
	var ev Event
	err := l.Events(ctx, func(e Event) {
		if e.Direction == Egress && e.Protocol == 6 {
			ev = e
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if got := l.RuleName(ev.Generation, ev.Rule); got != "rules[0]" {
		t.Errorf("its rule is called %q", got)
	}
	ev.Uptime, ev.Suppressed, ev.Generation = 0, 0, 0
	want := Event{Direction: Egress, Verdict: Reject, Reason: ReasonRule, Peer: wire.Gateway4, Protocol: 6, PeerPort: 22, GuestPort: 4000, EtherType: 0x0800, Bytes: 54}
	if ev != want {
		t.Errorf("event %+v, want %+v", ev, want)
	}
}

func TestLink_reject_answers_the_guest(t *testing.T) {
	const policy = `
rules:
  - {direction: egress, verdict: reject, groups: [any], protocols: [any], ports: [any]}
  - {direction: ingress, verdict: reject, groups: [any], protocols: [any], ports: [any]}
`
	for _, peer := range []netip.Addr{peer4, peer6} {
		t.Run(peer.String(), func(t *testing.T) {
			ownNamespace(t)
			tap := newTAP(t, "tap0")
			l, _ := attach(t, "tap0", policy)
			guest, proto, unreachable := wire.Guest4, byte(1), []byte{3, 13}
			if peer.Is6() {
				guest, proto, unreachable = wire.Guest6, 58, []byte{1, 1}
			}
			head := 14 + len(ipHeader(peer, guest, 0, 0))
			from := func(m []byte, proto byte) []byte {
				return ethernet(wire.GuestMAC, wire.GatewayMAC, etherTypeOf(peer), ip(peer, guest, proto, m))
			}
			check := func(got, want []byte) {
				t.Helper()
				if !sumsRight(got) {
					t.Errorf("a checksum of %x is wrong", got)
				}
				// The expected IP header differs in its identification.
				if !bytes.Equal(got[head:], want[head:]) || !bytes.Equal(got[:14], want[:14]) || !bytes.Contains(got[:head], peer.AsSlice()) {
					t.Errorf("the guest got\n%x, want\n%x", got, want)
				}
			}
			tap.send(sent(peer, 6, tcp(4000, 443, syn, 1, 2, 3)))
			rstWant := tcp(443, 4000, rst|ack)
			be.PutUint32(rstWant[4:], 0)
			be.PutUint32(rstWant[8:], 1+1+3)
			be.PutUint16(rstWant[14:], 0)
			check(tap.receive(etherTypeOf(peer), 6), from(rstWant, 6))
			for name, m := range map[string][]byte{"short": udp(4000, 53), "long": udp(4000, 53, make([]byte, 1000)...)} {
				t.Run(name, func(*testing.T) {
					f := sent(peer, 17, m)
					tap.send(f)
					check(tap.receive(etherTypeOf(peer), proto), from(icmpError(unreachable[0], unreachable[1], f[14:head+8]), proto))
				})
			}
			// No other party gets an answer, and the answers open no flows.
			if n := count(t, l, Ingress, ReasonRule); n != 0 {
				t.Errorf("%d packets in by a rule", n)
			}
		})
	}
}

// A guest that has slept, or whose policy was swapped, continues connections that have no flow any more. It gets a
// reset at once, and no other party gets one.
func TestAttack_connection_without_a_flow_waits_for_long(t *testing.T) {
	for _, peer := range []netip.Addr{peer4, peer6} {
		for _, x := range []struct {
			what    string
			payload int
			segment uint16 // of segmentation offload
			partial bool   // the checksum is left to others
		}{{"an acknowledgement", 0, 0, false}, {"data", 500, 0, false}, {"a checksum that is left out", 500, 0, true}, {"many segments at once", 20000, 1400, true}} {
			t.Run(fmt.Sprintf("%v/%s", peer, x.what), func(t *testing.T) {
				ownNamespace(t)
				tap := newTAP(t, "tap0")
				l, _ := attach(t, "tap0", `default: {egress: allow}`)
				head := 34
				if peer.Is6() {
					head = 54
				}
				segment := tcp(4000, 443, ack|psh, make([]byte, x.payload)...)
				be.PutUint32(segment[4:], 1000)
				be.PutUint32(segment[8:], 77777)
				header := make([]byte, vnetHeader)
				frame := sent(peer, 6, segment)
				if x.partial {
					header[0] = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
					binary.LittleEndian.PutUint16(header[6:], uint16(head))
					binary.LittleEndian.PutUint16(header[8:], 16)
				}
				if x.segment != 0 {
					header[1] = 1 // VIRTIO_NET_HDR_GSO_TCPV4
					if peer.Is6() {
						header[1] = 4
					}
					binary.LittleEndian.PutUint16(header[2:], uint16(head+20))
					binary.LittleEndian.PutUint16(header[4:], x.segment)
				}
				// Neither a reset from the guest nor a packet from outside gets an answer.
				tap.send(sent(peer, 6, tcp(4001, 443, rst|ack)))
				tap.sendWith(header, frame)
				got := tap.receive(etherTypeOf(peer), 6)
				if m := got[head:]; be.Uint16(m) != 443 || be.Uint16(m[2:]) != 4000 || be.Uint32(m[4:]) != 77777 || be.Uint32(m[8:]) != 0 || m[13] != rst || len(m) != 20 {
					t.Errorf("the guest got %x", got)
				}
				if !x.partial && !sumsRight(got) {
					t.Errorf("a checksum of %x is wrong", got)
				}
				if n := count(t, l, Egress, ReasonNoFlow); n < 2 {
					t.Errorf("%d were denied: %s", n, counters(l))
				}
			})
		}
	}
}

// A guest that may send a datagram asks for its checksum to be written elsewhere.
func TestLink_checksum_stored_elsewhere_is_denied(t *testing.T) {
	ownNamespace(t)
	tap := newTAP(t, "tap0")
	l, _ := attach(t, "tap0", hostUDP)
	c := listenHost(t, "udp", "172.31.255.1:7")
	b := make([]byte, 100)
	header := func(start, offset uint16) []byte {
		h := make([]byte, vnetHeader)
		h[0] = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
		binary.LittleEndian.PutUint16(h[6:], start)
		binary.LittleEndian.PutUint16(h[8:], offset)
		return h
	}
	tests := []struct {
		what          string
		start, offset uint16
	}{
		{"into the destination address", 14, 16}, {"into the destination port", 34, 2}, {"into the source address", 26, 0},
		{"at the right place from a wrong start", 26, 14}, {"into the payload", 34, 8}, {"where TCP has it", 34, 16}, {"from the frame's start", 0, 40},
	}
	frame := sent(wire.Gateway4, 17, udp(5000, 7, make([]byte, 100)...))
	denied := uint64(0)
	for _, tt := range tests {
		t.Run(tt.what, func(t *testing.T) {
			err := tap.try(header(tt.start, tt.offset), frame)
			if errors.Is(err, unix.EINVAL) && tt.start < 34 {
				return // newer kernels refuse a start before the end of the IP header
			}
			if err != nil {
				t.Fatal(err)
			}
			denied++
			if n := count(t, l, Egress, ReasonChecksum); n != denied {
				t.Errorf("%d packets denied for their checksum, want %d: %s", n, denied, counters(l))
			}
		})
	}
	if denied < 3 {
		t.Errorf("only %d requests reached the programs", denied)
	}
	// The right request passes, and its checksum comes out right. The guest puts the sum of the pseudo header into
	// the field.
	pseudo := append(append(wire.Guest4.AsSlice(), wire.Gateway4.AsSlice()...), 0, 17, 0, 13)
	frame = clone(sent(wire.Gateway4, 17, udp(5000, 7, []byte("right")...)), func(f []byte) { be.PutUint16(f[40:], ^checksum(pseudo)) })
	tap.sendWith(header(34, 6), frame)
	n, from, err := c.ReadFromUDPAddrPort(b)
	if err != nil || string(b[:n]) != "right" || from.Addr() != own4 {
		t.Errorf("host got %q from %v: %v", b[:n], from, err)
	}
}

// Frames that BPF_PROG_RUN cannot send.
func TestLink_frames_of_real_devices_that_must_not_pass(t *testing.T) {
	ownNamespace(t)
	tap := newTAP(t, "tap0")
	l, _ := attach(t, "tap0", `{default: {egress: allow, ingress: allow}, rules: [{direction: egress, verdict: allow, groups: [host, any, private], protocols: [any], ports: [any]}]}`)
	good := sent(wire.Gateway4, 17, udp(5000, 7, []byte("hello")...))
	tests := []struct {
		what   string
		frame  []byte
		reason Reason
	}{
		{"an Ethernet header alone", good[:14], ReasonTruncated},
		{"half an IP header", good[:24], ReasonTruncated},
		{"half an ARP message", ethernet(broadcast, wire.GuestMAC, 0x0806, make([]byte, 20)), ReasonTruncated},
		{"a VLAN tag", ethernet(wire.GatewayMAC, wire.GuestMAC, 0x8100, append([]byte{0, 5, 8, 0}, good[14:]...)), ReasonVLAN},
		{"a priority tag", ethernet(wire.GatewayMAC, wire.GuestMAC, 0x8100, append([]byte{0, 0, 8, 0}, good[14:]...)), ReasonVLAN},
		{"two VLAN tags", ethernet(wire.GatewayMAC, wire.GuestMAC, 0x88a8, append([]byte{0, 5, 0x81, 0, 0, 6, 8, 0}, good[14:]...)), ReasonVLAN},
	}
	for _, tt := range tests {
		t.Run(tt.what, func(t *testing.T) {
			before := count(t, l, Egress, tt.reason)
			tap.send(tt.frame)
			if n := count(t, l, Egress, tt.reason); n != before+1 {
				t.Errorf("%d denied by %s before, %d after: %s", before, tt.reason, n, counters(l))
			}
		})
	}
}

// A TCP connection through the kernel's own stack on both sides: the guest is a second
// namespace behind a veth pair, whose outer end has the programs.
func TestLink_tcp_through_two_stacks(t *testing.T) {
	ownNamespace(t)
	hostNS, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer hostNS.Close()
	enter := func(f *os.File) {
		t.Helper()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			t.Fatal(err)
		}
	}
	ownNamespace(t) // the guest's
	guestNS, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer guestNS.Close()
	enter(hostNS)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "outer"}, PeerName: "inner", PeerHardwareAddr: wire.GuestMAC[:]}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	inner, err := netlink.LinkByName("inner")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetNsFd(inner, int(guestNS.Fd())); err != nil {
		t.Fatal(err)
	}
	l, _ := attach(t, "outer", `
rules:
  - {direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [80, 83]}
  - {direction: egress, verdict: reject, groups: [host], protocols: [tcp, udp], ports: [any]}
  - {direction: ingress, verdict: allow, groups: [host], protocols: [tcp], ports: [81, 82]}
`)
	listen := func(address string) net.Listener {
		t.Helper()
		ln, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ln.Close() })
		return ln
	}
	onHost, onHost6 := listen("0.0.0.0:80"), listen("["+wire.Gateway6.String()+"]:83")
	enter(guestNS)
	if inner, err = netlink.LinkByName("inner"); err != nil {
		t.Fatal(err)
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: wire.Guest4.AsSlice(), Mask: net.CIDRMask(30, 32)}}
	if err := netlink.AddrAdd(inner, addr); err != nil {
		t.Fatal(err)
	}
	addr6 := &netlink.Addr{IPNet: &net.IPNet{IP: wire.Guest6.AsSlice(), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD}
	if err := netlink.AddrAdd(inner, addr6); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(inner); err != nil {
		t.Fatal(err)
	}
	onGuest, onGuest6 := listen("0.0.0.0:81"), listen("[::]:82")
	// The payload is large enough for segmentation offload.
	payload := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	exchange := func(ns *os.File, dial string, ln net.Listener, from netip.Addr) {
		t.Helper()
		enter(ns)
		type result struct {
			from net.Addr
			data []byte
			err  error
		}
		done := make(chan result, 1)
		go func() {
			c, err := ln.Accept()
			if err != nil {
				done <- result{err: err}
				return
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(waitMost))
			var b bytes.Buffer
			_, err = b.ReadFrom(c)
			done <- result{from: c.RemoteAddr(), data: b.Bytes(), err: err}
		}()
		// A dialer of the net package may resolve names on another thread; there are no names here.
		c, err := net.DialTimeout("tcp", dial, waitMost)
		if err != nil {
			ln.Close()
			<-done
			t.Fatalf("%v; %s", err, counters(l))
		}
		c.SetDeadline(time.Now().Add(waitMost))
		_, err = c.Write(payload)
		c.Close()
		r := <-done
		if err != nil || r.err != nil {
			t.Fatalf("sending: %v, receiving: %v; %s", err, r.err, counters(l))
		}
		if !bytes.Equal(r.data, payload) {
			t.Errorf("%d bytes came out of %d", len(r.data), len(payload))
		}
		if a := netip.MustParseAddrPort(r.from.String()).Addr(); a != from {
			t.Errorf("it came from %v, want %v", a, from)
		}
	}
	exchange(guestNS, "172.31.255.1:80", onHost, own4)
	exchange(hostNS, own4.String()+":81", onGuest, wire.Gateway4)
	exchange(guestNS, "["+wire.Gateway6.String()+"]:83", onHost6, own6)
	exchange(hostNS, "["+own6.String()+"]:82", onGuest6, wire.Gateway6)

	// A rejected port refuses at once.
	enter(guestNS)
	if c, err := net.DialTimeout("tcp4", "172.31.255.1:82", waitMost); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("dialing a port that is rejected: %v, %v, want ECONNREFUSED; %s", c, err, counters(l))
	}
	u, err := net.Dial("udp4", "172.31.255.1:82")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	u.SetDeadline(time.Now().Add(waitMost))
	if _, err := u.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := u.Read(make([]byte, 1)); !errors.Is(err, unix.EHOSTUNREACH) {
		t.Errorf("reading from a port that is rejected: %v, want EHOSTUNREACH; %s", err, counters(l))
	}
	enter(hostNS)
}

func TestAttach_interface_that_is_up_gives_an_error(t *testing.T) {
	ownNamespace(t)
	newTAP(t, "tap0")
	nl, err := netlink.LinkByName("tap0")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(nl); err != nil {
		t.Fatal(err)
	}
	if _, err := Attach(Config{Endpoint: "a1", Interface: "tap0", Root: testRoot(t)}, compile(t, "")); !errors.Is(err, ErrUp) {
		t.Errorf("%v, want ErrUp", err)
	}
}

func TestAttach_names_and_interfaces_that_are_not(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	for _, name := range []string{"", ".", "..", "a/b", "a.b", "-a"} {
		if _, err := Attach(Config{Endpoint: name, Interface: "lo", Root: root}, compile(t, "")); !errors.Is(err, ErrName) {
			t.Errorf("endpoint %q: %v, want ErrName", name, err)
		}
	}
	if _, err := Attach(Config{Endpoint: "a", Interface: "none", Root: root}, compile(t, "")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v, want os.ErrNotExist", err)
	}
}

const (
	helperEnv = "DROWSE_NETPOLICY_HELPER"
	beginEnv  = "DROWSE_NETPOLICY_BEGIN" // if set, helper prints "begin" before it attaches
)

// helper runs as the process that makes a persistent TAP device with a policy, reports it, and waits to be killed.
func helper() int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	f, err := openTAP("tap0", true)
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	p, err := Parse([]byte(hostUDP))
	if err != nil {
		return fail(err)
	}
	s, err := Compile(p, endpoint, Environment{})
	if err != nil {
		return fail(err)
	}
	if os.Getenv(beginEnv) != "" {
		fmt.Println("begin")
	}
	l, err := Attach(Config{Endpoint: "a1", Interface: "tap0", Root: os.Getenv(helperEnv)}, s)
	if err != nil {
		return fail(err)
	}
	if err := l.Up(endpoint); err != nil {
		return fail(err)
	}
	fmt.Println("ready")
	select {}
}

func TestLink_survives_the_death_of_its_process(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
	// The helper inherits this thread's namespace.
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"="+root)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 6)
	if _, err := out.Read(line); err != nil || string(line) != "ready\n" {
		cmd.Process.Kill()
		t.Fatalf("helper says %q: %v, %v", line, err, cmd.Wait())
	}
	if err := Remove(cfg); !errors.Is(err, ErrBusy) {
		t.Errorf("removing from a process that lives: %v, want ErrBusy", err)
	}
	cmd.Process.Kill()
	cmd.Wait()

	tap := newTAP(t, "tap0")
	t.Cleanup(func() {
		if nl, err := netlink.LinkByName("tap0"); err == nil {
			netlink.LinkDel(nl)
		}
	})
	c := listenHost(t, "udp", "172.31.255.1:7")
	tap.send(sent(wire.Gateway4, 17, udp(5000, 8, []byte("denied")...)))
	tap.send(sent(wire.Gateway4, 17, udp(5000, 7, []byte("allowed")...)))
	b := make([]byte, 100)
	n, from, err := c.ReadFromUDPAddrPort(b)
	if err != nil || string(b[:n]) != "allowed" || from.Addr() != own4 {
		t.Errorf("host got %q from %v: %v", b[:n], from, err)
	}
	if d, p := countOn(t, "tap0", ReasonDefault), countOn(t, "tap0", ReasonRule); d != 1 || p != 1 {
		t.Errorf("%d denied and %d allowed, want 1 and 1", d, p)
	}
	if err := Remove(cfg); err != nil {
		t.Fatal(err)
	}
	nl, err := netlink.LinkByName("tap0")
	if err != nil {
		t.Fatal(err)
	}
	if nl.Attrs().Flags&net.FlagUp != 0 {
		t.Error("the interface is up without a policy")
	}
	if err := Remove(cfg); err != nil {
		t.Errorf("removing what is not there: %v", err)
	}
}

func TestRemove_what_is_incomplete_or_without_its_interface(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	cfg := Config{Endpoint: "a1", Interface: "tap0", Root: root}
	tap, err := openTAP("tap0", false)
	if err != nil {
		t.Fatal(err)
	}
	l, err := Attach(cfg, compile(t, hostUDP))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	tap.Close() // and the device vanishes
	if err := os.Remove(filepath.Join(root, "a1", "calls")); err != nil {
		t.Fatal(err)
	}
	if err := Remove(cfg); err != nil {
		t.Fatal(err)
	}
}

func TestLink_events_end_with_their_context_though_none_comes(t *testing.T) {
	ownNamespace(t)
	newTAP(t, "quiet0")
	s, err := Compile(nil, endpoint, Environment{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := Attach(Config{Endpoint: "quiet", Interface: "quiet0", Root: testRoot(t)}, s)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Remove()
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.Events(ctx, func(e Event) { t.Errorf("%+v", e) }) }()
		runtime.Gosched()
		cancel()
		select {
		case err := <-ended:
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		case <-time.After(waitMost):
			t.Fatal("it has not ended")
		}
	}
}
