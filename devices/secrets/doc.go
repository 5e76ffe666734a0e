// Package secrets hands secrets of a VM to the agent in its guest, at a few I/O ports.
//
// What comes into a guest by a network device or a socket leaves copies in it: in rings,
// in buffers of its kernel, and on the heap of whoever reads it. Bytes that are read from
// a port with one string instruction (REP INS) go from the VMM to the one place that the
// instruction names, and nowhere else in the guest.
//
//	offset  bytes  read                         written
//	0       4      bytes left of what is chosen choose: 0 is the table, else an id of it
//	4       4      CRC-32C of what was read     go to this offset of what is chosen
//	8       1      the next byte                -
//	12      1      -                            1: what was read has been wiped
//
// The table is laid out in table.go. Values are in memory of this process that is locked,
// and left out of core dumps; they are in no state that a snapshot has. Device.Busy says
// whether the guest has read of a value and not said yet that it has wiped its copy, so
// that nobody takes a snapshot in between.
//
// A secret that is hidden is for what the host does in the VM's name (Device.Use). The guest has no way
// to its value and its name.
//
// Nothing here waits. A guest that does what it likes at these ports gets the secrets of
// its own VM, which are for it.
package secrets
