package e2b

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// networkBody is the network in a request.
type networkBody struct {
	AllowOut       []string        `json:"allowOut"`
	DenyOut        []string        `json:"denyOut"`
	AllowPublic    *bool           `json:"allowPublicTraffic"`
	Host           string          `json:"maskRequestHost"`
	HTTPSPorts     []uint16        `json:"httpsPorts"`
	EgressProxy    json.RawMessage `json:"egressProxy"`
	Rules          json.RawMessage `json:"rules"`
	AllowIPs       json.RawMessage `json:"allowIn"`
	InternetAccess *bool           `json:"allow_internet_access"`
}

var nameRE = lazyregexp.New(`^(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)

// prefixOf reads an address or a prefix.
func prefixOf(text string) (netip.Prefix, bool) {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p.Masked(), true
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, a.BitLen()), true
}

// network returns the network that a request asks for. internet is the request's own allow_internet_access, and private
// says whether private addresses may be allowed.
func (b networkBody) network(internet *bool, private bool) (spec.E2BNetwork, error) {
	for _, f := range []struct {
		name string
		raw  json.RawMessage
		why  string
	}{
		{"network.egressProxy", b.EgressProxy, "traffic does not pass through a proxy of the client's"},
		{"network.rules", b.Rules, "requests are not rewritten: drowse's own policies put secrets into them"},
		{"network.allowIn", b.AllowIPs, "close the ports with allowPublicTraffic"},
	} {
		if !answers.Absent(f.raw) {
			return spec.E2BNetwork{}, answers.Refused(f.name, f.why)
		}
	}
	n := spec.E2BNetwork{
		AllowOut: b.AllowOut, DenyOut: b.DenyOut, Host: b.Host, HTTPSPorts: b.HTTPSPorts, Private: b.AllowPublic != nil && !*b.AllowPublic,
	}
	if slices.Contains(b.HTTPSPorts, 0) || len(b.HTTPSPorts) > spec.MaxGatewayPorts {
		return n, answers.Fail(400, "network.httpsPorts: use at most %d ports from 1 to 65535", spec.MaxGatewayPorts)
	}
	if b.InternetAccess != nil {
		internet = b.InternetAccess
	}
	n.NoInternet = internet != nil && !*internet
	names := false
	for _, e := range n.AllowOut {
		if _, ok := prefixOf(e); ok {
			continue
		}
		if !nameRE.MatchString(e) {
			return n, answers.Fail(400, "network.allowOut: use addresses, prefixes such as 10.0.0.0/8, and names such as *.example.com")
		}
		names = true
	}
	for _, e := range n.DenyOut {
		if _, ok := prefixOf(e); !ok {
			return n, answers.Fail(400, "network.denyOut: use addresses and prefixes: names cannot be denied")
		}
	}
	if names && !deniesAll(n) {
		return n, answers.Fail(400, "network.allowOut has names: they need 0.0.0.0/0 in network.denyOut")
	}
	p := policy(n, &netpolicy.DNS{})
	if p.CheckTenant(private) != nil {
		return n, answers.Fail(403, "network.allowOut: a key with an owner opens no private addresses: see `drowse serve --owners-private`")
	}
	return n, p.Validate()
}

// deniesAll reports whether only what AllowOut says is allowed.
func deniesAll(n spec.E2BNetwork) bool {
	for _, e := range n.DenyOut {
		if p, ok := prefixOf(e); ok && p.Bits() == 0 && p.Addr().Is4() {
			return true
		}
	}
	return n.NoInternet
}

// policy returns the network policy for a network: E2B's default lets the guest reach all public addresses. What is
// allowed comes before what is denied. Addresses of the host, of other VMs and of metadata services stay closed to all.
func policy(n spec.E2BNetwork, dns *netpolicy.DNS) *netpolicy.Policy {
	all := func(r netpolicy.Rule, v netpolicy.Verdict) netpolicy.Rule {
		r.Direction, r.Verdict = netpolicy.Egress, v
		r.Protocols, r.Ports = []netpolicy.Protocol{netpolicy.AnyProtocol}, []netpolicy.PortRange{netpolicy.AnyPort}
		return r
	}
	p := &netpolicy.Policy{}
	var allow, deny netpolicy.Rule
	named := false
	for _, e := range n.AllowOut {
		prefix, ok := prefixOf(e)
		switch {
		case ok && prefix.Bits() == 0:
			allow.Groups = []netpolicy.Group{netpolicy.Public}
		case ok:
			allow.CIDRs = append(allow.CIDRs, netpolicy.CIDR{Prefix: prefix})
		default:
			allow.Names, named = append(allow.Names, strings.ToLower(e)), true
		}
	}
	for _, e := range n.DenyOut {
		if prefix, ok := prefixOf(e); ok {
			deny.CIDRs = append(deny.CIDRs, netpolicy.CIDR{Prefix: prefix})
		}
	}
	if len(n.AllowOut) > 0 {
		allow.Name = "allowOut"
		p.Rules = append(p.Rules, all(allow, netpolicy.Allow))
	}
	if len(deny.CIDRs) > 0 {
		deny.Name = "denyOut"
		p.Rules = append(p.Rules, all(deny, netpolicy.Reject))
	}
	if !deniesAll(n) { // 0.0.0.0/0 is meant to be all, also over IPv6
		p.Rules = append(p.Rules, all(netpolicy.Rule{Name: "internet", Groups: []netpolicy.Group{netpolicy.Public}}, netpolicy.Allow))
	}
	if !deniesAll(n) || named {
		p.DNS = dns
	}
	return p
}
