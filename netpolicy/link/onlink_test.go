package link_test

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	. "github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

// addAddress gives a device an address.
func addAddress(t *testing.T, nl netlink.Link, text string) {
	t.Helper()
	a, err := netlink.ParseAddr(text)
	if err != nil {
		t.Fatal(err)
	}
	a.Flags = unix.IFA_F_NODAD
	if err := netlink.AddrAdd(nl, a); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func addLink(t *testing.T, nl netlink.Link) netlink.Link {
	t.Helper()
	if err := netlink.LinkAdd(nl); err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(nl); err != nil {
		t.Fatal(err)
	}
	made, err := netlink.LinkByName(nl.Attrs().Name)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func addRoute(t *testing.T, nl netlink.Link, to, gw string, table int) {
	t.Helper()
	r := &netlink.Route{LinkIndex: nl.Attrs().Index, Table: table}
	if to != "" {
		_, dst, err := net.ParseCIDR(to)
		if err != nil {
			t.Fatal(err)
		}
		r.Dst = dst
	}
	if gw != "" {
		r.Gw, r.Flags = net.ParseIP(gw), int(netlink.FLAG_ONLINK)
	} else {
		r.Scope = netlink.SCOPE_LINK
	}
	if err := netlink.RouteAdd(r); err != nil {
		t.Fatalf("%s by %s: %v", to, gw, err)
	}
}

// neighbourhood makes a namespace of a host with public addresses, and returns what OnLink must find in it.
func neighbourhood(t *testing.T) (want []string) {
	t.Helper()
	ownNamespace(t)
	up := addLink(t, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up0"}, PeerName: "up1"})
	addAddress(t, up, "203.0.113.7/24")
	addAddress(t, up, "2a00:1:2:3::7/64")
	addAddress(t, up, "10.1.0.1/16")                      // private anyway
	addRoute(t, up, "", "203.0.113.1", 0)                 // a gateway within a range
	addRoute(t, up, "45.0.0.0/16", "198.51.100.9", 0)     // and one of its own
	addRoute(t, up, "52.7.0.0/16", "", 0)                 // neighbours without an address there
	addRoute(t, up, "52.8.0.0/16", "", 100)               // in another table
	addRoute(t, up, "2a00:9::/48", "", 0)                 //
	addRoute(t, up, "128.0.0.0/2", "", 0)                 // a way out
	addRoute(t, up, "2a00:a::/48", "2a00:1:2:3::ffff", 0) //
	tunnel := addLink(t, &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN})
	addAddress(t, tunnel, "192.0.2.1/30")
	addRoute(t, tunnel, "44.0.0.0/8", "", 0)
	return []string{
		"52.7.0.0/16", "52.8.0.0/16", "192.0.2.0/30", "198.51.100.9/32", "203.0.113.0/24", "203.0.113.1/32",
		"2a00:1:2:3::/64", "2a00:1:2:3::ffff/128", "2a00:9::/48",
	}
}

func onLink(t *testing.T) (list []netip.Prefix, texts []string) {
	t.Helper()
	list, err := hostnet.OnLink()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list {
		texts = append(texts, p.String())
	}
	return list, texts
}

func TestOnLink_is_what_a_host_reaches_without_a_gateway(t *testing.T) {
	want := neighbourhood(t)
	if _, got := onLink(t); !slices.Equal(got, want) {
		t.Errorf("got  %q,\nwant %q", got, want)
	}
}

func TestOnLink_more_ranges_than_there_may_be_are_made_wider(t *testing.T) {
	ownNamespace(t)
	up := addLink(t, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "up0"}, PeerName: "up1"})
	var all []netip.Addr
	for i := range MaxOnLink + 1 {
		a := netip.AddrFrom4([4]byte{45, byte(i >> 4), byte(i << 4), 1})
		all = append(all, a)
		addAddress(t, up, a.String()+"/24")
	}
	list, _ := onLink(t)
	if len(list) > MaxOnLink {
		t.Fatalf("%d ranges", len(list))
	}
	s, err := Compile(&Policy{}, endpoint, Environment{OnLink: list})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if s.Public(a.Next()) {
			t.Fatalf("%v is public", a.Next())
		}
	}
	if !s.Public(netip.MustParseAddr("8.8.8.8")) {
		t.Error("everything is private")
	}
}

