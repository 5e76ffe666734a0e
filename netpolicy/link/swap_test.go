package link_test

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

// During swaps, a packet that both policies allow always passes. A packet that only a mixture of them would allow
// never does.
func TestInstall_under_load_judges_each_packet_by_one_policy(t *testing.T) {
	e := newEngine(t, MaxFlows)
	policy := func(peer, port string) *Spec {
		return compile(t, `
rules:
  - {direction: egress, verdict: allow, cidrs: [`+peer+`], protocols: [udp], ports: [`+port+`]}
  - {direction: egress, verdict: allow, cidrs: [9.9.9.9], protocols: [udp], ports: [53]}
limits: {egress: {packets: {per_second: 1000000000, burst: 1000000000000}, connections: {per_second: 1000000, burst: 1000000000000}}}
`)
	}
	specs := []*Spec{policy("1.1.1.1", "1111"), policy("2.2.2.2", "2222")}
	if err := e.Install(specs[0]); err != nil {
		t.Fatal(err)
	}
	both := sent(netip.MustParseAddr("9.9.9.9"), 17, udp(4000, 53))
	neither := [][]byte{sent(netip.MustParseAddr("1.1.1.1"), 17, udp(4000, 2222)), sent(netip.MustParseAddr("2.2.2.2"), 17, udp(4000, 1111))}
	first := sent(netip.MustParseAddr("1.1.1.1"), 17, udp(4000, 1111))

	stop := make(chan struct{})
	var wg sync.WaitGroup
	seen := map[Verdict]int{}
	for w := range 2 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				r, err := e.Run(Egress, both, 0)
				if err != nil || r.Verdict != Allow {
					t.Errorf("what both policies allow: %s by %s, %v", r.Verdict, r.Reason, err)
					return
				}
				r, err = e.Run(Egress, neither[i%2], 0)
				if err != nil || r.Verdict != Deny {
					t.Errorf("what neither policy allows: %s by %s, %v", r.Verdict, r.Reason, err)
					return
				}
				r, err = e.Run(Egress, first, 0)
				if err != nil {
					t.Error(err)
					return
				}
				if w == 0 {
					seen[r.Verdict]++
				}
			}
		})
	}
	for i := range 2000 {
		if err := e.Install(specs[(i+1)%2]); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	wg.Wait()
	if seen[Allow] == 0 || seen[Deny] == 0 {
		t.Errorf("the policies were not both seen at work: %v", seen)
	}
	t.Logf("%v", seen)
}

// judged returns how many packets rules have allowed and denied.
func judged(t *testing.T, e *Engine) map[Verdict]uint64 {
	t.Helper()
	counters, err := e.Counters()
	if err != nil {
		t.Fatal(err)
	}
	n := map[Verdict]uint64{}
	for _, c := range counters {
		if c.Reason == ReasonRule {
			n[c.Verdict] += c.Packets
		}
	}
	return n
}

// oppositePolicies returns policies with a rule that denies or allows the same packet. The packet opens no flow.
func oppositePolicies(t *testing.T) (specs [2]*Spec, want [2]Verdict, frame []byte) {
	t.Helper()
	for i, v := range []Verdict{Deny, Allow} {
		specs[i] = compile(t, `rules: [{direction: egress, verdict: `+string(v)+`, groups: [public], protocols: [tcp], ports: [any]}]
limits: {egress: {packets: {per_second: 1000000000, burst: 1000000000000}, connections: {per_second: 1000000, burst: 1000000000000}}}`)
		want[i] = v
	}
	return specs, want, sent(peer4, 6, tcp(4000, 443, syn))
}

// A packet that has found its table uses it for some time. When Install returns, the old table judges no packet any
// more.
func TestInstall_waits_for_packets_that_have_found_the_old_table(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	specs, want, frame := oppositePolicies(t)
	if err := e.Install(specs[0]); err != nil {
		t.Fatal(err)
	}
	slow, err := e.PausedProgram(10000)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	var stop atomic.Bool
	var wg sync.WaitGroup
	var failed atomic.Pointer[error]
	for range 2 {
		wg.Go(func() {
			for !stop.Load() {
				if _, err := slow.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256)}); err != nil {
					failed.Store(&err)
					return
				}
			}
		})
	}
	defer func() {
		stop.Store(true)
		wg.Wait()
	}()
	late := 0
	for i := range 200 {
		now, before := want[(i+1)%2], want[i%2]
		if err := e.Install(specs[(i+1)%2]); err != nil {
			t.Fatal(err)
		}
		first := judged(t, e)
		for n := first; n[now] < first[now]+4; n = judged(t, e) {
			if err := failed.Load(); err != nil {
				t.Fatal(*err)
			}
			if n[before] != first[before] {
				late++
				break
			}
		}
	}
	if late > 0 {
		t.Errorf("after %d of 200 swaps packets were judged by the old policy", late)
	}
}

