package link_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	. "github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/link"
	"github.com/drowse-vm/drowse/netpolicy/resolver"
)

// Names take memory of the process that pins them, which may serve many endpoints.
func TestPin_more_names_than_an_endpoint_may_have_are_refused(t *testing.T) {
	ownNamespace(t)
	newTAP(t, "tap0")
	l, _ := attach(t, "tap0", `dns: {upstreams: ["192.0.2.53:53"]}`)
	const each, most = 64, 4 * 4096
	a := netip.MustParseAddr("93.184.0.1")
	for i := range most {
		if i%each == 0 {
			a = a.Next()
		}
		if err := l.Pin(fmt.Sprintf("n%d.example.com", i), a, time.Hour); err != nil {
			t.Fatalf("name %d: %v", i, err)
		}
	}
	if err := l.Pin("more.example.com", a.Next(), time.Hour); !errors.Is(err, link.ErrPinsFull) {
		t.Errorf("one more: %v", err)
	}
	if err := l.Pin("n0.example.com", netip.MustParseAddr("93.184.0.2"), time.Hour); err != nil {
		t.Errorf("one that is there: %v", err)
	}
}

// The guest looks up a name over its TAP device. It can then reach the returned address, which it could not reach
// before.
func TestLink_name_opens_the_address_that_the_guest_was_given(t *testing.T) {
	ownNamespace(t)
	tap := newTAP(t, "tap0")
	const text = `
rules: [{direction: egress, verdict: allow, names: ["*.example.com"], protocols: [tcp], ports: [443], tls: [none]}]
dns: {upstreams: ["192.0.2.53:53"]}
`
	l, _ := attach(t, "tap0", text)
	p, err := Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	r := resolver.New(resolver.Config{Pinner: l, Exchange: func(_ context.Context, m *dns.Msg, _ netip.AddrPort) (*dns.Msg, error) {
		a := new(dns.Msg)
		a.SetReply(m)
		rr, err := dns.NewRR("www.example.com. 60 IN A 93.184.216.34")
		a.Answer = append(a.Answer, rr)
		return a, err
	}})
	r.SetPolicy(p, compile(t, text))
	pc, ln, err := resolver.Listen(t.Context(), "tap0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx, pc, ln) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})

	peer := netip.MustParseAddr("93.184.216.34")
	tap.send(sent(peer, 6, tcp(4000, 443, syn)))
	if n := count(t, l, Egress, ReasonDefault); n != 1 {
		t.Fatalf("%d packets denied before the name was asked for, want 1: %s", n, counters(l))
	}
	q := new(dns.Msg)
	q.SetQuestion("www.example.com.", dns.TypeA)
	message, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	tap.send(sent(wire.Gateway4, 17, udp(5353, 53, message...)))
	answer := tap.receive(0x0800, 17)
	var a dns.Msg
	if err := a.Unpack(answer[42:]); err != nil {
		t.Fatal(err)
	}
	if a.Rcode != dns.RcodeSuccess || len(a.Answer) != 1 || a.Answer[0].(*dns.A).A.String() != peer.String() {
		t.Fatalf("the guest got %v", &a)
	}
	passed := count(t, l, Egress, ReasonRule)
	tap.send(sent(peer, 6, tcp(4000, 443, syn)))
	if n := count(t, l, Egress, ReasonRule); n != passed+1 {
		t.Errorf("%d packets passed by a rule, want %d: %s", n, passed+1, counters(l))
	}
	tap.send(sent(peer, 6, tcp(4000, 80, syn)))
	tap.send(sent(netip.MustParseAddr("93.184.216.35"), 6, tcp(4000, 443, syn)))
	if n := count(t, l, Egress, ReasonDefault); n != 3 {
		t.Errorf("%d packets denied, want 3: %s", n, counters(l))
	}
	// The address stays open over a swap to a policy that also has the name.
	if err := l.Swap(compile(t, text)); err != nil {
		t.Fatal(err)
	}
	tap.send(sent(peer, 6, tcp(4001, 443, syn)))
	if n := count(t, l, Egress, ReasonRule); n != passed+2 {
		t.Errorf("%d packets passed by a rule after the swap, want %d: %s", n, passed+2, counters(l))
	}
	if err := l.Swap(compile(t, "")); err != nil {
		t.Fatal(err)
	}
	tap.send(sent(peer, 6, tcp(4002, 443, syn)))
	if n := count(t, l, Egress, ReasonDefault); n != 4 {
		t.Errorf("%d packets denied after the name was taken away, want 4: %s", n, counters(l))
	}
}
