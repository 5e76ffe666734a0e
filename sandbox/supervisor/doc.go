// Package supervisor does for the VMs of a store what needs a process that is always there: it keeps processes ready
// for those that wake, listens at the addresses where their ports are published, so that a connection, or a datagram,
// wakes a VM that sleeps, and takes packets to the addresses of VMs that sleep, so that those wake which their policies
// would let in.
//
// VMs do not depend on it. What it knows it reads from their records, again and again, and it may be killed at any
// moment and started anew: connections that it carried end with it, what it held of UDP is lost, and nothing else.
package supervisor
