package resolver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/netutil"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Limits of a resolver.
const (
	// MinPin and MaxPin bound how long an address stays pinned. The guest never gets a time to live above MaxPin.
	MinPin = 30 * time.Second
	MaxPin = 24 * time.Hour
	// DefaultRate is how many queries a second a policy allows that does not say.
	DefaultRate = 50
	// MaxAddresses is how many of an answer the guest gets.
	MaxAddresses = 16

	maxChain       = 8    // CNAMEs
	maxLabels      = 16   // of a name
	maxAtOnce      = 64   // queries
	maxConnections = 16   // over TCP
	maxUDP         = 1232 // bytes of a message, as is usual (DNS flag day 2020)
	askTimeout     = 3 * time.Second
)

// Pinner lets rules with a name match an address for a time: a link.Link.
type Pinner interface {
	Pin(name string, a netip.Addr, ttl time.Duration) error
}

// Exchanger sends one message to an upstream server and returns the answer.
type Exchanger func(ctx context.Context, m *dns.Msg, server netip.AddrPort) (*dns.Msg, error)

// Config configures a resolver.
type Config struct {
	Pinner Pinner
	// Exchange asks upstreams; nil asks over UDP, and over TCP if the answer is truncated.
	Exchange Exchanger
	// Now is the clock of the rate limit; nil is time.Now.
	Now func() time.Time
}

// Resolver is an endpoint's DNS server. Its methods are safe for concurrent use.
type Resolver struct {
	cfg   Config
	slots chan struct{}

	mu      sync.Mutex // guards what follows
	policy  *netpolicy.Policy
	spec    *netpolicy.Spec
	queries *rate.Limiter // nil without a policy that resolves

	answered, refused, rebound, dropped, failed atomic.Uint64
}

// New makes a resolver. It refuses everything until it has a policy.
func New(cfg Config) *Resolver {
	if cfg.Exchange == nil {
		cfg.Exchange = exchange
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Resolver{cfg: cfg, slots: make(chan struct{}, maxAtOnce)}
}

// SetPolicy replaces the policy and its Spec. Call it after Link.Swap.
func (r *Resolver) SetPolicy(p *netpolicy.Policy, s *netpolicy.Spec) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.policy, r.spec = p, s
	if p != nil && p.DNS != nil {
		perSecond := cmp.Or(p.DNS.QueriesPerSecond, DefaultRate)
		r.queries = rate.NewLimiter(rate.Limit(perSecond), 2*int(perSecond))
	}
}

// Stats returns the counts so far.
func (r *Resolver) Stats() netpolicy.ResolverStats {
	return netpolicy.ResolverStats{
		Answered: r.answered.Load(), Refused: r.refused.Load(), Rebound: r.rebound.Load(), Dropped: r.dropped.Load(), Failed: r.failed.Load(),
	}
}

func exchange(ctx context.Context, m *dns.Msg, server netip.AddrPort) (*dns.Msg, error) {
	c := dns.Client{Timeout: askTimeout, UDPSize: maxUDP}
	in, _, err := c.ExchangeContext(ctx, m, server.String())
	if err == nil && in.Truncated {
		c.Net = "tcp"
		in, _, err = c.ExchangeContext(ctx, m, server.String())
	}
	return in, err
}

// admit counts a query against the rate limit, and returns the current policy and its Spec.
func (r *Resolver) admit() (*netpolicy.Policy, *netpolicy.Spec, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.policy == nil || r.spec == nil || r.policy.DNS == nil {
		return nil, nil, true
	}
	return r.policy, r.spec, r.queries.AllowN(r.cfg.Now(), 1)
}

// Answer returns the answer to a query, nil for none.
func (r *Resolver) Answer(ctx context.Context, q *dns.Msg) *dns.Msg {
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	default:
		r.dropped.Add(1)
		return nil
	}
	policy, spec, ok := r.admit()
	if !ok {
		r.dropped.Add(1)
		return nil
	}
	if q.Response || q.Opcode != dns.OpcodeQuery || len(q.Question) != 1 {
		return r.refuse(q, dns.RcodeFormatError)
	}
	question := q.Question[0]
	name, ok := normal(question.Name)
	if policy == nil || !ok || question.Qclass != dns.ClassINET || !policy.HasName(name) {
		return r.refuse(q, dns.RcodeRefused)
	}
	switch question.Qtype {
	case dns.TypeA, dns.TypeAAAA:
	case dns.TypeHTTPS, dns.TypeSVCB:
		r.answered.Add(1)
		return reply(q, dns.RcodeSuccess)
	default:
		return r.refuse(q, dns.RcodeRefused)
	}
	if question.Qtype == dns.TypeAAAA && !spec.Identity().Address6.IsValid() {
		r.answered.Add(1)
		return reply(q, dns.RcodeSuccess)
	}
	in, err := r.ask(ctx, policy.DNS.Upstreams, name, question.Qtype)
	if err != nil {
		return r.fail(q)
	}
	return r.hand(q, name, question.Qtype, in, spec)
}

