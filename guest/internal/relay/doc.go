// Package relay carries the bytes of one socket over one connection between the host and
// the guest, so that an end stays an end and a cut stays a cut.
//
// A vsock connection that is cut, as all are when a VM sleeps, looks to its reader like
// one that has ended. So each direction is a sequence of frames, and only the frame that
// says so is its end: a head of 4 bytes, kind and length (24 bits, big-endian), and as
// many bytes. A connection that ends without it was cut, and the socket at the other side
// is reset. Flow control is the connection's own.
package relay
