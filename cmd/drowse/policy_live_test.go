//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

func TestPolicyText_means_the_same_policy(t *testing.T) {
	for _, text := range []string{
		"",
		"default: {egress: allow}",
		"rules: [{direction: egress, verdict: allow, groups: [any], protocols: [any], ports: [any]}]",
		"rules: [{name: \"yes\", direction: egress, verdict: reject}, {direction: ingress, verdict: deny, cidrs: [10.0.0.0/8, \"fd00::/8\"], ports: [1-7, 80]}]",
		"rules: [{direction: egress, names: [a.example, \"*.b.example\"], verdict: allow, protocols: [tcp], ports: [443]}]\n" +
			"dns: {upstreams: [\"192.0.2.53:53\", \"[2001:db8::1]:53\"], queries_per_second: 3}\n" +
			"publish: [{listen: \"127.0.0.1:8080\", port: 80, protocol: tcp}]\nquota: {egress_bytes: 0}\nflows: 64\n" +
			"limits: {egress: {bits: {per_second: 1000000}}}",
		"version: 1\ndns: {upstreams: []}",
	} {
		p, err := netpolicy.Parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		out, err := policyText(p)
		if err != nil {
			t.Fatal(err)
		}
		q, err := netpolicy.Parse([]byte(out))
		if err != nil {
			t.Fatalf("%s\n%v", out, err)
		}
		// An empty list and an absent one mean the same.
		want, _ := json.Marshal(p)
		got, _ := json.Marshal(q)
		same := func(b []byte) string { return strings.ReplaceAll(string(b), "null", "[]") }
		if same(got) != same(want) {
			t.Errorf("%s\nhas become\n%s\n%s\n%s", text, out, want, got)
		}
	}
}

func TestDiffLines(t *testing.T) {
	many := strings.Fields(strings.Repeat("x ", 10))
	for _, tt := range []struct{ a, b, want string }{
		{"a b c", "a b c", ""},
		{"a b c", "a x c", "  a|- b|+ x|  c"},
		{"", "a", "- |+ a"},
		{"a b c d", "b c d e", "- a|  b|  c|  d|+ e"},
		{"1 2 3 4 5 6 7 8 9", "1 2 3 4 x 6 7 8 9", "  2|  3|  4|- 5|+ x|  6|  7|  8"},
	} {
		got := strings.Join(diffLines(strings.Split(tt.a, " "), strings.Split(tt.b, " ")), "|")
		if got != tt.want {
			t.Errorf("%q and %q: %q, want %q", tt.a, tt.b, got, tt.want)
		}
	}
	var a, b []string
	for i := range 3000 {
		a, b = append(a, fmt.Sprint("a", i)), append(b, fmt.Sprint("b", i))
	}
	if got := diffLines(append(slices.Clone(many), a...), append(slices.Clone(many), b...)); len(got) != 3+6000 {
		t.Errorf("much that differs: %d lines", len(got))
	}
}

func TestFlowPrinter(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
	flow := netpolicy.FlowInfo{
		End: netpolicy.FlowClosed, Direction: netpolicy.Egress, Protocol: "tcp", Peer: netip.MustParseAddr("2001:db8::1"), PeerPort: 443, Name: "a.example",
		Guest: netip.MustParseAddr("10.200.3.7"), GuestPort: 4000, Verdict: netpolicy.Allow, Reason: netpolicy.ReasonRule, Rule: "web\u202e",
		Egress: netpolicy.Count{Packets: 4, Bytes: 2048},
	}
	in := flow
	in.Direction, in.Rule, in.Reason, in.Peer, in.PeerPort, in.GuestPort = netpolicy.Ingress, "", netpolicy.ReasonDefault, in.Guest, 0, 0
	records := []netpolicy.FlowRecord{
		{Type: netpolicy.RecordFlow, First: at, Last: at.Add(1500 * time.Millisecond), FlowInfo: &flow},
		{Type: netpolicy.RecordFlow, First: at, Last: at, FlowInfo: &in},
		{Type: netpolicy.RecordLost, First: at, Last: at, FlowsLost: &netpolicy.FlowsLost{Flows: 1, Denied: 2}},
		{Type: "of a later version", First: at, Last: at},
	}
	for _, tt := range []struct {
		format string
		follow bool
		want   []string
	}{
		{"text", false, []string{
			"FIRST                LASTED  END     VERDICT  RULE     PROTOCOL  FROM             TO                 NAME       SENT          RECEIVED",
			"2026-01-02 03:04:05  1.5s    closed  allow    web\ufffd     tcp       10.200.3.7:4000  [2001:db8::1]:443  a.example  2.0 KiB in 4  0 B in 0",
			"2026-01-02 03:04:05  0s      closed  allow    default  tcp       10.200.3.7       10.200.3.7         a.example  2.0 KiB in 4  0 B in 0",
			"2026-01-02 03:04:05          lost    1 flows, 2 denied packets and 0 records are not told of",
		}},
		{"json", true, []string{`"end":"closed"`, `"direction":"ingress"`, `"denied":2`, `"type":"of a later version"`}},
	} {
		var out strings.Builder
		err := (&app{output: tt.format, stdout: &out}).printFlows(tt.follow, func(each func(netpolicy.FlowRecord) error) (err error) {
			for _, r := range records {
				err = errors.Join(err, each(r))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		if len(lines) != len(tt.want) {
			t.Fatalf("%s: %d lines, want %d:\n%s", tt.format, len(lines), len(tt.want), &out)
		}
		for i, l := range lines {
			if !strings.Contains(l, tt.want[i]) {
				t.Errorf("%s: line %d is\n%s, want\n%s", tt.format, i, l, tt.want[i])
			}
		}
	}
}

func TestPolicyCommands_of_vms_that_are_not_there_or_files_that_are_wrong(t *testing.T) {
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.yaml"), filepath.Join(dir, "bad.yaml")
	for path, text := range map[string]string{good: "rules: []", bad: "ruels: []"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("DROWSE_AGENT", good) // no command reads it
	for _, tt := range []struct {
		args string
		code int
		says string
	}{
		{"policy set none " + good, exitFailed, "no such VM"},
		{"policy set none " + bad, exitUsage, "ruels"},
		{"policy set none " + filepath.Join(dir, "missing"), exitFailed, "no such file"},
		{"policy diff none " + bad, exitUsage, "ruels"},
		{"policy show none", exitFailed, "no such VM"},
		{"policy stats none", exitFailed, "no such VM"},
		{"policy events none --follow", exitFailed, "no such VM"},
		{"policy flows none --follow", exitFailed, "no such VM"},
		{"policy flows", exitUsage, "accepts 1 arg"},
		{"run --policy " + bad + " x", exitUsage, "ruels"},
		{"run --net none --policy " + good + " x", exitUsage, "--net none does not go with"},
		{"restore 0123 --policy " + bad, exitUsage, "ruels"},
		{"fork none --policy " + bad, exitUsage, "ruels"},
	} {
		var out, errs strings.Builder
		code := run(t.Context(), append([]string{"--state", dir}, strings.Fields(tt.args)...), &out, &errs)
		if code != tt.code || !strings.Contains(errs.String(), tt.says) || out.Len() != 0 {
			t.Errorf("%s: status %d, want %d: %s%s", tt.args, code, tt.code, &out, &errs)
		}
	}
}
