package hostnet

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
)

var small = netip.MustParsePrefix("10.213.7.0/29")

// holderEnv makes this test binary take an address and wait to be killed.
const holderEnv = "DROWSE_TEST_HOLD_ADDRESS"

func TestMain(m *testing.M) {
	if dir := os.Getenv(holderEnv); dir != "" {
		a, err := Take(dir, small, "killed")
		fmt.Println(addrOf(a), err)
		_, _ = io.Copy(io.Discard, os.Stdin) // until it is killed, or its parent ends
		runtime.KeepAlive(a)
		return
	}
	os.Exit(m.Run())
}

func addrOf(a *Address) string {
	if a == nil {
		return "none"
	}
	return a.Addr().String()
}

func TestCheckRange(t *testing.T) {
	for text, ok := range map[string]bool{
		"10.200.0.0/16": true, "100.64.0.0/16": true, "192.168.4.0/24": true, "10.0.0.0/13": true, "10.1.2.0/30": true,
		"10.0.0.0/8": false, "10.1.2.0/31": false, "10.1.2.1/24": false, "172.31.0.0/16": false, "172.31.255.0/30": false,
		"8.8.8.0/24": false, "127.0.0.0/16": false, "169.254.0.0/16": false, "fd00::/64": false, "100.100.0.0/16": false, "224.0.0.0/16": false,
	} {
		if err := CheckRange(netip.MustParsePrefix(text)); (err == nil) != ok || err != nil && !errors.Is(err, ErrRange) {
			t.Errorf("%s: %v, want ok %v", text, err, ok)
		}
	}
	t.Setenv(RangeEnv, "100.64.0.0/16")
	if p, err := Range(); err != nil || p.String() != "100.64.0.0/16" {
		t.Error(p, err)
	}
	t.Setenv(RangeEnv, "nonsense")
	if _, err := Range(); !errors.Is(err, ErrRange) {
		t.Error(err)
	}
}

func TestRange6(t *testing.T) {
	for text, ok := range map[string]bool{
		"": true, "fd64:726f:7773:2::/64": true, "fc00:0:0:1::/64": true,
		"fd64:726f:7773:1::/64": false, "fd64:726f:7773::/48": false, "fd64:726f:7773:2::/65": false, "fd64:726f:7773:2::1/64": false,
		"2001:db8::/64": false, "fe80::/64": false, "fd00:ec2::/64": false, "fd20:ce::/64": false, "10.0.0.0/16": false, "::ffff:0.0.0.0/64": false, "nonsense": false,
	} {
		t.Setenv(Range6Env, text)
		if p, err := Range6(); (err == nil) != ok || err != nil && !errors.Is(err, ErrRange) {
			t.Errorf("%q: %v, %v, want ok %v", text, p, err, ok)
		}
	}
}

