package link_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

// neighbour is another sender of frames to the host: a machine of its network, or a container.
type neighbour struct {
	t    *testing.T
	sock int
	to   [6]byte // the MAC of the host's end
}

// newNeighbour makes a namespace behind a veth pair, whose host end has these addresses.
func newNeighbour(t *testing.T, name string, addrs ...string) *neighbour {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	host, err := os.Open("/proc/thread-self/ns/net")
	must(err)
	defer host.Close()
	must(unix.Unshare(unix.CLONE_NEWNET))
	other, err := os.Open("/proc/thread-self/ns/net")
	must(err)
	defer other.Close()
	must(unix.Setns(int(host.Fd()), unix.CLONE_NEWNET))
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "up", PeerNamespace: netlink.NsFd(int(other.Fd()))}))
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
	must(netlink.LinkSetUp(l))
	n := &neighbour{t: t, to: [6]byte(l.Attrs().HardwareAddr)}
	must(unix.Setns(int(other.Fd()), unix.CLONE_NEWNET))
	up, err := netlink.LinkByName("up")
	must(err)
	must(netlink.LinkSetUp(up))
	n.sock, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	must(err)
	t.Cleanup(func() { unix.Close(n.sock) })
	must(unix.Bind(n.sock, &unix.SockaddrLinklayer{Ifindex: up.Attrs().Index}))
	must(unix.Setns(int(host.Fd()), unix.CLONE_NEWNET))
	return n
}

// send sends the host a packet.
func (n *neighbour) send(src, dst netip.Addr, proto byte, m []byte) {
	n.t.Helper()
	if _, err := unix.Write(n.sock, ethernet(n.to, [6]byte{2, 9, 9, 9, 9, 9}, etherTypeOf(dst), ip(src, dst, proto, m))); err != nil {
		n.t.Fatal(err)
	}
}

