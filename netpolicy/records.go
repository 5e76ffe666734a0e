package netpolicy

import (
	"net/netip"
	"time"
)

// Count is a number of packets, after segmentation, and their bytes.
type Count struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// Counter counts the packets of one direction, verdict and reason since the programs were loaded.
type Counter struct {
	Direction Direction `json:"direction"`
	Verdict   Verdict   `json:"verdict"`
	Reason    Reason    `json:"reason"`
	Count
}

// Usage is the traffic that passed in one direction.
type Usage struct {
	// Bytes count against the quota.
	Bytes uint64 `json:"bytes"`
	// Idle is the time since the last packet passed; negative if none ever has.
	Idle time.Duration `json:"idle"`
}

// Event is a packet that did not pass. Each direction reports at most 100 events a second. The next event counts
// the rest in Suppressed.
type Event struct {
	// Uptime is the time of the packet, on CLOCK_MONOTONIC.
	Uptime    time.Duration `json:"uptime"`
	Direction Direction     `json:"direction"`
	Verdict   Verdict       `json:"verdict"`
	Reason    Reason        `json:"reason"`
	// Rule is the rule's index in the table, see Spec.RuleName; -1 is none. Generation identifies the table, see
	// link.Link.RuleName.
	Rule       int    `json:"rule"`
	Generation uint32 `json:"generation"`
	// Peer, Protocol and the ports are zero if the packet was denied before they were known.
	Peer       netip.Addr `json:"peer"`
	Protocol   uint8      `json:"protocol"`
	PeerPort   uint16     `json:"peer_port"`
	GuestPort  uint16     `json:"guest_port"`
	EtherType  uint16     `json:"ethertype"`
	Bytes      uint32     `json:"bytes"`
	Suppressed uint32     `json:"suppressed"`
}

// FlowEnd says why a record was written.
type FlowEnd string

// Ends of flows.
const (
	FlowOpen     FlowEnd = "open"     // it has not ended: the record is a snapshot
	FlowClosed   FlowEnd = "closed"   // TCP: both sides closed it, or one reset it, and nothing came for 30 s
	FlowExpired  FlowEnd = "expired"  // nothing came for its lifetime
	FlowReplaced FlowEnd = "replaced" // it was opened anew with the same addresses and ports
	FlowCut      FlowEnd = "cut"      // a new policy does not allow it, or the other VM is gone
	FlowEvicted  FlowEnd = "evicted"  // the flow table was full
	FlowStopped  FlowEnd = "stopped"  // the log has ended
	FlowDenied   FlowEnd = "denied"   // it was denied, and nothing more of it came for a while
	FlowRefused  FlowEnd = "refused"  // the name in its TLS hello was not allowed, so it was reset
)

// Types of records.
const (
	RecordFlow = "flow"
	RecordLost = "lost"
)

// FlowRecord is one record of a flow log, and a line of JSON. It is either a flow, or a count of what has no
// record. Later versions only add fields.
type FlowRecord struct {
	// Type is RecordFlow or RecordLost.
	Type string `json:"type"`
	// First and Last are the times of the flow's first and last packet, by the host's clock when the first was
	// noticed. For RecordLost they span the time since the previous record of that kind.
	First time.Time `json:"first"`
	Last  time.Time `json:"last"`
	// Type says which of these is set.
	*FlowInfo
	*FlowsLost
}

// FlowInfo is the flow of a record.
type FlowInfo struct {
	End FlowEnd `json:"end"`
	// Direction is that of the packet that opened the flow, or was denied.
	Direction Direction `json:"direction"`
	// Protocol is tcp, udp, icmp, icmpv6 or a number.
	Protocol string `json:"protocol"`
	// Peer is the other side. PeerPort is 0 for ICMP, and if a packet was denied before its ports were read.
	Peer     netip.Addr `json:"peer"`
	PeerPort uint16     `json:"peer_port"`
	// Name is the last name that the guest resolved to the peer's address, if the guest opened the flow and
	// resolved one.
	Name string `json:"name,omitempty"`
	// ServerName is the server name that the guest sent in TLS, if it was checked and valid.
	ServerName string `json:"server_name,omitempty"`
	// Guest is the endpoint's own address. GuestPort is the identifier for ICMP echo.
	Guest     netip.Addr `json:"guest"`
	GuestPort uint16     `json:"guest_port"`
	Verdict   Verdict    `json:"verdict"`
	// Reason and Rule are those of the packet that opened the flow or was denied. After a policy swap, Rule is the
	// new policy's rule that keeps the flow open. It is empty if no rule decided.
	Reason Reason `json:"reason"`
	Rule   string `json:"rule,omitempty"`
	// State is opening, established, closing (TCP), one-way, answered (UDP) or echo; empty if it was denied.
	State string `json:"state,omitempty"`
	// Egress and Ingress are packets after segmentation that passed, and bytes of their frames with all headers.
	// For a replaced or evicted flow they are from the last look at it, up to some seconds before. For a denied
	// one they are frames and their bytes.
	Egress  Count `json:"egress"`
	Ingress Count `json:"ingress"`
}

// FlowsLost counts what has no record, since the previous record of this kind.
type FlowsLost struct {
	// Flows were opened and gone before the log saw them.
	Flows uint64 `json:"flows"`
	// Denied are frames beyond the rate of events, or beyond the number of denied flows that the log tells apart.
	Denied uint64 `json:"denied"`
	// Records were overwritten before the reader fetched them.
	Records uint64 `json:"records"`
}

// ResolverStats counts the queries to an endpoint's resolver by their outcome.
type ResolverStats struct {
	Answered uint64 `json:"answered"` // with addresses, or because the upstream says that there are none
	Refused  uint64 `json:"refused"`  // by the policy
	Rebound  uint64 `json:"rebound"`  // addresses left out because they are not public
	Dropped  uint64 `json:"dropped"`  // too many
	Failed   uint64 `json:"failed"`
}

// TLSStats counts the connections whose names are checked by their outcome.
type TLSStats struct {
	Open    uint64 `json:"open"`    // now
	Passed  uint64 `json:"passed"`  // with an allowed name, to a peer that answered
	Refused uint64 `json:"refused"` // for their hello
	Cut     uint64 `json:"cut"`     // by another policy, or because their flow ended
	Failed  uint64 `json:"failed"`  // there was no such flow, or the peer did not answer
}

// ProxyStats counts an endpoint's requests to its proxy, and its connections, by their outcome.
type ProxyStats struct {
	Open     uint64 `json:"open"`     // connections of the endpoint, now
	Requests uint64 `json:"requests"` // that the proxy judged
	Tunnels  uint64 `json:"tunnels"`  // that the proxy opened
	Injected uint64 `json:"injected"` // requests that the proxy sent with a secret
	Refused  uint64 `json:"refused"`  // by the policy, or as malformed or unsupported
	Busy     uint64 `json:"busy"`     // connections beyond the limit
	Cut      uint64 `json:"cut"`      // to peers, by another policy; of the endpoint, because they were idle
}
