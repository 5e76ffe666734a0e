//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const testPolicy = `
rules:
  - {name: web, direction: egress, verdict: allow, groups: [public], names: [pypi.org], protocols: [tcp], ports: [443]}
  - {direction: egress, verdict: reject, cidrs: [10.1.0.0/16], protocols: [icmp]}
  - {name: db, direction: egress, verdict: allow, agents: [db], protocols: [tcp], ports: [5432]}
  - {name: named, direction: egress, verdict: allow, names: ["*.cdn.example"], protocols: [tcp, udp], ports: [443, 8443, 80], tls: [443, 8443]}
  - {name: forgotten, direction: egress, verdict: allow, groups: [private], protocols: [tcp]}
dns: {upstreams: ["192.0.2.53:53"]}
`

func policyFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestPolicyExplain_packets_and_their_verdicts(t *testing.T) {
	path := policyFile(t, testPolicy)
	tests := []struct {
		packet, flags         string
		verdict, reason, rule string
	}{
		{"egress tcp 93.184.216.34:443", "", "allow", "rule", "web"},
		{"egress tcp 93.184.216.34:80", "", "deny", "default", ""},
		{"egress icmp 10.1.2.3", "", "reject", "rule", ""},
		{"egress udp 172.31.255.1:53", "", "allow", "rule", "resolver"},
		{"egress tcp 169.254.169.254:443", "", "deny", "floor", ""},
		{"egress tcp 10.5.5.5:443", "", "deny", "default", ""},
		{"egress tcp 10.200.0.9:5432", "", "deny", "default", ""},
		{"egress tcp 10.200.0.9:5432", "--peer 10.200.0.9=db,eu", "allow", "rule", "db"},
		{"ingress tcp 93.184.216.34:443", "", "deny", "default", ""},
		{"egress tcp [2606:4700::1111]:443", "", "deny", "ipv6-off", ""},
		{"egress tcp [2606:4700::1111]:443", "--address6 fd00::2", "allow", "rule", "web"},
		{"egress tcp 93.184.216.34:8443", "--name a.cdn.example", "allow", "rule", "named"},
		{"egress tcp 93.184.216.34:8443", "--name a.cdn.example --server-name B.CDN.example", "allow", "rule", "named"},
		{"egress tcp 93.184.216.34:8443", "--name a.cdn.example --server-name cdn.example", "reject", "tls-name", "named"},
		{"egress tcp 93.184.216.34:8443", "--name a.cdn.example --server-name=", "reject", "tls-no-name", "named"},
		{"egress tcp 93.184.216.34:80", "--name a.cdn.example --server-name evil.example", "allow", "rule", "named"},
		{"egress udp 93.184.216.34:443", "--name a.cdn.example", "deny", "default", ""},
		{"egress tcp 93.184.216.34:443", "--name a.cdn.example --server-name evil.example", "allow", "rule", "web"},
		{"egress tcp [2606:4700::1111]:8443", "--address6 fd00::2 --name a.cdn.example", "deny", "tls-off", "named"},
	}
	for _, tt := range tests {
		t.Run(tt.packet+" "+tt.flags, func(t *testing.T) {
			args := append([]string{"policy", "explain", path, "-o", "json", "--packet", tt.packet}, strings.Fields(tt.flags)...)
			code, out, errs := drowse(t, t.TempDir(), args...)
			if code != 0 {
				t.Fatalf("exit %d: %s", code, errs)
			}
			var got struct {
				Verdict  string
				Reason   string
				RuleName string `json:"rule_name"`
			}
			if err := json.Unmarshal([]byte(out), &got); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if got.Verdict != tt.verdict || got.Reason != tt.reason || got.RuleName != tt.rule {
				t.Errorf("%+v, want %s by %s %s", got, tt.verdict, tt.reason, tt.rule)
			}
		})
	}
}

func TestPolicyCheck_says_what_is_wrong_and_what_may_be(t *testing.T) {
	code, out, _ := drowse(t, t.TempDir(), "policy", "check", policyFile(t, testPolicy))
	if code != 0 || !strings.Contains(out, "5 rules, of which 4 allow") || !strings.Contains(out, "rules[3] (named) has names that are checked") || !strings.Contains(out, "rules[4] (forgotten) names no ports") {
		t.Errorf("exit %d: %s", code, out)
	}
	tests := []struct {
		args []string
		want string
	}{
		{[]string{"check", policyFile(t, "rules:\n- direction: egress\n  verdikt: allow")}, `line 3: "rules[0].verdikt"`},
		{[]string{"explain", policyFile(t, ""), "--packet", "egress tcp 1.1.1.1"}, "an address and a port"},
		{[]string{"explain", policyFile(t, ""), "--packet", "out tcp 1.1.1.1:1"}, "egress or ingress"},
		{[]string{"explain", policyFile(t, "")}, "--packet"},
		{[]string{"check", policyFile(t, ""), "--address", "127.0.0.1"}, "127.0.0.1"},
	}
	for _, tt := range tests {
		code, _, errs := drowse(t, t.TempDir(), append([]string{"policy"}, tt.args...)...)
		if code != exitUsage || !strings.Contains(errs, tt.want) {
			t.Errorf("%q: exit %d, %s, want %d with %q", tt.args, code, errs, exitUsage, tt.want)
		}
	}
}
