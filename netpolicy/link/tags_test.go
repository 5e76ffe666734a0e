package link_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	. "github.com/drowse-vm/drowse/netpolicy"
	. "github.com/drowse-vm/drowse/netpolicy/link"
)

const tagPolicy = `
rules:
  - {direction: egress, verdict: deny, agents: [closed], protocols: [any], ports: [any]}
  - {direction: egress, verdict: allow, agents: [db, cache], protocols: [tcp, udp, icmp], ports: [80]}
  - {direction: ingress, verdict: allow, agents: [web], protocols: [tcp, udp, icmp], ports: [81]}
`

// What the rules say of another endpoint depends on which endpoint has the address now.
func TestPrograms_endpoints_that_come_and_go(t *testing.T) {
	for _, other := range []netip.Addr{netip.MustParseAddr("10.200.3.8"), netip.MustParseAddr("fd77::3:8")} {
		proto, request, unreachable, guest := byte(1), byte(8), byte(3), wire.Guest4
		if other.Is6() {
			proto, request, unreachable, guest = 58, 128, 1, wire.Guest6
		}
		type step struct {
			what  string
			claim uint32 // of the endpoint that has the address; 0 is none
			tags  []string
			out   bool // whether a packet that opens a flow passes to port 80
			in    bool // whether one from the other endpoint passes to port 81
			// Whether packets of a flow opened in the step before still pass: to the other endpoint, and from it.
			old, oldIn bool
		}
		steps := []step{
			{what: "nobody is there", claim: 0, tags: nil, out: false, in: false, old: false, oldIn: false},
			{what: "one without tags comes", claim: 5, tags: nil, out: false, in: false, old: false, oldIn: false},
			{what: "one with another tag", claim: 6, tags: []string{"dbx"}, out: false, in: false, old: false, oldIn: false},
			{what: "one with the tag", claim: 7, tags: []string{"db"}, out: true, in: false, old: false, oldIn: false},
			{what: "it is still there", claim: 7, tags: []string{"db"}, out: true, in: false, old: true, oldIn: true},
			{what: "another of the same tag gets the address", claim: 8, tags: []string{"db"}, out: true, in: false, old: false, oldIn: false},
			{what: "one with both tags, as the last of 8", claim: 9, tags: []string{"a", "b", "c", "d", "e", "f", "web", "cache"}, out: true, in: true, old: false, oldIn: false},
			{what: "it is still there", claim: 9, tags: []string{"a", "b", "c", "d", "e", "f", "web", "cache"}, out: true, in: true, old: true, oldIn: true},
			{what: "the same one with another tag more", claim: 9, tags: []string{"a", "b", "c", "d", "e", "web", "cache", "x"}, out: true, in: true, old: true, oldIn: true},
			{what: "the same one with one of both tags", claim: 9, tags: []string{"cache"}, out: true, in: false, old: true, oldIn: false},
			{what: "the same one with none of them", claim: 9, tags: nil, out: false, in: false, old: false, oldIn: false},
			{what: "the same one with a tag again", claim: 9, tags: []string{"db"}, out: true, in: false, old: false, oldIn: false},
			{what: "the same one with the other one of a rule's tags", claim: 9, tags: []string{"cache"}, out: true, in: false, old: true, oldIn: false},
			{what: "an earlier rule denies one of its tags", claim: 10, tags: []string{"db", "closed"}, out: false, in: false, old: false, oldIn: false},
			{what: "one with the tag for the other direction", claim: 11, tags: []string{"web"}, out: false, in: true, old: false, oldIn: false},
			{what: "it has gone", claim: 0, tags: nil, out: false, in: false, old: false, oldIn: false},
		}
		e := newEngine(t, DefaultFlows)
		if err := e.Install(compile(t, tagPolicy)); err != nil {
			t.Fatal(err)
		}
		if err := e.ForgetState(); err != nil {
			t.Fatal(err)
		}
		there := false
		passes := func(d Direction, proto byte, segment []byte) bool {
			t.Helper()
			build := sent
			if d == Ingress {
				build = got
			}
			r, err := e.Run(d, build(other, proto, segment), 0)
			if err != nil {
				t.Fatal(err)
			}
			if (r.Action == 0) != (r.Verdict == Allow) {
				t.Errorf("action %d of verdict %s", r.Action, r.Verdict)
			}
			return r.Action == 0
		}
		previous := step{}
		for n, s := range steps {
			t.Run(fmt.Sprintf("%v/%s", other, s.what), func(t *testing.T) {
				if s.claim != 0 || there {
					if err := e.SetPeer(Peer{Address: other, Tags: s.tags}, s.claim); err != nil {
						t.Fatal(err)
					}
				}
				there = s.claim != 0
				check := func(what string, got, want bool) {
					t.Helper()
					if got != want {
						t.Errorf("%s: passed %v, want %v", what, got, want)
					}
				}
				// Packets of flows that were opened in the step before, in both directions.
				port := uint16(4000 + n - 1)
				if n > 0 && previous.out {
					quoted := ip(other, guest, 17, udp(80, port, 1))
					check("an error about an old flow", passes(Egress, proto, icmpError(unreachable, 0, quoted)), s.old)
					check("an answer of an old TCP flow", passes(Ingress, 6, tcp(80, port, syn|ack)), s.old)
					check("an acknowledgement of an old TCP flow", passes(Egress, 6, tcp(port, 80, ack)), s.old)
					check("an answer of an old UDP flow", passes(Ingress, 17, udp(80, port, 1)), s.old)
				}
				if n > 0 && previous.in {
					check("an answer to an old UDP flow", passes(Egress, 17, udp(81, port, 1)), s.oldIn)
				}
				port++
				check("TCP", passes(Egress, 6, tcp(port, 80, syn)), s.out)
				check("UDP", passes(Egress, 17, udp(port, 80, 1)), s.out)
				check("ICMP", passes(Egress, proto, echo(request, port)), s.out)
				check("another port", passes(Egress, 17, udp(port, 82, 1)), false)
				check("TCP in", passes(Ingress, 6, tcp(port, 81, syn)), s.in)
				check("UDP in", passes(Ingress, 17, udp(port, 81, 1)), s.in)
			})
			previous = s
		}
	}
}

