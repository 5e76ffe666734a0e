package refmodel

import (
	"net/netip"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Model is the policy of one endpoint. Its methods are safe for concurrent use.
type Model struct {
	policy *netpolicy.Policy
	id     netpolicy.Identity
	env    netpolicy.Environment
}

// New returns the model of a policy; nil denies everything.
func New(p *netpolicy.Policy, id netpolicy.Identity, env netpolicy.Environment) *Model {
	if p == nil {
		p = &netpolicy.Policy{}
	}
	return &Model{policy: p, id: id, env: env}
}

// Frame is a packet on the wire between guest and host.
type Frame struct {
	Direction netpolicy.Direction
	Bytes     []byte
	// SegmentSize is the segment size of segmentation offload; 0 is none.
	SegmentSize int
	// By is the interface by which a frame to the guest arrived on the host: the address of another endpoint for
	// its device, the zero Addr if the host made the frame, an address of no endpoint for any other interface.
	By netip.Addr
}

// Opens reports whether a frame to the guest would pass if the guest had no flow and had used none of its limits.
func (m *Model) Opens(f Frame) bool {
	x, reason := m.Parse(f)
	if q := m.policy.Quota.IngressBytes; x.Egress || q != nil && uint64(len(f.Bytes)) > *q {
		return false
	}
	if reason != 0 {
		return reason == netpolicy.ReasonLink
	}
	q := Question{Direction: netpolicy.Ingress, Peer: x.Peer, Port: x.GuestPort}
	switch x.Proto {
	case ProtoTCP:
		q.Protocol = netpolicy.TCP
		if x.Flags&(FlagSYN|FlagACK) != FlagSYN {
			return false
		}
	case ProtoUDP:
		q.Protocol = netpolicy.UDP
	default:
		q.Protocol, q.Port = netpolicy.ICMP, 0
		if x.ICMP() != "request" {
			return false
		}
	}
	return !x.Spoofed(x.Peer) && m.Ask(q).Verdict == netpolicy.Allow
}
