package link_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

// opening is a well-formed packet that opens a flow if the policy allows it.
type opening struct {
	dir   Direction
	peer  netip.Addr
	proto byte // of IPv4
	port  uint16
}

func (o opening) frame() []byte {
	m := tcp(4000, o.port, syn)
	switch {
	case o.proto == 17:
		m = udp(4000, o.port, 1, 2, 3)
	case o.proto == 1 && o.peer.Is6():
		m = echo(128, o.port)
	case o.proto == 1:
		m = echo(8, o.port)
	}
	if o.dir == Egress {
		return sent(o.peer, o.proto, m)
	}
	return got(o.peer, o.proto, m)
}

func (o opening) to(prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return netip.MustParsePrefix(p).Contains(o.peer) })
}

// public reports whether the peer is in the policies' group public. It knows only the addresses below.
func (o opening) public() bool { return o.to("198.51.0.0/16", "8.8.8.0/24", "2001:db8::/32") }

// craftedPolicies say twice what they let pass: as policy text, and in Go.
var craftedPolicies = []struct {
	text  string
	names func(o opening) bool
}{
	{"", func(opening) bool { return false }},
	{"default: {egress: allow}", func(o opening) bool { return o.dir == Egress && o.public() }},
	{"default: {ingress: allow}", func(o opening) bool { return o.dir == Ingress && o.public() }},
	{"rules: [{direction: egress, verdict: allow, groups: [public], protocols: [tcp], ports: [80, 443]}]",
		func(o opening) bool {
			return o.dir == Egress && o.public() && o.proto == 6 && (o.port == 80 || o.port == 443)
		}},
	{"rules: [{direction: egress, verdict: allow, cidrs: [198.51.100.0/24, \"2001:db8::/64\"], protocols: [udp], ports: [53]}]",
		func(o opening) bool {
			return o.dir == Egress && o.to("198.51.100.0/24", "2001:db8::/64") && o.proto == 17 && o.port == 53
		}},
	{"rules: [{direction: egress, verdict: allow, groups: [any], protocols: [any], ports: [any]}]",
		func(o opening) bool { return o.dir == Egress && o.public() }},
	{"rules: [{direction: egress, verdict: allow, groups: [private], protocols: [icmp, tcp], ports: [any]}]",
		func(o opening) bool { return o.dir == Egress && o.to("10.1.0.0/16", "fd12::/16") && o.proto != 17 }},
	{"rules: [{direction: egress, verdict: allow, groups: [host], protocols: [udp], ports: [any]}, {direction: ingress, verdict: allow, groups: [host], protocols: [tcp], ports: [22]}]",
		func(o opening) bool {
			host := o.peer == wire.Gateway4 || o.peer == wire.Gateway6
			return host && (o.dir == Egress && o.proto == 17 || o.dir == Ingress && o.proto == 6 && o.port == 22)
		}},
	{"rules: [{direction: ingress, verdict: allow, cidrs: [198.51.100.0/24], protocols: [tcp], ports: [20-25]}]",
		func(o opening) bool {
			return o.dir == Ingress && o.to("198.51.100.0/24") && o.proto == 6 && (o.port == 22 || o.port == 25)
		}},
	{"rules: [{direction: egress, verdict: deny, groups: [public], protocols: [tcp], ports: [25]}, {direction: egress, verdict: reject, cidrs: [8.8.8.8]}, {direction: egress, verdict: allow, groups: [public], protocols: [any], ports: [any]}]",
		func(o opening) bool {
			return o.dir == Egress && o.public() && !(o.proto == 6 && o.port == 25) && !o.to("8.8.8.8/32")
		}},
	{"rules: [{direction: egress, verdict: allow, agents: [db], protocols: [tcp], ports: [443]}, {direction: ingress, verdict: allow, agents: [db, web], protocols: [udp], ports: [any]}]",
		func(o opening) bool {
			// 10.200.3.8 has the tag db, 10.200.3.9 has web.
			db, web := o.to("10.200.3.8/32", "fd77::3:8/128"), o.to("10.200.3.9/32")
			return o.dir == Egress && db && o.proto == 6 && o.port == 443 || o.dir == Ingress && (db || web) && o.proto == 17
		}},
}

