package link_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
	"github.com/drowse-vm/drowse/netpolicy/refmodel/flowtest"
)

// TestPrograms_agree_with_the_model compares this many packets and policies. Long runs set them: -packets 1000000
// -policies 1000.
var (
	packetsFlag  = flag.Int("packets", envInt("DROWSE_POLICY_PACKETS", 60000), "packets to compare with the model")
	policiesFlag = flag.Int("policies", envInt("DROWSE_POLICY_POLICIES", 150), "policies to compare with the model")
	seedFlag     = flag.Uint64("seed", 1, "seed of the packets and policies to compare with the model")
)

func envInt(name string, otherwise int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return otherwise
}

// random makes policies and packets that often match each other.
type random struct {
	*rand.Rand
	policy  *Policy
	env     Environment
	addrs   []netip.Addr
	ports   []uint16
	history [][]byte // packets that passed, as the receiver sees them
	dirs    []Direction
	names   bool // mostly names, few addresses and ports
}

func pick[T any](r *random, of ...T) T { return of[r.IntN(len(of))] }

func (r *random) one(n int) bool { return r.IntN(n) == 0 }

var addresses = []string{
	"1.1.1.1", "8.8.8.8", "93.184.216.34", "203.0.113.5", "203.0.113.200", "10.0.0.1", "10.1.2.3", "10.255.255.255", "11.0.0.0", "9.255.255.255",
	"172.16.0.1", "172.31.255.1", "172.31.255.2", "172.31.255.0", "172.31.255.3", "172.31.255.4", "192.168.1.1", "100.64.0.1", "100.100.100.200",
	"169.254.169.254", "169.254.1.1", "127.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "239.255.255.250", "240.0.0.1", "168.63.129.16",
	"10.200.0.9", "10.200.3.7", "10.200.3.8", "10.77.0.1", "198.18.0.1", "192.0.0.1", "223.255.255.255",
	"2606:4700::1111", "2a00::1", "2001:db8::1", "fd00::1", "fd77::3:7", "fd77::3:8", "fe80::1", "::1", "::", "::ffff:1.1.1.1", "ff02::1", "fd00:ec2::254",
	"64:ff9b::808:808", "2002:808:808::1", "2001::1", "2001:0:1::1", "3fff:ffff::1", "4000::1", "fc00::1", "fd64:726f:7773:1::1", "fd64:726f:7773:1::2",
	"fd20:ce::254", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "1fff::1", "fe00::1",
}

func (r *random) addr() netip.Addr {
	if r.names && !r.one(8) {
		return netip.MustParseAddr(pick(r, "1.1.1.1", "1.1.1.1", "8.8.8.8", "8.8.8.8", "203.0.113.5", "2606:4700::1111"))
	}
	if r.one(8) {
		if r.one(2) {
			return netip.AddrFrom4([4]byte{byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32())})
		}
		var b [16]byte
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		b[0] = pick(r, b[0], 0x20, 0x2a, 0xfd, 0x26)
		return netip.AddrFrom16(b)
	}
	if len(r.addrs) > 0 && !r.one(3) {
		return r.addrs[r.IntN(len(r.addrs))]
	}
	return netip.MustParseAddr(pick(r, addresses...))
}

func (r *random) port() uint16 {
	if r.names && !r.one(8) {
		return pick[uint16](r, 443, 443, 8443, 80, 4000, 4001)
	}
	if len(r.ports) > 0 && !r.one(4) {
		return r.ports[r.IntN(len(r.ports))]
	}
	return pick(r, 1, 22, 53, 80, 443, 8080, 65535, uint16(1+r.IntN(65535)), 67, 547)
}

var names = []string{"example.com", "*.example.com", "a.example.com", "b.a.example.com", "example.org"}

