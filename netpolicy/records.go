package netpolicy

import (
	"net/netip"
	"time"
)

// Count is packets, after segmentation, and their bytes.
type Count struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// Counter is how many packets had one fate since the programs were loaded.
type Counter struct {
	Direction Direction `json:"direction"`
	Verdict   Verdict   `json:"verdict"`
	Reason    Reason    `json:"reason"`
	Count
}

// Usage is what has passed in one direction.
type Usage struct {
	// Bytes that count against the quota.
	Bytes uint64 `json:"bytes"`
	// Idle is how long ago a packet has passed; negative if none ever has.
	Idle time.Duration `json:"idle"`
}

// Event is a packet that did not pass. At most 100 a second are told for each
// direction; the others are counted in Suppressed of the next one.
type Event struct {
	// Uptime is when it was, on CLOCK_MONOTONIC.
	Uptime    time.Duration `json:"uptime"`
	Direction Direction     `json:"direction"`
	Verdict   Verdict       `json:"verdict"`
	Reason    Reason        `json:"reason"`
	// Rule is its number in the table, see Spec.RuleName; -1 is none. Generation says
	// which table, see link.Link.RuleName.
	Rule       int    `json:"rule"`
	Generation uint32 `json:"generation"`
	// Peer, Protocol and the ports are zero where the packet was denied before they
	// were known.
	Peer       netip.Addr `json:"peer"`
	Protocol   uint8      `json:"protocol"`
	PeerPort   uint16     `json:"peer_port"`
	GuestPort  uint16     `json:"guest_port"`
	EtherType  uint16     `json:"ethertype"`
	Bytes      uint32     `json:"bytes"`
	Suppressed uint32     `json:"suppressed"`
}

// FlowEnd is why a record was written.
type FlowEnd string

// Ends of flows.
const (
	FlowOpen     FlowEnd = "open"     // it has not ended: the record is a look at it
	FlowClosed   FlowEnd = "closed"   // TCP: both sides have, or one has reset it, and nothing came for 30 s
	FlowExpired  FlowEnd = "expired"  // nothing came for as long as it lives
	FlowReplaced FlowEnd = "replaced" // it was opened anew with the same addresses and ports
	FlowCut      FlowEnd = "cut"      // a new policy does not allow it, or the other VM is gone
	FlowEvicted  FlowEnd = "evicted"  // the flow table was full
	FlowStopped  FlowEnd = "stopped"  // the log has ended
	FlowDenied   FlowEnd = "denied"   // it was denied, and nothing more of it came for a while
	FlowRefused  FlowEnd = "refused"  // the name in its TLS hello was not allowed, and it was reset
)

// Types of records.
const (
	RecordFlow = "flow"
	RecordLost = "lost"
)

// FlowRecord is one record of a flow log, and a line of JSON: either a flow, or how much
// there is no record of. Fields are only ever added.
type FlowRecord struct {
	// Type is RecordFlow or RecordLost.
	Type string `json:"type"`
	// First and Last are when the flow's first and last packet were, by the host's clock when
	// the first was noticed. Of what was lost: since the record of that kind before, until now.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	// One of them is there, as Type says.
	*FlowInfo
	*FlowsLost
}

// FlowInfo is a flow in a record.
type FlowInfo struct {
	End FlowEnd `json:"end"`
	// Direction is that of the packet that opened it, or was denied.
	Direction Direction `json:"direction"`
	// Protocol is tcp, udp, icmp, icmpv6 or a number.
	Protocol string `json:"protocol"`
	// Peer is the other side; PeerPort is 0 for ICMP, and where a packet was denied before
	// its ports were looked at.
	Peer     netip.Addr `json:"peer"`
	PeerPort uint16     `json:"peer_port"`
	// Name is what the guest has last asked its resolver for to find the peer, if it has
	// opened the flow and ever has asked.
	Name string `json:"name,omitempty"`
	// ServerName is what the guest has asked for in TLS, if that was checked and it was a name.
	ServerName string `json:"server_name,omitempty"`
	// Guest is the endpoint's own address. GuestPort is the identifier for ICMP echo.
	Guest     netip.Addr `json:"guest"`
	GuestPort uint16     `json:"guest_port"`
	Verdict   Verdict    `json:"verdict"`
	// Reason and Rule are of the packet that opened the flow or was denied. Where the policy was
	// replaced since, Rule is the rule of the new one by which the flow goes on. It is
	// empty if none decided.
	Reason Reason `json:"reason"`
	Rule   string `json:"rule,omitempty"`
	// State is opening, established, closing (TCP), one-way, answered (UDP) or echo; empty
	// for what was denied.
	State string `json:"state,omitempty"`
	// Egress and Ingress are packets after segmentation, and bytes of frames with all headers,
	// that passed. Of a flow that was replaced or evicted, what was there when it was last
	// looked at, up to some seconds before. Of what was denied, frames and their bytes.
	Egress  Count `json:"egress"`
	Ingress Count `json:"ingress"`
}

// FlowsLost says how much has no record, since the record of this kind before.
type FlowsLost struct {
	// Flows that were opened and were gone before they were looked at.
	Flows uint64 `json:"flows"`
	// Denied are frames: there were more than are told of, or more flows than are told apart.
	Denied uint64 `json:"denied"`
	// Records that whoever reads the log came too late for.
	Records uint64 `json:"records"`
}

// ResolverStats is what became of the queries to an endpoint's resolver.
type ResolverStats struct {
	Answered uint64 `json:"answered"` // with addresses, or with the upstream's word that there are none
	Refused  uint64 `json:"refused"`  // by the policy
	Rebound  uint64 `json:"rebound"`  // addresses left out since they are not public
	Dropped  uint64 `json:"dropped"`  // too many
	Failed   uint64 `json:"failed"`
}

// TLSStats is what became of connections whose names are checked.
type TLSStats struct {
	Open    uint64 `json:"open"`    // now
	Passed  uint64 `json:"passed"`  // with an allowed name, to a peer that answered
	Refused uint64 `json:"refused"` // for their hello
	Cut     uint64 `json:"cut"`     // by another policy, or since their flow has ended
	Failed  uint64 `json:"failed"`  // there was no such flow, or the peer did not answer
}

// ProxyStats is what became of what an endpoint has asked its proxy for.
type ProxyStats struct {
	Open     uint64 `json:"open"`     // connections of the endpoint, now
	Requests uint64 `json:"requests"` // that were judged
	Tunnels  uint64 `json:"tunnels"`  // that were opened
	Injected uint64 `json:"injected"` // requests that were sent with a secret
	Refused  uint64 `json:"refused"`  // by the policy, or for what they are
	Busy     uint64 `json:"busy"`     // connections that were one too many
	Cut      uint64 `json:"cut"`      // connections to peers, by another policy; and of the endpoint, since they were idle
}
