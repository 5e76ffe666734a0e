package supervisor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// syn returns a packet that opens a TCP connection, or another one of it, depending on flags.
func syn(from, to string, port uint16, flags byte) []byte {
	src, dst := netip.MustParseAddr(from), netip.MustParseAddr(to)
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, 40000)
	binary.BigEndian.PutUint16(tcp[2:], port)
	tcp[12], tcp[13] = 5<<4, flags
	if src.Is6() {
		h := make([]byte, 40)
		h[0], h[5], h[6], h[7] = 6<<4, 20, unix.IPPROTO_TCP, 64
		copy(h[8:], src.AsSlice())
		copy(h[24:], dst.AsSlice())
		return append(h, tcp...)
	}
	h := make([]byte, 20)
	h[0], h[3], h[8], h[9] = 4<<4|5, 40, 64, unix.IPPROTO_TCP
	copy(h[12:], src.AsSlice())
	copy(h[16:], dst.AsSlice())
	return append(h, tcp...)
}

const opening = 2 // SYN

// A stage is a packet waker that notes what it does to VMs.
type stage struct {
	*packetWaker
	mu       sync.Mutex
	woken    []string
	sent     []string // device, second byte of the EtherType, TCP port
	released int
	awake    chan struct{} // wakes wait until awake is closed
	fails    error
	info     spec.NetworkInfo
	clock    time.Time
}

func (s *stage) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.released++
}

var own = netip.MustParseAddr("10.200.0.7")
var own6 = netip.MustParseAddr("fd64:726f:7773:2::ac8:7")

func newStage(t *testing.T, policy string) *stage {
	t.Helper()
	p, err := netpolicy.Parse([]byte(policy))
	if err != nil {
		t.Fatal(err)
	}
	s := &stage{awake: make(chan struct{}), info: spec.NetworkInfo{TAP: "tap-a", Address: own, Address6: own6}, clock: time.Unix(1e9, 0)}
	s.packetWaker = &packetWaker{
		log: slog.New(slog.DiscardHandler), agents: netip.MustParsePrefix("10.200.0.0/16"), agents6: netip.MustParsePrefix("fd64:726f:7773:2::/64"),
		host: []netip.Addr{netip.MustParseAddr("93.184.216.40")}, onLink: []netip.Prefix{netip.MustParsePrefix("93.184.217.0/24")},
		resting: map[netip.Addr]*resting{}, now: func() time.Time { return s.clock },
		wake: func(_ context.Context, name string) (hold, *spec.NetworkInfo, error) {
			<-s.awake
			s.mu.Lock()
			defer s.mu.Unlock()
			s.woken = append(s.woken, name)
			return s, &s.info, s.fails
		},
		send: func(device string, f []byte) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			at := 14 + 20
			if f[12] == 0x86 {
				at = 14 + 40
			}
			s.sent = append(s.sent, fmt.Sprintf("%s %x %d", device, f[13], binary.BigEndian.Uint16(f[at+2:])))
			return nil
		},
	}
	s.guard(map[string]guarded{
		"a":    {name: "a", address4: own, address6: own6, policy: p},
		"none": {name: "none", address4: netip.MustParseAddr("10.200.0.8")},
		"peer": {name: "peer", address4: netip.MustParseAddr("10.200.0.9"), tags: []string{"friend"}, policy: &netpolicy.Policy{}},
	})
	return s
}

// let lets the wakes continue, and waits for them.
func (s *stage) let() {
	close(s.awake)
	s.bringing.Wait()
	s.awake = make(chan struct{})
}

const opensHTTP = `rules:
  - {direction: ingress, verdict: allow, groups: [public], protocols: [tcp], ports: [80, 81, 82]}
  - {direction: ingress, verdict: allow, agents: [friend], protocols: [tcp], ports: [90]}
`

