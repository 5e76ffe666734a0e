// Package relay carries the bytes of one socket over one connection between the host and the guest, and preserves
// the difference between an end and a cut.
//
// When a VM sleeps, all its vsock connections are cut, which to a reader looks like an end. So each direction is a
// sequence of frames, and only an end frame ends it. A frame is a head of 4 bytes, kind and length (24 bits,
// big-endian), and as many bytes. A connection that ends without an end frame was cut: the relay then resets the
// socket on the other side. Flow control is the connection's own.
package relay
