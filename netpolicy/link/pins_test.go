package link_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	. "github.com/drowse-vm/drowse/netpolicy"
)

// Each name opens a port of the same address, and the names expire one after the other.
func TestPin_names_of_an_address_end_one_by_one(t *testing.T) {
	const names = 6 // more than there are slots
	var text strings.Builder
	text.WriteString("dns: {}\nrules:\n")
	for i := range names {
		fmt.Fprintf(&text, "- {direction: egress, verdict: allow, names: [n%d.example.com], protocols: [udp], ports: [%d]}\n", i, 1000+i)
	}
	e := newEngine(t, DefaultFlows)
	s := compile(t, text.String())
	if err := e.Install(s); err != nil {
		t.Fatal(err)
	}
	start := uint64(1e15) // later than the kernel's clock
	end := func(i int) uint64 { return start + uint64(i+1)*uint64(time.Minute) }
	for i := range names {
		// Not in order.
		k := (i * 5) % names
		if err := e.Pin(fmt.Sprintf("n%d.example.com", k), peer4, end(k)); err != nil {
			t.Fatal(err)
		}
	}
	check := func(now uint64) {
		t.Helper()
		if err := e.SetTime(now); err != nil {
			t.Fatal(err)
		}
		for i := range names {
			r, err := e.Run(Egress, sent(peer4, 17, udp(uint16(2000+now%10000), uint16(1000+i))), 0)
			if err != nil {
				t.Fatal(err)
			}
			alive := now < end(i)
			if r.Verdict == Allow && !alive {
				t.Errorf("%d ns: name %d still opens its port", int64(now-start), i)
			}
			// Of more than four different times, the earliest expire early.
			if r.Verdict != Allow && alive && i >= names-4 {
				t.Errorf("%d ns: name %d does not open its port: %s", int64(now-start), i, r.Reason)
			}
			if err := e.ForgetFlows(); err != nil {
				t.Fatal(err)
			}
		}
		if r, err := e.Run(Egress, sent(netip.MustParseAddr("198.51.100.2"), 17, udp(2000, 1005)), 0); err != nil || r.Verdict != Deny {
			t.Errorf("another address: %s by %s, %v", r.Verdict, r.Reason, err)
		}
	}
	for round := range 2 {
		for i := range names {
			for _, now := range []uint64{end(i) - 1, end(i), end(i) + 1} {
				check(now)
			}
		}
		if round == 0 {
			// The same again after a swap. The use of limits is of a later time, so drop it.
			if err := e.ForgetUsage(); err != nil {
				t.Fatal(err)
			}
			if err := e.Install(s); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestPin_more_than_there_is_room_for_gives_an_error(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	if err := e.Install(compile(t, "dns: {}\nrules: [{direction: egress, verdict: allow, names: ['*.example.com']}]")); err != nil {
		t.Fatal(err)
	}
	a := netip.MustParseAddr("8.0.0.0")
	for range 4096 {
		if err := e.Pin("a.example.com", a, 1e18); err != nil {
			t.Fatal(err)
		}
		a = a.Next()
	}
	if err := e.Pin("a.example.com", a, 1e18); err == nil {
		t.Error("one too many was pinned")
	}
}

// A guest looks up ever new names of one address, as a content delivery network has them. It gets answers, whether
// or not the old names have expired.
func TestAttack_many_names_of_one_address_end_its_resolving(t *testing.T) {
	for _, what := range []string{"names that have expired", "names that live"} {
		t.Run(what, func(t *testing.T) {
			e := newEngine(t, DefaultFlows)
			if err := e.Install(compile(t, "dns: {}\nrules: [{direction: egress, verdict: allow, names: ['*.example.com'], protocols: [udp], ports: [9]}, {direction: egress, verdict: allow, names: [first.org, last.org], protocols: [udp], ports: [10]}]")); err != nil {
				t.Fatal(err)
			}
			const now = 1e15 // later than the kernel's clock
			if err := e.SetTime(now); err != nil {
				t.Fatal(err)
			}
			until := func(i int) uint64 {
				if what == "names that live" {
					return now + uint64(i+1)*1e9
				}
				return 1
			}
			if err := e.Pin("first.org", peer4, until(0)); err != nil {
				t.Fatal(err)
			}
			for i := range 300 {
				if err := e.Pin(fmt.Sprintf("n%d.example.com", i), peer4, until(1+i)); err != nil {
					t.Fatalf("name %d: %v", i, err)
				}
				if n := e.Names(peer4); n > 64 {
					t.Fatalf("an address has %d names", n)
				}
			}
			passes := func(port uint16) bool {
				t.Helper()
				r, err := e.Run(Egress, sent(peer4, 17, udp(4000, port)), 0)
				if err != nil {
					t.Fatal(err)
				}
				return r.Action == 0
			}
			if passes(10) {
				t.Error("the first name opens its port still")
			}
			if err := e.Pin("last.org", peer4, now+1e12); err != nil {
				t.Fatal(err)
			}
			if !passes(10) {
				t.Error("the last name does not open its port")
			}
		})
	}
}

// The same policy is swapped in again, because the host gets an address or a caller sets it. A connection whose name
// was looked up long ago continues, as long as the policy has the name that it was opened for.
func TestAttack_swap_cuts_connections_whose_names_have_expired(t *testing.T) {
	const rule = "- {direction: egress, verdict: allow, names: [%s], protocols: [tcp, udp], ports: [443, 5000], tls: [%s]}\n"
	one := "dns: {}\nrules:\n" + fmt.Sprintf(rule, "a.example.com", "none")
	for _, x := range []struct {
		what   string
		also   string // a name of the address that is looked up after the connection is opened
		policy string
		passes bool
	}{
		{"the same policy", "", one, true},
		{"one that has the name in a pattern", "", "dns: {}\nrules:\n" + fmt.Sprintf(rule, "'*.example.com'", "none"), true},
		{"one without the name", "", "dns: {}\nrules:\n" + fmt.Sprintf(rule, "b.example.com", "none"), false},
		{"one with another name that the address is given for now", "b.example.com", "dns: {}\nrules:\n" + fmt.Sprintf(rule, "b.example.com", "none"), false},
		{"one that checks the name, which cannot be done from the midst on", "", "dns: {}\nrules:\n" + fmt.Sprintf(rule, "a.example.com", "443"), false},
		{"one without names", "", "", false},
	} {
		t.Run(x.what, func(t *testing.T) {
			e := newEngine(t, DefaultFlows)
			now := uint64(1e15) // later than the kernel's clock
			run := func(d Direction, frame []byte, want bool) {
				t.Helper()
				if err := e.SetTime(now); err != nil {
					t.Fatal(err)
				}
				if r, err := e.Run(d, frame, 0); err != nil || (r.Action == 0) != want {
					t.Errorf("%s by %s, %v; want it to pass: %v", r.Verdict, r.Reason, err, want)
				}
			}
			if err := e.Install(compile(t, one)); err != nil {
				t.Fatal(err)
			}
			if err := e.Pin("a.example.com", peer4, now+uint64(time.Minute)); err != nil {
				t.Fatal(err)
			}
			run(Egress, sent(peer4, 6, tcp(4000, 443, syn)), true)
			run(Ingress, got(peer4, 6, tcp(443, 4000, syn|ack)), true)
			run(Egress, sent(peer4, 6, tcp(4000, 443, ack)), true)
			now += uint64(time.Hour)
			if x.also != "" {
				if err := e.Pin(x.also, peer4, now+uint64(time.Hour)); err != nil {
					t.Fatal(err)
				}
			}
			for range 3 {
				if err := e.Install(compile(t, x.policy)); err != nil {
					t.Fatal(err)
				}
				now += uint64(time.Minute)
				run(Egress, sent(peer4, 6, tcp(4000, 443, ack)), x.passes)
				run(Ingress, got(peer4, 6, tcp(443, 4000, ack)), x.passes)
			}
			// A new connection needs a new lookup of the name.
			run(Egress, sent(peer4, 6, tcp(4001, 443, syn)), x.also != "")
		})
	}
}

// A guest looks up names without end. The engine bounds how many it remembers for flows, and open flows keep theirs.
func TestPin_names_without_end_leave_those_of_flows(t *testing.T) {
	e := newEngine(t, DefaultFlows)
	text := "dns: {}\nrules: [{direction: egress, verdict: allow, names: ['*.example.com'], protocols: [udp], ports: [9]}]"
	if err := e.Install(compile(t, text)); err != nil {
		t.Fatal(err)
	}
	now := uint64(1e15)
	if err := e.SetTime(now); err != nil {
		t.Fatal(err)
	}
	if err := e.Pin("first.example.com", peer4, now+1); err != nil {
		t.Fatal(err)
	}
	if r, err := e.Run(Egress, sent(peer4, 17, udp(4000, 9)), 0); err != nil || r.Action != 0 {
		t.Fatalf("%s by %s, %v", r.Verdict, r.Reason, err)
	}
	for i := range 10000 {
		if err := e.Pin(fmt.Sprintf("n%d.example.com", i), peer4, now+uint64(1+i%7)); err != nil {
			t.Fatal(err)
		}
	}
	if n := e.NameSets(); n > 2048 {
		t.Errorf("%d sets of names are remembered", n)
	}
	now += 1e9
	if err := e.SetTime(now); err != nil {
		t.Fatal(err)
	}
	if err := e.Install(compile(t, text)); err != nil {
		t.Fatal(err)
	}
	if r, err := e.Run(Ingress, got(peer4, 17, udp(9, 4000)), 0); err != nil || r.Action != 0 {
		t.Errorf("the flow's answer: %s by %s, %v", r.Verdict, r.Reason, err)
	}
}
