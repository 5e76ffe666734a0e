// Package secrets hands a VM's secrets to the agent in its guest, through a few I/O ports.
//
// What enters a guest by a network device or a socket leaves copies in it: in rings, in buffers of its kernel, and
// on the reader's heap. One string instruction (REP INS) reads bytes from a port straight into the one place that
// the instruction names, and nowhere else in the guest.
//
//	offset  bytes  read                         written
//	0       4      bytes left of what is chosen choose: 0 is the table, else an id of it
//	4       4      CRC-32C of what was read     go to this offset of what is chosen
//	8       1      the next byte                -
//	12      1      -                            1: what was read has been wiped
//
// The layout of the table is in table.go. Values are in locked memory of this process (Store), left out of core dumps,
// and in no saved state of a snapshot. Device.Busy reports whether the guest has read of a value and has not yet
// reported its copy as wiped. No snapshot may be taken in between.
//
// Secrets that the host uses in the VM's name are in a Store without a Device: the guest can read neither their values
// nor their names.
//
// The ports never wait. A guest that misuses them gets only the secrets of its own VM, which are meant for it.
package secrets