func (r *random) makePolicy() {
	r.addrs, r.ports, r.history, r.dirs = nil, nil, nil, nil
	r.env = Environment{
		Host:      []netip.Addr{netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("93.184.216.34"), netip.MustParseAddr("fd00::1"), netip.MustParseAddr("127.0.0.1")},
		Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16"), netip.MustParsePrefix("fd77::/64")},
		Peers: []Peer{
			{Address: netip.MustParseAddr("10.200.3.8"), Tags: []string{"db", "eu"}}, {Address: netip.MustParseAddr("fd77::3:8"), Tags: []string{"db"}},
			{Address: netip.MustParseAddr("10.77.0.1"), Tags: []string{"eu"}},
		},
	}
	if r.one(2) {
		r.env.OnLink = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/25"), netip.MustParsePrefix("8.0.0.0/8"), netip.MustParsePrefix("2606:4700::/32"), netip.MustParsePrefix("10.0.0.0/7")}
	}
	if r.one(6) {
		r.env = Environment{}
	}
	if !r.one(8) {
		r.env.TLSPort = tlsPort
	}
	verdict := func() Verdict { return pick(r, Allow, Allow, Allow, Deny, Reject, "") }
	p := &Policy{}
	if r.one(2) {
		p.Default = Defaults{Egress: pick(r, Allow, Deny, Reject, ""), Ingress: pick(r, Allow, Deny, Reject, "")}
	}
	rules := pick(r, 0, 1, 3, 10, 30, 100)
	if r.one(10) {
		rules = 1000
	}
	if r.names {
		p.Default.Egress = pick(r, Deny, Deny, Allow)
		rules = pick(r, 1, 2, 3, 6)
	}
	prefix := func() CIDR {
		a := r.addr()
		for a.Is4In6() {
			a = r.addr()
		}
		n := a.BitLen()
		if !r.one(3) {
			n = r.IntN(n + 1)
		}
		c := netip.PrefixFrom(a, n).Masked()
		r.addrs = append(r.addrs, a, c.Addr(), c.Addr().Prev(), c.Addr().Next())
		for i, x := range r.addrs {
			if !x.IsValid() {
				r.addrs[i] = a
			}
		}
		return CIDR{Prefix: c}
	}
	for range rules {
		u := Rule{Direction: pick(r, Egress, Ingress), Verdict: verdict()}
		for range r.IntN(3) {
			u.CIDRs = append(u.CIDRs, prefix())
		}
		for range pick(r, 0, 0, 1, 2) {
			g := pick(r, Any, Public, Private, Host, Metadata, LinkLocal)
			if u.Verdict != Allow || g != Metadata && g != LinkLocal {
				u.Groups = append(u.Groups, g)
			}
		}
		if r.names && !r.one(3) {
			u = Rule{Direction: Egress, Verdict: Allow, Protocols: []Protocol{TCP}, Ports: []PortRange{AnyPort}}
		}
		if u.Verdict == Allow && u.Direction == Egress && (r.names || r.one(3)) {
			u.Names = append(u.Names, pick(r, names...))
			p.DNS = &DNS{}
			switch r.IntN(4) {
			case 0:
				u.TLS = []CheckedPorts{CheckNowhere}
			case 1:
				u.TLS = []CheckedPorts{{PortRange: AnyPort}}
			case 2:
				a, b := r.port(), r.port()
				u.TLS = []CheckedPorts{{PortRange: PortRange{First: 443, Last: 443}}, {PortRange: PortRange{First: min(a, b), Last: max(a, b)}}}
			}
		}
		if r.one(4) {
			u.Endpoints = append(u.Endpoints, pick(r, "db", "eu", "none"))
		}
		for range pick(r, 0, 1, 1, 1, 2) {
			u.Protocols = append(u.Protocols, pick(r, TCP, UDP, ICMP, AnyProtocol))
		}
		for range pick(r, 0, 1, 1, 2, 3) {
			a, b := r.port(), r.port()
			pr := PortRange{First: min(a, b), Last: max(a, b)}
			switch r.IntN(4) {
			case 0:
				pr = AnyPort
			case 1:
				pr.Last = pr.First
			}
			r.ports = append(r.ports, pr.First, pr.Last, max(1, pr.First-1), max(pr.Last+1, 1))
			u.Ports = append(u.Ports, pr)
		}
		p.Rules = append(p.Rules, u)
	}
	if r.one(3) {
		p.Publish = append(p.Publish, Published{Listen: netip.MustParseAddrPort("127.0.0.1:8080"), Port: r.port(), Protocol: pick(r, TCP, UDP)})
	}
	if r.one(3) {
		p.DNS = &DNS{}
	}
	if r.one(3) {
		p.Proxy = &Proxy{Enabled: r.one(2)}
		r.ports = append(r.ports, ProxyPort)
	}
	rates := func() (x Rates) {
		if r.one(2) {
			x.Bits = &Rate{PerSecond: pick[uint64](r, 1000, 100000, 1e9, 1e12), Burst: pick[uint64](r, 0, 1<<20, 1<<22)}
		}
		if r.one(2) {
			x.Packets = &Rate{PerSecond: pick[uint64](r, 1, 50, 100000), Burst: pick[uint64](r, 0, 64, 1000)}
		}
		if r.one(2) {
			x.Connections = &Rate{PerSecond: pick[uint64](r, 1, 20, 100000), Burst: pick[uint64](r, 0, 1, 100)}
		}
		return x
	}
	if !r.names && r.one(2) {
		p.Limits = Limits{Egress: rates(), Ingress: rates()}
	}
	if !r.names && r.one(5) {
		n := uint64(r.IntN(200000))
		p.Quota.EgressBytes = &n
	}
	if r.one(5) {
		n := uint64(r.IntN(200000))
		p.Quota.IngressBytes = &n
	}
	r.policy = p
	for range 8 {
		r.addrs = append(r.addrs, netip.MustParseAddr(pick(r, addresses...)))
	}
}

