package link_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

const flowPolicy = `
dns: {}
rules:
  - {name: web, direction: egress, verdict: allow, groups: [public], protocols: [tcp], ports: [443]}
  - {name: named, direction: egress, verdict: allow, names: [a.example.com, b.example.com], protocols: [udp], ports: [5000]}
  - {name: pings, direction: egress, verdict: allow, groups: [public], protocols: [icmp]}
  - {name: in, direction: ingress, verdict: allow, groups: [public], protocols: [tcp, udp], ports: [80]}
`

// flowBench is an engine with a log, on a clock that the test sets.
type flowBench struct {
	t   *testing.T
	e   *Engine
	log *flow.Log
	now uint64
}

func newFlowBench(t *testing.T, flows int, policy string) *flowBench {
	t.Helper()
	b := &flowBench{t: t, e: newEngine(t, flows), now: 1e15}
	b.wait(0)
	b.swap(policy)
	var err error
	if b.log, err = b.e.FlowLog(); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *flowBench) swap(policy string) {
	b.t.Helper()
	if err := b.e.Install(compile(b.t, policy)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *flowBench) wait(d time.Duration) {
	b.t.Helper()
	b.now += uint64(d)
	if err := b.e.SetTime(b.now); err != nil {
		b.t.Fatal(err)
	}
}

// run judges a frame, and then moves the clock by 10 ms.
func (b *flowBench) run(d Direction, frame []byte, want Verdict) {
	b.t.Helper()
	r, err := b.e.Run(d, frame, 0)
	if err != nil || r.Verdict != want {
		b.t.Fatalf("%s by %s, %v, want %s", r.Verdict, r.Reason, err, want)
	}
	b.wait(10 * time.Millisecond)
}

func (b *flowBench) look() {
	b.t.Helper()
	if err := b.log.Look(); err != nil {
		b.t.Fatal(err)
	}
}

// records returns the kept records and the open flows.
func records(t *testing.T, g *flow.Log) (flows []FlowRecord, lost FlowsLost) {
	t.Helper()
	err := g.Records(t.Context(), false, func(recs []FlowRecord) error {
		for _, r := range recs {
			if r.FlowsLost != nil {
				lost.Flows += r.Flows
				lost.Denied += r.FlowsLost.Denied
				lost.Records += r.FlowsLost.Records
				continue
			}
			flows = append(flows, r)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return flows, lost
}

// text returns a record without its absolute times.
func text(r FlowRecord) string {
	return fmt.Sprintf("%s %s %s %s:%d %s:%d %q %s %s %q %s %v %v %v", r.End, r.Direction, r.Protocol, r.Guest, r.GuestPort, r.Peer, r.PeerPort,
		r.Name, r.Verdict, r.Reason, r.Rule, r.State, r.Egress, r.Ingress, r.Last.Sub(r.First))
}

func (b *flowBench) expect(what string, want ...string) {
	b.t.Helper()
	flows, lost := records(b.t, b.log)
	var got []string
	for _, r := range flows {
		got = append(got, text(r))
	}
	if !slices.Equal(got, want) || lost != (FlowsLost{}) {
		b.t.Fatalf("%s: lost %+v, got\n%s\nwant\n%s", what, lost, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestFlowLog_tcp_connection_gives_one_record_with_all_packets(t *testing.T) {
	b := newFlowBench(t, DefaultFlows, flowPolicy)
	out := func(flags byte, payload ...byte) []byte { return sent(peer4, 6, tcp(4000, 443, flags, payload...)) }
	in := func(flags byte, payload ...byte) []byte { return got(peer4, 6, tcp(443, 4000, flags, payload...)) }
	const flow = ` egress tcp 10.200.3.7:4000 198.51.100.1:443 "" allow rule "web" `
	b.run(Egress, out(syn), Allow)
	b.look()
	b.run(Egress, out(syn), Allow) // sent again
	b.expect("after two SYNs", "open"+flow+"opening {2 108} {0 0} 10ms")
	b.run(Ingress, in(syn|ack), Allow)
	b.run(Egress, out(ack, 1, 2, 3), Allow)
	b.expect("with data", "open"+flow+"established {3 165} {1 54} 30ms")
	b.run(Egress, out(fin|ack), Allow)
	b.run(Ingress, in(fin|ack), Allow)
	b.expect("after both FINs", "open"+flow+"closing {4 219} {2 108} 50ms")
	b.wait(32 * time.Second)
	b.expect("30 s later", "closed"+flow+"closing {4 219} {2 108} 50ms")
	b.expect("once more", "closed"+flow+"closing {4 219} {2 108} 50ms")
}

func TestFlowLog_directions_protocols_and_defaults(t *testing.T) {
	b := newFlowBench(t, DefaultFlows, flowPolicy+"default: {egress: allow}\n")
	b.run(Egress, sent(peer4, 1, echo(8, 77)), Allow)
	b.run(Ingress, got(peer4, 1, echo(0, 77)), Allow)
	b.run(Ingress, got(peer4, 17, udp(9000, 80, 1)), Allow)
	b.run(Egress, sent(peer4, 17, udp(80, 9000, 1, 2)), Allow)
	b.run(Egress, sent(peer6, 17, udp(4001, 9, 1)), Allow)
	b.run(Egress, sent(wire.Gateway4, 17, udp(4002, 53, 1)), Allow)
	if r, err := b.e.Run(Egress, sent(peer6, 6, tcp(4003, 443, syn)), 0); err != nil || r.Verdict != Allow {
		t.Fatal(r, err)
	}
	if r, err := b.e.Run(Ingress, got(peer6, 6, tcp(443, 4003, syn|ack, make([]byte, 1000)...)), 300); err != nil || r.Verdict != Allow {
		t.Fatal(r, err)
	}
	b.expect("all",
		`open egress icmp 10.200.3.7:77 198.51.100.1:0 "" allow rule "pings" echo {1 42} {1 42} 10ms`,
		`open ingress udp 10.200.3.7:80 198.51.100.1:9000 "" allow rule "in" answered {1 44} {1 43} 10ms`,
		`open egress udp fd77::3:7:4001 2001:db8::1:9 "" allow default "" one-way {1 63} {0 0} 0s`,
		`open egress udp 10.200.3.7:4002 172.31.255.1:53 "" allow rule "(resolver)" one-way {1 43} {0 0} 0s`,
		// Each of four segments has its own headers.
		`open egress tcp fd77::3:7:4003 2001:db8::1:443 "" allow rule "web" established {1 74} {4 1296} 0s`,
	)
}

func TestFlowLog_name_is_the_last_one_asked_for_before(t *testing.T) {
	b := newFlowBench(t, DefaultFlows, flowPolicy)
	pin := func(name string) {
		t.Helper()
		if err := b.e.Pin(name, peer4, b.now+uint64(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	pin("a.example.com")
	b.run(Egress, sent(peer4, 17, udp(4000, 5000, 1)), Allow)
	b.run(Ingress, got(peer4, 17, udp(4000, 80, 1)), Allow)
	b.look()
	pin("b.example.com")
	b.run(Egress, sent(peer4, 17, udp(4001, 5000, 1)), Allow)
	b.expect("both",
		`open egress udp 10.200.3.7:4000 198.51.100.1:5000 "a.example.com" allow rule "named" one-way {1 43} {0 0} 0s`,
		`open ingress udp 10.200.3.7:80 198.51.100.1:4000 "" allow rule "in" one-way {0 0} {1 43} 0s`,
		`open egress udp 10.200.3.7:4001 198.51.100.1:5000 "b.example.com" allow rule "named" one-way {1 43} {0 0} 0s`,
	)
}

func TestFlowLog_swap_cuts_or_renames(t *testing.T) {
	b := newFlowBench(t, DefaultFlows, flowPolicy)
	web, in := sent(peer4, 6, tcp(4000, 443, syn)), got(peer4, 17, udp(9000, 80, 1))
	b.run(Egress, web, Allow)
	b.run(Ingress, in, Allow)
	b.swap(`rules: [{name: other, direction: ingress, verdict: allow, groups: [any], protocols: [udp], ports: [80]}]`)
	b.run(Egress, sent(peer4, 6, tcp(4000, 443, ack)), Deny)
	b.run(Ingress, in, Allow)
	b.expect("after the swap",
		`cut egress tcp 10.200.3.7:4000 198.51.100.1:443 "" allow rule "web" opening {1 54} {0 0} 0s`,
		`open ingress udp 10.200.3.7:80 198.51.100.1:9000 "" allow rule "other" one-way {0 0} {2 86} 20ms`,
	)
	// A cut flow is unknown to the programs, and can be opened anew.
	b.swap(flowPolicy)
	b.run(Egress, sent(peer4, 6, tcp(4000, 443, ack)), Deny)
	b.run(Egress, web, Allow)
	b.expect("after a swap back",
		`cut egress tcp 10.200.3.7:4000 198.51.100.1:443 "" allow rule "web" opening {1 54} {0 0} 0s`,
		`open ingress udp 10.200.3.7:80 198.51.100.1:9000 "" allow rule "other" one-way {0 0} {2 86} 20ms`,
		`open egress tcp 10.200.3.7:4000 198.51.100.1:443 "" allow rule "web" opening {1 54} {0 0} 0s`,
	)
}

func TestFlowLog_ends(t *testing.T) {
	b := newFlowBench(t, DefaultFlows, flowPolicy)
	connect := func(port uint16) {
		t.Helper()
		b.run(Egress, sent(peer4, 6, tcp(port, 443, syn)), Allow)
		b.run(Ingress, got(peer4, 6, tcp(443, port, syn|ack)), Allow)
	}
	ping := sent(peer4, 1, echo(8, 7))
	b.run(Egress, ping, Allow)
	b.wait(31500 * time.Millisecond)
	b.run(Egress, ping, Allow) // another flow
	connect(4000)
	b.look()
	connect(4000) // the guest begins anew
	connect(4001)
	b.run(Ingress, got(peer4, 6, tcp(443, 4001, rst|ack)), Allow)
	b.look()
	connect(4001) // within 30 s
	connect(4002)
	b.run(Egress, sent(peer4, 6, tcp(4002, 443, rst|ack)), Allow)
	if err := end(b.log); err != nil {
		t.Fatal(err)
	}
	const web = ` 198.51.100.1:443 "" allow rule "web" `
	want := []string{
		`replaced egress tcp 10.200.3.7:4000` + web + `established {1 54} {1 54} 10ms`,
		`closed egress tcp 10.200.3.7:4001` + web + `closing {1 54} {2 108} 20ms`,
		`stopped egress icmp 10.200.3.7:7 198.51.100.1:0 "" allow rule "pings" echo {1 42} {0 0} 0s`,
		`stopped egress tcp 10.200.3.7:4000` + web + `established {1 54} {1 54} 10ms`,
		`stopped egress tcp 10.200.3.7:4001` + web + `established {1 54} {1 54} 10ms`,
		`closed egress tcp 10.200.3.7:4002` + web + `closing {2 108} {1 54} 20ms`,
	}
	// The first echo flow had ended and was replaced before a look.
	flows, lost := records(t, b.log)
	var is []string
	for _, r := range flows {
		is = append(is, text(r))
	}
	if !slices.Equal(is, want) || lost != (FlowsLost{Flows: 1}) {
		t.Errorf("lost %+v, got\n%s\nwant\n%s", lost, strings.Join(is, "\n"), strings.Join(want, "\n"))
	}
}

// All flow records together add up to the counters.
func TestFlowLog_counts_add_up_to_those_of_the_programs(t *testing.T) {
	b := newFlowBench(t, DefaultFlows, flowPolicy)
	r := rand.New(rand.NewPCG(*seedFlag, 5))
	for range 3000 {
		b.wait(time.Duration(r.Int64N(int64(3 * time.Second))))
		mine, other := uint16(4000+r.IntN(6)), uint16(443)
		d, flags, payload := Egress, []byte{syn, syn, syn | ack, ack, ack, rst | ack, fin | ack}[r.IntN(7)], make([]byte, r.IntN(500))
		frame := sent(peer4, 6, tcp(mine, other, flags, payload...))
		if r.IntN(2) == 0 {
			d, frame = Ingress, got(peer4, 6, tcp(other, mine, flags, payload...))
		}
		if r.IntN(4) == 0 {
			frame = sent(peer4, 1, echo(8, mine, payload...))
			if d == Ingress {
				frame = got(peer4, 1, echo(0, mine, payload...))
			}
		}
		if _, err := b.e.Run(d, frame, 0); err != nil {
			t.Fatal(err)
		}
		b.look()
	}
	flows, lost := records(t, b.log)
	is := map[Direction]Count{}
	ends := map[FlowEnd]int{}
	for _, f := range flows {
		ends[f.End]++
		for d, c := range map[Direction]Count{Egress: f.Egress, Ingress: f.Ingress} {
			is[d] = Count{Packets: is[d].Packets + c.Packets, Bytes: is[d].Bytes + c.Bytes}
		}
	}
	all, err := b.e.Counters()
	if err != nil {
		t.Fatal(err)
	}
	want := map[Direction]Count{}
	for _, c := range all {
		if c.Verdict == Allow {
			want[c.Direction] = Count{Packets: want[c.Direction].Packets + c.Packets, Bytes: want[c.Direction].Bytes + c.Bytes}
		}
	}
	if is[Egress] != want[Egress] || is[Ingress] != want[Ingress] || lost != (FlowsLost{}) || want[Egress].Packets < 500 {
		t.Errorf("flows have %v, counters %v; lost %+v, %v", is, want, lost, ends)
	}
	for _, end := range []FlowEnd{FlowClosed, FlowExpired, FlowReplaced} {
		if ends[end] == 0 {
			t.Errorf("no flow has ended as %s: %v", end, ends)
		}
	}
}

// A guest opens many times more flows than the table has room for.
func TestFlowLog_flood_of_flows_is_counted_to_the_last(t *testing.T) {
	const flows = 20000
	b := newFlowBench(t, MinFlows, "{default: {egress: allow}, limits: {egress: {connections: {per_second: 100000, burst: 100000}}}}")
	frame := sent(peer4, 17, udp(1, 9))
	for i := range flows {
		be.PutUint16(frame[34:], uint16(i+1000))
		if _, err := b.e.Run(Egress, frame, 0); err != nil {
			t.Fatal(err)
		}
		if i%3000 == 100 {
			b.look()
			if n, _, kept := b.log.Size(); n > MinFlows || kept > flow.MaxRecords+flow.MaxDeniedRecords {
				t.Fatalf("%d entries and %d records for a table of %d", n, kept, MinFlows)
			}
		}
	}
	if err := end(b.log); err != nil {
		t.Fatal(err)
	}
	recs, lost := records(t, b.log)
	ends := map[FlowEnd]int{}
	for _, r := range recs {
		ends[r.End]++
	}
	if uint64(len(recs))+lost.Flows != flows || ends[FlowEvicted] == 0 || ends[FlowStopped] == 0 {
		t.Errorf("%d records and %+v of %d flows: %v", len(recs), lost, flows, ends)
	}
}

// Events of a flood come from as many different addresses.
func TestFlowLog_flood_of_denials_is_bounded_and_counted(t *testing.T) {
	b := newFlowBench(t, MinFlows, "")
	const events, suppressed = 100000, 7
	for i := range events {
		b.log.Denied(Event{
			Uptime: time.Duration(b.now), Direction: Egress, Verdict: Deny, Reason: ReasonDefault, Rule: -1, Protocol: 6, Bytes: 54, Suppressed: suppressed, PeerPort: 22, GuestPort: uint16(i),
			Peer: netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)}), Generation: b.e.Generation(),
		})
	}
	if _, n, _ := b.log.Size(); n != flow.MaxDeniedFlows {
		t.Errorf("%d denied flows are told apart, want %d", n, flow.MaxDeniedFlows)
	}
	if err := end(b.log); err != nil {
		t.Fatal(err)
	}
	flows, lost := records(t, b.log)
	told := uint64(0)
	for _, f := range flows {
		told += f.Egress.Packets
	}
	if told+lost.Denied != events*(suppressed+1) || len(flows) != flow.MaxDeniedFlows {
		t.Errorf("%d flows with %d frames, and %+v, of %d frames", len(flows), told, lost, events*(suppressed+1))
	}
	b.log.Denied(Event{Peer: peer4, Verdict: Deny})
	if _, n, _ := b.log.Size(); n != 0 {
		t.Error("a log that has ended takes events")
	}
}

func TestFlowLog_denied_packets_of_one_flow_are_one_record(t *testing.T) {
	b := newFlowBench(t, MinFlows, `rules: [{name: no, direction: egress, verdict: reject, groups: [any], protocols: [tcp], ports: [22]}]`)
	e := Event{Uptime: time.Duration(b.now), Direction: Egress, Verdict: Reject, Reason: ReasonRule, Protocol: 6, Bytes: 54, PeerPort: 22, GuestPort: 4000, Peer: peer4, Generation: b.e.Generation()}
	for range 3 {
		b.log.Denied(e)
		e.Uptime += time.Second
	}
	e.Direction, e.Reason, e.Verdict, e.Rule, e.PeerPort = Ingress, ReasonNoFlow, Deny, -1, 443
	b.log.Denied(e)
	b.log.Denied(Event{Direction: Egress, Verdict: Deny, Reason: ReasonEtherType, Peer: netip.IPv6Unspecified()}) // none
	b.wait(4 * time.Second)
	const out, in = ` egress tcp 10.200.3.7:4000 198.51.100.1:22 "" reject rule "no"  {3 162} {0 0} 2s`,
		` ingress tcp 10.200.3.7:4000 198.51.100.1:443 "" deny no-flow ""  {0 0} {1 54} 0s`
	b.expect("at first", "open"+out, "open"+in)
	b.wait(8 * time.Second)
	b.expect("after 10 s", "denied"+out, "open"+in)
	// A record is written every minute though the flow does not end.
	e.Direction, e.GuestPort = Egress, 4001
	for range 14 {
		e.Uptime = time.Duration(b.now)
		b.log.Denied(e)
		b.wait(5 * time.Second)
		b.look()
	}
	const on = ` egress tcp 10.200.3.7:4001 198.51.100.1:443 "" deny no-flow ""  `
	b.expect("a minute later", "denied"+out, "denied"+in, "denied"+on+"{12 648} {0 0} 55s", "open"+on+"{2 108} {0 0} 5s")
}

// A reader learns how many records it has missed. Records returns when the log ends.
func TestFlowLog_reader_who_comes_late_is_told_what_is_missing(t *testing.T) {
	const flows = flow.MaxRecords + 1000
	b := newFlowBench(t, MaxFlows, "{default: {egress: allow}, limits: {egress: {connections: {per_second: 100000, burst: 100000}}}}")
	frame := sent(peer4, 17, udp(1, 9))
	for i := range flows {
		be.PutUint16(frame[34:], uint16(i+1000))
		if _, err := b.e.Run(Egress, frame, 0); err != nil {
			t.Fatal(err)
		}
	}
	b.wait(time.Minute)
	b.look()
	if err := end(b.log); err != nil {
		t.Fatal(err)
	}
	told, lost := 0, FlowsLost{}
	err := b.log.Records(t.Context(), true, func(recs []FlowRecord) error {
		for _, r := range recs {
			if r.FlowsLost != nil {
				lost.Records += r.FlowsLost.Records
			} else {
				told++
			}
		}
		return nil
	})
	if err != nil || told != flow.MaxRecords || lost.Records != 1000 {
		t.Errorf("%d records, lost %+v, %v", told, lost, err)
	}
	stop := errors.New("enough")
	if err := b.log.Records(t.Context(), true, func([]FlowRecord) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("a reader who has had enough gets %v", err)
	}
}

// Other programs read these lines: fields may be added, and nothing else may change.
func TestFlowRecord_json(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678000000, time.UTC)
	for want, r := range map[string]FlowRecord{
		`{"type":"flow","first":"2026-01-02T03:04:05.678Z","last":"2026-01-02T03:04:06.678Z","end":"closed","direction":"egress","protocol":"tcp",` +
			`"peer":"198.51.100.1","peer_port":443,"name":"a.example.com","guest":"10.200.3.7","guest_port":4000,"verdict":"allow","reason":"rule",` +
			`"rule":"web","state":"closing","egress":{"packets":4,"bytes":219},"ingress":{"packets":2,"bytes":108}}`: {
			Type: RecordFlow, First: at, Last: at.Add(time.Second), FlowInfo: &FlowInfo{
				End: FlowClosed, Direction: Egress, Protocol: "tcp", Peer: peer4, PeerPort: 443, Name: "a.example.com", Guest: own4, GuestPort: 4000,
				Verdict: Allow, Reason: ReasonRule, Rule: "web", State: "closing", Egress: Count{Packets: 4, Bytes: 219}, Ingress: Count{Packets: 2, Bytes: 108},
			},
		},
		`{"type":"lost","first":"2026-01-02T03:04:05.678Z","last":"2026-01-02T03:04:05.678Z","flows":1,"denied":2,"records":3}`: {
			Type: RecordLost, First: at, Last: at, FlowsLost: &FlowsLost{Flows: 1, Denied: 2, Records: 3},
		},
	} {
		got, err := json.Marshal(r)
		if err != nil || string(got) != want {
			t.Errorf("%s, %v, want\n%s", got, err, want)
		}
		var back FlowRecord
		if err := json.Unmarshal(got, &back); err != nil {
			t.Fatal(err)
		}
		if again, err := json.Marshal(back); err != nil || string(again) != want {
			t.Errorf("read again it is %s, %v", again, err)
		}
	}
}

// On a device: a packet that passes, one that is denied, and a reader that follows until the end.
func TestLink_flow_log_of_a_device(t *testing.T) {
	ownNamespace(t)
	tap := newTAP(t, "tap0")
	l, _ := attach(t, "tap0", hostUDP)
	g, err := l.FlowLog(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	c := listenHost(t, "udp", "172.31.255.1:7")
	tap.send(sent(wire.Gateway4, 17, udp(5000, 7, []byte("hello")...)))
	b := make([]byte, 100)
	_, from, err := c.ReadFromUDPAddrPort(b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.WriteToUDPAddrPort([]byte("world!"), from); err != nil {
		t.Fatal(err)
	}
	tap.receive(0x0800, 17)
	tap.send(sent(wire.Gateway4, 17, udp(5000, 8, 1)))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	seen := make(chan struct{})
	ended := make(chan error, 3)
	go func() {
		first := true
		ended <- l.Events(ctx, func(e Event) {
			g.Denied(e)
			if first && e.Protocol == 17 {
				first = false
				close(seen)
			}
		})
	}()
	var followed []FlowRecord
	go func() {
		ended <- g.Records(context.Background(), true, func(recs []FlowRecord) error {
			followed = append(followed, recs...)
			return nil
		})
	}()
	run := make(chan error)
	go func() { run <- g.Run(ctx) }()
	select {
	case <-seen:
	case <-time.After(waitMost):
		t.Fatal("no event")
	}
	begin := time.Now()
	flows, _ := records(t, g)
	open := 0
	for _, r := range flows {
		if r.End == FlowOpen && r.Protocol == "udp" {
			open++
		}
		if d := begin.Sub(r.First); d < -time.Minute || d > time.Hour {
			t.Errorf("it began %v before now: %+v", d, r)
		}
	}
	if open != 2 {
		t.Errorf("%d flows are open, want one that passes and one that is denied: %+v", open, flows)
	}
	cancel()
	if err := <-run; err != nil {
		t.Error(err)
	}
	g.Drain(waitMost)
	for range 2 {
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	var is []string
	for _, r := range followed {
		if r.FlowInfo != nil && r.Protocol == "udp" {
			r.Last = r.First
			is = append(is, text(r))
		}
	}
	slices.Sort(is)
	want := []string{
		`denied egress udp 10.200.3.7:5000 172.31.255.1:8 "" deny default ""  {1 43} {0 0} 0s`,
		`stopped egress udp 10.200.3.7:5000 172.31.255.1:7 "" allow rule "rules[0]" answered {1 47} {1 48} 0s`,
	}
	if !slices.Equal(is, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(is, "\n"), strings.Join(want, "\n"))
	}
}

// end writes the records of open flows, as at the end of a VM's process.
func end(g *flow.Log) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return g.Run(ctx)
}