func sysctl(t *testing.T, name, value string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A sender outside forges the source address of another VM, or of the host itself. It sends from the host's network
// and from a container, under every rp_filter.
func TestAttack_forged_source_passes_as_a_VM_or_as_the_host(t *testing.T) {
	env := Environment{Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16"), netip.MustParsePrefix("fd77::/64")}}
	web := Identity{Address4: netip.MustParseAddr("10.200.3.7"), Address6: netip.MustParseAddr("fd77::3:7")}
	db := Identity{Address4: netip.MustParseAddr("10.200.3.8"), Address6: netip.MustParseAddr("fd77::3:8")}
	const (
		toDB   = `rules: [{direction: egress, verdict: allow, agents: [db], protocols: [udp], ports: [5432]}]`
		fromIt = `
rules:
- {direction: ingress, verdict: allow, agents: [web], protocols: [udp], ports: [5432]}
- {direction: ingress, verdict: allow, groups: [host], protocols: [udp], ports: [5433]}
- {direction: ingress, verdict: allow, cidrs: [198.51.100.0/24, 172.17.0.0/16, "2001:db8:9::/64", "fd17::/64"], protocols: [udp], ports: [5434]}
`
	)
	for _, by := range []struct {
		name         string
		host4, host6 string
		own4, own6   string
	}{
		{"a machine of the network", "198.51.100.1/24", "2001:db8:9::1/64", "198.51.100.2", "2001:db8:9::2"},
		{"a container", "172.17.0.1/16", "fd17::1/64", "172.17.0.2", "fd17::2"},
	} {
		for _, filter := range []string{"0", "1", "2"} {
			t.Run(fmt.Sprintf("%s, rp_filter %s", by.name, filter), func(t *testing.T) {
				ownNamespace(t)
				sysctl(t, "net/ipv4/conf/all/rp_filter", filter)
				sysctl(t, "net/ipv4/conf/default/rp_filter", filter)
				sysctl(t, "net/ipv4/ip_forward", "1")
				sysctl(t, "net/ipv6/conf/all/forwarding", "1")
				lan := newNeighbour(t, "lan0", by.host4, by.host6)
				root := testRoot(t)
				up := func(name string, id Identity, policy string, tags ...string) (*tapWire, *Link) {
					t.Helper()
					tap := newTAP(t, name)
					p, err := Parse([]byte(policy))
					if err != nil {
						t.Fatal(err)
					}
					env := env
					if env.Host, err = HostAddresses(); err != nil {
						t.Fatal(err)
					}
					s, err := Compile(p, id, env)
					if err != nil {
						t.Fatal(err)
					}
					l, err := Attach(Config{Endpoint: name, Interface: name, Root: root, Tags: tags}, s)
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
					return tap, l
				}
				a, la := up("tapa", web, toDB, "web")
				b, lb := up("tapb", db, fromIt, "db")
				denied := uint64(0)
				for _, six := range []bool{false, true} {
					from, to, host, own := web.Address4, db.Address4, netip.MustParsePrefix(by.host4).Addr(), netip.MustParseAddr(by.own4)
					hosts := []netip.Addr{host, wire.Gateway4}
					if six {
						from, to, host, own = web.Address6, db.Address6, netip.MustParsePrefix(by.host6).Addr(), netip.MustParseAddr(by.own6)
						hosts = []netip.Addr{host, wire.Gateway6}
					}
					next := func(w *tapWire, want string) {
						t.Helper()
						f := w.receive(etherTypeOf(to), 17)
						if got := string(f[14+len(ipHeader(own, to, 0, 0))+8:]); got != want {
							t.Errorf("six %v: %q has come through, want %q first; %s", six, got, want, counters(lb))
						}
					}
					lan.send(from, to, 17, udp(5000, 5432, []byte("forged as a VM")...))
					for _, h := range hosts {
						lan.send(h, to, 17, udp(5000, 5433, []byte("forged as the host")...))
					}
					// A packet with the neighbour's own address passes, and no packet that it sent before.
					lan.send(own, to, 17, udp(5000, 5434, []byte("honest")...))
					next(b, "honest")
					if n := count(t, lb, Ingress, ReasonSrcInterface); filter != "1" && n == denied {
						t.Errorf("six %v: nothing was denied for where it came by: %s", six, counters(lb))
					} else {
						denied = n
					}
					// Packets of the VM and of the host pass. A forged answer of the other VM does not.
					a.send(sent(to, 17, udp(5001, 5432, []byte("query")...)))
					next(b, "query")
					before := count(t, la, Ingress, ReasonSrcInterface)
					lan.send(to, from, 17, udp(5432, 5001, []byte("forged answer")...))
					b.send(sent(from, 17, udp(5432, 5001, []byte("answer")...)))
					next(a, "answer")
					if n := count(t, la, Ingress, ReasonSrcInterface); filter == "0" && n == before {
						t.Errorf("six %v: no forged answer was denied: %s", six, counters(la))
					}
					c, err := net.Dial("udp", netip.AddrPortFrom(to, 5433).String())
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					if _, err := c.Write([]byte("from the host")); err != nil {
						t.Fatal(err)
					}
					next(b, "from the host")
				}
			})
		}
	}
}

// The host puts a packet on the device that has waited for its VM to wake. The programs take it for another VM's
// only with the mark of the packet waker, which has seen which interface it came by.
func TestAttach_frame_of_the_packet_waker_is_of_whom_it_says(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	env := Environment{Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16")}}
	up := func(name string, id Identity, policy string, tags ...string) (*tapWire, *Link) {
		t.Helper()
		tap := newTAP(t, name)
		p, err := Parse([]byte(policy))
		if err != nil {
			t.Fatal(err)
		}
		s, err := Compile(p, id, env)
		if err != nil {
			t.Fatal(err)
		}
		l, err := Attach(Config{Endpoint: name, Interface: name, Root: root, Tags: tags}, s)
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
		return tap, l
	}
	if _, err := WakerMark(root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("before there are programs: %v", err)
	}
	from, to := netip.MustParseAddr("10.200.3.7"), netip.MustParseAddr("10.200.3.8")
	up("tapa", Identity{Address4: from}, "", "web")
	b, lb := up("tapb", Identity{Address4: to}, `rules: [{direction: ingress, verdict: allow, agents: [web], protocols: [udp], ports: [5432]}]`)
	sock, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sock)
	nl, err := netlink.LinkByName("tapb")
	if err != nil {
		t.Fatal(err)
	}
	send := func(text string) {
		t.Helper()
		f := ethernet(wire.GuestMAC, wire.GatewayMAC, 0x0800, ip(from, to, 17, udp(5000, 5432, []byte(text)...)))
		// ENOBUFS means that the programs denied it.
		if err := unix.Sendto(sock, f, 0, &unix.SockaddrLinklayer{Ifindex: nl.Attrs().Index, Protocol: 8}); err != nil && !errors.Is(err, unix.ENOBUFS) {
			t.Fatal(err)
		}
	}
	send("of anybody on the host")
	mark, err := WakerMark(root)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.SetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		t.Fatal(err)
	}
	send("of the packet waker")
	if f := b.receive(0x0800, 17); string(f[42:]) != "of the packet waker" {
		t.Errorf("%q has come through", f[42:])
	}
	if n := count(t, lb, Ingress, ReasonSrcInterface); n != 1 {
		t.Errorf("%d were denied: %s", n, counters(lb))
	}
}
