package link_test

import (
	"math/rand/v2"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
	"github.com/drowse-vm/drowse/netpolicy/refmodel/flowtest"
)

// Packets often exceed the rates of these limits, sometimes only just.
func TestPrograms_limits_agree_with_the_model(t *testing.T) {
	e := newEngine(t, MaxFlows)
	r := rand.New(rand.NewPCG(*seedFlag, 2))
	reasons := map[Reason]int{}
	now := uint64(1e15)
	for round := range 30 {
		p := &Policy{Rules: []Rule{
			{Direction: Egress, Verdict: Allow, Groups: []Group{Any}, Protocols: []Protocol{AnyProtocol}, Ports: []PortRange{AnyPort}},
			{Direction: Ingress, Verdict: Allow, Groups: []Group{Any}, Protocols: []Protocol{AnyProtocol}, Ports: []PortRange{AnyPort}},
		}}
		rates := func() (x Rates) {
			if round%4 == 0 || round%4 == 3 {
				x.Bits = &Rate{PerSecond: 1000 + r.Uint64N(5e4), Burst: 1<<20 + r.Uint64N(1<<20)}
			}
			if round%4 == 1 || round%4 == 3 {
				x.Packets = &Rate{PerSecond: 1 + r.Uint64N(200), Burst: 64 + r.Uint64N(64)}
			}
			if round%4 == 2 || round%4 == 3 {
				x.Connections = &Rate{PerSecond: 1 + r.Uint64N(20), Burst: 1 + r.Uint64N(60)}
			}
			return x
		}
		p.Limits = Limits{Egress: rates(), Ingress: rates()}
		if round%5 == 0 {
			n := r.Uint64N(2e6)
			p.Quota.EgressBytes = &n
		}
		s, err := Compile(p, endpoint, Environment{})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Install(s); err != nil {
			t.Fatal(err)
		}
		if err := e.ForgetState(); err != nil {
			t.Fatal(err)
		}
		m := flowtest.New(p, endpoint, Environment{})
		for i := range 1500 {
			if r.IntN(4) == 0 {
				now += r.Uint64N([]uint64{1e3, 1e5, 1e7, 1e9}[r.IntN(4)])
			}
			if err := e.SetTime(now); err != nil {
				t.Fatal(err)
			}
			d, build := Egress, sent
			if r.IntN(3) == 0 {
				d, build = Ingress, got
			}
			f, gso := build(peer4, 17, udp(uint16(1000+r.IntN(200)), 443, make([]byte, r.IntN(1400))...)), 0
			if r.IntN(3) == 0 {
				gso = 100 + r.IntN(1400)
				f = build(peer4, 6, tcp(uint16(1000+r.IntN(200)), 443, syn, make([]byte, r.IntN(2*gso))...))
			}
			want := m.Judge(refmodel.Frame{Direction: d, Bytes: f, SegmentSize: gso}, int64(now))
			ran, err := e.Run(d, f, gso)
			if err != nil {
				t.Fatal(err)
			}
			if ran.Verdict != want.Verdict || ran.Reason != want.Reason {
				t.Fatalf("round %d, packet %d, %+v: %s by %s, the model says %s by %s", round, i, p.Limits, ran.Verdict, ran.Reason, want.Verdict, want.Reason)
			}
			reasons[want.Reason]++
		}
	}
	t.Log(reasons)
	for _, reason := range []Reason{ReasonFlow, ReasonRule, ReasonBitRate, ReasonPacketRate, ReasonConnRate, ReasonQuota} {
		if reasons[reason] < 50 {
			t.Errorf("%s came up %d times: the test does not test it", reason, reasons[reason])
		}
	}
}

// A guest whose policy has no limits sends the first packets of 100,000 connections, and then as many packets of one as
// it can.
func TestAttack_flood_without_limits_of_the_policy_is_bounded(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	// The guest's address is not translated, so that one frame can be sent again and again.
	s, err := Compile(&Policy{Default: Defaults{Egress: Allow}}, Identity{Address4: wire.Guest4}, Environment{})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Install(s); err != nil {
		t.Fatal(err)
	}
	now := uint64(1e15)
	flood := func(connections int) (opened int) {
		t.Helper()
		if err := e.SetTime(now); err != nil {
			t.Fatal(err)
		}
		for i := range connections {
			r, err := e.Run(Egress, sent(peer4, 17, udp(uint16(1024+i%60000), uint16(1024+i/60000))), 0)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case r.Verdict == Allow && r.Reason == ReasonDefault:
				opened++
			case r.Verdict != Deny || r.Reason != ReasonConnRate:
				t.Fatalf("connection %d: %s by %s", i, r.Verdict, r.Reason)
			}
		}
		return opened
	}
	if n := flood(100_000); n != int(DefaultConnections.Burst) {
		t.Errorf("%d connections were opened at once, want %d", n, DefaultConnections.Burst)
	}
	// The connections of a package installation in a minute: 50 at once, each with two name lookups, and 10 more
	// each second.
	if err := e.ForgetState(); err != nil {
		t.Fatal(err)
	}
	for second := range 60 {
		n := 30
		if second == 0 {
			n = 150
		}
		now += 1e9
		if got := flood(n); got != n {
			t.Errorf("second %d: %d of %d connections were opened", second, got, n)
		}
		if err := e.ForgetFlows(); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.ForgetState(); err != nil {
		t.Fatal(err)
	}
	now += 1e9
	if n := flood(1); n != 1 {
		t.Fatal("the flow was not opened")
	}
	const packets = 1_000_000
	before := passed(t, e)
	if _, _, err := benchRun(e.Program(Egress), sent(peer4, 17, udp(1024, 1024)), packets); err != nil {
		t.Fatal(err)
	}
	if n := passed(t, e) - before; n != DefaultPackets.Burst-1 {
		t.Errorf("%d of %d packets have passed at once, want %d", n, packets, DefaultPackets.Burst-1)
	}
}

// passed returns how many packets have passed.
func passed(t *testing.T, e *Engine) (n uint64) {
	t.Helper()
	all, err := e.Counters()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		if c.Verdict == Allow {
			n += c.Packets
		}
	}
	return n
}
