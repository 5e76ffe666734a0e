package hostnet

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

var small = netip.MustParsePrefix("10.213.7.0/29")

// holderEnv has this test binary take an address and wait to be killed.
const holderEnv = "DROWSE_TEST_HOLD_ADDRESS"

func TestMain(m *testing.M) {
	if dir := os.Getenv(holderEnv); dir != "" {
		a, err := Take(dir, small, "killed")
		fmt.Println(addrOf(a), err)
		select {}
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

func TestTake_gives_each_agent_another_address_until_none_is_left(t *testing.T) {
	dir := t.TempDir()
	const n = 6 // of a /29
	got := make([]*Address, n)
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			var err error
			if got[i], err = Take(dir, small, fmt.Sprint("agent", i)); err != nil {
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
			t.Errorf("%v is taken twice, or not an agent's", a.Addr())
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

func TestTake_same_agent_gets_the_same_address_again(t *testing.T) {
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
				a, err := Take(dir, small, fmt.Sprint(i%2)) // most want the same
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

// ownNamespace moves the test into a network namespace of its own, which ends with its
// thread.
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

func TestTranslateAndForward_are_idempotent_and_go_away(t *testing.T) {
	ownNamespace(t)
	look := func(ranges []string, forwarding, guarded bool) {
		t.Helper()
		s, err := Look()
		if err != nil || !slices.Equal(s.Ranges, ranges) || s.Forwarding != forwarding || s.Guarded != guarded {
			t.Errorf("%+v, %v; want %v, forwarding %v, guarded %v", s, err, ranges, forwarding, guarded)
		}
	}
	look([]string{}, false, false)
	other := netip.MustParsePrefix("100.64.0.0/16")
	for range 2 {
		for _, r := range []netip.Prefix{small, other} {
			if err := Translate(r); err != nil {
				t.Fatal(err)
			}
		}
	}
	look([]string{small.String(), other.String()}, false, false)
	for i := range 2 {
		if changed, err := Forward(); err != nil || changed != (i == 0) {
			t.Fatal(changed, err)
		}
	}
	look([]string{small.String(), other.String()}, true, true)
	for range 2 {
		if err := Remove(); err != nil {
			t.Fatal(err)
		}
		look([]string{}, false, false)
	}

	// Forwarding that others have switched on is left on, and not limited.
	if err := setForwarding("1"); err != nil {
		t.Fatal(err)
	}
	if changed, err := Forward(); err != nil || changed {
		t.Error(changed, err)
	}
	if err := Translate(small); err != nil {
		t.Fatal(err)
	}
	look([]string{small.String()}, true, false)
	if err := Remove(); err != nil {
		t.Fatal(err)
	}
	look([]string{}, true, false)
}

func TestTranslate_unusable_range_is_refused(t *testing.T) {
	if err := Translate(netip.MustParsePrefix("8.8.8.0/24")); !errors.Is(err, ErrRange) {
		t.Error(err)
	}
}

func TestForward_drops_what_is_neither_from_nor_to_a_vm(t *testing.T) {
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
		must(netlink.AddrAdd(l, a))
		must(netlink.LinkSetUp(l))
	}
	// Two networks of the host's, and one whose device is named as a VM's.
	other := map[string]netns.NsHandle{}
	for device, subnet := range map[string]string{"left": "198.51.100", "right": "203.0.113", "drowse0": "192.0.2"} {
		ns, err := netns.New()
		must(err)
		defer ns.Close()
		other[device] = ns
		must(netns.Set(host))
		must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: device}, PeerName: "up", PeerNamespace: netlink.NsFd(ns)}))
		up(device, subnet+".1/24")
		must(netns.Set(ns))
		up("up", subnet+".2/24")
		gw, err := netlink.ParseAddr(subnet + ".1/32")
		must(err)
		must(netlink.RouteAdd(&netlink.Route{Gw: gw.IP}))
		must(netns.Set(host))
	}
	must(netns.Set(other["right"]))
	server, err := net.ListenPacket("udp4", "203.0.113.2:7")
	must(err)
	defer server.Close()
	client := map[string]net.Conn{}
	for _, from := range []string{"left", "drowse0"} {
		must(netns.Set(other[from]))
		client[from], err = net.Dial("udp4", "203.0.113.2:7")
		must(err)
		defer client[from].Close()
	}
	must(netns.Set(host))
	const patience = time.Minute
	// passes sends until it arrives: the first may be lost while an address is looked for.
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
		n, err := open()
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

	if changed, err := Forward(); err != nil || !changed {
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
	passes("drowse0", "from a VM again") // and nothing from left was before it
	must(Remove())
	must(setForwarding("1"))
	passes("left", "without the rule")
}
