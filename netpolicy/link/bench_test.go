package link_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

// manyRules returns a policy of n rules of which only the last one allows.
func manyRules(n int) *Policy {
	p := &Policy{Limits: Limits{Egress: Rates{Packets: &Rate{PerSecond: 1e9}, Connections: &Rate{PerSecond: 1e6, Burst: 1e12}}}}
	for i := range n - 1 {
		p.Rules = append(p.Rules, Rule{
			Direction: Egress, Verdict: Deny, CIDRs: []CIDR{{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 8), byte(i), 0}), 24)}},
			Protocols: []Protocol{TCP, UDP}, Ports: []PortRange{{First: uint16(1 + i), Last: uint16(1 + i)}, {First: uint16(2000 + 3*i), Last: uint16(2001 + 3*i)}},
		})
	}
	p.Rules = append(p.Rules, Rule{Direction: Egress, Verdict: Allow, Groups: []Group{Public}, Protocols: []Protocol{AnyProtocol}, Ports: []PortRange{AnyPort}})
	return p
}

// BenchmarkPacket measures one packet through the program, by the kernel's own clock. About 40 ns of it are the cost
// of BPF_PROG_RUN. A loop of BPF_PROG_RUN reuses one skb, which an allowed IPv4 packet does not leave unchanged. So
// a packet that ends up denied measures the rules, and one whose address stays measures the flow.
func BenchmarkPacket(b *testing.B) {
	needRoot(b)
	e, err := NewEngine(DefaultFlows, false) // with the kernel's clock
	if err != nil {
		b.Fatal(err)
	}
	defer e.Close()
	run := func(name string, id Identity, p *Policy, f []byte, want Verdict) {
		b.Run(name, func(b *testing.B) {
			s, err := Compile(p, id, Environment{})
			if err != nil {
				b.Fatal(err)
			}
			if err := e.Install(s); err != nil {
				b.Fatal(err)
			}
			if err := e.ForgetState(); err != nil {
				b.Fatal(err)
			}
			r, err := e.Run(Egress, f, 0)
			if err != nil || (r.Action == 0) != (want == Allow) {
				b.Fatalf("action %d, %v, want %s", r.Action, err, want)
			}
			const repeat = 100000
			var total float64
			n := 0
			for b.Loop() {
				_, d, err := benchRun(e.Program(Egress), f, repeat)
				if err != nil {
					b.Fatal(err)
				}
				total += float64(d.Nanoseconds())
				n++
			}
			b.ReportMetric(total/float64(n), "ns/packet")
		})
	}
	same := Identity{Address4: wire.Guest4}
	for _, n := range []int{1, 10, 100, 1000} {
		p := manyRules(n)
		p.Rules[n-1].Verdict = Deny
		run(fmt.Sprintf("rules=%d/denied by the last", n), endpoint, p, sent(netip.MustParseAddr("20.1.77.9"), 6, tcp(4000, 443, syn)), Deny)
		run(fmt.Sprintf("rules=%d/flow", n), same, manyRules(n), sent(netip.MustParseAddr("20.1.77.9"), 17, udp(4000, 443, make([]byte, 1000)...)), Allow)
		run(fmt.Sprintf("rules=%d/opens a flow", n), same, manyRules(n), sent(netip.MustParseAddr("20.1.77.9"), 6, tcp(4000, 443, syn)), Allow)
	}
}

func benchRun(p *ebpf.Program, f []byte, repeat int) (uint32, time.Duration, error) {
	return p.Benchmark(f, repeat, nil)
}

// BenchmarkSwap measures a swap, with the wait until the old policy judges no packet any more. BenchmarkTable
// measures what comes before the new policy is in force.
func BenchmarkSwap(b *testing.B) {
	e := newEngine(b, DefaultFlows)
	for _, n := range []int{10, 1000} {
		s, err := Compile(manyRules(n), endpoint, Environment{})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("rules=%d", n), func(b *testing.B) {
			for b.Loop() {
				if err := e.Install(s); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkTable measures the filling of a table's map. A swap then replaces one pointer.
func BenchmarkTable(b *testing.B) {
	e := newEngine(b, DefaultFlows)
	for _, n := range []int{10, 1000} {
		s, err := Compile(manyRules(n), endpoint, Environment{})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("rules=%d", n), func(b *testing.B) {
			for b.Loop() {
				if err := e.Table(s); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkCompile(b *testing.B) {
	for _, n := range []int{10, 1000} {
		p := manyRules(n)
		b.Run(fmt.Sprintf("rules=%d", n), func(b *testing.B) {
			for b.Loop() {
				if _, err := Compile(p, endpoint, Environment{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkLoad measures the cost of a new endpoint.
func BenchmarkLoad(b *testing.B) {
	needRoot(b)
	for b.Loop() {
		e, err := NewEngine(DefaultFlows, false)
		if err != nil {
			b.Fatal(err)
		}
		e.Close()
	}
}

// BenchmarkFlowLog_look measures a look at a full flow table. Looks take at most one in flowShare of the time.
func BenchmarkFlowLog_look(b *testing.B) {
	needRoot(b)
	for _, n := range []int{DefaultFlows, MaxFlows} {
		b.Run(fmt.Sprintf("flows=%d", n), func(b *testing.B) {
			e, err := NewEngine(n, true)
			if err != nil {
				b.Fatal(err)
			}
			defer e.Close()
			s, err := Compile(&Policy{Default: Defaults{Egress: Allow}, Limits: Limits{Egress: Rates{Connections: &Rate{PerSecond: 1e6, Burst: 1e12}}}}, endpoint, Environment{})
			if err != nil {
				b.Fatal(err)
			}
			if err := e.Install(s); err != nil {
				b.Fatal(err)
			}
			log, err := e.FlowLog()
			if err != nil {
				b.Fatal(err)
			}
			frame := sent(peer4, 17, udp(1, 9))
			for i := range n {
				be.PutUint16(frame[34:], uint16(i))
				if _, err := e.Run(Egress, frame, 0); err != nil {
					b.Fatal(err)
				}
			}
			for b.Loop() {
				if err := log.Look(); err != nil {
					b.Fatal(err)
				}
			}
			flows, _, _ := log.Size()
			b.ReportMetric(float64(flows), "flows")
		})
	}
}
