package netpolicy

import (
	"fmt"
	"strconv"
	"strings"
)

// Reason says why a packet passed or not. The package comment explains each.
type Reason uint8

// Reasons below 16 can belong to a packet that passed. Rule and Default can also belong to a denied one.
const (
	ReasonRule Reason = iota + 1
	ReasonDefault
	ReasonFlow
	ReasonLink
	ReasonRelated
)

// Reasons of denial, numbered as in bpf/endpoint.c.
const (
	ReasonNoPolicy Reason = iota + 16
	ReasonTruncated
	ReasonEtherType
	ReasonVLAN
	ReasonSrcMAC
	ReasonDstMAC
	ReasonARP
	ReasonIPHeader
	ReasonIPOptions
	ReasonFragment
	ReasonSrcIP
	ReasonDstIP
	ReasonExtHeader
	ReasonProtocol
	ReasonL4Header
	ReasonND
	ReasonDHCP
	ReasonFloor
	ReasonICMPType
	ReasonNoFlow
	ReasonTCPState
	ReasonPacketRate
	ReasonBitRate
	ReasonConnRate
	ReasonQuota
	ReasonFlowTable
	ReasonGSO
	ReasonChecksum
	ReasonInternal
	ReasonIPv6Off
	ReasonTLSOff
	ReasonSrcInterface
)

// Reasons of connections that the programs passed to the listener that checks names, and that were reset there.
// The programs do not know them.
const (
	ReasonTLSHello Reason = iota + 48
	ReasonTLSNoName
	ReasonTLSName
	ReasonTLSECH
	ReasonTLSTimeout
	ReasonTLSBusy
	// ReasonProxy is a request to the proxy that the policy does not allow. ReasonInject is a request that the
	// proxy has put a secret into, or could not.
	ReasonProxy
	ReasonInject
)

// Reasons is how many reasons the programs count.
const Reasons = 64

var reasonNames = map[Reason]string{
	ReasonRule: "rule", ReasonDefault: "default", ReasonFlow: "flow", ReasonLink: "link", ReasonRelated: "related",
	ReasonNoPolicy: "no-policy", ReasonTruncated: "truncated", ReasonEtherType: "ethertype", ReasonVLAN: "vlan",
	ReasonSrcMAC: "source-mac", ReasonDstMAC: "destination-mac", ReasonARP: "arp", ReasonIPHeader: "ip-header",
	ReasonIPOptions: "ip-options", ReasonFragment: "fragment", ReasonSrcIP: "source-address", ReasonDstIP: "destination-address",
	ReasonExtHeader: "extension-header", ReasonProtocol: "protocol", ReasonL4Header: "l4-header", ReasonND: "neighbour-discovery",
	ReasonDHCP: "dhcp", ReasonFloor: "floor", ReasonICMPType: "icmp-type", ReasonNoFlow: "no-flow", ReasonTCPState: "tcp-state",
	ReasonPacketRate: "packet-rate", ReasonBitRate: "bit-rate", ReasonConnRate: "connection-rate", ReasonQuota: "quota",
	ReasonFlowTable: "flow-table", ReasonGSO: "gso", ReasonChecksum: "checksum", ReasonInternal: "internal", ReasonIPv6Off: "ipv6-off",
	ReasonTLSOff: "tls-off", ReasonSrcInterface: "source-interface", ReasonTLSHello: "tls-hello", ReasonTLSNoName: "tls-no-name", ReasonTLSName: "tls-name", ReasonTLSECH: "tls-ech",
	ReasonTLSTimeout: "tls-timeout", ReasonTLSBusy: "tls-busy", ReasonProxy: "proxy", ReasonInject: "inject",
}

// String returns a short name, as in events and counters.
func (r Reason) String() string {
	if s, ok := reasonNames[r]; ok {
		return s
	}
	return fmt.Sprintf("reason-%d", uint8(r))
}

// MarshalText writes the name.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads what MarshalText has written.
func (r *Reason) UnmarshalText(text []byte) error {
	for known, name := range reasonNames {
		if name == string(text) {
			*r = known
			return nil
		}
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(string(text), "reason-"), 10, 8)
	if err != nil {
		return fmt.Errorf("%.40q is no reason", text)
	}
	*r = Reason(n)
	return nil
}
