// Package supervisor does for the VMs of a store what needs a permanent process. It keeps processes ready for VMs
// that wake. It listens at the addresses where ports are published, so that a connection or a datagram wakes a
// sleeping VM. It receives packets to the addresses of sleeping VMs, and wakes the VMs whose policies would let
// the packets in.
//
// VMs do not depend on it. It reads all that it knows from their records, again and again. It may be killed and
// started anew at any moment: only the connections that it carried and the UDP datagrams that it held are lost.
package supervisor
