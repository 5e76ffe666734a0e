package spec

import (
	"net/netip"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
)

// NetEvent is a packet from or to a VM that did not pass. With Host, it is a request to the VM's proxy that was
// refused or got a secret.
type NetEvent struct {
	Time      time.Time           `json:"time"`
	Direction netpolicy.Direction `json:"direction"`
	Verdict   netpolicy.Verdict   `json:"verdict"`
	Reason    netpolicy.Reason    `json:"reason"`
	// Rule is the name of the rule that decided, if any.
	Rule string `json:"rule,omitempty"`
	// Protocol is tcp, udp, icmp, icmpv6 or a number. It is empty, like the peer and the ports, if the packet was
	// denied before they were known.
	Protocol string `json:"protocol,omitempty"`
	// Peer is the other side, and Name the name that the VM resolved to find it.
	Peer     netip.Addr `json:"peer,omitzero"`
	PeerPort uint16     `json:"peer_port,omitempty"`
	Name     string     `json:"name,omitempty"`
	// ServerName is the name in TLS, if the packet did not pass because of it.
	ServerName string `json:"server_name,omitempty"`
	// Host is the host of a request to the proxy. Secret is the name of the secret that the proxy put into the
	// request, or would have. Status is the status of the answer.
	Host   string `json:"host,omitempty"`
	Secret string `json:"secret,omitempty"`
	Status int    `json:"status,omitempty"`
	// Guest is the VM's own address: its IPv6 address for IPv6 packets.
	Guest     netip.Addr `json:"guest"`
	GuestPort uint16     `json:"guest_port,omitempty"`
	// EtherType of the frame (IEEE 802).
	EtherType uint16 `json:"ethertype"`
	// Bytes is the size of the frame, of all its segments.
	Bytes uint32 `json:"bytes"`
	// Suppressed is how many denied packets before this one, in its direction, have no event, because there were
	// more than 100 in a second.
	Suppressed uint32 `json:"suppressed,omitempty"`
	// Lost is how many events before this one the reader was too slow to get.
	Lost uint64 `json:"lost,omitempty"`
}

// NetworkInfo is what the host knows of a running VM's network.
type NetworkInfo struct {
	// TAP is the name of the VM's network device on the host.
	TAP string `json:"tap"`
	// Address is the VM's own address. The guest does not know it: see netpolicy.TheWire.
	Address netip.Addr `json:"address"`
	// Address6 is its IPv6 address, if it has IPv6.
	Address6 netip.Addr `json:"address6,omitzero"`
	// Warnings are things that the policy allows and the host does not do.
	Warnings []string `json:"warnings,omitempty"`
}

// NetworkStats count what has and has not passed between a VM and the network since its process began.
type NetworkStats struct {
	Name string `json:"name"`
	NetworkInfo
	Egress  netpolicy.Usage `json:"egress"`
	Ingress netpolicy.Usage `json:"ingress"`
	// Counters are packets by outcome and reason.
	Counters []netpolicy.Counter `json:"counters"`
	// DNS counts queries by outcome.
	DNS netpolicy.ResolverStats `json:"dns"`
	// TLS counts connections whose names are checked, by outcome.
	TLS netpolicy.TLSStats `json:"tls"`
	// Proxy counts requests to the VM's proxy, by outcome; nil without a proxy.
	Proxy *netpolicy.ProxyStats `json:"proxy,omitempty"`
	// Process counts what became of the process that reads the guest's queries, hellos and requests.
	Process NetworkProcess `json:"process"`
}

// NetworkProcess counts the network processes of a VM since its last wake, one after the other. The first starts with
// the first query or connection that needs it.
type NetworkProcess struct {
	Starts  uint64 `json:"starts"`
	Refused uint64 `json:"refused"` // killed for a system call outside their list
	Failed  uint64 `json:"failed"`  // ended in another way without being told to
	// CPUSeconds is their processor time: 0 on a host that cannot confine, where the VM's own process does the work.
	CPUSeconds float64 `json:"cpu_seconds"`
}
