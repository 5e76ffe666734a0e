package network

import (
	"net/netip"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
)

// Calls of the keeper to the network process.
const (
	callPrepare    = "prepare"    // prepareOrder -> nothing: it has confined itself
	callPolicy     = "policy"     // policyOrder -> nothing: connections that it does not open are cut
	callConnection = "connection" // arrival, with a descriptor -> nothing
	callStats      = "stats"      // nothing -> counts
	postSecret     = "secret-set" // name: a secret that was asked for may be there
)

// Calls of the network process to the keeper, which judges each.
const (
	callAsk       = "ask"        // resolver.Question -> bytes
	callPin       = "pin"        // pin -> nothing
	callOpensName = "opens-name" // named -> bool
	callLives     = "lives"      // number of a flow -> bool
	callDialName  = "dial-name"  // named -> nothing, with a descriptor
	callOpens     = "opens"      // opening -> opened
	callDial      = "dial"       // opening -> nothing, with a descriptor
	callSecret    = "secret"     // name -> secretValue
	callRefused   = "refused"    // refusal -> nothing
	callProxied   = "proxied"    // proxy.Event -> nothing
)

// How fast the network process may call its keeper, and a user's process the helper. A query takes up to 17 calls, and
// a policy may allow many queries.
const callBurst, callsPerSecond = 20_000, 10_000

// maxCalls is how many calls may be in progress: each connection may wait for its peer.
const maxCalls = 1024

func options(h rpc.Handler) rpc.Options { return rpc.Options{Handler: h, MaxCalls: maxCalls} }

type prepareOrder struct {
	Confined bool        `json:"confined,omitempty"`
	Roots    []byte      `json:"roots,omitempty"` // proxy.ExtraRoots
	Policy   policyOrder `json:"policy"`
}

// policyOrder is a policy with what it is compiled for.
type policyOrder struct {
	Policy      *netpolicy.Policy     `json:"policy"`
	Identity    netpolicy.Identity    `json:"identity"`
	Environment netpolicy.Environment `json:"environment"`
	Proxy       *proxy.Delegate       `json:"proxy,omitempty"`
}

// Kinds of arrivals.
const (
	arrivesDNS   = "dns"
	arrivesTLS   = "tls"
	arrivesProxy = "proxy"
)

// arrival is a connection of the guest. Flow is that of a checked one, and Port the port by which the host knows it.
type arrival struct {
	Kind string       `json:"kind"`
	Flow flow.Checked `json:"flow"`
	Port uint16       `json:"port,omitempty"`
}

type pin struct {
	Name    string        `json:"name"`
	Address netip.Addr    `json:"address"`
	TTL     time.Duration `json:"ttl"`
}

type named struct {
	Flow uint64 `json:"flow"`
	Name string `json:"name"`
}

type opening struct {
	Peer netip.AddrPort `json:"peer"`
	Name string         `json:"name,omitempty"`
}

type opened struct {
	Rule string `json:"rule"`
	OK   bool   `json:"ok"`
}

type secretValue struct {
	Value string `json:"value,omitempty"`
	OK    bool   `json:"ok"`
}

type refusal struct {
	Flow   uint64           `json:"flow"`
	Reason netpolicy.Reason `json:"reason"`
	Name   string           `json:"name,omitempty"`
}

type counts struct {
	DNS   netpolicy.ResolverStats `json:"dns"`
	TLS   netpolicy.TLSStats      `json:"tls"`
	Proxy *netpolicy.ProxyStats   `json:"proxy,omitempty"`
}

// plus returns the sum of the counts, with what is open in b.
func (c counts) plus(b counts) counts {
	c.DNS.Answered += b.DNS.Answered
	c.DNS.Refused += b.DNS.Refused
	c.DNS.Rebound += b.DNS.Rebound
	c.DNS.Dropped += b.DNS.Dropped
	c.DNS.Failed += b.DNS.Failed
	c.TLS.Passed += b.TLS.Passed
	c.TLS.Refused += b.TLS.Refused
	c.TLS.Cut += b.TLS.Cut
	c.TLS.Failed += b.TLS.Failed
	if c.Proxy == nil && b.Proxy == nil {
		return c.nowOpen(b)
	}
	var p, q netpolicy.ProxyStats
	if c.Proxy != nil {
		p = *c.Proxy
	}
	if b.Proxy != nil {
		q = *b.Proxy
	}
	p.Requests += q.Requests
	p.Tunnels += q.Tunnels
	p.Injected += q.Injected
	p.Refused += q.Refused
	p.Busy += q.Busy
	p.Cut += q.Cut
	c.Proxy = &p
	return c.nowOpen(b)
}

// nowOpen returns the counts with what is open in b.
func (c counts) nowOpen(b counts) counts {
	c.TLS.Open = b.TLS.Open
	if c.Proxy != nil {
		p := *c.Proxy
		p.Open = 0
		if b.Proxy != nil {
			p.Open = b.Proxy.Open
		}
		c.Proxy = &p
	}
	return c
}

type none struct{}