// Crafted frames for each check, and well-formed packets to and from every kind of address, meet policies of every
// kind. No crafted frame passes, whatever the policy says. Well-formed packets pass where the policy names them.
// Each has the expected reason.
func TestPrograms_crafted_frames_pass_only_where_the_policy_names_them(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	if err := e.SetTime(1e9); err != nil {
		t.Fatal(err)
	}
	for claim, p := range []Peer{
		{Address: netip.MustParseAddr("10.200.3.8"), Tags: []string{"db"}}, {Address: netip.MustParseAddr("fd77::3:8"), Tags: []string{"x", "db"}},
		{Address: netip.MustParseAddr("10.200.3.9"), Tags: []string{"web"}},
	} {
		if err := e.SetPeer(p, uint32(claim+1)); err != nil {
			t.Fatal(err)
		}
	}
	// Leave out the frames that only the other test's policy denies, and those denied for the absence of endpoints
	// that exist here.
	broken := slices.DeleteFunc(hostileFrames(), func(h hostile) bool {
		return h.reason == ReasonRule || h.reason == ReasonDefault || h.reason == ReasonSrcInterface
	})
	var openings []opening
	for _, a := range []string{
		"198.51.100.1", "198.51.7.7", "8.8.8.8", "10.1.2.3", "10.200.3.8", "10.200.3.9", "10.200.3.10", wire.Gateway4.String(), "2001:db8::1", "2001:db8:1::1",
		"fd12::1", "fd77::3:8", wire.Gateway6.String(),
	} {
		for _, proto := range []byte{1, 6, 17} {
			for _, port := range []uint16{1, 22, 25, 53, 80, 443, 8080, 65535} {
				for _, d := range []Direction{Egress, Ingress} {
					openings = append(openings, opening{dir: d, peer: netip.MustParseAddr(a), proto: proto, port: port})
				}
			}
		}
	}
	distinct := map[string]bool{}
	ran, passed, unnamed := 0, 0, 0
	run := func(d Direction, frame []byte, gso int) Ran {
		t.Helper()
		r, err := e.Run(d, frame, gso)
		if err != nil {
			t.Fatalf("%s %x: %v", d, frame, err)
		}
		if (r.Action == 0) != (r.Verdict == Allow) {
			t.Errorf("%s %x: action %d of verdict %s", d, frame, r.Action, r.Verdict)
		}
		distinct[fmt.Sprint(d, gso, string(frame))] = true
		ran++
		if r.Action == 0 {
			passed++
			if err := e.ForgetFlows(); err != nil {
				t.Fatal(err)
			}
		}
		return r
	}
	for _, p := range craftedPolicies {
		if err := e.Install(compile(t, p.text)); err != nil {
			t.Fatal(err)
		}
		for _, h := range broken {
			if r := run(h.dir, h.frame, h.gso); r.Action == 0 || r.Reason != h.reason {
				unnamed += 1 - min(1, int(r.Action))
				t.Errorf("policy %q: %s: %s by %s, want deny by %s: %x", p.text, h.name, r.Verdict, r.Reason, h.reason, h.frame)
			}
		}
		for _, o := range openings {
			r, want := run(o.dir, o.frame(), 0), p.names(o)
			absent := o.dir == Ingress && o.peer.String() == "10.200.3.10" && r.Reason == ReasonSrcInterface
			if (r.Action == 0) == want && (r.Reason == ReasonRule || r.Reason == ReasonDefault || absent) {
				continue
			}
			if r.Action == 0 {
				unnamed++
			}
			t.Errorf("policy %q: %+v: %s by %s, want it to pass: %v", p.text, o, r.Verdict, r.Reason, want)
		}
	}
	t.Logf("%d frames, %d crafted, by %d policies: %d runs, %d passed, %d that no policy names", len(distinct), len(broken), len(craftedPolicies), ran, passed, unnamed)
	if len(distinct) < 500 || len(broken) < 500 {
		t.Errorf("only %d frames, of which %d are crafted", len(distinct), len(broken))
	}
	if passed == 0 || unnamed > 0 {
		t.Errorf("%d passed, %d of which no policy names", passed, unnamed)
	}
}
