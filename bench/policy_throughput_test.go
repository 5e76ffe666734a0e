package bench

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/netpolicy"
)

func TestPolicyOf_rules_give_a_policy_whose_last_one_allows(t *testing.T) {
	for _, n := range []int{1, 2, 100, 1000, MaxRules} {
		p := policyOf(n, netpolicy.Host)
		if err := p.Validate(); err != nil || len(p.Rules) != n {
			t.Fatalf("%d rules: %d, %v", n, len(p.Rules), err)
		}
		for i, r := range p.Rules {
			if want := i == n-1; (r.Verdict == netpolicy.Allow) != want {
				t.Errorf("%d rules: rule %d is %s", n, i, r.Verdict)
			}
		}
	}
}

// ended is the result of a transfer.
type ended struct {
	transfer
	err error
}

// tcp starts a transfer on the host's side, and returns the other end's connection.
func tcp(t *testing.T, ctx context.Context, d netpolicy.Direction, send time.Duration) (net.Conn, <-chan ended) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	out := make(chan ended, 1)
	go func() {
		got, err := serveTransfer(ctx, l, d, send)
		out <- ended{got, err}
	}()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, out
}

func TestServeTransfer_counts_what_the_guest_sends(t *testing.T) {
	c, out := tcp(t, t.Context(), netpolicy.Egress, time.Hour)
	const n = 3<<20 + 17
	if _, err := io.CopyN(c, strings.NewReader(strings.Repeat("x", n)), n); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	// The host closes the connection when it has read everything.
	if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
		t.Errorf("%d bytes, %v", len(rest), err)
	}
	if got := <-out; got.err != nil || got.bytes != n || got.took <= 0 {
		t.Errorf("%+v", got)
	}
}

func TestServeTransfer_sends_until_the_guest_has_all(t *testing.T) {
	c, out := tcp(t, t.Context(), netpolicy.Ingress, 10*time.Millisecond)
	n, err := io.Copy(io.Discard, c)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-out:
		t.Errorf("it has ended before the guest: %+v", got)
	default:
	}
	c.Close()
	if got := <-out; got.err != nil || got.bytes != n || n == 0 || got.took < 10*time.Millisecond {
		t.Errorf("%d bytes: %+v", n, got)
	}
}

func TestServeTransfer_ends_with_its_context(t *testing.T) {
	for _, d := range []netpolicy.Direction{netpolicy.Egress, netpolicy.Ingress} {
		ctx, cancel := context.WithCancel(t.Context())
		_, out := tcp(t, ctx, d, time.Hour)
		cancel()
		if got := <-out; got.err == nil {
			t.Errorf("%s: %+v", d, got)
		}
	}
}

func TestReceived_is_what_the_receiver_says_if_all_has_come(t *testing.T) {
	host, guest := transfer{bytes: 7, took: time.Second}, transfer{bytes: 7, took: 2 * time.Second}
	for d, want := range map[netpolicy.Direction]time.Duration{netpolicy.Egress: host.took, netpolicy.Ingress: guest.took} {
		if n, took, err := received(d, host, guest); err != nil || n != 7 || took != want {
			t.Errorf("%s: %d, %v, %v", d, n, took, err)
		}
		if _, _, err := received(d, host, transfer{bytes: 8, took: 1}); err == nil {
			t.Errorf("%s: a byte is missing, and nobody says so", d)
		}
	}
}

func TestReadTransfer_answers_of_the_guest_give_counts_or_error(t *testing.T) {
	if got, err := readTransfer("1048576 5000000000"); err != nil || got.bytes != 1<<20 || got.took != 5*time.Second {
		t.Errorf("%+v, %v", got, err)
	}
	for _, answer := range []string{"", "error: [Errno 110] Connection timed out", "5", "0 5", "5 0", "-1 5", "x 5"} {
		if got, err := readTransfer(answer); err == nil || got != (transfer{}) {
			t.Errorf("%q: %+v, %v", answer, got, err)
		}
	}
}

func TestCountsBetween_counters_give_packets_and_bytes_by_direction(t *testing.T) {
	count := func(d netpolicy.Direction, v netpolicy.Verdict, packets, bytes uint64) netpolicy.Counter {
		return netpolicy.Counter{Direction: d, Verdict: v, Count: netpolicy.Count{Packets: packets, Bytes: bytes}}
	}
	before := []netpolicy.Counter{count(netpolicy.Egress, netpolicy.Allow, 1, 100), count(netpolicy.Ingress, netpolicy.Deny, 2, 200)}
	after := []netpolicy.Counter{
		count(netpolicy.Egress, netpolicy.Allow, 4, 700), count(netpolicy.Egress, netpolicy.Allow, 2, 50), // another reason
		count(netpolicy.Ingress, netpolicy.Allow, 5, 300), count(netpolicy.Ingress, netpolicy.Deny, 3, 250), count(netpolicy.Egress, netpolicy.Reject, 1, 9),
	}
	want := map[string]int64{"egress_packets": 5, "egress_bytes": 650, "ingress_packets": 5, "ingress_bytes": 300, "denied_packets": 2}
	got := countsBetween(before, after)
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s: %d, want %d", name, got[name], n)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%v", got)
	}
}