func (r *random) payload() []byte {
	b := make([]byte, pick(r, 0, 0, 1, 10, 40, 41, 600, 1400))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// answerTo makes a frame that belongs to an earlier frame that passed.
func (r *random) answerTo(f []byte, d Direction) ([]byte, Direction) {
	// f is as the receiver sees it: if the guest sent it, it has the endpoint's address; if the guest received it,
	// it has the guest's.
	six := be.Uint16(f[12:]) == 0x86dd
	var src, dst netip.Addr
	var p []byte
	var proto byte
	if six {
		src, dst, proto, p = netip.AddrFrom16([16]byte(f[22:38])), netip.AddrFrom16([16]byte(f[38:54])), f[20], f[54:]
	} else {
		src, dst, proto, p = netip.AddrFrom4([4]byte(f[26:30])), netip.AddrFrom4([4]byte(f[30:34])), f[23], f[34:]
	}
	peer, back := dst, Ingress
	if d == Ingress {
		peer, back = src, Egress
	}
	same := r.one(3) // the next packet of the same direction
	if same {
		back = d
	}
	frame := sent
	if back == Ingress {
		frame = got
	}
	if proto == 58 {
		proto = 1
	}
	if !same && r.one(4) {
		// An ICMP error about f.
		if r.one(6) {
			p = p[:min(len(p), r.IntN(12))]
			f = f[:len(f)-len(p)]
		}
		quoted := f[14:min(len(f), 14+pick(r, 28, 48, 60, 548))]
		if r.one(8) {
			quoted = clone(quoted, func(b []byte) { b[r.IntN(len(b))] ^= 1 << r.IntN(8) })
		}
		types := []byte{3, 11, 12}
		if six {
			types = []byte{1, 2, 3, 4}
		}
		from := peer
		if back == Ingress && r.one(3) {
			from = r.addr()
			for from.Is6() != six {
				from = r.addr()
			}
		}
		return frame(from, 1, icmpError(pick(r, types...), byte(r.IntN(4)), quoted)), back
	}
	if len(p) < 8 {
		return frame(peer, proto, p), back
	}
	a, b := be.Uint16(p), be.Uint16(p[2:])
	if !same {
		a, b = b, a
	}
	switch proto {
	case 6:
		return frame(peer, 6, tcp(a, b, pick[byte](r, ack, ack, syn|ack, syn|ack, syn|ack, syn, rst|ack, rst, fin|ack, psh|ack), r.payload()...)), back
	case 17:
		return frame(peer, 17, udp(a, b, r.payload()...)), back
	}
	types := []byte{0, 8}
	if six {
		types = []byte{129, 128}
	}
	return frame(peer, 1, echo(pick(r, types...), be.Uint16(p[4:]), r.payload()...)), back
}

// frame makes an arbitrary frame.
func (r *random) frame() ([]byte, Direction, int) {
	if len(r.history) > 0 && !r.one(3) {
		i := r.IntN(len(r.history))
		f, d := r.answerTo(r.history[i], r.dirs[i])
		f = r.maybeBreak(f)
		return f, d, r.gso(f)
	}
	d := pick(r, Egress, Egress, Ingress)
	build := sent
	if d == Ingress {
		build = got
	}
	a := r.addr()
	var f []byte
	switch r.IntN(12) {
	case 0, 1, 2, 3:
		f = build(a, 6, tcp(r.port(), r.port(), pick[byte](r, syn, syn, syn, syn, syn|ack, ack, rst, byte(r.Uint32())), r.payload()...))
	case 4, 5, 6:
		f = build(a, 17, udp(r.port(), r.port(), r.payload()...))
	case 7, 8:
		t := pick[byte](r, 8, 8, 0, byte(r.Uint32()))
		if a.Is6() {
			t = pick[byte](r, 128, 128, 129, byte(r.Uint32()))
		}
		f = build(a, 1, echo(t, pick[uint16](r, 1, 2, 77), r.payload()...))
	case 9:
		f = r.arp(d)
	case 10:
		f = r.nd(d)
	default:
		f = build(a, pick[byte](r, 0, 2, 4, 41, 43, 44, 47, 50, 51, 58, 59, 60, 132, byte(r.Uint32())), r.payload())
	}
	f = r.maybeBreak(f)
	return f, d, r.gso(f)
}

// way returns the address whose interface a frame came to the host by: mostly its source.
func (r *random) way(f []byte, d Direction) (by netip.Addr) {
	if d == Egress {
		return by
	}
	peers := []netip.Addr{netip.MustParseAddr("10.200.3.8"), netip.MustParseAddr("fd77::3:8"), netip.MustParseAddr("10.77.0.1")}
	if r.one(5) {
		return pick(r, netip.Addr{}, netip.MustParseAddr("192.0.2.99"), peers[0], peers[1], peers[2])
	}
	var src netip.Addr
	switch {
	case len(f) >= 34 && be.Uint16(f[12:]) == 0x0800:
		src = netip.AddrFrom4([4]byte(f[26:30]))
	case len(f) >= 54 && be.Uint16(f[12:]) == 0x86dd:
		src = netip.AddrFrom16([16]byte(f[22:38]))
	}
	if slices.Contains(peers, src) {
		return src
	}
	return by
}

func (r *random) gso(f []byte) int {
	if r.one(12) {
		return pick(r, 1, 7, 8, 100, 599, 600, 601, 1399, 1400, 1448)
	}
	return 0
}

func (r *random) arp(d Direction) []byte {
	me, mac, other := wire.Guest4, wire.GuestMAC, wire.Gateway4
	to := wire.GatewayMAC
	if d == Ingress {
		me, mac, other, to = wire.Gateway4, wire.GatewayMAC, wire.Guest4, wire.GuestMAC
	}
	src := mac
	sender := pick(r, me, me, me, netip.IPv4Unspecified(), other, own4)
	return ethernet(pick(r, broadcast, to, to), src, 0x0806, arp(pick[uint16](r, 1, 1, 2, 3), pick(r, mac, mac, mac, to), sender, pick(r, other, other, me, own4)))
}

func (r *random) nd(d Direction) []byte {
	me, mac, other, to := wire.Guest6, wire.GuestMAC, wire.Gateway6, wire.GatewayMAC
	if d == Ingress {
		me, mac, other, to = other, to, me, mac
	}
	src := pick(r, me, me, linkLocal(mac), netip.IPv6Unspecified(), other)
	target := pick(r, other, other, me, linkLocal(to), linkLocal(mac), own6)
	snma, smac := solicitedNode(target)
	dst := pick(r, snma, snma, other, linkLocal(to), netip.MustParseAddr("ff02::1"), own6)
	var option []byte
	switch r.IntN(4) {
	case 0, 1:
		option = append([]byte{pick[byte](r, 1, 2, 14), pick[byte](r, 1, 1, 1, 2)}, mac[:]...)
	case 2:
		option = append([]byte{14, 1}, 1, 2, 3, 4, 5, 6)
	}
	return nd(pick(r, smac, to), mac, src, dst, pick[byte](r, 135, 135, 136, 136, 133, 134, 137, 143), target, option...)
}

// maybeBreak damages one frame of six.
func (r *random) maybeBreak(f []byte) []byte {
	if !r.one(6) {
		return f
	}
	f = append([]byte{}, f...)
	switch r.IntN(6) {
	case 0:
		f = f[:max(14, r.IntN(len(f)+1))]
	case 1:
		f = append(f, make([]byte, 1+r.IntN(30))...)
	default:
		for range 1 + r.IntN(3) {
			f[r.IntN(min(len(f), 94))] ^= 1 << r.IntN(8)
		}
	}
	return f
}

// sumsRight reports whether the checksums that a translation touches are right. The model computes them anew; the
// programs adjust them.
func sumsRight(f []byte) bool {
	if len(f) < 34 {
		return false
	}
	var src, dst netip.Addr
	var m []byte
	var proto byte
	switch be.Uint16(f[12:]) {
	case 0x0806:
		return true
	case 0x0800:
		n := int(be.Uint16(f[16:]))
		if n < 20 || 14+n > len(f) || checksum(f[14:34]) != 0 {
			return false
		}
		src, dst, proto, m = netip.AddrFrom4([4]byte(f[26:30])), netip.AddrFrom4([4]byte(f[30:34])), f[23], f[34:14+n]
	case 0x86dd:
		if len(f) < 54 {
			return false
		}
		n := int(be.Uint16(f[18:]))
		if 54+n > len(f) {
			return false
		}
		src, dst, proto, m = netip.AddrFrom16([16]byte(f[22:38])), netip.AddrFrom16([16]byte(f[38:54])), f[20], f[54:54+n]
	default:
		return false
	}
	again := append([]byte{}, m...)
	sumL4(src, dst, proto, again)
	if !bytes.Equal(m, again) {
		return false
	}
	if proto == 1 && len(m) >= 28 && (m[0] == 3 || m[0] == 11 || m[0] == 12) {
		return checksum(m[8:28]) == 0
	}
	return true
}

func newEngine(t testing.TB, flows int) *Engine {
	t.Helper()
	needRoot(t)
	e, err := NewEngine(flows, true)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// oneEngine serves tests that need no flows of their own. TestMain closes it.
var (
	oneEngine  *Engine
	engineOnce sync.Once
)

func sharedEngine(t testing.TB) *Engine {
	t.Helper()
	needRoot(t)
	engineOnce.Do(func() {
		var err error
		if oneEngine, err = NewEngine(DefaultFlows, true); err != nil {
			t.Error(err)
		}
	})
	if oneEngine == nil {
		t.Fatal("the programs could not be loaded")
	}
	// Other tests have set the clock.
	if err := oneEngine.SetTime(0); err != nil {
		t.Fatal(err)
	}
	return oneEngine
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("loading eBPF programs needs root")
	}
}

func TestPrograms_agree_with_the_model(t *testing.T) {
	compareWithModel(t, &random{Rand: rand.New(rand.NewPCG(*seedFlag, 1))})
}

// The same with policies in which names open much, so that most flows end on the host.
func TestPrograms_agree_with_the_model_about_names(t *testing.T) {
	reasons := compareWithModel(t, &random{Rand: rand.New(rand.NewPCG(*seedFlag, 2)), names: true})
	for _, what := range []string{"checked", "checked answer", "name true", "name false", "deny tls-off"} {
		if *packetsFlag >= 10000 && reasons[what] == 0 {
			t.Errorf("there was no %s: %v", what, reasons)
		}
	}
}

func compareWithModel(t *testing.T, r *random) map[string]int {
	e := newEngine(t, MaxFlows)
	var m *flowtest.Model
	now := uint64(1e15) // later than the kernel's clock, on which the engine forgets pins
	each := max(1, *packetsFlag / *policiesFlag)
	reasons := map[string]int{}
	passed, compared := 0, 0
	pins := ""
	begin := time.Now()
	for i := range *policiesFlag {
		fresh := i%3 == 0 // else flows stay over the swap
		old := *r
		r.makePolicy()
		if !fresh && m != nil {
			r.history, r.dirs = old.history, old.dirs
			r.addrs = append(r.addrs, old.addrs[:min(len(old.addrs), 20)]...)
		}
		id := endpoint
		if r.one(8) {
			id.Address6 = netip.Addr{}
		}
		s, err := Compile(r.policy, id, r.env)
		if err != nil {
			t.Fatalf("policy %d: %v", i, err)
		}
		// Endpoints always have these addresses, so that only the rules judge flows with them.
		peers := []Peer{{Address: netip.MustParseAddr("10.200.3.8")}, {Address: netip.MustParseAddr("fd77::3:8")}, {Address: netip.MustParseAddr("10.77.0.1")}}
		if err := e.SetPeers(append(peers, r.env.Peers...)); err != nil {
			t.Fatal(err)
		}
		if err := e.Install(s); err != nil {
			t.Fatal(err)
		}
		if m == nil {
			m = flowtest.New(r.policy, id, r.env)
		} else {
			m.Swap(r.policy, id, r.env)
		}
		if fresh {
			if err := e.ForgetState(); err != nil {
				t.Fatal(err)
			}
			m.Forget()
			pins = ""
		}
		for j := range each {
			step := r.IntN(10)
			if r.names && !r.one(4) {
				step = 9 // so that names do not expire at once
			}
			switch step {
			case 0:
				now += uint64(r.Int64N(int64(pick(r, time.Millisecond, time.Second, time.Minute, 5*time.Minute, 5*time.Hour))))
			case 1, 2, 3:
				now += uint64(r.IntN(1e6))
			case 4:
				// Exactly when flows and pins end, give or take 1 ns.
				now += uint64(pick(r, 30*time.Second, 60*time.Second, 180*time.Second, 4*time.Hour) + pick(r, -time.Nanosecond, 0, 0, time.Nanosecond))
			}
			if r.one(20) || r.names && r.one(5) {
				name := pick(r, "example.com", "a.example.com", "b.a.example.com", "example.org", "example.net")
				a := r.addr().Unmap()
				until := now + uint64(pick(r, 30*time.Second, 60*time.Second, time.Hour))
				if a.IsValid() {
					if err := e.Pin(name, a, until); err != nil {
						t.Fatal(err)
					}
					m.Pin(name, a, int64(until))
					pins += fmt.Sprintf("%s %v %d, ", name, a, until)
				}
			}
			if err := e.SetTime(now); err != nil {
				t.Fatal(err)
			}
			f, d, gso := r.frame()
			by := r.way(f, d)
			frame := refmodel.Frame{Direction: d, Bytes: f, SegmentSize: gso, By: by}
			want := m.Judge(frame, int64(now))
			if d == Ingress && j%8 == 0 {
				first := flowtest.New(r.policy, id, r.env).Judge(frame, int64(now)).Verdict == Allow
				if opens := refmodel.New(r.policy, id, r.env).Opens(frame); opens != first {
					t.Fatalf("policy %d, packet %d: opens: %v, and as the first packet: %v (%x)", i, j, opens, first, f)
				}
			}
			ran, err := e.RunBy(d, f, gso, by)
			if errors.Is(err, unix.EINVAL) && want.Reason == ReasonTruncated {
				continue // BPF_PROG_RUN refuses a frame whose IP header is cut off
			}
			if err != nil {
				t.Fatalf("policy %d, packet %d: %v (%d bytes)", i, j, err, len(f))
			}
			compared++
			rule := ran.Rule
			if rule >= 0 {
				rule = max(-1, rule-(len(s.RuleNames())-len(r.policy.Rules)))
			}
			describe := func() string {
				return fmt.Sprintf("seed %d, policy %d, packet %d: %s, gso %d, %x", *seedFlag, i, j, d, gso, f)
			}
			if ran.Verdict != want.Verdict || ran.Reason != want.Reason || rule != want.Rule {
				for _, n := range []int{rule, want.Rule} {
					if n >= 0 && n < len(r.policy.Rules) {
						t.Logf("rule %d: %+v", n, r.policy.Rules[n])
					}
				}
				t.Logf("at %d, pins: %s", now, pins)
				t.Fatalf("%s:\n programs: %s by %s, rule %d\n model:    %s by %s, rule %d", describe(),
					ran.Verdict, ran.Reason, rule, want.Verdict, want.Reason, want.Rule)
			}
			if pass := ran.Action == 0; pass != (want.Verdict == Allow) {
				t.Fatalf("%s: action %d for verdict %s", describe(), ran.Action, want.Verdict)
			}
			reasons[string(want.Verdict)+" "+want.Reason.String()]++
			if want.Verdict != Allow {
				continue
			}
			passed++
			if via := splicedBy(ran.Bytes); d == Egress && via != 0 {
				reasons["checked"]++
				r.history, r.dirs = append(r.history, f), append(r.dirs, d)
				name := pick(r, "", "example.com", "a.example.com", "c.example.com", "example.org", "example.net")
				ok, _, err := e.OpensName(via, name)
				if err != nil {
					t.Fatalf("%s: %v", describe(), err)
				}
				peer, port := netip.AddrFrom4([4]byte(f[30:34])), be.Uint16(f[36:])
				if want := m.OpensName(netip.AddrPortFrom(peer, port), be.Uint16(f[34:]), name); ok != want {
					t.Logf("at %d, pins: %s; rules %+v", now, pins, r.policy.Rules)
					t.Fatalf("%s: server name %q: %v, by the model %v", describe(), name, ok, want)
				}
				reasons[fmt.Sprintf("name %v", ok)]++
			} else if splicedBy(turned(f)) != 0 {
				reasons["checked answer"]++
			}
			if sumsRight(f) && !bytes.Equal(ran.Bytes, want.Bytes) {
				t.Fatalf("%s:\n programs: %x\n model:    %x", describe(), ran.Bytes, want.Bytes)
			}
			if want.Reason != ReasonLink && want.Reason != ReasonRelated && len(r.history) < 400 {
				r.history, r.dirs = append(r.history, ran.Bytes), append(r.dirs, d)
			}
		}
	}
	t.Logf("%d packets, %d policies, %d passed, %v: %v", compared, *policiesFlag, passed, time.Since(begin).Round(time.Millisecond), reasons)
	if compared >= 10000 && len(reasons) < 30 {
		t.Errorf("only %d outcomes were seen: %v", len(reasons), reasons)
	}
	return reasons
}

// tlsPort is the host's port that checks names in random environments.
const tlsPort = 40443

// splicedBy returns the guest's port if the packet goes to the host to have its name checked, else 0.
func splicedBy(f []byte) uint16 {
	if len(f) < 54 || be.Uint16(f[12:]) != 0x0800 || f[23] != 6 || netip.AddrFrom4([4]byte(f[30:34])) != wire.Gateway4 || be.Uint16(f[36:]) != tlsPort {
		return 0
	}
	return be.Uint16(f[34:])
}

// turned returns the packet with the two addresses of its IPv4 header and its two ports exchanged.
func turned(f []byte) []byte {
	if len(f) < 54 {
		return f
	}
	return clone(f, func(b []byte) {
		copy(b[26:], f[30:34])
		copy(b[30:], f[26:30])
		copy(b[34:], f[36:38])
		copy(b[36:], f[34:36])
	})
}