// A packet sent after Install has returned meets the new policy. A sender that never stops does not meet an older
// policy again.
func TestInstall_first_packet_after_it_is_judged_by_the_new_policy(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	specs, want, frame := oppositePolicies(t)
	if err := e.Install(specs[0]); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var begun, ended atomic.Int64 // swaps
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			low := ended.Load()
			r, err := e.Run(Egress, frame, 0)
			high := begun.Load()
			if err != nil || low == high && r.Verdict != want[low%2] {
				t.Errorf("beside swap %d: %s by %s, %v", low, r.Verdict, r.Reason, err)
				return
			}
		}
	})
	const swaps = 5000
	for i := range int64(swaps) {
		begun.Store(i + 1)
		if err := e.Install(specs[(i+1)%2]); err != nil {
			t.Error(err)
			break
		}
		ended.Store(i + 1)
		if r, err := e.Run(Egress, frame, 0); err != nil || r.Verdict != want[(i+1)%2] {
			t.Errorf("after swap %d: %s by %s, %v", i, r.Verdict, r.Reason, err)
			break
		}
	}
	stop.Store(true)
	wg.Wait()
	if b, n, err := e.Runs(); err != nil || b != n || b < swaps {
		t.Errorf("%d runs have begun and %d have ended: %v", b, n, err)
	}
}

// Install replaces tables that are too small, or much too large, and reuses others.
func TestInstall_policies_of_many_sizes(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	frame := sent(netip.MustParseAddr("20.1.77.9"), 6, tcp(4000, 443, syn))
	for i, n := range []int{1, 2, 1000, 1, 3, 900, 1000, 10, 1, 1, 1000, 1, 1000, 1, 1000, 1, 1000} {
		p := manyRules(n)
		want := Allow
		if i%2 == 1 {
			p.Rules[n-1].Verdict, want = Deny, Deny
		}
		s, err := Compile(p, endpoint, Environment{})
		if err != nil {
			t.Fatal(err)
		}
		before := e.Room()
		if err := e.Install(s); err != nil {
			t.Fatal(err)
		}
		if r, err := e.Run(Egress, frame, 0); err != nil || r.Verdict != want || r.Rule != n-1 {
			t.Errorf("%d rules: %s by %s, rule %d: %v", n, r.Verdict, r.Reason, r.Rule, err)
		}
		after := e.Room()
		used := after[i%2]
		if used < s.Rows() || used > max(64, 4*s.Rows()+3) {
			t.Errorf("%d rules of %d rows are in a table of %d", n, s.Rows(), used)
		}
		if after[1-i%2] != before[1-i%2] {
			t.Errorf("%d rules: the table in force had %d rows, and has %d", n, before[1-i%2], after[1-i%2])
		}
	}
}

// The process ends during a swap. Its unfinished table has no effect.
func TestLink_whose_process_ended_in_a_swap_keeps_its_policy(t *testing.T) {
	for swaps := range 3 {
		t.Run(fmt.Sprintf("%d swaps before", swaps), func(t *testing.T) {
			ownNamespace(t)
			tap := newTAP(t, "tap0")
			next := compile(t, `
dns: {}
rules:
  - {direction: egress, verdict: allow, names: [a.example.com], protocols: [udp], ports: [1000]}
  - {direction: egress, verdict: allow, names: [other.example.com], protocols: [udp], ports: [1001]}
`)
			l, cfg := attach(t, "tap0", "")
			for range swaps {
				if err := l.Swap(compile(t, "")); err != nil {
					t.Fatal(err)
				}
			}
			if err := l.Pin("a.example.com", peer4, time.Hour); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(l.BeginSwap(next), l.Close()); err != nil {
				t.Fatal(err)
			}
			for _, port := range []uint16{1000, 1001} {
				tap.send(sent(peer4, 17, udp(4000, port)))
			}
			if d, r := countOn(t, "tap0", ReasonDefault), countOn(t, "tap0", ReasonRule); d != 2 || r != 0 {
				t.Errorf("%d packets were denied by default and %d judged by a rule, want 2 and 0", d, r)
			}
			if err := Remove(cfg); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestEngine_clone_has_no_flows_of_its_origin(t *testing.T) {
	s := compile(t, `rules: [{direction: egress, verdict: allow, groups: [public], protocols: [udp], ports: [53]}]`)
	origin, clone := newEngine(t, DefaultFlows), newEngine(t, DefaultFlows)
	for _, e := range []*Engine{origin, clone} {
		if err := e.Install(s); err != nil {
			t.Fatal(err)
		}
	}
	question, answer := sent(peer4, 17, udp(4000, 53)), got(peer4, 17, udp(53, 4000))
	if r, err := origin.Run(Egress, question, 0); err != nil || r.Verdict != Allow {
		t.Fatalf("%s by %s, %v", r.Verdict, r.Reason, err)
	}
	if r, err := origin.Run(Ingress, answer, 0); err != nil || r.Reason != ReasonFlow {
		t.Errorf("the origin's answer: %s by %s, %v", r.Verdict, r.Reason, err)
	}
	if r, err := clone.Run(Ingress, answer, 0); err != nil || r.Verdict != Deny || r.Reason != ReasonDefault {
		t.Errorf("the clone's answer: %s by %s, %v", r.Verdict, r.Reason, err)
	}
}
