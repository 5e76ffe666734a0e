// Package netpolicy decides which network traffic a VM may send and receive. The VM's end of the network is called
// an endpoint. An empty policy denies everything, in both directions. This package defines policies and the
// records of what they did, on any system. Package link enforces policies with eBPF programs on TAP devices of
// Linux.
//
// # The parts
//
// Policy is the model; Parse reads it strictly from YAML or JSON. Compile is a pure function from a policy, the
// endpoint's Identity and its Environment to a Spec: the rows of the table that the programs read. A link.Link
// holds the programs of one TAP device and swaps specs under them. Package flow is the flow table and its log.
// Package refmodel implements the rules from this text alone, by a linear scan in Go; tests compare the two packet
// by packet. Package resolver is the DNS server that finds the addresses of the names in rules. Package tlsname
// checks that a connection opened for a name asks for that name in TLS.
//
// # The wire
//
// Egress is what the guest sends, ingress is what it receives. Every guest has the same MAC and the same addresses
// (Wire). On egress the programs replace them by the endpoint's own address, on ingress they put them back. They
// also correct checksums and the packets quoted in ICMP errors. The peer of a packet is the other side: its
// destination on egress, its source on ingress. The port of a packet is its destination port.
//
// # How a packet is judged
//
// The first check that fails decides, and gives its Reason. The names below are those of the Reason* constants.
//
//  1. NoPolicy: there is no policy, or its table is broken.
//  2. VLAN: the frame is tagged (802.1Q, 802.1ad, or ethertype 0x9100).
//  3. EtherType: it is none of ARP, IPv4, IPv6.
//  4. SrcMAC (egress): the source is not the guest's MAC.
//  5. DstMAC: the destination is not the gateway's MAC (egress) or the guest's
//     (ingress). ARP may be broadcast. IPv6 may go to 33:33:*; such a packet must be
//     neighbour discovery (6), or is denied as DstMAC after check 11.
//  6. ARP, ND: see below. A packet that passes needs no rule and is not translated.
//  7. Truncated: a header is cut off by the end of the frame.
//  8. IPv6Off: the packet is IPv6 and the endpoint has no IPv6 address.
//  9. IPHeader: version, header length, total length beyond the frame, bytes after the
//     packet in frames longer than 60 bytes, TTL or hop limit of 0, IPv6 payload length 0.
//  10. IPOptions, then Fragment: any option; any fragment, or the reserved bit. For
//     IPv6: Fragment for a fragment header, ExtHeader for the other extension headers.
//  11. Protocol: neither TCP, UDP nor ICMP (ICMPv6 on IPv6, not ICMP).
//  12. SrcIP (egress): the source is not the guest's. DstIP (ingress): the destination is not the endpoint's.
//  13. L4Header: header cut off by the end of the packet; a port of 0; a UDP length
//     other than that of the packet; a TCP data offset outside of the packet; TCP flags
//     that are impossible (SYN with FIN or RST, FIN or nothing without ACK, FIN with RST).
//  14. GSO: segmentation requested for a protocol other than TCP (on ingress, UDP is allowed as well), or
//     into segments of less than 8 bytes.
//  15. Checksum (egress): the guest asks for a checksum to be stored outside the checksum field
//     of TCP or UDP, which would change the packet after it was judged.
//  16. DHCP: UDP from or to port 67 or 68 (546 or 547 on IPv6).
//  17. Floor: the peer is an address that no rule can open.
//  18. ICMPType: neither echo, echo reply nor an error (3, 11, 12; ICMPv6: 1 to 4).
//  19. SrcInterface (ingress), see below: the source is not the sender's own. Flows and rules, see below: Flow,
//     Related, NoFlow, TCPState, Rule, Default; TLSOff.
//  20. Quota, PacketRate, BitRate, ConnRate: limits. A packet that exceeds one of them uses up
//     none of them. ARP and ND count as well, but not for ConnRate.
//  21. FlowTable: the flow could not be recorded, or has no port on the host. Internal: the
//     translation failed.
//
// # ARP and neighbour discovery
//
// ARP is Ethernet and IPv4, a request or a reply. From the guest: the sender has the
// guest's MAC, and the guest's address or, in a request, 0.0.0.0; the target is the
// gateway's or the guest's address. To the guest: the sender has the gateway's address
// and MAC, and the target is the guest's address.
//
// ND is ICMPv6 of types 130 to 137 and 143. Only neighbour solicitations (135) and advertisements (136) with code
// 0 and hop limit 255 pass; router advertisements, redirects and multicast listener reports never do. The message
// has no option or one of 8 bytes: the link-layer address of the sender (type 1 in 135, type 2 in 136), or, in a
// solicitation from the unspecified address, a nonce (type 14). The sender is, from the guest, its address or
// link-local address, or :: in a solicitation without link-layer address; to the guest, the same of the gateway.
// The target of a solicitation is an address of the guest or the gateway, that of an advertisement one of the
// sender. The destination is an address of the other side, or a multicast address in ff02::/16.
//
// # Addresses
//
// Every address has one class. The floor comes first:
//
//	metadata    169.254.169.254, 100.100.100.200, 168.63.129.16, fd00:ec2::254, fd20:ce::254
//	loopback    127.0.0.0/8, ::1
//	link-local  169.254.0.0/16, fe80::/10
//	multicast   224.0.0.0/4, ff00::/8
//	reserved    0.0.0.0/8, 192.0.0.0/24, 192.88.99.0/24, 240.0.0.0/4, the guest's own
//	            addresses; on IPv6 ::ffff:0:0/96, 64:ff9b::/96, 64:ff9b:1::/48, 2001::/32,
//	            2002::/16 (they carry IPv4 addresses), and all that is neither in 2000::/3
//	            nor in fc00::/7
//
// then host (the gateway, and Environment.Host), endpoint (Environment.Endpoints and the addresses of
// Environment.Peers), private (10/8, 172.16/12, 192.168/16, 100.64/10, 198.18/15, fc00::/7, and
// Environment.OnLink), and public, which is everything else.
//
// # Source interfaces
//
// A source address identifies the sender only if no other sender can use it. A packet to the guest from an address
// of class host must originate on the host; one that arrived by any interface is denied (SrcInterface), even if
// the host translated its source, as it may do for containers. A packet from an address of class endpoint must
// have arrived by the device of the endpoint that has the address, in the same network namespace. An ICMP error
// about a flow with the host or an endpoint must come from one of these two. The kernel notes the interface by
// which a packet arrived, and forwarding does not change that; rp_filter has no part in it.
//
// Packets to a sleeping endpoint wait at the packet waker (link.GuardWaker), and the host puts them on the
// endpoint's device later. The packet waker accepts only packets that pass the checks above, and marks them with a
// random number.
//
// # Rules
//
// Rules are tried in order; the first that matches gives the verdict. If none matches, the default of the
// direction gives it. A rule matches if its direction, peer, protocol and, for TCP and UDP, port match. The lists
// cidrs, groups, names and agents together define the possible peers.
//
// An omitted list never allows: an allow rule with an absent, null or empty list of peers, protocols or ports
// matches nothing in that dimension, a deny or reject rule matches everything in it. Absent, null and empty are
// the same, so storing and rereading a policy cannot change it. "Everything" is written out: group any, protocol
// any, port any.
//
// An allow rule opens public addresses by group any or public, by CIDR and by name. It opens private ones by group
// private, or by a CIDR that lies inside a private range (0.0.0.0/0 does not); those of the host by group host
// alone; other endpoints by one of their tags alone. The default opens public addresses alone. Deny and reject
// rules match by any of these, and by endpoints' tags. They cannot have names, since an address that was never
// resolved would not match.
//
// An endpoint has the tags that it was attached with (link.Config), or those of the last link.Link.SetTags. Rules
// of other endpoints of the same host and version of drowse see them from before its device is up until it is
// removed. Rules match only endpoints that exist at that moment.
//
// A name matches the addresses that the endpoint's resolver has given the guest for it, as long as they are
// pinned. "*.example.com" matches every name below example.com but not example.com.
//
// # Checked names
//
// One address may serve many names, so at some ports a rule's names are checked: those of Rule.TLS (443 by default).
// There a rule does not match UDP by its names, which would be QUIC. A TCP connection over IPv4 is checked if a rule
// opens it for its names, and the rules would not allow it if no names that are checked there matched. It does not
// reach the peer: it ends on the host, at Environment.TLSPort of the gateway. Without such a port, and over IPv6, it
// is denied (TLSOff). The guest sees the peer's address.
//
// The listener there (package tlsname) reads the ClientHello and asks the rules again (link.Link.OpensName). Now a
// rule matches by names that are checked only if one of them is the server name. If the rules do not allow it, or
// there is no proper name (TLSHello, TLSNoName, TLSName, TLSECH, TLSTimeout, TLSBusy), the connection is reset.
// Those reasons are in events and the log of flows, and not in counters.
//
// Such a flow has a port on the host (via): the guest's port, or the first of port + 7919*i modulo 65536 that is
// free, with i up to 7 and 1 in place of 0. A port is free if no other such live flow has it, nor a flow of the
// host's with TLSPort. A packet from TLSPort to the endpoint's address and that port counts as the peer's. Packets
// from the peer's own address, and ICMP errors about the flow, in both directions, are NoFlow. A new SYN from
// TLSPort is TCPState. A packet from the guest to the gateway's TLSPort is NoFlow if its port is a flow's via;
// otherwise it is denied before all rules, if the policy has names that are checked. A policy swap ends a flow
// that was not checked and now would be, and one that was checked if there is no TLSPort.
//
// Published ports let the host's address reach them on the guest, and a resolver lets the guest reach port 53 of
// the gateway, before all rules.
//
// # Flows
//
// A flow is peer, protocol and the ports of both sides (for ICMP echo: the identifier), and remembers the
// direction that opened it. Only a packet that the rules allow opens one. Packets of a live flow pass in both
// directions without rules, by Reason Flow. After a policy swap, the packet that opened the flow is judged again,
// by its direction, peer and port, and by those names in the rules that its address had been given for at that
// time (the endpoint's process remembers up to 2,048 different sets of names). If it is no longer allowed, the
// flow is gone. A flow with another endpoint is also gone when a different endpoint, or none, has its address;
// when that endpoint's tags have changed, the flow is judged again in the same way.
//
//   - TCP: a SYN without ACK is always judged by the rules and opens a flow in state
//     opening; against the direction of a live flow that is established or closing it is
//     denied (TCPState). All other segments need a live flow (NoFlow). Opening: SYN+ACK from the
//     other side makes it established, RST from either side closing, nothing else passes
//     (TCPState). Later, all segments pass but a SYN+ACK from the side that opened it
//     (TCPState). RST, or FIN from both sides, make it closing. Sequence numbers are not
//     followed. It lives 60 s opening, 4 h established, 30 s closing.
//   - UDP: 30 s, and 180 s once there has been an answer.
//   - ICMP echo: an echo request opens a flow, or belongs to one of its own direction;
//     an echo reply needs one of the other direction. 30 s.
//   - ICMP errors quote a packet that the receiver has sent. To pass (Related), the
//     quoted packet must be IPv4 without options or IPv6 without extension headers, TCP,
//     UDP or ICMP echo, no later fragment, must belong to a live flow, and have the
//     endpoint's (guest's) address; otherwise L4Header if it is too short, NoFlow in all other
//     cases. One from the guest must go to the source of the quoted packet. It does not prolong the flow.
//
// Established TCP and answered UDP flows have a table of their own, as large as the one of all others, so that
// flows that are opening, closing or without an answer never displace them. Each table evicts its least recently
// used flow first.
//
// Flows belong to one endpoint's maps. A clone has new maps and inherits no flow.
//
// The flow table also records, for flow.Log, what a flow has carried, when it was opened and by which rule. These
// decide nothing. A flow that a new policy has cut stays in the table, marked as cut.
//
// # Limits
//
// Each limit is the generic cell rate algorithm on a clock in nanoseconds. Units cost units*mult >> 20, with mult
// = floor(1e9<<20 / rate), a fixed-point number with 20 fractional bits; the burst is the cost of its units. A
// packet passes if max(tat, now) + cost - now <= burst, and then max(tat, now) + cost becomes tat. Units are bits
// of frames with all headers of all segments, packets after segmentation, and flows opened. Quotas count bytes in
// the same way. On egress, packets and flows have limits even without the policy's: DefaultPackets and
// DefaultConnections.
//
// # Requirements
//
// Linux 6.1 or later with BTF (/sys/kernel/btf/vmlinux); root, or CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN and a BPF
// file system. The programs are filters of a clsact qdisc. A kernel that is locked down for confidentiality
// refuses them, and Attach fails. Packets that do not cross the TAP device, such as those of vsock, are not
// judged.
//
// # What endpoints share
//
// The kernel verifies the programs once for a host and version of drowse, which takes some hundred milliseconds,
// and all endpoints share them. Each device also has a small program of its own for each direction. It selects the
// endpoint's slot in the host's maps, the one of the two tables there that is in force, and the number (the claim)
// that this table must carry, and then calls the shared program. Flows, pinned names, counters and events are in
// maps of the endpoint's own, in its slot. One map has the tags and claims of all endpoints, by their addresses.
// Without the shared program, a map, or a table that carries the same claim, nothing passes. The pins of the
// shared objects only serve later endpoints: an endpoint's own pins hold all that it needs.
//
// # Reject
//
// Reject is decided as deny is, and counted and reported as reject. The guest gets an answer, so that a denial
// does not look like a broken network: a TCP reset (RFC 9293, 3.10.7.1), or an ICMP error that communication is
// administratively prohibited (type 3 code 13, ICMPv6 type 1 code 1), as if it came from the peer. It gets as many
// answers as there are events: 100 a second. Answers pass to_guest by a mark that the loader chose at random. The
// sender of a packet rejected on ingress gets no answer.
//
// A TCP segment of the guest's that is denied as NoFlow gets a reset as well, unless it is a reset: so a program
// learns at once of a connection that was cut by a new policy or forgotten. The other side gets no answer: an
// answer to a possibly forged packet would go to a third party, and reveal that there is a VM.
package netpolicy
