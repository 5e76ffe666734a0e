package netpolicy_test

import (
	"math/rand/v2"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

// Limits at rates that packets often exceed, and sometimes only just.
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
		p.Limits = Limits{rates(), rates()}
		if round%5 == 0 {
			n := r.Uint64N(2e6)
			p.Quota.EgressBytes = &n
		}
		s, err := Compile(p, agent, Environment{})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Install(s); err != nil {
			t.Fatal(err)
		}
		if err := e.ForgetState(); err != nil {
			t.Fatal(err)
		}
		m := refmodel.New(p, agent, Environment{})
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
