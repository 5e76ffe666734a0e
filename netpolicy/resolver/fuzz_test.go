package resolver

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/drowse-vm/drowse/netpolicy"
)

// pinList records the pins.
type pinList struct {
	names []string
	addrs []netip.Addr
	lives []time.Duration
}

func (p *pinList) Pin(name string, a netip.Addr, life time.Duration) error {
	p.names, p.addrs, p.lives = append(p.names, name), append(p.addrs, a), append(p.lives, life)
	return nil
}

func packed(f *testing.F, m *dns.Msg) []byte {
	f.Helper()
	b, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	return b
}

// FuzzAnswer is a guest's query and an upstream's answer, in wire format. The guest gets public addresses of names
// in rules. The resolver pins them, and passes on nothing else of the query or of the answer.
func FuzzAnswer(f *testing.F) {
	for _, records := range [][]string{
		{"example.com. 300 IN A 93.184.216.34", "example.com. 0 IN A 127.0.0.1", "example.com. 4294967295 IN A 10.200.0.9"},
		{"example.com. 1 IN CNAME a.org.", "A.org. 1 IN CNAME example.com."},
		{"example.com. 1 IN CNAME x.cdn.example.net.", "x.cdn.example.net. 1 IN A 93.184.216.35", "other.org. 1 IN A 93.184.216.36", `example.com. 1 IN TXT "x"`},
		{"example.com. 60 IN AAAA 2606:4700::1111", "example.com. 60 IN AAAA ::ffff:10.0.0.1", "example.com. 60 IN AAAA fe80::1"},
		{"example.com. 60 CH A 93.184.216.34"},
	} {
		for _, qtype := range []uint16{dns.TypeA, dns.TypeAAAA} {
			q := query("eXample.com", qtype)
			q.SetEdns0(4096, true)
			a := new(dns.Msg)
			a.SetReply(q)
			for _, r := range records {
				rr, err := dns.NewRR(r)
				if err != nil {
					f.Fatal(err)
				}
				a.Answer = append(a.Answer, rr)
			}
			f.Add(packed(f, q), packed(f, a), true)
		}
	}
	for _, q := range []*dns.Msg{query("other.org", dns.TypeA), query("x.cdn.example.net", dns.TypeHTTPS), query(".", dns.TypeNS), query(`a\.b.cdn.example.net`, dns.TypeA), query("example.com", dns.TypeANY)} {
		f.Add(packed(f, q), packed(f, q), false)
	}
	p, err := netpolicy.Parse([]byte(policyText))
	if err != nil {
		f.Fatal(err)
	}
	spec, err := netpolicy.Compile(p, netpolicy.Identity{Address4: netip.MustParseAddr("10.200.3.7"), Address6: netip.MustParseAddr("fd77::7")}, netpolicy.Environment{
		Host: []netip.Addr{netip.MustParseAddr("93.184.216.99")}, Endpoints: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16")},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, asked, said []byte, matches bool) {
		q := new(dns.Msg)
		if q.Unpack(asked) != nil {
			return // the server answers these itself
		}
		before := q.Copy()
		pins := &pinList{}
		questions := 0
		r := New(Config{Pinner: pins, Exchange: func(_ context.Context, m *dns.Msg, _ netip.AddrPort) (*dns.Msg, error) {
			questions++
			name, ok := normal(m.Question[0].Name)
			if wire, err := m.Pack(); !ok || !p.HasName(name) || len(m.Question) != 1 || len(m.Extra) != 1 || err != nil || len(wire) > 300 {
				t.Fatalf("an upstream is asked %v", m)
			}
			in := new(dns.Msg)
			if err := in.Unpack(said); err != nil {
				return nil, err
			}
			if matches {
				in.Id, in.Response, in.Question = m.Id, true, m.Question
			}
			return in, nil
		}})
		r.SetPolicy(p, spec)
		a := r.Answer(t.Context(), q)
		if a == nil {
			t.Fatal("there is no answer")
		}
		if questions > len(p.DNS.Upstreams) {
			t.Fatalf("upstreams are asked %d times", questions)
		}
		if st := r.Stats(); st.Answered+st.Refused+st.Failed != 1 {
			t.Fatalf("%+v for one query", st)
		}
		if len(pins.names) > MaxAddresses {
			t.Fatalf("%d addresses are pinned", len(pins.names))
		}
		for i, n := range pins.names {
			if asked, ok := normal(before.Question[0].Name); !ok || n != asked || !p.HasName(n) {
				t.Fatalf("pinned for %q, asked for %q", n, before.Question[0].Name)
			}
			if !spec.Public(pins.addrs[i]) || pins.lives[i] < MinPin || pins.lives[i] > MaxPin {
				t.Fatalf("%v is pinned for %v", pins.addrs[i], pins.lives[i])
			}
		}
		// As sent over TCP and over UDP.
		for _, udp := range []bool{false, true} {
			if udp {
				a.Truncate(udpSize(before))
			}
			wire, err := a.Pack()
			if err != nil {
				// miekg/dns unpacks names that it does not pack. Nothing is sent then.
				continue
			}
			if udp && len(wire) > maxUDP || len(wire) > dns.MaxMsgSize {
				t.Fatalf("%d bytes, over UDP: %v", len(wire), udp)
			}
			got := new(dns.Msg)
			if err := got.Unpack(wire); err != nil {
				t.Fatalf("%x: %v", wire, err)
			}
			if got.Id != before.Id || !got.Response || got.AuthenticatedData || len(got.Ns) > 0 || len(got.Question) > 1 {
				t.Fatalf("%v is answered by %v", before, got)
			}
			for _, rr := range got.Extra {
				if _, ok := rr.(*dns.OPT); !ok || len(got.Extra) > 1 || before.IsEdns0() == nil {
					t.Fatalf("%v comes along", rr)
				}
			}
			chain, addresses := 0, 0
			for _, rr := range got.Answer {
				h := rr.Header()
				if h.Class != dns.ClassINET {
					t.Fatalf("%v is given", rr)
				}
				var at netip.Addr
				switch rr := rr.(type) {
				case *dns.CNAME:
					if chain++; chain > maxChain {
						t.Fatalf("a chain of %d names", chain)
					}
					continue
				case *dns.A:
					at, _ = netip.AddrFromSlice(rr.A.To4())
				case *dns.AAAA:
					at, _ = netip.AddrFromSlice(rr.AAAA)
				default:
					t.Fatalf("%v is given", rr)
				}
				addresses++
				ok := false
				for i, a := range pins.addrs {
					ok = ok || a == at && time.Duration(h.Ttl)*time.Second <= max(pins.lives[i], MinPin)
				}
				if !ok || h.Rrtype != before.Question[0].Qtype {
					t.Fatalf("%v is given, and %v are pinned for %v", rr, pins.addrs, pins.lives)
				}
			}
			if addresses > 0 && !strings.EqualFold(got.Question[0].Name, before.Question[0].Name) {
				t.Fatalf("%v is answered by %v", before, got)
			}
		}
	})
}