func TestWaker_wakes_for_what_the_policy_lets_in_alone(t *testing.T) {
	for name, c := range map[string]struct {
		packet []byte
		want   string
	}{
		"allowed":                        {syn("93.184.216.34", "10.200.0.7", 80, opening), "tap-a 0 80"},
		"allowed by IPv6":                {syn("2001:db8::1", own6.String(), 81, opening), "tap-a dd 81"},
		"of a VM with the right tag":     {syn("10.200.0.9", "10.200.0.7", 90, opening), "tap-a 0 90"},
		"of a VM without it":             {syn("10.200.0.10", "10.200.0.7", 90, opening), ""},
		"another port":                   {syn("93.184.216.34", "10.200.0.7", 22, opening), ""},
		"from an address of the host":    {syn("93.184.216.40", "10.200.0.7", 80, opening), ""},
		"from a neighbour of the host":   {syn("93.184.217.9", "10.200.0.7", 80, opening), ""},
		"not public":                     {syn("192.168.1.1", "10.200.0.7", 80, opening), ""},
		"of a connection from before":    {syn("93.184.216.34", "10.200.0.7", 80, 16), ""},
		"for a VM without a policy":      {syn("93.184.216.34", "10.200.0.8", 80, opening), ""},
		"for nobody":                     {syn("93.184.216.34", "10.200.9.9", 80, opening), ""},
		"from the metadata service":      {syn("169.254.169.254", "10.200.0.7", 80, opening), ""},
		"cut off":                        {syn("93.184.216.34", "10.200.0.7", 80, opening)[:19], ""},
		"cut off after the addresses":    {syn("93.184.216.34", "10.200.0.7", 80, opening)[:20], ""},
		"neither IPv4 nor IPv6":          {append([]byte{0x50}, make([]byte, 60)...), ""},
		"empty":                          {nil, ""},
		"IPv6 to an address of nobody's": {syn("2001:db8::1", "fd64:726f:7773:2::1", 80, opening), ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, opensHTTP)
			s.packet(t.Context(), c.packet)
			s.let()
			var want []string
			if c.want != "" {
				want = []string{c.want}
			}
			if !slices.Equal(s.sent, want) || len(s.woken) != len(want) || s.released != len(want) {
				t.Errorf("woken %v, sent %v, released %d; want %v", s.woken, s.sent, s.released, want)
			}
		})
	}
}

func TestWaker_several_packets_wake_once_and_come_in_order(t *testing.T) {
	s := newStage(t, opensHTTP)
	for _, port := range []uint16{80, 81, 22, 82} {
		s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", port, opening))
	}
	s.let()
	// The VM's own programs judge the packets that come during the wake.
	if want := []string{"tap-a 0 80", "tap-a 0 81", "tap-a 0 22", "tap-a 0 82"}; !slices.Equal(s.sent, want) || len(s.woken) != 1 || s.released != 1 {
		t.Errorf("woken %v, sent %v, released %d", s.woken, s.sent, s.released)
	}
}

func TestWaker_holds_no_more_than_its_bounds(t *testing.T) {
	for name, size := range map[string]int{"many": 40, "large": 60000} {
		s := newStage(t, opensHTTP)
		p := append(syn("93.184.216.34", "10.200.0.7", 80, opening), make([]byte, size-40)...)
		binary.BigEndian.PutUint16(p[2:], uint16(size))
		for range 10 * maxWakerHeld {
			s.packet(t.Context(), p)
		}
		if n := min(maxWakerHeld, maxWakerBytes/size); len(s.resting[own].held) != n {
			t.Errorf("%s: %d are held, want %d", name, len(s.resting[own].held), n)
		}
		s.let()
		if r := s.resting[own]; len(r.held) != 0 || r.bytes != 0 || r.waking || len(s.woken) != 1 {
			t.Errorf("%s: afterwards %d packets, %d bytes, waking %v, woken %v", name, len(r.held), r.bytes, r.waking, s.woken)
		}
	}
}

func TestWaker_flood_does_not_ask_the_model_without_end(t *testing.T) {
	s := newStage(t, opensHTTP)
	for range 2 * maxJudged {
		s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", 22, opening))
	}
	s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", 80, opening))
	s.clock = s.clock.Add(2 * time.Second)
	s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", 81, opening))
	s.let()
	if !slices.Equal(s.sent, []string{"tap-a 0 81"}) {
		t.Errorf("sent %v", s.sent)
	}
}

