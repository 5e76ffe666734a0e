package flowtest

import (
	"math/big"
	"net/netip"
	"slices"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

// Model is the state of one endpoint. It is not for concurrent use.
type Model struct {
	rules  *refmodel.Model
	policy *netpolicy.Policy
	id     netpolicy.Identity
	env    netpolicy.Environment
	gen    int
	flows  map[flowKey]*flow
	// aliases are flows whose names are checked, by what the host knows them by.
	aliases map[flowKey]flowKey
	limits  [2]account
	pins    map[netip.Addr][]pin
}

type pin struct {
	name    string
	expires int64
}

// New is an endpoint that has no flows yet.
func New(p *netpolicy.Policy, id netpolicy.Identity, env netpolicy.Environment) *Model {
	m := &Model{flows: map[flowKey]*flow{}, aliases: map[flowKey]flowKey{}, pins: map[netip.Addr][]pin{}}
	m.Swap(p, id, env)
	return m
}

// Swap replaces the policy; flows and limits stay.
func (m *Model) Swap(p *netpolicy.Policy, id netpolicy.Identity, env netpolicy.Environment) {
	if p == nil {
		p = &netpolicy.Policy{}
	}
	m.policy, m.id, m.env = p, id, env
	m.gen++
	m.rules = refmodel.New(p, id, env)
}

// Forget drops all flows, the use of limits, and pinned names.
func (m *Model) Forget() {
	clear(m.flows)
	clear(m.aliases)
	clear(m.pins)
	m.limits = [2]account{}
}

// Pin says that the resolver gave the guest an address for a name, until a time.
func (m *Model) Pin(name string, a netip.Addr, expires int64) {
	m.pins[a] = append(m.pins[a], pin{name, expires})
}

// Decision is what became of a frame.
type Decision struct {
	Verdict netpolicy.Verdict
	Reason  netpolicy.Reason
	// Rule is the index in Policy.Rules; -1 is none or an implicit one.
	Rule int
	// Bytes is what goes on, translated; nil if nothing does.
	Bytes []byte
}

type flowKey struct {
	peer                netip.Addr
	peerPort, guestPort uint16
	proto               byte
}

type flow struct {
	state  string
	seen   int64
	opener netpolicy.Direction
	gen    int
	fins   map[netpolicy.Direction]bool
	via    uint16 // the guest's port on the host, if its name is checked
	// names are those that the peer's address was given for when it was opened, of those that rules have.
	names []string
}

func (f *flow) fresh(now int64) bool { return f != nil && now < f.seen+int64(f.lifetime()) }

func (f *flow) lifetime() time.Duration {
	switch f.state {
	case "opening":
		return time.Minute
	case "established":
		return 4 * time.Hour
	case "answered":
		return 3 * time.Minute
	}
	return 30 * time.Second
}

// account is what has been used of the limits of a direction.
type account struct {
	packet, bit, conn *big.Int
	used              *big.Int
}

// spend takes units from a limit at a time and returns its new state, or false.
func spend(tat *big.Int, r *netpolicy.Rate, least, units uint64, now int64) (*big.Int, bool) {
	if r == nil {
		return tat, true
	}
	burst := r.Burst
	if burst == 0 {
		burst = max(r.PerSecond/10, least)
	}
	mult := new(big.Int).Lsh(big.NewInt(1e9), 20)
	mult.Div(mult, new(big.Int).SetUint64(r.PerSecond))
	cost := func(n uint64) *big.Int {
		c := new(big.Int).Mul(mult, new(big.Int).SetUint64(n))
		return c.Rsh(c, 20)
	}
	limit := cost(burst)
	if most := new(big.Int).Lsh(big.NewInt(1), 60); limit.Cmp(most) > 0 {
		limit = most
	}
	next := big.NewInt(now)
	if tat != nil && tat.Cmp(next) > 0 {
		next.Set(tat)
	}
	next.Add(next, cost(units))
	if new(big.Int).Sub(next, big.NewInt(now)).Cmp(limit) > 0 {
		return tat, false
	}
	return next, true
}

// take counts a packet, or says which limit it exceeds.
func (m *Model) take(d netpolicy.Direction, bytes, segments, opens uint64, now int64) netpolicy.Reason {
	a, r, quota := &m.limits[0], m.policy.Limits.Egress, m.policy.Quota.EgressBytes
	if r.Packets == nil {
		r.Packets = &netpolicy.Rate{PerSecond: 2e6, Burst: 4e5}
	}
	if r.Connections == nil {
		r.Connections = &netpolicy.Rate{PerSecond: 200, Burst: 2000}
	}
	if d == netpolicy.Ingress {
		a, r, quota = &m.limits[1], m.policy.Limits.Ingress, m.policy.Quota.IngressBytes
	}
	if a.used == nil {
		a.used = new(big.Int)
	}
	used := new(big.Int).Add(a.used, new(big.Int).SetUint64(bytes))
	if quota != nil && used.Cmp(new(big.Int).SetUint64(*quota)) > 0 {
		return netpolicy.ReasonQuota
	}
	packet, ok := spend(a.packet, r.Packets, 128, segments, now)
	if !ok {
		return netpolicy.ReasonPacketRate
	}
	bit, ok := spend(a.bit, r.Bits, 2<<20, bytes*8, now)
	if !ok {
		return netpolicy.ReasonBitRate
	}
	conn, ok := spend(a.conn, r.Connections, 32, opens, now)
	if !ok {
		return netpolicy.ReasonConnRate
	}
	*a = account{packet, bit, conn, used}
	return 0
}

// live finds a flow that has not expired, and that the policy of now would open.
func (m *Model) live(k flowKey, now int64) *flow {
	f := m.flows[k]
	if !f.fresh(now) {
		return nil
	}
	if f.gen != m.gen {
		port := k.peerPort
		if f.opener == netpolicy.Ingress {
			port = k.guestPort
		}
		q := m.question(f.opener, k, port, now)
		q.Names = f.names
		a := m.rules.Ask(q)
		if a.Verdict != netpolicy.Allow || f.via == 0 && a.Checked || f.via != 0 && m.env.TLSPort == 0 {
			delete(m.flows, k)
			return nil
		}
		f.gen = m.gen
	}
	return f
}

func (m *Model) open(d netpolicy.Direction, k flowKey, port uint16, now int64) refmodel.Answer {
	return m.rules.Ask(m.question(d, k, port, now))
}

func (m *Model) question(d netpolicy.Direction, k flowKey, port uint16, now int64) refmodel.Question {
	q := refmodel.Question{Direction: d, Peer: k.peer, Port: port, Protocol: netpolicy.ICMP}
	switch k.proto {
	case refmodel.ProtoTCP:
		q.Protocol = netpolicy.TCP
	case refmodel.ProtoUDP:
		q.Protocol = netpolicy.UDP
	default:
		q.Port = 0
	}
	if d == netpolicy.Egress {
		for _, p := range m.pins[k.peer] {
			if now < p.expires {
				q.Names = append(q.Names, p.name)
			}
		}
	}
	return q
}

// OpensName says whether a flow that the guest has opened goes on, when its client has asked for a server name; empty
// is none.
func (m *Model) OpensName(peer netip.AddrPort, guestPort uint16, name string) bool {
	k := flowKey{peer.Addr(), peer.Port(), guestPort, refmodel.ProtoTCP}
	q := m.question(netpolicy.Egress, k, peer.Port(), 0)
	q.Names, q.Hello, q.ServerName = m.flows[k].names, true, name
	return m.rules.Ask(q).Verdict == netpolicy.Allow
}

// Judge decides about a frame at a time in nanoseconds.
func (m *Model) Judge(f refmodel.Frame, now int64) Decision {
	d := Decision{Verdict: netpolicy.Deny, Rule: -1}
	p, reason := m.rules.Parse(f)
	x := &packet{Packet: p, m: m}
	d.Reason = reason
	if d.Reason == netpolicy.ReasonLink {
		if r := m.take(f.Direction, uint64(len(f.Bytes)), 1, 0, now); r != 0 {
			d.Reason = r
			return d
		}
		d.Verdict, d.Bytes = netpolicy.Allow, f.Bytes
		return d
	}
	if d.Reason == 0 {
		d = x.decide(now)
	}
	if d.Verdict == netpolicy.Allow {
		d.Bytes = x.translate()
	}
	return d
}

func (x *packet) denied(r netpolicy.Reason) Decision {
	return Decision{Verdict: netpolicy.Deny, Reason: r, Rule: -1}
}

// size is the bytes and packets after segmentation.
func (x *packet) size() (bytes, segments uint64) {
	bytes, segments = uint64(len(x.Bytes)), 1
	payload := len(x.Bytes) - x.Headers
	if x.SegmentSize > 0 && payload > x.SegmentSize {
		segments = uint64((payload + x.SegmentSize - 1) / x.SegmentSize)
		bytes += (segments - 1) * uint64(x.Headers)
	}
	return bytes, segments
}

func (x *packet) decide(now int64) Decision {
	m := x.m
	if m.rules.Floor(x.Peer) {
		return x.denied(netpolicy.ReasonFloor)
	}
	bytes, segments := x.size()
	pass := func(reason netpolicy.Reason, opens uint64) Decision {
		if r := m.take(x.Direction, bytes, segments, opens, now); r != 0 {
			return x.denied(r)
		}
		return Decision{Verdict: netpolicy.Allow, Reason: reason, Rule: -1}
	}
	icmp := x.Proto == refmodel.ProtoICMP || x.Proto == refmodel.ProtoICMPv6
	if icmp && x.ICMP() == "" {
		return x.denied(netpolicy.ReasonICMPType)
	}
	key := flowKey{x.Peer, x.PeerPort, x.GuestPort, x.Proto}
	if main, ok := m.aliases[key]; ok {
		// From the host's end of a connection whose name is checked; the guest has no business there.
		f := m.flows[main]
		if x.Spoofed(x.Peer) {
			return x.denied(netpolicy.ReasonSrcInterface)
		}
		if x.Egress || !f.fresh(now) || f.via != x.GuestPort {
			return x.denied(netpolicy.ReasonNoFlow)
		}
		if x.Flags&2 != 0 && x.Flags&16 == 0 {
			return x.denied(netpolicy.ReasonTCPState)
		}
		key, x.via = main, f.via
		x.Peer, x.PeerPort, x.GuestPort = main.peer, main.peerPort, main.guestPort
	} else if f := m.flows[key]; f.fresh(now) && f.via != 0 {
		if !x.Egress {
			return x.denied(netpolicy.ReasonNoFlow)
		}
		x.via = f.via
	} else if x.Spoofed(x.Peer) {
		return x.denied(netpolicy.ReasonSrcInterface)
	}
	var opens bool
	var next *flow // what the flow becomes
	switch x.Proto {
	case refmodel.ProtoTCP:
		f := m.live(key, now)
		syn, ack, rst, fin := x.Flags&2 != 0, x.Flags&16 != 0, x.Flags&4 != 0, x.Flags&1 != 0
		switch {
		case syn && !ack:
			if f != nil && f.opener != x.Direction && f.state != "opening" {
				return x.denied(netpolicy.ReasonTCPState)
			}
			opens, next = true, &flow{state: "opening"}
		case f == nil:
			return x.denied(netpolicy.ReasonNoFlow)
		case f.state == "opening" && rst:
			next = f.with("closing")
		case f.state == "opening" && syn && f.opener != x.Direction:
			next = f.with("established")
		case f.state == "opening", syn && f.opener == x.Direction:
			return x.denied(netpolicy.ReasonTCPState)
		default:
			next = f.with(f.state)
			if fin {
				next.fins[x.Direction] = true
			}
			if rst || len(next.fins) == 2 {
				next.state = "closing"
			}
		}
	case refmodel.ProtoUDP:
		f := m.live(key, now)
		switch {
		case f == nil:
			opens, next = true, &flow{state: "one way"}
		case f.opener != x.Direction:
			next = f.with("answered")
		default:
			next = f.with(f.state)
		}
	default:
		switch x.ICMP() {
		case "error":
			r := x.related(now)
			if r != 0 {
				return x.denied(r)
			}
			return pass(netpolicy.ReasonRelated, 0)
		case "request":
			f := m.live(key, now)
			if f != nil && f.opener == x.Direction {
				next = f.with("echo")
			} else {
				opens, next = true, &flow{state: "echo"}
			}
		case "reply":
			f := m.live(key, now)
			if f == nil || f.opener == x.Direction {
				return x.denied(netpolicy.ReasonNoFlow)
			}
			next = f.with("echo")
		default:
			return x.denied(netpolicy.ReasonICMPType)
		}
	}
	if !opens {
		d := pass(netpolicy.ReasonFlow, 0)
		if d.Verdict == netpolicy.Allow {
			next.seen = now
			m.flows[key] = next
		}
		return d
	}
	port := x.PeerPort
	if !x.Egress {
		port = x.GuestPort
	}
	a := m.open(x.Direction, key, port, now)
	if a.Verdict != netpolicy.Allow {
		return Decision{Verdict: a.Verdict, Reason: a.Reason, Rule: a.Rule}
	}
	if a.Checked && (x.Six || m.env.TLSPort == 0) {
		return Decision{Verdict: netpolicy.Deny, Reason: netpolicy.ReasonTLSOff, Rule: a.Rule}
	}
	d := pass(a.Reason, 1)
	d.Rule = a.Rule
	if d.Verdict == netpolicy.Allow && a.Checked {
		if !m.reserve(x, key, now) {
			return Decision{Verdict: netpolicy.Deny, Reason: netpolicy.ReasonFlowTable, Rule: a.Rule}
		}
	} else {
		x.via = 0
	}
	if d.Verdict == netpolicy.Allow {
		next.via = x.via
		next.seen, next.opener, next.gen, next.fins = now, x.Direction, m.gen, map[netpolicy.Direction]bool{}
		next.names = m.namedByRules(m.question(x.Direction, key, port, now).Names)
		m.flows[key] = next
	}
	return d
}

// namedByRules are the names that a rule has.
func (m *Model) namedByRules(names []string) (out []string) {
	for _, n := range names {
		if slices.ContainsFunc(m.policy.Rules, func(r netpolicy.Rule) bool {
			return slices.ContainsFunc(r.Names, func(pattern string) bool { return refmodel.NameMatches(pattern, n) })
		}) {
			out = append(out, n)
		}
	}
	return out
}

// reserve finds the guest's port on the host for a flow whose name is checked.
func (m *Model) reserve(x *packet, key flowKey, now int64) bool {
	port := x.via
	if port == 0 {
		port = key.guestPort
	}
	for range 8 {
		alias := flowKey{netpolicy.TheWire.Gateway4, m.env.TLSPort, max(port, 1), refmodel.ProtoTCP}
		port += 7919
		main, taken := m.aliases[alias]
		if taken && main != key {
			f := m.flows[main]
			taken = f.fresh(now) && f.via == alias.guestPort
		} else {
			// An ordinary flow of the host's may be there.
			taken = !taken && m.flows[alias] != nil
		}
		if !taken {
			m.aliases[alias] = key
			x.via = alias.guestPort
			return true
		}
	}
	return false
}

// with is a copy of a flow in another state.
func (f *flow) with(state string) *flow {
	n := *f
	n.state = state
	n.fins = map[netpolicy.Direction]bool{}
	for d := range f.fins {
		n.fins[d] = true
	}
	return &n
}