func TestAddress6_has_the_address_of_IPv4_in_it(t *testing.T) {
	ownNamespace(t)
	own := netip.MustParseAddr("10.200.7.9")
	in := netip.MustParsePrefix("fd00:1:2:3::/64")
	if a, err := Address6(in, own); err != nil || a.String() != "fd00:1:2:3::ac8:709" || !in.Contains(a) {
		t.Errorf("%v, %v", a, err)
	}
	if a, err := Address6(netip.MustParsePrefix("2001:db8::/64"), own); !errors.Is(err, ErrRange) {
		t.Errorf("in a public range: %v, %v", a, err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr("fd00:1:2:3::1/64")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(lo, addr); err != nil {
		t.Fatal(err)
	}
	if a, err := Address6(in, own); !errors.Is(err, ErrRange) {
		t.Errorf("in a range of the host's: %v, %v", a, err)
	}
}

func TestTake_gives_each_endpoint_another_address_until_none_is_left(t *testing.T) {
	dir := t.TempDir()
	const n = 6 // of a /29
	got := make([]*Address, n)
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			var err error
			if got[i], err = Take(dir, small, fmt.Sprint("endpoint", i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	seen := map[netip.Addr]bool{}
	for _, a := range got {
		if seen[a.Addr()] || !small.Contains(a.Addr()) || a.Addr() == small.Addr() || a.Addr().String() == "10.213.7.7" {
			t.Errorf("%v is taken twice, or not an endpoint's", a.Addr())
		}
		seen[a.Addr()] = true
	}
	if _, err := Take(dir, small, "one more"); !errors.Is(err, ErrFull) {
		t.Errorf("a seventh: %v", err)
	}
	back := got[3].Addr()
	if err := got[3].Release(); err != nil {
		t.Fatal(err)
	}
	a, err := Take(dir, small, "one more")
	if err != nil || a.Addr() != back {
		t.Fatalf("%v, %v, want %v", a, err, back)
	}
	got[3] = a
	for _, a := range got {
		if err := a.Release(); err != nil {
			t.Error(err)
		}
		if err := a.Release(); err != nil {
			t.Errorf("again: %v", err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestTake_same_endpoint_gets_the_same_address_again(t *testing.T) {
	dir := t.TempDir()
	var before netip.Addr
	for range 3 {
		a, err := Take(dir, DefaultRange, "0123456789abcdef")
		if err != nil {
			t.Fatal(err)
		}
		if before.IsValid() && a.Addr() != before {
			t.Errorf("%v, then %v", before, a.Addr())
		}
		before = a.Addr()
		if err := a.Release(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTake_many_at_once_never_gives_one_address_twice(t *testing.T) {
	dir := t.TempDir()
	var mu sync.Mutex
	held := map[netip.Addr]bool{}
	var wg sync.WaitGroup
	for i := range 5 {
		wg.Go(func() {
			for range 300 {
				a, err := Take(dir, small, fmt.Sprint(i%2)) // most want the same address
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if held[a.Addr()] {
					t.Errorf("%v is held twice", a.Addr())
				}
				held[a.Addr()] = true
				mu.Unlock()
				mu.Lock()
				delete(held, a.Addr())
				mu.Unlock()
				if err := a.Release(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestTake_address_of_a_killed_process_is_free_again(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), holderEnv+"="+dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	a, err := Take(dir, small, "killed")
	if err != nil || a.Addr().String()+" <nil>\n" == line {
		t.Errorf("while the other process lives: %v, %v; it has %s", addrOf(a), err, line)
	}
	if err := a.Release(); err != nil {
		t.Error(err)
	}
	held, err := Take(dir, small, "held")
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("of the killed process there is %v (%v): this tests nothing", left, err)
	}
	if err := Sweep(dir); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != held.Addr().String() {
		t.Errorf("after a sweep: %v, %v", left, err)
	}
	if a, err = Take(dir, small, "killed"); err != nil || a.Addr().String()+" <nil>\n" != line {
		t.Errorf("after its end: %v, %v, want %s", addrOf(a), err, line)
	}
	for _, a := range []*Address{a, held} {
		if err := a.Release(); err != nil {
			t.Error(err)
		}
	}
}

// ownNamespace moves the test into a new network namespace, which ends with its thread.
func ownNamespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("this needs root")
		}
		t.Skip("this needs root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
}

func TestTake_range_with_a_network_of_the_host_is_refused(t *testing.T) {
	ownNamespace(t)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr("10.213.0.1/16")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(lo, addr); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "none")
	if _, err := Take(dir, small, "x"); !errors.Is(err, ErrRange) {
		t.Errorf("%v, want %v", err, ErrRange)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something was made: %v", err)
	}
}

// setting reads a sysctl's file.
func setting(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func TestTranslateAndForward_are_idempotent_and_go_away(t *testing.T) {
	for name, c := range map[string]struct {
		family  *family
		ranges  []netip.Prefix
		forward func() (bool, error)
	}{
		"IPv4": {ip4, []netip.Prefix{small, netip.MustParsePrefix("100.64.0.0/16")}, Forward},
		"IPv6": {ip6, []netip.Prefix{DefaultRange6, netip.MustParsePrefix("fd00:1:2:3::/64")}, Forward6},
	} {
		t.Run(name, func(t *testing.T) {
			ownNamespace(t)
			look := func(ranges []netip.Prefix, forwarding, guarded bool) {
				t.Helper()
				want := Status{Ranges: []string{}}
				for _, r := range ranges {
					want.Ranges = append(want.Ranges, r.String())
				}
				if c.family == ip4 {
					want.Forwarding, want.Guarded = forwarding, guarded
				} else {
					want.Forwarding6, want.Guarded6 = forwarding, guarded
				}
				if s, err := Look(); err != nil || !reflect.DeepEqual(s, want) {
					t.Errorf("%+v, %v; want %+v", s, err, want)
				}
			}
			look(nil, false, false)
			for range 2 {
				for _, r := range c.ranges {
					if err := Translate(r); err != nil {
						t.Fatal(err)
					}
				}
			}
			look(c.ranges, false, false)
			for i := range 2 {
				if changed, err := c.forward(); err != nil || changed != (i == 0) {
					t.Fatal(changed, err)
				}
			}
			look(c.ranges, true, true)
			for range 2 {
				if err := Remove(); err != nil {
					t.Fatal(err)
				}
				look(nil, false, false)
			}

			// Forwarding that others have switched on is left on, and not limited.
			if err := c.family.setForwarding("1"); err != nil {
				t.Fatal(err)
			}
			if changed, err := c.forward(); err != nil || changed {
				t.Error(changed, err)
			}
			if err := Translate(c.ranges[0]); err != nil {
				t.Fatal(err)
			}
			look(c.ranges[:1], true, false)
			if err := Remove(); err != nil {
				t.Fatal(err)
			}
			look(nil, true, false)
		})
	}
}

func TestForward6_leaves_the_host_its_routes_from_routers(t *testing.T) {
	ownNamespace(t)
	for _, name := range []string{"takes", "takes-none", "changed"} {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-1"}); err != nil {
			t.Fatal(err)
		}
	}
	want := func(when string, values map[string]string) {
		t.Helper()
		for name, v := range values {
			if got := setting(t, acceptRA(name)); got != v {
				t.Errorf("%s, accept_ra of %s is %s, want %s", when, name, got, v)
			}
		}
	}
	for name, v := range map[string]string{"default": "1", "takes": "1", "takes-none": "0", "changed": "1"} {
		if err := setAcceptRA(name, v); err != nil {
			t.Fatal(err)
		}
	}
	if changed, err := Forward6(); err != nil || !changed {
		t.Fatal(changed, err)
	}
	want("while it forwards", map[string]string{"default": "2", "takes": "2", "takes-none": "0", "changed": "2"})
	if err := setAcceptRA("changed", "0"); err != nil {
		t.Fatal(err)
	}
	if err := Remove(); err != nil {
		t.Fatal(err)
	}
	want("afterwards", map[string]string{"default": "1", "takes": "1", "takes-none": "0", "changed": "0"})
}

func TestTranslate_unusable_range_is_refused(t *testing.T) {
	for _, text := range []string{"8.8.8.0/24", "2001:db8::/64", "fd64:726f:7773:2::/65"} {
		if err := Translate(netip.MustParsePrefix(text)); !errors.Is(err, ErrRange) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// A machine of the host's network forges the source address of a VM. The host's own services do not get its packets,
// under any rp_filter.
func TestAttack_forged_source_of_a_VM_reaches_the_host(t *testing.T) {
	for _, x := range []struct {
		family             *family
		in                 netip.Prefix
		network, host, own string
	}{
		{ip4, DefaultRange, "udp4", "198.51.100.1/24", "198.51.100.2/24"}, {ip6, DefaultRange6, "udp6", "2001:db8:1::1/64", "2001:db8:1::2/64"},
	} {
		t.Run(x.network, func(t *testing.T) {
			ownNamespace(t)
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			host, err := netns.Get()
			must(err)
			defer host.Close()
			vm := x.in.Addr().Next().Next()
			up := func(l netlink.Link, addr string) {
				t.Helper()
				a, err := netlink.ParseAddr(addr)
				must(err)
				if x.family == ip6 {
					a.Flags = unix.IFA_F_NODAD
				}
				must(netlink.AddrAdd(l, a))
				must(netlink.LinkSetUp(l))
			}
			at := netip.AddrPortFrom(netip.MustParsePrefix(x.host).Addr(), 7)
			socket := map[string]func(text string){}
			for _, device := range []string{"lan0", "drowse0"} {
				ns, err := netns.New()
				must(err)
				defer ns.Close()
				must(netns.Set(host))
				must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: "up", PeerNamespace: netlink.NsFd(ns)}))
				l, err := netlink.LinkByName(device)
				must(err)
				if x.family == ip4 {
					must(os.WriteFile("/proc/sys/net/ipv4/conf/"+device+"/rp_filter", []byte("0\n"), 0o644))
				}
				if device == "lan0" {
					up(l, x.host)
				} else {
					must(netlink.LinkSetUp(l))
				}
				must(netns.Set(ns))
				peer, err := netlink.LinkByName("up")
				must(err)
				up(peer, x.own)
				up(peer, netip.PrefixFrom(vm, vm.BitLen()).String())
				must(netlink.RouteReplace(&netlink.Route{LinkIndex: peer.Attrs().Index, Dst: &net.IPNet{IP: at.Addr().AsSlice(), Mask: net.CIDRMask(at.Addr().BitLen(), at.Addr().BitLen())}, Scope: netlink.SCOPE_LINK}))
				must(netlink.NeighSet(&netlink.Neigh{LinkIndex: peer.Attrs().Index, State: netlink.NUD_PERMANENT, IP: at.Addr().AsSlice(), HardwareAddr: l.Attrs().HardwareAddr}))
				for what, from := range map[string]netip.Addr{"": netip.MustParsePrefix(x.own).Addr(), " as a VM": vm} {
					c, err := net.DialUDP(x.network, net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(at))
					must(err)
					defer c.Close()
					socket[device+what] = func(text string) {
						t.Helper()
						_, err := c.Write([]byte(text))
						must(err)
					}
				}
				must(netns.Set(host))
			}
			server, err := net.ListenPacket(x.network, at.String())
			must(err)
			defer server.Close()
			for range 2 {
				must(Own(x.in))
			}
			for _, send := range []struct {
				by   string
				want bool
			}{{"lan0 as a VM", false}, {"lan0", true}, {"drowse0 as a VM", true}} {
				socket[send.by](send.by)
				if !send.want {
					continue
				}
				b := make([]byte, 64)
				for got, end := "", time.Now().Add(time.Minute); got != send.by; {
					if time.Now().After(end) {
						t.Fatalf("nothing has come by %s", send.by)
					}
					must(server.SetReadDeadline(time.Now().Add(100 * time.Millisecond)))
					n, _, err := server.ReadFrom(b)
					if errors.Is(err, os.ErrDeadlineExceeded) {
						socket[send.by](send.by) // an IPv6 address may not have been ready
						continue
					}
					must(err)
					if got = string(b[:n]); got == "lan0 as a VM" {
						t.Errorf("what has come is %s", got)
					}
				}
			}
			must(Remove())
		})
	}
}

func TestForward_drops_what_is_neither_from_nor_to_a_vm(t *testing.T) {
	t.Run("IPv4", func(t *testing.T) {
		dropsOthers(t, ip4, "udp4", "198.51.100.%d/24", "203.0.113.%d/24", "192.0.2.%d/24")
	})
	t.Run("IPv6", func(t *testing.T) {
		dropsOthers(t, ip6, "udp6", "2001:db8:1::%d/64", "2001:db8:2::%d/64", "2001:db8:3::%d/64")
	})
}

// dropsOthers has two networks of the host and one of a VM send to each other. The subnets are those of the left,
// the right and the VM's network. The host is number 1, the other end 2.
func dropsOthers(t *testing.T, f *family, network, leftNet, rightNet, vmNet string) {
	ownNamespace(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	host, err := netns.Get()
	must(err)
	defer host.Close()
	up := func(name, addr string) {
		t.Helper()
		l, err := netlink.LinkByName(name)
		must(err)
		a, err := netlink.ParseAddr(addr)
		must(err)
		if f == ip6 {
			a.Flags = unix.IFA_F_NODAD
		}
		must(netlink.AddrAdd(l, a))
		must(netlink.LinkSetUp(l))
	}
	// Two networks of the host, and one whose device is named like a VM's.
	other := map[string]netns.NsHandle{}
	for device, subnet := range map[string]string{"left": leftNet, "right": rightNet, "drowse0": vmNet} {
		ns, err := netns.New()
		must(err)
		defer ns.Close()
		other[device] = ns
		must(netns.Set(host))
		must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: "up", PeerNamespace: netlink.NsFd(ns)}))
		up(device, fmt.Sprintf(subnet, 1))
		must(netns.Set(ns))
		up("up", fmt.Sprintf(subnet, 2))
		gw := netip.MustParsePrefix(fmt.Sprintf(subnet, 1)).Addr()
		l, err := netlink.LinkByName("up")
		must(err)
		must(netlink.RouteAdd(&netlink.Route{Gw: gw.AsSlice(), LinkIndex: l.Attrs().Index}))
		must(netns.Set(host))
	}
	must(netns.Set(other["right"]))
	at := netip.AddrPortFrom(netip.MustParsePrefix(fmt.Sprintf(rightNet, 2)).Addr(), 7).String()
	server, err := net.ListenPacket(network, at)
	must(err)
	defer server.Close()
	client := map[string]net.Conn{}
	for _, from := range []string{"left", "drowse0"} {
		must(netns.Set(other[from]))
		client[from], err = net.Dial(network, at)
		must(err)
		defer client[from].Close()
	}
	must(netns.Set(host))
	const patience = time.Minute
	// passes sends until a packet arrives. The first may be lost during address resolution.
	passes := func(from, word string) {
		t.Helper()
		b := make([]byte, 64)
		for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
			_, err := client[from].Write([]byte(word))
			must(err)
			must(server.SetReadDeadline(time.Now().Add(100 * time.Millisecond)))
			for {
				n, _, err := server.ReadFrom(b)
				if err != nil {
					break
				}
				if got := string(b[:n]); got == word {
					return
				} else if got == "never" {
					t.Fatal("it has come through")
				}
			}
		}
		t.Fatalf("%q from %s has not come through", word, from)
	}
	dropped := func() uint64 {
		t.Helper()
		n, err := open(f)
		must(err)
		rules, err := n.conn.GetRules(n.table, &nftables.Chain{Name: chainGuard, Table: n.table})
		must(err)
		for _, r := range rules {
			for _, x := range r.Exprs {
				if c, ok := x.(*expr.Counter); ok {
					return c.Packets
				}
			}
		}
		t.Fatal("no counter")
		return 0
	}

	if changed, err := f.doForward(); err != nil || !changed {
		t.Fatal(changed, err)
	}
	passes("drowse0", "from a VM")
	for deadline := time.Now().Add(patience); dropped() == 0; time.Sleep(10 * time.Millisecond) {
		_, err := client["left"].Write([]byte("never"))
		must(err)
		if time.Now().After(deadline) {
			t.Fatal("what was sent from left to right has not been dropped")
		}
	}
	passes("drowse0", "from a VM again") // and nothing from left came before it
	must(Remove())
	must(f.setForwarding("1"))
	passes("left", "without the rule")
}

// A VM sends datagrams between all pairs of many ports. The host's connection tracking would take each for a
// connection.
func TestAttack_flood_of_datagrams_fills_connection_tracking(t *testing.T) {
	usual := Connections(&netpolicy.Policy{})
	for _, x := range []struct {
		what        string
		in          netip.Prefix
		to          netip.Addr
		connections int
		datagrams   int // each takes longer, the more connections there are
	}{
		{"IPv4", DefaultRange, netip.MustParseAddr("198.51.100.2"), usual, 8_000},
		{"IPv6", DefaultRange6, netip.MustParseAddr("2001:db8:1::2"), usual, 8_000},
		{"IPv4 of a VM with few flows", DefaultRange, netip.MustParseAddr("198.51.100.2"), Connections(&netpolicy.Policy{Flows: 100}), 100_000},
		{"IPv6 of a VM with few flows", DefaultRange6, netip.MustParseAddr("2001:db8:1::2"), Connections(&netpolicy.Policy{Flows: 100}), 100_000},
		{"IPv6 of a VM with many", DefaultRange6, netip.MustParseAddr("2001:db8:1::2"), Connections(&netpolicy.Policy{Flows: 5000}), 8_000},
	} {
		t.Run(x.what, func(t *testing.T) {
			ownNamespace(t)
			must := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			f := familyOf(x.in)
			vm := x.in.Addr().Next().Next()
			must(Translate(x.in))
			// As after another VM that had the address, and after a restart.
			must(Bound(x.in, vm, 77))
			for range 2 {
				must(Bound(x.in, vm, x.connections))
			}
			must(f.setForwarding("1"))
			host, err := netns.Get()
			must(err)
			defer host.Close()
			ns, err := netns.New()
			must(err)
			defer ns.Close()
			must(netns.Set(host))
			must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "drowse0"}, PeerName: "up", PeerNamespace: netlink.NsFd(ns)}))
			l, err := netlink.LinkByName("drowse0")
			must(err)
			must(netlink.LinkSetUp(l))
			whole := func(a netip.Addr) *net.IPNet {
				return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
			}
			must(netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: whole(vm), Scope: netlink.SCOPE_LINK}))
			// The other end of out does not answer, and need not.
			must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "out"}, PeerName: "away", PeerNamespace: netlink.NsFd(ns)}))
			out, err := netlink.LinkByName("out")
			must(err)
			a := &netlink.Addr{IPNet: &net.IPNet{IP: x.to.Prev().AsSlice(), Mask: net.CIDRMask(x.to.BitLen()-8, x.to.BitLen())}}
			if f == ip6 {
				a.Flags = unix.IFA_F_NODAD
			}
			must(netlink.AddrAdd(out, a))
			must(netlink.LinkSetUp(out))
			must(netlink.NeighSet(&netlink.Neigh{LinkIndex: out.Attrs().Index, State: netlink.NUD_PERMANENT, IP: x.to.AsSlice(), HardwareAddr: net.HardwareAddr{2, 3, 4, 5, 6, 7}}))

			must(netns.Set(ns))
			away, err := netlink.LinkByName("away")
			must(err)
			must(netlink.LinkSetUp(away))
			peer, err := netlink.LinkByName("up")
			must(err)
			must(netlink.LinkSetUp(peer))
			sock, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
			must(err)
			defer unix.Close(sock)
			must(unix.Bind(sock, &unix.SockaddrLinklayer{Ifindex: peer.Attrs().Index}))
			must(netns.Set(host))
			frame := datagram(l.Attrs().HardwareAddr, vm, x.to)
			entries := func() int {
				t.Helper()
				var n int
				_, err := fmt.Sscan(setting(t, "/proc/sys/net/netfilter/nf_conntrack_count"), &n)
				must(err)
				return n
			}
			most := 0
			for i := range x.datagrams {
				src, dst := uint16(1024+i%60000), uint16(1024+i/60000)
				u := frame[len(frame)-10:]
				binary.BigEndian.PutUint16(u, src)
				binary.BigEndian.PutUint16(u[2:], dst)
				binary.BigEndian.PutUint16(u[8:], 0xffff-src-dst) // so that the checksum stays right
				_, err := unix.Write(sock, frame)
				must(err)
				if i%2000 == 0 {
					most = max(most, entries())
				}
			}
			// The kernel's own IPv6 packets add a few.
			if most = max(most, entries()); most > x.connections+16 || most < x.connections-16 {
				t.Errorf("%d datagrams: %d connections are tracked, want %d", x.datagrams, most, x.connections)
			}
			n, err := open(f)
			must(err)
			rules, err := n.rules(chainBound)
			must(err)
			want := 1
			if x.connections != usual {
				want = 3
			}
			if len(rules) != want {
				t.Errorf("there are %d rules, want %d", len(rules), want)
			}
			must(Remove())
		})
	}
}

