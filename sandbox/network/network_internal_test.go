package network

import (
	"net/netip"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestEventLog_keeps_the_last_and_counts_what_is_lost(t *testing.T) {
	l := newEventLog()
	_, f, stop := l.recent(true)
	for i := range maxEvents + 10 {
		l.add(spec.NetEvent{Bytes: uint32(i)})
	}
	got, none, _ := l.recent(false)
	if none != nil || len(got) != maxEvents || got[0].Bytes != 10 || got[0].Lost != 10 || got[1].Lost != 0 || got[len(got)-1].Bytes != maxEvents+9 {
		t.Errorf("%d events, the first %+v", len(got), got[0])
	}
	for i := range maxFollowed {
		if e := <-f.ch; e.Bytes != uint32(i) || e.Lost != 0 {
			t.Fatalf("%+v, want number %d", e, i)
		}
	}
	l.add(spec.NetEvent{Bytes: 7})
	if e := <-f.ch; e.Bytes != 7 || e.Lost != maxEvents+10-maxFollowed {
		t.Errorf("%+v", e)
	}
	stop()
	l.add(spec.NetEvent{})
	if len(f.ch) != 0 {
		t.Error("it follows on")
	}
}

func TestRuleName_of_an_event_is_that_of_the_policy_of_its_time(t *testing.T) {
	compile := func(name string) *netpolicy.Spec {
		t.Helper()
		s, err := netpolicy.Compile(policyFrom(t, "rules: [{name: "+name+", direction: egress, verdict: deny}]"),
			netpolicy.Identity{Address4: netip.MustParseAddr("10.200.0.5")}, netpolicy.Environment{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	n := &Network{history: []installed{{compile("one"), 10, 10}, {compile("two"), 20, 30}}}
	for at, want := range map[time.Duration]string{5: "", 10: "one", 19: "one", 20: "", 29: "", 30: "two", 99: "two"} {
		if got := n.ruleName(netpolicy.Event{Uptime: at}); got != want {
			t.Errorf("at %d: %q, want %q", at, got, want)
		}
	}
}

func TestOpensAgents(t *testing.T) {
	for text, want := range map[string]bool{
		"":                         false,
		"default: {egress: allow}": false,
		"rules: [{direction: egress, verdict: allow, agents: [db], protocols: [tcp], ports: [80]}]":   true,
		"rules: [{direction: ingress, verdict: allow, agents: [db], protocols: [tcp], ports: [80]}]":  true,
		"rules: [{direction: egress, verdict: deny, agents: [db], protocols: [tcp], ports: [80]}]":    false,
		"rules: [{direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [80]}]": false,
	} {
		if got := opensAgents(policyFrom(t, text)); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func TestOpensOutside(t *testing.T) {
	for text, want := range map[string]bool{
		"":                         false,
		"default: {egress: allow}": true, "default: {ingress: allow}": false,
		"rules: [{direction: egress, verdict: allow, groups: [host], protocols: [tcp], ports: [80]}]":           false,
		"rules: [{direction: egress, verdict: allow, groups: [public], protocols: [tcp], ports: [80]}]":         true,
		"rules: [{direction: egress, verdict: allow, cidrs: [192.168.1.0/24], protocols: [tcp], ports: [80]}]":  true,
		"rules: [{direction: ingress, verdict: allow, cidrs: [192.168.1.0/24], protocols: [tcp], ports: [80]}]": false,
		"rules: [{direction: egress, verdict: deny, groups: [public], protocols: [tcp], ports: [80]}]":          false,
	} {
		if got := opensOutside(policyFrom(t, text)); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}

func policyFrom(t *testing.T, text string) *netpolicy.Policy {
	t.Helper()
	p, err := netpolicy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}