func TestAttack_flood_to_one_sleeping_VM_keeps_packets_from_waking_another(t *testing.T) {
	s := newStage(t, opensHTTP)
	for range 2 * maxJudged {
		s.packet(t.Context(), syn("93.184.216.34", "10.200.0.9", 22, opening)) // of the peer, which denies it
	}
	s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", 81, opening))
	s.let()
	if !slices.Equal(s.sent, []string{"tap-a 0 81"}) {
		t.Errorf("sent %v", s.sent)
	}
}

func TestWaker_VM_that_cannot_be_woken_is_left_alone_for_a_while(t *testing.T) {
	for name, spoil := range map[string]func(s *stage) func(){
		"fails": func(s *stage) func() { s.fails = errors.New("no disk"); return func() { s.fails = nil } },
		"another address": func(s *stage) func() {
			s.info.Address = netip.MustParseAddr("10.200.0.99")
			return func() { s.info.Address = own }
		},
	} {
		s := newStage(t, opensHTTP)
		s.info.Address6 = netip.Addr{}
		mend := spoil(s)
		s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", 80, opening))
		s.let()
		mend()
		s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", 81, opening))
		s.let()
		if len(s.sent) != 0 || len(s.woken) != 1 {
			t.Errorf("%s: sent %v, woken %v", name, s.sent, s.woken)
		}
		s.clock = s.clock.Add(restAfter)
		s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", 82, opening))
		s.let()
		if !slices.Equal(s.sent, []string{"tap-a 0 82"}) {
			t.Errorf("%s, later: sent %v", name, s.sent)
		}
	}
}

func TestWaker_VM_that_is_not_guarded_any_more_gets_nothing(t *testing.T) {
	s := newStage(t, opensHTTP)
	s.guard(map[string]guarded{})
	s.packet(t.Context(), syn("93.184.216.34", "10.200.0.7", 80, opening))
	s.let()
	if len(s.woken)+len(s.addresses()) != 0 {
		t.Errorf("woken %v, addresses %v", s.woken, s.addresses())
	}
}

func TestWakerDevice_has_packets_that_no_device_of_a_VM_takes(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("this needs root")
		}
		t.Skip("this needs root")
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	runtime.LockOSThread() // and never unlocked: the namespace ends with the thread
	must(unix.Unshare(unix.CLONE_NEWNET))
	lo, err := netlink.LinkByName("lo")
	must(err)
	must(netlink.LinkSetUp(lo))
	first, err := openWakerDevice(hostnet.DefaultRange, hostnet.DefaultRange6)
	must(err)
	d, err := openWakerDevice(hostnet.DefaultRange, hostnet.DefaultRange6) // of another supervisor
	must(err)
	must(first.close())
	defer func() { must(d.close()) }()
	must(d.lead(map[netip.Addr]bool{own: true, own6: true}))
	must(d.lead(map[netip.Addr]bool{own: true, own6: true})) // a second time

	next := func() netip.Addr {
		t.Helper()
		must(d.file.SetReadDeadline(time.Now().Add(time.Minute)))
		buf := make([]byte, 2000)
		n, err := d.file.Read(buf)
		must(err)
		_, a, ok := packetEnds(buf[:n])
		if !ok || string(buf[n-4:n]) != "ping" {
			t.Fatalf("%x", buf[:n])
		}
		return a
	}
	for _, a := range []netip.Addr{own, own6} {
		c, err := net.Dial("udp", netip.AddrPortFrom(a, 9).String())
		must(err)
		defer c.Close()
		if from := netip.MustParseAddrPort(c.LocalAddr().String()).Addr(); from != netpolicy.TheWire.Gateway4 && from != netpolicy.TheWire.Gateway6 {
			t.Errorf("to %v the host has the address %v", a, from)
		}
		_, err = c.Write([]byte("ping"))
		must(err)
		if got := next(); got != a {
			t.Errorf("there is a packet to %v, want one to %v", got, a)
		}
	}
	// The route of a running VM is better. When it is gone, packets come here again.
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "drowse0"}, PeerName: "peer"}))
	tap, err := netlink.LinkByName("drowse0")
	must(err)
	must(netlink.LinkSetUp(tap))
	must(netlink.RouteReplace(&netlink.Route{LinkIndex: tap.Attrs().Index, Dst: ipNet(own), Scope: netlink.SCOPE_LINK}))
	leads := func() string {
		t.Helper()
		routes, err := netlink.RouteGet(own.AsSlice())
		must(err)
		l, err := netlink.LinkByIndex(routes[0].LinkIndex)
		must(err)
		return l.Attrs().Name
	}
	if got := leads(); got != "drowse0" {
		t.Errorf("while a VM runs its address leads to %s", got)
	}
	must(netlink.LinkDel(tap))
	if got := leads(); got != d.link.Attrs().Name {
		t.Errorf("when it sleeps its address leads to %s", got)
	}
	must(d.lead(nil))
	if _, err := netlink.RouteGet(own.AsSlice()); err == nil {
		t.Error("the address of a VM that is gone leads somewhere")
	}
}

