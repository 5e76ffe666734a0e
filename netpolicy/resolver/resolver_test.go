package resolver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/link"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const policyText = `
rules:
  - {direction: egress, verdict: allow, names: [example.com, "*.cdn.example.net"], protocols: [tcp], ports: [443]}
dns: {upstreams: ["192.0.2.53:53", "192.0.2.54:53"], queries_per_second: 5}
`

type pins struct {
	mu   sync.Mutex
	all  []string
	fail error
}

func (p *pins) Pin(name string, a netip.Addr, ttl time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = append(p.all, fmt.Sprintf("%s %v %v", name, a, ttl))
	return p.fail
}

// zone answers with records in zone file format.
type zone struct {
	records []string
	rcode   int
	err     error
	edit    func(*dns.Msg)
	asked   []*dns.Msg
}

func (z *zone) exchange(_ context.Context, m *dns.Msg, _ netip.AddrPort) (*dns.Msg, error) {
	z.asked = append(z.asked, m)
	if z.err != nil {
		return nil, z.err
	}
	a := new(dns.Msg)
	a.SetRcode(m, z.rcode)
	for _, r := range z.records {
		rr, err := dns.NewRR(r)
		if err != nil {
			return nil, err
		}
		a.Answer = append(a.Answer, rr)
	}
	if z.edit != nil {
		z.edit(a)
	}
	return a, nil
}

func newResolver(t *testing.T, z *zone, six bool) (*Resolver, *pins) {
	t.Helper()
	p, err := netpolicy.Parse([]byte(policyText))
	if err != nil {
		t.Fatal(err)
	}
	id := netpolicy.Identity{Address4: netip.MustParseAddr("10.200.3.7")}
	if six {
		id.Address6 = netip.MustParseAddr("fd77::7")
	}
	s, err := netpolicy.Compile(p, id, netpolicy.Environment{Host: []netip.Addr{netip.MustParseAddr("93.184.216.99")}, Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16")}})
	if err != nil {
		t.Fatal(err)
	}
	got := &pins{}
	r := New(Config{Pinner: got, Exchange: z.exchange, Now: func() time.Time { return time.Unix(1, 0) }})
	r.SetPolicy(p, s)
	return r, got
}

func query(name string, t uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), t)
	return m
}

func TestAnswer_queries_and_answers(t *testing.T) {
	chain := []string{"example.com. 100 IN CNAME a.cdn.org.", "a.cdn.org. 60 IN CNAME b.cdn.org.", "b.cdn.org. 5 IN A 93.184.216.34", "b.cdn.org. 500 IN A 93.184.216.35"}
	circle := []string{"example.com. 100 IN CNAME a.org.", "a.org. 60 IN CNAME example.com."}
	var long []string
	for i := range maxChain + 1 {
		from := fmt.Sprintf("c%d.org.", i)
		if i == 0 {
			from = "example.com."
		}
		long = append(long, fmt.Sprintf("%s 60 IN CNAME c%d.org.", from, i+1))
	}
	long = append(long, fmt.Sprintf("c%d.org. 60 IN A 93.184.216.34", maxChain+1))
	tests := []struct {
		what    string
		name    string
		qtype   uint16
		zone    zone
		six     bool
		rcode   int
		answers int
		pins    []string
		noAsk   bool
	}{
		{what: "an allowed name", name: "example.com", qtype: dns.TypeA, zone: zone{records: []string{"example.com. 300 IN A 93.184.216.34"}}, answers: 1, pins: []string{"example.com 93.184.216.34 5m0s"}},
		{what: "in capitals", name: "EXAMPLE.com", qtype: dns.TypeA, zone: zone{records: []string{"example.com. 300 IN A 93.184.216.34"}}, answers: 1, pins: []string{"example.com 93.184.216.34 5m0s"}},
		{what: "a short life is 30 seconds", name: "example.com", qtype: dns.TypeA, zone: zone{records: []string{"example.com. 1 IN A 93.184.216.34"}}, answers: 1, pins: []string{"example.com 93.184.216.34 30s"}},
		{what: "a long life is a day", name: "example.com", qtype: dns.TypeA, zone: zone{records: []string{"example.com. 9999999 IN A 93.184.216.34"}}, answers: 1, pins: []string{"example.com 93.184.216.34 24h0m0s"}},
		{what: "below a wildcard", name: "x.y.cdn.example.net", qtype: dns.TypeA, zone: zone{records: []string{"x.y.cdn.example.net. 60 IN A 93.184.216.34"}}, answers: 1, pins: []string{"x.y.cdn.example.net 93.184.216.34 1m0s"}},
		{what: "a chain", name: "example.com", qtype: dns.TypeA, zone: zone{records: chain}, answers: 4, pins: []string{"example.com 93.184.216.34 30s", "example.com 93.184.216.35 8m20s"}},
		{what: "no such name", name: "example.com", qtype: dns.TypeA, zone: zone{rcode: dns.RcodeNameError}, rcode: dns.RcodeNameError},
		{what: "no addresses", name: "example.com", qtype: dns.TypeA},
		{what: "IPv6", name: "example.com", qtype: dns.TypeAAAA, six: true, zone: zone{records: []string{"example.com. 60 IN AAAA 2606:4700::1111"}}, answers: 1, pins: []string{"example.com 2606:4700::1111 1m0s"}},
		{what: "IPv6 without an address", name: "example.com", qtype: dns.TypeAAAA, noAsk: true},
		{what: "HTTPS records", name: "example.com", qtype: dns.TypeHTTPS, noAsk: true},
		{what: "one address of two is private", name: "example.com", qtype: dns.TypeA, zone: zone{records: []string{"example.com. 60 IN A 192.168.1.1", "example.com. 60 IN A 93.184.216.34"}}, answers: 1, pins: []string{"example.com 93.184.216.34 1m0s"}},
		{what: "records of other names are left out", name: "example.com", qtype: dns.TypeA, zone: zone{records: []string{"evil.org. 60 IN A 93.184.216.34", "example.com. 60 IN A 93.184.216.35", "example.com. 60 IN TXT secret"}}, answers: 1, pins: []string{"example.com 93.184.216.35 1m0s"}},

		{what: "another name", name: "example.org", qtype: dns.TypeA, rcode: dns.RcodeRefused, noAsk: true},
		{what: "below a name", name: "www.example.com", qtype: dns.TypeA, rcode: dns.RcodeRefused, noAsk: true},
		{what: "the apex of a wildcard", name: "cdn.example.net", qtype: dns.TypeA, rcode: dns.RcodeRefused, noAsk: true},
		{what: "a name that ends alike", name: "evilcdn.example.net", qtype: dns.TypeA, rcode: dns.RcodeRefused, noAsk: true},
		{what: "the root", name: ".", qtype: dns.TypeA, rcode: dns.RcodeRefused, noAsk: true},
		{what: "an escaped dot", name: `a\.cdn.example.net`, qtype: dns.TypeA, rcode: dns.RcodeRefused, noAsk: true},
		{what: "many labels", name: strings.Repeat("a.", maxLabels) + "cdn.example.net", qtype: dns.TypeA, rcode: dns.RcodeRefused, noAsk: true},
		{what: "text", name: "example.com", qtype: dns.TypeTXT, rcode: dns.RcodeRefused, noAsk: true},
		{what: "everything", name: "example.com", qtype: dns.TypeANY, rcode: dns.RcodeRefused, noAsk: true},
		{what: "a circle", name: "example.com", qtype: dns.TypeA, zone: zone{records: circle}, rcode: dns.RcodeServerFailure},
		{what: "a chain that is too long", name: "example.com", qtype: dns.TypeA, zone: zone{records: long}, rcode: dns.RcodeServerFailure},
		{what: "upstreams that do not answer", name: "example.com", qtype: dns.TypeA, zone: zone{err: errors.New("down")}, rcode: dns.RcodeServerFailure},
		{what: "upstreams that fail", name: "example.com", qtype: dns.TypeA, zone: zone{rcode: dns.RcodeServerFailure}, rcode: dns.RcodeServerFailure},
		{what: "an answer to another question", name: "example.com", qtype: dns.TypeA, zone: zone{edit: func(m *dns.Msg) { m.Question[0].Name = "evil.org." }}, rcode: dns.RcodeServerFailure},
		{what: "an answer of another id", name: "example.com", qtype: dns.TypeA, zone: zone{edit: func(m *dns.Msg) { m.Id++ }}, rcode: dns.RcodeServerFailure},
	}
	for _, a := range []string{"10.0.0.1", "192.168.0.1", "172.31.255.1", "127.0.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "100.64.0.1", "10.200.3.8", "10.200.3.7", "93.184.216.99", "255.255.255.255"} {
		tests = append(tests, tests[0])
		x := &tests[len(tests)-1]
		x.what, x.zone.records, x.answers, x.pins, x.rcode = "rebinding to "+a, []string{"example.com. 60 IN A " + a}, 0, nil, dns.RcodeRefused
	}
	for _, a := range []string{"::1", "::ffff:10.0.0.1", "::ffff:93.184.216.34", "fd00::1", "fe80::1", "fd00:ec2::254", "64:ff9b::a00:1", "2002:a00:1::1"} {
		tests = append(tests, tests[0])
		x := &tests[len(tests)-1]
		x.what, x.qtype, x.six, x.zone.records, x.answers, x.pins, x.rcode = "rebinding to "+a, dns.TypeAAAA, true, nil, 0, nil, dns.RcodeRefused
		x.zone.edit = func(m *dns.Msg) {
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: header("example.com.", dns.TypeAAAA, 60), AAAA: net.ParseIP(a)})
		}
	}
	for _, tt := range tests {
		t.Run(tt.what, func(t *testing.T) {
			z := tt.zone
			r, got := newResolver(t, &z, tt.six)
			q := query(tt.name, tt.qtype)
			a := r.Answer(t.Context(), q)
			if a == nil {
				t.Fatal("no answer")
			}
			if a.Id != q.Id || !a.Response || a.Rcode != tt.rcode || len(a.Answer) != tt.answers {
				t.Errorf("%v, want %s with %d records", a, dns.RcodeToString[tt.rcode], tt.answers)
			}
			if fmt.Sprint(got.all) != fmt.Sprint(tt.pins) {
				t.Errorf("pinned %v, want %v", got.all, tt.pins)
			}
			if tt.noAsk && len(z.asked) > 0 {
				t.Errorf("the upstream was asked %v", z.asked)
			}
			if _, err := a.Pack(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAnswer_pin_that_fails_gives_no_address(t *testing.T) {
	z := &zone{records: []string{"example.com. 300 IN A 93.184.216.34"}}
	r, p := newResolver(t, z, false)
	p.fail = link.ErrPinsFull
	if a := r.Answer(t.Context(), query("example.com", dns.TypeA)); a.Rcode != dns.RcodeServerFailure || len(a.Answer) != 0 {
		t.Errorf("%v, want SERVFAIL", a)
	}
}

func TestAnswer_options_of_the_guest_are_not_passed_on(t *testing.T) {
	z := &zone{}
	r, _ := newResolver(t, z, false)
	q := query("example.com", dns.TypeA)
	q.SetEdns0(4096, true)
	q.IsEdns0().Option = append(q.IsEdns0().Option, &dns.EDNS0_LOCAL{Code: 65001, Data: []byte("secret")})
	q.Extra = append(q.Extra, &dns.TXT{Hdr: header("x.", dns.TypeTXT, 0), Txt: []string{"secret"}})
	r.Answer(t.Context(), q)
	if len(z.asked) != 1 {
		t.Fatalf("%d questions", len(z.asked))
	}
	if wire, err := z.asked[0].Pack(); err != nil || strings.Contains(string(wire), "secret") {
		t.Errorf("%v: %q", err, wire)
	}
}

func TestAnswer_more_than_the_rate_gives_nothing(t *testing.T) {
	r, _ := newResolver(t, &zone{}, false)
	answered := 0
	for range 100 {
		if r.Answer(t.Context(), query("example.com", dns.TypeA)) != nil {
			answered++
		}
	}
	if answered != 10 || r.Stats().Dropped != 90 {
		t.Errorf("%d answers, %+v, want 10 of 100", answered, r.Stats())
	}
}

func TestAnswer_more_at_once_than_the_bound_gives_nothing(t *testing.T) {
	r, _ := newResolver(t, &zone{}, false)
	asked, more := make(chan struct{}), make(chan struct{})
	r.cfg.Exchange = func(context.Context, *dns.Msg, netip.AddrPort) (*dns.Msg, error) {
		asked <- struct{}{}
		<-more
		return nil, errors.New("none")
	}
	r.policy.DNS.QueriesPerSecond = 1000
	r.SetPolicy(r.policy, r.spec)
	var answering sync.WaitGroup
	for range maxAtOnce {
		answering.Go(func() { r.Answer(t.Context(), query("example.com", dns.TypeA)) })
		<-asked
	}
	for range 3 {
		if a := r.Answer(t.Context(), query("example.com", dns.TypeA)); a != nil {
			t.Errorf("query %d is answered: %v", maxAtOnce, a)
		}
	}
	if n := r.Stats().Dropped; n != 3 {
		t.Errorf("%d were dropped, want 3", n)
	}
	go func() {
		for range asked { // each also asks the second upstream
		}
	}()
	close(more)
	answering.Wait()
	close(asked)
	r.cfg.Exchange = (&zone{}).exchange
	if a := r.Answer(t.Context(), query("example.com", dns.TypeA)); a == nil {
		t.Error("there is no room when all have ended")
	}
}

func TestAnswer_without_a_policy_refuses(t *testing.T) {
	r := New(Config{Pinner: &pins{}})
	if a := r.Answer(t.Context(), query("example.com", dns.TypeA)); a.Rcode != dns.RcodeRefused {
		t.Errorf("%v", a)
	}
}

func TestServe_answers_over_udp_and_tcp_and_ends(t *testing.T) {
	r, _ := newResolver(t, &zone{records: []string{"example.com. 300 IN A 93.184.216.34"}}, false)
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx, pc, ln) }()
	for network, at := range map[string]string{"udp": pc.LocalAddr().String(), "tcp": ln.Addr().String()} {
		c := dns.Client{Net: network, Timeout: time.Minute}
		a, _, err := c.Exchange(query("example.com", dns.TypeA), at)
		if err != nil || len(a.Answer) != 1 {
			t.Errorf("%s: %v, %v", network, a, err)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestLookup_gives_what_the_guest_would_get(t *testing.T) {
	for what, c := range map[string]struct {
		name    string
		records []string
		rcode   int
		want    []string
		err     error
	}{
		"a name of a rule":           {"example.com", []string{"example.com. 60 IN A 93.184.216.34", "example.com. 60 IN A 93.184.216.35"}, 0, []string{"93.184.216.34", "93.184.216.35"}, nil},
		"some that lead inside":      {"example.com", []string{"example.com. 60 IN A 127.0.0.1", "example.com. 60 IN A 10.0.0.1", "example.com. 60 IN A 93.184.216.34"}, 0, []string{"93.184.216.34"}, nil},
		"all lead inside":            {"example.com", []string{"example.com. 60 IN A 127.0.0.1", "example.com. 60 IN A 10.200.3.8", "example.com. 60 IN A 93.184.216.99"}, 0, nil, ErrRefused},
		"a name of no rule":          {"other.org", []string{"other.org. 60 IN A 93.184.216.34"}, 0, nil, ErrRefused},
		"a name that does not exist": {"example.com", nil, dns.RcodeNameError, nil, ErrNoAddress},
		"a name without addresses":   {"example.com", nil, 0, nil, ErrNoAddress},
		"a server that fails":        {"example.com", nil, dns.RcodeServerFailure, nil, ErrNoAddress},
	} {
		r, pinned := newResolver(t, &zone{records: c.records, rcode: c.rcode}, false)
		got, err := r.Lookup(t.Context(), c.name)
		var text []string
		for _, a := range got {
			text = append(text, a.String())
		}
		if !errors.Is(err, c.err) || strings.Join(text, " ") != strings.Join(c.want, " ") || len(pinned.all) != len(c.want) {
			t.Errorf("%s: %v, %v, pinned %v; want %v, %v", what, text, err, pinned.all, c.want, c.err)
		}
	}
	// A lookup counts like the guest's own queries.
	r, _ := newResolver(t, &zone{records: []string{"example.com. 60 IN A 93.184.216.34"}}, false)
	failed := 0
	for range 20 {
		if _, err := r.Lookup(t.Context(), "example.com"); errors.Is(err, ErrNoAddress) {
			failed++
		}
	}
	if failed != 10 {
		t.Errorf("%d of 20 lookups were refused at 5 a second, want 10", failed)
	}
}

func TestServe_connection_beyond_the_bound_waits_until_another_ends(t *testing.T) {
	r, _ := newResolver(t, &zone{}, false)
	r.policy.DNS.QueriesPerSecond = 1000
	r.SetPolicy(r.policy, r.spec)
	asked, more := make(chan struct{}, 4*maxConnections), make(chan struct{})
	r.cfg.Exchange = func(_ context.Context, m *dns.Msg, _ netip.AddrPort) (*dns.Msg, error) {
		asked <- struct{}{}
		<-more
		return new(dns.Msg).SetReply(m), nil
	}
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx, pc, ln) }()
	var conns []*dns.Conn
	for range maxConnections + 1 {
		c, err := net.Dial("tcp4", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conn := &dns.Conn{Conn: c}
		defer conn.Close()
		if err := conn.WriteMsg(query("example.com", dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for range maxConnections {
		<-asked
	}
	select {
	case <-asked:
		t.Errorf("%d connections are served at once", maxConnections+1)
	case <-time.After(50 * time.Millisecond): // on a busy host a missing bound may go unnoticed
	}
	close(more)
	for i, conn := range conns {
		if a, err := conn.ReadMsg(); err != nil || a.Rcode != dns.RcodeSuccess {
			t.Fatalf("connection %d: %v, %v", i, a, err)
		}
		conn.Close() // then the last one is served
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