// An open flow does not pass to the next endpoint with the address. A policy that is swapped in judges the endpoint
// that has it now.
func TestPrograms_flow_with_an_endpoint_after_a_swap(t *testing.T) {
	other := netip.MustParseAddr("10.200.3.8")
	for _, tt := range []struct {
		what   string
		claim  uint32
		tags   []string
		policy string
		passes bool
	}{
		{"the same endpoint and policy", 7, []string{"db"}, tagPolicy, true},
		{"another endpoint", 8, []string{"db"}, tagPolicy, false},
		{"no endpoint", 0, nil, tagPolicy, false},
		{"a policy without the tag", 7, []string{"db"}, "", false},
		{"a policy with another tag", 7, []string{"db"}, `rules: [{direction: egress, verdict: allow, agents: [x], protocols: [any], ports: [any]}]`, false},
	} {
		t.Run(tt.what, func(t *testing.T) {
			e := newEngine(t, DefaultFlows)
			if err := e.SetPeer(Peer{Address: other, Tags: []string{"db"}}, 7); err != nil {
				t.Fatal(err)
			}
			if err := e.Install(compile(t, tagPolicy)); err != nil {
				t.Fatal(err)
			}
			if err := e.ForgetState(); err != nil {
				t.Fatal(err)
			}
			if r, err := e.Run(Egress, sent(other, 17, udp(4000, 80, 1)), 0); err != nil || r.Action != 0 {
				t.Fatalf("%s by %s: %v", r.Verdict, r.Reason, err)
			}
			if tt.claim != 7 {
				if err := e.SetPeer(Peer{Address: other, Tags: tt.tags}, tt.claim); err != nil {
					t.Fatal(err)
				}
			}
			if err := e.Install(compile(t, tt.policy)); err != nil {
				t.Fatal(err)
			}
			r, err := e.Run(Ingress, got(other, 17, udp(80, 4000, 1)), 0)
			if err != nil || (r.Action == 0) != tt.passes {
				t.Errorf("%s by %s: %v, want it to pass: %v", r.Verdict, r.Reason, err, tt.passes)
			}
			if tt.claim == 7 {
				if err := e.SetPeer(Peer{Address: other}, 0); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

func TestCheckTags(t *testing.T) {
	for _, tt := range []struct {
		tags []string
		good bool
	}{
		{nil, true}, {[]string{"db", "eu-1", "team:a/b=c.d_e"}, true}, {[]string{"1", "2", "3", "4", "5", "6", "7", "8"}, true},
		{[]string{"1", "2", "3", "4", "5", "6", "7", "8", "9"}, false}, {[]string{"db", "db"}, false}, {[]string{""}, false},
		{[]string{"a b"}, false}, {[]string{"ä"}, false},
	} {
		err := CheckTags(tt.tags)
		if (err == nil) != tt.good || err != nil && !errors.Is(err, ErrPolicy) {
			t.Errorf("%q: %v", tt.tags, err)
		}
	}
}

// know returns the endpoint addresses that the programs in a directory know.
func know(t *testing.T, programs string) (known []string) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(programs, "agents"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var k [16]byte
	v := make([]byte, m.ValueSize())
	it := m.Iterate()
	for it.Next(&k, &v) {
		known = append(known, netip.AddrFrom16(k).Unmap().String())
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(known)
	return known
}

func TestAttach_endpoints_are_known_until_they_are_removed(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	if _, err := Attach(Config{Endpoint: "a1", Interface: "tap0", Root: root, Tags: []string{"a b"}}, compile(t, "")); !errors.Is(err, ErrPolicy) {
		t.Errorf("a tag that is none: %v", err)
	}
	attach := func(name string, tags ...string) (*Link, Config) {
		t.Helper()
		newTAP(t, name)
		cfg := Config{Endpoint: name, Interface: name, Root: root, Tags: tags}
		l, err := Attach(cfg, compile(t, ""))
		if err != nil {
			t.Fatal(err)
		}
		return l, cfg
	}
	// Programs of another version know the address's earlier endpoint.
	old := filepath.Join(root, "_programs-old")
	if err := os.MkdirAll(old, 0o700); err != nil {
		t.Fatal(err)
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 16, ValueSize: 72, MaxEntries: 4})
	if err != nil {
		t.Fatal(err)
	}
	stays := netip.MustParseAddr("10.200.9.9")
	for _, a := range []netip.Addr{own4, stays} {
		v := make([]byte, 72)
		v[0] = 1
		if err := m.Put(a.As16(), v); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(m.Pin(filepath.Join(old, "agents")), m.Close()); err != nil {
		t.Fatal(err)
	}
	// An endpoint uses them, so that the first Attach does not sweep them away.
	if err := os.Mkdir(filepath.Join(root, "o1"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink("old/5/9", filepath.Join(root, "o1", "slot")), os.Symlink("o1", filepath.Join(old, "slot-5"))); err != nil {
		t.Fatal(err)
	}

	first, cfg := attach("a1", "db")
	programs := filepath.Dir(onlyOther(t, root, old))
	both := []string{own4.String(), own6.String()}
	if got := know(t, programs); !slices.Equal(got, both) {
		t.Errorf("known: %v, want %v", got, both)
	}
	if got := know(t, old); !slices.Equal(got, []string{stays.String()}) {
		t.Errorf("programs of another version know %v, want only %v", got, stays)
	}
	// Its process ends, another endpoint gets its addresses, and only then are its remains removed.
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, _ := attach("b1", "web")
	if err := Remove(cfg); err != nil {
		t.Fatal(err)
	}
	if got := know(t, programs); !slices.Equal(got, both) {
		t.Errorf("known after the removal of who had the addresses before: %v, want %v", got, both)
	}
	if err := second.Remove(); err != nil {
		t.Fatal(err)
	}
	if got := know(t, programs); len(got) != 0 {
		t.Errorf("known after all are gone: %v", got)
	}
	if err := Remove(Config{Endpoint: "o1", Interface: "none0", Root: root}); err != nil {
		t.Error(err)
	}
}

// onlyOther returns the ready mark of the only complete programs.
func onlyOther(t *testing.T, root, old string) string {
	t.Helper()
	marks, err := filepath.Glob(filepath.Join(root, "_programs-*", "ready"))
	if err != nil || len(marks) != 1 || filepath.Dir(marks[0]) == old {
		t.Fatalf("programs that are complete: %v, %v", marks, err)
	}
	return marks[0]
}

// Endpoints of one host reach each other over the host's routing from one device to the other.
func TestLink_endpoints_reach_each_other_by_their_tags(t *testing.T) {
	ownNamespace(t)
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	root := testRoot(t)
	env := Environment{Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16")}}
	client, server := netip.MustParseAddr("10.200.3.7"), netip.MustParseAddr("10.200.3.8")
	up := func(name string, a netip.Addr, policy string, tags ...string) *Link {
		t.Helper()
		p, err := Parse([]byte(policy))
		if err != nil {
			t.Fatal(err)
		}
		s, err := Compile(p, Identity{Address4: a}, env)
		if err != nil {
			t.Fatal(err)
		}
		l, err := Attach(Config{Endpoint: name, Interface: name, Root: root, Tags: tags}, s)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Up(s.Identity()); err != nil {
			t.Fatal(err)
		}
		return l
	}
	const (
		toDB    = `rules: [{direction: egress, verdict: allow, agents: [db], protocols: [udp], ports: [5432]}]`
		fromWeb = `rules: [{direction: ingress, verdict: allow, agents: [web], protocols: [udp], ports: [5432]}]`
	)
	a := newTAP(t, "tapa")
	la := up("tapa", client, toDB, "web")
	query := func(text string) { a.send(sent(server, 17, udp(5000, 5432, []byte(text)...))) }
	query("nobody is there")
	if n := count(t, la, Egress, ReasonDefault); n != 1 {
		t.Errorf("%d denied before the other was there: %s", n, counters(la))
	}
	b := newTAP(t, "tapb")
	lb := up("tapb", server, fromWeb, "db", "eu")
	query("query")
	if f := b.receive(0x0800, 17); string(f[42:]) != "query" || netip.AddrFrom4([4]byte(f[26:30])) != client {
		t.Errorf("the other got %x", f)
	}
	b.send(sent(client, 17, udp(5432, 5000, []byte("answer")...)))
	if f := a.receive(0x0800, 17); string(f[42:]) != "answer" || netip.AddrFrom4([4]byte(f[26:30])) != server {
		t.Errorf("the answer is %x", f)
	}
	// The tag is not inherited: another endpoint gets the address, with another tag.
	if err := lb.Remove(); err != nil {
		t.Fatal(err)
	}
	before := count(t, la, Egress, ReasonDefault)
	query("it has gone")
	lb = up("tapb", server, fromWeb, "cache")
	query("another is there")
	if n := count(t, la, Egress, ReasonDefault); n != before+2 {
		t.Errorf("%d denied, want %d: %s", n, before+2, counters(la))
	}
	// The other side checks too: a client without the tag that it wants.
	if err := la.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := lb.Remove(); err != nil {
		t.Fatal(err)
	}
	la, lb = up("tapa", client, toDB), up("tapb", server, fromWeb, "db")
	query("who is that")
	if out, in := count(t, la, Egress, ReasonRule), count(t, lb, Ingress, ReasonDefault); out != 1 || in != 1 {
		t.Errorf("%d went out, %d were denied: %s; %s", out, in, counters(la), counters(lb))
	}
	if err := errors.Join(la.Remove(), lb.Remove()); err != nil {
		t.Fatal(err)
	}
}

// Tags change while others send. What the new tags open passes, what they no longer open is cut, and a flow that
// another tag opens continues.
func TestLink_tags_of_an_endpoint_change_while_it_is_there(t *testing.T) {
	ownNamespace(t)
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	root := testRoot(t)
	env := Environment{Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16")}}
	client, server := netip.MustParseAddr("10.200.3.7"), netip.MustParseAddr("10.200.3.8")
	up := func(name string, a netip.Addr, policy string, tags ...string) *Link {
		t.Helper()
		p, err := Parse([]byte(policy))
		if err != nil {
			t.Fatal(err)
		}
		s, err := Compile(p, Identity{Address4: a}, env)
		if err != nil {
			t.Fatal(err)
		}
		cfg := Config{Endpoint: name, Interface: name, Root: root, Tags: tags}
		l, err := Attach(cfg, s)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Up(s.Identity()); err != nil {
			t.Fatal(err)
		}
		return l
	}
	a, b := newTAP(t, "tapa"), newTAP(t, "tapb")
	la := up("tapa", client, `rules: [{direction: egress, verdict: allow, agents: [db, cache], protocols: [udp], ports: [5432]}]`, "web")
	lb := up("tapb", server, `rules: [{direction: ingress, verdict: allow, agents: [web], protocols: [udp], ports: [5432]}]`)
	passes := func(port uint16, want bool) {
		t.Helper()
		n := count(t, la, Egress, ReasonDefault)
		a.send(sent(server, 17, udp(port, 5432, []byte("query")...)))
		if denied := count(t, la, Egress, ReasonDefault) > n; denied == want {
			t.Fatalf("denied %v, want %v: %s", denied, !want, counters(la))
		}
		if want {
			if f := b.receive(0x0800, 17); string(f[42:]) != "query" {
				t.Fatalf("the other got %x", f)
			}
		}
	}
	set := func(l *Link, tags ...string) {
		t.Helper()
		if err := l.SetTags(tags); err != nil {
			t.Fatal(err)
		}
	}
	passes(5000, false)
	set(lb, "db")
	passes(5000, true)
	set(lb, "db", "cache")
	passes(5000, true)
	set(lb, "cache")
	passes(5000, true)
	before := count(t, la, Egress, ReasonFlow)
	if before != 2 {
		t.Errorf("%d packets were of a known flow, want 2: %s", before, counters(la))
	}
	set(lb)
	passes(5000, false)
	// Neither does an answer of the cut flow pass.
	n := count(t, la, Ingress, ReasonDefault)
	b.send(sent(client, 17, udp(5432, 5000, []byte("answer")...)))
	if count(t, la, Ingress, ReasonDefault) != n+1 {
		t.Errorf("the answer of a flow that was cut: %s", counters(la))
	}

	set(lb, "db")
	passes(5001, true)
	for what, tags := range map[string][]string{"one that is none": {"a b"}, "too many": {"1", "2", "3", "4", "5", "6", "7", "8", "9"}} {
		if err := lb.SetTags(tags); !errors.Is(err, ErrPolicy) {
			t.Errorf("%s: %v, want ErrPolicy", what, err)
		}
	}
	passes(5001, true)

	// The programs' pins are gone: SetTags fails, and the old tags stay.
	if err := os.RemoveAll(programsOf(t, root)); err != nil {
		t.Fatal(err)
	}
	if err := lb.SetTags(nil); !errors.Is(err, ErrGone) {
		t.Errorf("without the pins of the programs: %v, want ErrGone", err)
	}
	passes(5001, true)
	if err := errors.Join(la.Remove(), lb.Remove()); err != nil {
		t.Fatal(err)
	}
}

// SetTags fails for an endpoint whose address has passed to another.
func TestLink_tags_of_one_whose_address_is_another_s_are_refused(t *testing.T) {
	ownNamespace(t)
	root := testRoot(t)
	attach := func(name string) *Link {
		t.Helper()
		newTAP(t, name)
		l, err := Attach(Config{Endpoint: name, Interface: name, Root: root}, compile(t, ""))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	first, second := attach("a1"), attach("b1")
	if err := first.SetTags([]string{"db"}); !errors.Is(err, ErrGone) {
		t.Errorf("tags of the one before: %v, want ErrGone", err)
	}
	if err := second.SetTags([]string{"db"}); err != nil {
		t.Error(err)
	}
	if err := errors.Join(first.Remove(), second.Remove()); err != nil {
		t.Fatal(err)
	}
}