func TestWakerDevice_of_one_supervisor_too_many_is_refused(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("this needs root")
		}
		t.Skip("this needs root")
	}
	runtime.LockOSThread() // and never unlocked: the namespace ends with the thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	name := func(i int) string { return fmt.Sprintf("%s-waker%d", hostnet.InterfacePrefix, i) }
	for i := 0; i < maxWakers-2; i += 2 { // of others: the kernel makes pairs faster
		pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name(i)}, PeerName: name(i + 1)}
		if err := netlink.LinkAdd(pair); err != nil {
			t.Fatal(err)
		}
	}
	for i := maxWakers - 2; i <= maxWakers; i++ {
		d, err := openWakerDevice(hostnet.DefaultRange, hostnet.DefaultRange6)
		if err == nil {
			defer func() {
				if err := d.close(); err != nil {
					t.Error(err)
				}
			}()
		}
		if i < maxWakers {
			if err != nil || d.link.Attrs().Name != name(i) {
				t.Fatalf("supervisor %d of %d: %v", i+1, maxWakers, err)
			}
			continue
		}
		if !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "64 supervisors") {
			t.Errorf("one supervisor more: %v", err)
		}
	}
}

// A VM that wakes may sleep again before the supervisor looks again. A packet in between must find the waker.
func TestGuardedOf_is_whatever_may_be_asleep_when_it_is_looked_again(t *testing.T) {
	v := &supervisor{}
	for name, tt := range map[string]struct {
		r    state.Record
		want bool
	}{
		"asleep":                     {state.Record{Phase: state.Asleep, Snapshot: "1", Spec: sandbox.Spec{Network: spec.NetworkTAP}}, true},
		"running":                    {state.Record{Phase: state.Running, Spec: sandbox.Spec{Network: spec.NetworkTAP}}, true},
		"waking":                     {state.Record{Phase: state.Starting, Snapshot: "1", Spec: sandbox.Spec{Network: spec.NetworkTAP}}, true},
		"booting for the first time": {state.Record{Phase: state.Starting, Spec: sandbox.Spec{Network: spec.NetworkTAP}}, false},
		"stopped":                    {state.Record{Phase: state.Stopped, Snapshot: "1", Spec: sandbox.Spec{Network: spec.NetworkTAP}}, false},
		"crashed":                    {state.Record{Phase: state.Crashed, Snapshot: "1", Spec: sandbox.Spec{Network: spec.NetworkTAP}}, false},
		"without a network":          {state.Record{Phase: state.Asleep, Snapshot: "1"}, false},
	} {
		if _, ok := v.guardedOf(&tt.r); ok != tt.want {
			t.Errorf("%s: guarded %v, want %v", name, ok, tt.want)
		}
	}
}