// hand makes the guest's answer from an upstream's.
func (r *Resolver) hand(q *dns.Msg, name string, qtype uint16, in *dns.Msg, spec *netpolicy.Spec) *dns.Msg {
	out := reply(q, in.Rcode)
	at, ok := dns.Fqdn(name), true
	for range maxChain {
		var target string
		for _, rr := range in.Answer {
			if c, is := rr.(*dns.CNAME); is && sameName(c.Hdr.Name, at) && c.Hdr.Class == dns.ClassINET {
				target = c.Target
				out.Answer = append(out.Answer, &dns.CNAME{Hdr: header(at, dns.TypeCNAME, c.Hdr.Ttl), Target: c.Target})
				break
			}
		}
		if target == "" {
			ok = false
			break
		}
		at = target
	}
	if ok {
		return r.fail(q) // the chain is too long, or a loop
	}
	if len(out.Answer) > 0 {
		// Keep the guest's spelling of the question.
		out.Answer[0].Header().Name = q.Question[0].Name
	}
	found, left := 0, 0
	for _, rr := range in.Answer {
		a, ttl, ok := address(rr, at, qtype)
		if !ok {
			continue
		}
		found++
		if !spec.Public(a) {
			r.rebound.Add(1)
			continue
		}
		if left == MaxAddresses {
			continue
		}
		left++
		life := min(max(time.Duration(ttl)*time.Second, MinPin), MaxPin)
		if err := r.cfg.Pinner.Pin(name, a, life); err != nil {
			return r.fail(q)
		}
		owner := at
		if sameName(at, dns.Fqdn(name)) {
			owner = q.Question[0].Name
		}
		h := header(owner, qtype, min(ttl, uint32(MaxPin/time.Second)))
		if qtype == dns.TypeA {
			out.Answer = append(out.Answer, &dns.A{Hdr: h, A: a.AsSlice()})
		} else {
			out.Answer = append(out.Answer, &dns.AAAA{Hdr: h, AAAA: a.AsSlice()})
		}
	}
	if found > 0 && left == 0 {
		return r.refuse(q, dns.RcodeRefused)
	}
	r.answered.Add(1)
	return out
}

func header(name string, t uint16, ttl uint32) dns.RR_Header {
	return dns.RR_Header{Name: name, Rrtype: t, Class: dns.ClassINET, Ttl: ttl}
}

// address returns the address in a record, if the record has this name and type.
func address(rr dns.RR, name string, qtype uint16) (a netip.Addr, ttl uint32, ok bool) {
	h := rr.Header()
	if h.Rrtype != qtype || h.Class != dns.ClassINET || !sameName(h.Name, name) {
		return a, 0, false
	}
	switch rr := rr.(type) {
	case *dns.A:
		a, ok = netip.AddrFromSlice(rr.A)
		a = a.Unmap()
		ok = ok && a.Is4()
	case *dns.AAAA:
		a, ok = netip.AddrFromSlice(rr.AAAA)
		ok = ok && a.Is6()
	}
	return a, h.Ttl, ok
}

// ask asks one upstream after the other.
func (r *Resolver) ask(ctx context.Context, servers []netip.AddrPort, name string, qtype uint16) (*dns.Msg, error) {
	err := errors.New("the policy has no upstreams")
	for _, s := range servers {
		m := new(dns.Msg)
		m.SetQuestion(dns.Fqdn(name), qtype)
		m.SetEdns0(maxUDP, false)
		var in *dns.Msg
		if in, err = r.cfg.Exchange(ctx, m, s); err != nil {
			continue
		}
		if in.Id != m.Id || !in.Response || len(in.Question) != 1 || !sameName(in.Question[0].Name, m.Question[0].Name) || in.Question[0].Qtype != qtype {
			err = fmt.Errorf("upstream %v has answered something else", s)
			continue
		}
		if in.Rcode != dns.RcodeSuccess && in.Rcode != dns.RcodeNameError {
			err = fmt.Errorf("upstream %v: %s", s, dns.RcodeToString[in.Rcode])
			continue
		}
		return in, nil
	}
	return nil, err
}

func reply(q *dns.Msg, rcode int) *dns.Msg {
	m := new(dns.Msg)
	m.SetRcode(q, rcode)
	m.RecursionAvailable = true
	m.AuthenticatedData = false
	if q.IsEdns0() != nil {
		m.SetEdns0(maxUDP, false)
	}
	return m
}

func (r *Resolver) refuse(q *dns.Msg, rcode int) *dns.Msg {
	r.refused.Add(1)
	return reply(q, rcode)
}