func TestPassed_check_finds_runs_that_were_judged_otherwise_than_they_say(t *testing.T) {
	tests := map[string]struct {
		rules int
		bytes int64 // counted by the programs
		good  bool
	}{
		"all judged":              {10, 1100, true},
		"headers not counted":     {10, 1000, true},
		"passed the programs by":  {10, 999, false},
		"without programs":        {noPolicy, 0, true},
		"programs that were left": {noPolicy, 60, false},
	}
	for name, tt := range tests {
		p := passed{bytes: 1000, took: time.Second, counts: map[string]int64{"egress_bytes": tt.bytes, "denied_packets": 0}}
		if err := p.check(flowWay{netpolicy.Egress, tt.rules}); (err == nil) != tt.good {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestThroughputs_rounds_give_rates_and_ratios_of_pairs(t *testing.T) {
	all := newThroughputs([]int{1, 1000})
	// The machine gets slower from round to round, which the ratios must not show.
	for _, slower := range []float64{1, 2, 4} {
		round := map[flowWay]passed{}
		for w, mib := range map[flowWay]float64{
			{netpolicy.Egress, noPolicy}: 100, {netpolicy.Egress, 1}: 99, {netpolicy.Egress, 1000}: 97,
			{netpolicy.Ingress, noPolicy}: 40, {netpolicy.Ingress, 1}: 40, {netpolicy.Ingress, 1000}: 36,
		} {
			p := passed{bytes: int64(mib * mibBytes), took: time.Duration(slower * float64(time.Second))}
			if w.rules != noPolicy {
				p.counts = map[string]int64{"egress_packets": 12}
			}
			round[w] = p
		}
		all.record(round)
	}
	report := NewReport(all.rows(map[string]any{"memory_mib": 256}))
	want := []struct {
		name, direction, policy string
		rules                   int
		p50                     float64
		goal                    string
	}{
		{"policy_throughput", "egress", "none", 0, 50, "-"}, {"policy_throughput", "egress", "rules", 1, 49.5, "-"}, {"policy_throughput", "egress", "rules", 1000, 48.5, "-"},
		{"policy_throughput", "ingress", "none", 0, 20, "-"}, {"policy_throughput", "ingress", "rules", 1, 20, "-"}, {"policy_throughput", "ingress", "rules", 1000, 18, "-"},
		{"policy_throughput_ratio", "egress", "rules", 1, 0.99, "-"}, {"policy_throughput_ratio", "egress", "rules", 1000, 0.97, "met: p50 ≥ 0.95 (few runs)"},
		{"policy_throughput_ratio", "ingress", "rules", 1, 1, "-"}, {"policy_throughput_ratio", "ingress", "rules", 1000, 0.9, "missed: p50 ≥ 0.95 (few runs)"},
	}
	if len(report.Rows) != len(want) {
		t.Fatalf("%d rows, want %d", len(report.Rows), len(want))
	}
	for i, w := range want {
		r := report.Rows[i]
		p := r.Params
		if r.Name != w.name || p["direction"] != w.direction || p["policy"] != w.policy || p["rules"] != w.rules || p["memory_mib"] != 256 {
			t.Errorf("row %d: %s %v, want %+v", i, r.Name, p, w)
		}
		// Ratios are cut to thousandths.
		if r.N != 3 || r.P50 < w.p50*0.997 || r.P50 > w.p50*1.003 || r.Goal.String() != w.goal {
			t.Errorf("row %d: %+v, goal %s, want %+v", i, r, r.Goal, w)
		}
		if packets := 12.0; r.Name == "policy_throughput" && w.rules > 0 && r.Faults["egress_packets"] != packets {
			t.Errorf("row %d: faults %v", i, r.Faults)
		}
	}
}

func TestLinkPrograms_go_off_and_on_again(t *testing.T) {
	needRoot(t)
	// The network namespace belongs to the thread, and ends with the test.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	spec, err := rulesOf(1)
	if err != nil {
		t.Fatal(err)
	}
	a := &attached{root: attachRoot(), spec: spec}
	defer func() {
		if err := a.close(); err != nil {
			t.Error(err)
		}
	}()
	name, err := a.device()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := programsOn(name); err == nil {
		t.Error("programs are found on a device that has none")
	}
	if _, _, err := a.attach(name); err != nil {
		t.Fatal(err)
	}
	p, err := programsOn(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.close(); err != nil {
			t.Error(err)
		}
	}()
	// Link.Up fails if a program is missing.
	for range 2 {
		if err := p.off(); err != nil {
			t.Fatal(err)
		}
		if err := a.links[0].Up(spec.Identity()); err == nil {
			t.Error("the programs are on the device that were taken off")
		}
		if err := p.on(); err != nil {
			t.Fatal(err)
		}
		if err := a.links[0].Up(spec.Identity()); err != nil {
			t.Error(err)
		}
	}
}

func TestPolicyThroughput_between_devices_is_judged_unless_the_programs_are_off(t *testing.T) {
	needRoot(t)
	rows, err := PolicyThroughput(t.Context(), Env{}, Options{
		N: 2, Warmup: 1, Links: []string{linkVeth}, Rules: []int{1, 1000}, Send: 20 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 10 {
		t.Fatalf("%d rows, want 10", len(rows))
	}
	for _, r := range rows {
		if r.N != 2 || r.P50 <= 0 || r.Params["link"] != linkVeth {
			t.Errorf("%+v", r)
		}
		if r.Name != "policy_throughput" {
			continue
		}
		if judged := r.Faults["egress_packets"] > 0 && r.Faults["ingress_packets"] > 0; judged != (r.Params["policy"] == policyRules) {
			t.Errorf("%v: %v", r.Params, r.Faults)
		}
	}
	if _, err := os.Stat(attachRoot()); !os.IsNotExist(err) {
		t.Errorf("pins are left: %v", err)
	}
}

func TestPolicyThroughput_that_is_ended_leaves_nothing_behind(t *testing.T) {
	needRoot(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := PolicyThroughput(ctx, Env{}, Options{N: 1, Links: []string{linkVeth}, Rules: []int{1}, Send: MaxSend})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := os.Stat(attachRoot()); !os.IsNotExist(err) {
		t.Errorf("pins are left: %v", err)
	}
}