// A machine in the host's network pretends to be another VM, or the host. Its packets must not reach the waker,
// which would pass them to the VM as if they came from there.
func TestAttack_forged_source_wakes_a_VM(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("this needs root")
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	runtime.LockOSThread() // and never unlocked: the namespaces end with the thread
	here := func() *os.File {
		t.Helper()
		f, err := os.Open("/proc/thread-self/ns/net")
		must(err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	must(unix.Unshare(unix.CLONE_NEWNET))
	other := here()
	must(unix.Unshare(unix.CLONE_NEWNET))
	host := here()
	for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		must(os.WriteFile("/proc/sys/net/"+name, []byte("1\n"), 0o644))
	}
	d, err := openWakerDevice(hostnet.DefaultRange, hostnet.DefaultRange6)
	must(err)
	defer func() { must(d.close()) }()
	asleep, another := netip.MustParseAddr("10.200.3.7"), netip.MustParseAddr("10.200.3.8")
	asleep6, err := hostnet.Address6(hostnet.DefaultRange6, asleep)
	must(err)
	another6, err := hostnet.Address6(hostnet.DefaultRange6, another)
	must(err)
	must(d.lead(map[netip.Addr]bool{asleep: true, asleep6: true, another: true, another6: true}))

	// Two devices of the host: one of its network, and one of a VM that is awake.
	send := map[string]func(src, dst netip.Addr, port uint16){}
	for name, addrs := range map[string][]string{"lan0": {"198.51.100.1/24", "2001:db8:9::1/64"}, "drowse0": nil} {
		must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name, PeerNamespace: netlink.NsFd(int(other.Fd()))}))
		l, err := netlink.LinkByName(name)
		must(err)
		for _, text := range addrs {
			a, err := netlink.ParseAddr(text)
			must(err)
			if a.IP.To4() == nil {
				a.Flags = unix.IFA_F_NODAD
			}
			must(netlink.AddrAdd(l, a))
		}
		must(os.WriteFile("/proc/sys/net/ipv4/conf/"+name+"/rp_filter", []byte("0\n"), 0o644))
		must(netlink.LinkSetUp(l))
		if name == "drowse0" {
			for _, a := range []netip.Addr{another, another6} {
				must(netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(a), Scope: netlink.SCOPE_LINK}))
				must(netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: net.HardwareAddr{2, 3, 4, 5, 6, 7}}))
			}
		}
		must(unix.Setns(int(other.Fd()), unix.CLONE_NEWNET))
		peer, err := netlink.LinkByName(name)
		must(err)
		must(netlink.LinkSetUp(peer))
		sock, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		must(err)
		t.Cleanup(func() { unix.Close(sock) })
		must(unix.Bind(sock, &unix.SockaddrLinklayer{Ifindex: peer.Attrs().Index}))
		must(unix.Setns(int(host.Fd()), unix.CLONE_NEWNET))
		send[name] = func(src, dst netip.Addr, port uint16) {
			t.Helper()
			f := frame(syn(src.String(), dst.String(), port, opening))
			copy(f, l.Attrs().HardwareAddr)
			if src.Is4() {
				h := f[14:34] // the host checks its checksum
				var sum uint32
				for i := 0; i < 20; i += 2 {
					sum += uint32(binary.BigEndian.Uint16(h[i:]))
				}
				binary.BigEndian.PutUint16(h[10:], ^uint16(sum>>16+sum))
			}
			_, err := unix.Write(sock, f)
			must(err)
		}
	}
	next := func(want uint16) {
		t.Helper()
		must(d.file.SetReadDeadline(time.Now().Add(time.Minute)))
		buf := make([]byte, 2000)
		n, err := d.file.Read(buf)
		for err == nil && buf[9] != unix.IPPROTO_TCP && buf[6] != unix.IPPROTO_TCP { // the kernel's own IPv6
			n, err = d.file.Read(buf)
		}
		must(err)
		if got := binary.BigEndian.Uint16(buf[n-18:]); got != want {
			src, _, _ := packetEnds(buf[:n])
			t.Errorf("a packet from %v to port %d has come, want that to %d", src, got, want)
		}
	}
	for _, x := range []struct{ to, vm, own, host, gateway netip.Addr }{
		{asleep, another, netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("198.51.100.1"), netpolicy.TheWire.Gateway4},
		{asleep6, another6, netip.MustParseAddr("2001:db8:9::2"), netip.MustParseAddr("2001:db8:9::1"), netpolicy.TheWire.Gateway6},
	} {
		for _, a := range []netip.Addr{x.host, x.gateway} {
			// The kernel activates an IPv6 address some time after it has accepted it.
			for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
				routes, err := netlink.RouteGet(a.AsSlice())
				must(err)
				if routes[0].Type == unix.RTN_LOCAL {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("%v is not in service", a)
				}
			}
		}
		for _, forged := range []netip.Addr{x.vm, x.to, x.host, x.gateway} {
			send["lan0"](forged, x.to, 66)
		}
		send["lan0"](x.own, x.to, 80)
		next(80)
		send["drowse0"](x.vm, x.to, 81)
		next(81)
	}
}