func (r *Resolver) fail(q *dns.Msg) *dns.Msg {
	r.failed.Add(1)
	return reply(q, dns.RcodeServerFailure)
}

func sameName(a, b string) bool { return strings.EqualFold(a, b) }

// normal returns a name in lower case and without its final dot, if a rule can match it.
func normal(fqdn string) (string, bool) {
	n := strings.ToLower(strings.TrimSuffix(fqdn, "."))
	ok := n != "" && len(n) <= 253 && strings.Count(n, ".") < maxLabels &&
		strings.Trim(n, "abcdefghijklmnopqrstuvwxyz0123456789-_.") == "" // no escapes
	return n, ok
}

// Listen makes the sockets of a resolver: port 53 of the gateway's address, on the endpoint's interface alone,
// since all endpoints have the same gateway.
func Listen(ctx context.Context, device string) (net.PacketConn, net.Listener, error) {
	cfg := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var inner error
		err := c.Control(func(fd uintptr) { inner = unix.BindToDevice(int(fd), device) })
		return errors.Join(err, inner)
	}}
	at := netip.AddrPortFrom(netpolicy.TheWire.Gateway4, 53).String()
	pc, err := cfg.ListenPacket(ctx, "udp4", at)
	if err != nil {
		return nil, nil, fmt.Errorf("listening for the queries of %s: %w", device, err)
	}
	ln, err := cfg.Listen(ctx, "tcp4", at)
	if err != nil {
		pc.Close()
		return nil, nil, fmt.Errorf("listening for the queries of %s: %w", device, err)
	}
	return pc, ln, nil
}

// Serve answers queries until the context ends. Then it closes the sockets and returns nil.
func (r *Resolver) Serve(ctx context.Context, pc net.PacketConn, ln net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		a := r.Answer(ctx, q)
		if a == nil {
			return
		}
		if w.LocalAddr().Network() == "udp" {
			a.Truncate(udpSize(q))
		}
		// A guest that does not read its answers harms only itself.
		_ = w.WriteMsg(a)
	})
	servers := []*dns.Server{
		{PacketConn: pc, Handler: handler, UDPSize: maxUDP},
		{Listener: netutil.LimitListener(ln, maxConnections), Handler: handler, ReadTimeout: askTimeout, WriteTimeout: askTimeout,
			MaxTCPQueries: maxAtOnce},
	}
	errs := make(chan error, len(servers))
	for _, s := range servers {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() { errs <- s.ActivateAndServe() }()
		select {
		case <-started:
		case err := <-errs:
			errs <- err
		}
	}
	var failed error
	left := len(servers)
	select {
	case <-ctx.Done():
	case failed = <-errs:
		left--
		cancel()
	}
	for _, s := range servers {
		if err := s.Shutdown(); err != nil && failed == nil && !strings.Contains(err.Error(), "not started") {
			failed = err
		}
	}
	pc.Close()
	ln.Close()
	for range left {
		if err := <-errs; err != nil && failed == nil && ctx.Err() == nil {
			failed = err
		}
	}
	if failed != nil {
		return fmt.Errorf("answering queries: %w", failed)
	}
	return nil
}

// udpSize returns how many bytes the answer to a query may have over UDP (RFC 6891, 6.2.3).
func udpSize(q *dns.Msg) int {
	o := q.IsEdns0()
	if o == nil {
		return dns.MinMsgSize
	}
	return min(max(int(o.UDPSize()), dns.MinMsgSize), maxUDP)
}

// Errors of Lookup.
var (
	ErrNoAddress = errors.New("no address")
	// ErrRefused means that no rule has the name, or none of its addresses is public.
	ErrRefused = errors.New("not a name of the policy's rules, or not one with a public address")
)

// Lookup finds the IPv4 addresses of a name as if the guest had asked for it: by the same rules and limits, and
// with the same pins. It returns at most 16, all of them public. The name is in lower case, without a final dot.
// Without an address, Lookup fails with ErrRefused or ErrNoAddress.
func (r *Resolver) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), dns.TypeA)
	a := r.Answer(ctx, q)
	var why string
	switch {
	case a == nil:
		why = "too many queries"
	case a.Rcode == dns.RcodeRefused:
		return nil, fmt.Errorf("finding %s: %w", name, ErrRefused)
	case a.Rcode != dns.RcodeSuccess:
		why = dns.RcodeToString[a.Rcode]
	default:
		var out []netip.Addr
		for _, rr := range a.Answer {
			if h, ok := rr.(*dns.A); ok {
				if ip, ok := netip.AddrFromSlice(h.A); ok {
					out = append(out, ip.Unmap())
				}
			}
		}
		if len(out) > 0 {
			return out, nil
		}
		why = "it has none"
	}
	return nil, fmt.Errorf("finding %s: %w: %s", name, ErrNoAddress, why)
}
