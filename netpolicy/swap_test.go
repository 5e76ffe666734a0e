package netpolicy_test

import (
	"net/netip"
	"sync"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
)

// While policies are swapped, a packet that both allow always passes, and one that only
// a mixture of them would allow never does.
func TestInstall_under_load_judges_each_packet_by_one_policy(t *testing.T) {
	e := newEngine(t, MaxFlows)
	policy := func(peer, port string) *Spec {
		return compile(t, `
rules:
  - {direction: egress, verdict: allow, cidrs: [`+peer+`], protocols: [udp], ports: [`+port+`]}
  - {direction: egress, verdict: allow, cidrs: [9.9.9.9], protocols: [udp], ports: [53]}
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
	for i := range 100 {
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
