package spec

import (
	"net/netip"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

// NetEvent is a packet from or to a VM that did not pass; or, with Host, what the VM has asked its proxy for, and
// was refused or has got a secret.
type NetEvent struct {
	Time      time.Time           `json:"time"`
	Direction netpolicy.Direction `json:"direction"`
	Verdict   netpolicy.Verdict   `json:"verdict"`
	Reason    netpolicy.Reason    `json:"reason"`
	// Rule is the name of the rule that decided, if one did.
	Rule string `json:"rule,omitempty"`
	// Protocol is tcp, udp, icmp, icmpv6 or a number. It is empty, as are the peer and
	// the ports, where the packet was denied before they were known.
	Protocol string `json:"protocol,omitempty"`
	// Peer is the other side, and Name what the VM has asked its resolver for to find it.
	Peer     netip.Addr `json:"peer,omitzero"`
	PeerPort uint16     `json:"peer_port,omitempty"`
	Name     string     `json:"name,omitempty"`
	// ServerName is the name in TLS, where that is why it did not pass.
	ServerName string `json:"server_name,omitempty"`
	// Host is what the proxy was asked for, Secret the name of the one that was put into the request, or was to be,
	// and Status that of the answer.
	Host   string `json:"host,omitempty"`
	Secret string `json:"secret,omitempty"`
	Status int    `json:"status,omitempty"`
	// Guest is the VM's own address, that of IPv6 for packets of IPv6.
	Guest     netip.Addr `json:"guest"`
	GuestPort uint16     `json:"guest_port,omitempty"`
	// EtherType of the frame (IEEE 802).
	EtherType uint16 `json:"ethertype"`
	// Bytes of the frame, of all its segments.
	Bytes uint32 `json:"bytes"`
	// Suppressed is how many denied packets before this one, in its direction, were not
	// told of, since there were more than 100 in a second.
	Suppressed uint32 `json:"suppressed,omitempty"`
	// Lost is how many events before this one whoever reads has been too slow for.
	Lost uint64 `json:"lost,omitempty"`
}

// NetworkInfo says how the host knows a running VM.
type NetworkInfo struct {
	// TAP is the name of the VM's network device on the host.
	TAP string `json:"tap"`
	// Address is the VM's own. The guest does not know it: see netpolicy.TheWire.
	Address netip.Addr `json:"address"`
	// Address6 is its IPv6 address, if it has IPv6.
	Address6 netip.Addr `json:"address6,omitzero"`
	// Warnings are what the policy allows and the host does not do.
	Warnings []string `json:"warnings,omitempty"`
}

// NetworkStats say what has passed between a VM and the network, and what has not, since
// its process began.
type NetworkStats struct {
	Name string `json:"name"`
	NetworkInfo
	Egress  netpolicy.Usage `json:"egress"`
	Ingress netpolicy.Usage `json:"ingress"`
	// Counters are packets by what became of them and why.
	Counters []netpolicy.Counter `json:"counters"`
	// DNS is what became of queries.
	DNS netpolicy.ResolverStats `json:"dns"`
	// TLS is what became of connections whose names are checked.
	TLS netpolicy.TLSStats `json:"tls"`
	// Proxy is what became of what the VM has asked its proxy for; nil without one.
	Proxy *netpolicy.ProxyStats `json:"proxy,omitempty"`
}