const openPublic = `
default: {egress: allow}
rules:
  - {direction: egress, verdict: allow, groups: [public, any], cidrs: [0.0.0.0/0, "::/0", 203.0.0.0/16], names: [a.example], protocols: [any], ports: [any]}
dns: {}
`

// TestAttack_public_does_not_open_the_neighbours_of_the_host has a guest try its host's neighbours: a router, a
// management interface, another customer. They have public addresses, and the policy opens public ones.
func TestAttack_public_does_not_open_the_neighbours_of_the_host(t *testing.T) {
	neighbourhood(t)
	env := Environment{}
	env.OnLink, _ = onLink(t)
	e := sharedEngine(t)
	judge := func(text, peer string) (verdict Verdict, class string) {
		t.Helper()
		p, err := Parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		s, err := Compile(p, endpoint, env)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Install(s); err != nil {
			t.Fatal(err)
		}
		if err := e.ForgetState(); err != nil {
			t.Fatal(err)
		}
		a := netip.MustParseAddr(peer)
		ran, err := e.Run(Egress, sent(a, 17, udp(5000, 5000)), 0)
		if err != nil {
			t.Fatal(err)
		}
		passed := ran.Verdict == Allow
		m := refmodel.New(p, endpoint, env).Ask(refmodel.Question{Direction: Egress, Protocol: UDP, Peer: a, Port: 5000, Names: []string{"a.example"}})
		// TCP is judged by the proxy, which connects for a guest.
		_, opens := s.Opens(netip.AddrPortFrom(a, 5000), []string{"a.example"}, "a.example")
		if passed != (m.Verdict == Allow) || opens != passed || s.Public(a) != (m.Class == "public") {
			t.Errorf("%s: the programs let it pass: %v, the proxy: %v, public: %v, the model: %+v", peer, passed, opens, s.Public(a), m)
		}
		return m.Verdict, m.Class
	}
	for peer, want := range map[string]Verdict{
		"203.0.113.1": Deny, "203.0.113.255": Deny, "198.51.100.9": Deny, "52.7.1.1": Deny, "52.8.1.1": Deny, "192.0.2.2": Deny,
		"2a00:1:2:3::ffff": Deny, "2a00:1:2:3:1::1": Deny, "2a00:9::1": Deny,
		"203.0.112.255": Allow, "203.0.114.0": Allow, "198.51.100.10": Allow, "45.0.0.1": Allow, "44.1.1.1": Allow, "150.1.1.1": Allow,
		"2a00:1:2:4::1": Allow, "2a00:a::1": Allow,
	} {
		verdict, class := judge(openPublic, peer)
		if verdict != want || (class == "private") != (want == Deny) {
			t.Errorf("%s is %s, and the verdict %s, want %s", peer, class, verdict, want)
		}
	}
	// What a rule names explicitly is open.
	for rule, peers := range map[string]map[string]Verdict{
		"groups: [private]":                     {"203.0.113.9": Allow, "2a00:9::1": Allow, "10.0.0.1": Allow, "8.8.8.8": Deny},
		"cidrs: [203.0.113.8/29]":               {"203.0.113.9": Allow, "203.0.113.16": Deny},
		"cidrs: [203.0.113.0/24]":               {"203.0.113.9": Allow, "203.0.113.1": Allow},
		"cidrs: [203.0.112.0/23]":               {"203.0.113.9": Deny, "203.0.112.9": Allow},
		`cidrs: ["2a00:9::1/128", 52.7.0.0/16]`: {"2a00:9::1": Allow, "2a00:9::2": Deny, "52.7.0.1": Allow, "52.8.0.1": Deny},
	} {
		for peer, want := range peers {
			text := "rules: [{direction: egress, verdict: allow, " + rule + ", protocols: [any], ports: [any]}]"
			if verdict, class := judge(text, peer); verdict != want {
				t.Errorf("%s: %s is %s, and the verdict %s, want %s", rule, peer, class, verdict, want)
			}
		}
	}
}

func TestCompile_ranges_on_links_that_cannot_be(t *testing.T) {
	for name, list := range map[string][]netip.Prefix{
		"bits behind": {netip.MustParsePrefix("203.0.113.1/24")},
		"none":        {{}},
		"mapped":      {netip.MustParsePrefix("::ffff:1.2.3.4/128")},
		"too many":    make([]netip.Prefix, MaxOnLink+1),
	} {
		if _, err := Compile(&Policy{}, endpoint, Environment{OnLink: list}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
