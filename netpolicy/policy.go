package netpolicy

import (
	"cmp"
	"encoding"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Limits of a policy. Validate refuses a policy beyond one of them.
const (
	MaxFileBytes  = 1 << 20 // of a policy file
	MaxRules      = 1024    // including the implicit ones, see flatten
	MaxCIDRs      = 4096    // in all rules
	MaxPortRanges = 4096    // in all rules
	MaxNames      = 1024    // in all rules
	MaxTags       = 1024    // in all rules
	MaxOwnTags    = 8       // per endpoint
	MaxPublished  = 64
	MaxUpstreams  = 8
	MaxRuleName   = 64 // bytes
	MaxTag        = 64 // bytes
	MaxInjections = 64
	MaxHeader     = 64    // bytes of a header's name, and of a prefix
	MaxFlows      = 65536 // entries of the flow table
	MinFlows      = 64
	DefaultFlows  = 4096
)

// Direction is a packet's direction: Egress leaves the guest, Ingress comes to it.
type Direction string

// Directions.
const (
	Egress  Direction = "egress"
	Ingress Direction = "ingress"
)

// Verdict is the decision on a packet. The zero value denies.
type Verdict string

// Reject is Deny with an answer to the guest. On ingress the sender gets none.
const (
	Allow  Verdict = "allow"
	Deny   Verdict = "deny"
	Reject Verdict = "reject"
)

// Directions and Verdicts are in the order of their numbers in the programs.
var (
	Directions = [...]Direction{Egress, Ingress}
	Verdicts   = [...]Verdict{Deny, Allow, Reject}
)

// Group names a set of addresses; the package comment says which.
type Group string

// Groups.
const (
	Any       Group = "any"
	Public    Group = "public"
	Private   Group = "private"
	Host      Group = "host"
	Metadata  Group = "metadata"
	LinkLocal Group = "link-local"
	Loopback  Group = "loopback"
	Multicast Group = "multicast"
)

// Protocol is the protocol of a rule. ICMP is ICMPv6 on IPv6.
type Protocol string

// Protocols.
const (
	TCP         Protocol = "tcp"
	UDP         Protocol = "udp"
	ICMP        Protocol = "icmp"
	AnyProtocol Protocol = "any"
)

// Policy says what one endpoint may send and receive. The zero value denies all.
type Policy struct {
	// Version is the version of the format: 1. Absent is 1.
	Version int `json:"version,omitempty" yaml:"version,omitempty"`
	// Default is the verdict where no rule matches.
	Default Defaults `json:"default" yaml:"default"`
	// Rules are tried in order; the first that matches decides.
	Rules []Rule `json:"rules" yaml:"rules"`
	// Publish are ports of the guest that the host may reach.
	Publish []Published `json:"publish,omitempty" yaml:"publish,omitempty"`
	// DNS is the endpoint's resolver; nil is none.
	DNS *DNS `json:"dns,omitempty" yaml:"dns,omitempty"`
	// Proxy is the endpoint's HTTP proxy; nil is none.
	Proxy *Proxy `json:"proxy,omitempty" yaml:"proxy,omitempty"`
	// Limits are limits of rate. On egress, nil packets and connections mean DefaultPackets and
	// DefaultConnections. Any other nil is no limit.
	Limits Limits `json:"limits" yaml:"limits"`
	// Quota is the quota of bytes; nil is none.
	Quota Quota `json:"quota" yaml:"quota"`
	// Flows is how many established or answered flows are tracked at once, and how many others; 0 is DefaultFlows.
	// Beyond it, the least recently used flow of the same kind is forgotten.
	Flows int `json:"flows,omitempty" yaml:"flows,omitempty"`
}

// Defaults are the verdicts when no rule matches. The zero value denies.
type Defaults struct {
	Egress  Verdict `json:"egress,omitempty" yaml:"egress,omitempty"`
	Ingress Verdict `json:"ingress,omitempty" yaml:"ingress,omitempty"`
}

// Rule is one rule. Cidrs, groups, names and agents together are its peers.
type Rule struct {
	// Name is for people, in events and explanations. It has at most MaxRuleName bytes.
	Name      string    `json:"name,omitempty" yaml:"name,omitempty"`
	Direction Direction `json:"direction" yaml:"direction"`
	// Verdict; empty denies.
	Verdict Verdict  `json:"verdict" yaml:"verdict"`
	CIDRs   []CIDR   `json:"cidrs" yaml:"cidrs"`
	Groups  []Group  `json:"groups" yaml:"groups"`
	Names   []string `json:"names" yaml:"names"`
	// Endpoints are tags of other endpoints. Policy files have always called this list agents.
	Endpoints []string    `json:"agents" yaml:"agents"`
	Protocols []Protocol  `json:"protocols" yaml:"protocols"`
	Ports     []PortRange `json:"ports" yaml:"ports"`
	// TLS are the ports at which Names must also be the server name of TLS; CheckNowhere alone means none. Absent,
	// null or empty is 443. Only a rule with names can have it.
	TLS []CheckedPorts `json:"tls,omitempty" yaml:"tls,omitempty"`
}

// CheckedPorts are ports at which the names of a rule are checked. The zero value is
// CheckNowhere.
type CheckedPorts struct{ PortRange }

// CheckNowhere is written "none": the names are not checked.
var CheckNowhere = CheckedPorts{}

// String returns "none", or the text of the PortRange.
func (c CheckedPorts) String() string {
	if c == CheckNowhere {
		return "none"
	}
	return c.PortRange.String()
}

// MarshalText writes what String says.
func (c CheckedPorts) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads "none", "any", "443" or "8000-8443".
func (c *CheckedPorts) UnmarshalText(text []byte) error {
	if string(text) == "none" {
		*c = CheckNowhere
		return nil
	}
	if err := c.PortRange.UnmarshalText(text); err != nil {
		return fmt.Errorf("%w; none is for names that are not checked", err)
	}
	return nil
}

// checkedPorts returns the ports at which the rule's names are checked.
func (r *Rule) checkedPorts() []PortRange {
	switch {
	case len(r.Names) == 0:
		return nil
	case len(r.TLS) == 0:
		return []PortRange{{443, 443}}
	}
	var out []PortRange
	for _, c := range r.TLS {
		if c != CheckNowhere {
			out = append(out, c.PortRange)
		}
	}
	return out
}

// ChecksNames reports whether a rule's names are checked at any port, so that Environment.TLSPort is needed.
func (p *Policy) ChecksNames() bool {
	for i := range p.Rules {
		if p.Rules[i].ChecksNames() {
			return true
		}
	}
	return false
}

// ChecksNames reports whether the rule's names are checked at any port.
func (r *Rule) ChecksNames() bool { return len(r.checkedPorts()) > 0 }

// Published is a port of the guest that the host may reach, and the host's address where it is published. The
// runner of the VM does the listening.
type Published struct {
	// Listen is the host's address and port.
	Listen netip.AddrPort `json:"listen" yaml:"listen"`
	// Port of the guest.
	Port uint16 `json:"port" yaml:"port"`
	// Protocol is tcp or udp.
	Protocol Protocol `json:"protocol" yaml:"protocol"`
}

// DNS is the resolver of an endpoint, at the gateway's address.
type DNS struct {
	// Upstreams are the servers that it asks, address and port.
	Upstreams []netip.AddrPort `json:"upstreams" yaml:"upstreams"`
	// QueriesPerSecond is how many queries the guest may send; 0 is 50.
	QueriesPerSecond int `json:"queries_per_second,omitempty" yaml:"queries_per_second,omitempty"`
}

// Limits are limits of rate for each direction.
type Limits struct {
	Egress  Rates `json:"egress" yaml:"egress"`
	Ingress Rates `json:"ingress" yaml:"ingress"`
}

// The limits of a guest whose policy sets none: each connection may occupy the host's connection tracking for
// minutes, and each packet is work for the host. Installing packages stays far below both.
var (
	DefaultPackets     = Rate{PerSecond: 2_000_000, Burst: 400_000}
	DefaultConnections = Rate{PerSecond: 200, Burst: 2000}
)

// OrDefault returns the limits in force of r, which are those of egress.
func (r Rates) OrDefault() Rates {
	r.Packets = cmp.Or(r.Packets, &DefaultPackets)
	r.Connections = cmp.Or(r.Connections, &DefaultConnections)
	return r
}

// Rates are the limits of one direction; nil is no limit, except for packets and connections of egress.
type Rates struct {
	// Bits per second, with a burst in bits.
	Bits *Rate `json:"bits,omitempty" yaml:"bits,omitempty"`
	// Packets per second.
	Packets *Rate `json:"packets,omitempty" yaml:"packets,omitempty"`
	// Connections are flows opened per second.
	Connections *Rate `json:"connections,omitempty" yaml:"connections,omitempty"`
}

// Rate is a limit: units per second, and how many may come in one burst.
type Rate struct {
	PerSecond uint64 `json:"per_second" yaml:"per_second"`
	// Burst in units. 0 is a tenth of a second's worth, at least 2 MiBit, 128
	// packets or 32 connections.
	Burst uint64 `json:"burst,omitempty" yaml:"burst,omitempty"`
}

// Quota is how many bytes may pass in total; nil is no limit.
type Quota struct {
	EgressBytes  *uint64 `json:"egress_bytes,omitempty" yaml:"egress_bytes,omitempty"`
	IngressBytes *uint64 `json:"ingress_bytes,omitempty" yaml:"ingress_bytes,omitempty"`
}

// CIDR is a prefix of addresses with no bits set beyond its length. Written without a length it is one address.
// The zero value is no prefix, and no valid policy has it.
type CIDR struct{ netip.Prefix }

var (
	_ encoding.TextUnmarshaler = (*CIDR)(nil)
	_ encoding.TextMarshaler   = CIDR{}
)

// UnmarshalText reads "192.0.2.0/24" or "192.0.2.1".
func (c *CIDR) UnmarshalText(text []byte) error {
	s := string(text)
	if len(s) > 64 {
		return fmt.Errorf("a CIDR of %d bytes: it has at most 64", len(s))
	}
	p, err := netip.ParsePrefix(s)
	if a, none := netip.ParseAddr(s); none == nil {
		if a.Zone() != "" {
			return fmt.Errorf("CIDR %q has a zone: leave it out", s)
		}
		p, err = netip.PrefixFrom(a, a.BitLen()), nil
	}
	if err != nil {
		return fmt.Errorf("CIDR %q is not like 192.0.2.0/24 or 2001:db8::/32", s)
	}
	if err := checkPrefix(p); err != nil {
		return err
	}
	c.Prefix = p
	return nil
}

func checkPrefix(p netip.Prefix) error {
	switch {
	case !p.IsValid():
		return fmt.Errorf("a CIDR is empty: remove it")
	case p.Addr().Zone() != "":
		return fmt.Errorf("CIDR %v has a zone: leave it out", p)
	case p.Addr().Is4In6():
		return fmt.Errorf("CIDR %v is IPv4 in IPv6: write it as IPv4", p)
	case p != p.Masked():
		return fmt.Errorf("CIDR %v has bits behind its length: write %v", p, p.Masked())
	}
	return nil
}

// PortRange is the ports from First to Last. The zero value is no range, and no valid policy has it.
type PortRange struct{ First, Last uint16 }

// AnyPort is every port.
var AnyPort = PortRange{1, 65535}

// String returns "any", "80" or "8000-8080".
func (r PortRange) String() string {
	switch {
	case r == AnyPort:
		return "any"
	case r.First == r.Last:
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// MarshalText writes what String says.
func (r PortRange) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads "any", "80" or "8000-8080".
func (r *PortRange) UnmarshalText(text []byte) error {
	s := string(text)
	if s == "any" {
		*r = AnyPort
		return nil
	}
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	a, err1 := parsePort(first)
	b, err2 := parsePort(last)
	if err1 != nil || err2 != nil || a > b {
		return fmt.Errorf("port %.20q is not like 443, 8000-8080 or any (ports are 1 to 65535)", s)
	}
	*r = PortRange{a, b}
	return nil
}

// parsePort accepts decimal digits alone.
func parsePort(s string) (uint16, error) {
	if s == "" || len(s) > 5 || strings.Trim(s, "0123456789") != "" || s[0] == '0' {
		return 0, strconv.ErrSyntax
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err
}