// datagram returns a UDP frame whose ports and 2-byte payload add up to 0xffff.
func datagram(to net.HardwareAddr, src, dst netip.Addr) []byte {
	f := append(append([]byte{}, to...), 2, 9, 9, 9, 9, 9)
	if src.Is6() {
		f = append(f, 0x86, 0xdd, 6<<4, 0, 0, 0, 0, 10, unix.IPPROTO_UDP, 64)
		sum := uint32(unix.IPPROTO_UDP + 10 + 10 + 0xffff)
		for _, b := range [][]byte{src.AsSlice(), dst.AsSlice()} {
			for i := 0; i < 16; i += 2 {
				sum += uint32(binary.BigEndian.Uint16(b[i:]))
			}
			f = append(f, b...)
		}
		sum = sum>>16 + sum&0xffff
		return append(binary.BigEndian.AppendUint16(append(f, 0, 0, 0, 0, 0, 10), ^uint16(sum>>16+sum)), 0, 0)
	}
	h := []byte{4<<4 | 5, 0, 0, 30, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	h = append(append(h, src.AsSlice()...), dst.AsSlice()...)
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum>>16+sum))
	return append(append(append(f, 8, 0), h...), 0, 0, 0, 0, 0, 10, 0, 0, 0, 0)
}

func TestContain_adds_one_rule_for_each_range_that_goes_with_the_others(t *testing.T) {
	ownNamespace(t)
	for f, in := range map[*family]netip.Prefix{ip4: DefaultRange, ip6: DefaultRange6} {
		n, err := open(f)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := Contain(in); err != nil {
				t.Fatal(err)
			}
			if have, err := n.comments(chainStray); err != nil || len(have) != 1 || have[0] != strayPrefix+in.String() {
				t.Errorf("%s: rules %q, %v", in, have, err)
			}
		}
	}
	if err := Remove(); err != nil {
		t.Fatal(err)
	}
	for _, f := range []*family{ip4, ip6} {
		n, err := open(f)
		if err != nil {
			t.Fatal(err)
		}
		if have, err := n.comments(chainStray); err != nil || len(have) != 0 {
			t.Errorf("after Remove: rules %q, %v", have, err)
		}
	}
}
