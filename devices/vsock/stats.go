package vsock

import "sync/atomic"

// Stats counts what a device has done since it was made.
type Stats struct {
	// PacketsToGuest and PacketsFromGuest count packets.
	PacketsToGuest, PacketsFromGuest atomic.Uint64
	// Violations counts packets of the guest that break the protocol: a
	// payload longer than its packet, unknown operations, more than the
	// credit. Their connection was reset.
	Violations atomic.Uint64
	// Ignored counts packets of the guest with foreign addresses.
	Ignored atomic.Uint64
	// ShortBuffers counts receive buffers of the guest that cannot hold a
	// packet.
	ShortBuffers atomic.Uint64
	// Open is how many host clients are connected and connections of the guest's to the host are open, and Uses
	// how many there ever were: what others do with the guest. Left out are those at whose other end this process is,
	// and clients that have said so ("CONNECT port idle").
	Open, Uses atomic.Uint64
	// Buffered is how many bytes of the guest wait for host clients that do
	// not read.
	Buffered atomic.Uint64
}

// Stats are the counts, which go on.
func (d *Device) Stats() *Stats { return &d.stats }
